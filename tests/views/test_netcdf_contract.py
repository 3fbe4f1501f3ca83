"""view=netcdf fulfils the store contract: one file, readable in any byte range."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import strategies as st

from tests.servers import S3, s3
from tests.store.contract import StoreContract, Tree
from tests.views.netcdfviews import converted, netcdf_view
from zarrfs.config.options import parse
from zarrfs.sources import open_source
from zarrfs.views.netcdf import NetCDFView

__all__ = ["s3"]


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


def test_a_bucket_gives_the_same_file_as_a_local_store(s3: S3, tmp_path: Path) -> None:
    """Readers of NetCDF find the right values in the file, too."""
    import trio

    write(tmp_path / "x.zarr")
    for path in (tmp_path / "x.zarr").rglob("*"):
        if path.is_file():
            s3.client.upload_file(str(path), s3.bucket, f"view/x.zarr/{path.relative_to(tmp_path / 'x.zarr')}")
    given = [f"s3.{name}={value}" for name, value in s3.options.items()]

    async def read() -> tuple[list[str], bytes]:
        options = parse(["view=netcdf", *given]).options
        store = open_source(f"s3://{s3.bucket}/view/x.zarr", options, child=False)
        try:
            return [info.name async for info in store.list_dir("")], bytes(await store.get("x.nc"))
        finally:
            await store.aclose()

    names, content = trio.run(read)
    assert names == ["x.nc"]
    assert converted(tmp_path / "x.zarr", tmp_path / "local.nc") == {}
    assert content == (tmp_path / "local.nc").read_bytes()
    with netCDF4.Dataset("memory.nc", memory=content) as data:
        assert np.array_equal(data["a/b c/t"][:], np.arange(30).reshape(5, 6) + 3)
    with xr.open_dataset(tmp_path / "local.nc", engine="h5netcdf") as data:
        assert np.array_equal(data["t"], zarr.open_array(tmp_path / "x.zarr/t", mode="r")[:])  # type: ignore[arg-type]
