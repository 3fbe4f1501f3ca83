"""mount.zarrfs SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS]: the helper that mount(8), fstab and autofs run.

Here -f is fake (check, do not mount) and -s sloppy (ignore unknown options). The exit status is mount's:
0 mounted, 1 usage or option, 8 interrupted, 32 any other failure; a failure is one line on stderr.
"""

from __future__ import annotations

import contextlib
import getopt
import os
import re
import sys
from itertools import pairwise

from zarrfs.cli.command_line import hide_secrets
from zarrfs.config.effective import settings
from zarrfs.config.options import TABLE, Parsed, parse, split_commas
from zarrfs.config.redaction import redact_text, without_secrets
from zarrfs.errors import MountError, UsageError, ZarrfsError, behind, internal_error, message_line, reason_of
from zarrfs.system.processes import use_utf8
from zarrfs.system.signals import orderly_end, raise_again

# {option that mount(8) does not pass to its helpers: options that turn it off, which mount(8) does pass}
_NOT_PASSED = {
    "suid": ("nosuid",), "dev": ("nodev",), "exec": ("noexec",), "async": ("sync",),
    "atime": ("noatime", "relatime", "strictatime"),
}  # fmt: skip
USAGE, INTERRUPTED, FAILED = 1, 8, 32


def main(arguments: list[str] | None = None) -> int:
    """Run the helper; return the exit status."""
    if arguments is None:
        use_utf8()
        hide_secrets()
        raise_again()
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
        typed = _typed_to_mount()
        items += [word for word in typed or () if word in _NOT_PASSED and not {*_NOT_PASSED[word]} & {*items}]
        if "remount" in items:  # changes only the options that it names
            _remount(mountpoint, _parse_remount(items, typed, "-s" in given), items, typed is not None, "-f" in given)
            return 0
        # mount(8) adds rw by default, which must not override ro of a file or variable
        if typed is not None and "rw" not in typed:
            items = [item for item in items if item != "rw"]
        effective = settings(items, [source], sloppy="-s" in given)
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


def _typed_to_mount() -> list[str] | None:
    """Return the -o options on the command line of mount(8) if that is the parent process, else None."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", encoding="utf-8", errors="surrogateescape") as file:
            words = file.read().split("\0")
    except OSError:
        return None
    if os.path.basename(words[0]) != "mount":
        return None
    lists = [after for word, after in pairwise(words) if re.fullmatch("-[A-Za-z]*o|--options", word)]
    lists += [found[1] for word in words if (found := re.fullmatch("(?:-[A-Za-z]*o|--options=)(.+)", word, re.DOTALL))]
    rw = ["rw"] if {"-w", "--rw", "--read-write"} & {*words} else []
    return [*(word for text in lists for word in text.split(",")), *rw]


def _parse_remount(items: list[str], typed: list[str] | None, sloppy: bool) -> Parsed:
    """Parse the options of a remount. "rw" counts only if the user typed it: mount(8) adds it unless ro is given."""
    parsed = parse(items, sloppy)
    if typed is not None and "rw" not in typed:
        parsed.writable = False
    return parsed


def _mount(source: str, mountpoint: str, parsed: Parsed, verbose: bool) -> None:
    from zarrfs.daemon.session import mount

    parsed.writable = False  # mount(8) passes ro or rw, so rw need not be the user's choice
    with orderly_end():
        mount(source, mountpoint, parsed, lambda text: print(f"mount.zarrfs: {message_line(text)}", file=sys.stderr))
    if verbose:
        text = message_line(f"{without_secrets(source)} mounted on {mountpoint}")
        with contextlib.suppress(OSError):  # the mount exists even if this line cannot be written
            os.write(1, f"mount.zarrfs: {text}\n".encode())


def _remount(mountpoint: str, parsed: Parsed, items: list[str], whole: bool, fake: bool) -> None:
    """Change options of the daemon and flags of the kernel. A remount never starts a second daemon.

    With `whole` the items come from mount(8), which has added the options of fstab or of the mount table.
    """
    from zarrfs.daemon import control_client
    from zarrfs.system import kernelflags, mounts

    place = mounts.canonical(mountpoint)
    mount = mounts.mount_at(place)
    if mount is None:
        raise MountError(f"{mountpoint}: not mounted")
    if mount.fstype != mounts.FSTYPE:
        raise MountError(f"{mountpoint}: not a mount of zarrfs, but of type {mount.fstype}")
    ours = [item for item in items if "." in item or _name(item) in TABLE]
    now, daemon = kernelflags.flags_of(mount), mounts.daemon_of(mountpoint)
    if parsed.writable and not (daemon or {}).get("writable"):
        why = "its daemon does not answer" if daemon is None else "there is no upper directory to write to"
        raise UsageError(f"cannot remount rw: {why}")
    access = ["ro"] if parsed.options.ro else ["rw"] if parsed.writable else []
    flags = kernelflags.combined(now, [*access, *parsed.kernel], whole)
    if fake:
        return
    if ours and daemon is None:
        raise MountError(f"{mountpoint}: its daemon does not answer")
    if daemon is not None:
        control_client.change(mountpoint, ours)
    if flags != now:
        kernelflags.remount(place, flags)


def _name(item: str) -> str:
    return item.partition("=")[0].strip().replace("-", "_")


def _fail(mountpoint: str, reason: object, status: int) -> int:
    text = redact_text(str(reason))
    where = f"{mountpoint}: " if mountpoint and not text.startswith(f"{mountpoint}: ") else ""
    print(f"mount.zarrfs: {message_line(where + text)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
