"""mount.zarrfs SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS]: the helper that mount(8), fstab and autofs run.

Here -f is fake (check, do not mount); -s and -n have no effect. The exit status is mount's:
0 mounted, 1 usage or option, 8 interrupted, 32 any other failure; a failure is one line on stderr.
"""

from __future__ import annotations

import contextlib
import getopt
import os
import sys

from zarrfs.cli.command_line import hide_secrets
from zarrfs.config.effective import settings
from zarrfs.config.options import Parsed, split_commas
from zarrfs.config.redaction import redact_text, without_secrets
from zarrfs.errors import UsageError, ZarrfsError, behind, internal_error, message_line, reason_of
from zarrfs.system.processes import use_utf8
from zarrfs.system.signals import orderly_end

USAGE, INTERRUPTED, FAILED = 1, 8, 32


def main(arguments: list[str] | None = None) -> int:
    """Run the helper; return the exit status."""
    if arguments is None:
        use_utf8()
        hide_secrets()
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from zarrfs.cli.streams import open_closed

        open_closed()
    try:
        flags, operands = getopt.gnu_getopt(sys.argv[1:] if arguments is None else arguments, "o:sfnvh")
    except getopt.GetoptError as exc:
        return _fail("", exc, USAGE)
    if len(operands) != 2:
        return _fail("", "usage: mount.zarrfs SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS]", USAGE)
    source, mountpoint = operands
    given = {name for name, _ in flags}
    try:
        items = [item for name, value in flags if name == "-o" for item in split_commas(value)]
        if "remount" in items:
            return _fail(mountpoint, "a mount of zarrfs cannot be remounted: unmount it and mount it again", USAGE)
        # mount(8) adds rw by default, which as a choice of the user would override ro of a configuration file, and
        # suid and dev to user=NAME; where the user gives them, it leaves them out
        items = [item for item in items if item not in ("rw", "suid", "dev")]
        effective = settings(items, [source])
        parsed, [source] = effective.parsed, effective.sources
        if "-f" in given:
            return 0
        _mount(source, mountpoint, parsed, verbose="-v" in given)
    except UsageError as exc:
        return _fail(mountpoint, exc, USAGE)
    except ZarrfsError as exc:
        return _fail(mountpoint, exc, FAILED)
    except KeyboardInterrupt:
        return _fail(mountpoint, "interrupted", INTERRUPTED)
    except OSError as exc:
        return _fail(mountpoint, exc if exc.filename is not None else reason_of(exc), FAILED)
    except Exception as exc:
        if behind(exc) is not None:
            return _fail(mountpoint, "interrupted", INTERRUPTED)
        return _fail(mountpoint, f"{internal_error(exc)} (zarrfs -d mount shows where)", FAILED)
    return 0


def _mount(source: str, mountpoint: str, parsed: Parsed, verbose: bool) -> None:
    from zarrfs.daemon.session import mount

    with orderly_end():
        mount(source, mountpoint, parsed, lambda text: print(f"mount.zarrfs: {message_line(text)}", file=sys.stderr))
    if verbose:
        text = message_line(f"{without_secrets(source)} mounted on {mountpoint}")
        with contextlib.suppress(OSError):  # the mount exists even if this line cannot be written
            os.write(1, f"mount.zarrfs: {text}\n".encode())


def _fail(mountpoint: str, reason: object, status: int) -> int:
    text = redact_text(str(reason))
    where = f"{mountpoint}: " if mountpoint and not text.startswith(f"{mountpoint}: ") else ""
    print(f"mount.zarrfs: {message_line(where + text)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
