"""SFTP: host keys are verified before a password is sent, and a lost connection is replaced."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from tests.servers import Sftp
from zarrfs.config.options import Options
from zarrfs.store.remotefiles import RemoteFiles

VALUE = bytes(range(256)) * 40


def using(check: Callable[[RemoteFiles], Awaitable[None]], options: Options) -> None:
    """Run `check` on a RemoteFiles."""

    async def main() -> None:
        files = RemoteFiles(options)
        try:
            await check(files)
        finally:
            await files.aclose()

    trio.run(main)


@pytest.fixture
def url(sftp: Sftp) -> str:
    (sftp.root / "v").write_bytes(VALUE)
    return f"{sftp.url}/v"


def test_a_lost_connection_is_replaced(sftp: Sftp, url: str) -> None:
    """Twice, and by one new connection for many readers."""

    async def check(files: RemoteFiles) -> None:
        async def read(low: int) -> None:
            assert bytes(await files.read(url, low, 100, low, low + 100)) == VALUE[low : low + 100]

        await read(0)
        for begin in (1000, 5000):
            await trio.to_thread.run_sync(sftp.drop)
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(read, begin + 200 * number)

    using(check, Options(storage={"sftp": sftp.options}, patience="all"))


def test_an_attribute_and_a_listing_over_a_lost_connection(sftp: Sftp, url: str) -> None:
    async def check(files: RemoteFiles) -> None:
        system, path = await files.find(url)
        await files.stat_at(system, path)
        await trio.to_thread.run_sync(sftp.drop)
        assert (await files.stat_at(system, path)).size == len(VALUE)
        await trio.to_thread.run_sync(sftp.drop)
        listing = await files.listing_at(system, "/")
        assert listing is not None
        assert "v" in [one.name for one in listing]

    using(check, Options(storage={"sftp": sftp.options}, patience="all"))
