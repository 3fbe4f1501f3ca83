"""Program that loads blobs from the running Flux instance, in Flux's own interpreter: flux python flux_helper.py.

flux_blobs.py runs it. A request is a line "DIGEST SIZE"; the requests that have arrived are in flight together. The
answers come in the order of the requests: errno and length (u32 each, big-endian), then the blob or, if errno is not
0, the reason. Of a blob whose size is not SIZE, only the length is returned. The helper ends with its standard input.

It imports only the standard library and Flux's binding, and runs on Python 3.6, the oldest version that Flux supports.
Sources: flux_rpc(3), RFC 10 (content.load).
"""

import collections
import os
import select
import struct
import sys
from typing import Any

_ANSWER = struct.Struct("!II")


def _write(*parts: bytes) -> None:
    for part in parts:
        view = memoryview(part)
        while len(view):
            view = view[os.write(1, view) :]


def main(ffi: Any, lib: Any) -> str:
    """Answer requests until standard input ends; return why the helper ends before."""
    handle = lib.flux_open(ffi.NULL, 0)
    if handle == ffi.NULL:
        return f"cannot reach the Flux instance: {os.strerror(ffi.errno).lower()}"
    data = ffi.new("const void **")
    length = ffi.new(ffi.typeof(lib.flux_rpc_get_raw).args[2])  # size_t *, int * in older versions
    waiting: Any = collections.deque()
    rest = b""
    while True:
        if select.select([0], [], [], 0 if waiting else None)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                return ""
            *lines, rest = (rest + read).split(b"\n")
            for digest, size in (line.decode().split() for line in lines):
                payload = bytes.fromhex(digest)
                future = lib.flux_rpc_raw(handle, b"content.load", payload, len(payload), lib.FLUX_NODEID_ANY, 0)
                if future == ffi.NULL:
                    return f"content.load: {os.strerror(ffi.errno).lower()}"
                waiting.append((future, int(size)))
            continue
        future, size = waiting.popleft()
        if lib.flux_rpc_get_raw(future, data, length) == 0:
            _write(_ANSWER.pack(0, length[0]), ffi.buffer(data[0], size) if length[0] == size and size else b"")
        else:
            code = ffi.errno
            reason = ffi.string(lib.flux_future_error_string(future))
            _write(_ANSWER.pack(code, len(reason)), reason)
            if lib.flux_pollevents(handle) & lib.FLUX_POLLERR:
                return "the Flux broker has closed the connection"
        lib.flux_future_destroy(future)


if __name__ == "__main__":
    from _flux._core import ffi, lib  # type: ignore[import-not-found]  # flux.core would import for 0.1 s more

    sys.exit(main(ffi, lib))
