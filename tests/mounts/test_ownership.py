"""Owners, masks and set-user-ID bits of mounts that several users read."""

from __future__ import annotations

import base64
import json
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machine import Machine

Mount = Callable[..., None]
MNT, UP = "/srv/mnt", "/srv/up"
FILES = {"f644": 0o644, "f600": 0o600, "f640": 0o640, "f004": 0o004, "none": 0}
DIRECTORIES = {"d755": 0o755, "d750": 0o750, "d701": 0o701}


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Start a machine with users ann, bob and cat (in ann's group); /srv/a.json has many modes, a set-user-ID `id`."""
    with Machine() as made:
        for name in ("ann", "bob", "cat"):
            made.user(name)
        made.root(f"usermod -aG ann cat; mount -t tmpfs -o mode=755 none /srv; mkdir {MNT} {UP}")
        program = Path(shutil.which("id") or "/usr/bin/id").read_bytes()
        file = {"encoding": "base64", "data": base64.b64encode(b"text\n").decode()}
        entries = [
            {"path": "id", "mode": 0o106755, "encoding": "base64", "data": base64.b64encode(program).decode()},
            *({"path": name, "mode": 0o100000 | mode, **file} for name, mode in FILES.items()),
            *({"path": name, "mode": 0o040000 | mode} for name, mode in DIRECTORIES.items()),
            *({"path": f"{name}/f", "mode": 0o100644, **file} for name in DIRECTORIES),
            {"path": "shared", "mode": 0o042775},
            {"path": "link", "mode": 0o120777, "data": "f644"},
        ]
        made.path("/srv/a.json").write_text(json.dumps(entries))
        yield made


@pytest.fixture
def mount(machine: Machine) -> Iterator[Mount]:
    """Yield a function that mounts the archive as root with options; unmount the archive afterwards."""

    def mounted(*options: str) -> None:
        done = machine.run("zarrfs", "mount", "/srv/a.json", MNT, "-o", ",".join(("log_level=info", *options)))
        assert (done.returncode, done.stderr) == (0, "")

    yield mounted
    machine.root(f"umount -l {MNT}; rm -rf {UP}; mkdir {UP}", check=False)


def mode_of(machine: Machine, path: str) -> int:
    return stat.S_IMODE(machine.path(path).lstat().st_mode)


def test_the_owner_and_the_mask_decide_which_user_may_read(machine: Machine, mount: Mount) -> None:
    """The kernel decides by the owner and mode that the mount reports."""
    mask = 0o027
    uid, gid = (int(machine.root(f"id -u {name}")) for name in ("bob", "ann"))
    mount("allow_other", f"uid={uid}", f"gid={gid}", f"umask={mask:o}")
    shown = {name: mode & ~mask for name, mode in (FILES | DIRECTORIES).items()}
    assert {name: mode_of(machine, f"{MNT}/{name}") for name in shown} == shown
    status = machine.path(f"{MNT}/f644").stat()
    assert (status.st_uid, status.st_gid) == (uid, gid)
    assert mode_of(machine, f"{MNT}/link") == 0o777
    assert [machine.run("cat", f"{MNT}/f600", user=name).returncode for name in ("ann", "bob", "cat")] == [1, 0, 1]
    assert [machine.run("cat", f"{MNT}/d750/f", user=name).returncode for name in ("bob", "cat")] == [0, 0]


def euid(machine: Machine, path: str) -> str:
    """Let ann execute a copy of `id`; return the user it acts as: "root", "ann", or else its error output."""
    done = machine.run(path, user="ann")
    if "euid=0" in done.stdout or "egid=0" in done.stdout:
        return "root"
    return "ann" if "(ann)" in done.stdout else done.stderr


def test_set_user_id_bits_never_take_effect(machine: Machine, mount: Mount) -> None:
    """ann executes a copy of `id` that is owned by root and has the set-user-ID bit."""
    machine.root("cp /usr/bin/id /srv/id && chmod 6755 /srv/id")
    assert euid(machine, "/srv/id") == "root", "this machine honours the bit, else this test shows nothing"
    mount("allow_other", "suid")
    assert mode_of(machine, f"{MNT}/id") == 0o755
    assert euid(machine, f"{MNT}/id") == "ann"
    machine.root(f"cp -a {MNT}/id /srv/copied")
    assert euid(machine, "/srv/copied") == "ann"
    machine.root(f"umount {MNT}; rm /srv/copied")
    assert "6755" in machine.run("zarrfs", "ls", "-l", "--json", "/srv/a.json").stdout

    mount("allow_other", "suid", f"upperdir={UP}")
    machine.root(f"touch {MNT}/id")
    assert mode_of(machine, f"{UP}/id") == mode_of(machine, f"{MNT}/id") == 0o755
    assert euid(machine, f"{UP}/id") == euid(machine, f"{MNT}/id") == "ann"
    machine.root(f"umount {MNT}")
    mount("allow_other", f"upperdir={UP}")
    machine.root(f"cp {MNT}/id {MNT}/own && chmod u+s {MNT}/own")
    assert mode_of(machine, f"{MNT}/own") == 0o4755, "who made it has said so"
    assert euid(machine, f"{MNT}/own") == "ann", "the mount is nosuid"
    assert mode_of(machine, f"{MNT}/shared") == 0o2775


def test_set_user_id_is_not_written(machine: Machine) -> None:
    """Set-group-ID directories are kept."""
    done = machine.run("env", "-C", "/srv", machine.command("zarrfs")[-1], "copy", "a.json", "/srv/out")
    assert done.returncode == 0, done.stderr
    assert euid(machine, "/srv/out/id") == "ann"
    assert machine.root("stat -c %a /srv/out/shared") == "2775"
    # bob's set-user-ID program, in a mount by root
    machine.root("cd /srv && mkdir of-bob && cp /usr/bin/id of-bob && chown -R bob of-bob && chmod 4755 of-bob/id")
    machine.root("echo '{\"zarr_format\": 2}' > /srv/of-bob/.zgroup")
    done = machine.run("zarrfs", "mount", "/srv/of-bob", MNT, "-o", "suid,allow_other")
    assert done.returncode == 0, done.stderr
    try:
        assert euid(machine, f"{MNT}/id") == "ann", "bob's program would act as root, who mounts"
    finally:
        machine.root(f"umount {MNT}")


def test_masks_of_a_writable_mount(machine: Machine, mount: Mount) -> None:
    """The mask changes the modes that the mount reports, not those in the upper directory."""
    mount("allow_other", f"upperdir={UP}", "umask=077")
    machine.root(f"umask 022; echo new > {MNT}/new; mkdir {MNT}/dir; echo more >> {MNT}/f644; touch {MNT}/d755/f")
    shown = {"new": 0o600, "dir": 0o700, "f644": 0o600, "d755": 0o700, "d755/f": 0o600}
    stored = {"new": 0o644, "dir": 0o755, "f644": 0o644, "d755": 0o755, "d755/f": 0o644}
    assert {name: mode_of(machine, f"{MNT}/{name}") for name in shown} == shown
    assert {name: mode_of(machine, f"{UP}/{name}") for name in stored} == stored
    assert machine.run("cat", f"{MNT}/new", user="ann").returncode == 1
    machine.root(f"chmod 666 {MNT}/new")
    assert (mode_of(machine, f"{MNT}/new"), mode_of(machine, f"{UP}/new")) == (0o600, 0o666)
