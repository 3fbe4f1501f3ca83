"""Where the log goes: stderr in the foreground, a file or syslog as a daemon."""

from __future__ import annotations

import logging
import logging.handlers
import os

from zarrfs.options import Options

log = logging.getLogger("zarrfs")


def configure(options: Options, foreground: bool) -> None:
    """Send the log of this process to log_file=, else to stderr (foreground) or syslog (daemon)."""
    handler: logging.Handler
    if options.log_file is not None:
        handler = logging.handlers.WatchedFileHandler(options.log_file, errors="backslashreplace")
        stamp = "%(asctime)s "
    elif foreground:
        handler, stamp = logging.StreamHandler(), ""
    elif os.path.exists("/dev/log"):
        handler, stamp = logging.handlers.SysLogHandler("/dev/log"), ""
    else:
        handler, stamp = logging.NullHandler(), ""
    handler.setFormatter(logging.Formatter(stamp + "zarrfs[%(process)d]: %(levelname)s: %(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(options.log_level.upper())


def reopen() -> None:
    """Close a log file, so that the next line opens it anew: logrotate has moved it."""
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.close()
