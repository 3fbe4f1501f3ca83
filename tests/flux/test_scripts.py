"""scripts/flux without Flux: the shell plugin in a simulated shell (shell.lua), and prolog and epilog run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.mounts.mounting import mount_lines
from tests.mounts.staging import eventually

ROOT = Path(__file__).parents[2]
SOURCE = f"{DATA}/archives/flux-list.json blobs={DATA}/archives/blobs"
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


NODE_SCRIPT = """
set -eu
export FLUX_JOB_ID=ƒ2Rj4 FLUX_JOB_USERID=65534 PATH="{top}/bin:$PATH"
ours() {{ grep -c " $1/.* - fuse.zarrfs" /proc/self/mountinfo || true; }}
{scripts}/prolog
nobody="setpriv --reuid=65534 --regid=65534 --clear-groups"
place=$($nobody {scripts}/stage ƒ2Rj4 'in {source}')
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
@pytest.mark.parametrize("kill", [":", 'kill -9 $(pgrep -f "zarrfs .*$place/in")'])
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
