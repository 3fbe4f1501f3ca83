"""Samples of the resources of a soak's daemons, and their limits.

At each quiesce no worker uses the mounts, no fault is injected and the kernel has dropped its caches, so a daemon
must be back at its minimum:

- no open file, no request in flight, at most a few inodes (the root, and those that the kernel has not forgotten);
- at most `MORE` more descriptors and threads than at the first quiesce, as pools fill; with a block cache on disk
  8 descriptors more (its directories, and files that it reads);
- at most a quarter and 64 MiB more memory (RSS) than at the first quiesce, once the allocator has returned free memory
  to the kernel (SIGUSR1; zarrfs/system/memory.py). From the tenth quiesce of a daemon on, the minimum of the last
  third of the quiesces is at most 16 MiB above the minimum of the third before, which detects a slow leak.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.caches import drop
from tests.soak.places import Place
from tests.soak.tally import Tally

MORE = 40
_OF_BLOCKS = 8
_INODES = 8
_SETTLING = 20.0  # seconds in which a daemon must become idle
_MIB = 1 << 20
_TROUBLE = re.compile(r"internal error|Traceback|CRITICAL|Error: .* at [a-z]+\.py:\d+")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Resources of one process; memory in bytes."""

    memory: int
    descriptors: int
    threads: int
    inodes: int = 0
    open_files: int = 0


def sample(pid: int) -> Sample:
    """Sample a process from /proc, without inodes and open files; raise OSError if it has exited."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory, threads = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads"))  # type: ignore[index]
    return Sample(memory << 10, len(os.listdir(f"/proc/{pid}/fd")), threads)


class Watch:
    """The samples of all daemons, and the checks at each quiesce."""

    def __init__(self, places: list[Place], tally: Tally) -> None:
        self.peaks: dict[str, int] = defaultdict(int)  # memory by place
        self.quiesces: dict[tuple[str, int], list[Sample]] = defaultdict(list)  # by place and pid
        self._places, self._tally = places, tally

    def look(self) -> None:
        """Sample the memory of each daemon, for the peaks of the report."""
        for place in self._places:
            try:
                self.peaks[place.name] = max(self.peaks[place.name], sample(place.pids[-1]).memory)
            except OSError:
                continue  # the place is being remounted

    def judge(self, place: Place) -> None:
        """Wait for the daemon to become idle, and compare its resources with those at earlier quiesces."""
        deadline = time.monotonic() + _SETTLING
        forgotten = time.monotonic()  # the caller has dropped the caches before
        while (left := _unsettled(counters := place.stats())) and time.monotonic() < deadline:
            if time.monotonic() - forgotten > 2:  # not more often: it is slow and affects the whole machine
                drop()
                forgotten = time.monotonic()
            time.sleep(0.1)
        pid = place.pids[-1]
        if left:
            self._tally.violation(f"{place.name}: pid {pid} does not come to rest: {left}")
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        seen = dataclasses.replace(
            sample(pid), inodes=counters["inodes"], open_files=counters["open_files"]
        )
        self.quiesces[place.name, pid].append(seen)
        more = MORE + _OF_BLOCKS * any("cache_dir=" in option for option in place.options)
        for rule in _broken(self.quiesces[place.name, pid], more):
            self._tally.violation(f"{place.name}: pid {pid}: {rule}")

    def judge_logs(self) -> None:
        """Report log lines that only a bug in the program can cause."""
        for place in self._places:
            for log in place.logs:
                for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
                    if _TROUBLE.search(line):
                        self._tally.violation(f"{log}: {line}")


def _unsettled(counters: dict[str, Any]) -> str:
    """Return the work that a daemon still has; "" if it is idle."""
    waiting = {name: counters[name] for name in ("requests_in_flight", "requests_waiting") if counters[name]}
    if counters["open_files"] or waiting:
        return f"{counters['open_files']} open files, {waiting}"
    return f"{counters['inodes']} inodes" if counters["inodes"] > _INODES else ""


def _broken(samples: list[Sample], more: int) -> list[str]:
    """Return the rules that the last sample breaks; up to `more` additional descriptors and threads are no leak."""
    first, last = samples[0], samples[-1]
    broken = []
    for name in ("descriptors", "threads"):
        was, now = getattr(first, name), getattr(last, name)
        if now > was + more:
            broken.append(f"{now} {name}, {was} at the first quiesce")
    if last.memory > first.memory * 1.25 + 64 * _MIB:
        broken.append(f"{last.memory // _MIB} MiB, {first.memory // _MIB} MiB at the first quiesce")
    third = len(samples) // 3
    if len(samples) >= 10:
        before = min(one.memory for one in samples[-2 * third : -third])
        after = min(one.memory for one in samples[-third:])
        if after > before + 16 * _MIB:
            broken.append(f"grows: {before // _MIB} MiB, then {after // _MIB} MiB")
    return broken
