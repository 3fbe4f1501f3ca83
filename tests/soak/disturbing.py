"""Disturbances of the mounts of a soak: remounts, kills, signals and server faults."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable

from tests.caches import drop
from tests.conftest import run
from tests.soak.model import Model
from tests.soak.places import Place
from tests.soak.tally import Tally
from tests.soak.world import World

FAULTS = ("reset", "reset late", "stall", "503", "429", "truncate", "short", "long", "elsewhere", "drip", "changed")
_SHARE = 0.1  # of the responses are faulty while faults are active
_CLEANERS = ("zarrfs", "fusermount3", "")
_PATIENCE = 60.0  # seconds in which a daemon under load must return its statistics


class Disturber:
    """The source of random disturbances, one at a time; each is counted as an operation."""

    def __init__(self, world: World, tally: Tally, model: Model) -> None:
        self._world, self._tally, self._model = world, tally, model
        self._chance = random.Random(f"{world.seed} disturbances")
        self._number = 0  # the version of the local set
        self._actions: list[tuple[str, Callable[[Place], None], bool]] = [  # (name, action, only for mortal places)
            ("umount and mount", self._remount, True),
            ("kill -9 and mount", self._kill, True),
            ("umount in use", self._umount_in_use, False),
            ("SIGHUP", lambda place: place.signal(signal.SIGHUP), False),
            ("SIGUSR1", lambda place: place.signal(signal.SIGUSR1), False),
            ("SIGSTOP, SIGCONT", self._suspend, False),
            ("zarrfs stats", self._stats, False),
            ("zarrfs refresh", self._refresh, False),
            ("drop_caches", lambda place: drop(), False),
            ("faults", self._faults, False),
            ("server restart", self._restart, False),
        ]

    def one(self) -> None:
        """Perform one random disturbance of a random place."""
        name, action, mortal = self._chance.choice(self._actions)
        places = [place for place in self._world.places if place.mortal or not mortal]
        place = self._chance.choice(places)
        try:
            action(place)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as exc:
            self._tally.violation(f"{name} of {place.name}: {exc}")
        self._tally.done(name)

    def calm(self) -> None:
        """Stop injecting faults."""
        self._world.proxy.faults = {}
        self._world.weather.set(False)

    def _faults(self, place: Place) -> None:
        """Start injecting a random choice of faults, or stop if faults are active."""
        if self._world.proxy.faults:
            self.calm()
            return
        self._world.weather.set(True)
        kinds = self._chance.sample(FAULTS, self._chance.randrange(1, len(FAULTS)))
        self._world.proxy.faults = dict.fromkeys(kinds, _SHARE / len(kinds))

    def _restart(self, place: Place) -> None:
        """Stop the server for half a second, which breaks all its connections."""
        self._world.weather.set(True)
        self._world.proxy.stop()
        time.sleep(0.5)
        self._world.proxy.start()
        self._world.weather.set(bool(self._world.proxy.faults))

    def _remount(self, place: Place) -> None:
        with place.alone():
            place.unmount()
            place.mount()
            self._compare(place)

    def _kill(self, place: Place) -> None:
        """Kill the daemon during reads, but only between two changes: the result of half a change is unknown."""
        if not place.writable:
            place.kill(self._chance.choice(_CLEANERS))
            with place.alone():
                place.mount()
            return
        with place.alone():
            place.kill(self._chance.choice(_CLEANERS))
            place.mount()
            self._compare(place)

    def _compare(self, place: Place) -> None:
        if place.writable:
            for line in self._model.differences(place)[:5]:
                self._tally.violation(f"{place.name}, mounted again: {line}")

    def _umount_in_use(self, place: Place) -> None:
        with place.used(), (place.mountpoint / self._chance.choice(place.keys)).open("rb"):
            done = run("umount", place.mountpoint)
        if not done.returncode or "in use by" not in done.stderr:
            self._tally.violation(f"{place.name}: umount while in use: status {done.returncode}: {done.stderr}")

    def _suspend(self, place: Place) -> None:
        place.signal(signal.SIGSTOP)
        time.sleep(self._chance.random())
        place.signal(signal.SIGCONT)

    def _refresh(self, place: Place) -> None:
        """Change and refresh the local set: an open file keeps its bytes, one opened later has the new bytes."""
        place = self._world.place("local")
        self._number += 1
        with place.used(), (place.mountpoint / "version").open("rb", buffering=0) as opened:
            self._world.change_local(self._number)
            done = run("refresh", place.mountpoint)
            old, new = opened.read(), (place.mountpoint / "version").read_bytes()
        if done.returncode or (int(old), int(new)) != (self._number - 1, self._number):
            told = f"status {done.returncode}, {done.stderr} {old!r} {new!r}"
            self._tally.violation(f"refresh to {self._number}: {told}")

    def _stats(self, place: Place) -> None:
        deadline = time.monotonic() + _PATIENCE
        while (done := run("stats", place.mountpoint)).returncode:  # zarrfs stats waits ten seconds
            if "does not answer" not in done.stderr or time.monotonic() > deadline:
                raise RuntimeError(f"status {done.returncode}: {done.stderr.strip()}")
