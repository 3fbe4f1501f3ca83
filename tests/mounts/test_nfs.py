"""A cache directory on NFS that two daemons share, in User-mode Linux: a kernel with NFS on any machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROGRAM

pytestmark = pytest.mark.nightly
MODULES = Path("/usr/lib/uml/modules")  # where Debian installs them
SBIN = "/usr/sbin:/usr/bin:/sbin:/bin"
NEEDED = {
    "linux.uml": "user-mode-linux", "rpc.nfsd": "nfs-kernel-server", "mount.nfs": "nfs-common", "modprobe": "kmod",
    "rpcbind": "rpcbind",
}  # fmt: skip
GUEST = """#!/bin/sh
export PATH={path} HOME=/run/home LC_ALL=C.UTF-8
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for at in /run /mnt /var/lib/nfs; do mount -t tmpfs tmpfs $at; done
mkdir -p /run/home /run/rpc_pipefs /run/m/lib
mkdir -p /mnt/export /mnt/one /mnt/two /mnt/work /var/lib/nfs/sm /var/lib/nfs/sm.bak
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
ip link set lo up
ln -s {modules} /run/m/lib/modules
for module in fuse sunrpc lockd nfsd nfs nfsv3 nfsv4; do modprobe -d /run/m $module; done
mount -t tmpfs tmpfs /mnt/export
mount -t nfsd nfsd /proc/fs/nfsd
exportfs -i -o rw,no_root_squash,fsid=0,no_subtree_check,insecure 127.0.0.1:/mnt/export
rpcbind -w; rpc.mountd; rpc.statd; rpc.nfsd 4
echo Y > /proc/fs/nfsd/v4_end_grace  # after a start, nobody gets a lock for 90 seconds
for at in one two; do mount -t nfs -o {options},nosharecache 127.0.0.1:{export} /mnt/$at; done
grep -c ' nfs' /proc/mounts >&2
cd /mnt/work
{python} {script} {program} /mnt/work /mnt/one /mnt/two
echo o > /proc/sysrq-trigger
sleep 60
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "export", "most"),
    [
        ("vers=4.2", "/", 1.6),
        ("vers=3", "/mnt/export", 1.6),
        ("vers=3,nolock", "/mnt/export", 1.6),
    ],
)
def test_two_nodes_share_a_cache_directory_on_nfs(options: str, export: str, most: float, tmp_path: Path) -> None:
    """Two NFS mounts without a common page cache act as two nodes. A third zarrfs mount fetches few blocks."""
    missing = [package for program, package in NEEDED.items() if not shutil.which(program, path=SBIN)]
    if missing:
        pytest.skip(f"NFS needs the packages {' '.join(missing)}")
    guest = tmp_path / "init"
    guest.write_text(
        GUEST.format(
            path=SBIN, modules=MODULES, options=options, export=export, python=sys.executable, program=PROGRAM,
            script=Path(__file__).with_name("nfs_guest.py"),
        )
    )  # fmt: skip
    guest.chmod(0o755)
    kernel = subprocess.Popen(
        [
            "linux.uml", "mem=1500M", "rootfstype=hostfs", "rootflags=/", "ro", f"init={guest}", "con=null",
            "con0=fd:0,fd:1", "quiet",
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = kernel.communicate(timeout=500)[0].decode(errors="replace")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(kernel.pid, signal.SIGKILL)
    lines = [line[line.index("{") :] for line in said.splitlines() if '{"values"' in line]
    assert lines, said
    found = json.loads(lines[0])
    assert found["wrong"] == [0, 0, 0]
    assert found["requests"] <= most * found["values"] + 2, found
    assert found["again"] <= found["values"] / 8, found
