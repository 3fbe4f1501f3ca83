"""Scans decode chunks ahead of sequential readers, and no more than the cache holds."""

from __future__ import annotations

import math

import pytest

from zarrfs.views.boxes import boxes, pieces
from zarrfs.views.scans import Scans

MIB = 1 << 20


def chunks_of(shape: tuple[int, ...], chunks: tuple[int, ...], start: int, stop: int) -> set[int]:
    """Return the chunks of the items [start, stop)."""
    counts = tuple(-(-extent // step) for extent, step in zip(shape, chunks, strict=True))
    return {piece.number for box in boxes(shape, start, stop) for piece in pieces(box, chunks, counts)}


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((8192, 4096), (1024, 1024)), ((64 << 20,), (1 << 20,)), ((64, 512, 512), (8, 128, 512)),
     ((4096, 8192), (16, 8192)), ((1000, 1000, 3), (64, 64, 3))],
)  # fmt: skip
def test_a_sequential_reader_finds_its_chunks_decoded(shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    width = math.prod(-(-extent // step) for extent, step in zip(shape[1:], chunks[1:], strict=True))
    room = 2 * width + 8
    scans = Scans(shape, chunks, 4, room, 3)
    total = math.prod(shape)
    step = max(1, min(MIB // 4, total // 64))
    decoded: set[int] = set()
    missed = 0
    for start in range(0, total, step):
        stop = min(start + step, total)
        needed = chunks_of(shape, chunks, start, stop)
        missed += len(needed - decoded) if start else 0
        scan = scans.read(4 * start, 4 * stop)
        decoded |= needed
        if scan is not None:
            while scan.next < scan.goal:
                assert scan.next < math.prod(-(-extent // part) for extent, part in zip(shape, chunks, strict=True))
                decoded.add(scan.next)
                scan.next += 1
            left = start // (math.prod(shape[1:]) * chunks[0]) * width
            assert len({number for number in decoded if number >= left}) <= room
            assert list(scans.passed(scan)) == [] or start
    assert missed <= 2 * width  # chunks of the first reads, before there is a scan


def test_nothing_is_decoded_ahead_of_a_random_reader() -> None:
    scans = Scans((8192, 4096), (1024, 1024), 4, 100, 3)
    assert all(scans.read(at * 7_654_321 % 10**8, at * 7_654_321 % 10**8 + 4096) is None for at in range(1, 100))


def test_reordered_requests_belong_to_one_scan() -> None:
    scans = Scans((8192, 4096), (1024, 1024), 4, 100, 3)
    first = [scans.read(at * MIB, (at + 1) * MIB) for at in (0, 1)][1]
    assert first is not None
    assert all(scans.read(at * MIB, (at + 1) * MIB) is first for at in (3, 2, 5, 4))
    assert first.position == 6 * MIB


def test_two_interleaved_readers_have_a_scan_each() -> None:
    scans = Scans((8192, 4096), (1024, 1024), 4, 100, 3)
    found = [scans.read(at * MIB, (at + 1) * MIB) for at in (0, 64, 1, 65, 2, 66)][2:]
    assert found[0] is found[2] is not found[1] is found[3]


def test_a_band_larger_than_the_cache_is_not_decoded_ahead() -> None:
    scans = Scans((8192, 4096), (1024, 1024), 4, 3, 1)
    assert not scans.fits
    scan = [scans.read(at * MIB, (at + 1) * MIB) for at in (0, 1, 2)][-1]
    assert scan is not None
    assert scan.next >= scan.goal


def test_leaving_a_band_of_a_trillion_chunks_takes_no_time() -> None:
    scans = Scans((4, 1 << 40), (1, 1), 1, 100, 3)
    found = [scans.read((1 << 40) + at * MIB, (1 << 40) + (at + 1) * MIB) for at in (-3, -2, -1, 0)][-1]
    assert found is not None
    found.band = 0
    assert len(scans.passed(found)) == 0, "to be gone through"
