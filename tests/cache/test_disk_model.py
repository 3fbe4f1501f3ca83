"""The disk cache against a model: a dictionary that may lose entries."""

from __future__ import annotations

import itertools
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

from tests.cache.diskblocks import MIB, ONE, TWO, flip, found, remember, rows, segments, write
from zarrfs.cache import disk, diskspace
from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskfiles import INDEX, LAYOUT
from zarrfs.net.versions import TargetVersion

SIZE = 256 * MIB
SMALL_UNIT = 64

caches = st.integers(0, 1)
targets = st.sampled_from(["http://a/x", "http://a/y", "http://a/\udce9"])
versions = st.sampled_from([ONE, TWO, TargetVersion('"one"', 5)])
places = st.tuples(st.integers(0, 200), st.integers(1, 150)).map(lambda pair: (pair[0], pair[0] + pair[1]))


class Dictionary(RuleBasedStateMachine):
    """Two caches on one directory, compared with the ranges that were written."""

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(disk, "UNIT", SMALL_UNIT)
        self.patch.setattr(diskspace.secrets, "randbits", lambda bits: next(self.numbers))
        self.numbers = itertools.count()
        self.directory = tempfile.mkdtemp()
        self.caches = [DiskCache(self.directory, SIZE) for _ in range(2)]
        self.exact: set[Any] = set()
        self.pieces: dict[Any, list[tuple[int, int]]] = {}
        self.records: dict[str, TargetVersion] = {}
        self.ever: set[Any] = set()
        self.lossy = False

    @rule(number=caches, url=targets, version=versions, place=places)
    def write(self, number: int, url: str, version: TargetVersion, place: tuple[int, int]) -> None:
        write(self.caches[number], url, *place, version)
        self.exact.add((url, version, *place))
        self.ever.add((url, version))

    @rule(number=caches, url=targets, version=versions, place=places)
    def write_run(self, number: int, url: str, version: TargetVersion, place: tuple[int, int]) -> None:
        write(self.caches[number], url, *place, version, run=True)
        self.ever.add((url, version))
        for unit in range(place[0] // SMALL_UNIT, (place[1] - 1) // SMALL_UNIT + 1):
            low, high = max(place[0], unit * SMALL_UNIT), min(place[1], (unit + 1) * SMALL_UNIT)
            pieces = self.pieces.setdefault((url, version, unit), [])
            touched = [old for old in pieces if old[0] <= high and low <= old[1]]
            pieces[:] = [old for old in pieces if old not in touched]
            pieces.append((min([low, *(old[0] for old in touched)]), max([high, *(old[1] for old in touched)])))

    @rule(number=caches, url=targets, version=versions, place=places)
    def read(self, number: int, url: str, version: TargetVersion, place: tuple[int, int]) -> None:
        there = found(self.caches[number], url, *place, version)  # found() has checked the bytes
        if not self.lossy and self._expected(url, version, *place):
            assert there
        if (url, version) not in self.ever:
            assert not there

    @rule(number=caches, which=st.integers(0, 10**6))
    def read_what_was_written(self, number: int, which: int) -> None:
        """Read a range that was written: read() chooses one too seldom."""
        if self.exact:
            url, version, *place = sorted(self.exact)[which % len(self.exact)]
            assert found(self.caches[number], url, *place, version) or self.lossy

    def _expected(self, url: str, version: TargetVersion, start: int, stop: int) -> bool:
        if (url, version, start, stop) in self.exact:
            return True
        for unit in range(start // SMALL_UNIT, (stop - 1) // SMALL_UNIT + 1):
            first, last = max(start, unit * SMALL_UNIT), min(stop, (unit + 1) * SMALL_UNIT)
            if not any(low <= first and last <= high for low, high in self.pieces.get((url, version, unit), ())):
                return False
        return True

    @rule(number=caches, url=targets, version=versions)
    def remember(self, number: int, url: str, version: TargetVersion) -> None:
        before = time.time() - 1
        remember(self.caches[number], url, version)
        self.records[url] = version
        assert self.caches[number].version(url, before) == version
        assert self.caches[1 - number].version(url, before) == version
        assert self.caches[number].version(url, time.time() + 1) is None

    @rule(number=caches, url=targets)
    def recall(self, number: int, url: str) -> None:
        assert self.caches[number].version(url, 0) in ([self.records.get(url)] if not self.lossy else
                                                          [self.records.get(url), None])  # fmt: skip

    @rule(number=caches)
    def reopen(self, number: int) -> None:
        self.caches[number].close()
        self.caches[number] = DiskCache(self.directory, SIZE)

    @rule(which=st.integers(0, 10**6))
    def evict(self, which: int) -> None:
        files = sorted(segments(Path(self.directory)))
        if files:
            files[which % len(files)].unlink()
            self.lossy = True

    @rule(which=st.integers(0, 10**6), length=st.integers(0, 200))
    def tear(self, which: int, length: int) -> None:
        """Zero the last bytes of a block, as if they had not reached the disk before a power cut."""
        kept = rows(Path(self.directory))
        if kept:
            row = kept[which % len(kept)]
            path = Path(self.directory, LAYOUT, f"{row.segment:016x}.segment")
            with path.open("r+b") as file:
                at = row.offset + max(0, row.length - length)
                os.pwrite(file.fileno(), bytes(row.offset + row.length - at), at)
            self.lossy = True

    @rule(index=st.booleans(), place=st.integers(0, 10**9))
    def damage(self, index: bool, place: int) -> None:
        kept = rows(Path(self.directory))
        if kept:
            row = kept[place % len(kept)]
            path = Path(self.directory, LAYOUT, INDEX if index else f"{row.segment:016x}.segment")
            flip(path, place % path.stat().st_size if index else row.offset + place % row.length)
            self.lossy = True

    @rule()
    def remove_directory(self) -> None:
        shutil.rmtree(self.directory)
        os.mkdir(self.directory)
        self.forget()

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
