"""Resources of the daemons of a soak, sampled, and their limits.

At each quiesce nobody uses the mounts, no fault is injected and the kernel was told to forget what it knows
(drop_caches), so a daemon is back at its least:

- no open handle, no request under way, at most a few inodes (the root, and what the kernel has not given up);
- descriptors and threads at most `MORE` above those at the first quiesce: pools that fill; with a directory of blocks
  8 descriptors more (its index, its segment, its directories);
- memory (RSS) at most a quarter and 64 MiB above that at the first quiesce, once the allocator has given back what it
  keeps for use (SIGUSR1; zarrfs/system/memory.py). From the tenth quiesce of a daemon on, the least of the last
  third of them is at most 16 MiB above the least of the third before: what grows for ever is found by that.
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
_SETTLING = 20.0  # seconds in which a daemon must come to rest
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
    """From /proc alone. OSError where the process has gone."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory, threads = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads"))  # type: ignore[index]
    return Sample(memory << 10, len(os.listdir(f"/proc/{pid}/fd")), threads)


class Watch:
    """Samples all the time, and judges at each quiesce."""

    def __init__(self, places: list[Place], tally: Tally) -> None:
        self.peaks: dict[str, int] = defaultdict(int)  # memory by place
        self.quiesces: dict[tuple[str, int], list[Sample]] = defaultdict(list)  # by place and pid
        self._places, self._tally = places, tally

    def look(self) -> None:
        """A sample of each daemon; not judged but for its peak."""
        for place in self._places:
            try:
                self.peaks[place.name] = max(self.peaks[place.name], sample(place.pids[-1]).memory)
            except OSError:
                continue  # it is being mounted again

    def judge(self, place: Place) -> None:
        """At a quiesce: wait for the daemon to come to rest, and compare with how it was."""
        deadline = time.monotonic() + _SETTLING
        forgotten = time.monotonic()  # before this was called
        while (left := _unsettled(counters := place.stats())) and time.monotonic() < deadline:
            if time.monotonic() - forgotten > 2:  # what was in use the last time; it is slow, and the whole machine's
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
        """Nothing that only a mistake in the program writes to a log."""
        for place in self._places:
            for log in place.logs:
                for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
                    if _TROUBLE.search(line):
                        self._tally.violation(f"{log}: {line}")


def _unsettled(counters: dict[str, Any]) -> str:
    """Return the work that a daemon still has; "" if it is idle."""
    remote = counters.get("remote", {})
    waiting = {name: remote[name] for name in ("in_flight", "waiting", "in_flight_bytes") if remote.get(name)}
    if counters["open_files"] or waiting:
        return f"{counters['open_files']} open files, {waiting}"
    return f"{counters['inodes']} inodes" if counters["inodes"] > _INODES else ""


def _broken(samples: list[Sample], more: int) -> list[str]:
    """The rules that the last of these breaks; so many `more` descriptors and threads are no leak."""
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
