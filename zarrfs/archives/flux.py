"""Client of the running Flux instance: archives in its KVS, jobspecs, and blobs.

Blobs are loaded by the raw RPC content.load through Flux's Python binding if that can be imported, and by the command
`flux content load` otherwise; documents by `flux kvs get` and `flux job info`, once a mount. FLUX_URI selects the
instance, as for every command of Flux. Sources: flux_rpc(3), flux-content(1), flux-kvs(1), flux-job(1); RFC 10.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import shlex
import signal
import subprocess
import threading
from typing import Any

from zarrfs.archives.source_kinds import FLUX
from zarrfs.errors import ReadError, SourceError, TargetMissing, reason_of

_ANY_NODE = 0xFFFFFFFF  # FLUX_NODEID_ANY: the local broker, whose cache asks its parents
_FUNCTIONS = ("flux_open", "flux_rpc_raw", "flux_future_wait_for", "flux_rpc_get_raw")
_ABSENT = re.compile(r"No such file or directory", re.IGNORECASE)
_UNREACHABLE = re.compile(r"connect|flux_open|socket|broker", re.IGNORECASE)
_MESSAGE_MAX = 300  # characters of a message of a command


class FluxFailure(Exception):
    """A failed command of Flux; `absent` if the requested object does not exist."""

    def __init__(self, reason: str, absent: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.absent = reason, absent


def document(source: str, timeout: float) -> bytes:
    """Fetch the archive "flux:NAME" or the jobspec "flux:job/ID"; blocks. SourceError quotes the command's message."""
    name = source.removeprefix(FLUX)
    job = name.removeprefix("job/") if name.startswith("job/") else None
    if not name or job == "" or name.startswith("-") or (job or "").startswith("-") or "\0" in name:
        raise SourceError(source, "say flux:NAME for an archive of the running Flux instance, flux:job/ID for a job's")
    command = ["kvs", "get", f"archive.{name}"] if job is None else ["job", "info", job, "jobspec"]
    try:
        return run(command, timeout)
    except FluxFailure as exc:
        raise SourceError(source, exc.reason) from None


def run(arguments: list[str], timeout: float) -> bytes:
    """Run `flux ARGUMENTS` for at most `timeout` seconds; return its output. Raises FluxFailure."""
    shown = "flux " + shlex.join(arguments)
    try:
        process = subprocess.Popen(
            ["flux", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, env=os.environ | {"FLUX_KVS_NAMESPACE": "primary"},  # not the namespace of a job
        )  # fmt: skip
    except OSError as exc:
        raise FluxFailure(f"{shown}: cannot run flux: {reason_of(exc)}") from None
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            raise FluxFailure(f"{shown}: no answer within {timeout:g} s") from None
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        said = " ".join(err.decode(errors="replace").split())[:_MESSAGE_MAX] or f"status {process.returncode}"
        raise FluxFailure(f"{shown}: {said}", bool(_ABSENT.search(said)) and not _UNREACHABLE.search(said))
    return out


class FluxBlobs:
    """The blobs of the running instance. Thread-safe; load() blocks."""

    shown = FLUX

    def __init__(self) -> None:
        self._free: list[_Connection] = []  # idle connections: a connection serves one thread at a time
        self._lock = threading.Lock()
        self._binding: Any = None
        self._looked = self._closed = False

    def load(self, blobref: str, timeout: float) -> bytes:
        """Load a blob, not verified, within `timeout` seconds. Raises TargetMissing or ReadError."""
        binding = self._import_binding()
        if binding is not None:
            return self._load_by_binding(binding, blobref, timeout)
        try:
            return run(["content", "load", blobref], timeout)
        except FluxFailure as exc:
            kind = TargetMissing if exc.absent else ReadError
            raise kind(f"flux:{blobref}", exc.reason) from None

    def close(self) -> None:
        """Close idle connections; those in use are closed after their blob."""
        with self._lock:
            self._closed, free = True, self._free
            self._free = []
        for handle in free:
            handle.close()

    def _import_binding(self) -> Any:
        with self._lock:
            if not self._looked:
                self._looked = True
                try:
                    inner = importlib.import_module("flux.core.inner")
                    self._binding = inner if all(hasattr(inner.lib, name) for name in _FUNCTIONS) else None
                except Exception:  # it may be another package of this name: use the command
                    self._binding = None
            return self._binding

    def _load_by_binding(self, binding: Any, blobref: str, timeout: float) -> bytes:
        with self._lock:
            handle = self._free.pop() if self._free else None
        handle = handle or _Connection(binding)
        try:
            data = handle.load(blobref, timeout)
        except TargetMissing:
            self._put_back(handle)
            raise
        except BaseException:
            handle.close()  # its state is unknown: the next blob opens another
            raise
        self._put_back(handle)
        return data

    def _put_back(self, handle: _Connection) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(handle)
                return
        handle.close()


class _Connection:
    """A connection to the broker."""

    def __init__(self, binding: Any) -> None:
        self._ffi, self._lib = binding.ffi, binding.lib
        self._handle = self._lib.flux_open(self._ffi.NULL, 0)
        if self._handle == self._ffi.NULL:
            raise ReadError(FLUX, f"cannot reach the Flux instance: {os.strerror(self._ffi.errno).lower()}")

    def load(self, blobref: str, timeout: float) -> bytes:
        """As FluxBlobs.load."""
        ffi, lib = self._ffi, self._lib
        digest = bytes.fromhex(blobref.partition("-")[2])
        future = lib.flux_rpc_raw(self._handle, b"content.load", digest, len(digest), _ANY_NODE, 0)
        if future == ffi.NULL:
            raise self._failure(blobref, ffi.errno, timeout)
        try:
            data = ffi.new("const void **")
            size = ffi.new(ffi.typeof(lib.flux_rpc_get_raw).args[2])  # int *, or size_t * in later versions
            if lib.flux_future_wait_for(future, timeout) < 0 or lib.flux_rpc_get_raw(future, data, size) < 0:
                raise self._failure(blobref, ffi.errno, timeout)
            return bytes(ffi.buffer(data[0], size[0])) if size[0] else b""
        finally:
            lib.flux_future_destroy(future)

    def _failure(self, blobref: str, code: int, timeout: float) -> ReadError:
        where = f"flux:{blobref}"
        if code == errno.ENOENT:
            return TargetMissing(where, "no such blob")
        if code == errno.ETIMEDOUT:
            return ReadError(where, f"content.load: no answer within {timeout:g} s")
        return ReadError(where, f"content.load: {os.strerror(code).lower()}")

    def close(self) -> None:
        """Close the connection; once more is fine."""
        if self._handle is not None:
            self._lib.flux_close(self._handle)
            self._handle = None


def _end(process: subprocess.Popen[bytes]) -> None:
    try:  # flux runs subcommands as child processes, which inherit the pipes
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        process.kill()
    process.wait()
