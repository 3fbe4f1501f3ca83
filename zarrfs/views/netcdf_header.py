"""The header of a NetCDF-4 file, written by libhdf5 in a child process: python -m zarrfs.views.netcdf_header.

The child reads a description (netcdf_model.py), creates the file in memory with the space of every variable allocated
and never written, and asks the library where each lies. What it has written is the header; the rest is holes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import trio

from zarrfs.errors import ReadError

_ALIGNED = 4096  # bytes: large variables begin at a page, so that a page is of one variable
_FROM = 65_536  # bytes of a large variable
_LIMIT = 600.0  # seconds for one header
_PIECE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Header:
    """A NetCDF-4 file without its data."""

    size: int  # bytes of the whole file
    parts: tuple[tuple[int, bytes], ...]  # what the library wrote: (address, bytes), in order
    places: tuple[tuple[int, int] | None, ...]  # (address, bytes) of each variable; None: it has no bytes


def missing_package() -> str | None:
    """Return what to install; None if the packages for headers are there."""
    from importlib.util import find_spec

    lacking = [name for name in ("h5netcdf", "h5py") if find_spec(name) is None]
    if not lacking:
        return None
    return f"needs the package {' and '.join(lacking)}: pip install 'zarrfs[netcdf]'"


async def build(description: bytes, key: str) -> bytes:
    """Return the packed header for a description, made by a child process. ReadError; `key` names the file."""
    with trio.move_on_after(_LIMIT):
        done = await trio.run_process(
            [sys.executable, "-I", "-m", "zarrfs.views.netcdf_header"], stdin=description, capture_stdout=True,
            capture_stderr=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise ReadError(key, f"its header cannot be made: {_reason(done)}")
        return bytes(done.stdout)
    raise ReadError(key, f"its header takes more than {_LIMIT:.0f} s")


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the last line that the child wrote, or the signal that ended it."""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the process ended with status {done.returncode}"


def unpack(data: bytes) -> Header:
    """Return the header that pack() packed. ValueError if it is damaged."""
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
    """Return a header as bytes to keep."""
    about = {
        "size": header.size, "parts": [(address, len(data)) for address, data in header.parts],
        "places": header.places,
    }  # fmt: skip
    return json.dumps(about).encode() + b"\n" + b"".join(data for _, data in header.parts)


def write(description: bytes) -> Header:
    """Create the file that `description` describes; return its header. Imports h5py."""
    import h5netcdf

    # h5py wants an object: libhdf5 resolves paths, and that of a memfd leads nowhere
    with open(os.memfd_create("zarrfs-header", os.MFD_CLOEXEC), "w+b", buffering=0) as memory:
        with h5netcdf.File(
            memory, "w", libver=("earliest", "v110"), alignment_threshold=_FROM, alignment_interval=_ALIGNED
        ) as file:
            places = [place for group in json.loads(description)["groups"] for place in _write_group(file, group)]
        size = os.fstat(memory.fileno()).st_size
        return Header(size, tuple(_written(memory.fileno(), size)), tuple(places))


def _written(descriptor: int, size: int) -> list[tuple[int, bytes]]:
    """Return the parts of a sparse file that are no holes."""
    found, at = [], 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:  # ENXIO: a hole up to the end
            break
        at = os.lseek(descriptor, start, os.SEEK_HOLE)
        found.append((start, b"".join(os.pread(descriptor, min(_PIECE, at - p), p) for p in range(start, at, _PIECE))))
    return found


def _write_group(file: Any, group: dict[str, Any]) -> list[tuple[int, int] | None]:
    """Write a group, which is in no other yet; return where the bytes of its variables lie."""
    import h5py
    import numpy as np

    made = file
    for name in group["path"]:
        made = made.groups[name] if name in made.groups else made.create_group(name)
    _write_attributes(made, group["attributes"])
    dimensions = group["dimensions"]
    made.dimensions = {name: extent or None for name, extent in dimensions.items()}
    places: list[tuple[int, int] | None] = []
    for about in group["variables"]:
        dtype = np.dtype(about["dtype"])
        fill = None if about["fill"] is None else np.frombuffer(bytes.fromhex(about["fill"]), dtype)[0]
        more = {}
        empty = not all(dimensions[name] for name in about["dims"])
        if not empty:
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.CONTIGUOUS)
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            more["dcpl"] = plist
        variable = made.create_variable(about["name"], tuple(about["dims"]), dtype, fillvalue=fill, **more)
        _write_attributes(variable, about["attributes"])
        if not about["dims"]:
            variable[()] = np.zeros((), dtype)  # h5py drops the property list of a scalar: writing allocates it
        dataset = variable._h5ds.id
        places.append(None if empty else (dataset.get_offset(), dataset.get_storage_size()))
    return places


def _write_attributes(place: Any, attributes: list[list[Any]]) -> None:
    import h5py
    import numpy as np

    for name, kind, value in attributes:
        if kind != "text":
            place.attrs[name] = np.array(value, kind)
        elif not value:
            place.attrs[name] = h5py.Empty("S1")  # as the NetCDF library writes text without characters
        else:
            data = value.encode()
            place.attrs[name] = np.array(data, h5py.string_dtype("ascii" if value.isascii() else "utf-8", len(data)))


def main() -> None:
    """Write the packed header of the description on standard input."""
    sys.stdout.buffer.write(pack(write(sys.stdin.buffer.read())))


if __name__ == "__main__":
    main()
