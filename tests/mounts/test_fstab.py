"""fstab for root and for users, autofs, and the installer, on a test machine."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA
from tests.machine import ROOT, Machine
from tests.mounts.mounting import eventually

INSTALL = f"{ROOT}/scripts/install-helper"
FSTAB = """\
/srv/data/archives/flux-list.json  /mnt/job      zarrfs  ro,nofail,blobs=/srv/data/archives/blobs               0 0
/srv/data/archives/flux-list.json  /mnt/again    zarrfs  ro,nofail,blobs=file:///srv/data/blobs%2C%20of%202026  0 0
/srv/data/v2.zarr                  /mnt/v2       zarrfs  ro,_netdev,nofail,x-systemd.automount                  0 0
/srv/data/gone.json                /mnt/gone     zarrfs  ro,nofail    0 0
/srv/data/v2.zarr                  /home/ann/v2  zarrfs  noauto,user  0 0
"""
MASTER = "/- /etc/auto.direct --timeout=2\n/mnt/sets /etc/auto.sets --timeout=2\n"
DIRECT = "/mnt/v2  -fstype=zarrfs,ro,allow_other  :/srv/data/v2.zarr\n"
INDIRECT = """\
job   -fstype=zarrfs,ro,allow_other,blobs=/srv/data/archives/blobs  :/srv/data/archives/flux-list.json
gone  -fstype=zarrfs,ro,allow_other                                 :/srv/data/gone.json
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Yield a machine with user ann, mount.zarrfs, units, and data sets in /srv/data."""
    with Machine() as made:
        made.user("ann")
        made.root(f"{INSTALL} --units && mount -t tmpfs -o mode=755 none /srv && mkdir /srv/data")
        shutil.copytree(DATA / "archives", made.path("/srv/data/archives"))
        shutil.copytree(DATA / "archives/blobs", made.path("/srv/data/blobs, of 2026"))
        shutil.copytree(DATA / "zarr/v2_hier", made.path("/srv/data/v2.zarr"))
        yield made


@pytest.fixture
def clean(machine: Machine) -> Iterator[Machine]:
    """Yield the machine, and unmount everything afterwards."""
    yield machine
    for place in machine.mounts():
        machine.root(f"umount -l {place}", check=False)


def test_the_lines_of_fstab_are_mounted(clean: Machine) -> None:
    """A line that fails leaves the others alone; a user can mount and unmount the line with "user"."""
    clean.path("/etc/fstab").write_text(FSTAB)
    clean.root("mkdir /mnt/job /mnt/again /mnt/v2 /mnt/gone")
    assert "0 parse errors, 0 errors" in clean.root("findmnt --verify 2>&1", check=False)
    for _ in range(2):
        done = clean.run("mount", "-a")
        assert "/mnt/gone: /srv/data/gone.json: " in done.stderr
        assert sorted(clean.mounts()) == ["/mnt/again", "/mnt/job", "/mnt/v2"]
    assert clean.root("head -n 1 /mnt/again/job/bin/run.sh") == "#!/bin/sh"
    assert clean.root("cat /mnt/v2/.zgroup") == (DATA / "zarr/v2_hier/.zgroup").read_text().strip()
    clean.root("umount -a -t fuse.zarrfs")
    assert clean.run("mkdir", "v2", user="ann").returncode == clean.run("mount", "v2", user="ann").returncode == 0
    assert clean.root("findmnt -no OPTIONS /home/ann/v2").startswith("ro,nosuid,nodev,noexec,")
    assert clean.run("umount", "v2", user="ann").returncode == 0
    assert clean.run("mount", "/mnt/job", user="ann").returncode == 32  # a line without "user"
    assert clean.mounts() == []


@contextlib.contextmanager
def automount(machine: Machine) -> Iterator[subprocess.Popen[str]]:
    """Run autofs with the maps of /etc/auto.master; setsid gives it a process group in the machine's PID namespace."""
    with machine.start("setsid", "automount", "--foreground", "--verbose") as daemon:
        try:
            assert eventually(lambda: len(machine.mounts("autofs")) >= 2)
            yield daemon
        finally:
            machine.root("pkill -TERM -x automount; sleep 0.2", check=False)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(60)
            machine.root("pkill -KILL -x automount", check=False)


@pytest.mark.skipif("autofs" not in Path("/proc/filesystems").read_text(), reason="this kernel has no autofs")
def test_autofs_mounts_on_access_and_expires_mounts(clean: Machine) -> None:
    if shutil.which("automount", path="/usr/sbin:/sbin") is None:
        pytest.skip("there is no automount (package autofs)")
    clean.path("/etc/auto.master").write_text(MASTER)
    clean.path("/etc/auto.direct").write_text(DIRECT)
    clean.path("/etc/auto.sets").write_text(INDIRECT)
    with automount(clean) as daemon:
        assert clean.mounts() == []
        assert clean.run("cat", "/mnt/v2/.zgroup", user="ann").stdout == (DATA / "zarr/v2_hier/.zgroup").read_text()
        assert clean.run("ls", "/mnt/sets/job/job", user="ann").stdout == "bin\nconfig\ninputs\n"
        mounted = "cat /mnt/v2/.zgroup; ls /mnt/sets/job; findmnt -n -o TARGET -t fuse.zarrfs | sort"  # one command
        assert eventually(lambda: clean.root(mounted).endswith("/mnt/sets/job\n/mnt/v2")), "both, before one expires"
        for _ in range(2):
            done = clean.run("ls", "/mnt/sets/gone", user="ann")
            assert done.returncode == 2
            assert done.stderr.endswith(": No such file or directory\n")

        def used_and_listed() -> bool:
            clean.run("ls", "/mnt/sets/job", user="ann")  # mounts it again if it has expired
            return clean.run("ls", "/mnt/sets").stdout == "job\n"

        assert eventually(used_and_listed)
        assert eventually(lambda: clean.mounts() == []), "not expired"
        # in one command, because the mount soon expires again
        daemons = "cat /mnt/v2/.zgroup >/dev/null && ps -eo stat=,comm= | grep -c '^[^Z].* mount.zarrfs' || true"
        assert eventually(lambda: clean.root(daemons) == "1"), "those of expired mounts have not ended"
    assert daemon.stdout is not None
    assert clean.mounts() == clean.mounts("autofs") == []


def test_the_installer_removes_the_files_that_it_installed(machine: Machine) -> None:
    units = "/etc/systemd/system/zarrfs@.service /etc/systemd/user/zarrfs@.service /etc/tmpfiles.d/zarrfs.conf"
    assert machine.root(f"grep -c '=+*{ROOT}/.venv/bin/zarrfs ' {units}", check=False).split() == [
        "/etc/systemd/system/zarrfs@.service:2", "/etc/systemd/user/zarrfs@.service:2",
        "/etc/tmpfiles.d/zarrfs.conf:0",
    ]  # fmt: skip
    assert "/usr/bin/zarrfs" not in machine.root(f"cat {units}")
    assert machine.root("stat -c '%a %U' /var/cache/zarrfs /var/cache/zarrfs/blocks") == "755 root\n700 root"
    machine.root("echo '# mine' >/etc/systemd/system/zarrfs@.service")
    done = machine.run(INSTALL, "--units")
    assert done.returncode == 1
    assert "/etc/systemd/system/zarrfs@.service is not ours" in done.stderr
    machine.root(f"{INSTALL} --uninstall")
    found = "find /etc /usr/sbin -name '*zarrfs*' ! -path '*/multi-user.target.wants/*' ! -path /etc/zarrfs"
    assert machine.root(found) == "/etc/systemd/system/zarrfs@.service"
    machine.root(f"rm /etc/systemd/system/zarrfs@.service && {INSTALL} --units && {INSTALL} --uninstall")
    assert machine.root(found) == ""
