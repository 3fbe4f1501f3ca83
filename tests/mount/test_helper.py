"""mount(8), fstab and the helper's own conventions, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA
from tests.mount.mounting import alive, daemon_pid, mount_lines

ROOT = Path(__file__).parents[2]
STORE = DATA / "zarr/v2_hier"
FSTAB = Path("/etc/fstab")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mount(8) needs root")


@pytest.fixture(scope="module", autouse=True)
def _helper() -> Iterator[None]:
    """The helper as its installer installs it."""
    before = [path for path in ("/sbin/mount.zarrfs", "/sbin/mount.fuse.zarrfs") if os.path.lexists(path)]
    assert not before, f"{before} exist: uninstall them first (scripts/install-helper --uninstall)"
    script = str(ROOT / "scripts/install-helper")
    subprocess.run([script], check=True, capture_output=True)
    yield
    subprocess.run([script, "--uninstall"], check=True, capture_output=True)


@pytest.fixture
def mnt() -> Iterator[Path]:
    """A mount point, outside pytest's directories: fstab knows no blanks or brackets."""
    directory = Path(tempfile.mkdtemp(prefix="zarrfs-test-"))
    path = directory / "mnt"
    path.mkdir()
    yield path
    while mount_lines(path):
        subprocess.run(["umount", "-l", str(path)], check=True)
    shutil.rmtree(directory)


def mount(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["mount", *map(str, arguments)], capture_output=True, text=True, timeout=60, cwd=cwd, env={}, check=False
    )


@pytest.mark.parametrize("fstype", ["zarrfs", "fuse.zarrfs"])
@pytest.mark.promise("S14")
def test_mount_and_umount(fstype: str, mnt: Path) -> None:
    done = mount("-t", fstype, STORE, mnt, "-o", "ro,noatime,x-systemd.automount,_netdev,attr_timeout=5s")
    assert done.returncode == 0, done.stderr
    [line] = mount_lines(mnt)
    assert " - fuse.zarrfs " in line
    options = line.split(" ")[5].split(",")
    assert {"ro", "nosuid", "nodev", "noatime"} <= set(options)
    pid = daemon_pid(mnt)
    assert (mnt / ".zgroup").read_bytes() == (STORE / ".zgroup").read_bytes()
    assert subprocess.run(["umount", str(mnt)], check=False).returncode == 0
    for _ in range(100):
        if not alive(pid):
            break
        subprocess.run(["sleep", "0.05"], check=True)
    assert not alive(pid)


def test_relative_source(mnt: Path) -> None:
    done = mount("-t", "zarrfs", "v2_hier", mnt, cwd=STORE.parent)
    assert done.returncode == 0, done.stderr
    assert (mnt / ".zgroup").exists()


def test_fstab(mnt: Path) -> None:
    before = FSTAB.read_text() if FSTAB.exists() else None
    try:
        FSTAB.write_text((before or "") + f"\n{STORE} {mnt} zarrfs ro,noauto,nofail,x-systemd.automount 0 0\n")
        done = mount(mnt)
        assert done.returncode == 0, done.stderr
        assert len(mount_lines(mnt)) == 1
        FSTAB.write_text((before or "") + f"\n{STORE} {mnt} zarrfs ro,defaults,_netdev 0 0\n")
        done = mount("-a", "-t", "zarrfs,fuse.zarrfs")
        assert done.returncode == 0, done.stderr
        assert len(mount_lines(mnt)) == 1, "mount -a mounted a second time"
    finally:
        FSTAB.write_text(before) if before is not None else FSTAB.unlink()


def test_statuses(mnt: Path) -> None:
    done = mount("-t", "zarrfs", STORE, mnt, "-o", "blob=/x")
    assert (done.returncode, "did you mean blobs" in done.stderr) == (1, True)
    done = mount("-t", "zarrfs", "/nonexistent", mnt)
    assert done.returncode == 32
    assert done.stderr.startswith(f"mount.zarrfs: {mnt}: /nonexistent: no such file")
    assert done.stderr.count("\n") == 1
    done = mount("-s", "-t", "zarrfs", STORE, mnt, "-o", "nosuchoption")
    assert done.returncode == 0, done.stderr
    done = mount("-t", "zarrfs", STORE, mnt)
    assert done.returncode == 32
    assert "already a mount point" in done.stderr
    assert len(mount_lines(mnt)) == 1


def test_fake(mnt: Path) -> None:
    assert mount("-f", "-t", "zarrfs", STORE, mnt).returncode == 0
    assert not mount_lines(mnt)


def test_remount(mnt: Path) -> None:
    assert mount("-t", "zarrfs", STORE, mnt, "-o", "ro").returncode == 0
    done = mount("-o", "remount,ro,noexec", mnt)
    assert done.returncode == 0, done.stderr
    [line] = mount_lines(mnt)
    assert "noexec" in line.split(" ")[5]
    done = mount("-o", "remount,rw", mnt)
    assert done.returncode != 0
    assert "upper" in done.stderr
    [line] = mount_lines(mnt)
    assert "ro" in line.split(" ")[5].split(",")


def test_pipes_are_let_go(mnt: Path) -> None:
    """$(mount ...) returns: the daemon holds neither stdout nor stderr."""
    done = subprocess.run(
        ["sh", "-c", f"out=$(mount -t zarrfs {STORE} {mnt} 2>&1); echo done"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n"
