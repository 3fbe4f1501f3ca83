"""The request queue: readers that are cancelled, and requests that several readers share."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tests.servers import Faulty
from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.net.request_queue import RequestQueue
from zarrfs.store.remotefiles import RemoteFiles


def test_a_reader_cancelled_before_its_request_is_sent_leaves_no_trace(faulty: Faulty) -> None:
    """A queued request is sent a scheduler pass later, and its readers may be cancelled in between."""
    url = faulty.put("/left.bin", bytes(range(100)))

    async def main() -> None:
        files = RemoteFiles(Options())
        system, path = await files.find(url)
        ranges = RequestQueue(Options())
        for ahead in (False, True) * 10:  # trio may run the request or the reader first
            with trio.CancelScope() as scope:
                scope.cancel()
                await ranges.fetch(system, path, 0, 10, ahead)
            assert scope.cancelled_caught
            while ranges.stats()["in_flight"]:  # noqa: ASYNC110
                await trio.sleep(0.001)
        assert ranges.stats()["in_flight_bytes"] == 0
        assert bytes((await ranges.fetch(system, path, 10, 20)).data) == bytes(range(10, 20))
        await files.aclose()

    trio.run(main)


def test_a_short_response_before_the_end_is_fetched_again(faulty: Faulty) -> None:
    """A range that extends beyond the end of the target may be cut at that end, but not before it."""
    data = bytes(range(100))
    url = faulty.put("/end.bin", data, "short")

    async def main() -> None:
        files = RemoteFiles(Options())
        assert bytes(await files.read(url, 0, 100, 0, 200)) == data
        await files.aclose()

    trio.run(main)
    assert faulty.gets() == 2


def test_read_ahead_merged_with_a_read_ends_after_the_reader_has_left(faulty: Faulty) -> None:
    """Both share one request, which gets a deadline of its own once the reader has left."""
    url = faulty.put("/out.bin", bytes(100), forever=503)
    options = Options(host_requests=1, retries=3, read_timeout=0.5)
    ended = []

    async def main() -> None:
        files = RemoteFiles(options)
        system, path = await files.find(url)
        ranges = RequestQueue(options)
        faulty.put("/first.bin", b"x", "slow")
        first, first_path = await files.find(faulty.url + "/first.bin")

        async def ahead() -> None:
            with pytest.raises(ReadError, match="not read within"):
                await ranges.fetch(system, path, 0, 10, True)
            ended.append(1)

        async def reader() -> None:
            with trio.move_on_after(0.5):
                await ranges.fetch(system, path, 10, 20)

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ranges.fetch, first, first_path, 0, 1)
                await trio.to_thread.run_sync(faulty.arrived.wait)
                nursery.start_soon(ahead)
                nursery.start_soon(reader)
                await trio.testing.wait_all_tasks_blocked(0.01)
                faulty.release()
        await files.aclose()

    trio.run(main)
    assert ended == [1]
