"""mount.zarrfs: what mount(8), fstab and autofs run. SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS].

Here -f is fake (check, do not mount) and -s sloppy (ignore unknown options). The exit status is mount's:
0 mounted, 1 usage or option, 8 interrupted, 32 any other failure; a failure is one line on stderr.
"""

from __future__ import annotations

import getopt
import os
import re
import sys
from itertools import pairwise

from zarrfs.cli.command_line import hide_secrets
from zarrfs.config.effective import settings
from zarrfs.config.options import TABLE, Parsed, parse, split_commas
from zarrfs.config.redaction import cleaned, without_secrets
from zarrfs.errors import MountError, UsageError, ZarrfsError, internal_error, message_line, reason_of
from zarrfs.system.signals import raise_again

# Words that mount(8) keeps from its helpers, and what it says where they do not hold
_KEPT = {
    "suid": ("nosuid",), "dev": ("nodev",), "exec": ("noexec",), "async": ("sync",),
    "atime": ("noatime", "relatime", "strictatime"),
}  # fmt: skip
USAGE, INTERRUPTED, FAILED = 1, 8, 32


def main(arguments: list[str] | None = None) -> int:
    """Run the helper; returns the exit status."""
    if arguments is None:
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
        asked = _asked_of_mount()
        items += [word for word in asked or () if word in _KEPT and not {*_KEPT[word]} & {*items}]
        if "remount" in items:  # changes what it names, and nothing else
            _remount(mountpoint, _remounted(items, asked, "-s" in given), items, asked is not None, "-f" in given)
            return 0
        held = settings(items, [source], sloppy="-s" in given)
        parsed, [source] = held.parsed, held.sources
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
        return _fail(mountpoint, f"{internal_error(exc)} (zarrfs -d mount shows where)", FAILED)
    return 0


def _asked_of_mount() -> list[str] | None:
    """The words of -o that mount(8) was started with, if it is who runs us; None where it is somebody else."""
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


def _remounted(items: list[str], asked: list[str] | None, sloppy: bool) -> Parsed:
    """What a remount says; "rw" is no wish of who did not say it, as mount(8) says it whenever nobody said ro."""
    parsed = parse(items, sloppy)
    if asked is not None and "rw" not in asked:
        parsed.writable = False
    return parsed


def _mount(source: str, mountpoint: str, parsed: Parsed, verbose: bool) -> None:
    from zarrfs.daemon.session import mount

    parsed.writable = False  # mount(8) says rw whenever nobody said ro
    mount(source, mountpoint, parsed, lambda text: print(f"mount.zarrfs: {message_line(text)}", file=sys.stderr))
    if verbose:
        print(f"mount.zarrfs: {message_line(f'{without_secrets(source)} mounted on {mountpoint}')}")


def _remount(mountpoint: str, parsed: Parsed, items: list[str], whole: bool, fake: bool) -> None:
    """Let the daemon change what it can, and the kernel its flags: a second daemon is never what a remount means.

    `whole`: the items come from mount(8), which has put in what fstab or the kernel says.
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
    text = cleaned(str(reason))
    where = f"{mountpoint}: " if mountpoint and not text.startswith(f"{mountpoint}: ") else ""
    print(f"mount.zarrfs: {message_line(where + text)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
