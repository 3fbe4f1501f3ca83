"""Archives of a running Flux instance: `scripts/bench flux`. zarrfs beside `flux archive extract`.

It starts instances of one and of four brokers on this machine; each rank reads 2,000 files of 4 KiB and one of 200 MB.
flux_instance.py runs within the instance and takes the times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import peers
from measures import Result

SMALL, SIZE = 4096, 200 * 10**6  # bytes
PIECE = 1 << 20
NOTES = """\
Each sample is whole commands, with the content cache of each broker dropped before: zarrfs mounts, reads all files
with cat, and unmounts; extract and stage --copy write them. With four brokers all ranks do so; MB/s are of all.
"""


class Instances:
    """A tree of files, and Flux instances that serve it as an archive."""

    def __init__(self, directory: Path, files: int) -> None:
        self.directory, self.tree = directory, directory / "tree"
        (self.tree / "small").mkdir(parents=True)
        for number in range(files):
            (self.tree / f"small/f{number:05}").write_bytes(os.urandom(SMALL))
        with (self.tree / "large").open("wb") as file:
            for at in range(0, SIZE, PIECE):
                file.write(os.urandom(min(PIECE, SIZE - at)))
        self.bytes = files * SMALL + SIZE

    def sample(self, brokers: int, rounds: int, *works: str) -> dict[str, list[float]]:
        """Start an instance; return {work: MB/s of each round}."""
        command = ["flux", "start", "-s", str(brokers), sys.executable, str(peers.HERE / "flux_instance.py")]
        arguments = [str(self.directory), str(peers.ZARRFS), str(brokers), str(rounds), *works]
        done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, check=True)
        seconds: dict[str, list[float]] = json.loads(done.stdout)
        return {work: [brokers * self.bytes / 1e6 / took for took in samples] for work, samples in seconds.items()}


def measure_read(run: Instances, rounds: int) -> Iterator[Result]:
    """Measure mounting an archive and reading it, with one broker and with four."""
    for brokers, shown in (1, "1 broker"), (4, "4 brokers"):
        samples = run.sample(brokers, rounds, "extract", "mount")
        what = f"flux:NAME mounted and read, {shown}"
        yield Result(what, "MB/s", samples["mount"], "flux archive extract", samples["extract"], 0.6)


def measure_stage(run: Instances, rounds: int) -> Iterator[Result]:
    """Measure copying an archive, with a manifest of hashes."""
    samples = run.sample(1, rounds, "extract", "stage")
    what = "stage --copy flux:NAME, 1 broker"
    yield Result(what, "MB/s", samples["stage"], "flux archive extract", samples["extract"], 0.8)


MEASURES = {"read": measure_read, "stage": measure_stage}
