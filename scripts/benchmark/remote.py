"""Remote data: `scripts/bench remote`. zarrfs and a client without a mount read the same tree over HTTP.

Limits are those for 30 ms of latency per request, or for none.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator

import remote_peers
from measures import Result, Sampler, interleaved
from remote_data import CHUNK, COLUMNS, HTTP, HTTPS, ROWS, Server, Tree, chunk
from remote_peers import Contender, Piece, Place

MB = 1e6
BLOCK = 4 << 20  # bytes of each request of the client that reads the large file
MEMORY_LIMIT = 64  # MiB, of the mount whose memory is measured
PEAK = 110  # MB that its daemon may have
Jobs = list[list[Piece]]

NOTES = f"""\
A chunk has {CHUNK >> 10} KiB. "direct" is a client without any mount, one connection a reader. Each sample is
a fresh mount with empty caches; time starts when it answers; the SHA-256 of what came is checked afterwards.
Before each sample, whoever is measured, another process touches 3 GiB of memory and frees it: a virtual machine gets
what it touches for the first time from its host at 0.4 GB/s; memory that it has touched before is there at 8 GB/s.
nginx (one worker), daemons and readers share the machine. zarrfs mounts references to the tree.
"""


def chunks(count: int, readers: int) -> Jobs:
    """Return `count` random chunks for `readers` threads; another number of them gives another choice."""
    chosen = random.Random(readers).sample(range(ROWS * COLUMNS), count)
    return dealt([(chunk(number), 0, CHUNK) for number in chosen], readers)


def dealt(pieces: list[Piece], readers: int) -> Jobs:
    """Deal the pieces in turn to the readers."""
    return [pieces[number::readers] for number in range(readers)]


def whole(tree: Tree) -> Jobs:
    """Return the large file for one reader."""
    return [[("big", 0, tree.size)]]


def rate(tree: Tree, contender: Contender, server: Server, jobs: Jobs) -> Sampler:
    """Return a sampler of MB/s."""

    def sample() -> float:
        with contender(tree, server) as place:
            return remote_peers.total(jobs) / remote_peers.read(tree, place, jobs) / MB

    return sample


def compared(
    tree: Tree, rounds: int, what: str, ours: Jobs, theirs: Jobs, https: float, http: float | None
) -> Iterator[Result]:
    """Compare mounts with the direct client on each server; the last arguments are the limits."""
    for server, limit in (HTTPS, https), (HTTP, http):
        samplers = {
            "zarrfs": rate(tree, remote_peers.zarrfs(), server, ours),
            "direct": rate(tree, remote_peers.direct, server, theirs),
        }
        samples = interleaved(rounds, samplers)
        against = f"direct, connections: {len(theirs)}"
        yield Result(f"{server}: {what}", "MB/s", samples["zarrfs"], against, samples["direct"], limit)


def measure_chunks(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure random chunks with 32, 8 and 1 readers."""
    limits = (32, 300, 0.75, 0.4), (8, 300, 0.88, 0.55), (1, 60, 0.92, None)
    for readers, count, https, http in limits:
        jobs = chunks(count, readers)
        yield from compared(tree, rounds, f"{count} random chunks, readers: {readers}", jobs, jobs, https, http)


def measure_grid(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure one reader that reads chunks in the order of the grid, of which the slower direct client reads a few."""
    in_order: list[Piece] = [(chunk(number), 0, CHUNK) for number in range(300)]
    yield from compared(tree, rounds, "300 chunks in grid order", [in_order], [in_order[:60]], 4, None)


def measure_big(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure a sequential read of the large file."""
    parts = [("big", at, min(BLOCK, tree.size - at)) for at in range(0, tree.size, BLOCK)]
    what = f"{tree.size >> 20} MiB file, sequentially"
    yield from compared(tree, rounds, what, whole(tree), dealt(parts, 8), 0.85, None)


def measure_disk(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure a cache directory: the first read beside the direct client, one after a remount beside local files."""
    works = {"300 chunks, 32 readers": chunks(300, 32), f"{tree.size >> 20} MiB file": whole(tree)}
    for work, jobs in works.items():
        again: list[float] = []

        def cached(jobs: Jobs = jobs, again: list[float] = again) -> float:
            with tempfile.TemporaryDirectory(prefix="blocks-", dir=tree.directory) as cache:
                contender = remote_peers.zarrfs(f"cache_dir={cache}")
                first = rate(tree, contender, HTTPS, jobs)()
                again.append(rate(tree, contender, HTTPS, jobs)())
                return first

        samplers = {
            "cached": cached,
            "local": rate(tree, remote_peers.zarrfs_of_files, HTTPS, jobs),
            "direct": rate(tree, remote_peers.direct, HTTPS, jobs),
        }
        samples = interleaved(rounds, samplers)
        what = f"{HTTPS}: {work}, cache_dir=, "
        yield Result(f"{what}first", "MB/s", samples["cached"], "direct", samples["direct"], 0.7)
        yield Result(f"{what}after a remount", "MB/s", again, "zarrfs of local files", samples["local"], 0.8)


def measure_memory(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure the CPU time and memory of the daemon, with a small memory_limit."""
    works = {"300 chunks, 32 readers": (chunks(300, 32), 1.5), f"{tree.size >> 20} MiB file": (whole(tree), 0.8)}
    used: dict[str, list[float]] = {work: [] for work in works}

    def cpu(place: Place, jobs: Jobs) -> float:
        before = place.cpu()
        remote_peers.read(tree, place, jobs)
        return (place.cpu() - before) / remote_peers.total(jobs) * remote_peers.GB

    def sample() -> float:
        with remote_peers.zarrfs(f"memory_limit={MEMORY_LIMIT}MiB")(tree, HTTPS) as place:
            for work, (jobs, _) in works.items():
                used[work].append(cpu(place, jobs))
            return place.peak() / MB

    samples = interleaved(rounds, {"zarrfs": sample})
    for work, (_, most) in works.items():
        yield Result(f"{HTTPS}: daemon CPU, {work}", "s/GB", used[work], limit=most, at_most=True)
    what = f"{HTTPS}: peak memory, memory_limit={MEMORY_LIMIT}MiB"
    yield Result(what, "MB", samples["zarrfs"], limit=PEAK, at_most=True)


MEASURES: dict[str, Callable[[Tree, int], Iterator[Result]]] = {
    "chunks": measure_chunks,
    "grid": measure_grid,
    "big": measure_big,
    "disk": measure_disk,
    "memory": measure_memory,
}
