"""The disk cache is a dictionary that may forget: two caches on one directory against what was written."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.cache.diskblocks import MIB, ONE, TWO, blocks, found, write
from zarrfs.cache import disk
from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskadmin import clear
from zarrfs.net.versions import Version

SIZE = 256 * MIB
SMALL_UNIT = 64

caches = st.integers(0, 1)
targets = st.sampled_from(["http://a/x", "http://a/y", "http://a/\udce9"])
versions = st.sampled_from([ONE, TWO, Version('"one"', 5)])
places = st.tuples(st.integers(0, 200), st.integers(1, 150)).map(lambda pair: (pair[0], pair[0] + pair[1]))


class Dictionary(RuleBasedStateMachine):
    """Two caches on one directory against what was written."""

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(disk, "UNIT", SMALL_UNIT)
        self.directory = tempfile.mkdtemp()
        self.caches = [DiskCache(self.directory, SIZE, 0) for _ in range(2)]
        self.exact: set[Any] = set()
        self.pieces: dict[Any, tuple[int, int]] = {}
        self.records: dict[str, Version] = {}
        self.ever: set[Any] = set()
        self.lossy = False

    @rule(number=caches, url=targets, version=versions, place=places)
    def write(self, number: int, url: str, version: Version, place: tuple[int, int]) -> None:
        write(self.caches[number], url, *place, version)
        self.exact.add((url, version, *place))
        self.ever.add((url, version))

    @rule(number=caches, url=targets, version=versions, place=places)
    def write_run(self, number: int, url: str, version: Version, place: tuple[int, int]) -> None:
        write(self.caches[number], url, *place, version, run=True)
        self.ever.add((url, version))
        for unit in range(place[0] // SMALL_UNIT, (place[1] - 1) // SMALL_UNIT + 1):
            low, high = max(place[0], unit * SMALL_UNIT), min(place[1], (unit + 1) * SMALL_UNIT)
            old = self.pieces.get((url, version, unit), (low, low))
            if old[0] <= high and low <= old[1]:
                self.pieces[url, version, unit] = min(low, old[0]), max(high, old[1])
            elif high - low > old[1] - old[0]:
                self.pieces[url, version, unit] = low, high

    @rule(number=caches, url=targets, version=versions, place=places)
    def read(self, number: int, url: str, version: Version, place: tuple[int, int]) -> None:
        there = found(self.caches[number], url, *place, version)  # right, or None
        if not self.lossy and self._expected(url, version, *place):
            assert there
        if (url, version) not in self.ever:
            assert not there

    def _expected(self, url: str, version: Version, start: int, stop: int) -> bool:
        if (url, version, start, stop) in self.exact:
            return True
        if stop - start >= SMALL_UNIT:
            return False
        for unit in range(start // SMALL_UNIT, (stop - 1) // SMALL_UNIT + 1):
            low, high = self.pieces.get((url, version, unit), (0, 0))
            if not low <= max(start, unit * SMALL_UNIT) < min(stop, (unit + 1) * SMALL_UNIT) <= high:
                return False
        return True

    @rule(number=caches, url=targets, version=versions)
    def remember(self, number: int, url: str, version: Version) -> None:
        before = time.time() - 1
        self.caches[number].remember(url, version)
        self.records[url] = version
        assert self.caches[number].version(url, before) == version
        assert self.caches[1 - number].version(url, before) == version or self.lossy
        assert self.caches[number].version(url, time.time() + 1) is None

    @rule(number=caches, url=targets)
    def recall(self, number: int, url: str) -> None:
        assert self.caches[number].version(url, 0) in ([self.records.get(url)] if not self.lossy else
                                                          [self.records.get(url), None])  # fmt: skip

    @rule(which=st.integers(0, 10**6), place=st.integers(0, 10**6), bit=st.integers(0, 7))
    def damage(self, which: int, place: int, bit: int) -> None:
        files = blocks(Path(self.directory))
        if files:
            path = files[which % len(files)]
            data = bytearray(path.read_bytes())
            data[place % len(data)] ^= 1 << bit
            path.write_bytes(data)
            self.lossy = True

    @rule()
    def clear(self) -> None:
        clear(self.directory)
        assert blocks(Path(self.directory)) == []
        self.forget()

    @rule()
    def remove_directory(self) -> None:
        shutil.rmtree(self.directory)
        os.mkdir(self.directory)
        self.forget()
        self.lossy = True  # whoever has the old one open finds nothing until it writes

    def forget(self) -> None:
        self.exact.clear()
        self.pieces.clear()
        self.records.clear()

    def teardown(self) -> None:
        if hasattr(self, "caches"):
            for cache in self.caches:
                assert cache.stats()["dropped"] == 0
                cache.close()
            self.patch.undo()
            shutil.rmtree(self.directory, ignore_errors=True)


TestDictionary = pytest.mark.timeout(300)(Dictionary.TestCase)
TestDictionary.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
