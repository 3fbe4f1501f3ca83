"""Codecs of packages other than numcodecs, which run in child processes with bounded memory.

Such a codec may trust the size in a chunk's header and allocate all memory of the machine. Therefore the child process
may allocate only a few times the size of the chunk, and 256 MiB. CodecError is raised if the child process exceeds the
limit, ends, or does not answer in time.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from zarrfs.system import bounded
from zarrfs.system.bounded import Header
from zarrfs.zarr.errors import CodecError, library_error
from zarrfs.zarr.jsontext import JSON

IMAGECODECS = "imagecodecs_"  # prefix of names of codecs that a function of imagecodecs has to register first
_COPIES = 4  # a codec may hold as many copies of the decoded and of the stored chunk in memory
_SLACK = 256 << 20  # bytes for thread stacks and tables


class ExternalCodec:
    """A codec that another package registered with numcodecs. Thread-safe."""

    def __init__(self, name: str, configuration: Mapping[str, JSON], limit: int) -> None:
        """`limit` is the size in bytes of a decoded chunk. Raise CodecError if the codec cannot be created."""
        self._name, self._limit = name, limit
        self._codec = {**configuration, "id": name}
        self._request(None)

    def decode(self, data: Any) -> Any:
        """Decode to bytes or an array of at most `limit` bytes. Raise CodecError."""
        return _from_wire(*self._request(data))

    def _request(self, data: Any) -> tuple[Header, bytearray]:
        try:
            header, body = _to_wire(data)
            return bounded.call(__name__, {"codec": self._codec, "limit": self._limit, **header}, body, self._limit)
        except bounded.OutOfMemory:
            reason = f"needs far more memory than the {self._limit} bytes of the chunk"
            raise CodecError(self._name, reason) from None
        except (bounded.ChildError, ValueError) as exc:
            raise CodecError(self._name, str(exc)) from None


def _to_wire(data: Any) -> tuple[Header, Any]:
    """Return the header and the bytes for bytes, an array, or None."""
    if not isinstance(data, np.ndarray):
        return {}, data
    if data.dtype.hasobject:
        raise ValueError("codecs of other packages are for bytes and numbers, not for objects")
    body = np.ascontiguousarray(data).view(np.uint8).reshape(-1) if data.size else b""
    return {"dtype": repr(np.lib.format.dtype_to_descr(data.dtype)), "shape": data.shape}, body


def _from_wire(header: Header, body: bytearray) -> Any:
    if "dtype" not in header:
        return body
    dtype = np.lib.format.descr_to_dtype(ast.literal_eval(header["dtype"]))
    return np.frombuffer(body, dtype).reshape(header["shape"]) if body else np.empty(header["shape"], dtype)


def answer(header: Header, body: bytearray) -> tuple[Header, Any]:
    """Decode one chunk, or only make the codec if the request has no data. Runs in the child process."""
    import numcodecs

    try:
        if header["codec"]["id"].startswith(IMAGECODECS):
            _register_imagecodecs()
        codec = numcodecs.get_codec(header["codec"])
        if header["size"] < 0:
            return {}, None
        bounded.limit_memory(_COPIES * (header["limit"] + header["size"]) + _SLACK)
        return _to_wire(codec.decode(_from_wire(header, body)))
    except MemoryError:
        raise
    except Exception as exc:
        raise ValueError(library_error(exc)) from None


@functools.cache
def _register_imagecodecs() -> None:
    from imagecodecs.numcodecs import register_codecs

    register_codecs()
