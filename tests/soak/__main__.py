"""Run a soak test and print its report: scripts/soak --help."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.caches import drop
from tests.mounts.mounting import alive, mount_lines
from tests.soak.disturbing import FAULTS, Disturber
from tests.soak.model import Model
from tests.soak.places import Place
from tests.soak.tally import Tally
from tests.soak.watching import Watch
from tests.soak.workers import STUCK, Control, Worker, read_all, start_workers
from tests.soak.world import World, world

_INTERVAL = 300.0  # maximum seconds from one quiesce to the next
_SAMPLING = 2.0  # seconds
_STAYS = 60.0  # seconds after which a remaining temporary file counts as left behind
_MIB = 1 << 20


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description="Use mounts hard, for as long as you like.")
    parser.add_argument("--minutes", type=float, default=10, metavar="N", help="how long (default 10)")
    parser.add_argument("--seed", type=int, default=int(time.time()), metavar="N", help="of all random numbers")
    parser.add_argument("--directory", metavar="DIR", help="where all is made (default: one in the system's)")
    parser.add_argument("--report", metavar="FILE", help="write the report here, too")
    return parser.parse_args()


class Soak:
    """One run: workers and disturbances, interrupted by quiesces: pauses in which everything is checked."""

    def __init__(self, made: World, tally: Tally, seconds: float) -> None:
        self.world, self.tally = made, tally
        self.watch = Watch(made.places, tally)
        self.began = time.monotonic()
        self._seconds = seconds
        self._model = Model(made)
        self._control = Control()
        self._disturber = Disturber(made, tally, self._model)
        self._workers: list[Worker] = []

    def run(self) -> None:
        """Run workers, disturbances and quiesces until the time is over; the caller mounts and unmounts the places."""
        self._workers = start_workers(self.world, self.tally, self._control, self._model)
        try:
            end = self.began + self._seconds
            every = min(_INTERVAL, max(self._seconds / 12, min(self._seconds / 3, 20)))
            while time.monotonic() < end and not self.tally.over:
                self._disturb_until(min(end, time.monotonic() + every))
                self._quiesce()
        finally:
            self._control.stopping.set()
            self._control.resume()
            for worker in self._workers:
                worker.join(STUCK)

    def _disturb_until(self, end: float) -> None:
        sampled = 0.0
        while time.monotonic() < end and not self.tally.over:
            self._disturber.one()
            if time.monotonic() - sampled > _SAMPLING:
                sampled = time.monotonic()
                self.watch.look()
                self._find_stuck()
            time.sleep(0.2)

    def _find_stuck(self) -> None:
        for worker in self._workers:
            waited = time.monotonic() - worker.since
            if not worker.is_alive():
                self.tally.violation(f"{worker.name} has ended")
            elif not worker.idle and waited > STUCK:
                self.tally.violation(f"{worker.name} hangs in {worker.doing} for {waited:.0f} s")
                worker.since = time.monotonic()

    def _quiesce(self) -> None:
        """Pause all workers and faults, read every file once, then check the daemons."""
        self._disturber.calm()
        for name in self._control.pause(self._workers):
            self.tally.violation(f"{name} has not ended its operation in {STUCK:.0f} s")
        for place in self.world.places:
            try:
                self.tally.done("read at a quiesce", 0 if place.writable else read_all(place, place.keys))
                for line in self._model.differences(place) if place.writable else ():
                    self.tally.violation(f"{place.name}, at a quiesce: {line}")
            except Exception:
                self.tally.violation(f"{place.name}, at a quiesce: {traceback.format_exc()}")
        drop()
        for place in self.world.places:
            try:
                self.watch.judge(place)
            except OSError as exc:
                self.tally.violation(f"{place.name}, at a quiesce: {exc}")
        self._control.resume()


@contextlib.contextmanager
def mounted(places: Sequence[Place], tally: Tally) -> Iterator[None]:
    """Mount all places and unmount them afterwards; remove and report any daemon or mount that remains."""
    try:
        for place in places:
            place.mount()
        yield
        for place in places:
            try:
                place.unmount()
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as exc:
                tally.violation(str(exc))
    finally:
        for place in places:
            for pid in filter(alive, place.pids):
                tally.violation(f"{place.name}: its daemon {pid} is still there")
                os.kill(pid, 9)
            while mount_lines(place.mountpoint):
                tally.violation(f"{place.name}: is still mounted")
                subprocess.run(["umount", "-l", str(place.mountpoint)], check=False)


def leftovers(directory: Path) -> set[str]:
    """Return the temporary files of zarrfs that exist."""
    places = Path("/dev/shm"), directory / "tmp"
    found = {str(path) for place in places if place.is_dir() for path in place.glob("zarrfs*")}
    return found | {str(path) for path in directory.glob("cache/zarrfs/index/.zarrfs-*.tmp")}


def left_behind(directory: Path, before: set[str]) -> list[str]:
    """Return the new temporary files that remain: other zarrfs processes here remove theirs within seconds."""
    found, since = leftovers(directory) - before, time.monotonic()
    while found and time.monotonic() - since < _STAYS:
        time.sleep(0.2)
        found &= leftovers(directory)
    return sorted(found)


def zombies() -> list[str]:
    """Return the pids of the exited children of this process that were not waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] == "Z" and int(fields[1]) == os.getpid():
                found.append(path.parent.name)
    return found


def report(soak: Soak, seed: int) -> str:
    """Format the report: counts, faults, errors, resources and violations."""
    tally, watch = soak.tally, soak.watch
    lines = [f"soak: {time.monotonic() - soak.began:.0f} s, seed {seed}"]
    lines += ["", f"{'operation':24} {'count':>10} {'MiB':>10}"]
    for name, count in sorted(tally.operations.items()):
        lines.append(f"{name:24} {count:>10,} {tally.bytes[name] / _MIB:>10,.0f}")
    lines += ["", f"{'fault':24} {'answers':>10}"]
    counts = soak.world.proxy.counts
    lines += [f"{name:24} {counts[name]:>10,}" for name in ("GET", "HEAD", *FAULTS)]
    lines += ["", f"{'failed, as it may':24} {'errno':>12} {'count':>10}"]
    lines += [f"{name:24} {code:>12} {count:>10,}" for (name, code), count in sorted(tally.errors.items())]
    lines += ["", f"{'mount':12} {'peak MiB':>9}   its last daemon at quiesces: MiB / descriptors / threads / inodes"]
    for place in soak.world.places:
        seen = watch.quiesces[place.name, place.pids[-1]]
        shown = [f"{one.memory // _MIB}/{one.descriptors}/{one.threads}/{one.inodes}" for one in seen]
        lines.append(f"{place.name:12} {watch.peaks[place.name] // _MIB:>9}   {' '.join(shown[:1] + shown[1:][-7:])}")
    lines += ["", f"violations: {len(tally.violations)}", *tally.violations]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run a soak. Return 1, and keep its directory, if there was a violation; 2 if the directory cannot be made."""
    chosen = arguments()
    try:
        if chosen.directory is not None:
            os.makedirs(chosen.directory, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="zarrfs-soak-", dir=chosen.directory))
    except OSError as exc:
        print(f"soak: --directory {chosen.directory}: {(exc.strerror or str(exc)).lower()}", file=sys.stderr)
        return 2
    print(f"soak: {chosen.minutes:g} minutes, seed {chosen.seed}, in {directory}", flush=True)
    tally, before = Tally(), leftovers(directory)
    with world(directory, chosen.seed) as made:
        soak = Soak(made, tally, chosen.minutes * 60)
        with mounted(made.places, tally):
            soak.run()
        soak.watch.judge_logs()
    for path in left_behind(directory, before):
        tally.violation(f"left behind: {path}")
    for pid in zombies():
        tally.violation(f"a zombie: pid {pid}")
    text = report(soak, chosen.seed)
    print(text, end="")
    if chosen.report:
        Path(chosen.report).write_text(text)
    if tally.violations:
        print(f"soak: failed; logs and data are in {directory}", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
