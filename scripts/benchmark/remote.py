"""Remote data: `scripts/bench remote`. zarrfs and a client without a mount read the same tree over HTTP.

Limits apply at 30 ms of latency per request; the figures without latency have no limits.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator

import remote_peers
from measures import Result, Sampler, interleaved
from remote_data import CHUNK, COLUMNS, HTTPS, ROWS, SERVERS, TINY, Server, Tree, chunk
from remote_peers import Contender, Piece, Place

MB = 1e6
BLOCK = 4 << 20  # bytes of each request of the client that reads the large file
MEMORY_LIMIT = 256  # MiB, of the mount whose memory is measured
OVER = 150  # MB that its daemon may need in addition
Jobs = list[list[Piece]]

NOTES = f"""\
A chunk has {CHUNK >> 10} KiB. "direct" is a client without any mount, one connection a reader. Each sample is
a fresh mount with empty caches; time starts when it answers; the SHA-256 of what came is checked afterwards.
Before each sample, whoever is measured, another process touches 3 GiB of memory and frees it: a virtual machine gets
what it touches for the first time from its host at 0.4 GB/s; memory that it has touched before is there at 8 GB/s.
nginx (one worker), daemons and readers share the machine. zarrfs mounts references to the
tree.
"""


def chunks(count: int, readers: int) -> Jobs:
    """Return `count` random chunks for `readers` threads; another number of them gives another choice."""
    chosen = random.Random(readers).sample(range(ROWS * COLUMNS), count)
    return dealt([(chunk(number), 0, CHUNK) for number in chosen], readers)


def dealt(pieces: list[Piece], readers: int) -> Jobs:
    """Deal the pieces in turn to the readers."""
    return [pieces[number::readers] for number in range(readers)]


def rate(tree: Tree, contender: Contender, server: Server, jobs: Jobs) -> Sampler:
    """Return a sampler of MB/s."""

    def sample() -> float:
        with contender(tree, server) as place:
            return remote_peers.total(jobs) / remote_peers.read(tree, place, jobs) / MB

    return sample


def result(
    what: str, unit: str, ours: list[float], against: str, theirs: list[float], limit: float | None = None
) -> Result:
    """Return a row; without samples of the peer, its note says so."""
    if theirs:
        return Result(what, unit, ours, against, theirs, limit)
    return Result(what, unit, ours, against, note="no figure here")


def limit(server: Server, https: float, http: float) -> float | None:
    """Return the limit of a row; None without latency."""
    return (https if server is HTTPS else http) if server.delay else None


# -- measures


def measure_chunks(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure random chunks with 32, 8 and 1 readers."""
    for server in SERVERS:
        for readers, count, https, http in ((32, 300, 0.8, 0.85), (8, 300, 0.85, 0.9), (1, 60, 0.9, 0.95)):
            jobs = chunks(count, readers)
            samples = interleaved(
                rounds,
                {
                    "zarrfs": rate(tree, remote_peers.zarrfs(), server, jobs),
                    "direct": rate(tree, remote_peers.direct, server, jobs),
                },
            )
            what = f"{server}: {count} random chunks, readers: {readers}"
            yield result(what, "MB/s", samples["zarrfs"], "direct", samples["direct"], limit(server, https, http))


def measure_grid(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure one reader that reads chunks in the order of the grid."""
    in_order: list[Piece] = [(chunk(number), 0, CHUNK) for number in range(300)]
    for server in SERVERS:
        few = [in_order[:60]]  # enough for peers without read-ahead, whose rate is constant
        samples = interleaved(
            rounds,
            {
                "zarrfs": rate(tree, remote_peers.zarrfs(), server, [in_order]),
                "direct": rate(tree, remote_peers.direct, server, few),
            },
        )
        what = f"{server}: 300 chunks in grid order, readers: 1"
        yield result(what, "MB/s", samples["zarrfs"], "direct, 1 connection", samples["direct"], limit(server, 4, 4))


def measure_big(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure a sequential read of the large file."""
    parts = [("big", at, min(BLOCK, tree.size - at)) for at in range(0, tree.size, BLOCK)]
    whole: Jobs = [[("big", 0, tree.size)]]
    for server in SERVERS:
        samples = interleaved(
            rounds,
            {
                "zarrfs": rate(tree, remote_peers.zarrfs(), server, whole),
                "direct": rate(tree, remote_peers.direct, server, dealt(parts, 8)),
            },
        )
        what = f"{server}: {tree.size >> 20} MiB file, sequentially"
        against = f"direct, 8 connections, {BLOCK >> 20} MiB ranges"
        yield result(what, "MB/s", samples["zarrfs"], against, samples["direct"], limit(server, 0.8, 0.85))


def measure_tiny(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure `cp -r` of tiny references into one target, beside as many tiny files."""

    def copied(contender: Contender, server: Server) -> Sampler:
        def sample() -> float:
            with contender(tree, server) as place:
                return TINY / remote_peers.copy(tree, place)

        return sample

    for server in SERVERS:
        samples = interleaved(rounds, {"zarrfs": copied(remote_peers.zarrfs(), server)})
        what = f"{server}: cp -r of {TINY:,} tiny references"
        yield Result(what, "values/s", samples["zarrfs"], limit=limit(server, 2000, 2500))


def measure_disk(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure a cache directory: the first read beside one without it, one after a remount beside local files."""
    works: dict[str, tuple[Jobs, float]] = {
        "300 chunks, 32 readers": (chunks(300, 32), 0.85),
        "300 chunks, 8 readers": (chunks(300, 8), 0.9),
        f"{tree.size >> 20} MiB file": ([[("big", 0, tree.size)]], 0.85),
    }
    for work, (jobs, least) in works.items():
        again: list[float] = []

        def cached(jobs: Jobs = jobs, again: list[float] = again) -> float:
            with tempfile.TemporaryDirectory(prefix="blocks-", dir=tree.directory) as cache:
                contender = remote_peers.zarrfs(f"cache_dir={cache}")
                first = rate(tree, contender, HTTPS, jobs)()
                again.append(rate(tree, contender, HTTPS, jobs)())
                return first

        samples = interleaved(
            rounds,
            {
                "cached": cached,
                "memory": rate(tree, remote_peers.zarrfs(), HTTPS, jobs),
                "local": rate(tree, remote_peers.zarrfs_of_files, HTTPS, jobs),
                "direct": rate(tree, remote_peers.direct, HTTPS, jobs),
            },
        )
        what = f"{HTTPS}: {work}, cache_dir=, "
        yield result(f"{what}first", "MB/s", samples["cached"], "zarrfs without", samples["memory"], least)
        yield result(f"{what}first", "MB/s", samples["cached"], "direct", samples["direct"])
        yield result(f"{what}after a remount", "MB/s", again, "zarrfs of local files", samples["local"], 0.8)


def measure_memory(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure the CPU time and memory of the daemon, with a small memory_limit."""
    works: dict[str, Jobs] = {
        "300 chunks, 32 readers": chunks(300, 32),
        f"{tree.size >> 20} MiB file": [[("big", 0, tree.size)]],
    }
    used: dict[tuple[str, str], list[float]] = {}

    def sampler(name: str, contender: Contender) -> Sampler:
        def sample() -> float:
            with contender(tree, HTTPS) as place:
                for work, jobs in works.items():
                    used.setdefault((name, work), []).append(cpu(place, jobs))
                return place.peak() / MB

        return sample

    def cpu(place: Place, jobs: Jobs) -> float:
        before = place.cpu()
        remote_peers.read(tree, place, jobs)
        return (place.cpu() - before) / remote_peers.total(jobs) * remote_peers.GB

    ours = remote_peers.zarrfs(f"memory_limit={MEMORY_LIMIT}MiB")
    samples = interleaved(rounds, {"zarrfs": sampler("zarrfs", ours)})
    for work in works:
        what = f"{HTTPS}: daemon CPU, {work}"
        yield Result(what, "s/GB", used.get(("zarrfs", work), []), limit=1.6, at_most=True)
    most = MEMORY_LIMIT * 1.048576 + OVER
    what = f"{HTTPS}: peak memory, memory_limit={MEMORY_LIMIT}MiB"
    yield Result(what, "MB", samples["zarrfs"], limit=round(most), at_most=True)


MEASURES: dict[str, Callable[[Tree, int], Iterator[Result]]] = {
    "chunks": measure_chunks,
    "grid": measure_grid,
    "big": measure_big,
    "tiny": measure_tiny,
    "disk": measure_disk,
    "memory": measure_memory,
}
