"""SFTP: host keys are verified before a password is sent, and a lost connection is replaced."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import trio

from tests.remotereading import using
from tests.servers import Sftp
from zarrfs.config.options import Options, parse
from zarrfs.errors import AccessDenied, NotFound, ReadError, TargetMissing
from zarrfs.store.api import Kind
from zarrfs.store.remote import FsspecStore
from zarrfs.store.remotefiles import RemoteFiles

VALUE = bytes(range(251)) * 12000


@pytest.fixture
def url(sftp: Sftp) -> str:
    (sftp.root / "v").write_bytes(VALUE)
    return f"{sftp.url}/v"


def test_a_lost_connection_is_replaced(sftp: Sftp, url: str) -> None:
    """The server drops its connections twice; eight concurrent readers then read correct bytes by one new one."""
    sftp.passwords.clear()

    async def check(files: RemoteFiles) -> None:
        async def read(low: int) -> None:
            assert bytes(await files.read(url, low, 100, low, low + 100)) == VALUE[low : low + 100]

        await read(0)
        assert len(sftp.passwords) == 1
        for logins, begin in ((2, 1 << 20), (3, 2 << 20)):
            await trio.to_thread.run_sync(sftp.drop)
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(read, begin + 200 * number)
            assert len(sftp.passwords) == logins

    using(check, Options(storage={"sftp": sftp.options}, wait_for_outages="all"))


def test_a_file_name_may_contain_any_character(sftp: Sftp) -> None:
    async def check(files: RemoteFiles) -> None:
        for name in ("a?b", "a#b", "a\tb"):
            (sftp.root / name).write_bytes(name.encode() + VALUE)
            assert bytes(await files.read(f"{sftp.url}/{name}", 0, 3, 0, len(VALUE))) == name.encode()
        with pytest.raises(TargetMissing):
            await files.read(f"{sftp.url}/a", 0, 3, 0, 3)

    using(check, Options(storage={"sftp": sftp.options}))


def test_stat_and_listing_replace_a_lost_connection(sftp: Sftp, url: str) -> None:
    async def check(files: RemoteFiles) -> None:
        system, path = await files.find(url)
        await files.stat_at(system, path)
        await trio.to_thread.run_sync(sftp.drop)
        assert (await files.stat_at(system, path)).size == len(VALUE)
        await trio.to_thread.run_sync(sftp.drop)
        listing = await files.listing_at(system, "/")
        assert listing is not None
        assert "v" in [one.name for one in listing]

    using(check, Options(storage={"sftp": sftp.options}, wait_for_outages="all"))


def read_with(url: str, *options: str) -> None:
    async def check(files: RemoteFiles) -> None:
        assert bytes(await files.read(url, 0, 100, 0, 100)) == VALUE[:100]

    using(check, parse(["sftp.username=somebody", "sftp.password=secret", *options]).options)


def test_an_unknown_host_key_is_refused(
    sftp: Sftp, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sftp.passwords.clear()
    port = sftp.url.rpartition(":")[2]
    with pytest.raises(ReadError) as caught:
        read_with(url)
    assert str(caught.value) == (
        f"{sftp.url}: its host key is not in ~/.ssh/known_hosts or /etc/ssh/ssh_known_hosts: "
        "if it is the right server, "
        f"add the key (ssh-keyscan -p {port} 127.0.0.1), or name a file that has it (-o sftp.known_hosts=FILE)"
    )
    other = tmp_path / "other"
    other.write_text(sftp.known_host.replace("127.0.0.1", "127.0.0.2"))
    with pytest.raises(ReadError, match=f"its host key is not in {other}: "):
        read_with(url, f"sftp.known_hosts={other}")
    with pytest.raises(ReadError, match="its host key is not in"):
        read_with(url, "sftp.known_hosts=")
    assert sftp.passwords == []


def test_a_known_host_key_is_accepted(sftp: Sftp, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text(sftp.known_host)
    read_with(url, f"sftp.known_hosts={tmp_path}/file")
    read_with(url, "sftp.known_hosts=null")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/known_hosts").write_text(sftp.known_host)
    read_with(url)


@pytest.mark.parametrize("option", ["client_keys", "known_hosts", "config"])
@pytest.mark.parametrize("name", ["none", "file/none", ""])
def test_a_missing_file_of_an_option_is_an_error_and_no_value_is_absent(
    sftp: Sftp, url: str, tmp_path: Path, option: str, name: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReadError, match=str(tmp_path / name)) as caught:
        read_with(url, "sftp.known_hosts=null", f"sftp.{option}={tmp_path / name}")
    assert not isinstance(caught.value, TargetMissing)


def test_a_wrong_password_is_denied_and_not_shown(sftp: Sftp, url: str) -> None:
    with pytest.raises(AccessDenied) as caught:
        read_with(url, "sftp.known_hosts=null", "sftp.password=hush")
    assert "hush" not in str(caught.value)


def test_readers_of_a_silent_server_fail_together() -> None:
    """None waits for the attempts of the others to log in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"sftp://127.0.0.1:{listener.getsockname()[1]}/v"

        async def check(files: RemoteFiles) -> None:
            async def read(low: int) -> None:
                with pytest.raises(ReadError, match="no answer within"):
                    await files.read(url, low, 100, low, low + 100)

            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for number in range(40):
                    nursery.start_soon(read, number << 20)
            assert trio.current_time() - began < 30

        using(check, Options(storage={"sftp": {"known_hosts": None}}, retries=0, read_timeout=5.0))


def test_symbolic_links_are_followed(sftp: Sftp) -> None:
    """If a listing omitted links, or a link were not followed, a Zarr reader would take the chunks for absent."""
    tree = sftp.root / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "c").mkdir()
    (tree / "c/y").write_bytes(VALUE[:6])
    (tree / "d/x").write_bytes(VALUE[:5])
    (tree / "value").write_bytes(VALUE)
    for name, target in (("link", "value"), ("e", "d"), ("up", "."), ("d/up", ".."), ("d/round", "../c"),
                         ("c/round", "../d"), ("lost", "nowhere")):  # fmt: skip
        (tree / name).symlink_to(target)
    os.mkfifo(tree / "pipe")

    async def main() -> None:
        store = FsspecStore(f"{sftp.url}/tree", Options(storage={"sftp": sftp.options}, retries=0))
        try:
            with pytest.raises(ReadError, match="is a symbolic link that leads nowhere"):
                await store.open("lost")
            found = [info async for info in store.list_dir("")]
            assert [(info.name, info.kind, info.size) for info in found if info.kind is Kind.FILE] == [
                ("link", Kind.FILE, len(VALUE)), ("lost", Kind.FILE, None), ("pipe", Kind.FILE, None),
                ("value", Kind.FILE, len(VALUE)),
            ]  # fmt: skip
            assert [key async for key in store.list_prefix("")] == [
                "c/round/x", "c/y", "d/round/y", "d/x", "e/round/y", "e/x",
                "link", "lost", "pipe", "value",
            ]  # fmt: skip
            assert bytes(await store.get("link", 10, 20)) == VALUE[10:30]
            with pytest.raises(ReadError, match="is a symbolic link that leads nowhere"):
                await store.open("lost")
            with pytest.raises(ReadError, match="the server does not state its size"):
                await store.open("pipe")
            with pytest.raises(NotFound):
                await store.info("absent")
        finally:
            await store.aclose()

    trio.run(main)
