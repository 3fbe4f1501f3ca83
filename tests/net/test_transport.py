"""Connections to servers that send faster than the client parses."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time

import pytest
import trio

from tests.remotereading import using
from tests.servers import Faulty
from zarrfs.config.options import Options
from zarrfs.net.responses import Transient
from zarrfs.store.remotefiles import RemoteFiles

VALUE = bytes(range(256)) * 4
LONGEST = 10.0  # seconds for which the server sends, unless the client disconnects
INTERIM = b"HTTP/1.1 100 Continue1234567\r\n\r\n"  # 32 bytes, which divides the size of one receive
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CODED = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"HTTP/1.1 100 Continue12345678\r\n\r\n", INTERIM), (CHUNKS, b"1\r\nx\r\n"),
        (CODED, gzip.compress(b"", mtime=0)),
    ],
)  # fmt: skip
def test_a_server_that_never_pauses_holds_up_no_other_read(faulty: Faulty, begin: bytes, more: bytes) -> None:
    """A read from that server ends at request_timeout=, although there is always something to receive."""
    good, begun = faulty.put("/v", VALUE), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.settimeout(LONGEST)
                connection.recv(65_536)
                connection.sendall(begin + more * 10_000)  # so that the first receive ends within a response
                begun.set()
                end = time.monotonic() + LONGEST
                while time.monotonic() < end:
                    connection.sendall(more * 10_000)

        async def check(files: RemoteFiles) -> None:
            system, url = await files.find(f"http://127.0.0.1:{listener.getsockname()[1]}/x")

            async def read() -> None:
                with pytest.raises(Transient, match="no answer within 2 s"):
                    await system.fetch(url, 0, 8 << 20)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.to_thread.run_sync(begun.wait, LONGEST)
                assert bytes(await files.read(good, 10, 100, 10, 110)) == VALUE[10:110]

        threading.Thread(target=serve, daemon=True).start()
        using(check, Options(request_timeout=2.0))
