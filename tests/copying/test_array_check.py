"""zarrfs check on arrays: the sample stores are sound, and damage is reported for the damaged entry only."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import trio
import zarr
from click.testing import CliRunner

from tests.conftest import DATA
from tests.views.arraystores import read_array
from tests.zarrsamples import SAMPLES, STORES
from zarrfs.cli import main
from zarrfs.copying.check import check
from zarrfs.copying.check_report import ArrayCheck, CheckReport
from zarrfs.errors import ReadError
from zarrfs.store.api import Value
from zarrfs.store.directory import FileSystemStore
from zarrfs.zarr import DOCUMENTS

LIMIT = 64 << 20


class Counting(FileSystemStore):
    """A directory that counts how often each key is read."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.gets: Counter[str] = Counter()

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Any:
        self.gets[key] += 1
        return await super().get(key, start, length)


def checked(
    path: Path, key: str = "", decode: bool = True, memory: int = LIMIT
) -> tuple[CheckReport, dict[str, ArrayCheck], Counter[str]]:
    """Check a directory; return the report, the arrays by path, and how often each key was read."""

    async def run() -> tuple[CheckReport, dict[str, ArrayCheck], Counter[str]]:
        store, report = Counting(str(path)), CheckReport()
        await check(store, key, report, memory, decode)
        await store.aclose()
        return report, {array.path: array for array in report.arrays}, store.gets

    return trio.run(run)


def chunk_keys(path: Path) -> list[str]:
    """Return the keys of all files except metadata and leftovers of writers."""
    found = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    documents = ("/meta/root", ".group.json", ".array.json", ".lock", ".partial")
    return [key for key in found if key.rpartition("/")[2] not in DOCUMENTS and not any(d in key for d in documents)]


@pytest.mark.parametrize("store", STORES, ids=lambda path: path.name)
def test_sample_stores_are_sound(store: Path) -> None:
    report, arrays, gets = checked(store)
    if any(sample.store == store and not sample.decoded for sample in SAMPLES):  # codecs that zarrfs does not have
        assert any(array.bad or array.note for array in arrays.values())
        return
    assert report.clean, report.bad
    chunks = chunk_keys(store)
    assert arrays
    assert sum(array.decoded for array in arrays.values()) == len(chunks) > 0
    assert all(array.chunks == array.decoded and not array.bad and not array.note for array in arrays.values())
    assert {gets[key] for key in chunks} == {1}
    assert report.ok == sum(file.is_file() for file in store.rglob("*"))


@pytest.fixture(params=["v2_hier", "v3_hier"])
def hier(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of a sample hierarchy that a test may damage."""
    return shutil.copytree(DATA / "zarr" / request.param, tmp_path / "hier")


def a_chunk(array: Path) -> Path:
    """Return the first chunk file of an array."""
    return min(file for file in array.rglob("*") if file.is_file() and file.name not in DOCUMENTS)


def only_bad(path: Path, **how: Any) -> tuple[str, str, str]:
    """Check a directory with exactly one bad entry; return (key, kind, reason) of that."""
    report, arrays, _gets = checked(path, **how)
    assert sum(array.bad for array in arrays.values()) <= 1
    (bad,) = report.bad
    assert "\n" not in bad.reason
    return bad.key, bad.kind, bad.reason


def cut(data: bytes) -> bytes:
    return data[:-1]


def longer(data: bytes) -> bytes:
    return data + b"\0"


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def nothing(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("array", "damage"),
    [("blosc", cut), ("raw", cut), ("raw", longer), ("gzip", nothing), ("zstd", cut), ("crc", flipped),
     ("shard", flipped)],
)  # fmt: skip
def test_a_chunk_that_does_not_decode_is_reported_with_its_codec(
    hier: Path, array: str, damage: Callable[[bytes], bytes]
) -> None:
    if not (hier / array).exists():
        return  # Zarr v2 has no such codec
    chunk = a_chunk(hier / array)
    chunk.write_bytes(damage(chunk.read_bytes()))
    key, kind, reason = only_bad(hier)
    assert (key, kind) == (str(chunk.relative_to(hier)), "undecodable")
    codec = {"raw": "bytes", "crc": "crc32c", "shard": ""}.get(array, array)
    assert reason.startswith(codec) or "checksum" in reason, reason  # the reason names the codec
    _report, arrays, _gets = checked(hier)
    assert arrays[array].decoded == arrays[array].chunks - 1
    report, _arrays, _gets = checked(hier, decode=False)
    assert report.clean


def test_files_outside_the_grid_are_reported(hier: Path) -> None:
    chunk = a_chunk(hier / "partial")
    name = "partial/c/9/0" if (hier / "zarr.json").exists() else "partial/9.0"
    (hier / name).parent.mkdir(exist_ok=True, parents=True)
    shutil.copy(chunk, hier / name)
    key, kind, reason = only_bad(hier)
    assert (key, kind) == (name, "outside grid")
    assert "[4, 4]" in reason
    (hier / name).rename(hier / "partial/notes.txt")
    assert only_bad(hier)[:2] == ("partial/notes.txt", "outside grid")
    (hier / "partial/notes.txt").rename(hier / "partial/0.0.1234.partial")
    assert checked(hier)[0].clean  # a killed writer leaves such files


def test_a_chunk_with_another_separator_than_that_of_its_array_is_outside_the_grid(tmp_path: Path) -> None:
    array = zarr.create_array(str(tmp_path / "a"), shape=(2, 2), chunks=(1, 1), dtype="u1", zarr_format=2)
    array[:] = 1
    document = json.loads((tmp_path / "a/.zarray").read_text()) | {"dimension_separator": "."}
    (tmp_path / "a/.zarray").write_text(json.dumps(document))
    (tmp_path / "a/1").mkdir()
    (tmp_path / "a/1.1").rename(tmp_path / "a/1/1")
    key, kind, reason = only_bad(tmp_path / "a")
    assert (key, kind) == ("1/1", "outside grid")
    assert "0.0" in reason


# -- metadata


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("text", "rule"),
    [("{", ""), ("[]", ""), ('{"zarr_format": 2, "shape": [-1]}', ""), ('{"zarr_format": 7}', "zarr_format")],
)
def test_an_invalid_document_is_reported_and_other_arrays_are_decoded(text: str, rule: str, tmp_path: Path) -> None:
    for name in "ab":
        zarr.create_array(str(tmp_path / "g" / name), shape=(2,), chunks=(1,), dtype="u1", zarr_format=2)[:] = 1
    (tmp_path / "g/a/.zarray").write_text(text)
    report, arrays, _gets = checked(tmp_path / "g")
    (bad,) = report.bad
    assert (bad.key, bad.kind) == ("a/.zarray", "bad metadata")
    assert rule in bad.reason
    assert (arrays["a"].array, arrays["b"].decoded) == (None, 2)


def test_arrays_beside_an_unreadable_document_are_checked(tmp_path: Path) -> None:
    class Failing(FileSystemStore):
        async def open(self, key: str) -> Value:
            if key == "b/.zarray":
                raise ReadError(key, "server error", 500)
            return await super().open(key)

    for name in "abc":
        zarr.create_array(str(tmp_path / "g" / name), shape=(2,), chunks=(1,), dtype="u1", zarr_format=2)[:] = 1

    async def run() -> CheckReport:
        store, report = Failing(str(tmp_path / "g")), CheckReport()
        await check(store, "", report, LIMIT, decode=True)
        await store.aclose()
        return report

    report = trio.run(run)
    assert {array.path: array.decoded for array in report.arrays} == {"a": 2, "c": 2}
    assert [bad.key for bad in report.bad] == ["b/.zarray"]


def test_an_unknown_codec_is_reported(tmp_path: Path) -> None:
    array = zarr.create_array(str(tmp_path / "a"), shape=(2,), chunks=(1,), dtype="u1", zarr_format=2)
    array[:] = 1
    edited(tmp_path / "a/.zarray", compressor={"id": "nosuch"})
    report, arrays, gets = checked(tmp_path / "a")
    (bad,) = report.bad
    assert bad.kind == "undecodable"
    assert "nosuch" in bad.reason
    assert (arrays[""].chunks, arrays[""].decoded, gets["0"]) == (2, 0, 1)


# -- parts and bounds


def test_a_check_of_one_key_covers_only_its_array(hier: Path) -> None:
    chunk = a_chunk(hier / "blosc")
    key = str(chunk.relative_to(hier))
    chunk.write_bytes(b"x")
    for part in (key, "blosc"):
        report, arrays, _gets = checked(hier, part)
        assert [bad.key for bad in report.bad] == [key]
        assert set(arrays) == {"blosc"}
    assert checked(hier, "sub")[0].clean


def test_chunks_that_do_not_fit_in_memory_are_read_but_not_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a"
    zarr.create_array(str(path), shape=(1 << 20,), chunks=(1 << 20,), dtype="u1", compressors=None)[:] = 1
    report, arrays, _gets = checked(path, memory=1 << 20)
    assert report.clean
    assert report.bytes > 1 << 20
    assert (arrays[""].chunks, arrays[""].decoded) == (1, 0)
    assert "memory_limit=" in str(arrays[""].note)


def test_a_shard_that_does_not_fit_in_memory_is_decoded_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "a"
    array = zarr.create_array(str(path), shape=(1 << 20,), chunks=(1 << 14,), shards=(1 << 20,), dtype="u1")
    array[: 1 << 19] = np.random.default_rng(1).integers(0, 255, 1 << 19, dtype="u1")
    report, arrays, _gets = checked(path, memory=1 << 18)
    assert report.clean
    assert arrays[""].decoded == 1
    shard = path / "c/0"
    data = bytearray(shard.read_bytes())
    data[5:9] = b"\xff\xff\xff\xff"
    shard.write_bytes(data)
    assert only_bad(path, memory=1 << 18)[:2] == ("c/0", "undecodable")


def test_a_compressed_chunk_may_be_cut_at_the_edge_of_the_array(tmp_path: Path) -> None:
    """Views read it. An uncompressed one is reported, as its size is wrong."""
    about = {"zarr_format": 2, "shape": [5], "chunks": [3], "dtype": "<i4", "fill_value": 0, "order": "C",
             "filters": None}  # fmt: skip
    for name, compressor in ("zlib", {"id": "zlib", "level": 1}), ("raw", None):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".zarray").write_text(json.dumps(about | {"compressor": compressor}))
        for number, size in enumerate((12, 8)):
            data = bytes(range(size))
            (tmp_path / name / str(number)).write_bytes(zlib.compress(data) if compressor else data)
    assert only_bad(tmp_path)[:2] == ("raw/1", "undecodable")
    assert read_array(tmp_path / "zlib").tobytes() == bytes(range(12)) + bytes(range(8))
    (tmp_path / "zlib/0").write_bytes(zlib.compress(bytes(8)))
    assert only_bad(tmp_path, key="zlib")[:2] == ("zlib/0", "undecodable")


@pytest.mark.parametrize("memory", [LIMIT, 1 << 18])
def test_a_shard_whose_index_points_outside_of_it_is_undecodable(tmp_path: Path, memory: int) -> None:
    path = tmp_path / "a"
    zarr.create_array(str(path), shape=(1 << 18,), chunks=(1 << 16,), shards=(1 << 18,), dtype="u1")[:] = 1
    data = bytearray((path / "c/0").read_bytes())
    index = struct.pack("<QQ", 1 << 40, 5) + data[-52:-4]
    data[-68:] = index + google_crc32c.value(bytes(index)).to_bytes(4, "little")
    (path / "c/0").write_bytes(data)
    key, kind, reason = only_bad(path, memory=memory)
    assert (key, kind) == ("c/0", "undecodable")
    assert "inner chunk 0 lies at" in reason


def test_a_damaged_shard_at_the_edge_of_the_array_is_undecodable(tmp_path: Path) -> None:
    """Its index has an entry for each inner chunk of a whole shard, also for those beyond the array."""
    path, little = tmp_path / "a", {"name": "bytes", "configuration": {"endian": "little"}}
    inner = {"chunk_shape": [2], "codecs": [little, {"name": "crc32c"}], "index_codecs": [little]}
    (path / "c").mkdir(parents=True)
    (path / "zarr.json").write_text(json.dumps({
        "zarr_format": 3, "node_type": "array", "shape": [6], "data_type": "uint8", "fill_value": 0, "attributes": {},
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8]}},
        "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }))  # fmt: skip
    parts = [bytes(pair) + google_crc32c.value(bytes(pair)).to_bytes(4, "little") for pair in ((1, 2), (3, 4), (5, 6))]
    data = bytearray(b"".join(parts) + struct.pack("<8Q", 0, 6, 6, 6, 12, 6, *[(1 << 64) - 1] * 2))
    (path / "c/0").write_bytes(data)
    assert checked(path)[0].clean
    data[0] ^= 1
    (path / "c/0").write_bytes(data)
    assert only_bad(path)[:2] == ("c/0", "undecodable")


# -- the command


def test_the_command_lists_arrays_and_bad_chunks(hier: Path) -> None:
    done = CliRunner().invoke(main, ["check", str(hier)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].split() == ["array", "chunks", "decoded", "bad"]
    chunk = a_chunk(hier / "blosc")
    chunk.write_bytes(b"x")
    done = CliRunner().invoke(main, ["check", str(hier)])
    assert done.exit_code == 1
    assert "undecodable              1\n" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("undecodable: "))
    assert str(chunk.relative_to(hier)) in line
    about = json.loads(CliRunner().invoke(main, ["check", "--json", str(hier)]).stdout)
    assert (about["clean"], about["undecodable"], about["outside_grid"], about["bad_metadata"]) == (False, 1, 0, 0)
    blosc = next(array for array in about["arrays"] if array["path"] == "blosc")
    assert (blosc["chunks"], blosc["decoded"], blosc["bad"]) == (9, 8, 1)
    assert CliRunner().invoke(main, ["check", "--no-decode", str(hier)]).exit_code == 0
