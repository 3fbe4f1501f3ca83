"""`zarrfs refresh` and SIGHUP on a mount whose source has changed."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import zarr

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import counters_of, daemon_pid, log_of, mount_lines, mounted, on_disk, until
from tests.mounts.refreshing import refresh, write_set
from tests.mounts.test_semantics import error_of
from tests.references.parquetsets import zarray
from tests.servers import Faulty, Nginx


def indexes_of(pid: int) -> list[str]:
    """Return the paths of the indexes that a daemon has open."""
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return [path for path in links if ".index" in path]


def test_many_readers_during_refreshes_read_whole_versions(tmp_path: Path) -> None:
    """Every open file has the bytes of one version, no older than the last refresh completed before it was opened."""
    document, names = tmp_path / "set.json", [f"f{index}" for index in range(10)]

    def put(number: int) -> None:
        write_set(document, {name: f"{number:06};".encode() * (2000 + 200 * (number % 7)) for name in names})

    put(0)
    told, ended, problems, reads = [0], threading.Event(), list[object](), [0] * 8

    def read_on(reader: int, root: Path) -> None:
        chance = random.Random(reader)
        while not ended.is_set():
            least = told[0]
            try:
                with open(root / chance.choice(names), "rb", buffering=0) as file:
                    data = b""
                    while part := file.read(chance.randrange(1, 6000)):
                        data += part
                    size = os.fstat(file.fileno()).st_size
            except OSError as exc:
                problems.append(exc)
                return
            number = int(data[:6])
            whole = f"{number:06};".encode() * (2000 + 200 * (number % 7))
            if data != whole or size != len(whole) or number < least:
                problems.append((reader, number, least, len(data), size))
            reads[reader] += 1
            time.sleep(0.01)  # the child that prepares the next version needs a processor too

    with mounted(document, tmp_path / "mnt") as root:
        threads = [threading.Thread(target=read_on, args=(reader, root)) for reader in range(len(reads))]
        for thread in threads:
            thread.start()
        for number in range(1, 7):
            put(number)
            before = sum(reads)
            until(lambda: problems or sum(reads) > before)  # noqa: B023
            assert refresh(root) == "refreshed"
            told[0] = number
        until(lambda: problems or min(reads))
        ended.set()
        for thread in threads:
            thread.join()
        until(lambda: len(indexes_of(daemon_pid(root))) == 1)
    assert not problems
    assert min(reads) > 0


def test_a_broken_document_changes_nothing(tmp_path: Path) -> None:
    document = tmp_path / "set.json"
    write_set(document, {"a": b"old"})
    with mounted(document, tmp_path / "mnt") as root:
        assert (root / "a").read_bytes() == b"old"
        document.write_text('{"version": 1, "refs": {"a": ')
        done = run("refresh", root)
        assert done.returncode == 1
        assert re.fullmatch(r"zarrfs: .*set\.json: .*\n", done.stderr)
        os.kill(daemon_pid(root), signal.SIGHUP)
        until(lambda: log_of(root).count("not refreshed") == 2)
        assert (root / "a").read_bytes() == b"old"
        write_set(document, {"a": b"newer"})
        os.kill(daemon_pid(root), signal.SIGHUP)
        until(lambda: (root / "a").read_bytes() == b"newer")


def test_a_refresh_of_an_unchanged_document_keeps_its_inodes(tmp_path: Path) -> None:
    document = tmp_path / "set.json"
    write_set(document, {"a": b"same"})
    with mounted(document, tmp_path / "mnt") as root:
        held = os.open(root / "a", os.O_PATH)  # otherwise the kernel may forget the inode
        inode = os.fstat(held).st_ino
        write_set(document, {"a": b"same"})
        done = run("refresh", "--json", root / "a")
        assert (done.returncode, json.loads(done.stdout)["result"]) == (0, "unchanged")
        assert (root / "a").stat().st_ino == inode
        assert json.loads(run("refresh", "--json", "--force", root).stdout)["result"] == "refreshed"
        assert (root / "a").stat().st_ino != inode
        os.close(held)


def test_a_refresh_updates_an_archive(tmp_path: Path) -> None:
    document = tmp_path / "archive.json"

    def put(files: dict[str, str]) -> None:
        document.write_text(json.dumps([
            {"path": path, "mode": 0o100644, "size": len(data), "encoding": "base64",
             "data": base64.b64encode(data.encode()).decode()}
            for path, data in files.items()
        ]))  # fmt: skip

    put({"a": "old", "d": "a file"})
    with mounted(document, tmp_path / "mnt", "type=archive") as root, open(root / "a", "rb") as held:
        put({"a": "newer", "d/e": "below"})
        assert refresh(root) == "refreshed"
        assert held.read() == b"old"
        assert (root / "a").read_bytes() == b"newer"
        assert (root / "d/e").read_bytes() == b"below"


def test_a_refresh_updates_views(tmp_path: Path) -> None:
    document = tmp_path / "set.json"

    def put(shape: int) -> None:
        meta = json.dumps(zarray([shape], [2])).encode()
        chunks = {f"x/{index}": b"%d" % index * 2 for index in range(shape // 2)}
        write_set(document, {".zgroup": b'{"zarr_format": 2}', "x/.zarray": meta, **chunks})

    put(4)
    with mounted(document, tmp_path / "mnt", "view=arrays") as root:
        assert np.load(root / "x.npy").tolist() == [48, 48, 49, 49]
        put(6)
        assert refresh(root) == "refreshed"
        assert np.load(root / "x.npy").tolist() == [48, 48, 49, 49, 50, 50]


@pytest.mark.parametrize("cached", [False, True])
def test_a_changed_target_is_an_error_until_the_refresh(cached: bool, faulty: Faulty, tmp_path: Path) -> None:
    document, before, after = tmp_path / "set.json", b"1" * 200_000, b"2" * 200_000
    url = faulty.put("/data", before)
    document.write_text(json.dumps({"version": 1, "refs": {
        "a": [url, 0, 50_000], "b": [url, 150_000, 50_000], "c": [url, 100_000, 10]}}))  # fmt: skip
    more = [f"cache_dir={tmp_path / 'cache'}"] if cached else []
    with mounted(document, tmp_path / "mnt", "allow=private", "prefetch=0B", *more) as root:
        assert set((root / "a").read_bytes()) == set(b"1")
        if cached:
            until(lambda: on_disk(tmp_path / "cache") >= 50_000)
        faulty.put("/data", after, tag="2")
        assert error_of((root / "b").read_bytes) == errno.EIO
        assert refresh(root) == "refreshed"  # although the document is unchanged
        assert [set((root / name).read_bytes()) for name in "abc"] == [set(b"2")] * 3
        assert refresh(root) == "unchanged"


def test_a_refresh_revalidates_blocks_on_disk(faulty: Faulty, tmp_path: Path) -> None:
    url, document = faulty.put("/data", b"1" * 300_000), tmp_path / "set.json"
    document.write_text(json.dumps({"version": 1, "refs": {"a": [url, 0, 200_000], "b": [url, 200_000, 100_000]}}))
    options = ["allow=private", "prefetch=0B", f"cache_dir={tmp_path / 'cache'}"]
    with mounted(document, tmp_path / "mnt", *options) as root:
        assert set((root / "a").read_bytes()) == set(b"1")
        until(lambda: on_disk(tmp_path / "cache") >= 50_000)
        assert refresh(root, force=True) == "refreshed"
        faulty.requests.clear()
        assert set((root / "a").read_bytes()) == set(b"1")
        assert not faulty.gets()  # the target is unchanged
        faulty.put("/data", b"2" * 300_000, tag="2")
        assert refresh(root, force=True) == "refreshed"
        assert set((root / "a").read_bytes()) == set(b"2")


def test_no_counter_decreases_with_a_refresh(faulty: Faulty, tmp_path: Path) -> None:
    """A file of the older version is still open at the first refresh, and closed at the second."""
    document, options = tmp_path / "set.json", ("allow=private", f"cache_dir={tmp_path / 'cache'}", "retries=1")
    urls = [faulty.put(f"/{index}", b"value", *([503] if index == 3 else [])) for index in range(40)]
    document.write_text(json.dumps({"version": 1, "refs": {f"x/{index}": [url] for index, url in enumerate(urls)}}))
    with mounted(document, tmp_path / "mnt", *options) as root, open(root / "x/0", "rb") as file:
        for index in range(40):
            assert (root / f"x/{index}").read_bytes() == b"value"
        before = counters_of(root)
        assert before["latency_count"] == dict(before["histogram"])[1024] > 10
        for _ in range(2):
            assert refresh(root, force=True) == "refreshed"
            after = counters_of(root)
            grow = [name for name in before if name.endswith("_total")]
            assert [name for name in [*grow, "latency_count"] if after[name] < before[name]] == []
            before = after
            file.close()


def test_a_refresh_updates_a_store_at_a_url(nginx: Nginx, tmp_path: Path) -> None:
    store = nginx.listing.root / "changing"
    shutil.rmtree(store, ignore_errors=True)
    zarr.create_array(str(store), data=np.arange(4), chunks=(2,), zarr_format=2)
    with mounted(f"{nginx.listing.url}/changing/", tmp_path / "mnt", "attr_timeout=1d") as root:
        assert error_of(os.stat, root / "2") == errno.ENOENT
        old = (root / ".zarray").read_bytes()
        with open(root / ".zarray", "rb") as held:
            shutil.rmtree(store)
            zarr.create_array(str(store), data=np.arange(60), chunks=(2,), zarr_format=2)
            assert refresh(root) == "refreshed"
            assert (root / ".zarray").read_bytes() == (store / ".zarray").read_bytes() != old
            assert (root / "2").read_bytes() == (store / "2").read_bytes()
            with contextlib.suppress(OSError):  # the kernel may have dropped the old page if memory was short
                assert held.read() == old


@pytest.mark.parametrize("refreshes", [12, pytest.param(50, marks=pytest.mark.nightly)])
def test_old_versions_are_closed(refreshes: int, tmp_path: Path) -> None:
    """With many refreshes, and files open across some of them, descriptors and memory do not grow."""
    for name in ("one", "two"):
        zarr.create_array(str(tmp_path / name), data=np.full(400, ord(name[0]), "u1"), chunks=(2,), zarr_format=2)
    place, chunks = tmp_path / "set", {name: (tmp_path / name / "0").read_bytes() for name in ("one", "two")}
    place.symlink_to("one")

    def descriptors(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def memory(pid: int) -> int:
        """Return the KiB of the daemon's anonymous memory, after it has returned free heap memory."""
        seen = log_of(root).count(" statistics: ")
        os.kill(pid, signal.SIGUSR1)
        until(lambda: log_of(root).count(" statistics: ") > seen)
        return int(re.findall(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])

    with mounted(place, tmp_path / "mnt") as root:
        pid, held = daemon_pid(root), list[tuple[IO[bytes], bytes]]()
        for number in range(refreshes):
            if number == 6:
                before = descriptors(pid), memory(pid)
            name = ("one", "two")[number % 2]
            (tmp_path / "next").symlink_to(name)
            os.replace(tmp_path / "next", place)
            assert refresh(root) == "refreshed"
            held.append((open(root / f"{number}", "rb"), chunks[name]))  # noqa: SIM115
            assert len(os.listdir(root)) == 202
            if len(held) > 5:
                file, expected = held.pop(0)
                with file:
                    assert file.read() == expected
        while held:
            held.pop()[0].close()
        until(lambda: descriptors(pid) <= before[0])
        assert memory(pid) < before[1] + 8_000


def test_a_writable_mount_refuses_a_refresh(tmp_path: Path) -> None:
    document = tmp_path / "set.json"
    write_set(document, {"a": b"old"})
    (tmp_path / "upper").mkdir()
    with mounted(document, tmp_path / "mnt", f"upperdir={tmp_path / 'upper'}") as root:
        write_set(document, {"a": b"newer"})
        done = run("refresh", root)
        assert done.returncode == 1
        assert "upper directory" in done.stderr
        assert done.stderr.count("\n") == 1
        os.kill(daemon_pid(root), signal.SIGHUP)
        until(lambda: "WARNING" in log_of(root))
        [line] = [line for line in log_of(root).splitlines() if "WARNING" in line]
        assert done.stderr.removeprefix(f"zarrfs: {root}: ").strip() in line
        assert (root / "a").read_bytes() == b"old"


@contextlib.contextmanager
def managed(document: Path, mountpoint: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Start a foreground daemon that notifies a service manager; yield (daemon, the manager's socket)."""
    mountpoint.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        place = document.with_name("notify")
        manager.bind(str(place))
        manager.settimeout(60)
        daemon = subprocess.Popen(
            [PROGRAM, "mount", "--foreground", document, mountpoint],
            env={**os.environ, "NOTIFY_SOCKET": str(place)}, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert b"READY=1" in manager.recv(4096)
            yield daemon, manager
        finally:
            if daemon.poll() is None:
                subprocess.run(["umount", "-l", mountpoint], check=False)
                daemon.kill()
                daemon.wait()


def test_a_service_that_is_in_use_is_not_stopping(tmp_path: Path) -> None:
    """systemd kills a service TimeoutStopSec= after STOPPING=1: none may be sent while a detached mount is in use."""
    document, mountpoint = tmp_path / "set.json", tmp_path / "mnt"
    write_set(document, {"a": b"content"})
    with managed(document, mountpoint) as (daemon, manager):
        with open(mountpoint / "a", "rb") as file:
            assert run("umount", "--lazy", mountpoint).returncode == 0
            manager.settimeout(1)
            with pytest.raises(TimeoutError):
                manager.recv(4096)
            assert file.read() == b"content"
        manager.settimeout(60)
        assert manager.recv(4096) == b"STOPPING=1"
        assert daemon.wait(60) == 0


def test_a_service_manager_is_notified_of_a_refresh(tmp_path: Path) -> None:
    document, mountpoint = tmp_path / "set.json", tmp_path / "mnt"
    write_set(document, {"a": b"old"})
    with managed(document, mountpoint) as (daemon, manager):
        write_set(document, {"a": b"newer"})
        daemon.send_signal(signal.SIGHUP)
        assert re.match(rb"RELOADING=1\nMONOTONIC_USEC=\d+", manager.recv(4096))
        assert b"READY=1" in manager.recv(4096)
        assert (mountpoint / "a").read_bytes() == b"newer"
        daemon.terminate()
        assert daemon.wait(60) == 0
    assert not mount_lines(mountpoint)


def test_a_name_that_was_absent_exists_once_the_refresh_has_returned(tmp_path: Path) -> None:
    """Any number of absent names, on every kernel."""
    document = tmp_path / "set.json"
    write_set(document, {"a": b"1"})
    with mounted(document, tmp_path / "mnt") as root:
        write_set(document, {"a": b"2", "late": b"3"})
        assert not any((root / name).exists() for name in [*(f"n{number}" for number in range(500)), "late"])
        assert refresh(root) == "refreshed"
        assert (root / "late").read_text() == "3"
        assert (root / "a").read_text() == "2"
