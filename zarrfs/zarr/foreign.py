"""Codecs of other packages, each decoding in a child process of bounded memory.

Nobody bounds what such a codec allocates: the size in a chunk's header is enough to take all memory. The child may
take little more than the decoded chunk does; what it cannot do within that, or dies of, is a CodecError.
A request is a line of JSON and the bytes that it announces, and so is the answer.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from zarrfs.errors import reason_of
from zarrfs.system.processes import readable
from zarrfs.zarr.errors import JSON, CodecError

_COPIES = 4  # of the decoded chunk and of the stored one, that a codec may need on its way
_SLACK = 256 << 20  # bytes: stacks of threads, tables
_PATIENCE = 60.0  # seconds for one chunk
_KEPT = 4  # children that wait for the next chunk
_HERE = "foreign"  # in place of the codec's name, where that is not known
_PROGRAM = "import sys; sys.path = sys.argv[1:]; from zarrfs.zarr import foreign; foreign.serve()"

Header = dict[str, Any]


class ForeignCodec:
    """A codec that numcodecs has from another package. Threads may share it."""

    def __init__(self, name: str, configuration: Mapping[str, JSON], limit: int) -> None:
        """`limit`: bytes of a decoded chunk. CodecError where the codec cannot be made."""
        self._name, self._limit = name, limit
        self._codec = {**configuration, "id": name}
        self._ask(None)

    def decode(self, data: Any) -> Any:
        """Bytes, or an array; at most `limit` bytes. CodecError."""
        header, body = self._ask(data)
        return _from_wire(header, body)

    def _ask(self, data: Any) -> tuple[Header, bytearray]:
        asked = {"codec": self._codec, "limit": self._limit, **_described(data)}
        try:
            child = _take()
        except OSError as exc:
            raise CodecError(self._name, f"no process to decode it in: {reason_of(exc)}") from exc
        try:
            header, body = child.ask(asked, data, self._limit)
        except CodecError as exc:
            child.end()
            raise CodecError(self._name, exc.reason) from None
        except BaseException:
            child.end()
            raise
        _put_back(child)
        if "error" in header:
            raise CodecError(self._name, header["error"])
        return header, body


class _Child:
    """A child process that decodes one chunk after another."""

    def __init__(self) -> None:
        self.parent = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, *filter(None, sys.path)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, cwd="/",
        )  # fmt: skip

    def ask(self, header: Header, data: Any, limit: int) -> tuple[Header, bytearray]:
        """Send a request; the answer. CodecError where the child ends instead, or gives none in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its end is met below
            _send(self._process.stdin, header, data)
        if not readable(self._process.stdout.fileno(), _PATIENCE):
            raise CodecError(_HERE, f"no answer within {_PATIENCE:g} s")
        found = _received(self._process.stdout, limit)
        if found is None:
            self._process.kill()
            raise CodecError(_HERE, f"the process that decoded has ended with status {self._process.wait()}")
        return found

    def end(self) -> None:
        """End it at once."""
        if self.parent == os.getpid():
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


_free: list[_Child] = []
_lock = threading.Lock()


def _take() -> _Child:
    with _lock:
        while _free:
            child = _free.pop()
            if child.parent == os.getpid():
                return child
            child.end()  # a fork has them from its parent, which uses them
    return _Child()


def _put_back(child: _Child) -> None:
    with _lock:
        if len(_free) < _KEPT:
            _free.append(child)
            return
    child.end()


def _described(data: Any) -> Header:
    """The header for bytes, an array, or nothing."""
    if isinstance(data, np.ndarray):
        if data.dtype.hasobject:
            raise CodecError(_HERE, "codecs of other packages are for bytes and numbers, not for objects")
        return {"size": data.nbytes, "dtype": repr(np.lib.format.dtype_to_descr(data.dtype)), "shape": data.shape}
    return {"size": -1 if data is None else memoryview(data).nbytes}


def _from_wire(header: Header, body: bytearray) -> Any:
    if "dtype" not in header:
        return body
    dtype = np.lib.format.descr_to_dtype(ast.literal_eval(header["dtype"]))
    return np.frombuffer(body, dtype).reshape(header["shape"]) if body else np.empty(header["shape"], dtype)


def _send(stream: IO[bytes], header: Header, data: Any) -> None:
    _write(stream, json.dumps(header).encode() + b"\n")
    if data is not None:
        body = np.ascontiguousarray(data).view(np.uint8).reshape(-1) if isinstance(data, np.ndarray) else data
        _write(stream, body)


def _write(stream: IO[bytes], data: Any) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[stream.write(view) :]


def _received(stream: IO[bytes], limit: int) -> tuple[Header, bytearray] | None:
    """A header and its bytes, at most `limit`; None at the end of the stream."""
    line = stream.readline(1 << 20)
    if not line.endswith(b"\n"):
        return None
    header = json.loads(line)
    size = max(header.get("size", 0), 0)
    if size > limit:
        raise CodecError(_HERE, f"decodes to {size} bytes, not {limit}")
    body = bytearray(size)
    view = memoryview(body)
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            return None
        view = view[count:]
    return header, body


def _answer(header: Header, body: bytearray) -> tuple[Header, Any]:
    """Decode one chunk, in the child."""
    import numcodecs

    codec = numcodecs.get_codec(header["codec"])
    if header["size"] < 0:
        return {}, None
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    most = now + _COPIES * (header["limit"] + header["size"]) + _SLACK
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))
    found = codec.decode(_from_wire(header, body))
    described = _described(found)
    if described["size"] > header["limit"]:
        raise ValueError(f"decodes to {described['size']} bytes, not {header['limit']}")
    return described, found


def serve() -> None:
    """Be the child: answer requests until there are none."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a codec that prints
    while (request := _received(requests, sys.maxsize)) is not None:
        try:
            header, found = _answer(*request)
        except MemoryError:
            header, found = {"error": f"needs far more memory than the {request[0]['limit']} bytes of the chunk"}, None
        except Exception as exc:
            said = exc.reason if isinstance(exc, CodecError) else str(exc)
            header, found = {"error": " ".join(said.split())[:200] or type(exc).__name__}, None
        request = None
        _send(answers, header, found)
        found = None

