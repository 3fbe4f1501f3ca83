"""mount.zarrfs: what mount(8), fstab and autofs run. SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS].

Here -f is fake (check, do not mount) and -s sloppy (ignore unknown options). The exit status is mount's:
0 mounted, 1 usage or option, 8 interrupted, 32 any other failure; a failure is one line on stderr.
"""

from __future__ import annotations

import getopt
import os
import subprocess
import sys

from zarrfs.errors import UsageError, ZarrfsError
from zarrfs.options import KERNEL_FLAGS, Parsed, parse, split_commas

USAGE, INTERRUPTED, FAILED = 1, 8, 32


def main(arguments: list[str] | None = None) -> int:
    """Run the helper; returns the exit status."""
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
        parsed = parse(items, sloppy="-s" in given)
        if parsed.remount:
            return _remount(mountpoint, parsed)
        if "-f" in given:
            return 0
        _mount(source, mountpoint, parsed, verbose="-v" in given)
    except UsageError as exc:
        return _fail(mountpoint, exc, USAGE)
    except ZarrfsError as exc:
        return _fail(mountpoint, exc, FAILED)
    except KeyboardInterrupt:
        return _fail(mountpoint, "interrupted", INTERRUPTED)
    return 0


def _mount(source: str, mountpoint: str, parsed: Parsed, verbose: bool) -> None:
    from zarrfs.fuse.session import mount

    parsed.writable = False  # mount(8) says rw whenever nobody said ro
    mount(source, mountpoint, parsed, lambda text: print(f"mount.zarrfs: {text}", file=sys.stderr))
    if verbose:
        print(f"mount.zarrfs: {source} mounted on {mountpoint}")


def _remount(mountpoint: str, parsed: Parsed) -> int:
    """Let the kernel change its own flags: a second daemon is never what a remount means."""
    from zarrfs.fuse import mounts

    writable = bool((mounts.daemon_of(mountpoint) or {}).get("writable"))
    if parsed.writable and not writable:
        raise UsageError("cannot remount rw: there is no upper directory to write to")
    access = "rw" if writable and not parsed.options.ro else "ro"
    flags = ["remount", access, *(flag for flag in parsed.kernel if flag in KERNEL_FLAGS)]
    mount = next((path for path in ("/bin/mount", "/usr/bin/mount") if os.path.exists(path)), "mount")
    return subprocess.run([mount, "-i", "-o", ",".join(flags), "--", mountpoint], check=False).returncode


def _fail(mountpoint: str, reason: object, status: int) -> int:
    text = str(reason)
    where = f"{mountpoint}: " if mountpoint and not text.startswith(f"{mountpoint}: ") else ""
    print(f"mount.zarrfs: {where}{text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
