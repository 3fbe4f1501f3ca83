"""A machine for tests with users: its own mount and pid namespaces, in which root can change the system's files.

/etc is a copy (users, fuse.conf and fstab may be changed), /home and /run are empty, new files such as mount.zarrfs
can be put into /usr/sbin, and all users may open /dev/fuse. None of this is visible outside. When the machine's first
process exits, all its processes and mounts end, daemons included.

    with Machine() as machine:
        machine.user("ann")
        done = machine.run("zarrfs", "mount", source, "/home/ann/mnt", user="ann")
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROGRAM

ROOT = Path(__file__).parents[1]
_BIN = "/usr/local/bin:/usr/bin:/bin"
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
# Sets up the namespaces; the output "ready" says that they can be used.
_MAKE = """
set -e
umask 022
for place in /mnt /home /run; do mkdir -p $place; mount -t tmpfs -o mode=755 zarrfs-test $place; done
mkdir /mnt/etc /mnt/sbin /mnt/work
tar -C /etc --exclude=./zarrfs -cf - . | tar -C /mnt/etc -xpf -  # other tests make and remove /etc/zarrfs
echo '#user_allow_other' >/mnt/etc/fuse.conf
mount --bind /mnt/etc /etc
mount -t overlay -o lowerdir=/usr/sbin,upperdir=/mnt/sbin,workdir=/mnt/work zarrfs-test /usr/sbin
mount -t tmpfs -o mode=1777 zarrfs-test /var/tmp
mount -t tmpfs -o mode=755 zarrfs-test /var/cache
rm -f /usr/sbin/mount.zarrfs /usr/sbin/mount.fuse.zarrfs
echo ready
exec sleep infinity
"""


def without_others(but: Path | str = "") -> str:
    """Return shell lines that unmount other tests' mounts in a new mount namespace, except those below `but`.

    As long as such a mount exists here, its daemon does not exit, and the other test waits for that.
    """
    return f"'{sys.executable}' -I '{ROOT}/tests/node.py' --alone '{but}'\n"


class Machine:
    """The namespaces; leaving the context kills all their processes."""

    def __enter__(self) -> Machine:
        if os.geteuid() != 0:
            pytest.skip("makes users and mount namespaces")
        places = dict.fromkeys((sys.base_prefix, sys.prefix, str(ROOT)))
        node = [sys.executable, str(ROOT / "tests/node.py"), *places, "--", "sh", "-c", _MAKE]
        self._first = subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc", *node],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._first.stdout is not None
        assert self._first.stderr is not None
        if self._first.stdout.readline() != "ready\n":
            said = self._first.stderr.read()
            self.__exit__()
            pytest.skip(f"no namespaces here: {said}")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
        self.pid = int(children)  # of its first process, as seen from outside
        return self

    def __exit__(self, *_: object) -> None:
        self._first.kill()  # its child, the first process of the namespace, is killed with it
        self._first.communicate()

    def user(self, name: str, runtime: bool = True) -> int:
        """Create a user with a home directory and, if `runtime`, with /run/user/UID; return the uid."""
        self.root(f"useradd --create-home --shell /bin/sh {name} && chmod 700 /home/{name}")
        number = int(self.root(f"id -u {name}"))
        if runtime:
            self.root(f"mkdir -p /run/user && install -d -m 700 -o {name} -g {name} /run/user/{number}")
        return number

    def root(self, script: str, check: bool = True) -> str:
        """Run a script as root and return its output; the script must succeed, unless `check` is false."""
        done = self.run("sh", "-c", script, user="root")
        assert not check or done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def path(self, path: str) -> Path:
        """Return the path by which root reaches a file of the machine from outside."""
        return Path(f"/proc/{self.pid}/root{path}")

    def command(self, *command: object, user: str = "root", **variables: str | None) -> list[str]:
        """Return the command line that runs `command` as `user`, in the user's home, with a login's environment.

        root's working directory is /. "zarrfs" and "python" are those under test. A variable that is None is not set.
        """
        home = "/root" if user == "root" else f"/home/{user}"
        said: dict[str, str | None] = {
            "PATH": _BIN if user != "root" else f"{_SBIN}:{_BIN}", "HOME": home, "USER": user, "LC_ALL": "C.UTF-8",
            **variables,
        }  # fmt: skip
        programs = {"zarrfs": PROGRAM, "python": sys.executable}
        program, *arguments = map(str, command)
        become = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]
        directory = "/" if user == "root" else home
        return [
            "nsenter", f"--target={self.pid}", "--mount", "--pid", "--wdns=/", "--", *become,
            "env", "-i", f"--chdir={directory}",
            *(f"{name}={text}" for name, text in said.items() if text is not None), programs.get(program, program),
            *arguments,
        ]  # fmt: skip

    def run(
        self, *command: object, user: str = "root", timeout: float = 60, **variables: str | None
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line of command() with captured output; do not check its status."""
        return subprocess.run(
            self.command(*command, user=user, **variables), stdin=subprocess.DEVNULL, capture_output=True,
            encoding="utf-8", errors="surrogateescape", timeout=timeout, check=False,
        )  # fmt: skip

    def start(self, *command: object, user: str = "root", **variables: str | None) -> subprocess.Popen[str]:
        """Start a command in its own process group."""
        return subprocess.Popen(
            self.command(*command, user=user, **variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def mounts(self, kind: str = "fuse.zarrfs") -> list[str]:
        """Return the mount points of file systems of the type `kind`."""
        with open(f"/proc/{self.pid}/mountinfo") as file:
            return [line.split(" ")[4] for line in file if f" - {kind} " in line]

    def fuse_conf(self, text: str | None, mode: int = 0o644) -> None:
        """Write `text` to /etc/fuse.conf, or remove the file if `text` is None."""
        path = self.path("/etc/fuse.conf")
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
            path.chmod(mode)
