"""The mount helper as root: mount(8), fstab, and the conventions of mount helpers."""

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
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mount(8) needs root")


@pytest.fixture(scope="module", autouse=True)
def _helper() -> Iterator[None]:
    """Install the helper with its installer, and uninstall it at the end."""
    before = [path for path in ("/sbin/mount.zarrfs", "/sbin/mount.fuse.zarrfs") if os.path.lexists(path)]
    assert not before, f"{before} exist: uninstall them first (scripts/install-helper --uninstall)"
    script = str(ROOT / "scripts/install-helper")
    subprocess.run([script], check=True, capture_output=True)
    yield
    subprocess.run([script, "--uninstall"], check=True, capture_output=True)


@pytest.fixture
def mnt() -> Iterator[Path]:
    """Yield a mount point outside of pytest's directories, whose names may have characters that fstab forbids."""
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
def test_both_types_can_be_mounted_and_unmounted(fstype: str, mnt: Path) -> None:
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


def test_a_fake_mount_mounts_nothing_and_a_relative_source_is_mounted(mnt: Path) -> None:
    assert mount("-f", "-t", "zarrfs", STORE, mnt).returncode == 0
    assert not mount_lines(mnt)
    done = mount("-t", "zarrfs", "v2_hier", mnt, cwd=STORE.parent)
    assert done.returncode == 0, done.stderr
    assert (mnt / ".zgroup").exists()


def test_errors_have_the_exit_statuses_of_mount(mnt: Path) -> None:
    done = mount("-t", "zarrfs", STORE, mnt, "-o", "blob=/x")
    assert (done.returncode, "did you mean blobs" in done.stderr) == (1, True)
    done = mount("-t", "zarrfs", "/nonexistent", mnt)
    assert done.returncode == 32
    assert done.stderr.startswith(f"mount.zarrfs: {mnt}: /nonexistent: no such file")
    assert done.stderr.count("\n") == 1
    done = mount("-s", "-t", "zarrfs", STORE, mnt)  # as automount(8) does
    assert done.returncode == 0, done.stderr
    done = mount("-t", "zarrfs", STORE, mnt)
    assert done.returncode == 32
    assert "already a mount point" in done.stderr
    assert len(mount_lines(mnt)) == 1


def test_a_remount_is_refused(mnt: Path) -> None:
    assert mount("-t", "zarrfs", STORE, mnt).returncode == 0
    before = mount_lines(mnt)
    done = mount("-o", "remount,noexec", mnt)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "cannot be remounted" in done.stderr
    assert mount_lines(mnt) == before


def flags(mountpoint: Path) -> set[str]:
    """Return the flags of a mount and of its file system, as in mountinfo."""
    [line] = mount_lines(mountpoint)
    return {*line.split(" ")[5].split(","), *line.split()[-1].split(",")}


# options of a mount, flags that are set by them, flags that are not
FLAGS = [
    # mount(8) makes user=ann,exec,suid,dev of the first word
    ("user=ann,noexec,noatime,sync", {"noexec", "nosuid", "nodev", "noatime", "sync"}, set[str]()),
    ("noexec,exec,noatime,relatime,silent,nosymfollow,nodiratime,diratime,loud",
     {"nodev", "nosuid", "relatime", "nosymfollow"}, {"noexec", "noatime", "nodiratime"}),
]


@pytest.mark.parametrize(("words", "on", "off"), FLAGS)
def test_flags_reach_the_mount(words: str, on: set[str], off: set[str], mnt: Path) -> None:
    done = mount("-t", "zarrfs", STORE, mnt, "-o", words)
    assert (done.returncode, done.stderr) == (0, "")
    assert on <= flags(mnt)
    assert not off & flags(mnt)


def test_the_daemon_does_not_keep_the_pipes_of_mount_open(mnt: Path) -> None:
    """$(mount ...) returns only once the daemon has closed the stdout and stderr of mount."""
    done = subprocess.run(
        ["sh", "-c", f"out=$(mount -t zarrfs {STORE} {mnt} 2>&1); echo done"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n"


# -- the system's zarrfs.toml, tested here because the helper has to be installed for it


CONFIGURATION = Path("/etc/zarrfs/zarrfs.toml")


@pytest.fixture
def system_file() -> Iterator[Path]:
    """Yield the path of the system's zarrfs.toml.

    Tests may write only sections about their own sources, because other tests run at the same time.
    """
    assert not CONFIGURATION.exists(), f"{CONFIGURATION} is the machine's own"
    made = not CONFIGURATION.parent.exists()
    CONFIGURATION.parent.mkdir(exist_ok=True)
    yield CONFIGURATION
    CONFIGURATION.unlink(missing_ok=True)
    if made:
        CONFIGURATION.parent.rmdir()


def put(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace the file atomically, as other tests may read it."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.chmod(mode)
    new.rename(path)


def test_the_system_file_names_sources_and_sets_their_options(mnt: Path, system_file: Path) -> None:
    name, store = f"test-{mnt.parent.name}", shutil.copytree(STORE, mnt.parent / "store")
    named = f'[source.{name}]\nsource = "{store}"\numask = "0337"\nuid = 4321\n'
    put(system_file, named, 0o644)
    done = mount("-t", "zarrfs", name, mnt, "-o", "umask=0377")
    assert done.returncode == 0, done.stderr
    [line] = mount_lines(mnt)
    assert f" - fuse.zarrfs {name} " in line  # else `mount -a` would mount a line of fstab a second time
    assert mnt.stat().st_uid == 4321
    assert (mnt / ".zgroup").stat().st_mode & 0o777 == 0o400


def test_secrets_of_fstab_are_not_on_the_daemons_command_line(mnt: Path, system_file: Path) -> None:
    """Neither the secrets that mount(8) passes on nor those in zarrfs.toml."""
    store = shutil.copytree(STORE, mnt.parent / "store")
    put(system_file, f'[storage."s3://{mnt.parent.name}"]\ntoken = "fileshush"\n')
    assert mount("-v", "-t", "zarrfs", store, mnt, "-o", "s3.secret=hush1,s3.key=hush2").returncode == 0
    with open(f"/proc/{daemon_pid(mnt)}/cmdline", "rb") as file:
        shown = file.read()
    assert b"hush" not in shown
    assert b",s3.secret=***" in shown
    assert "hush" not in mount_lines(mnt)[0]
    subprocess.run(["umount", str(mnt)], check=True)
