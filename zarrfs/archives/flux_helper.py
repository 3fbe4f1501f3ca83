"""Program that loads blobs from the running Flux instance, in Flux's own interpreter: flux python flux_helper.py.

It reads requests from standard input, keeps them in flight over one connection to the broker, and writes each blob to
standard output as soon as its response comes, in any order. flux_blobs.py starts it and uses this protocol:

    greeting    once, from the helper: b"zarrfs-flux-blobs VERSION\\n"
    request     NUMBER (u32), length of the digest (u8), digest
    answer      NUMBER (u32), errno (u32), length (u32); then the blob, or, unless errno is 0, the reason

Integers are big-endian. An answer with NUMBER 0 gives the reason why the helper ends. The helper also ends, with
status 0, at the end of standard input, so that it does not outlive the daemon that started it.

It imports only the standard library and Flux's binding, and runs on Python 3.6, the oldest version that Flux supports.
Sources: flux_rpc_raw(3), flux_send(3), flux_recv(3), flux_pollfd(3); RFC 6 (RPC), RFC 10 (content.load).
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this directory, because its flux.py would hide Flux's package

import errno
import os
import select
import signal
import struct
from typing import Any

PROTOCOL = 1  # source_kinds.py reads this line before a mount
_REQUEST, _ANSWER = struct.Struct("!IB"), struct.Struct("!III")
_READ = 1 << 16  # bytes of requests per read
_CONNECT = 30  # seconds to connect to the broker; after that, SIGALRM ends the helper
_LOST = "the Flux broker has closed the connection"


def _write(*parts: Any) -> None:
    """Write all bytes of all parts. Blocks while the pipe is full."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        count = os.writev(1, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]


def _answer(number: int, code: int, data: Any) -> None:
    _write(_ANSWER.pack(number, code, len(data)), data)


class _Broker:
    """A connection to the broker, without Flux's reactor and futures, which would take longer than loading a blob."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self._ffi, self._lib = ffi, lib
        signal.alarm(_CONNECT)
        self._handle = lib.flux_open(ffi.NULL, 0)
        signal.alarm(0)
        if self._handle == ffi.NULL:
            raise self._failure("cannot reach the Flux instance")
        self.descriptor = lib.flux_pollfd(self._handle)
        if self.descriptor < 0:
            raise self._failure("flux_pollfd")
        self._match = ffi.new("struct flux_match *")
        self._match.typemask = lib.FLUX_MSGTYPE_RESPONSE
        self._match.matchtag = 0  # FLUX_MATCHTAG_NONE: any
        self._data = ffi.new("const void **")
        self._size = ffi.new(ffi.typeof(lib.flux_response_decode_raw).args[3])  # size_t *, int * in older versions
        self._tag = ffi.new("uint32_t *")

    def _failure(self, what: str) -> OSError:
        code = self._ffi.errno
        return OSError(code, f"{what}: {os.strerror(code).lower()}")

    def load(self, number: int, digest: bytes) -> None:
        """Send a request for a blob, with `number` as its matchtag. Nothing else takes tags of this connection."""
        lib = self._lib
        message = lib.flux_request_encode_raw(b"content.load", digest, len(digest))
        if message == self._ffi.NULL:
            raise self._failure("content.load")
        try:
            if lib.flux_msg_set_matchtag(message, number) < 0 or lib.flux_send(self._handle, message, 0) < 0:
                raise self._failure("content.load")
        finally:
            lib.flux_msg_decref(message)

    def answer(self) -> None:
        """Write answers for all responses that have arrived. Raise OSError if the connection is lost."""
        ffi, lib = self._ffi, self._lib
        events = lib.flux_pollevents(self._handle)  # also re-arms the descriptor, which is edge-triggered
        if events < 0 or events & lib.FLUX_POLLERR:
            raise OSError(errno.ECONNRESET, _LOST)
        while True:
            message = lib.flux_recv(self._handle, self._match[0], lib.FLUX_O_NONBLOCK)
            if message == ffi.NULL:
                if ffi.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
                    return
                raise OSError(ffi.errno, _LOST)
            try:
                if lib.flux_msg_get_matchtag(message, self._tag) < 0:
                    raise self._failure("flux_msg_get_matchtag")
                if lib.flux_response_decode_raw(message, ffi.NULL, self._data, self._size) < 0:
                    code = ffi.errno or errno.EIO
                    _answer(self._tag[0], code, os.strerror(code).lower().encode())
                else:
                    size = self._size[0]
                    _answer(self._tag[0], 0, ffi.buffer(self._data[0], size) if size else b"")
            finally:
                lib.flux_msg_decref(message)


def _serve(broker: _Broker) -> None:
    poll, rest = select.poll(), b""
    poll.register(0, select.POLLIN)
    poll.register(broker.descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if 0 in ready:
            data = os.read(0, _READ)
            if not data:
                return
            rest, at = rest + data, 0
            while len(rest) - at >= _REQUEST.size:
                number, length = _REQUEST.unpack_from(rest, at)
                end = at + _REQUEST.size + length
                if end > len(rest):
                    break
                broker.load(number, rest[at + _REQUEST.size : end])
                at = end
            rest = rest[at:]
        broker.answer()  # also after requests: sending may have received responses, so poll() would not report them


def _main() -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end when the daemon no longer reads
    _write(f"zarrfs-flux-blobs {PROTOCOL}\n".encode())
    try:
        from _flux._core import ffi, lib  # type: ignore[import-not-found]  # flux.core.inner imports 0.1 s more
    except ImportError as exc:
        reason = f"{sys.executable}: Flux's Python binding cannot be imported: {exc}"
    else:
        try:
            _serve(_Broker(ffi, lib))
        except OSError as exc:
            reason = exc.strerror or type(exc).__name__
        else:
            return 0
    _answer(0, errno.EIO, reason.encode("utf-8", "replace"))
    return 1


if __name__ == "__main__":
    sys.exit(_main())
