"""The header of a NetCDF-4 file, written by libhdf5 in a child process: python -m zarrfs.views.netcdf_header.

The child process reads a description (netcdf_model.py), creates the file in memory with the space of every variable
allocated but not filled, and asks the library for the address of each variable. The written parts of the file are the
header; the rest is holes. Space is allocated after all metadata is written, so that the file begins with the header.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from typing import Any

import trio

from zarrfs.errors import ReadError
from zarrfs.system.processes import python
from zarrfs.system.sparse import each_extent

_VERSIONS = ("earliest", "v110")  # of the HDF5 format
_PAGE = 4096  # bytes; each variable begins at a page, so that it shares no page with another one or the header
_AHEAD = 4 << 20  # bytes that the NetCDF library (4.10) reads to detect the format; large files have a hole there
_GAP = ".gap"  # the data set in the place of that hole while space is allocated; valid_name() never returns its name
_LIMIT = 600.0  # seconds for one header


@dataclasses.dataclass(frozen=True)
class Header:
    """A NetCDF-4 file without its data."""

    size: int  # bytes of the whole file
    parts: tuple[tuple[int, bytes], ...]  # the parts that the library wrote: (address, bytes), in order
    places: tuple[tuple[int, int] | None, ...]  # (address, size in bytes) of each variable; None: it has no bytes


def missing_package() -> str | None:
    """Return a message that names the packages to install for headers; None if they are installed."""
    from importlib.util import find_spec

    lacking = [name for name in ("h5netcdf", "h5py") if find_spec(name) is None]
    if not lacking:
        return None
    from zarrfs.system.packages import install_command

    return f"needs the package {' and '.join(lacking)}: {install_command('netcdf')}"


@functools.cache
def libraries() -> bytes:
    """Return the versions of the packages that make headers: with others, equal descriptions may differ in headers."""
    import importlib.metadata

    return " ".join(importlib.metadata.version(name) for name in ("h5netcdf", "h5py")).encode()


async def build(description: bytes, key: str) -> bytes:
    """Return the packed header for a description, made by a child process.

    Raise ReadError, with `key` as the name of the file, if the child process fails or takes more than 10 minutes.
    """
    with trio.move_on_after(_LIMIT):
        done = await trio.run_process(
            python("zarrfs.views.netcdf_header"), stdin=description, capture_stdout=True, capture_stderr=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise ReadError(key, f"its header cannot be made: {_reason(done)}")
        return bytes(done.stdout)
    raise ReadError(key, f"its header takes more than {_LIMIT:.0f} s")


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the last line of the child's standard error, or its exit status."""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the process ended with status {done.returncode}"


def unpack(data: bytes) -> Header:
    """Return the header that pack() packed. Raise ValueError, KeyError or TypeError if it is damaged."""
    head, _, rest = data.partition(b"\n")
    found = json.loads(head)
    parts, at = [], 0
    for address, length in found["parts"]:
        parts.append((address, rest[at : at + length]))
        at += length
    if at != len(rest):
        raise ValueError("its length is not that of its parts")
    places = tuple(None if one is None else (one[0], one[1]) for one in found["places"])
    return Header(found["size"], tuple(parts), places)


def pack(header: Header) -> bytes:
    """Serialise a header."""
    about = {
        "size": header.size, "parts": [(address, len(data)) for address, data in header.parts],
        "places": header.places,
    }  # fmt: skip
    return json.dumps(about).encode() + b"\n" + b"".join(data for _, data in header.parts)


def write(description: bytes) -> Header:
    """Create the file that `description` describes; return its header. Imports h5py."""
    import h5netcdf
    import h5py

    # pass a file object, because libhdf5 resolves paths, and the path of a memfd does not lead to a file
    with open(os.memfd_create("zarrfs-header", os.MFD_CLOEXEC), "w+b", buffering=0) as memory:
        with h5netcdf.File(memory, "w", libver=_VERSIONS) as file:
            variables = [one for group in json.loads(description)["groups"] for one in _write_group(file, group)]
            names = [variable._h5ds.name for variable in variables]
        # reopen the file, so that the library does not put small variables into free space within the header
        with h5py.File(memory, "r+", libver=_VERSIONS, alignment_threshold=1, alignment_interval=_PAGE) as file:
            places = _allocate(file, names)
        size = os.fstat(memory.fileno()).st_size
        return Header(size, tuple(_written(memory.fileno(), size)), tuple(places))


def _written(descriptor: int, size: int) -> list[tuple[int, bytes]]:
    """Return (address, bytes) of the pages of a sparse file that are not holes, without the zeros at their ends."""
    found = []
    for start, stop in each_extent(descriptor, size):
        for page in range(start, stop, _PAGE):
            data = os.pread(descriptor, min(_PAGE, stop - page), page).rstrip(b"\0")
            if data:
                found.append((page, data))
    return found


def _allocate(file: Any, names: list[str]) -> list[tuple[int, int] | None]:
    """Allocate the space of the variables without filling it; return (address, size) of each."""
    import numpy as np

    datasets = [file[name] for name in names]
    large = sum(dataset.nbytes for dataset in datasets) > _AHEAD
    gap = file.create_dataset(_GAP, (_AHEAD,), "u1") if large else None
    if gap is not None:
        gap[0] = 0
    places: list[tuple[int, int] | None] = []
    for dataset in datasets:
        if not dataset.size:
            places.append(None)
            continue
        dataset[(0,) * dataset.ndim] = np.zeros((), dataset.dtype)  # allocates the whole contiguous data set
        places.append((dataset.id.get_offset(), dataset.id.get_storage_size()))
    if gap is not None:
        del file[_GAP]
    return places


def _write_group(file: Any, group: dict[str, Any]) -> list[Any]:
    """Write a group and any missing groups above it; return its variables."""
    import h5py
    import numpy as np

    made = file
    for name in group["path"]:
        made = made.groups[name] if name in made.groups else made.create_group(name)
    _write_attributes(made, group["attributes"])
    dimensions = group["dimensions"]
    made.dimensions = {name: extent or None for name, extent in dimensions.items()}
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    variables = []
    for about in group["variables"]:
        dtype = np.dtype(about["dtype"])
        fill = None if about["fill"] is None else np.frombuffer(bytes.fromhex(about["fill"]), dtype)[0]
        shape = [dimensions[name] for name in about["dims"]]
        more: dict[str, Any] = {"dcpl": plist.copy()}
        if not all(shape):  # an empty variable has an unlimited dimension, which requires chunks
            more = {"maxshape": [extent or None for extent in shape], "chunks": (1,) * len(shape)}
        variable = made.create_variable(about["name"], tuple(about["dims"]), dtype, fillvalue=fill, **more)
        _write_attributes(variable, about["attributes"])
        variables.append(variable)
    return variables


def _write_attributes(place: Any, attributes: list[list[Any]]) -> None:
    import h5py
    import numpy as np

    for name, kind, value in attributes:
        if kind != "text":
            place.attrs[name] = np.array(value, kind)
        elif not value:
            place.attrs[name] = h5py.Empty("S1")  # as the NetCDF library writes empty text
        else:
            data = value.encode()
            place.attrs[name] = np.array(data, h5py.string_dtype("ascii" if value.isascii() else "utf-8", len(data)))


def main() -> None:
    """Write the packed header of the description on standard input."""
    sys.stdout.buffer.write(pack(write(sys.stdin.buffer.read())))


if __name__ == "__main__":
    main()
