"""The Debian package: built, installed, used, removed and purged, on a copy of this machine's system."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine import without_others

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
# Lists the upper layer, which has the files that differ from this machine's system, and also their directories: of
# these only the ones named after zarrfs are listed
NAMES = (
    r"find /mnt \( ! -type d -o -name '*zarrfs*' \) ! -path '/mnt/var/lib/dpkg/*' ! -path '/mnt/var/log/*'"
    " ! -path '/mnt/var/cache/man/*' | sort"
)
# Runs script $3 in a mount namespace of its own, on this system under an overlay that disappears with the namespace
CHROOT = f"""
set -e
{without_others()}mount -t tmpfs layer "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" system "$1/root"
mount --bind /proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount --bind /sys "$1/root/sys"
mount -t tmpfs tmp "$1/root/tmp"
cp "$2" "$1/root/tmp/zarrfs.deb"
rm -f "$1/root/sbin/mount.zarrfs" "$1/root/sbin/mount.fuse.zarrfs"
rm -rf "$1/root/var/cache/zarrfs" "$1/root/etc/zarrfs" "$1/root/var/lib/man-db/auto-update"  # the last for mandb(8)
mount --bind "$1/upper" "$1/root/mnt"
exec chroot "$1/root" /bin/bash -ec "$3"
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the package from this checkout with the smallest extra."""
    for program in ("dpkg-deb", "/usr/bin/python3"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}: this is no Debian")
    into = tmp_path_factory.mktemp("deb")
    environment = {**os.environ, "DEB_COMPRESSION": "none"}
    del environment["XDG_CACHE_HOME"]  # the tests' own; pip's default cache has a compiled pyfuse3
    subprocess.run([ROOT / "scripts/build-deb", "--extras", "netcdf", into], env=environment, check=True, timeout=600)
    (found,) = into.glob("zarrfs_*.deb")
    return found


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[Path]:
    """Make an empty directory for on_a_copy()."""
    made = tmp_path / "layer"
    made.mkdir()
    yield made
    made.rmdir()


def on_a_copy(package: Path, layer: Path, script: str) -> str:
    """Run a script as root on a copy of the system, with the package as /tmp/zarrfs.deb; return its output."""
    words = ["unshare", "--mount", "--propagation", "private", "bash", "-c", CHROOT]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
    command = [*words, "chroot", layer, package, script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(700)
def test_the_package_has_all_files(package: Path) -> None:
    listed = subprocess.run(["dpkg-deb", "--contents", package], capture_output=True, text=True, check=True).stdout
    names = {line.split()[5].removeprefix(".") for line in listed.splitlines()}
    for name in (
        "/usr/bin/zarrfs", "/sbin/mount.zarrfs", "/sbin/mount.fuse.zarrfs", "/usr/share/man/man1/zarrfs.1.gz",
        "/usr/share/man/man8/mount.zarrfs.8.gz", "/etc/zarrfs/zarrfs.toml",
        "/lib/systemd/system/zarrfs@.service", "/usr/share/bash-completion/completions/zarrfs",
        "/usr/share/zsh/vendor-completions/_zarrfs", "/usr/share/fish/vendor_completions.d/zarrfs.fish",
        "/usr/share/doc/zarrfs/copyright",
    ):  # fmt: skip
        assert name in names
    assert all(line.split()[1] == "root/root" for line in listed.splitlines())
    assert str(ROOT) not in listed
    fields = subprocess.run(["dpkg-deb", "--field", package], capture_output=True, text=True, check=True).stdout
    assert "Depends: python3 (>= 3." in fields
    assert "fuse3" in fields
    assert "Maintainer: The zarrfs authors <" in fields


@pytest.mark.parametrize("arguments", [["--extras", "s3,s4"], ["--extras=s4"]])
def test_an_unknown_extra_is_an_error_before_anything_is_built(arguments: list[str], tmp_path: Path) -> None:
    command = [ROOT / "scripts/build-deb", *arguments, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("build-deb: --extras: there is no s4: expected some of all, azure, gcs, ")
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(700)
def test_the_package_installs_works_and_purges_and_a_mount_outlives_it(package: Path, layer: Path) -> None:
    told = on_a_copy(
        package, layer,
        f"""
        {NAMES} > /tmp/before
        dpkg --force-unsafe-io -i /tmp/zarrfs.deb > /dev/null
        mkdir /tmp/mnt
        echo '{{"version": 1, "refs": {{"a/b": "hello"}}}}' > /tmp/refs.json
        cd /
        mount -t zarrfs /tmp/refs.json /tmp/mnt
        cat /tmp/mnt/a/b; echo
        zarrfs umount /tmp/mnt
        echo '/tmp/refs.json /tmp/mnt zarrfs ro,noauto 0 0' > /tmp/fstab
        mount -T /tmp/fstab /tmp/mnt && cat /tmp/mnt/a/b && umount /tmp/mnt; echo
        readlink -f "$(command -v zarrfs)"
        zarrfs info /tmp/refs.json | head -n 2 | tail -n 1
        head -c 1000000 /dev/zero > /tmp/big && mkfifo /tmp/pipe && exec 9<> /tmp/pipe
        echo '{{"version": 1, "refs": {{"big": ["/tmp/big"]}}}}' > /tmp/big.json
        timeout -k 30 -s INT 10 zarrfs cat /tmp/big.json big >&9 || echo "Ctrl-C: $?"
        rm /tmp/pipe /tmp/big /tmp/big.json
        zarrfs doctor | grep mount.zarrfs || true
        man -w zarrfs mount.zarrfs
        grep -l /usr/bin/zarrfs /lib/systemd/system/zarrfs@.service
        echo '# mine' >> /etc/zarrfs/zarrfs.toml
        zarrfs mount /tmp/refs.json /tmp/mnt
        dpkg -r zarrfs > /dev/null
        tail -n 1 /etc/zarrfs/zarrfs.toml
        test ! -e /usr/bin/zarrfs && test ! -e /sbin/mount.zarrfs && test ! -e /usr/lib/zarrfs
        mkdir -p /var/cache/zarrfs/blocks
        dpkg -P zarrfs > /dev/null
        cat /tmp/mnt/a/b; echo
        umount /tmp/mnt
        {NAMES} > /tmp/after
        diff /tmp/before /tmp/after && echo nothing is left
        """,
    )  # fmt: skip
    lines = [line for line in told.splitlines() if "mount.zarrfs:" not in line]
    assert lines[:3] == ["hello", "hello", "/usr/bin/zarrfs"]
    assert lines[3:5] == ["kind:      references", "Ctrl-C: 124"]  # 137: only SIGKILL has ended it
    assert "/usr/share/man/man1/zarrfs.1.gz" in told
    assert "/lib/systemd/system/zarrfs@.service" in told
    assert lines[-3:] == ["# mine", "hello", "nothing is left"]
