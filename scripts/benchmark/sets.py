"""Large reference sets: `scripts/bench references`."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parquet_set
import peers
from measures import Result, interleaved, seconds

MB, MIB = 1e6, 1 << 20
SIZE = 40_000  # bytes of each chunk; chunks are never read
GENERATED = 1_000  # combinations that fsspec expands, which takes most of a second


class Sets:
    """The documents of one run, most of them written when they are first used."""

    def __init__(self, directory: Path, entries: int, large: int, parquet: int) -> None:
        self.directory, self.entries, self.large, self.parquet = directory, entries, large, parquet
        self.kept = directory / "kept"
        self.kept.mkdir()

    def document(self, entries: int) -> Path:
        """Return a set of version 1 with one array of `entries` chunks, as kerchunk writes them."""
        path = self.directory / f"{entries}.json"
        if not path.exists():
            with open(path, "w") as file:
                file.write('{"version": 1, "refs": {".zgroup": "{\\"zarr_format\\":2}"')
                for first in range(0, entries, 100):
                    a, b = divmod(first // 100, 100)
                    url = f"s3://bucket/data/file-{a // 10:05d}.nc"
                    at = (a % 10 * 100 + b) * 100 * SIZE + 4096
                    file.write("".join(f', "v/{a}.{b}.{c}": ["{url}", {at + c * SIZE}, {SIZE}]' for c in range(100)))
                file.write("}}")
            time.sleep(2.5)  # only a document this old is recognised by its timestamps
        return path

    def generated(self, entries: int) -> Path:
        """Write a set that consists of one item of gen."""
        path = self.directory / f"gen{entries}.json"
        item = {
            "key": "v/{{i}}.{{j}}.{{k}}", "url": "s3://{{u}}/file-{{ '%05d' | format(i) }}.nc",
            "offset": "{{ (j * 10 + k) * 40000 + 4096 }}", "length": "40000",
            "dimensions": {"i": {"stop": entries // 100}, "j": {"stop": 10}, "k": {"stop": 10}},
        }  # fmt: skip
        path.write_text(json.dumps({"version": 1, "templates": {"u": "bucket/data"}, "gen": [item]}))
        return path

    def parquet_set(self) -> Path:
        """Return a set in the Parquet layout; its targets are in the same directory."""
        path = self.directory / "parquet"
        if not path.exists():
            parquet_set.make(path, self.parquet)
        return path


# -- figures of processes


def fsspec(what: str, document: Path) -> dict[str, float]:
    """Run fsspec_peer.py and return its figures."""
    command = [sys.executable, peers.HERE / "fsspec_peer.py", what, document]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


class Mounted:
    """A zarrfs mount, with the seconds that mounting took and the memory of its daemon."""

    def __init__(self, sets: Sets, source: Path, index: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mnt-", dir=sets.directory))
        self._log = index / "log"
        self.took = seconds(peers.zarrfs_command(source, self.root, index))
        self.pid = int(json.loads(os.getxattr(self.root, "user.zarrfs.mount"))["pid"])

    def __enter__(self) -> Mounted:
        return self

    def __exit__(self, *exc: object) -> None:
        subprocess.run([peers.ZARRFS, "umount", self.root], check=True)
        self.root.rmdir()

    def memory(self, which: str = "VmRSS") -> float:
        """Return the memory of the daemon in bytes: now (VmRSS) or its peak (VmHWM)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(which):
                return float(line.split()[1]) * 1024
        raise RuntimeError(f"no {which}")

    def counter(self, name: str) -> float:
        """Return a counter that the daemon logs."""
        return float(peers.counters(self.root, self._log, name)[name])


def fresh(sets: Sets) -> Path:
    """Make an empty directory for an index."""
    return Path(tempfile.mkdtemp(prefix="cold-", dir=sets.directory))


# -- measures


def measure_first(sets: Sets, rounds: int) -> Iterator[Result]:
    """Measure the first mount of a large set, beside fsspec loading and listing it."""
    document, memory = sets.document(sets.entries), {"zarrfs": [], "fsspec": []}  # type: dict[str, list[float]]

    def ours() -> float:
        index = fresh(sets)
        with Mounted(sets, document, index) as mount:
            memory["zarrfs"].append(mount.memory("VmHWM"))
            took = mount.took
        # the larger peak of the daemon and the child that compiles, which do not run at the same time
        compile_ = [str(peers.ZARRFS), "index", str(document), "--index-dir", str(fresh(sets))]
        memory["zarrfs"][-1] = max(memory["zarrfs"][-1], usage(compile_)[1])
        shutil.rmtree(index)
        return took

    def theirs() -> float:
        found = fsspec("load", document)
        memory["fsspec"].append(found["memory"])
        return found["seconds"]

    samples = interleaved(rounds, {"zarrfs": ours, "fsspec": theirs})
    what = f"first mount of {sets.entries:,}"
    against = "fsspec load + list, imports aside"
    yield Result(what, "s", samples["zarrfs"], against, samples["fsspec"], 1.2, at_most=True)
    ours_mb, theirs_mb = ([value / MB for value in memory[name]] for name in ("zarrfs", "fsspec"))
    yield Result(f"{what}, memory", "MB", ours_mb, "fsspec", theirs_mb, 0.5, at_most=True)


def usage(command: list[str]) -> tuple[float, float]:
    """Run `command`; return the CPU seconds of it and its children, and the peak bytes of the largest of them."""
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
    code += "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
    code += "print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True)
    took, most = map(float, done.stdout.split())
    return took, most * 1024


def measure_later(sets: Sets, rounds: int) -> Iterator[Result]:
    """Measure a later mount, which finds the index."""
    for entries in (sets.entries, sets.large):
        document = sets.document(entries)
        subprocess.run(
            [peers.ZARRFS, "index", document, "--index-dir", sets.kept], check=True, stdout=subprocess.DEVNULL
        )
        memory: list[float] = []

        def sample(document: Path = document, memory: list[float] = memory) -> float:
            with Mounted(sets, document, sets.kept) as mount:
                memory.append(mount.memory("VmHWM") / MB)
                return mount.took

        what = f"later mount of {entries:,}"
        yield Result(what, "s", [sample() for _ in range(rounds + 2)], limit=0.3, at_most=True)
        yield Result(f"{what}, memory", "MB", memory, limit=120, at_most=True)


def measure_together(sets: Sets, rounds: int) -> Iterator[Result]:
    """Measure the time that compiling adds to mounts of one document that start together, as those of a job do."""
    document = sets.document(sets.entries)

    def mounted(count: int, index: Path) -> float:
        """Start `count` mounts; return the seconds until all of them answer."""
        roots = [Path(tempfile.mkdtemp(prefix="mnt-", dir=sets.directory)) for _ in range(count)]
        began = time.perf_counter()
        commands = [peers.zarrfs_command(document, root, index) for root in roots]
        running = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
        failed = sum(process.wait() != 0 for process in running)
        took = time.perf_counter() - began
        subprocess.run([peers.ZARRFS, "umount", *roots], check=True)
        if failed:
            raise RuntimeError(f"{failed} of {count} mounts failed")
        return took

    def sample(count: int) -> float:
        index = fresh(sets)
        took = mounted(count, index)
        return took - mounted(count, index)

    samples = interleaved(rounds, {"ten": lambda: sample(10), "one": lambda: sample(1)})
    what = f"10 first mounts at once of {sets.entries:,}, start-up aside"
    yield Result(what, "s", samples["ten"], "one", samples["one"], 1.3, at_most=True)


def measure_gen(sets: Sets, rounds: int) -> Iterator[Result]:
    """Measure expanding gen into an index, per entry, beside fsspec with simple_templates=False."""
    few, many = sets.generated(GENERATED), sets.generated(sets.entries)

    def ours() -> float:
        return seconds([peers.ZARRFS, "index", many, "--index-dir", fresh(sets)]) / sets.entries * 1e6

    samples = interleaved(
        rounds, {"zarrfs": ours, "fsspec": lambda: fsspec("gen", few)["seconds"] / GENERATED * 1e6}
    )
    what, against = f"gen, {sets.entries:,} entries", f"fsspec, {GENERATED:,} entries"
    speed = [[1 / value for value in samples[name]] for name in ("zarrfs", "fsspec")]
    yield Result(what, "entries/µs", speed[0], against, speed[1], 50)


def measure_find(sets: Sets, rounds: int) -> Iterator[Result]:
    """Measure `find` over a fresh mount, and the daemon's memory."""
    document = sets.document(sets.entries)
    memory: list[float] = []
    after: list[float] = []

    def ours() -> float:
        with Mounted(sets, document, sets.kept) as mount:
            took = seconds(["find", mount.root])
            memory.append(mount.memory() / MB)
            if os.geteuid() == 0:
                Path("/proc/sys/vm/drop_caches").write_text("2")
                time.sleep(2)
                after.append(mount.memory() / MB)
            return sets.entries / took

    def theirs() -> float:
        with peers.fsspec_fuse(document, sets) as (mountpoint, _):
            return sets.entries / seconds(["find", mountpoint])

    samples = interleaved(rounds, {"zarrfs": ours, "fsspec.fuse": theirs})
    what = f"find over {sets.entries:,}"
    if samples["fsspec.fuse"]:
        yield Result(what, "entries/s", samples["zarrfs"], "fsspec.fuse, patched", samples["fsspec.fuse"], 5)
    yield Result(f"{what}, memory then", "MB", memory, limit=500, at_most=True)
    if after:
        yield Result(f"{what}, memory after drop_caches", "MB", after, "then", memory, 0.6, at_most=True)


def measure_hostile(sets: Sets, rounds: int) -> Iterator[Result]:
    """Measure the CPU time of indexing documents with many blanks, and with one long value, beside gzip alone."""
    for what, blanks, value in (("400 MB of blanks in a set", 400, 0), ("a value of 80 MB", 0, 80)):
        document = sets.directory / f"hostile-{value}.json.gz"
        with gzip.open(document, "wb", 6) as file:
            file.write(b'{"version": 1')
            for _ in range(blanks):
                file.write((b"\n" + b" " * 63) * (MIB // 64))
            file.write(b', "refs": {"z": "')
            for _ in range(value):
                file.write(b"x" * MIB)
            file.write(b'"}}')
        memory: list[float] = []

        def ours(document: Path = document, memory: list[float] = memory) -> float:
            took, most = usage([str(peers.ZARRFS), "index", str(document), "--index-dir", str(fresh(sets))])
            memory.append(most / MB)
            return took

        samples = interleaved(
            rounds, {"zarrfs": ours, "gzip": lambda document=document: usage(["gzip", "-dc", str(document)])[0]}
        )  # fmt: skip
        yield Result(what, "s of CPU", samples["zarrfs"], "gzip -dc", samples["gzip"], 3, at_most=True)
        yield Result(f"{what}, memory", "MB", memory, limit=300 if value else 60, at_most=True)


def measure_parquet(sets: Sets, rounds: int) -> Iterator[Result]:
    """Measure mounting a set in the Parquet layout, and reading random chunks of it."""
    source = sets.parquet_set()
    side = json.loads((source / ".zmetadata").read_text())["metadata"]["v0/.zarray"]["shape"][0]
    first: list[float] = []
    files: list[float] = []
    memory: list[float] = []

    def sample() -> float:
        with Mounted(sets, source, sets.kept) as mount:
            chance = random.Random(len(files))
            for _ in range(20):
                name = f"v{chance.randrange(4)}/{chance.randrange(side)}.{chance.randrange(side)}"
                before = mount.counter("record_files")
                began = time.perf_counter()
                (mount.root / name).read_bytes()
                first.append(time.perf_counter() - began)
                files.append(mount.counter("record_files") - before)
            memory.append(mount.memory("VmHWM") / MB)
            return mount.took

    took = [sample() for _ in range(rounds)]
    what = f"Parquet set of {sets.parquet:,}"
    yield Result(f"mount of a {what}", "s", took, limit=1, at_most=True)
    yield Result(f"{what}, a random chunk", "s", first)
    yield Result(f"{what}, record files for it", "", [max(files)], limit=2, at_most=True)
    yield Result(f"{what}, memory", "MB", memory)


MEASURES: dict[str, Callable[[Any, int], Iterator[Result]]] = {
    "first": measure_first,
    "later": measure_later,
    "together": measure_together,
    "gen": measure_gen,
    "find": measure_find,
    "hostile": measure_hostile,
    "parquet": measure_parquet,
}
