"""The header of a NetCDF-4 file, written by libhdf5 in a child process: python -m zarrfs.views.netcdf_header.

The child process reads a description (netcdf_model.py), creates the file in memory with the space of every variable
allocated but not filled, and asks the library for the address of each variable. The written parts of the file are the
header; the rest is holes.

Variables are chunked with the implicit index of HDF5 1.10: with a fixed shape, no filter and early allocation, chunk n
is at base + n * chunk bytes, and no index is stored. Contiguous variables are for data that is kept with the header:
libhdf5 marks its sieve buffer for them as filled before a read has succeeded, and so returns zeros after an error.

This module imports no trio, so that the child process starts fast.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from zarrfs.system.sparse import each_extent

_VERSIONS = ("v110", "v110")  # of the HDF5 format
_PAGE = 4096  # bytes; each variable begins at a page, so that it shares no page with another one or the header
_AHEAD = 4 << 20  # bytes that the NetCDF library (4.10) reads to detect the format: no variable begins before
_ROOM = 32 << 10  # bytes of header for a variable; what does not fit lies between variables
_GAP, _STOP = ".gap", ".stop"  # data sets that keep room for the header; valid_name() never returns their names


def write(description: bytes) -> bytes:
    """Create the file that `description` describes; return its header as JSON. Imports h5py.

    `size`: bytes of the whole file; `texts`: [address, bytes in hexadecimal] of what the library wrote, in order;
    `places`: the address of the chunks of each variable, null if it has none.
    """
    import h5py

    groups = json.loads(description)["groups"]
    # pass a file object, because libhdf5 resolves paths, and the path of a memfd does not lead to a file
    with open(os.memfd_create("zarrfs-header", os.MFD_CLOEXEC), "w+b", buffering=0) as memory:
        with h5py.File(
            memory, "w", libver=_VERSIONS, track_order=True, alignment_threshold=1, alignment_interval=_PAGE
        ) as file:  # fmt: skip
            _keep_room(file, _AHEAD + _ROOM * sum(len(group["variables"]) for group in groups))
            _write_attribute(file, "_NCProperties", "text", f"version=2,hdf5={h5py.version.hdf5_version}")
            ids = itertools.count()
            places = [_place(variable) for group in groups for variable in _write_group(file, group, ids)]
            del file[_STOP]
        size = os.fstat(memory.fileno()).st_size
        texts = [(at, data.hex()) for at, data in _written(memory.fileno(), size)]
        return json.dumps({"size": size, "texts": texts, "places": places}).encode()


def _keep_room(file: Any, size: int) -> None:
    """Let the metadata written from now on lie in the first `size` bytes of a file, and all data after them.

    The index of a chunked data set, 8 bytes for each chunk, is metadata. Once it is deleted, the library writes other
    metadata in its place, but no data.
    """
    gap = file.create_dataset(_GAP, (size // 8,), "u1", chunks=(1,))
    gap[0] = 0
    file.flush()  # allocates the index
    file.create_dataset(_STOP, (1,), "u1")[0] = 0  # otherwise the end of the file would move back
    del gap, file[_GAP]


def _place(dataset: Any) -> int | None:
    """Return where the chunks of a variable begin; None if it has none. Check that they follow each other."""
    if not dataset.size or dataset.chunks is None:
        return None
    first = dataset.id.get_chunk_info(0)
    if dataset.chunks != dataset.shape and dataset.id.get_chunk_info(1).byte_offset != first.byte_offset + first.size:
        raise ValueError(f"{dataset.name}: libhdf5 does not store its chunks one after the other")
    return int(first.byte_offset)


def _written(descriptor: int, size: int) -> list[tuple[int, bytes]]:
    """Return (address, bytes) of the pages of a sparse file that are not holes, without the zeros at their ends."""
    found = []
    for start, stop in each_extent(descriptor, size):
        for page in range(start, stop, _PAGE):
            data = os.pread(descriptor, min(_PAGE, stop - page), page).rstrip(b"\0")
            if data:
                found.append((page, data))
    return found


def _write_group(file: Any, group: dict[str, Any], ids: Iterator[int]) -> list[Any]:
    """Write a group and any missing groups above it; return its variables. `ids`: of dimensions, unique in the file.

    A dimension is the dimension scale of its name: the coordinate variable, whose first dimension has its own name, or
    a data set without data. Source: NetCDF-4 file format specification, "Dimensions" and "Variables".
    """
    import numpy as np

    made = file
    for name in group["path"]:
        made = made[name] if name in made else made.create_group(name, track_order=True)
    _write_attributes(made, group["attributes"])
    extents, numbers = group["dimensions"], {name: next(ids) for name in group["dimensions"]}
    coordinates = {about["name"] for about in group["variables"] if about["dims"][:1] == [about["name"]]}
    for name, extent in extents.items():
        if name not in coordinates:
            scale = made.create_dataset(name, (extent,), ">f4", maxshape=(extent or None,), track_order=True)
            scale.make_scale(f"This is a netCDF dimension but not a netCDF variable.{extent:10}")
            scale.attrs["_Netcdf4Dimid"] = np.int32(numbers[name])
    variables = []
    for about in group["variables"]:
        name, dims = about["name"], about["dims"]
        is_scale = name in coordinates
        variable = _create(made, name if is_scale or name not in extents else f"_nc4_non_coord_{name}", about, extents)
        if is_scale:
            variable.make_scale(name)
            variable.attrs["_Netcdf4Dimid"] = np.int32(numbers[name])
        if dims:
            variable.attrs["_Netcdf4Coordinates"] = np.array([numbers[dim] for dim in dims], np.int32)
        _write_attributes(variable, about["attributes"])
        variables.append(variable)
    for about, variable in zip(group["variables"], variables, strict=True):
        if about["name"] not in coordinates:
            for at, dim in enumerate(about["dims"]):
                variable.dims[at].attach_scale(made[dim])
    return variables


def _create(group: Any, name: str, about: dict[str, Any], extents: dict[str, int]) -> Any:
    """Create the data set of a variable, with its fill value and the items that are kept with the header."""
    import h5py
    import numpy as np

    dtype, shape = np.dtype(about["dtype"]), [extents[dim] for dim in about["dims"]]
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    chunks = None if about["chunks"] is None else tuple(about["chunks"])
    more: dict[str, Any] = {"dcpl": early, "fill_time": "never", "chunks": chunks}
    if not all(shape):  # an empty variable has an unlimited dimension, which requires chunks
        more = {"maxshape": [extent or None for extent in shape], "chunks": (1,) * len(shape)}
    if about["fill"] is not None:
        more["fillvalue"] = np.frombuffer(bytes.fromhex(about["fill"]), dtype)[0]
    made = group.create_dataset(name, shape, dtype, track_order=True, **more)
    if about["fill"] is not None:
        made.attrs["_FillValue"] = np.array([more["fillvalue"]], dtype)
    if about["data"] is not None and all(shape):
        made[...] = np.frombuffer(bytes.fromhex(about["data"]), dtype).reshape(shape)
    return made


def _write_attributes(place: Any, attributes: list[list[Any]]) -> None:
    for name, kind, value in attributes:
        _write_attribute(place, name, kind, value)


def _write_attribute(place: Any, name: str, kind: str, value: Any) -> None:
    import h5py
    import numpy as np

    if kind != "text":
        place.attrs[name] = np.atleast_1d(np.array(value, kind))
    elif not value:
        place.attrs[name] = h5py.Empty("S1")  # as the NetCDF library writes empty text
    else:
        data = value.encode()
        place.attrs[name] = np.array(data, h5py.string_dtype("ascii" if value.isascii() else "utf-8", len(data)))


def main() -> None:
    """Write the header of the description on standard input."""
    sys.stdout.buffer.write(write(sys.stdin.buffer.read()))


if __name__ == "__main__":
    main()
