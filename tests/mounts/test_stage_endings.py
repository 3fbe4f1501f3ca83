"""`stage` and `unstage` with signals, dead mounts, mount namespaces, renamed directories and damaged records."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.machine import without_others
from tests.mounts.mounting import alive, daemon_pid
from tests.mounts.staging import Node, eventually, is_mounted, kill, one_line
from tests.mounts.staging import node as node
from tests.servers import S3
from tests.servers import s3 as s3
from zarrfs.system import mounts

SOURCE = DATA / "zarr/v2_hier"


def keeper(node: Node) -> int:
    """Return the pid of the holder of the only staged mount."""
    (record,) = node.records()
    pid: int = record["keeper"][0]
    return pid


def kept(node: Node, dest: Path) -> bool:
    """Return whether the mount at `dest` exists and its holder runs."""
    return is_mounted(dest) and [one["state"] for one in node.records()] == ["ready"] and alive(keeper(node))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_unstage_ended_by_a_signal_leaves_the_mount_staged(number: signal.Signals, node: Node) -> None:
    dest = node.path / "input"
    assert run("stage", SOURCE, dest).returncode == 0
    with open(dest / ".zgroup"):
        child = subprocess.Popen([PROGRAM, "unstage", dest, "--timeout", "1m"], stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        assert "waiting" in child.stderr.readline()
        child.send_signal(number)
        assert child.wait(60) != 0
        assert kept(node, dest)
    assert run("unstage", dest).returncode == 0
    assert node.clean()


@pytest.mark.parametrize("how", [["--stale"], ["--all"]])
def test_a_holder_missing_from_its_record_does_not_block_unstage(how: list[str], node: Node) -> None:
    """The process that started the holder was killed before it could record the holder."""
    dest = node.path / "input"
    assert run("stage", SOURCE, dest).returncode == 0
    pid = keeper(node)
    (file,) = node.state.glob("staged/*.json")
    child = subprocess.Popen(["true"])
    child.wait()
    maker = [child.pid, 1]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"keeper": None, "state": "making", "maker": maker}))
    done = run("unstage", *how)
    assert done.returncode == 0, done.stderr
    assert not alive(pid)
    assert node.clean()


def test_a_mount_of_another_mount_namespace_is_left_alone(node: Node) -> None:
    """A job may have a /tmp of its own, which the cleaning process does not see."""
    dest = node.path / "input"
    script = f"{without_others()}'{PROGRAM}' stage '{SOURCE}' '{dest}' && echo up && exec sleep 100"
    job = subprocess.Popen(["unshare", "-m", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    assert not is_mounted(dest)
    assert run("unstage", "--stale").returncode == 0
    assert alive(keeper(node))
    refused = run("unstage", dest)
    assert (refused.returncode, "in another mount namespace, that of pid" in one_line(refused.stderr)) == (1, True)
    assert alive(keeper(node))
    assert run("unstage", dest, program=("nsenter", "-m", "-t", str(job.pid), PROGRAM)).returncode == 0
    assert eventually(node.clean)
    kill(job.pid)
    job.wait()


def test_a_mount_in_a_renamed_directory_can_be_unstaged(node: Node) -> None:
    (node.path / "old").mkdir()
    old, new = node.path / "old/input", node.path / "new/input"
    for name in (old, new):
        assert run("stage", SOURCE, old).returncode == 0
        (node.path / "old").rename(node.path / "new")
        assert run("unstage", "--stale").returncode == 0
        assert kept(node, new)
        assert run("unstage", name).returncode == 0
        assert node.clean()
        new.rmdir()
        (node.path / "new").rename(node.path / "old")


def test_a_record_does_not_match_another_mount_with_its_device_number(node: Node) -> None:
    """The kernel reuses device numbers as soon as they are free."""
    dest, other = node.path / "input", node.path / "other"
    assert run("stage", SOURCE, dest).returncode == 0
    (file,) = (node.state / "staged").glob("*.json")
    text = file.read_text()
    assert run("unstage", dest).returncode == 0
    assert run("stage", SOURCE, other).returncode == 0
    (known,) = node.records()
    file.write_text(json.dumps({**json.loads(text), "device": known["device"]}))
    assert run("unstage", "--stale").returncode == 0
    assert kept(node, other)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "FLUX_JOB_ID", None])
def test_staging_again_replaces_a_dead_mount(
    name: str | None, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name is not None:
        monkeypatch.setenv(name, "12")
    dest = node.path / "input"
    assert run("stage", SOURCE, dest).returncode == 0
    kill(daemon_pid(dest))
    assert eventually(lambda: mounts.is_dead(str(dest)))
    if name is not None:
        with monkeypatch.context() as another:
            another.setenv(name, "13")
            assert "staged there already" in one_line(run("stage", SOURCE, dest).stderr)
    done = run("stage", SOURCE, dest)
    assert (done.returncode, "its daemon has died" in one_line(done.stderr)) == (0, True)
    assert (dest / ".zgroup").read_bytes() == (SOURCE / ".zgroup").read_bytes()
    assert kept(node, dest)


def test_a_damaged_record_does_not_keep_others_from_staging(node: Node) -> None:
    (node.state / "staged").mkdir(parents=True, mode=0o700)
    node.state.chmod(0o700)
    damaged = node.state / "staged/0123456789abcdef.json"
    damaged.write_text("{")
    dest = node.path / "input"
    try:
        assert run("stage", SOURCE, dest).returncode == 0
        assert run("run", SOURCE, "true").returncode == 0
        refused = run("stage", SOURCE, dest)
        assert (refused.returncode, "staged there already" in one_line(refused.stderr)) == (1, True)
        assert run("unstage", dest).returncode == 0
    finally:
        damaged.unlink()
    assert node.clean()


def test_bad_node_local_and_state_directories_are_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run("stage", "--node-local=", SOURCE, node.path / "input")
    assert (refused.returncode, one_line(refused.stderr)) == (2, "zarrfs: --node-local=: expected a directory")
    monkeypatch.setenv("ZARRFS_STATE_DIR", "state")
    for command in (["stage", SOURCE, node.path / "input"], ["unstage", "--all"], ["run", SOURCE, "true"]):
        refused = run(*command, cwd=node.path)
        text = "zarrfs: ZARRFS_STATE_DIR=state: not an absolute path"
        assert (refused.returncode in (2, 125), one_line(refused.stderr)) == (True, text)
    monkeypatch.setenv("ZARRFS_STATE_DIR", str(node.state))
    assert node.clean()


@pytest.mark.parametrize("there", [False, True])
def test_a_stage_that_fails_leaves_no_upper(there: bool, node: Node) -> None:
    upper = node.path / "upper"
    if there:
        upper.mkdir()
    assert run("stage", node.path / "no.json", node.path / "in", "-o", f"upperdir={upper}").returncode == 1
    assert upper.exists() == there
    assert run("stage", SOURCE, node.path / "in", "-o", f"upperdir={upper}").returncode == 0
    assert run("unstage", node.path / "in").returncode == 0
    assert upper.is_dir()  # although the job has written nothing: stage-out may look for the directory


def test_written_files_outlive_a_dead_mount(node: Node) -> None:
    dest, upper = node.path / "work", node.path / "upper"
    assert run("stage", SOURCE, dest, "-o", f"upperdir={upper}").returncode == 0
    (dest / "result").write_text("of the job")
    kill(daemon_pid(dest))
    done = run("stage-out", dest, "--to", node.path / "out")
    assert done.returncode == 0, done.stderr
    assert (node.path / "out/result").read_text() == "of the job"
    refused = run("stage-out", dest, "--merged", "--to", node.path / "all")
    assert (refused.returncode, "--merged needs a staged mount" in one_line(refused.stderr)) == (2, True)


@pytest.mark.parametrize("local", [True, False])
def test_stage_out_keep_going_continues_after_an_unreadable_directory(local: bool, node: Node, s3: S3) -> None:
    """The directory is a mount whose daemon has died, because root can read every other directory."""
    upper = node.path / "upper"
    for name in ("a", "z"):
        (upper / name).mkdir(parents=True)
        (upper / name / "file").write_text(name)
    dead = upper / "dead"
    dead.mkdir()
    assert run("mount", SOURCE, dead).returncode == 0
    kill(daemon_pid(dead))
    options = ",".join(f"s3.{name}={value}" for name, value in s3.options.items())
    to = [node.path / "out"] if local else [f"s3://{s3.bucket}/{node.path.name}", "--option", options]
    try:
        refused = run("stage-out", "--upperdir", upper, "--to", *to)
        assert (refused.returncode, "dead" in one_line(refused.stderr)) == (1, True)
        done = run("stage-out", "--upperdir", upper, "--to", *to, "--keep-going", "--report", "-")
    finally:
        subprocess.run(["umount", "-l", dead], check=True)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["files"], [one["key"].rstrip("/") for one in report["failed"]]) == (2, ["dead"])


@pytest.mark.parametrize("option", ["--report", "--manifest"])
def test_an_unwritable_output_is_refused_before_staging(option: str, node: Node) -> None:
    how = "--copy" if option == "--manifest" else "--mount"
    directory = node.path / "directory"
    directory.mkdir()
    for place in (directory, node.path / "nowhere/file"):
        refused = run("stage", how, SOURCE, node.path / "in", option, place)
        assert refused.returncode in (1, 2)
        assert str(place) in one_line(refused.stderr)
        assert not (node.path / "in").exists()
        assert node.clean()
    assert list(directory.iterdir()) == []


def test_unstage_checks_its_report_path_before_it_unmounts(node: Node) -> None:
    assert run("stage", SOURCE, node.path / "in").returncode == 0
    refused = run("unstage", node.path / "in", "--report", node.path)
    assert (refused.returncode, one_line(refused.stderr)) == (2, f"zarrfs: --report {node.path}: is a directory")
    assert is_mounted(node.path / "in")
