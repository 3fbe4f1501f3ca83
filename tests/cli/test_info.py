"""zarrfs info on arrays: all sample stores, chunk counts, chunk maps, and the HTML page."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import zarr
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import DATA
from tests.copying.test_array_check import chunk_keys
from tests.servers import Nginx
from tests.zarrsamples import SAMPLES, STORES
from zarrfs.cli import main
from zarrfs.copying.array_survey import ChunkMap, packed
from zarrfs.zarr.grid import Grid


def info(*arguments: object) -> Any:
    done = CliRunner().invoke(main, ["info", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


def nodes(*arguments: object) -> dict[str, dict[str, Any]]:
    return {node["path"]: node for node in info("--json", *arguments)["nodes"]}


@pytest.mark.parametrize("store", STORES, ids=lambda path: path.name)
def test_info_counts_every_chunk_of_the_sample_stores(store: Path) -> None:
    found = nodes(store)
    arrays = {path: node for path, node in found.items() if node["type"] == "array"}
    expected = {sample.path: sample for sample in SAMPLES if sample.store == store}
    assert set(arrays) == set(expected)
    for path, node in arrays.items():
        assert tuple(node["shape"]) == expected[path].shape
        assert not node["problem"]
        assert node["outside_grid"] == 0
        assert node["chunks_total"] == math.prod(node["grid"])
    chunks = chunk_keys(store)
    assert sum(node["chunks_initialised"] for node in arrays.values()) == len(chunks)
    assert sum(node["stored_bytes"] for node in arrays.values()) == sum((store / key).stat().st_size for key in chunks)
    text = info(store)
    assert all(path.rpartition("/")[2] in text for path in found)


def test_nodes_are_described_as_zarr_python_does(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "g"), mode="w")
    array = group.create_array("sub/a", shape=(100, 100), chunks=(10, 30), dtype="f8")
    array[:35] = 1.5
    sharded = group.create_array("s", shape=(64,), chunks=(4,), shards=(16,), dtype="i2", compressors=None)
    sharded[:20] = 1
    (tmp_path / "g/s/c/9").write_bytes(b"x")
    found = nodes(tmp_path / "g")
    assert list(found) == ["", "s", "sub", "sub/a"]
    node, about = found["sub/a"], array.info_complete()
    assert (node["logical_bytes"], node["chunks_initialised"]) == (array.nbytes, about._count_chunks_initialized)
    assert node["stored_bytes"] == sum(file.stat().st_size for file in (tmp_path / "g/sub/a/c").rglob("*/*"))
    assert node["ratio"] == array.nbytes / node["stored_bytes"]
    assert node["initialised"] == 16 / 40
    assert (found["s"]["chunks"], found["s"]["inner_chunks"], found["s"]["chunks_initialised"]) == ([16], [4], 2)
    assert found["s"]["outside_grid"] == 1
    text = info(tmp_path / "g").splitlines()
    assert re.fullmatch(r"    a +100x100 +<f8 +10x30 +bytes,zstd +16 of 40 40% +78\.1 KiB +\S+ \S+ +\d+\.\d", text[-1])
    assert re.search(r"2 of 4 50% \+1 outside", "\n".join(text))
    assert list(nodes(tmp_path / "g", "sub")) == ["sub", "sub/a"]
    assert "? of 40" in info("--no-count", tmp_path / "g")


def test_damaged_arrays_are_reported_and_the_others_shown(tmp_path: Path) -> None:
    hier = shutil.copytree(DATA / "zarr/v2_hier", tmp_path / "hier")
    (hier / "raw/.zarray").write_text('{"zarr_format": 2, "shape": [-1]}')
    found = nodes(hier)
    assert found["raw"]["type"] == "array"
    assert found["raw"]["problem"]
    assert found["zstd"]["chunks_initialised"] == 3
    assert re.search(r"^  raw +problem: ", info(hier), re.MULTILINE)


def test_a_tree_without_zarr_metadata_has_no_nodes_and_no_page(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_text("x")
    assert "nodes" not in info("--json", tmp_path)
    done = CliRunner().invoke(main, ["info", "--html", str(tmp_path / "page.html"), str(tmp_path)])
    assert done.exit_code == 1
    assert "no Zarr groups or arrays" in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_chunks_of_a_reference_set_are_counted(references: Path) -> None:
    """Chunks are counted in the index of the set; its targets are not read."""
    found = nodes(references / "combined_v1.json")
    assert (found["sub/c"]["chunks_initialised"], found["sub/c"]["stored_bytes"]) == (3, 24_000)
    assert found["t2m"]["chunks_initialised"] == found["t2m"]["chunks_total"] == 24


@pytest.mark.parametrize("lists", [True, False])
def test_a_store_on_a_web_server_is_described_like_a_local_one(nginx: Nginx, lists: bool) -> None:
    """Without listings, each chunk is requested; with them, at least its size."""
    name = f"info{lists}"
    shutil.copytree(DATA / "zarr/v3_hier", nginx.plain.root / name)
    url = f"{(nginx.listing if lists else nginx.plain).url}/{name}"
    here, there = nodes(DATA / "zarr/v3_hier"), nodes("-q", url)
    assert there == here


# -- chunk maps


def drawn(text: str) -> str:
    """Decode the run-length encoding of packed()."""
    runs = (run.split("x") for run in text.split(" ")) if text else ()
    return "".join(level * int(*count or "1") for level, *count in runs)


@given(st.text("-012345678", max_size=300))
def test_unpacking_restores_packed_levels(levels: str) -> None:
    assert drawn(packed(levels)) == levels


@given(st.lists(st.integers(0, 12), max_size=4), st.data())
def test_a_map_counts_every_chunk_once(shape: list[int], data: st.DataObject) -> None:
    grid = Grid(shape, [1] * len(shape))
    most = (data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8)))
    everything = ChunkMap(grid, most)
    assert set(everything.levels()) <= {"0", "-"}
    cells = everything.rows * everything.columns
    assert everything.rows <= most[0]
    assert everything.columns <= most[1]
    for number in range(grid.size):
        everything.add(number)
    levels = everything.levels()
    assert len(levels) == cells
    assert set(levels) <= {"8", "-"}
    if grid.size:
        one = ChunkMap(grid, most)
        one.add(data.draw(st.integers(0, grid.size - 1)))
        found = one.levels()
        assert len([level for level in found if level not in "0-"]) == 1
        assert [level == "-" for level in found] == [level == "-" for level in levels]


def test_a_map_of_an_enormous_grid_is_small() -> None:
    chunks = ChunkMap(Grid([10**12, 10**12, 5], [1, 1, 1]))
    for number in (0, 5 * 10**24 - 1):
        chunks.add(number)
    levels = chunks.levels()
    assert len(levels) == 64 * 128
    assert (levels[0], levels[-1], set(levels[1:-1])) == ("1", "1", {"0"})


# -- the page


def page_of(tmp_path: Path) -> str:
    group = zarr.open_group(str(tmp_path / "g"), mode="w")
    square = group.create_array("square", shape=(20, 20), chunks=(10, 10), dtype="u1")
    square[:10] = 1
    group.create_array("<script>&", shape=(3,), chunks=(1,), dtype="u1")[:] = 1
    for number in range(25):
        group.create_array(f"more{number}", shape=(), dtype="u1")[...] = 1
    info("--html", tmp_path / "page.html", tmp_path / "g")
    return (tmp_path / "page.html").read_text()


def test_the_page_is_one_file_without_external_resources(tmp_path: Path) -> None:
    text = page_of(tmp_path)
    assert not re.search(r"(src|href)=|url\((?!#)|https?:|@import|<script", text)
    assert "default-src 'none'" in text
    assert "/&lt;script&gt;&amp;" in text
    assert text.count("<figure>") == 27
    assert 'viewBox="0 0 2 2"' in text
    assert 'd="M0 0h2v1h-2z"/>' in text  # the upper row, whose two chunks exist, and the lower one
    assert 'd="M0 1h2v1h-2z"/>' in text
    done = CliRunner().invoke(main, ["info", "--html", str(tmp_path / "page.html"), str(tmp_path / "g")])
    assert done.exit_code == 2
    assert "--force" in done.stderr
    info("--force", "--html", tmp_path / "page.html", tmp_path / "g")
