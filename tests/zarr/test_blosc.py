"""Blosc frames: checks of their headers, and decoding without numcodecs."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import blosc as blosc_package
import numcodecs.blosc
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import DATA
from tests.zarr.chunks import decoded
from zarrfs.zarr import blosc
from zarrfs.zarr.codecs import CodecError

BLOSC: tuple[str, dict[str, Any]] = ("blosc", {})
CONTENT = np.arange(2000, dtype="<i4").tobytes()
SNAPPY = sorted((DATA / "blosc").glob("snappy.*"))
OLD_ZSTD = DATA / "zarr" / "v1_float64_05" / "0.0.0.0"  # written by zarr 1.1 with zstd 0.7


def framed(content: bytes, cname: str = "lz4", shuffle: int = 1, typesize: int = 4, blocksize: int = 0) -> bytearray:
    return bytearray(
        numcodecs.blosc.compress(content, cname.encode(), 5, shuffle, blocksize=blocksize, typesize=typesize)
    )


def test_one_thread_decodes_a_frame_without_the_gil() -> None:
    assert decoded(len(CONTENT), bytes(framed(CONTENT)), BLOSC) == CONTENT
    assert (blosc_package.set_nthreads(1), blosc_package.set_releasegil(True)) == (1, 1)


def test_bytes_after_a_frame_are_ignored() -> None:
    for shuffle, content in ((1, CONTENT), (0, bytes(range(256)))):
        assert decoded(len(content), bytes(framed(content, shuffle=shuffle)) + b"more", BLOSC) == content


@pytest.mark.parametrize(
    ("at", "form", "value", "says"),
    [
        (0, "<B", 0, "a frame of format 0: only 1 and 2 are known"),
        (0, "<B", 5, "a frame of format 5, which Blosc 2 writes: only 1 and 2 are known"),
        (3, "<B", 0, "items of 0 bytes"),
        (4, "<I", 7999, "in blocks of 8000 of 7999 bytes"),
        (4, "<I", 8001, "holds 8001 bytes where at most 8000 are expected"),
        (4, "<I", 0xFFFFFFFF, "holds 4294967295 bytes"),
        (4, "<I", 0, "decodes to 0 bytes, not 8000"),
        (8, "<I", 0, "in blocks of 0 of 8000 bytes"),
        (8, "<I", 8001, "in blocks of 8001 of 8000 bytes"),
        (8, "<I", 1, "cannot hold 8000 blocks"),
        (12, "<I", 15, "a frame of 15 bytes in"),
        (12, "<I", 0x7FFFFFFF, "a frame of 2147483647 bytes in"),
        (12, "<I", 100, "a damaged frame of lz4"),
        (16, "<I", 0x7FFFFFF0, "a damaged frame of lz4"),
        (20, "<I", 0xFFFFFFFF, "a damaged frame of lz4"),
        (2, "<B", 0x03, "cannot store 8000"),
        (2, "<B", 7 << 5, "inner codec 7 is not known"),
    ],
)
def test_invalid_headers_are_refused(at: int, form: str, value: int, says: str) -> None:
    frame = framed(CONTENT)
    struct.pack_into(form, frame, at, value)
    with pytest.raises(CodecError, match=f"blosc: .*{says}"):
        decoded(len(CONTENT), bytes(frame), BLOSC)


@pytest.mark.parametrize("content", [bytes(range(100)), CONTENT], ids=["stored", "compressed"])
def test_truncated_frames_are_refused(content: bytes) -> None:
    frame = bytes(framed(content))
    for length in range(len(frame)):
        with pytest.raises(CodecError, match="blosc"):
            decoded(len(content), frame[:length], BLOSC)
    # also where the header declares the shorter length
    for length in range(16, len(frame)):
        with pytest.raises(CodecError, match="blosc"):
            decoded(len(content), frame[:12] + struct.pack("<I", length) + frame[16:length], BLOSC)


@pytest.mark.parametrize("path", SNAPPY, ids=[path.name for path in SNAPPY])
def test_snappy_frames_are_decoded(path: Path) -> None:
    expected = (np.arange(1500) // 60 % 9).astype("<u4").tobytes()[:5987]
    frame = path.read_bytes()
    header = blosc.parse_header(frame, len(expected))
    assert (header.stored, header.compressor) == (False, "snappy")
    assert decoded(len(expected), frame, BLOSC) == expected


@pytest.mark.parametrize("path", SNAPPY[::4], ids=[path.name for path in SNAPPY[::4]])
def test_damaged_snappy_frames_are_refused_or_decode_to_the_declared_size(path: Path) -> None:
    frame = path.read_bytes()
    for length in range(len(frame)):
        with pytest.raises(CodecError):
            decoded(5987, frame[:12] + struct.pack("<I", length) + frame[16:length], BLOSC)
    for at in range(16, len(frame)):
        for value in (0, 255, frame[at] ^ 1):
            changed = frame[:at] + bytes([value]) + frame[at + 1 :]
            try:
                found = decoded(5987, changed, BLOSC)
            except CodecError:
                continue
            assert len(found) == 5987


INNER: dict[str, blosc.InnerCodec] = {  # Blosc does not split blocks for zstd
    "zlib": lambda data, size: zlib.decompress(data),
    "zstd": lambda data, size: zstandard.decompress(data),
}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_decoding_block_by_block_equals_blosc(data: st.DataObject) -> None:
    """C-Blosc writes the frames, with inner codecs that Python has as well."""
    cname = data.draw(st.sampled_from(sorted(INNER)))
    typesize = data.draw(st.sampled_from([1, 2, 3, 4, 7, 8, 12, 16, 17, 20, 64, 255]))
    size = data.draw(st.integers(200, 20000))
    content = (np.arange(size) * data.draw(st.integers(1, 5)) // 7 % 251).astype("<u4").tobytes()[:size]
    blocksize = data.draw(st.sampled_from([0, 128, 1000, 4096]))
    frame = bytes(framed(content, cname, data.draw(st.sampled_from([0, 1, 2])), typesize, blocksize))
    header = blosc.parse_header(frame, size)
    if not header.stored:
        assert bytes(blosc.decode_blocks(header, memoryview(frame), INNER[cname])) == content


def test_zstd_0_7_needs_the_system_library(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = OLD_ZSTD.read_bytes()
    if blosc._libzstd() is not None:
        assert np.frombuffer(decoded(384, frame, BLOSC), "<f8")[:2] == pytest.approx([-1.63386325, -1.5857786])
        with pytest.raises(CodecError, match="blosc: a damaged frame of zstd 0"):
            decoded(384, frame[:31] + b"\xc0" + frame[32:], BLOSC)  # its only block becomes an end mark
    monkeypatch.setattr(blosc, "_LIBZSTD", ("libzstd.so.nowhere",))
    blosc._libzstd.cache_clear()
    with pytest.raises(CodecError, match=r"blosc: written by zstd 0[.]7, which only the system's libzstd reads"):
        decoded(384, frame, BLOSC)
    blosc._libzstd.cache_clear()


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_mutated_frames(data: st.DataObject) -> None:
    content = data.draw(st.sampled_from([CONTENT, bytes(3000), bytes(range(256)) * 9]))
    cname = data.draw(st.sampled_from(["lz4", "zstd", "blosclz", "zlib"]))
    frame = framed(content, cname, data.draw(st.sampled_from([0, 1, 2])), data.draw(st.sampled_from([1, 4, 8])))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decoded(len(content), bytes(frame), BLOSC)
    except CodecError:
        return
    assert len(found) == len(content)
