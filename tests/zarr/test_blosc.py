"""Blosc frames: checks of their headers."""

from __future__ import annotations

import struct
from typing import Any

import blosc as blosc_package
import numcodecs.blosc
import numpy as np
import pytest

from tests.conftest import DATA
from tests.zarr.chunks import decoded
from zarrfs.zarr.codecs import CodecError

BLOSC: tuple[str, dict[str, Any]] = ("blosc", {})
CONTENT = np.arange(2000, dtype="<i4").tobytes()
OLD_ZSTD = DATA / "zarr" / "v1_float64_05" / "0.0.0.0"  # written by zarr 1.1 with zstd 0.7


def framed(content: bytes, cname: str = "lz4", shuffle: int = 1, typesize: int = 4, blocksize: int = 0) -> bytearray:
    return bytearray(
        numcodecs.blosc.compress(content, cname.encode(), 5, shuffle, blocksize=blocksize, typesize=typesize)
    )


def test_one_thread_decodes_a_frame_without_the_gil() -> None:
    assert decoded(len(CONTENT), bytes(framed(CONTENT)), BLOSC) == CONTENT
    assert (blosc_package.set_nthreads(1), blosc_package.set_releasegil(True)) == (1, 1)


@pytest.mark.parametrize(
    ("at", "form", "value", "says"),
    [
        (0, "<B", 0, "a frame of format 0: only 1 and 2 are known"),
        (0, "<B", 5, "a frame of format 5, which Blosc 2 writes: only 1 and 2 are known"),
        (3, "<B", 0, "a damaged header"),
        (4, "<I", 7999, "a damaged header"),
        (4, "<I", 8001, "holds 8001 bytes where at most 8000 are expected"),
        (4, "<I", 0xFFFFFFFF, "holds 4294967295 bytes"),
        (4, "<I", 0, "decodes to 0 bytes, not 8000"),
        (8, "<I", 0, "a damaged header"),
        (8, "<I", 8001, "a damaged header"),
        (8, "<I", 1, "a damaged header"),
        (12, "<I", 15, "a frame that was cut: 15 bytes in"),
        (12, "<I", 0x7FFFFFFF, "a frame that was cut: 2147483647 bytes in"),
        (12, "<I", 100, "a damaged frame of lz4"),
        (16, "<I", 0x7FFFFFF0, "a damaged frame of lz4"),
        (20, "<I", 0xFFFFFFFF, "a damaged frame of lz4"),
        (2, "<B", 0x03, "a damaged header"),
        (2, "<B", 7 << 5, "a damaged header"),
    ],
)
def test_invalid_headers_are_refused(at: int, form: str, value: int, says: str) -> None:
    frame = framed(CONTENT)
    struct.pack_into(form, frame, at, value)
    with pytest.raises(CodecError, match=f"blosc: .*{says}"):
        decoded(len(CONTENT), bytes(frame), BLOSC)


@pytest.mark.parametrize("content", [bytes(range(100)), CONTENT], ids=["stored", "compressed"])
def test_frames_whose_header_declares_the_length_of_a_cut_frame_are_refused(content: bytes) -> None:
    frame = bytes(framed(content))
    for length in range(16, len(frame), 3):
        with pytest.raises(CodecError, match="blosc"):
            decoded(len(content), frame[:12] + struct.pack("<I", length) + frame[16:length], BLOSC)


def test_frames_of_snappy_and_of_zstd_0_7_are_refused() -> None:
    frame = framed(CONTENT)
    frame[2] = frame[2] & 31 | 2 << 5
    with pytest.raises(CodecError, match="snappy"):
        decoded(len(CONTENT), bytes(frame), BLOSC)
    with pytest.raises(CodecError, match=r"zstd 0\.7"):
        decoded(384, OLD_ZSTD.read_bytes(), BLOSC)
    with pytest.raises(CodecError, match="snappy"):
        decoded(len(CONTENT), bytes(framed(CONTENT)), ("blosc", {"cname": "snappy"}))
