"""The tree of view=arrays: names, arrays left out, and the store contract."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import trio
import zarr
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.store.contract import StoreContract, Tree, listed
from tests.views.arraystores import view_of, with_view
from zarrfs.errors import NotFound, TargetChanged
from zarrfs.views.arrays import ArraysView


def small(group: zarr.Group, name: str, length: int = 3, **more: Any) -> None:
    """Write an array of u1 with consecutive values and an attribute."""
    array = group.create_array(name, shape=(length,), chunks=(2,), dtype="u1", fill_value=0, **more)
    array[:] = np.arange(length)
    array.attrs["n"] = length


def npy(length: int) -> bytes:
    """Return the .npy file of an array that small() writes."""
    out = io.BytesIO()
    np.save(out, np.arange(length, dtype="u1"))
    return out.getvalue()


def attributes(**values: Any) -> bytes:
    """Return a JSON document of attributes."""
    return json.dumps(values, indent=2).encode()


def tree_of(lengths: dict[str, int]) -> Tree:
    """Return the expected tree for arrays of given path and length; each group has one attribute."""
    tree = {}
    for path, length in lengths.items():
        tree |= {f"{path}.npy": npy(length), f"{path}.json": attributes(n=length)}
        for depth in range(path.count("/")):
            above = "/".join(path.split("/")[: depth + 1])
            tree[f"{above}/.attributes.json"] = attributes(of=above)
    return tree


LENGTHS = {"zarr": 3, "a/zarr": 1, "a/c/0": 7, "b": 4, "a b/100%": 2, "é/ключ": 5, "a.b/c": 6, "a-b": 2, "B": 0}
NAMES = st.text("ab-. é", min_size=1, max_size=3).filter(lambda name: name.strip(". ") == name)
PATHS = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.integers(0, 5), max_size=5)


def without_conflicts(lengths: dict[str, int]) -> dict[str, int]:
    """Return the arrays that lie below no other array."""
    return {
        path: length for path, length in lengths.items()
        if not any(path.startswith(other + "/") for other in lengths)
    }  # fmt: skip


class TestContract(StoreContract):
    tree: ClassVar[Tree] = tree_of(LENGTHS)
    file: ClassVar[str] = "b.npy"
    trees = PATHS.map(without_conflicts).map(tree_of)
    examples = 10

    @contextlib.asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[Any]:
        with tempfile.TemporaryDirectory() as directory:
            root = zarr.open_group(directory, mode="w", zarr_format=3)
            for key in tree:
                if key.endswith(".npy"):
                    path = key.removesuffix(".npy")
                    above, _, name = path.rpartition("/")
                    group = root
                    for depth, part in enumerate(above.split("/") if above else []):
                        group = group.require_group(part)
                        group.attrs["of"] = "/".join(above.split("/")[: depth + 1])
                    small(group, name, json.loads(tree[f"{path}.json"])["n"])
            async with view_of(Path(directory)) as view:
                yield view


async def names(view: ArraysView, prefix: str = "") -> list[str]:
    """Return the names in a directory, after checking each with info()."""
    found = await listed(view, prefix)
    for info in found:
        assert await view.info(f"{prefix}/{info.name}".lstrip("/")) == info
    return [info.name for info in found]


def test_files_whose_names_clash_or_are_too_long_are_left_out_with_a_reason(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path, mode="w", zarr_format=2)
    small(root, "x")
    root.create_group("x.npy").attrs["is"] = "a group"
    small(root, "y", 5)
    small(root, "y.npy", 4)
    long = "l" * 252
    small(root, long)
    root.attrs["title"] = "names"
    small(root, ".attributes")

    async def check(view: ArraysView) -> None:
        assert await names(view) == [
            ".attributes.json", ".attributes.npy", "x.json", "x.npy", "y.json", "y.npy", "y.npy.json", "y.npy.npy",
        ]  # fmt: skip
        assert (await names(view, "x.npy")) == [".attributes.json"]
        assert json.loads(bytes(await view.get(".attributes.json"))) == {"title": "names"}
        assert bytes(await view.get("y.npy")) == npy(5)
        assert bytes(await view.get("y.npy.npy")) == npy(4)
        reasons = await view.left_out("")
        assert set(reasons) == {"x", long, ".attributes"}
        assert "255" in reasons[long]
        assert await view.left_out("y") == {}

    with_view(tmp_path, check)


def test_arrays_no_file_can_represent_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = zarr.open_group(tmp_path, mode="w", zarr_format=2)
    small(root, "good")
    for name, change in {
        "words": {"dtype": "|O", "filters": [{"id": "vlen-utf8"}], "fill_value": ""},
        "huge": {"shape": [2**61], "dtype": "<f8"},
        "deep": {"shape": [1] * 65, "chunks": [1] * 65},
    }.items():
        (tmp_path / name).mkdir()
        document = json.loads((tmp_path / "good/.zarray").read_text()) | change
        (tmp_path / name / ".zarray").write_text(json.dumps(document))

    async def check(view: ArraysView) -> None:
        for _ in range(2):
            assert await names(view) == ["good.json", "good.npy"]
            with pytest.raises(NotFound):
                await view.get("words.npy")
        assert set(await view.left_out("")) == {"words", "huge", "deep"}

    with_view(tmp_path, check)
    assert len([record for record in caplog.records if "left out" in record.message]) == 3


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("x.npy", {"shape": [2, 6]}), ("x.npy", {"shape": [3, 2], "chunks": [3, 2]}),
        ("x.npy", {"dtype": ">i4"}), ("x.npy", {"order": "F"}),
    ],
)  # fmt: skip
def test_an_open_array_whose_layout_changes_is_an_error(key: str, change: dict[str, Any], tmp_path: Path) -> None:
    about = {"zarr_format": 2, "shape": [2, 3], "chunks": [2, 3], "dtype": "<i4", "fill_value": 0, "order": "C"}
    about |= {"compressor": None, "filters": None}
    (tmp_path / "x").mkdir()
    (tmp_path / ".zgroup").write_text('{"zarr_format": 2}')
    (tmp_path / "x/.zarray").write_text(json.dumps(about))
    items = np.arange(6, dtype="<i4").tobytes()
    (tmp_path / "x/0.0").write_bytes(items)

    async def main() -> None:
        async with view_of(tmp_path) as view:
            value = await view.open(key)
            assert bytes(await value.read(value.size - 24, 24)) == items
            (tmp_path / "x/.zarray").write_text(json.dumps(about | change, indent=1))
            await trio.sleep(1.1)  # documents are looked at once a second
            with pytest.raises(TargetChanged):
                await value.read(value.size - 24, 24)
        async with view_of(tmp_path) as view:
            again = await view.open(key)
            assert bytes(await again.read(0, again.size)) == bytes(await view.get(key))
            assert value.info.identity not in (None, again.info.identity)  # so the kernel shares no pages between them
            listed = {info.name: info.identity async for info in view.list_dir("")}
            assert listed[key] == again.info.identity == (await view.info(key)).identity

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_attributes_with_a_nan_stay_as_in_the_source(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path, mode="w", zarr_format=2)
    small(root, "x")
    (tmp_path / "x/.zattrs").write_text('{"missing": NaN}')

    async def check(view: ArraysView) -> None:
        assert "NaN" in bytes(await view.get("x.json")).decode()

    with_view(tmp_path, check)
