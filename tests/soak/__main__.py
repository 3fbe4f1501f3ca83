"""Run a soak and print its report: workers use many mounts while disturbances go on; pauses check every byte."""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.caches import drop
from tests.conftest import PROGRAM, run
from tests.mounts.mounting import counters_of, eventually, mount_lines
from tests.mounts.treemodel import Tree, attempt, snapshot
from tests.soak.mounts import STUCK, Mount, World, world

FAULTS = ("reset", "reset late", "stall", "503", "429", "truncate", "short", "long", "elsewhere", "drip", "changed")
OF_THE_MOUNT = ("EIO", "ENOTCONN", "ECONNABORTED", "ENODEV")  # errors that a plain directory does not have
TROUBLE = re.compile(r"internal error|Traceback|CRITICAL|Error: .* at [a-z]+\.py:\d+")  # of a log: a bug
Act = Callable[[Mount, random.Random, int], object]  # an operation of the worker of this number


class Wrong(Exception):
    """Bytes, names or attributes are not the expected ones."""


class Soak:
    """One run: worker threads, disturbances, and pauses in which everything is checked."""

    def __init__(self, made: World) -> None:
        self.world, self.mounts = made, list(made.mounts.values())
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()  # (operation, "right" or errno)
        self.violations: list[str] = []
        self._seen: dict[int, list[tuple[int, int, int]]] = {}  # by pid: MiB, descriptors and threads at pauses
        self._copied: set[str] = set()  # keys of the lower source of "overlay" that were changed
        self._version = 0  # of "local"
        self._chance, self._stop = random.Random(made.seed), threading.Event()

    def violation(self, text: str) -> None:
        self.violations.append(text)
        print(f"soak: VIOLATION: {text}", flush=True)

    def run(self, seconds: float) -> None:
        """Run until the time is over or there are many violations; the caller mounts and unmounts."""
        overlay, readable = [self.world.mounts["overlay"]], [mount for mount in self.mounts if not mount.writable]
        kinds: list[tuple[str, int, list[Mount], Act]] = [
            ("read", 8, readable, read), ("listing", 1, readable, list_names), ("stat storm", 1, readable, stat_storm),
            ("interrupted read", 1, readable, interrupt), ("write", 2, overlay, self._write),
        ]  # fmt: skip
        jobs = [(kind, number, mounts, act) for kind, count, mounts, act in kinds for number in range(count)]
        workers = [threading.Thread(target=self._work, args=job, daemon=True) for job in jobs]
        for worker in workers:
            worker.start()
        end, pause = time.monotonic() + seconds, min(300.0, max(seconds / 12, min(seconds / 3, 20)))
        try:
            while time.monotonic() < end and len(self.violations) < 20:
                until = time.monotonic() + pause
                while time.monotonic() < min(end, until):
                    self._disturb()
                    time.sleep(0.2)
                self._check()
        finally:
            self._stop.set()
            self.world.calm()
        for worker in workers:
            worker.join(STUCK)
            if worker.is_alive():
                self.violation("a worker hangs")

    def _work(self, kind: str, number: int, mounts: list[Mount], act: Act) -> None:
        chance = random.Random(f"{self.world.seed} {kind} {number}")
        while not self._stop.is_set():
            mount = chance.choice(mounts)
            with mount.used():
                ends, found = mount.ends, "right"
                stormy = mount.may_fail(errno.EIO, ends)  # also if the storm ends meanwhile
                try:
                    act(mount, chance, number)
                except OSError as exc:
                    found = errno.errorcode.get(exc.errno or 0, str(exc))
                    if not (mount.may_fail(exc.errno, ends) or (stormy and exc.errno == errno.EIO)):
                        self.violation(f"{kind} in {mount.name}: {exc!r}")
                except Exception:
                    self.violation(f"{kind} in {mount.name}: {traceback.format_exc()}")
                self.counts[kind, found] += 1
            time.sleep(chance.random() * 0.01)

    # -- disturbances

    def _disturb(self) -> None:
        chance, mount = self._chance, self._chance.choice(self.mounts)
        actions = [self._faults, self._restart, self._refresh, self._use, self._suspend, self._stats]
        actions += [self._remount, self._kill] if mount.mortal else []
        action = chance.choice(actions)
        name = action.__name__.strip("_")
        try:
            action(mount)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as exc:
            self.violation(f"{name} of {mount.name}: {exc}")
        self.counts[name, "right"] += 1

    def _faults(self, mount: Mount) -> None:
        """Start injecting a random choice of faults into a tenth of the responses, or stop."""
        if self.world.proxy.faults:
            self.world.calm()
        else:
            kinds = self._chance.sample(FAULTS, self._chance.randrange(1, len(FAULTS)))
            self.world.proxy.faults = dict.fromkeys(kinds, 0.1 / len(kinds))

    def _restart(self, mount: Mount) -> None:
        """Stop the server for half a second, which breaks all its connections."""
        for each in self.mounts:
            each.calm_since = time.monotonic() + 1
        self.world.proxy.stop()
        time.sleep(0.5)
        self.world.proxy.start()

    def _remount(self, mount: Mount) -> None:
        with mount.alone():
            mount.unmount()
            mount.mount()
            self._compare(mount)

    def _kill(self, mount: Mount) -> None:
        """Kill the daemon during reads, but between two changes: the result of half a change is unknown."""
        with mount.alone() if mount.writable else contextlib.nullcontext():
            mount.kill()
            if self._chance.random() < 0.5:  # otherwise the next daemon mounts over the dead mount
                clean = self._chance.choice(([PROGRAM, "umount"], ["fusermount3", "-u"]))
                if not eventually(lambda: not run(mount.root, program=clean).returncode):
                    raise RuntimeError(f"{clean} does not remove a dead mount")
        with mount.alone():
            mount.mount()
            self._compare(mount)

    def _use(self, mount: Mount) -> None:
        """Try to unmount a mount in use; make it reopen its log, and free memory; drop the kernel's caches."""
        with mount.used(), (mount.root / self._chance.choice(mount.keys)).open("rb"):
            done = run("umount", mount.root)
        if not done.returncode or "in use by" not in done.stderr:
            raise RuntimeError(f"umount while in use: status {done.returncode}: {done.stderr}")
        for number in signal.SIGHUP, signal.SIGUSR1:
            os.kill(mount.pid, number)
        drop()

    def _suspend(self, mount: Mount) -> None:
        os.kill(mount.pid, signal.SIGSTOP)
        time.sleep(self._chance.random())
        os.kill(mount.pid, signal.SIGCONT)

    def _stats(self, mount: Mount) -> None:
        if not eventually(lambda: not run("stats", mount.root).returncode):
            raise RuntimeError(run("stats", mount.root).stderr)

    def _refresh(self, mount: Mount) -> None:
        """Change and refresh the local set: an open file keeps its bytes, one opened later has the new bytes."""
        local, self._version = self.world.mounts["local"], self._version + 1
        with local.used(), (local.root / "version").open("rb", buffering=0) as opened:
            self.world.change_local(self._version)
            done = run("refresh", local.root)
            old, new = opened.read(), (local.root / "version").read_bytes()
        if done.returncode or (int(old), int(new)) != (self._version - 1, self._version):
            raise RuntimeError(f"refresh to {self._version}: {done.stderr} {old!r} {new!r}")

    # -- checks

    def _check(self) -> None:
        """Stop all faults and operations, read every file, and compare the daemons with earlier pauses."""
        self.world.calm()
        with contextlib.ExitStack() as stack:
            for mount in self.mounts:
                try:
                    stack.enter_context(mount.alone())
                    self._compare(mount)
                    for key in () if mount.writable else mount.keys:
                        compare(mount, key, 0, (mount.root / key).read_bytes())
                except Exception:
                    self.violation(f"{mount.name}, in a pause: {traceback.format_exc()}")
            drop()
            for mount in self.mounts:
                self._judge(mount)

    def _judge(self, mount: Mount) -> None:
        """Wait for a daemon to become idle: its descriptors, threads and memory are as at its first pause."""

        def idle() -> bool:
            now = counters_of(mount.root)
            busy = [now[name] for name in ("open_files", "requests_in_flight", "requests_waiting") if now[name]]
            if busy or now["inodes"] > 8:  # the root, and what the kernel has not forgotten
                drop()
                time.sleep(1)
            return not busy and now["inodes"] <= 8

        if not eventually(idle):
            self.violation(f"{mount.name}: does not come to rest: {counters_of(mount.root)}")
        os.kill(mount.pid, signal.SIGUSR1)  # return free memory to the kernel
        time.sleep(0.5)
        status = Path(f"/proc/{mount.pid}/status").read_text()
        memory, threads = (int(re.findall(rf"{name}:\s+(\d+)", status)[0]) for name in ("VmRSS", "Threads"))
        seen = self._seen.setdefault(mount.pid, [])
        seen.append((memory >> 10, len(os.listdir(f"/proc/{mount.pid}/fd")), threads))
        (first, descriptors, begun), (last, opened, running), third = seen[0], seen[-1], len(seen) // 3
        if opened > descriptors + 48 or running > begun + 40 or last > first * 1.25 + 64:  # pools and caches fill
            self.violation(f"{mount.name}: MiB, descriptors and threads at pauses: {seen}")
        if len(seen) >= 10 and min(seen[-third:])[0] > min(seen[-2 * third : -third])[0] + 16:  # a slow leak
            self.violation(f"{mount.name}: MiB, descriptors and threads at pauses: {seen}")

    def _compare(self, mount: Mount) -> None:
        """Compare the overlay with the model; nobody may write."""
        for folder in self.world.model.glob("w*") if mount.writable else ():
            own, shown = snapshot(folder), snapshot(mount.root / folder.name)
            for key in own.keys() | shown.keys():
                for name in "mode", "content":
                    if own.get(key, {}).get(name) != shown.get(key, {}).get(name):
                        self.violation(f"{mount.name}: {folder.name}/{key}: {name} differs")
        for key in self._copied if mount.writable else ():
            if (mount.root / key).read_bytes() != (self.world.model / key).read_bytes():
                self.violation(f"{mount.name}: {key} differs")

    # -- the writers

    def _write(self, mount: Mount, chance: random.Random, number: int) -> None:
        """Make one random change to the overlay and to a plain directory; each writer has its own names."""
        roots = mount.root, self.world.model
        if chance.random() < 0.1:
            keys = [key for at, key in enumerate(mount.keys) if at % 2 == number and key.startswith("a/")]
            key, at, data = chance.choice(keys), chance.randrange(1400), chance.randbytes(chance.randrange(1, 2000))
            if key not in self._copied:
                (roots[1] / key).parent.mkdir(parents=True, exist_ok=True)
                (roots[1] / key).write_bytes(mount.values[key])
            for root in roots:
                with (root / key).open("r+b") as file:
                    file.seek(at)
                    file.write(data)
            self._copied.add(key)
            return
        for root in roots:
            (root / f"w{number}").mkdir(exist_ok=True)
        one, other = (f"w{number}/{chance.randrange(40)}" for _ in range(2))
        trees = [Tree(root) for root in roots]
        data, size = chance.randbytes(chance.randrange(300_000)), chance.randrange(300_000)
        opened = ("open", 1, one, os.O_RDWR | os.O_NOFOLLOW)
        changes: list[list[tuple[object, ...]]] = [
            [("write", one, os.O_CREAT | os.O_TRUNC, 0o644, 0, data)], [("truncate", one, size)],
            [("write", one, os.O_CREAT | os.O_APPEND, 0o644, 0, data[:5000])], [("unlink", one)], [("rmdir", one)],
            [("rename", one, other, 0)], [("mkdir", one, 0o755)], [("symlink", os.path.basename(other), one)],
            [("link", other, one)], [opened, ("fsync", 1)], [opened, ("map_write", 1, size, data[:9000] or b"x")],
        ]  # fmt: skip
        try:
            for name, *arguments in chance.choice(changes):
                found, expected = None, None
                for tree in trees:
                    found, expected = attempt(lambda: getattr(tree, name)(*arguments)), found  # noqa: B023
                    if found[0] == "failed" and found[1] in OF_THE_MOUNT:
                        raise OSError(getattr(errno, str(found[1])), name)
                if found != expected:
                    raise Wrong(f"{name} {one} {other}: {expected}, but {found} in a directory")
                if found and found[0] == "failed":
                    break
        finally:
            for tree in trees:
                for handle in list(tree.handles):
                    tree.close(handle)


# -- the readers


def compare(mount: Mount, key: str, start: int, found: bytes, stop: int | None = None) -> None:
    if found != mount.values[key][start:stop]:
        raise Wrong(f"{key} [{start}, {stop}): {len(found)} bytes, which are not right")


def read(mount: Mount, chance: random.Random, number: int) -> None:
    """Read pieces of a file at random offsets, or all of it; half of the time without read-ahead and page cache."""
    key = chance.choice(mount.keys)
    size, piece = len(mount.values[key]), chance.choice((100, 4096, 70_000, 1 << 20))
    starts = range(0, size, piece) if chance.random() < 0.3 else [chance.randrange(size) for _ in range(5)]
    with open(mount.root / key, "rb", buffering=0) as file:
        dropping = chance.random() < 0.5
        if dropping:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for start in starts:
            file.seek(start)
            found, stop = b"", min(start + piece, size)
            while len(found) < stop - start and (more := file.read(stop - start - len(found))):
                found += more  # a failure after the first page makes only a short read
            compare(mount, key, start, found, stop)
        if dropping:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def list_names(mount: Mount, chance: random.Random, number: int) -> None:
    """List a directory: each of its files must occur exactly once."""
    folder, ends = chance.choice(mount.keys).rpartition("/")[0], mount.ends
    wanted = {key.rpartition("/")[2] for key in mount.keys if key.rpartition("/")[0] == folder}
    found = os.listdir(mount.root / folder)
    if mount.may_fail(errno.ENOENT, ends):
        raise FileNotFoundError(errno.ENOENT, "unmounted meanwhile: an empty directory may have been listed")
    if len(found) != len(set(found)) or not wanted <= set(found):
        raise Wrong(f"listing of {folder!r}: {len(found)} names, {len(wanted - set(found))} missing")


def stat_storm(mount: Mount, chance: random.Random, number: int) -> None:
    """Stat 200 random files, and names that do not exist."""
    for key in chance.choices(mount.keys, k=200):
        if (size := os.stat(mount.root / key).st_size) != len(mount.values[key]):
            raise Wrong(f"{key}: size {size}, not {len(mount.values[key])}")
    with contextlib.suppress(FileNotFoundError):
        os.stat(mount.root / f"absent-{chance.random()}")
        raise Wrong("a name that is not there is")


def interrupt(mount: Mount, chance: random.Random, number: int) -> None:
    """Interrupt cat(1) of a file: it must exit soon."""
    reader = subprocess.Popen(
        ["cat", mount.root / chance.choice(mount.keys)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(chance.random() * 0.05)
    reader.send_signal(chance.choice((signal.SIGINT, signal.SIGKILL)))
    reader.wait(10)


# -- the program


@contextlib.contextmanager
def mounted(soak: Soak) -> Iterator[None]:
    """Mount all, and unmount them afterwards; report any daemon or mount that remains."""
    try:
        for mount in soak.mounts:
            mount.mount()
        yield
        for mount in soak.mounts:
            mount.unmount()
    except (RuntimeError, OSError) as exc:
        soak.violation(str(exc))
    finally:
        for mount in soak.mounts:
            while mount_lines(mount.root):
                soak.violation(f"{mount.name}: is still mounted")
                subprocess.run(["umount", "-l", mount.root], check=False)
            for line in mount.log.read_text().splitlines() if mount.log.exists() else ():
                if TROUBLE.search(line):
                    soak.violation(f"{mount.log}: {line}")


def main() -> int:
    """Run a soak. Return 1, and keep its directory, if there was a violation."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description="Use mounts hard, for as long as you like.")
    parser.add_argument("--minutes", type=float, default=10, metavar="N", help="how long (default 10)")
    parser.add_argument("--seed", type=int, default=int(time.time()), metavar="N", help="of all random numbers")
    parser.add_argument("--directory", metavar="DIR", help="where all is made (default: one in the system's)")
    chosen = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="zarrfs-soak-", dir=chosen.directory))
    print(f"soak: {chosen.minutes:g} minutes, seed {chosen.seed}, in {directory}", flush=True)
    with world(directory, chosen.seed) as made:
        soak = Soak(made)
        with mounted(soak):
            soak.run(chosen.minutes * 60)
    for (kind, found), count in sorted(soak.counts.items()):
        print(f"{kind:20} {found:14} {count:>10,}")
    print(f"violations: {len(soak.violations)}", *soak.violations, sep="\n")
    if soak.violations:
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
