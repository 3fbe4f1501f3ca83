"""view=netcdf fulfils the store contract: one file, readable in any byte range."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import zarr
from hypothesis import strategies as st

from tests.store.contract import StoreContract, Tree
from tests.views.netcdfviews import converted, netcdf_view
from zarrfs.views.netcdf import NetCDFView


def write(path: Path) -> None:
    """Write a hierarchy of four groups."""
    root = zarr.open_group(path, mode="w", zarr_format=2, attributes={"title": "all"})
    for number, name in enumerate(("", "a", "a/b c", "é")):
        group = root.require_group(name) if name else root
        values = np.arange(30, dtype="<f4").reshape(5, 6) + number + 1
        group.create_array("t", shape=(5, 6), chunks=(2, 4), dtype="<f4")[:] = values


class TestNetCDFView(StoreContract):
    file = "x.nc"
    trees = st.just(Tree())
    examples = 1
    place: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _written(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.place = tmp_path_factory.mktemp("contract") / "x.zarr"
        write(cls.place)
        assert converted(cls.place, cls.place.with_name("copy.nc")) == {}
        cls.tree = {"x.nc": cls.place.with_name("copy.nc").read_bytes()}

    @asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[NetCDFView]:
        async with netcdf_view(self.place) as view:
            yield view

    def usable(self, tree: Tree) -> Tree:
        return self.tree
