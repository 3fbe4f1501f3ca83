"""Many readers: `scripts/bench many`. Many processes on one mount, and many mounts that share a cache directory.

Every byte that is read is compared by its SHA-256 afterwards. Readers, daemons and the server share the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import peers
import remote_peers
from measures import Result
from remote import in_turns, result
from remote_data import AT_ONCE, CHUNK, HTTP, LATE, Tree, chunk
from remote_peers import Piece, Place
from sets import fsspec

MB = 1e6
VALUE = 32 << 10  # bytes of each of a million values
READS = {"local": 12_288, "remote": 6144}  # keys that all processes read together
PROCESSES = (1, 8, 64)
NODES, NODE_READERS, NODE_CHUNKS = 16, 4, 100
RATE = 8  # MB a second that the server gives a connection

NOTES = f"""\
Processes: random values of {VALUE >> 10} KiB of a set of a million, each read by one of them; a fresh mount for each
sample. Nodes: {NODES} mounts read the same {NODE_CHUNKS} chunks of {CHUNK >> 10} KiB at once, {NODE_READERS} threads
each, from a server that answers after {LATE} ms and gives each connection {RATE} MB/s. Its log tells what it sent.
"""


class Many(Tree):
    """A server that keeps a log, and a large reference set with targets on the server, or in its local files."""

    def __init__(self, directory: Path, size: int, entries: int) -> None:
        super().__init__(directory, size)
        self.entries, self.log = entries, directory / "seen.log"
        self.more = f"access_log {self.log} seen; limit_rate {RATE}m;"

    def large(self, target: str, name: str) -> Path:
        """Return a set of `entries` values in the large file below `target`."""
        path = self.directory / f"{name}.json"
        if not path.exists():
            pieces = self.size // VALUE
            with open(path, "w") as file:
                file.write('{"version": 1, "refs": {".zgroup": "{\\"zarr_format\\":2}"')
                for number in range(self.entries):
                    file.write(f', "{key(number)}": ["{target}/big", {number % pieces * VALUE}, {VALUE}]')
                file.write("}}")
            time.sleep(2.5)  # only a document this old is recognised by its timestamps
        return path

    def seen(self) -> tuple[float, float]:
        """Return (requests per block, bytes sent per byte) since the last call, and truncate the log."""
        sent: dict[str, list[int]] = {}
        for line in self.log.read_text().splitlines():
            block, _, count = line.rpartition(" ")
            if int(count):  # else it was a HEAD request
                sent.setdefault(block, []).append(int(count))
        os.truncate(self.log, 0)
        if not sent:
            return 0.0, 0.0
        each = sent.values()
        return sum(map(len, each)) / len(each), sum(map(sum, each)) / sum(map(max, each))


def key(number: int) -> str:
    """Return the key of a value of the large set."""
    return f"v/{number // 10_000}.{number // 100 % 100}.{number % 100}"


def read(tree: Tree, jobs: list[list[list[tuple[Place, Piece, str]]]]) -> float:
    """Read in processes of threads; return the seconds. A job is (place, piece of a file of the tree, name there)."""
    remote_peers.settle()
    named = [[[(f"{at.prefix}/{name}", 0, piece[2]) for at, piece, name in thread] for thread in process]
             for process in jobs]  # fmt: skip
    command = [sys.executable, "-I", str(peers.HERE / "remote_reader.py")]
    done = subprocess.run(command, input=json.dumps(named), capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise peers.Unavailable((done.stderr.strip().splitlines() or ["the reader failed"])[-1])
    found = json.loads(done.stdout)
    for process, digests in zip(jobs, found["digests"], strict=True):
        for thread, of_thread in zip(process, digests, strict=True):
            for (at, piece, name), digest in zip(thread, of_thread, strict=True):
                if digest != tree.digest(*piece):
                    raise peers.Unavailable(f"{at.prefix}: wrong bytes of {name}")
    return float(found["seconds"])


# -- many processes on one mount


def measure_processes(run: Many, rounds: int) -> Iterator[Result]:
    """Measure 1, 8 and 64 processes on one mount of a large set, with targets on the disk and behind a server."""
    targets = {"local": f"file://{run.www}", "remote": run.urls[AT_ONCE]}
    memory: list[float] = []

    def sample(where: str, count: int) -> float:
        with remote_peers.mounted(run, run.large(targets[where], where), f"index_dir={run.index}") as place:
            pieces = run.size // VALUE
            # a different choice of values for each number of processes
            chosen = random.Random(count).sample(range(run.entries), READS[where])
            wanted = [(place, ("big", number % pieces * VALUE, VALUE), key(number)) for number in chosen]
            took = read(run, [[wanted[first::count]] for first in range(count)])
            if count == PROCESSES[-1]:
                memory.append(pss(place) / MB)
        return len(wanted) / took

    for where, target in targets.items():
        document = run.large(target, where)
        index = [peers.ZARRFS, "index", document, "--index-dir", run.index]
        subprocess.run(index, check=True, stdout=subprocess.DEVNULL)
        samplers = {str(count): lambda where=where, count=count: sample(where, count) for count in PROCESSES}
        samples = in_turns(rounds, samplers)
        for fewer, more in itertools.pairwise(PROCESSES):
            what = f"{where} targets, processes on one mount: {more}"
            yield result(what, "values/s", samples[str(more)], str(fewer), samples[str(fewer)], 0.95)
    loads = [fsspec("load", run.large(targets["local"], "local"))["memory"] / MB for _ in range(rounds)]
    most = PROCESSES[-1]
    yield Result(f"memory of {run.entries:,} references, {most} readers", "MB", memory,
                 f"fsspec, {most} x one process", [most * one for one in loads], 0.05, at_most=True)  # fmt: skip


def pss(place: Place) -> float:
    """Return the PSS of a daemon in bytes, which has its share of shared memory."""
    return float(Path(f"/proc/{place.pid}/smaps_rollup").read_text().split("\nPss:")[1].split()[0]) * 1024


# -- many nodes


def measure_nodes(run: Many, rounds: int) -> Iterator[Result]:
    """Count the requests of many mounts with one cache_dir, beside one mount, and as many mounts without cache_dir."""
    wanted: list[Piece] = [(chunk(number), 0, CHUNK) for number in random.Random(6).sample(range(600), NODE_CHUNKS)]
    requests: dict[str, list[float]] = {}
    sent: dict[str, list[float]] = {}

    def sample(name: str, count: int, shared: bool) -> float:
        with contextlib.ExitStack() as stack:
            cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="blocks-", dir=run.directory))
            document, more = run.document(run.urls[HTTP]), [f"cache_dir={cache}"] if shared else []
            nodes = [stack.enter_context(remote_peers.mounted(run, document, *more)) for _ in range(count)]
            run.seen()
            took = read(run, [
                [[(node, piece, piece[0]) for piece in wanted[first::NODE_READERS]] for first in range(NODE_READERS)]
                for node in nodes
            ])  # fmt: skip
        for figures, figure in zip((requests, sent), run.seen(), strict=True):
            figures.setdefault(name, []).append(figure)
        return took

    samples = in_turns(rounds, {
        "shared": lambda: sample("shared", NODES, True),
        "apart": lambda: sample("apart", NODES, False),
        "one": lambda: sample("one", 1, True),
    })  # fmt: skip
    what = f"{NODES} nodes, one cache_dir"
    yield Result(f"{what}: requests for each block", "", requests.get("shared", []), limit=1.2, at_most=True)
    yield result(f"{what}: requests for each block", "", requests.get("shared", []),
                 "without cache_dir", requests.get("apart", []))  # fmt: skip
    yield Result(f"{what}: bytes sent for each byte", "", sent.get("shared", []), limit=1.2, at_most=True)
    yield result(f"{what}: until all have read all", "s", samples["shared"], "without cache_dir", samples["apart"])
    yield result(f"{what}: until all have read all", "s", samples["shared"], "one node", samples["one"])


MEASURES = {"processes": measure_processes, "nodes": measure_nodes}
