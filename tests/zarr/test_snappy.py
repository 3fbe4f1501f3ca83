"""Raw blocks of Snappy: those that Arrow's Snappy writes, and others that the format allows."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zarrfs.zarr.codecs import CodecError
from zarrfs.zarr.snappy import decompress

CONTENT = st.one_of(
    st.binary(max_size=300),
    st.text("ab", max_size=3000).map(str.encode),
    st.builds(lambda part, times: part * times, st.binary(min_size=1, max_size=90), st.integers(1, 900)),
)


def packed(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="snappy", asbytes=True))


@settings(max_examples=300, deadline=None)
@given(CONTENT)
def test_blocks_written_by_snappy_are_decoded(content: bytes) -> None:
    assert decompress(packed(content), len(content)) == content


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (b"\x00", b""),
        (b"\x03\x08abc", b"abc"),
        (b"\x03\xf0\x02abc", b"abc"),  # a literal with one length byte, where none is needed
        (b"\x03\xf4\x02\x00abc", b"abc"),
        (b"\x03\xf8\x02\x00\x00abc", b"abc"),
        (b"\x03\xfc\x02\x00\x00\x00abc", b"abc"),
        (b"\x07\x08abc\x01\x03", b"abcabca"),  # a copy that overlaps its own output, with an offset of 11 bits
        (b"\x05\x08abc\x06\x02\x00", b"abcbc"),  # an offset of 16 bits
        (b"\x05\x08abc\x07\x02\x00\x00\x00", b"abcbc"),  # an offset of 32 bits, which no writer uses
        (b"\x0b\x00a\x19\x01", b"a" * 11),  # one byte repeated
        (b"\x83\x80\x00\x08abc", b"abc"),  # the total length, in more bytes than it needs
    ],
)
def test_every_kind_of_element_is_decoded(block: bytes, content: bytes) -> None:
    assert decompress(block, len(content)) == content


@pytest.mark.parametrize(
    ("block", "size", "says"),
    [
        (b"", 0, "no length"),
        (b"\xff\xff\xff\xff\xff\x00", 3, "no length"),
        (b"\x04\x08abc", 3, "holds 4 bytes where 3 are expected"),
        (b"\xff\xff\xff\xff\x0f\x08abc", 3, "holds 4294967295 bytes"),
        (b"\x04\x08abc", 4, "ends early"),
        (b"\x03\x08ab", 3, "a literal goes beyond the end"),
        (b"\x03\xfc\xff\xff\xff\xffabc", 3, "a literal goes beyond the end"),
        (b"\x03\xfc\x02", 3, "a literal goes beyond the end"),
        (b"\x02\x08abc", 2, "a literal goes beyond the end"),
        (b"\x07\x08abc\x01", 7, "ends early"),
        (b"\x07\x08abc\x01\x00", 7, "a copy goes beyond the output"),
        (b"\x07\x08abc\x01\x04", 7, "a copy goes beyond the output"),
        (b"\x06\x08abc\x01\x03", 6, "a copy goes beyond the output"),
        (b"\x43\x08abc\xfe\x03\x00", 67, None),  # valid: the copy ends where the output does
        (b"\x42\x08abc\xfe\x03\x00", 66, "a copy goes beyond the output"),
    ],
)
def test_damaged_blocks_are_refused(block: bytes, size: int, says: str | None) -> None:
    if says is None:
        assert decompress(block, size) == (b"abc" * 23)[:size]
        return
    with pytest.raises(CodecError, match=f"snappy: .*{says}"):
        decompress(block, size)


@settings(max_examples=300, deadline=None)
@given(CONTENT, st.data())
def test_mutated_blocks_are_refused_or_decode_to_the_declared_size(content: bytes, data: st.DataObject) -> None:
    block = bytearray(packed(content))
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    del block[data.draw(st.integers(0, len(block))) :]
    try:
        found = decompress(block, len(content))
    except CodecError:
        return
    assert len(found) == len(content)
