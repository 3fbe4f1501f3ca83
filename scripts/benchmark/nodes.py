"""Model the cost of many nodes, `scripts/bench nodes`: fitted to 1 and 4 mounts, checked against 16 real ones.

Nodes are mounts (or copies) on this machine. nginx's log shows the bytes that the server sent; strace shows opens and
lock requests of files below the directory that all nodes share. Flux is measured if `flux` is on PATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import peers
from many import Many, read
from measures import Result
from remote_data import CHUNK, HTTP, chunk
from remote_peers import Place

VALUES = 40  # chunks that each node reads
FITTED, CHECKED = (1, 4), 16
PAPER = (10, 1_000, 10_000)
SEGMENT = 64 << 20  # bytes of a segment of a cache directory (zarrfs/cache/diskspace.py)
DATA = 1 << 40  # bytes of the data set in the computed table, in values of CHUNK
BRANCHES = 32  # children of a broker in Flux's tree: tbon.topo kary:32
_CALLS = "trace=openat,open,fcntl,flock"
_TRACE = ("strace", "-D", "-f", "--seccomp-bpf", "-qq", "-y", "-e", _CALLS, "-e", "signal=none")
_OPENED = re.compile(r"\bopen(?:at)?(?:\(| resumed>).* = \d+<(/[^>]*)>")
_LOCKED = re.compile(r"\b(?:fcntl|flock)\(\d+<(/[^>]*)>, (?:F_(?:OFD_)?SETLKW?, \{l_type=F_[WR]|LOCK_(?:EX|SH))")

NOTES = f"""\
Each node reads all of {VALUES} chunks of {CHUNK >> 10} KiB. The model is fitted to {FITTED} nodes; its figure for
{CHECKED} is what {CHECKED} real ones are compared with. The last table is the model alone, for 1 TiB in such chunks.
"""


class Cost(NamedTuple):
    """The total cost of all nodes for the server and the file system that they share."""

    sent: float  # bytes that the server sent per byte of the data
    opens: float  # of shared files
    locks: float  # lock requests, granted or not
    segments: float = 0  # segment files of a shared cache


class Mode(NamedTuple):
    """A way to provide data on many nodes: `run` does it, with a shared directory; `model` predicts its cost.

    `model` gets the costs of FITTED[0] and of FITTED[1] nodes, the number of nodes, and the number of values.
    """

    run: Callable[[Many, Path, int], None]
    model: Callable[[Cost, Cost, int, int], Cost]


def traced(shared: Path, command: list[str | Path], number: int) -> list[str | Path]:
    """Return the command under strace, whose output goes to a file beside `shared`."""
    return [*_TRACE, "-o", shared.parent / f"trace-{number}", *command]


def counted(shared: Path) -> Cost:
    """Count the opens and locks below `shared` in all traces; `sent` is 0."""
    opens = locks = 0
    for trace in shared.parent.glob("trace-*"):
        for line in trace.read_text(errors="replace").splitlines():
            for pattern in (_OPENED, _LOCKED):
                match = pattern.search(line)
                if match and match[1].startswith(f"{shared}/"):
                    opens += pattern is _OPENED
                    locks += pattern is _LOCKED
    return Cost(0, opens, locks, len(list(shared.rglob("*.segment"))))


@contextlib.contextmanager
def node(run: Many, shared: Path, number: int, cache: Path) -> Iterator[Place]:
    """Mount the shared document with an index of its own, as on a separate node."""
    own = shared.parent / f"node-{number}"
    (mountpoint := own / "mnt").mkdir(parents=True)
    options = f"index_dir={own}/index,cache_dir={cache},log_file={own}/log"
    command: list[str | Path] = [peers.ZARRFS, "mount", shared / "refs.json", mountpoint, "-o", options]
    with open(own / "said", "w+") as said:  # not a pipe, which strace would keep open
        code = subprocess.run(traced(shared, command, number), stderr=said, timeout=120, check=False).returncode
        if code:
            said.seek(0)
            raise peers.Unavailable(f"zarrfs mount: {said.read().strip()}")
    try:
        yield Place(str(mountpoint))
    finally:
        subprocess.run([peers.ZARRFS, "umount", mountpoint], timeout=60, check=False)


def mounts(cache: Callable[[Path, int], Path]) -> Callable[[Many, Path, int], None]:
    """Return a run that mounts on all nodes, each with cache(shared, number), and reads all values on each."""

    def run(many: Many, shared: Path, count: int) -> None:
        pieces = [(chunk(number), 0, CHUNK) for number in range(VALUES)]
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:
            made = [node(many, shared, at, cache(shared, at)) for at in range(count)]
            nodes = list(pool.map(stack.enter_context, made))
            read(many, [[[(at, piece, piece[0]) for piece in pieces]] for at in nodes])

    return run


def copies(shares: bool) -> Callable[[Many, Path, int], None]:
    """Return a run that copies the data to each node; with `shares`, all nodes make one shared copy."""

    def run(many: Many, shared: Path, count: int) -> None:
        running = []
        for at in range(count):
            to = shared / "data" if shares else shared.parent / f"node-{at}"
            command = [peers.ZARRFS, "stage", "-q", "--copy", "--include", "chunks", "--no-manifest"]
            command += ["--shard", f"{at}/{count}"] if shares else []
            own = {"ZARRFS_STATE_DIR": str(shared.parent / f"state-{at}")}
            command += ["-o", f"index_dir={shared.parent}/index-{at}", str(shared / "refs.json"), str(to)]
            trace: list[str | Path] = [word for word in traced(shared, [*command], at) if word != "-D"]
            running.append(subprocess.Popen(trace, env=os.environ | own, stderr=subprocess.PIPE, text=True))
        for process in running:
            _, said = process.communicate(timeout=300)
            if process.returncode:
                raise peers.Unavailable(f"zarrfs stage: {said.strip()}")

    return run


def each_the_same(one: Cost, few: Cost, nodes: int, values: int) -> Cost:
    """Predict that each node costs as much as one alone."""
    return Cost(*(figure * nodes for figure in one))


def shared_cache(one: Cost, few: Cost, nodes: int, values: int) -> Cost:
    """Predict one fetch per block; each node opens all segments, and tries the locks of blocks that others fetch.

    Each node that fetches writes a segment of its own, so there are as many as nodes (at most as many as values), or
    more if the data fills more.
    """
    first, more = FITTED
    segments = max(values * CHUNK / SEGMENT, min(nodes * few.segments / more, values))
    apart = (few.opens - more * few.segments) / more  # opens per node, without segments
    waiting = (few.locks - one.locks) / (more - first) / VALUES  # locks per node for a value that another one fetches
    fetching = one.locks / VALUES
    return Cost(few.sent, nodes * (apart + segments), values * (fetching + waiting * (nodes - 1)), segments)


def copied_by_shares(one: Cost, few: Cost, nodes: int, values: int) -> Cost:
    """Predict that each value is fetched once and opened once to be written; paper() adds the opens for reading."""
    first, more = FITTED
    per_node = (few.opens - one.opens) / (more - first)
    per_value = (one.opens - per_node) / VALUES
    locks = (few.locks - one.locks) / (more - first)
    return Cost(one.sent, nodes * per_node + values * per_value, one.locks + locks * (nodes - 1))


MODES = {
    "own cache": Mode(mounts(lambda shared, at: shared.parent / f"cache-{at}"), each_the_same),
    "shared cache": Mode(mounts(lambda shared, at: shared / "cache"), shared_cache),
    "copy on each node": Mode(copies(False), each_the_same),
    "one copy, by shares": Mode(copies(True), copied_by_shares),
}


def measured(run: Many, mode: Mode, count: int) -> Cost:
    """Run a mode on `count` nodes; return its cost."""
    with tempfile.TemporaryDirectory(prefix="nodes-", dir=run.directory) as directory:
        shared = Path(directory).resolve() / "shared"
        shared.mkdir()
        refs = {chunk(number): [f"{run.urls[HTTP]}/{chunk(number)}", 0, CHUNK] for number in range(VALUES)}
        (shared / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
        run.seen()
        mode.run(run, shared, count)
        time.sleep(0.5)  # until strace has written its last lines
        _requests, sent = run.seen()
        return counted(shared)._replace(sent=sent)


def measure_nodes(run: Many, rounds: int) -> Iterator[Result]:
    """Fit the model of each mode, compare it with CHECKED real nodes, and print its predictions for PAPER nodes."""
    if shutil.which("strace") is None:
        raise peers.Unavailable("strace is not installed")
    fitted = {}
    for name, mode in MODES.items():
        one, few = (measured(run, mode, count) for count in FITTED)
        fitted[name] = one, few
        real, model = measured(run, mode, CHECKED), mode.model(one, few, CHECKED, VALUES)
        for what, unit in (("sent", "x the data"), ("opens", ""), ("locks", "")):
            ours, theirs = getattr(real, what), getattr(model, what)
            off = 1.0 if ours == theirs else max(ours, theirs, 1) / max(min(ours, theirs), 1)
            if what == "locks":  # retries of waiters depend on timing: the model is an upper bound
                off = ours / max(theirs, 1)
            yield Result(f"{name}, {CHECKED} nodes: {what}", unit, [ours], "model", [theirs] if theirs else [])
            yield Result(f"{name}: {what}, off by", "times", [off], limit=1.25, at_most=True)
    yield from measure_flux()
    print("\n" + paper(fitted) + "\n", flush=True)


def measure_flux() -> Iterator[Result]:
    """Compare the blobs that a tree of brokers loads with the model: each broker requests each blob only once."""
    if shutil.which("flux") is None:
        print("Flux: no flux on PATH: its figures below are computed", flush=True)
        return
    brokers, files = 4, 50
    script = f"""
        cd "$0"; mkdir tree; for i in $(seq {files}); do head -c 5000 /dev/urandom >tree/$i; done
        flux archive create --name nodes -C tree .
        count() {{ flux exec -r all flux module stats content | grep '"valid"' | tr -dc '0-9\\n' | paste -sd+ | bc; }}
        before=$(count)
        for time in 1 2; do flux exec -r 1-{brokers - 1} sh -c '
            mkdir -p out-$(flux getattr rank)
            flux archive extract --overwrite --name nodes -C out-$(flux getattr rank)'; done
        echo $before $(count)"""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(["flux", "start", "-s", str(brokers), "sh", "-c", script, directory],
                              capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    if done.returncode:
        raise peers.Unavailable(f"flux start: {done.stderr.strip()[-200:]}")
    before, after = map(int, done.stdout.split()[-2:])
    yield Result(f"Flux, {brokers} brokers: blobs loaded from above", "", [after - before], "model",
                 [(brokers - 1) * files], 1.15, at_most=True)  # fmt: skip


def paper(fitted: dict[str, tuple[Cost, Cost]]) -> str:
    """Format the predictions for PAPER nodes as the table of docs/howto-hpc.md."""
    values = DATA // CHUNK
    lines = ["| way | nodes | TiB from the server | opens of shared files | locks | RPCs of Flux |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, (one, few) in fitted.items():
        for nodes in PAPER:
            cost = MODES[name].model(one, few, nodes, values)
            reads = nodes * values if name == "one copy, by shares" else 0
            row = (f"{cost.sent:,.0f}", short(cost.opens + reads), short(cost.locks), "")
            lines.append(f"| {name} | {nodes:,} | " + " | ".join(row) + " |")
    for nodes in PAPER:
        every, top = short((nodes - 1) * values), min(nodes - 1, BRANCHES)
        lines.append(f"| Flux content | {nodes:,} | {top} (rank 0) | 0 | 0 | {every}, rank 0 {short(top * values)} |")
    return "\n".join(lines)


def short(number: float) -> str:
    """Format a number with a unit: 2,300; 45 thousand; 2.1 million."""
    for size, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= 10 * size or (size > 1e3 and number >= size):
            return f"{number / size:.2g} {name}" if number < 99.5 * size else f"{number / size:,.0f} {name}"
    return f"{number:,.0f}"


MEASURES = {"nodes": measure_nodes}
