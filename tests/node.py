"""Set up the current mount namespace as on a node with several users, then execute COMMAND.

    python node.py PATH... -- COMMAND ARGUMENT...
    python node.py --alone DIRECTORY

The first form unmounts the FUSE mounts of other tests, mounts an empty /run and lets all users open /dev/fuse and
read each PATH (the interpreter's, the program's), even a PATH in root's home directory. The second form only unmounts
other tests' FUSE mounts, except those below DIRECTORY.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zarrfs.system import mounts


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], close_fds=False, check=True)


def leave_others(but: str = "") -> None:
    """Unmount the FUSE mounts of other tests, except those below `but`: else they last as long as this namespace."""
    points = [one.mountpoint for one in mounts.mounts() if one.fstype.startswith("fuse")]
    others = [point for point in points if not (but and point.startswith(f"{but}/"))]
    if others:
        subprocess.run(["umount", "-l", *others], capture_output=True, check=False)


def closed(path: Path) -> Path | None:
    """Return the outermost parent directory of `path` that other users cannot search; None if there is none."""
    return next((above for above in reversed(path.parents) if not above.stat().st_mode & 0o001), None)


def open_ways(paths: list[Path]) -> None:
    """Mount a tmpfs over each closed directory, and bind `paths` into it."""
    found = {path: closed(path) for path in paths}
    kept = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in paths if found[path] is not None}
    for descriptor in kept.values():
        os.set_inheritable(descriptor, True)
    for directory in {directory for directory in found.values() if directory is not None}:
        mount("-t", "tmpfs", "-o", "mode=755", "zarrfs-test", str(directory))
    for path, descriptor in kept.items():
        path.mkdir(mode=0o755, parents=True)
        mount("--no-canonicalize", "--bind", f"/proc/self/fd/{descriptor}", str(path))


def main() -> None:
    if sys.argv[1] == "--alone":
        leave_others(*sys.argv[2:])
        return
    end = sys.argv.index("--")
    os.umask(0o022)
    leave_others()
    open_ways([Path(path) for path in sys.argv[1:end]])
    mount("-t", "tmpfs", "-o", "mode=755", "zarrfs-test", "/run")
    fuse = Path("/run/fuse-of-all")
    os.mknod(fuse, 0o020666, os.stat("/dev/fuse").st_rdev)
    fuse.chmod(0o666)
    mount("--bind", str(fuse), "/dev/fuse")
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])


if __name__ == "__main__":
    main()
