"""Codecs of packages other than numcodecs, which run in child processes with bounded memory.

Such a codec may trust the size in a chunk's header and allocate all memory of the machine. Therefore the child process
may allocate only a few times the size of the chunk, and 256 MiB. CodecError is raised if the child process exceeds the
limit, ends, or does not answer in time. A request and an answer are a line of JSON each, followed by as many bytes as
the line announces.
"""

from __future__ import annotations

import ast
import contextlib
import functools
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
from zarrfs.system.processes import no_bytecode, readable
from zarrfs.zarr.errors import CodecError, library_error
from zarrfs.zarr.jsontext import JSON

IMAGECODECS = "imagecodecs_"  # prefix of names of codecs that a function of imagecodecs has to register first
_COPIES = 4  # a codec may hold as many copies of the decoded and of the stored chunk in memory
_SLACK = 256 << 20  # bytes for thread stacks and tables
_TIMEOUT = 60.0  # seconds per chunk
_IDLE_MAX = 4  # idle child processes
_UNNAMED = "external"  # used as the codec's name in errors of functions that do not know it
_PROGRAM = "import sys; sys.path = sys.argv[1:]; from zarrfs.zarr import external; external.serve()"

Header = dict[str, Any]


class ExternalCodec:
    """A codec that another package registered with numcodecs. Thread-safe."""

    def __init__(self, name: str, configuration: Mapping[str, JSON], limit: int) -> None:
        """`limit` is the size in bytes of a decoded chunk. Raise CodecError if the codec cannot be created."""
        self._name, self._limit = name, limit
        self._codec = {**configuration, "id": name}
        self._request(None)

    def decode(self, data: Any) -> Any:
        """Decode to bytes or an array of at most `limit` bytes. Raise CodecError."""
        header, body = self._request(data)
        return _from_wire(header, body)

    def _request(self, data: Any) -> tuple[Header, bytearray]:
        request = {"codec": self._codec, "limit": self._limit, **_header(data)}
        try:
            child = _take()
        except OSError as exc:
            raise CodecError(self._name, f"no process to decode it in: {reason_of(exc)}") from exc
        try:
            header, body = child.request(request, data, self._limit)
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


class _CodecProcess:
    """A child process that decodes chunks one by one."""

    def __init__(self) -> None:
        self.parent = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", *no_bytecode(), "-c", _PROGRAM, *filter(None, sys.path)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, cwd="/",
        )  # fmt: skip

    def request(self, header: Header, data: Any, limit: int) -> tuple[Header, bytearray]:
        """Send a request and return the answer. Raise CodecError if the child ends or does not answer in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the child has ended: reading its answer reports that
            _send(self._process.stdin, header, data)
        if not readable(self._process.stdout.fileno(), _TIMEOUT):
            raise CodecError(_UNNAMED, f"no answer within {_TIMEOUT:g} s")
        found = _received(self._process.stdout, limit)
        if found is None:
            self._process.kill()
            raise CodecError(_UNNAMED, f"the process that decoded has ended with status {self._process.wait()}")
        return found

    def end(self) -> None:
        """Kill the process and close its pipes."""
        if self.parent == os.getpid():
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


_idle: list[_CodecProcess] = []
_lock = threading.Lock()


def _take() -> _CodecProcess:
    with _lock:
        while _idle:
            child = _idle.pop()
            if child.parent == os.getpid():
                return child
            child.end()  # inherited across a fork: the parent still uses it
    return _CodecProcess()


def _put_back(child: _CodecProcess) -> None:
    with _lock:
        if len(_idle) < _IDLE_MAX:
            _idle.append(child)
            return
    child.end()


def _header(data: Any) -> Header:
    """Return the header for bytes, an array, or None (no data)."""
    if isinstance(data, np.ndarray):
        if data.dtype.hasobject:
            raise CodecError(_UNNAMED, "codecs of other packages are for bytes and numbers, not for objects")
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
    """Receive a header and the bytes that follow it; None if the stream ends.

    Raise CodecError for more than `limit` bytes.
    """
    line = stream.readline(1 << 20)
    if not line.endswith(b"\n"):
        return None
    header = json.loads(line)
    size = max(header.get("size", 0), 0)
    if size > limit:
        raise CodecError(_UNNAMED, f"decodes to {size} bytes, not {limit}")
    body = bytearray(size)
    view = memoryview(body)
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            return None
        view = view[count:]
    return header, body


def _answer(header: Header, body: bytearray) -> tuple[Header, Any]:
    """Decode one chunk, or only make the codec if the request has no data. Runs in the child process."""
    import numcodecs

    if header["codec"]["id"].startswith(IMAGECODECS):
        _register_imagecodecs()
    codec = numcodecs.get_codec(header["codec"])
    if header["size"] < 0:
        return {}, None
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    most = used + _COPIES * (header["limit"] + header["size"]) + _SLACK
    _limit_memory(most)
    found = codec.decode(_from_wire(header, body))
    answer = _header(found)
    if answer["size"] > header["limit"]:
        raise ValueError(f"decodes to {answer['size']} bytes, not {header['limit']}")
    return answer, found


def _limit_memory(most: int | None) -> None:
    """Limit the address space of this process to `most` bytes; None raises the limit to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard if most is None or 0 <= hard < most else most
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@functools.cache
def _register_imagecodecs() -> None:
    from imagecodecs.numcodecs import register_codecs

    register_codecs()


def serve() -> None:
    """Answer requests on standard input until it ends: the main function of the child process."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # the output of a codec that prints must not reach the answers
    while (request := _received(requests, sys.maxsize)) is not None:
        try:
            header, found = _answer(*request)
        except MemoryError:
            header, found = {"error": f"needs far more memory than the {request[0]['limit']} bytes of the chunk"}, None
        except Exception as exc:
            header, found = {"error": exc.reason if isinstance(exc, CodecError) else library_error(exc)}, None
        request = None
        _send(answers, header, found)
        found = None
        _limit_memory(None)  # the next chunk may be larger, and is received before its limit is set
