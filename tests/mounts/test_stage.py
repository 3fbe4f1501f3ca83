"""`zarrfs stage --mount` and `unstage`: the mount is kept in use until it is unstaged, and nothing is left over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.machine import without_others
from tests.mounts.mounting import alive, daemon_pid, mounted
from tests.mounts.staging import Node, eventually, is_mounted, kill, one_line
from tests.mounts.staging import node as node
from tests.servers import faulty as faulty

SOURCE = DATA / "zarr/v2_hier"
ROOT = Path(__file__).parents[2]


def staged(*arguments: object) -> dict[str, object]:
    """Run `zarrfs stage` and return its report."""
    done = run("stage", SOURCE, *arguments, "--report", "-")
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def unstaged(*arguments: object) -> list[str]:
    """Run `zarrfs unstage`; return the destinations that it has unstaged."""
    done = run("unstage", *arguments, "--report", "-")
    assert done.returncode == 0, done.stderr
    return [one["dest"] for one in json.loads(done.stdout)["unstaged"]]


def test_a_mount_is_kept_in_use_until_it_is_unstaged(node: Node) -> None:
    dest = node.path / "deep/er/input"
    report = staged(dest)
    assert report["mountpoint"] == str(dest)
    assert sorted(os.listdir(dest)) == sorted(name for name in os.listdir(SOURCE) if name != ".zarrfs")
    assert subprocess.run(["umount", dest], capture_output=True, check=False).returncode == 32
    refused = run("umount", dest)
    assert (refused.returncode, "(zarrfs-keeper)" in one_line(refused.stderr)) == (1, True)
    os.kill(daemon_pid(dest), signal.SIGTERM)
    time.sleep(0.3)
    assert is_mounted(dest)
    assert unstaged(dest) == [str(dest)]
    assert node.clean()
    assert not (node.path / "deep").exists()
    assert not any(alive(int(str(report[name]))) for name in ("daemon", "keeper"))


def test_unstage_keeps_a_directory_that_existed_before(node: Node) -> None:
    dest = node.path / "input"
    dest.mkdir()
    staged(dest)
    unstaged(dest)
    assert dest.is_dir()
    assert node.clean()


@pytest.mark.parametrize("what", ["not empty", "file", "mount", "staged", "no source", "upper in use"])
def test_a_failed_stage_leaves_nothing(what: str, node: Node) -> None:
    dest, source, options = node.path / "input", SOURCE, []
    upper = node.path / "upper"
    expected = {
        "not empty": "not empty", "file": "not a directory", "mount": "already a mount point",
        "staged": "staged there already", "no source": "no such file", "upper in use": "in use",
    }[what]  # fmt: skip
    if what == "file":
        dest.touch()
    elif what == "not empty":
        (dest / "sub").mkdir(parents=True)
    elif what == "no source":
        source = node.path / "nothing.json"
    elif what == "mount":
        with mounted(SOURCE, dest):
            done = run("stage", SOURCE, dest)
            assert expected in one_line(done.stderr)
            assert not node.records()
        return
    elif what == "staged":
        staged(dest)
        told = one_line(run("umount", dest).stderr)
        assert told.endswith(f"(zarrfs-keeper); zarrfs stage has put it there: zarrfs unstage {dest}")
    else:
        staged(node.path / "other", "-o", f"upperdir={upper}")
        options = ["-o", f"upperdir={upper}"]
    before = node.records()
    done = run("stage", source, dest, *options)
    assert done.returncode == 1
    assert expected in one_line(done.stderr)
    assert node.records() == before
    assert is_mounted(dest) == (what == "staged")
    assert dest.exists() == (what in ("file", "not empty", "staged"))


def test_node_local_makes_the_destination_a_symlink(node: Node) -> None:
    dest = node.path / "input"
    dest.mkdir(mode=0o750)
    done = run("stage", "--node-local", SOURCE, dest, "--report", "-")  # which takes no value from the next word
    report = json.loads(done.stdout)
    place = Path(str(report["mountpoint"]))
    assert place.parent == node.local
    assert os.readlink(dest) == str(place)
    assert (dest / "gzip/.zarray").read_bytes() == (SOURCE / "gzip/.zarray").read_bytes()
    assert unstaged(place) == [str(dest)]
    assert dest.stat().st_mode & 0o7777 == 0o750
    assert not dest.is_symlink()
    assert node.clean()


def test_a_mount_ends_with_the_process_it_was_staged_for(node: Node) -> None:
    dest, job = node.path / "input", subprocess.Popen(["sleep", "100"])
    staged(dest, "--for", job.pid)
    reader = subprocess.Popen(["sleep", "100"], cwd=dest)
    kill_and_reap(job)
    assert eventually(lambda: [record["state"] for record in node.records()] == ["ending"])
    assert is_mounted(dest)  # a process that the job has left behind still uses the mount
    assert unstaged("--stale") == []
    kill_and_reap(reader)
    assert eventually(node.clean)
    assert not dest.exists()
    gone = run("stage", SOURCE, dest, "--for", job.pid)
    assert "no such process" in one_line(gone.stderr)


def kill_and_reap(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_equal_requests_with_join_share_a_mount(node: Node) -> None:
    dest = node.path / "input"
    with subprocess.Popen(["sleep", "100"]) as one, subprocess.Popen(["sleep", "100"]) as other:
        first = staged(dest, "--join", "--for", one.pid, "-o", "umask=022")
        assert staged(dest, "--join", "--for", other.pid, "-o", "umask=022")["daemon"] == first["daemon"]
        refused = run("stage", SOURCE, dest, "--join", "--for", other.pid, "-o", "view=v3")
        assert (refused.returncode, "is staged there already" in one_line(refused.stderr)) == (1, True)
        kill(one.pid)
        assert is_mounted(dest)
        kill(other.pid)
    assert eventually(node.clean)


def test_the_process_holding_a_mount_is_named_and_waited_for(node: Node) -> None:
    dest = node.path / "input"
    staged(dest, "--job", "7")
    holder = subprocess.Popen(["sleep", "100"], cwd=dest)
    done = run("unstage", "--job", "7")
    assert (done.returncode, f"pid {holder.pid} (sleep)" in one_line(done.stderr)) == (1, True)
    assert run("umount", dest).returncode == 1  # the mount is kept in use as before
    assert eventually(lambda: "zarrfs-keeper" in run("umount", dest).stderr)
    waiting = subprocess.Popen([PROGRAM, "unstage", dest, "--timeout", "60s"], stderr=subprocess.DEVNULL)
    time.sleep(0.5)
    assert waiting.poll() is None
    kill_and_reap(holder)
    assert waiting.wait() == 0
    assert node.clean()
    assert unstaged("--job", "7") == []
    assert run("unstage", dest).returncode == 1


@pytest.mark.parametrize("what", ["daemon", "boot", "owner", "unmounted"])
def test_unstage_removes_stale_mounts(what: str, node: Node) -> None:
    dest, owner = node.path / "input", subprocess.Popen(["sleep", "100"])
    report = staged(dest, "--node-local", *(["--for", owner.pid] if what != "daemon" else []))
    if what == "daemon":
        kill(int(str(report["daemon"])))
    else:
        kill(int(str(report["keeper"])))
    if what in ("boot", "unmounted"):
        subprocess.run(["umount", "-l", str(report["place"])], check=True)
    if what == "boot":
        change(node, report, boot="another")
    if what == "owner":
        assert unstaged("--stale") == []
        kill(node.records()[0]["keeper"][0])  # the one that has replaced the killed one
        kill_and_reap(owner)
    assert unstaged("--stale") == [str(dest)]
    kill_and_reap(owner)
    assert eventually(node.clean)
    assert not dest.is_symlink()


def test_a_dead_mount_stays_an_error_as_long_as_its_job(node: Node) -> None:
    """An unmounted directory would read as fill values; a dead mount is an error."""
    dest, owner = node.path / "input", subprocess.Popen(["sleep", "100"])
    kill(int(str(staged(dest, "--for", owner.pid)["daemon"])))
    assert unstaged("--stale") == []
    with pytest.raises(OSError, match=r"abort|not connected"):
        os.listdir(dest)
    kill_and_reap(owner)
    assert eventually(node.clean)  # the holder has noticed that the job has ended


def change(node: Node, report: dict[str, object], **values: object) -> None:
    """Change values of a record on disk."""
    path = node.state / f"staged/{report['record']}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_holder_that_was_killed_is_replaced(node: Node) -> None:
    dest = node.path / "input"
    keeper = int(str(staged(dest)["keeper"]))
    kill(keeper)
    assert unstaged("--stale") == []
    (record,) = node.records()
    assert record["keeper"][0] != keeper
    assert run("umount", dest).returncode == 1
    unstaged(dest)
    assert node.clean()


def test_a_stopped_daemon_does_not_block_unstage(node: Node) -> None:
    dest = node.path / "input"
    daemon = int(str(staged(dest)["daemon"]))
    os.kill(daemon, signal.SIGSTOP)
    try:
        assert unstaged("--stale") == []
        assert is_mounted(dest)
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert unstaged(dest)
    assert node.clean()


# Runs as `nobody`, in a mount namespace where every user may open /dev/fuse. Python may be installed in a directory
# of root's, so the process is permitted to read all files.
FORBIDDEN = """
set -e
mknod {path}/fuse c 10 229; chmod 666 {path}/fuse; mount --bind {path}/fuse /dev/fuse
mkdir -p {path}/shared; mount -t bpf -o uid=65534,gid=65534,mode=755 none {path}/shared || exit 77
chown -R 65534 {path}
exec setpriv --inh-caps=+dac_read_search --ambient-caps=+dac_read_search --reuid=65534 --regid=65534 --clear-groups \
    sh -c '{program} stage {source} {path}/shared/input && readlink {path}/shared/input &&
    cat {path}/shared/input/gzip/.zarray && {program} unstage {path}/shared/input && ! test -L {path}/shared/input'
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace is root's to make")
def test_stage_makes_a_symlink_where_fusermount3_refuses_to_mount(node: Node) -> None:
    """The set-user-ID program refuses file systems of an unknown type to all users but root."""
    os.chmod(node.path, 0o755)
    for parent in list(node.path.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o055 if parent != Path("/tmp") else 0o1777)
    script = without_others() + FORBIDDEN.format(path=node.path, program=PROGRAM, source=SOURCE)
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel lets nobody but root own a bpf file system")
    assert done.returncode == 0, done.stderr
    assert "fusermount3 does not mount on its file system (type 0xcafe4a11)" in one_line(done.stderr)
    assert done.stdout.startswith(str(node.local))
    assert (SOURCE / "gzip/.zarray").read_text() in done.stdout


KILLS = int(os.environ.get("ZARRFS_TEST_KILLS", "6"))  # of each kind; 100 for a thorough run


@pytest.mark.parametrize("how", ["--mount", "--copy"])
def test_a_stage_killed_at_any_time_can_be_repeated_or_unstaged(how: str, node: Node) -> None:
    dest = node.path / "input"
    for number in range(KILLS):
        extra = ["--node-local"] if number % 3 == 2 else []
        process = subprocess.Popen([PROGRAM, "stage", how, SOURCE, dest, *extra], stderr=subprocess.DEVNULL)
        time.sleep((number + 0.5) / KILLS * 0.4)
        kill_and_reap(process)
        if number % 2:
            assert run("unstage", "--stale").returncode == 0
            if [record["state"] for record in node.records()] == ["ready"]:  # stage was killed when all was done
                run("unstage", dest)
            assert eventually(node.clean), (number, node.records(), node.processes())
        elif process.returncode:
            done = run("stage", how, SOURCE, dest, *extra)
            if "staged there already" not in done.stderr:  # otherwise stage was killed when all was done
                assert done.returncode == 0, done.stderr
        if not number % 2:
            assert subprocess.run(["diff", "-r", SOURCE, dest], check=False).returncode == 0
            assert run("unstage", dest, "--remove-copies").returncode == 0
        assert eventually(node.clean), (number, node.records(), node.processes())
        shutil.rmtree(dest, ignore_errors=True)


ALL_USERS = """
set -e
mount -t tmpfs none /run; mount -t tmpfs none /mnt
mknod /mnt/fuse c 10 229; chmod 666 /mnt/fuse; mount --bind /mnt/fuse /dev/fuse
mkdir -m 777 /mnt/u; unset ZARRFS_STATE_DIR TMPDIR XDG_RUNTIME_DIR
mkdir /mnt/project; mount --bind {root} /mnt/project
mount -t tmpfs -o mode=1777 none /tmp
case {root} in /tmp/*) mkdir -p {root}; mount --bind /mnt/project {root};; esac
umount /mnt/project; rmdir /mnt/project
as="setpriv --inh-caps=+dac_read_search --ambient-caps=+dac_read_search --reuid=65534 --regid=65534 --clear-groups"
$as env HOME=/mnt/u {program} stage {source} /mnt/u/input
test -d /tmp/zarrfs-65534/staged
mkdir -p /tmp/zarrfs-1/staged; echo '{{"dest": "/mnt/u"}}' >/tmp/zarrfs-1/staged/a.json; ln -s /etc /tmp/zarrfs-2
kill -9 $(sed 's/.*"daemon": .//; s/,.*//' /tmp/zarrfs-65534/staged/*.json)
{program} unstage --stale --report -
if grep -q /mnt/u /proc/self/mountinfo || test -e /mnt/u/input || test -e /tmp/zarrfs-65534; then exit 3; fi
test -e /tmp/zarrfs-1/staged/a.json
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace is root's to make")
def test_root_unstages_the_stale_mounts_of_all_users(node: Node) -> None:
    program = f"{sys.executable} -I -m zarrfs"
    script = without_others() + ALL_USERS.format(program=program, source=SOURCE, root=ROOT)
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["unstaged"]
    assert (one["dest"], one["reason"]) == ("/mnt/u/input", "its daemon has died")
