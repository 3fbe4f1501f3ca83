"""Lines of the log: text for people, or an object of JSON each. No secrets, no control characters."""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Mapping
from typing import Any

from zarrfs.config.redaction import cleaned
from zarrfs.errors import message_line

NAME = "zarrfs"
_LONGEST = 8000  # characters of a message: every syslog takes that


def message(record: logging.LogRecord) -> str:
    """What a record says, in one line."""
    text = message_line(cleaned(record.getMessage()))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def facts(record: logging.LogRecord) -> dict[str, Any]:
    """What is known of a failure besides: operation, key, url, offset, length, errno, attempt, kind, more."""
    found: Mapping[str, Any] = getattr(record, "facts", {})
    return {name: cleaned(value) if isinstance(value, str) else value for name, value in found.items()}


def text_line(record: logging.LogRecord, stamped: bool = False) -> str:
    """A line for people, which may have a traceback below (of level debug alone); `stamped`: with the local time."""
    stamp = ""
    if stamped:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        stamp = f"{when},{int(record.msecs):03} "
    return f"{stamp}{NAME}[{os.getpid()}]: {record.levelname}: {body(record)}"


def body(record: logging.LogRecord) -> str:
    """What a record says, and the traceback, if it has one, in lines below."""
    return message(record) + _traceback(record)


def json_line(record: logging.LogRecord, about: Mapping[str, str]) -> str:
    """An object of JSON in one line: time (RFC 3339, UTC), level, message, pid, `about` the mount, facts."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    found: dict[str, Any] = {
        "time": f"{when}.{int(record.msecs):03}Z", "level": record.levelname.lower(), "message": message(record),
        "pid": os.getpid(), **about, **facts(record),
    }  # fmt: skip
    if trace := _traceback(record):
        found["traceback"] = trace.lstrip("\n")
    return json.dumps(found)


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return "\n" + cleaned("".join(traceback.format_exception(*record.exc_info))).rstrip("\n")
