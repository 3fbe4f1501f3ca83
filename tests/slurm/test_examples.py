"""docs/examples/slurm-*.sh on a real Slurm: an array with an interrupted job, and a heterogeneous job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import PROGRAM
from tests.slurm.cluster import NOBODY, PATH, ROOT, Cluster, unavailable, wait_for
from tests.slurm.test_slurm import ended
from tests.slurm.test_slurm import slurm as slurm
from tests.slurm.test_slurm import started as started

REASON = unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}"),
    pytest.mark.timeout(600),  # a cluster starts, and jobs of half a minute run
]
KEYS = 40
SLOW = "slow/3"  # the key whose response the server holds back


class Server(ThreadingHTTPServer):
    """A server of targets, each of which repeats its own name; the response for SLOW waits until `go` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[str] = []
        self.go = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        key = self.path[1:]
        self.server.seen.append(key)
        if key == SLOW:
            self.server.go.wait()
        first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        data = bytes_of(key)[first : last + 1]
        with contextlib.suppress(OSError):
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{len(bytes_of(key))}")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", '"1"')
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def bytes_of(key: str) -> bytes:
    return f"{key} ".encode() * 2000


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.go.set()
        made.shutdown()


def submit(slurm: Cluster, example: str, source: object, out: Path, *options: str) -> str:
    """Submit an example as a user does; return the number of the job."""
    path = f"{os.path.dirname(PROGRAM)}:{PATH}"
    done = slurm.user(
        "sbatch", "--parsable", f"--output={slurm.home}/%x-%A-%a.out", *options, ROOT / "docs/examples" / example,
        SOURCE=str(source), OUT=str(out), PATH=path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def copied(out: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(out / "data")): path.read_bytes() for path in (out / "data").rglob("*")
             if path.is_file()}  # fmt: skip
    return {key: data for key, data in found.items() if not key.startswith(".zarrfs")}


def logs(slurm: Cluster, job: str) -> list[str]:
    return [path.read_text() for path in slurm.home.glob(f"*-{job}-*.out")]


def merged(slurm: Cluster, out: Path) -> dict[str, object]:
    done = slurm.user(PROGRAM, "check", "--merge", "--json", *sorted(out.glob("part-*")))
    about: dict[str, object] = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return about


@pytest.mark.parametrize("how", ["cancelled as at the end of its time", "requeued"])
def test_an_interrupted_array_job_is_completed_by_a_second_run(
    slurm: Cluster, server: Server, tmp_path: Path, how: str
) -> None:
    """The second run copies only what is missing."""
    out, refs = slurm.home / how.split()[0], slurm.home / "refs.json"
    keys = [f"k/{number:02}" for number in range(KEYS)] + [SLOW]
    url = f"http://127.0.0.1:{server.server_port}"
    refs.write_text(json.dumps({"version": 1, "refs": {key: [f"{url}/{key}", 0, len(bytes_of(key))] for key in keys}}))
    job = submit(slurm, "slurm-array.sh", refs, out, "--array=0-1")
    wait_for(lambda: SLOW in server.seen and len(slurm.jobs("PD,CF,R,CG")) == 1, "one job", lambda: server.seen)
    (broken_off,), (part,) = slurm.jobs("R"), out.glob("part-*")
    if how == "requeued":
        slurm.control("requeue", broken_off)
    else:
        assert slurm.user("scancel", broken_off).returncode == 0
    wait_for(lambda: not slurm.jobs("R,CG"), "the end of the job")
    assert KEYS / 2 - 1 <= len(copied(out)) < len(keys)
    before, asked = part.stat().st_ino, len(server.seen)
    times = {path: path.stat().st_ino for path in (out / "data").rglob("*") if path.is_file()}
    server.go.set()
    if how == "requeued":
        wait_for(lambda: slurm.states() == {"idle"}, "idle nodes", slurm.states)
        # Slurm delays the job by two minutes: a node refuses one that it killed in the same second: "already killed"
        wait_for(lambda: slurm.jobs("PD"), "the job to wait for its second run")
        time.sleep(2)
        slurm.control("update", f"JobId={broken_off}", "StartTime=now")
    else:
        job = submit(slurm, "slurm-array.sh", refs, out, "--array=0-1")
    wait_for(lambda: len(server.seen) > asked, "the second run", lambda: (slurm.log("n0"), slurm.log("n1")))
    ended(slurm, job)
    assert copied(out) == {key: bytes_of(key) for key in keys}, logs(slurm, job)
    assert all(path.stat().st_ino == ino for path, ino in times.items() if ".zarrfs-staging" not in str(path))
    assert part.stat().st_ino == before
    again = set(server.seen[asked:])
    assert len(again) <= KEYS / 2 + 1, again  # only of its own share: the other share has a report
    assert [log for log in logs(slurm, job) if "zarrfs: " in log] == []
    about = merged(slurm, out)
    assert (about["ok"], about["parts"], about["missing_parts"]) == (len(keys), 2, [])


def test_the_components_of_a_heterogeneous_job_share_a_copy(slurm: Cluster, tmp_path: Path) -> None:
    out = slurm.home / "het"
    source = slurm.base / "store.zarr"
    source.mkdir(mode=0o755)
    for number in range(30):
        (source / f"{number}").write_bytes(b"x" * 100 * number)
    script = (ROOT / "docs/examples/slurm-heterogeneous.sh").read_text()
    small = slurm.home / "small.sh"  # the cluster has two CPUs
    small.write_text(script.replace("--ntasks=4", "--ntasks=1").replace("--ntasks=32", "--ntasks=1"))
    job = submit(slurm, str(small), source, out)
    ended(slurm, job)
    (log,) = logs(slurm, job)
    assert re.search(r"^ok +30  ", log, re.MULTILINE), log
    assert sorted(path.name for path in out.glob("part-*")) == ["part-0.json", "part-1.json"]
    assert merged(slurm, out)["parts"] == 2
    assert copied(out).keys() == {f"{number}" for number in range(30)}
    assert (out / "data").stat().st_uid == NOBODY
