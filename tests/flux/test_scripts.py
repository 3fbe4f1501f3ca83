"""scripts/flux without Flux: the shell plugin in a simulated shell (shell.lua), and prolog and epilog run as root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.mounts.mounting import mount_lines, until
from tests.mounts.staging import eventually
from tests.servers import Faulty

ROOT = Path(__file__).parents[2]
SOURCE = f"{DATA}/archives/flux-list.json blobs={DATA}/archives/blobs"
KILLED = "died: zarrfs: in: zarrfs stage was killed (SIGKILL), perhaps for want of memory\n"
JOB = "ƒ2Rj4"
FLUX = """#!/bin/sh
[ "$*" = "job id --to=dec ƒ2Rj4" ] && echo 4711 && exit
[ "$*" = "jobs -n -o {state} 4711" ] && cat "$FLUX_STATE" && exit
echo "flux: unknown command $*" >&2
exit 1
"""
pytestmark = pytest.mark.skipif(shutil.which("lua") is None, reason="no lua here (scripts/setup --test installs it)")


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """Copy scripts/flux with settings, and put a fake flux command beside the copy."""
    place = tmp_path / "scripts"
    shutil.copytree(ROOT / "scripts/flux", place)
    (place / "zarrfs.conf").write_text(f"ZARRFS={PROGRAM}\nJOBS={tmp_path}/jobs\nTIMEOUT=50\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/flux").write_text(FLUX)
    (tmp_path / "bin/flux").chmod(0o755)
    return place


def records(top: Path) -> list[Path]:
    """Return the records of staged sources; their directories may be deleted meanwhile."""
    return [Path(at, name) for at, _, names in os.walk(top / "state") for name in names if name.endswith(".json")]


def job(scripts: Path, stage: str, command: str) -> subprocess.CompletedProcess[str]:
    """Run a job's shell with one task."""
    with shell(scripts, stage, command) as process:
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def shell(scripts: Path, stage: str, command: str) -> subprocess.Popen[str]:
    """Start a job's shell with one task."""
    top = scripts.parent
    variables = {"PATH": f"{top}/bin:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(top)}
    variables |= {"ZARRFS_FLUX_DIR": str(scripts), "FLUX_JOB_ID": JOB, "ZARRFS_STAGE": stage}
    variables |= {"ZARRFS_STATE_DIR": f"{top}/state"}
    return subprocess.Popen(
        ["lua", str(Path(__file__).with_name("shell.lua")), str(scripts / "zarrfs.lua"), command],
        env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def test_a_job_reads_what_its_shell_has_mounted(scripts: Path) -> None:
    read = "echo $ZARRFS_STAGED; cat $ZARRFS_STAGED/in/job/bin/run.sh"
    done = job(scripts, f"# a comment\nin {SOURCE}\n\nagain {SOURCE}\n  # more", read)
    place, _, content = done.stdout.partition("\n")
    assert (content, done.stderr) == (run("cat", SOURCE.split()[0], "job/bin/run.sh").stdout, "")
    assert content
    assert place == f"{scripts.parent}/zarrfs-flux-{os.getuid()}/4711"
    assert not mount_lines(f"{place}/in")
    assert not Path(place).exists()


@pytest.mark.parametrize("killed", [False, True])
def test_shells_of_one_job_on_one_host_share_a_mount(scripts: Path, tmp_path: Path, killed: bool) -> None:
    """The last shell unmounts it. A killed shell counts as ended, even the one that mounted."""
    read = "echo $ZARRFS_STAGED; while [ ! -e {go} ]; do sleep 0.05; done; cat $ZARRFS_STAGED/in/job/bin/run.sh"
    shells = [shell(scripts, f"in {SOURCE}", read.format(go=tmp_path / f"go{rank}")) for rank in range(4)]
    try:
        (place,) = {process.stdout.readline().strip() for process in shells if process.stdout is not None}
        assert len(mount_lines(f"{place}/in")) == 1
        content = run("cat", SOURCE.split()[0], "job/bin/run.sh").stdout
        for rank, process in enumerate(shells):
            if killed and rank % 2 == 0:
                process.kill()
                process.wait()
            (tmp_path / f"go{rank}").touch()  # also for the task of a killed shell
            if not (killed and rank % 2 == 0):
                assert process.communicate(timeout=60) == (content, "")
            assert bool(mount_lines(f"{place}/in")) == (rank < 3)
        assert eventually(lambda: not Path(place).exists() and not records(tmp_path))
    finally:
        for process in shells:
            process.kill()
            process.wait()


def test_shells_that_are_all_killed_leave_nothing(scripts: Path, tmp_path: Path) -> None:
    shells = [shell(scripts, f"in {SOURCE}", "echo $ZARRFS_STAGED; exec sleep 0.5") for _ in range(3)]
    (place,) = {process.stdout.readline().strip() for process in shells if process.stdout is not None}
    for process in shells:
        process.kill()
        process.wait()
    assert eventually(lambda: not mount_lines(f"{place}/in"))
    assert eventually(lambda: not Path(place).exists() and not records(tmp_path))


def test_shells_wait_for_the_shell_that_mounts_and_take_over_if_it_is_killed(
    scripts: Path, tmp_path: Path, faulty: Faulty
) -> None:
    read = "cat $ZARRFS_STAGED/in/job/bin/run.sh"
    document = (DATA / "archives/flux-list.json").read_bytes()
    source = f"{faulty.put('/list.json', document, 'slow')} blobs={DATA}/archives/blobs"
    with shell(scripts, f"in {source}", read) as first:
        until(lambda: records(tmp_path))
        (record,) = records(tmp_path)
        about = json.loads(record.read_text())
        assert about["state"] == "making"
        os.kill(about["maker"][0], signal.SIGSTOP)
        with shell(scripts, f"in {source}", read) as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(1.5)
            os.kill(about["maker"][0], signal.SIGKILL)
            faulty.release()  # children of the killed process still send requests
            assert second.communicate(timeout=60) == (run("cat", SOURCE.split()[0], "job/bin/run.sh").stdout, "")
        out, err = first.communicate(timeout=60)
    assert (out, first.returncode, err) == ("", 1, KILLED)
    assert eventually(lambda: not records(tmp_path))


def test_an_error_of_a_script_has_a_reason(scripts: Path) -> None:
    """Here the script itself exits without a message."""
    (scripts / "stage").write_text("#!/bin/sh\nexit 3\n")
    done = job(scripts, f"in {SOURCE}", "echo ran")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "died: zarrfs: stage: ended with status 3, without a word\n"


def test_a_killed_program_is_reported_as_killed(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "killed").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "killed").chmod(0o755)
    with (scripts / "zarrfs.conf").open("a") as file:
        file.write(f"ZARRFS={tmp_path}/killed\n")
    assert job(scripts, f"in {SOURCE}", "echo ran").stderr == KILLED


def test_an_error_of_the_program_has_a_reason(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "silent").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "silent").chmod(0o755)
    with (scripts / "zarrfs.conf").open("a") as file:
        file.write(f"ZARRFS={tmp_path}/silent\n")
    done = job(scripts, f"in {SOURCE}", "echo ran")
    assert done.stderr == "died: zarrfs: in: zarrfs stage ended with status 3, without a word\n"


def test_a_job_without_requests_stages_nothing(scripts: Path) -> None:
    done = job(scripts, "", "echo ${ZARRFS_STAGED-none}")
    assert (done.stdout, done.stderr) == ("none\n", "")


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("in /nowhere/a.json", "in: /nowhere/a.json: no such file or directory"),
        (f"good {SOURCE}\nin /nowhere/a.json", "in: /nowhere/a.json: no such file or directory"),
        ("../in /nowhere/a.json", "../in: not a name of a directory"),
        ("in", "in: no source; a line is: NAME SOURCE [OPTIONS]"),
        ("in '/$(id)'", "in: "),
    ],
)
def test_a_bad_source_ends_the_job_before_its_tasks(scripts: Path, stage: str, message: str) -> None:
    done = job(scripts, stage, "echo ran")
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"died: zarrfs: {message}" in done.stderr
    assert "uid=" not in done.stderr
    assert not (scripts.parent / f"zarrfs-flux-{os.getuid()}/4711").exists()
    with open("/proc/self/mountinfo") as file:
        assert str(scripts.parent) not in file.read()


def test_a_mount_in_use_is_kept_and_reported(scripts: Path) -> None:
    leave = "cd $ZARRFS_STAGED/in/job && sleep 100 >/dev/null 2>&1 & echo $! $ZARRFS_STAGED"
    done = job(scripts, f"in {SOURCE}", leave)
    pid, place = done.stdout.split()
    assert "in use by pid" in done.stderr
    assert mount_lines(f"{place}/in")
    os.kill(int(pid), 9)
    assert eventually(lambda: not mount_lines(f"{place}/in"))  # by the keeper, as the shell has ended


def test_a_shell_that_is_killed_leaves_nothing(scripts: Path) -> None:
    """Without prolog and epilog, the keeper unmounts when the shell has ended."""
    done = job(scripts, f"in {SOURCE}\nagain {SOURCE}", "echo $ZARRFS_STAGED; kill -9 $PPID")
    place = Path(done.stdout.strip())
    assert eventually(lambda: not (mount_lines(place / "in") or mount_lines(place / "again")))
    assert eventually(lambda: not records(scripts.parent))
    assert eventually(lambda: not place.exists())


def test_unstage_removes_a_directory_although_another_one_is_in_use(scripts: Path, tmp_path: Path) -> None:
    """One directory is the prolog's for the job; the other one was made by an instance within the job."""
    made = tmp_path / "jobs/4711/user"
    own = tmp_path / f"zarrfs-flux-{os.getuid()}/4711"
    source, blobs = SOURCE.split()
    for place, state in (made, made / ".zarrfs"), (own, tmp_path / "state"):
        place.mkdir(parents=True)
        words = ["stage", "--mount", "--job", JOB, "-o", blobs, source, f"{place}/in"]
        run(*words, env={"ZARRFS_STATE_DIR": str(state)})
    variables = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(tmp_path)}
    variables |= {"ZARRFS_STATE_DIR": f"{tmp_path}/state"}
    unstage = [str(scripts / "unstage"), JOB]
    with subprocess.Popen(["sleep", "100"], cwd=made / "in") as reader:
        done = subprocess.run(
            unstage, env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False
        )
        reader.kill()
    assert (done.returncode, "in use by pid" in done.stderr) == (1, True)
    assert (mount_lines(made / "in") != [], mount_lines(own / "in"), own.exists()) == (True, [], False)
    reader.wait()
    subprocess.run(unstage, env=os.environ | variables, timeout=60, check=True)
    assert not mount_lines(made / "in")


NODE_SCRIPT = """
set -eu
export FLUX_JOB_ID=ƒ2Rj4 FLUX_JOB_USERID=65534 PATH="{top}/bin:$PATH"
ours() {{ grep -c " $1/.* - fuse.zarrfs" /proc/self/mountinfo || true; }}
{scripts}/prolog
nobody="setpriv --reuid=65534 --regid=65534 --clear-groups"
place=$($nobody {scripts}/stage ƒ2Rj4 'in {source},pid_file={jobs}/4711/user/pid')
echo "$place $(ours {jobs}) $(stat -c %a:%u "$place")"
$nobody sh -c "cd $place/in && exec sleep 60 >/dev/null 2>&1" & # somebody is there; the shell of the job was killed
until [ "$(readlink /proc/$!/cwd)" = "$place/in" ]; do sleep 0.05; done
{kill}
echo RUN >{top}/state; export FLUX_STATE={top}/state
{scripts}/sweep
ours {jobs}
echo INACTIVE >{top}/state
{scripts}/{end}
echo "$(ours {jobs}) $(ls -A {jobs} | wc -l)"
kill $!
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="prolog and epilog are run as root")
@pytest.mark.parametrize("kill", [":", "kill -9 $(cat $place/pid)"])
@pytest.mark.parametrize("end", ["epilog", "sweep"])
def test_the_epilog_removes_what_a_killed_job_has_left(tmp_path: Path, scripts: Path, kill: str, end: str) -> None:
    """If the epilog does not run, the sweep does the same."""
    tmp_path.chmod(0o755)
    jobs = "/run/zarrfs-jobs"
    (scripts / "zarrfs.conf").write_text(f"ZARRFS={PROGRAM}\nTIMEOUT=50\n")
    script = NODE_SCRIPT.format(top=tmp_path, scripts=scripts, source=SOURCE, jobs=jobs, kill=kill, end=end)
    node = ["unshare", "--mount", "--propagation=private", sys.executable, str(ROOT / "tests/node.py")]
    paths = dict.fromkeys((sys.base_prefix, str(ROOT), str(tmp_path)))
    done = subprocess.run(
        [*node, *paths, "--", "sh", "-c", script], env={**os.environ, "XDG_CACHE_HOME": "/nonexistent"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == f"{jobs}/4711/user 1 700:65534\n1\n0 0\n", done.stderr
