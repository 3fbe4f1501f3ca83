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
from tests.mounts.mounting import alive, daemon_pid, mount_lines, until

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
    until(lambda: not alive(pid))  # umount(8) does not wait for it


def test_it_is_mounted_though_nobody_reads_so(mnt: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = ["/sbin/mount.zarrfs", STORE, mnt, "-v"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert mount_lines(mnt)


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


def flags(mountpoint: Path) -> set[str]:
    """The kernel's flags of a mount, and of its file system."""
    [line] = mount_lines(mountpoint)
    return {*line.split(" ")[5].split(","), *line.split()[-1].split(",")}


# what a remount says, and what is on and off after it; one after the other, on one mount
REMOUNTS = [
    ("noexec", {"noexec", "nosuid", "nodev"}, set[str]()),
    ("exec", {"nosuid", "nodev"}, {"noexec"}),
    ("suid", {"nodev"}, {"nosuid"}),
    ("nosuid", {"nosuid", "nodev"}, set[str]()),
    ("dev", {"nosuid"}, {"nodev"}),
    ("nodev,noatime,sync", {"nosuid", "nodev", "noatime", "sync"}, set[str]()),
    ("atime", {"relatime"}, {"noatime"}),
    ("async", {"relatime"}, {"sync"}),
    ("exec,noexec", {"noexec"}, set[str]()),
    ("ro", {"ro", "nosuid", "nodev"}, {"rw"}),
]


@pytest.mark.parametrize("line", ["", "defaults,noauto"])
def test_each_word_of_a_remount_comes_true(mnt: Path, line: str) -> None:
    """With a line of fstab mount(8) passes rw to its helper, without one the ro of the mount."""
    before = FSTAB.read_text() if FSTAB.exists() else None
    try:
        if line:
            FSTAB.write_text((before or "") + f"\n{STORE} {mnt} zarrfs {line} 0 0\n")
        done = mount("-t", "zarrfs", STORE, mnt)
        assert done.returncode == 0, done.stderr
        for words, on, off in REMOUNTS:
            done = mount("-o", f"remount,{words}", mnt)
            assert (done.returncode, done.stderr) == (0, ""), words
            assert on <= flags(mnt), (words, flags(mnt))
            assert not off & flags(mnt), (words, flags(mnt))
        held = flags(mnt)
        for words in ("rw", "dirsync"):
            done = mount("-o", f"remount,{words}", mnt)
            assert done.returncode == 1
            assert done.stderr.count("\n") == 1
            assert words in done.stderr
            assert flags(mnt) == held
    finally:
        if line:
            FSTAB.write_text(before) if before is not None else FSTAB.unlink()


def test_suid_and_dev_reach_the_mount(mnt: Path) -> None:
    assert mount("-t", "zarrfs", STORE, mnt, "-o", "suid,dev,nodev").returncode == 0
    assert "nosuid" not in flags(mnt)
    assert "nodev" in flags(mnt)


def test_a_remount_of_nothing_is_an_error(mnt: Path) -> None:
    command = ["/sbin/mount.zarrfs", STORE, mnt, "-o", "remount"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (32, f"mount.zarrfs: {mnt}: not mounted\n")
    subprocess.run(["mount", "-t", "tmpfs", "none", mnt], check=True)
    try:
        done = subprocess.run([*command, "-o", "ro"], capture_output=True, text=True, check=False, timeout=60)
        assert "ro" not in flags(mnt)
    finally:
        subprocess.run(["umount", mnt], check=True)
    said = f"mount.zarrfs: {mnt}: not a mount of zarrfs, but of type tmpfs\n"
    assert (done.returncode, done.stderr) == (32, said)


def test_pipes_are_let_go(mnt: Path) -> None:
    """$(mount ...) returns: the daemon holds neither stdout nor stderr."""
    done = subprocess.run(
        ["sh", "-c", f"out=$(mount -t zarrfs {STORE} {mnt} 2>&1); echo done"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n"


# -- the system's zarrfs.toml: here, as the helper has to be installed for it


CONFIGURATION = Path("/etc/zarrfs/zarrfs.toml")


@pytest.fixture
def system_file() -> Iterator[Path]:
    """The path of the system's zarrfs.toml. Write only sections of your own sources: other tests run beside you."""
    assert not CONFIGURATION.exists(), f"{CONFIGURATION} is the machine's own"
    made = not CONFIGURATION.parent.exists()
    CONFIGURATION.parent.mkdir(exist_ok=True)
    yield CONFIGURATION
    CONFIGURATION.unlink(missing_ok=True)
    if made:
        CONFIGURATION.parent.rmdir()


def put(path: Path, text: str, mode: int = 0o600) -> None:
    """Write the whole file at once, as others may read it just now."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.chmod(mode)
    new.rename(path)


def test_names_and_sections_of_the_system_file(mnt: Path, system_file: Path) -> None:
    name, store = f"test-{mnt.parent.name}", shutil.copytree(STORE, mnt.parent / "store")
    named = f'[source.{name}]\nsource = "{store}"\nfile_mode = "0440"\n'
    put(system_file, f'{named}[source."{mnt.parent}"]\ndir_mode = "0550"\n', 0o644)
    before = FSTAB.read_text() if FSTAB.exists() else None
    try:
        FSTAB.write_text((before or "") + f"\n{name} {mnt} zarrfs ro,noauto 0 0\n")
        done = mount(mnt)
        assert done.returncode == 0, done.stderr
        [line] = mount_lines(mnt)
        assert f" - fuse.zarrfs {name} " in line
        assert mnt.stat().st_mode & 0o777 == 0o550
        assert (mnt / ".zgroup").stat().st_mode & 0o777 == 0o440
        FSTAB.write_text((before or "") + f"\n{name} {mnt} zarrfs ro 0 0\n")
        assert mount("-a", "-t", "zarrfs,fuse.zarrfs").returncode == 0
        assert len(mount_lines(mnt)) == 1, "mount -a mounted a second time"
    finally:
        FSTAB.write_text(before) if before is not None else FSTAB.unlink()
    subprocess.run(["umount", str(mnt)], check=True)
    done = mount("-t", "zarrfs", name, mnt, "-o", "file_mode=0400")
    assert done.returncode == 0, done.stderr
    assert (mnt / ".zgroup").stat().st_mode & 0o777 == 0o400


def test_secrets_of_fstab_are_not_on_the_daemons_command_line(mnt: Path, system_file: Path) -> None:
    """Neither those that mount(8) hands on, nor those of the file."""
    store = shutil.copytree(STORE, mnt.parent / "store")
    put(system_file, f'[source."{mnt.parent}".storage.s3]\ntoken = "fileshush"\n')
    assert mount("-v", "-t", "zarrfs", store, mnt, "-o", "s3.secret=hush1,s3.key=hush2").returncode == 0
    with open(f"/proc/{daemon_pid(mnt)}/cmdline", "rb") as file:
        shown = file.read()
    assert b"hush" not in shown
    assert b"s3.secret=***,s3.key=***" in shown
    assert "hush" not in mount_lines(mnt)[0]
    subprocess.run(["umount", str(mnt)], check=True)


def test_a_bad_option_of_a_file_mounts_nothing(mnt: Path, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[options]\nretrys = 1\n")
    done = mount("-t", "zarrfs", STORE, mnt, "-o", f"config={tmp_path}/x.toml")
    assert done.returncode == 1
    rule = "[options] retrys: unknown option (did you mean retries?)"
    assert done.stderr == f"mount.zarrfs: {mnt}: {tmp_path}/x.toml: {rule}\n"
    assert not mount_lines(mnt)
