"""Compressed streams: consecutive members, trailing bytes, and the bound on decompression."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import numcodecs
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zarr.chunks import decoded
from zarrfs.zarr.codecs import CodecError

Codec = tuple[str, dict[str, Any]]
RAW = {"format": lzma.FORMAT_RAW, "filters": [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]}
UNSIZED = zstandard.ZstdCompressor(write_content_size=False)
PACK: dict[str, tuple[Codec, Callable[[bytes], bytes]]] = {
    "zlib": (("numcodecs.zlib", {}), zlib.compress),
    "gzip": (("gzip", {}), gzip.compress),
    "bz2": (("numcodecs.bz2", {}), bz2.compress),
    "lzma": (("numcodecs.lzma", {}), lzma.compress),
    "lzma alone": (("numcodecs.lzma", {"format": 2}), lambda data: lzma.compress(data, lzma.FORMAT_ALONE)),
    "lzma raw": (("numcodecs.lzma", RAW), lambda data: lzma.compress(data, lzma.FORMAT_RAW, filters=RAW_SMALL)),
    "zstd": (("zstd", {}), zstandard.compress),
    "zstd unsized": (("zstd", {}), UNSIZED.compress),
    "lz4": (("numcodecs.lz4", {}), numcodecs.LZ4().encode),
    "blosc": (("blosc", {}), numcodecs.Blosc("zstd").encode),
    "blosc stored": (("blosc", {}), numcodecs.Blosc(clevel=0).encode),
}
RAW_SMALL = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 16}]
MEMBERS = ["gzip", "bz2", "lzma", "zstd", "zstd unsized"]
CONTENT = b"".join(b"%d," % (number // 3) for number in range(2000))


@pytest.mark.parametrize("name", PACK)
def test_streams_of_another_size_or_cut_are_refused(name: str) -> None:
    codec, pack = PACK[name]
    stream = pack(CONTENT)
    assert decoded(len(CONTENT), stream, codec) == CONTENT
    wrong = [(size, stream) for size in (1, len(CONTENT) - 1, len(CONTENT) + 1, 2 * len(CONTENT))]
    wrong += [(len(CONTENT), stream[:length]) for length in (*range(0, len(stream), 17), len(stream) - 1)]
    for size, data in wrong:
        with pytest.raises(CodecError, match=codec[0].removeprefix("numcodecs.")):
            decoded(size, data, codec)


@pytest.mark.parametrize("name", MEMBERS)
def test_consecutive_members_are_decoded(name: str) -> None:
    codec, pack = PACK[name]
    for cuts in ([0, 0, len(CONTENT)], [0, 1, 5000, len(CONTENT)], [0, 0, 300, 300, 9000, len(CONTENT)]):
        members = b"".join(pack(CONTENT[start:stop]) for start, stop in itertools.pairwise(cuts))
        assert decoded(len(CONTENT), members, codec) == CONTENT
        for bad in (members + pack(b"x"), members[:-1]):
            with pytest.raises(CodecError, match=codec[0].removeprefix("numcodecs.")):
                decoded(len(CONTENT), bad, codec)


def test_bytes_after_the_last_member_are_ignored_or_refused() -> None:
    for name in ("gzip", "bz2", "lzma", "zlib"):
        codec, pack = PACK[name]
        assert decoded(len(CONTENT), pack(CONTENT) + bytes(9000), codec) == CONTENT
    for name in ("bz2", "lzma", "zlib", "blosc", "blosc stored"):  # as other readers do
        codec, pack = PACK[name]
        assert decoded(len(CONTENT), pack(CONTENT) + b"more", codec) == CONTENT
    with pytest.raises(CodecError, match="gzip: bytes after the last member"):
        decoded(len(CONTENT), gzip.compress(CONTENT) + b"more", PACK["gzip"][0])
    with pytest.raises(CodecError, match="zstd: damaged"):
        decoded(len(CONTENT), zstandard.compress(CONTENT) + b"more!", PACK["zstd"][0])


def test_skippable_frames_of_zstd_are_skipped() -> None:
    skipped = b"\x50\x2a\x4d\x18\x03\0\0\0abc"
    frame = zstandard.compress(CONTENT)
    for data in (skipped + frame, frame + skipped, skipped + UNSIZED.compress(CONTENT[:9]) + skipped * 2 + frame):
        expected = CONTENT if data.count(skipped) < 3 else CONTENT[:9] + CONTENT
        assert decoded(len(expected), data, PACK["zstd"][0]) == expected


def test_many_small_members_take_linear_time() -> None:
    """Copying the remaining data for each member would take 20 s of CPU for 60,000 members of gzip."""
    began = time.thread_time()
    value = b"abc" * (2 << 20)  # so large that a stored chunk of 3 MB is allowed
    for name, count in (("gzip", 60_000), ("bz2", 500), ("zstd", 500)):
        codec, pack = PACK[name]
        assert decoded(len(value), pack(b"") * count + pack(value) + pack(b"") * count, codec) == value
    assert time.thread_time() - began < 8


DICTIONARY = """
import lzma, resource
from pathlib import Path
from tests.zarr.test_compressors import CONTENT, PACK
from tests.zarr.chunks import decoded

codec, pack = PACK["lzma raw"]  # which requests a dictionary of 1 GiB
stream = pack(CONTENT)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20),) * 2)
assert decoded(len(CONTENT), stream, codec) == CONTENT
"""


def test_lzma_dictionaries_are_bounded() -> None:
    subprocess.run([sys.executable, "-c", DICTIONARY], timeout=250, check=True)
    stream = bytearray(lzma.compress(CONTENT, lzma.FORMAT_ALONE))
    stream[1:5] = (1 << 30).to_bytes(4, "little")
    with pytest.raises(CodecError, match="lzma: damaged: Memory usage limit exceeded"):
        decoded(len(CONTENT), bytes(stream), PACK["lzma alone"][0])


def test_lz4_sizes_over_the_limit_are_refused() -> None:
    for size in (4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
        with pytest.raises(CodecError, match=f"lz4: holds {size} bytes where at most 3 are expected"):
            decoded(3, size.to_bytes(4, "little") + b"0abc", PACK["lz4"][0])


def test_nested_compressors_are_decoded_within_a_bound() -> None:
    stream = gzip.compress(zlib.compress(CONTENT))
    assert decoded(len(CONTENT), stream, PACK["zlib"][0], PACK["gzip"][0]) == CONTENT
    with pytest.raises(CodecError, match=f"gzip: holds more than {2 * len(CONTENT) + 65536} bytes"):
        decoded(len(CONTENT), gzip.compress(bytes(10 * len(CONTENT) + 65536)), PACK["zlib"][0], PACK["gzip"][0])


@settings(max_examples=100)
@given(st.data())
def test_mutated_streams_are_refused_or_decode_to_the_declared_size(data: st.DataObject) -> None:
    codec, pack = PACK[data.draw(st.sampled_from(sorted(PACK)))]
    stream = bytearray(pack(CONTENT))
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decoded(len(CONTENT), bytes(stream), codec)
    except CodecError:
        return
    assert len(found) == len(CONTENT)


BOMBS = """
import os, resource, sys
from tests.zarr.test_compressors import PACK, bomb, frame_bomb
from tests.zarr.chunks import decoded
from zarrfs.zarr.codecs import CodecError

decoded(1, b"0", *[])  # completes imports
for name in sys.argv[1:]:
    if os.fork():  # a process each, whose memory at most is its own
        assert os.wait()[1] == 0
        continue
    codec, stream = (("blosc", {}), frame_bomb()) if name == "blosc" else (PACK[name][0], bomb(name))
    try:
        decoded(1000, stream[:50], codec)
    except CodecError:
        pass
    before, error = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, ""
    try:
        decoded(100_000, stream, codec)
    except CodecError as exc:
        error = exc
    print(name, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, error, sep="|")
    break
"""
BOMB_NAMES = ["gzip", "zstd", "zstd unsized", "blosc"]  # bz2 and lzma are read by the loop of gzip


def bomb(name: str) -> bytes:
    """Compress 32 MiB of zeros in pieces, so that this process never holds them all."""
    piece = bytes(1 << 16)
    stream: Any = {
        "gzip": lambda: zlib.compressobj(1, wbits=31),
        "zstd": lambda: zstandard.ZstdCompressor().compressobj(1 << 25),
        "zstd unsized": lambda: zstandard.ZstdCompressor().compressobj(),
    }[name]()
    return b"".join([*(stream.compress(piece) for _ in range(1 << 9)), stream.flush()])


def frame_bomb() -> bytes:
    """Make a Blosc frame whose header claims 2 GiB."""
    frame = bytearray(numcodecs.blosc.compress(bytes(100_000), b"lz4", 5))
    frame[4:8] = (0x7FFFFFFF - 16).to_bytes(4, "little")
    return bytes(frame)


def test_decompression_bombs_are_refused() -> None:
    """A chunk of 100 kB that expands to 32 MiB is refused, and the process grows by a few MiB only."""
    command = [sys.executable, "-c", BOMBS, *BOMB_NAMES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    found = [line.split("|", 2) for line in done.stdout.splitlines()]
    assert [name for name, _growth, _error in found] == BOMB_NAMES
    for name, growth, error in found:
        assert "holds" in error or "are stored" in error, name  # before or while it is decoded
        assert int(growth) < 16, name
