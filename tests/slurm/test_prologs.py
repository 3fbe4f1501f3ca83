"""The scripts in scripts/slurm, run on a node as slurmd runs them, when a script or a daemon is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAM
from tests.slurm.cluster import NOBODY, SCRIPTS, Cluster, command_of, is_zarrfs, unavailable, wait_for
from tests.slurm.test_slurm import archive
from tests.slurm.test_slurm import slurm as slurm
from tests.slurm.test_slurm import started as started

REASON = unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}"),
    pytest.mark.timeout(600),  # a cluster starts, and jobs of half a minute run
]
NUMBER = "4711"
PLACE = f"/run/zarrfs-jobs/{NUMBER}"
# Run the program; after `stage`, kill the script that has run it through timeout(1)
KILLING = """#!/bin/sh
"$PROGRAM" "$@"
status=$?
[ "$1" != stage ] || kill -9 "$(cut -d' ' -f4 /proc/$PPID/stat)"
exit $status
"""


def job(user: int = NOBODY, **more: str) -> dict[str, str]:
    """Return the environment of prolog and epilog."""
    return {"SLURM_JOB_ID": NUMBER, "SLURM_JOB_UID": f"{user}", "SLURM_JOB_GID": f"{user}", **more}


def script(
    slurm: Cluster, name: str, user: int = 0, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script of scripts/slurm on n0 as `user`."""
    become = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups") if user else ()
    return slurm.on_node("n0", *become, slurm.scripts / name, **(variables or job()))


def task(slurm: Cluster, stage: str, user: int = NOBODY) -> str:
    """Run the task prolog for a job of `user` that requests `stage`; return its output."""
    return script(slurm, "task_prolog", user, job(user, ZARRFS_STAGE=stage)).stdout


def good(slurm: Cluster) -> str:
    """Return the expected output of the task prolog if all sources are mounted."""
    return f"export ZARRFS_DATASETS={PLACE}/datasets\nexport ZARRFS_STAGED={PLACE}/user\n"


def listed(slurm: Cluster, name: str, user: int = NOBODY) -> str:
    """List a directory as the job's user."""
    become = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    return slurm.on_node("n0", *become, "ls", f"{PLACE}/{name}").stdout


@pytest.fixture
def prolog(slurm: Cluster) -> Iterator[Cluster]:
    """Run the prolog of a job before a test and the epilog after it."""
    assert script(slurm, "prolog").returncode == 0
    yield slurm
    assert script(slurm, "epilog").returncode == 0
    slurm.wait_for_nothing_left()


@pytest.fixture
def settings(slurm: Cluster) -> Iterator[Path]:
    """Return the settings file; restore it afterwards."""
    file = slurm.scripts / "zarrfs.conf"
    before = file.read_text()
    yield file
    file.write_text(before)


@contextlib.contextmanager
def killing(slurm: Cluster, settings: Path) -> Iterator[None]:
    """Let scripts be killed when they have staged something."""
    before = settings.read_text()
    program = slurm.base / "killing"
    program.write_text(KILLING.replace("$PROGRAM", PROGRAM))
    program.chmod(0o755)
    settings.write_text(f"{before}ZARRFS={program}\n")
    yield
    settings.write_text(before)


def kill(slurm: Cluster, what: str) -> None:
    """Send SIGKILL to the zarrfs processes on n0 whose command line contains `what`."""
    victims = [pid for pid in slurm.processes("n0") if is_zarrfs(pid) and what in command_of(pid)]
    assert victims
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{pid}/fd/0").is_symlink() for pid in victims), "their end")


def test_requests_of_a_job_may_have_comments_and_blank_lines(prolog: Cluster) -> None:
    assert task(prolog, f"\n# of last week\n\t\n  #in /nowhere\n  in {archive(prolog)}  \n\n#") == good(prolog)
    assert listed(prolog, "user") == "in\n"
    assert listed(prolog, "user/in") == "job\n"


def test_a_task_waits_for_another_one_as_long_as_all_sources_may_take(prolog: Cluster, settings: Path) -> None:
    """Each source may take TIMEOUT, after up to 20 seconds for checking a mount and removing a dead one."""
    waits = prolog.base / "waits"
    waits.touch()
    waits.chmod(0o666)
    settings.write_text(f'{settings.read_text()}TIMEOUT=60\nflock() {{ echo "$*" >{waits}; command flock "$@"; }}\n')
    assert task(prolog, f"# two\n\none {archive(prolog)}\ntwo {archive(prolog)}") == good(prolog)
    assert waits.read_text() == "-w 160 9\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("kill -9 $$", "zarrfs stage was killed (SIGKILL), perhaps for want of memory"),
        ("exit 139", "zarrfs stage ended with status 139, without a word"),
        ("echo zarrfs: x: no such file >&2; exit 1", "x: no such file"),
    ],
)
def test_the_reason_of_a_failure_is_never_empty_and_a_kill_is_no_timeout(
    command: str, said: str, tmp_path: Path
) -> None:
    code = '. "${0%/*}/common.sh"; TIMEOUT=100; within sh -c "$1" 2>"$2" || reason $? "$2"'
    program = SCRIPTS / "task_prolog"
    words = ["sh", "-euc", code, str(program), command, str(tmp_path / "errors")]
    done = subprocess.run(words, env={"SLURM_JOB_ID": NUMBER}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{said}\n"


@pytest.mark.parametrize("killed", ["", "bin/zarrfs "])
def test_a_mount_with_a_killed_daemon_is_replaced_for_the_next_task(prolog: Cluster, killed: str) -> None:
    """With `killed` empty, all processes of zarrfs are killed, also the one that holds the mount."""
    assert task(prolog, f"in {archive(prolog)}\nother {archive(prolog)}") == good(prolog)
    before = prolog.mounts("n0")
    kill(prolog, killed)
    assert listed(prolog, "user/in") == ""
    assert task(prolog, f"in {archive(prolog)}\nother {archive(prolog)}") == good(prolog)
    assert sorted(prolog.mounts("n0")) == sorted(before)
    assert [listed(prolog, f"user/{name}") for name in ("in", "other")] == ["job\n"] * 2
    assert "other: is mounted already" in task(prolog, f"in {archive(prolog)}\nother /nowhere")


def test_a_mount_that_does_not_answer_is_reported(prolog: Cluster) -> None:
    assert task(prolog, f"in {archive(prolog)}") == good(prolog)
    stopped = [pid for pid in prolog.processes("n0") if is_zarrfs(pid)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert "print zarrfs: in: is mounted, and does not answer\n" in task(prolog, f"in {archive(prolog)}")
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert task(prolog, f"in {archive(prolog)}") == good(prolog)


@pytest.mark.parametrize("then", ["task_prolog", "epilog"])
def test_a_mount_of_a_killed_task_prolog_is_used_or_removed(prolog: Cluster, settings: Path, then: str) -> None:
    with killing(prolog, settings):
        assert "STAGED" not in task(prolog, f"in {archive(prolog)}")
    wait_for(lambda: listed(prolog, "user/in") == "job\n", "the mount")
    if then == "task_prolog":
        assert task(prolog, f"in {archive(prolog)}") == good(prolog)
        assert len(prolog.mounts("n0")) == 1
        assert listed(prolog, "user/in") == "job\n"


@pytest.mark.parametrize("then", ["prolog", "epilog"])
def test_a_mount_of_a_killed_prolog_is_replaced_or_removed(slurm: Cluster, settings: Path, then: str) -> None:
    wanted = job(SLURM_JOB_COMMENT="zarrfs:job")
    with killing(slurm, settings):
        assert script(slurm, "prolog", variables=wanted).returncode != 0
    assert len(slurm.mounts("n0")) == 1
    if then == "prolog":
        assert script(slurm, "prolog", variables=wanted).returncode == 0
        assert listed(slurm, "datasets/job") == "job\n"
    script(slurm, "epilog")
    slurm.wait_for_nothing_left()


@pytest.mark.parametrize("killed", ["the script", "all"])
@pytest.mark.parametrize("name", ["prolog", "task_prolog"])
def test_the_epilog_removes_all_of_a_script_killed_while_it_mounts(
    slurm: Cluster, name: str, killed: str, settings: Path
) -> None:
    """Nothing is left even if processes that the script started keep running for a while."""
    settings.write_text(settings.read_text() + "TIMEOUT=12\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = f"http://127.0.0.1:{silent.getsockname()[1]}/refs.json"
        (slurm.scripts / "datasets").write_text(f"silent {source}\n")
        user, wanted = (0, job(SLURM_JOB_COMMENT="zarrfs:silent"))
        if name == "task_prolog":
            user, wanted = NOBODY, job(ZARRFS_STAGE=f"in {source}")
            assert script(slurm, "prolog").returncode == 0
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
        enter = ["nsenter", "--mount", f"--target={slurm._pid('n0')}", "--"]
        process = subprocess.Popen([*enter, *become, str(slurm.scripts / name)], env=wanted, stdin=subprocess.DEVNULL)
        silent.settimeout(60)
        asking, _ = silent.accept()
        process.kill()
        process.wait()
        if killed == "all":
            kill(slurm, "")
        script(slurm, "epilog")
        assert [one for one in slurm.left() if one.count(" ") == 1] == []  # except processes about to end
        asking.close()  # otherwise they run until TIMEOUT
    slurm.wait_for_nothing_left()


def test_a_job_of_root_leaves_nothing(slurm: Cluster) -> None:
    own = slurm.home / "own"
    assert script(slurm, "prolog", variables=job(0, SLURM_JOB_COMMENT="zarrfs:job")).returncode == 0
    assert task(slurm, f"in {archive(slurm)}", 0) == good(slurm)
    source, options = archive(slurm).split()
    for number in (NUMBER, "4712"):
        done = slurm.on_node("n0", PROGRAM, "stage", "-o", options, source, own / number, SLURM_JOB_ID=number)
        assert done.returncode == 0, done.stderr
    assert script(slurm, "epilog", variables=job(0)).returncode == 0
    assert slurm.mounts("n0") == [f"{own}/4712"]  # the mount of another job
    assert slurm.on_node("n0", PROGRAM, "unstage", own / "4712").returncode == 0


def test_a_job_of_root_that_only_staged_by_itself_leaves_nothing(slurm: Cluster) -> None:
    own = slurm.home / "own"
    assert script(slurm, "prolog", variables=job(0)).returncode == 0
    source, options = archive(slurm).split()
    done = slurm.on_node("n0", PROGRAM, "stage", "-o", options, source, own, SLURM_JOB_ID=NUMBER)
    assert done.returncode == 0, done.stderr
    assert script(slurm, "epilog", variables=job(0)).returncode == 0
    slurm.wait_for_nothing_left()
