"""FTP: one connection at a time carries all requests, and is replaced when the server closes it."""

from __future__ import annotations

import struct

import pytest
import trio

from tests.remotereading import using
from tests.servers import Ftp
from zarrfs.config.options import Options
from zarrfs.errors import AccessDenied, NotFound, TargetMissing
from zarrfs.net.responses import Entry
from zarrfs.net.systems import entry, listed
from zarrfs.store.remote import FsspecStore
from zarrfs.store.remotefiles import RemoteFiles

VALUE = b"".join(struct.pack(">I", number) for number in range(250_000))
OPTIONS = Options(allow=("ftp",), wait_for_outages="all")


def test_concurrent_reads_get_their_own_bytes(ftp: Ftp) -> None:
    """A reply to one request must not be taken for the reply to another."""
    ftp.values["v"] = VALUE

    async def check(files: RemoteFiles) -> None:
        async def one(low: int) -> None:
            assert bytes(await files.read(f"{ftp.url}/v", low, 400, low, low + 400)) == VALUE[low : low + 400]

        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(one, number * 60_000)

    using(check, OPTIONS)


def test_a_name_is_found_while_absent_ones_are_looked_up(ftp: Ftp) -> None:
    ftp.values["there"] = VALUE

    async def main() -> None:
        store = FsspecStore(f"{ftp.url}/", OPTIONS)

        async def absent(key: str) -> None:
            with pytest.raises(NotFound):
                await store.info(key)

        async def present() -> None:
            assert (await store.info("there")).size == len(VALUE)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(present)
            for key in ("a", "b", "c", "z"):
                nursery.start_soon(absent, key)
        await store.aclose()

    trio.run(main)


def test_a_file_name_may_contain_any_character(ftp: Ftp) -> None:
    """fsspec would open another connection and read another file."""
    ftp.values = {name: b"<%b>" % name.encode() for name in ("a", "a?", "a?b", "a#", "a#b", "a\tb", "ab")}

    async def check(files: RemoteFiles) -> None:
        for name, value in ftp.values.items():
            assert bytes(await files.read(f"{ftp.url}/{name}", 0, len(value), 0, len(value))) == value
        assert ftp.connections == 1

    using(check, OPTIONS)


def test_a_connection_that_the_server_closes_is_replaced(ftp: Ftp) -> None:
    ftp.values["v"] = VALUE

    async def check(files: RemoteFiles) -> None:
        await files.read(f"{ftp.url}/v", 0, 100, 0, 100)
        ftp.hang_up()
        assert bytes(await files.read(f"{ftp.url}/v", 500, 100, 500, 600)) == VALUE[500:600]
        assert ftp.connections == 2

    using(check, OPTIONS)


@pytest.mark.parametrize("reply", ["421 idle for too long", "425 no data connection", "450 busy"])
def test_a_temporary_error_does_not_make_a_name_absent(ftp: Ftp, reply: str) -> None:
    ftp.values["v"] = VALUE

    async def check(files: RemoteFiles) -> None:
        system, path = await files.find(f"{ftp.url}/v")
        assert await files.read_all_at(system, path) == VALUE
        ftp.replies = [reply]
        assert (await files.stat_at(system, path)).size == len(VALUE)
        ftp.replies = [reply]
        assert await files.read_all_at(system, path) == VALUE

    using(check, OPTIONS)


def test_permanent_errors_are_raised(ftp: Ftp) -> None:
    ftp.values["v"] = VALUE

    async def check(files: RemoteFiles) -> None:
        with pytest.raises(TargetMissing):
            await files.read(f"{ftp.url}/none", 0, 100, 0, 100)
        ftp.hang_up()
        ftp.logs_in = False
        with pytest.raises(AccessDenied, match=rf"^{ftp.url}/v: 530 not for you$"):
            await files.read(f"{ftp.url}/v", 0, 100, 0, 100)

    using(check, OPTIONS)


@pytest.mark.parametrize("path", ["/v", "/d/0.0"])
def test_a_directory_that_cannot_be_listed_is_not_taken_for_empty(ftp: Ftp, path: str) -> None:
    """Otherwise its chunks would be absent, and a Zarr reader would use fill values."""
    ftp.values.update({"v": VALUE, "d/": b""})

    async def check(files: RemoteFiles) -> None:
        system, v = await files.find(f"{ftp.url}/v")
        assert (await files.stat_at(system, v)).size == len(VALUE)
        ftp.replies = ["530 log in"] * 2  # to MLSD and to LIST
        with pytest.raises(AccessDenied, match=rf"^{ftp.url}{path.rpartition('/')[0] or '/'}: 530 log in$"):
            await files.stat_at(system, path)
        ftp.replies = ["550 no such directory"] * 2
        with pytest.raises(TargetMissing):
            await files.stat_at(system, "/none/0.0")

    using(check, OPTIONS)


def test_a_listed_file_that_cannot_be_read_is_not_absent(ftp: Ftp) -> None:
    class Unreadable(dict[str, bytes]):
        def get(self, *args: object) -> None:  # type: ignore[override]
            return None

    ftp.values = Unreadable(v=VALUE)

    async def check(files: RemoteFiles) -> None:
        with pytest.raises(AccessDenied, match=rf"^{ftp.url}/v: 550 no such file$"):
            await files.read_all_at(*await files.find(f"{ftp.url}/v"))

    using(check, OPTIONS)


def test_a_symbolic_link_has_an_unknown_size() -> None:
    """FTP servers list the size of the link itself, to which the value would be cut."""
    info = {"name": "/d/a", "type": "file", "size": 5, "unix.mode": "lrwxrwxrwx"}
    assert entry(info) == Entry("a", False)
    assert entry({**info, "unix.mode": "-rw-r--r--"}) == Entry("a", False, 5)
    assert listed("/d", [{"name": "/d/a", "type": "OS.unix=slink:b", "size": 0}]) == [Entry("a", False)]
