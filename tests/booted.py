"""A booted machine: systemd as process 1, in its own namespaces, with users as in tests.machine.Machine.

    with Booted() as machine:
        machine.root("systemctl start zarrfs@era5")

Its root directory is new, with a copy of /etc in which no unit is enabled. /usr is an overlay: writing to it does not
change the host's. The checkout and the interpreter are bind-mounted read-only. The machine cannot change the kernel or
the clock, and has no devices but pseudo-devices and FUSE's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.machine import Machine, without_others

ROOT = Path(__file__).parents[1]
SYSTEMD = "/lib/systemd/systemd"
_NAMESPACES = ("--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net")
# The parent, in a mount namespace. $1: its own directory. It makes a cgroup, and removes it at the end.
_PARENT = f"""
set -e
{without_others()}""" + """
place=$1
shift
mkdir $place/cgroups
mount -t cgroup2 cgroup2 $place/cgroups
own=$place/cgroups/zarrfs-test-$$
mkdir $own
sh -c 'echo $$ >"$0" && exec "$@"' $own/cgroup.procs "$@" &
echo $! >$place/pid
cat >/dev/null  # until whoever has started us ends
kill -9 $! || true  # unshare, and with it process 1
while [ -d $own ]; do
    find $own -depth -type d -exec rmdir {} ';' 2>/dev/null || sleep 0.05
done
"""
# Clean up after a parent that was killed. $1: the same directory; $2: the parent's pid
_EMPTIED = """
mount -t cgroup2 cgroup2 $1/cgroups
for _ in $(seq 100); do
    [ -d $1/cgroups/zarrfs-test-$2 ] || exit 0
    find $1/cgroups/zarrfs-test-$2 -depth -type d -exec rmdir {} ';' 2>/dev/null || true
    sleep 0.1
done
exit 1
"""
# Process 1, before it executes systemd. $1: the same directory; further arguments: directories to bind-mount
_FIRST = """
set -e
umask 022
place=$1 root=$1/root
shift
mkdir $root
mount -t tmpfs -o mode=755 machine $root
cd $root
mkdir -p usr proc sys dev run tmp root mnt old home shared srv var/lib var/cache var/log cow/usr cow/work
chmod 1777 tmp
for name in bin sbin lib lib32 lib64; do
    if [ -L /$name ]; then cp -P /$name .; elif [ -d /$name ]; then mkdir $name && mount --bind /$name $name; fi
done
mount -t overlay -o lowerdir=/usr,upperdir=$root/cow/usr,workdir=$root/cow/work usr usr
for path; do
    case $path/ in /usr/*) continue ;; esac
    mkdir -p .$path
    mount --bind $path .$path
    mount -o remount,bind,ro .$path
done
mount --bind $place/shared shared
mkdir -p etc
tar -C /etc --exclude=./zarrfs -cf - . | tar -C etc -xpf -  # other tests make and remove /etc/zarrfs
rm -rf etc/systemd/system/* etc/init.d etc/rc?.d etc/zarrfs usr/sbin/mount.zarrfs usr/sbin/mount.fuse.zarrfs
: >etc/fstab
: >etc/machine-id
echo machine >etc/hostname
cp -RP $place/files/. .
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 dev dev
for name in null zero full random urandom tty fuse autofs; do
    [ -e /dev/$name ] || continue
    mknod dev/$name c $(printf '%d %d' $(stat -c '0x%t 0x%T' /dev/$name))
    chmod 666 dev/$name
done
mkdir dev/pts
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr
mount -t tmpfs -o mode=755 run run
pivot_root . old
umount -l old
mount --make-rshared /  # as on any machine; systemd does not do it in containers
exec env -i container=zarrfs-test PATH=/usr/sbin:/usr/bin \\
    setpriv --bounding-set -sys_module,-sys_time,-sys_rawio,-syslog \\
    /lib/systemd/systemd --system --log-target=console --show-status=no
"""


def unavailable() -> str | None:
    """Return why no machine can be booted here; None if one can."""
    if os.geteuid() != 0:
        return "booting a machine takes root"
    if not os.path.exists(SYSTEMD):
        return f"there is no {SYSTEMD} (package systemd)"
    with tempfile.TemporaryDirectory() as place:
        command = ["unshare", *_NAMESPACES, "--fork", "mount", "-t", "cgroup2", "cgroup2", place]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no machine can be booted here: {done.stderr.strip()}"


class Booted(Machine):
    """The machine; leaving the context kills all its processes.

    `files` are created before it boots: by path, a text or the target (a Path) of a symbolic link. `states` are the
    outputs of `systemctl is-system-running` that are allowed after the boot.
    """

    patience = 30.0  # seconds that the shutdown may take

    def __init__(self, files: Mapping[str, str | Path] | None = None, states: tuple[str, ...] = ("running",)) -> None:
        self._files, self._states = files or {}, states

    def __enter__(self) -> Booted:
        reason = unavailable()
        if reason is not None:
            pytest.skip(reason)
        self._place = Path(tempfile.mkdtemp(prefix="zarrfs-machine-"))
        self.shared = self._place / "shared"  # /shared in the machine; still exists after it has powered off
        self.shared.mkdir()
        (self._place / "files").mkdir()
        for name, content in self._files.items():
            file = self._place / "files" / name.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                file.symlink_to(content)
            else:
                file.write_text(content)
                file.chmod(0o755 if content.startswith("#!") else 0o644)
        self.bound = dict.fromkeys(map(os.path.realpath, (str(ROOT), sys.base_prefix, sys.prefix)))  # a set, in order
        first = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--propagation", "private"]
        first += ["bash", "-c", _FIRST, "first", str(self._place), *self.bound]
        parent = ["unshare", "--mount", "--propagation", "private", "bash", "-c", _PARENT, "parent", str(self._place)]
        with open(self._place / "console", "w") as console:
            self._parent = subprocess.Popen(
                [*parent, *first], stdin=subprocess.PIPE, stdout=console, stderr=console, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            print((self._place / "console").read_text())  # pytest shows the output of a failed test
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._parent.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._parent.stdin.close()
        try:
            self._parent.wait(self.patience)
        except subprocess.TimeoutExpired:
            self._kill()
            raise
        finally:
            shutil.rmtree(self._place, ignore_errors=True)

    def _kill(self) -> None:
        """Kill all processes if the parent has not: mounts disappear with the last process of their namespace."""
        with contextlib.suppress(OSError, ValueError):  # unshare, and with it process 1 of the machine
            os.kill(int((self._place / "pid").read_text()), signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self._parent.pid, signal.SIGKILL)
        self._parent.wait(30)
        command = ["unshare", "--mount", "sh", "-c", _EMPTIED, "sh", self._place, str(self._parent.pid)]
        subprocess.run(command, check=True, timeout=30)

    def _wait(self, seconds: float = 60) -> None:
        """Wait until systemd has started all units of the boot."""
        deadline = time.monotonic() + seconds
        while not self._found():
            assert time.monotonic() < deadline, "the machine has not booted"
            assert self._parent.poll() is None, "the machine has ended"
            time.sleep(0.02)
        state = self.root("systemctl is-system-running --wait", check=False)
        assert state in self._states, state + "\n" + self.root("systemctl --failed --no-pager")

    def _found(self) -> bool:
        """Return whether systemd accepts commands; set `pid` to its process."""
        with contextlib.suppress(OSError, ValueError):
            unshare = int((self._place / "pid").read_text())
            self.pid = int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text())
            return os.path.samefile(f"/proc/{self.pid}/root/shared", self.shared) and os.path.exists(
                f"/proc/{self.pid}/root/run/systemd/private"
            )
        return False

    def ended(self, seconds: float = 30) -> bool:
        """Wait up to `seconds` for the machine to power off; return whether it has."""
        deadline = time.monotonic() + seconds
        while os.path.exists(f"/proc/{self.pid}"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True
