"""A real Slurm on this machine, without systemd: munged, slurmctld, and two slurmd, each in a mount namespace.

The scripts of docs/examples are its prolog, epilog and task prolog. All its files are in one directory, so several
clusters can run at the same time, also beside an installed Slurm.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.conftest import PROGRAM
from tests.pages import blocks
from tests.servers import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs/examples"
FREEZER = Path("/sys/fs/cgroup/freezer")
NODES = ("n0", "n1")
NOBODY = 65534
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SLURM_CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket
ProctrackType=proctrack/{proctrack}
SlurmdParameters=config_overrides
FirstJobId={first}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_min_interval=10000,batch_sched_delay=0
KillWait=3
MessageTimeout=60
BatchStartTimeout=60
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/%n.pid
SlurmdSpoolDir={base}/spool-%n
StateSaveLocation={base}/state
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n[0-1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{n0},{n1}] CPUs=4
PartitionName=debug Nodes=ALL Default=YES State=UP
"""


def unavailable() -> str | None:
    """Return the reason why no cluster can run here, or None."""
    if os.geteuid() != 0:
        return "not root: slurmd runs jobs of other users"
    for program in ("slurmctld", "slurmd", "munged", "srun", "setpriv", "unshare"):
        if shutil.which(program, path=PATH) is None:
            return f"there is no {program} (scripts/setup --test installs it)"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return "no mount namespaces can be made here" if done.returncode else None


def wait_for(true: Callable[[], object], what: str, instead: Callable[[], object] = lambda: "") -> None:
    """Wait until `true()` is true; after 200 seconds raise AssertionError with the result of `instead()`."""
    end = time.monotonic() + 200
    while not true():
        assert time.monotonic() < end, f"waited in vain for {what}: {instead()}"
        time.sleep(0.05)


class Cluster:
    """A Slurm cluster with the nodes n0 and n1."""

    def __init__(self, proctrack: str) -> None:
        """Start the cluster, which tracks processes by "cgroup" or "linuxproc"; stop() ends all that it starts."""
        self.proctrack = proctrack
        self.base = Path(tempfile.mkdtemp(prefix="zarrfs-slurm-"))
        self.base.chmod(0o1777)
        self.scripts = self.base / "scripts"
        self.scripts.mkdir()
        for script in SCRIPTS.glob("slurm-*"):
            text = script.read_text().replace("/opt/zarrfs/bin", os.path.dirname(PROGRAM))
            (self.scripts / script.name).write_text(text)
            (self.scripts / script.name).chmod(0o755)
        self.home = self.base / "home"
        self.home.mkdir()
        os.chown(self.home, NOBODY, NOBODY)
        self.namespaces: dict[str, str] = {}
        try:
            self._configure()
            self._start_munged()
            self._start("slurmctld")
            for node in NODES:
                paths = dict.fromkeys((sys.base_prefix, str(ROOT)))
                self._start(
                    "unshare", "--mount", "--propagation=private", sys.executable,
                    str(ROOT / "tests/node.py"), *paths, "--", "slurmd", "-N", node,
                )  # fmt: skip
                wait_for(lambda node=node: self._pid(node), f"{node} to start")  # type: ignore[misc]
                self.namespaces[node] = os.readlink(f"/proc/{self._pid(node)}/ns/mnt")
            wait_for(lambda: self.states() == {"idle"}, "idle nodes")
        except BaseException:
            self.stop()
            raise

    def _configure(self) -> None:
        controller, n0, n1 = (free_port() for _ in range(3))
        text = SLURM_CONF.format(
            base=self.base, controller=controller, n0=n0, n1=n1, proctrack=self.proctrack,
            first=1000 + secrets.randbelow(1 << 20),  # several clusters share one tree of cgroups
        )  # fmt: skip
        page = blocks((ROOT / "docs/clusters.md").read_text())
        (lines,) = (block for block in page if block.startswith("Prolog="))
        (self.base / "slurm.conf").write_text(text + lines.replace("/etc/slurm/zarrfs", str(self.scripts)))
        (self.base / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.base / "state").mkdir()

    def _start_munged(self) -> None:
        directory = self.base / "munge"
        directory.mkdir()
        key = directory / "key-file"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        for path in (directory, key):
            shutil.chown(path, "munge", "munge")
        options = [f"--{name}={directory}/{name}" for name in ("socket", "key-file", "seed-file", "log-file")]
        become = ("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups")
        self._start(*become, "munged", *options, f"--pid-file={directory}.pid")

    def _start(self, *command: str) -> None:
        """Run a program that puts itself into the background."""
        done = subprocess.run(
            command, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command[0]}: {done.stderr}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a user who logs in."""
        return {"PATH": PATH, "SLURM_CONF": f"{self.base}/slurm.conf", "LC_ALL": "C.UTF-8", "HOME": str(self.home)}

    def _pid(self, name: str) -> int | None:
        try:
            return int((self.base / f"{name}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def stop(self) -> None:
        """Kill all processes of the cluster, also those that jobs have left, and remove its directory."""
        for pid in filter(None, (self._pid("slurmctld"), self._pid("munge"), *self.processes())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not self.processes(), "the nodes to end")  # their mounts end with them
        shutil.rmtree(self.base)

    def processes(self, *nodes: str) -> list[int]:
        """Return all processes of `nodes`, or of all nodes: daemons, jobs, mounts."""
        wanted = {self.namespaces[node] for node in nodes or self.namespaces}
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/mnt") in wanted:
                    found.append(int(pid))
        return found

    def user(self, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command as the user nobody; capture its output and do not check its status."""
        become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
        return subprocess.run(
            [*become, *map(str, command)], env=self.environment | variables, cwd=self.home, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip

    def jobs(self, states: str, *options: str) -> list[str]:
        """Return the numbers of the jobs in one of `states` from squeue; retry while the controller is busy."""
        while True:
            done = self.user("squeue", "-h", "-t", states, "-o", "%A", *options)
            if done.returncode == 0 or "Invalid job id" in done.stderr:
                return done.stdout.split()

    def control(self, *arguments: str) -> None:
        """Run scontrol as root."""
        done = subprocess.run(
            ["scontrol", *arguments], env=self.environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr

    def states(self) -> set[str]:
        """Return the states of the nodes: "idle", "allocated", "drained: REASON", ..."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T: %E"], env=self.environment, capture_output=True, text=True, check=False
        )
        return {line.removesuffix(": none") for line in done.stdout.splitlines()}

    def exit_code(self, job: str) -> str:
        """Return the exit code of a job that has ended, as scontrol shows it."""
        done = subprocess.run(
            ["scontrol", "show", "job", job], env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout.partition("ExitCode=")[2].split()[0]

    def mounts(self, node: str) -> list[str]:
        """Return the mount points of zarrfs on `node`."""
        with open(f"/proc/{self._pid(node)}/mountinfo") as file:
            return [line.split(" ")[4] for line in file if " - fuse.zarrfs " in line]

    def on_node(self, node: str, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on `node` as slurmd runs a prolog; capture its output and do not check its status."""
        enter = ["nsenter", "--mount", f"--target={self._pid(node)}", "--"]
        return subprocess.run(
            [*enter, *map(str, command)], env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip

    def inside(self, node: str, path: str) -> Path:
        """Return the path by which a path of `node` is reached from here."""
        return Path(f"/proc/{self._pid(node)}/root{path}")

    def left(self) -> list[str]:
        """Return the leftovers of jobs on all nodes: mounts, daemons and directories."""
        found: list[str] = []
        for node in NODES:
            found += [f"{node}: {place}" for place in self.mounts(node)]
            found += [f"{node}: {pid} {command_of(pid)}" for pid in self.processes(node) if is_zarrfs(pid)]
            # the epilog leaves an empty directory of mode 000 while its user has other processes
            jobs = self.inside(node, "/run/zarrfs-jobs").glob("*")
            found += [f"{node}: {job}" for job in jobs if job.stat().st_mode & 0o777 or os.listdir(job)]
        return found

    def wait_for_nothing_left(self) -> None:
        """Wait until nothing of a job is left."""
        wait_for(lambda: not self.left(), "nothing of a job to be left", self.left)

    def log(self, node: str) -> str:
        """Return the logs of slurmd, prolog and epilog."""
        return (self.base / f"{node}.log").read_text()


def is_zarrfs(pid: int) -> bool:
    """Return whether a process is a command or a daemon of zarrfs."""
    return bool(re.search("bin/zarrfs |-m zarrfs ", command_of(pid)))


def command_of(pid: int) -> str:
    """Return the command line of a process, or an empty string if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def cluster(proctrack: str) -> Iterator[Cluster]:
    """Start a cluster; stop it at the end, also after a failure."""
    made = Cluster(proctrack)
    try:
        yield made
    finally:
        made.stop()
