"""Mounts of a plain user through fusermount3, and the messages where a machine does not allow them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA
from tests.machine import Machine
from tests.mounts.mounting import eventually

SOURCE = DATA / "zarr/v2_hier"
ARCHIVE, BLOBS = DATA / "archives/flux-list.json", DATA / "archives/blobs"
HOME = "/home/ann"
DEFAULT = "# nothing\n#user_allow_other\n"


@pytest.fixture(scope="module")
def built() -> Iterator[Machine]:
    """Start a machine with the users ann and bob."""
    with Machine() as machine:
        machine.user("ann")
        machine.user("bob", runtime=False)
        yield machine


@pytest.fixture
def machine(built: Machine) -> Iterator[Machine]:
    """Return the machine with nothing mounted, and with a directory mnt of ann."""
    built.fuse_conf(DEFAULT)
    built.root(f"install -d -o ann -g ann {HOME}/mnt")
    yield built
    for place in built.mounts():
        built.root(f"umount -l {place}", check=False)
    built.root("chmod 666 /dev/fuse")
    assert not built.mounts()


def ann(machine: Machine, *command: object, **more: str | None) -> tuple[int, str, str]:
    done = machine.run(*command, user="ann", **more)
    return done.returncode, done.stdout, done.stderr


def mount(machine: Machine, *more: object, **variables: str | None) -> tuple[int, str]:
    """Mount on mnt as ann; return the status and standard error."""
    status, _out, err = ann(machine, "zarrfs", "mount", SOURCE, "mnt", *more, **variables)
    return status, err


def test_a_user_mounts_reads_and_unmounts(machine: Machine) -> None:
    assert mount(machine) == (0, "")
    assert machine.mounts() == [f"{HOME}/mnt"]
    options = machine.root("awk '/fuse.zarrfs/ {print $6}' /proc/self/mountinfo").split(",")
    assert {"ro", "nosuid", "nodev"} <= set(options)
    assert ann(machine, "cat", "mnt/.zgroup") == (0, (SOURCE / ".zgroup").read_text(), "")
    assert ann(machine, "stat", "-c", "%U:%G %a", "mnt/.zgroup")[1].startswith("ann:ann ")
    assert ann(machine, "diff", "-r", SOURCE, "mnt") == (0, "", "")
    assert json.loads(ann(machine, "zarrfs", "stats", "--json", "mnt")[1])["opens_total"] > 10
    unmount = f"PATH=/nonexistent exec {machine.command('zarrfs')[-1]} umount mnt"
    assert ann(machine, "sh", "-c", unmount) == (0, "", ""), "fusermount3 is found without PATH"
    assert not machine.mounts()


def test_umount_below_unmounts_only_the_mounts_of_its_user(machine: Machine) -> None:
    assert mount(machine, "-o", "hold") == (0, "")
    assert machine.run("zarrfs", "umount", "--below", "/home").returncode == 0
    assert ann(machine, "cat", "mnt/.zgroup") == (0, (SOURCE / ".zgroup").read_text(), "")
    assert ann(machine, "fusermount3", "-u", "mnt")[0] != 0
    assert ann(machine, "zarrfs", "umount", "--below", ".") == (0, "", "")
    assert not machine.mounts()
    assert ann(machine, "ls", "mnt")[0] != 0  # guarded
    assert machine.run("chmod", "755", f"{HOME}/mnt").returncode == 0


def test_other_users_and_root_may_not_read_a_mount(machine: Machine) -> None:
    machine.root(f"chmod 711 {HOME}")
    assert mount(machine) == (0, "")
    for user in ("bob", "root"):
        done = machine.run("ls", f"{HOME}/mnt", user=user)
        assert (done.returncode, "Permission denied" in done.stderr) == (2, True), user
    for command in ("stats", "refresh"):
        done = machine.run("zarrfs", command, f"{HOME}/mnt")
        assert done.returncode == 1
        assert "allow_root" in done.stderr
        assert done.stderr.count("\n") == 1
    done = machine.run("zarrfs", "umount", f"{HOME}/mnt", user="bob")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert machine.mounts() == [f"{HOME}/mnt"]
    assert machine.run("zarrfs", "umount", f"{HOME}/mnt").returncode == 0, "root unmounts what he cannot read"
    assert not machine.mounts()
    machine.root(f"chmod 700 {HOME}")


def test_allow_other_and_allow_root_decide_who_may_read(machine: Machine) -> None:
    """They need a line of fuse.conf."""
    for text, option in ((None, "allow_other"), (DEFAULT, "allow_root")):
        machine.fuse_conf(text)
        status, err = mount(machine, "-o", option)
        assert (status, err.count("\n")) == (1, 1)
        assert "user_allow_other" in err
    assert not machine.mounts()
    machine.root(f"chmod 711 {HOME}")
    machine.fuse_conf("user_allow_other\n")
    for option, bob in (("allow_other", 0), ("allow_root", 2)):
        assert mount(machine, "-o", option) == (0, "")
        assert machine.run("ls", f"{HOME}/mnt", user="bob").returncode == bob
        assert machine.run("zarrfs", "stats", f"{HOME}/mnt").returncode == 0
        assert ann(machine, "fusermount3", "-u", "mnt") == (0, "", "")
    machine.root(f"chmod 700 {HOME}")


def test_a_machine_that_does_not_allow_mounts_is_explained(machine: Machine) -> None:
    """Each cause is one line on standard error, and nothing is mounted."""
    def refused(*words: str, command: str = f"zarrfs mount {SOURCE} mnt") -> None:
        program, _, rest = command.partition(" ")
        status, _out, err = ann(machine, "sh", "-c", f"exec {machine.command(program)[-1]} {rest}")
        assert (status, err.count("\n")) == (1, 1), err
        assert all(word in err for word in words), err
        assert not machine.mounts()

    machine.fuse_conf("mount_max = 0\n")
    refused("fusermount3: too many FUSE filesystems mounted: root can raise mount_max")
    machine.fuse_conf(DEFAULT)
    machine.root(f"install -d {HOME}/none")
    refused("no write access to mountpoint", "a user mounts only where he may write",
            command=f"zarrfs mount {SOURCE} none")  # fmt: skip
    machine.root("chmod 600 /dev/fuse")
    refused("no permission to use /dev/fuse (mode 0600, owner 0:0): root can chmod 666 /dev/fuse")
    machine.root("chmod 666 /dev/fuse")
    refused("no_new_privs", command=f"setpriv --no-new-privs {machine.command('zarrfs')[-1]} mount {SOURCE} mnt")
    fusermount = shutil.which("fusermount3") or "/usr/bin/fusermount3"
    machine.root(f"cp {fusermount} /mnt/plain && chmod 755 /mnt/plain && mount --bind /mnt/plain {fusermount}")
    try:
        refused("it must be set-user-ID root (chmod u+s)")
    finally:
        machine.root(f"umount {fusermount}")
    directory, name = os.path.split(fusermount)
    machine.root(f"mkdir -p /mnt/up /mnt/up-work && mknod /mnt/up/{name} c 0 0 && mount -t overlay "
                 f"-o lowerdir={directory},upperdir=/mnt/up,workdir=/mnt/up-work none {directory}")  # fmt: skip
    try:
        refused("fusermount3 is not installed (Debian: apt install fuse3)")
    finally:
        machine.root(f"umount -l {directory}")
    machine.root("mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3")
    try:
        refused("there is no /dev/fuse", "--device /dev/fuse --cap-add SYS_ADMIN (docs/mounting.md)")
        machine.root("mknod -m 666 /dev/fuse c 240 229")
        refused("the kernel has no FUSE: modprobe fuse")
    finally:
        machine.root("umount /dev")
    # root in a container that got only the device /dev/fuse
    bare = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", machine.command("zarrfs")[-1])
    done = machine.run(*bare, "mount", SOURCE, f"{HOME}/mnt")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "CAP_SYS_ADMIN is missing (in a container: start the container with" in done.stderr


def test_a_user_can_write(machine: Machine) -> None:
    ann(machine, "mkdir", "up")
    assert mount(machine, "-o", "upperdir=up") == (0, "")
    script = "cd mnt && echo new > new && echo more >> .zattrs && rm .zgroup && mkdir -m 700 dir && mv new dir"
    assert ann(machine, "sh", "-c", script) == (0, "", "")
    assert ann(machine, "zarrfs", "umount", "mnt")[0] == 0
    assert ann(machine, "sh", "-c", "stat -c %U up/.zattrs; cat up/dir/new")[1] == "ann\nnew\n"
    status, err = mount(machine, "-o", "upperdir=up,uid=0")
    assert (status, "option uid=0: only root can make another user the owner" in err) == (2, True)


def test_a_busy_mount_is_refused_and_a_dead_one_is_cleared(machine: Machine) -> None:
    assert mount(machine) == (0, "")
    holder = machine.start("sh", "-c", "cd mnt && echo in && sleep 60", user="ann")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "in\n"
    status, _out, err = ann(machine, "zarrfs", "umount", "mnt")
    assert (status, "in use by pid " in err, "(sleep)" in err or "(sh)" in err) == (1, True, True), err
    machine.root("pkill -u ann sleep; pkill -u ann -x sh", check=False)
    holder.communicate()
    daemon = json.loads(ann(machine, "getfattr", "--only-values", "-n", "user.zarrfs.mount", "mnt")[1])["pid"]
    machine.root(f"kill -9 {daemon}")
    assert eventually(lambda: "not connected" in ann(machine, "ls", "mnt")[2])
    assert mount(machine) == (0, f"zarrfs: {HOME}/mnt: the daemon of the mount there has died: it will be replaced\n")


def test_root_of_a_user_namespace_mounts_without_fusermount3(machine: Machine) -> None:
    """The index goes to the cache below the HOME of the command."""
    if ann(machine, "unshare", "-Urm", "true")[0]:
        pytest.skip("users may make no namespaces here")
    fusermount = shutil.which("fusermount3") or "/usr/bin/fusermount3"
    machine.root(f"mount --bind /bin/false {fusermount}")
    zarrfs = machine.command("zarrfs")[-1]
    try:
        script = f"{zarrfs} mount {ARCHIVE} mnt -o blobs={BLOBS},allow_other && ls mnt/job && {zarrfs} umount mnt"
        status, out, err = ann(machine, "unshare", "-Urm", "sh", "-c", script, HOME=f"{HOME}/within")
        assert (status, out.split()[0], err) == (0, "bin", "")
    finally:
        machine.root(f"umount {fusermount}")
    assert list(machine.path(f"{HOME}/within/.cache/zarrfs/index").glob("*.index"))


def test_sudo_leaves_no_files_of_root_in_the_home_directory(machine: Machine) -> None:
    """sudo may keep the user's HOME; a mount by root then uses root's own directories."""
    before = machine.root(f"find {HOME} -xdev -uid 0 | sort")
    done = machine.run("zarrfs", "mount", ARCHIVE, f"{HOME}/mnt", "-o", f"blobs={BLOBS}", HOME=HOME, SUDO_UID="1000")
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.run("zarrfs", "umount", f"{HOME}/mnt", HOME=HOME).returncode == 0
    assert machine.root(f"find {HOME} -xdev -uid 0 | sort") == before
    assert Path(machine.path("/var/cache/zarrfs/index")).is_dir()
