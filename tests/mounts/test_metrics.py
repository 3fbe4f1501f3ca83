"""-o metrics= on real mounts: metrics over HTTP and in a file."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import run
from tests.faultproxy import FaultProxy, proxy
from tests.mounts.mounting import alive, daemon_pid, mount_lines, mounted
from tests.mounts.remotevalues import cut, document, publish, read_all, wait_for, whole
from tests.mounts.test_semantics import error_of
from tests.servers import Nginx, free_port, nginx

__all__ = ["nginx", "proxy"]

ADDRESS = "127.0.0.1:0"


def references(tmp_path: Path, **refs: Any) -> Path:
    path = tmp_path / "refs.json"
    path.write_text(json.dumps({"version": 1, "refs": refs or {"a": "hello"}}))
    return path


def port_of(root: Path) -> int:
    """Return the port of the metrics server of a mount, from its metrics address."""
    where = json.loads(os.getxattr(root, "user.zarrfs.mount"))["metrics"]
    return int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/metrics", where)[1])  # type: ignore[index]


def samples(text: str) -> dict[str, float]:
    """Parse metrics; return their values by name, and the sum of those that have the same name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


class Client:
    """A connection to the metrics server of a mount."""

    def __init__(self, port: int) -> None:
        self.http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, path: str = "/metrics", method: str = "GET", **more: Any) -> tuple[int, str]:
        self.http.request(method, path, **more)
        answer = self.http.getresponse()
        return answer.status, answer.read().decode()

    def scrape(self) -> dict[str, float]:
        status, text = self.ask()
        assert status == 200
        return samples(text)


# -- over HTTP


@pytest.mark.promise("S47")
def test_hundreds_of_scrapes_are_answered_while_sixteen_threads_read(nginx: Nginx, tmp_path: Path) -> None:
    values = cut(publish(nginx.plain.root, "scraped.bin", 4 << 20), "v", 32 << 10, gap=0)
    source = document(tmp_path / "refs.json", {f"{nginx.plain.url}/scraped.bin": values})
    with mounted(source, tmp_path / "mnt", f"metrics={ADDRESS}") as root:
        client, times = Client(port_of(root)), []
        descriptors = client.scrape()["zarrfs_process_open_fds"]
        done = threading.Event()

        def read_on() -> int:
            right = 0
            while not done.is_set():
                outcome = read_all(root, whole(values), 16)
                assert outcome.failed == {}
                right += outcome.right
            return right

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_on)
            before = client.scrape()
            for number in range(300):
                began = time.monotonic()
                status, text = client.ask()
                times.append(time.monotonic() - began)
                assert status == 200
                if number % 100 == 0:
                    found = samples(text)
                    assert all(found[name] >= value for name, value in before.items() if name.endswith("_total"))
                    before = found
            done.set()
            right = reading.result()
        after = client.scrape()
        assert after["zarrfs_read_bytes_total"] >= right * (32 << 10)
        assert after["zarrfs_errors_total"] == 0
        assert after["zarrfs_process_open_fds"] <= descriptors + 48  # connections to nginx, 32 at most
        assert sorted(times)[150] < 2  # some may be late on a busy machine


def test_metrics_are_served_while_targets_hang(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    values = cut(publish(nginx.plain.root, "hangs.bin", 1 << 20), "v", 64 << 10, gap=0)
    source = document(tmp_path / "refs.json", {f"{proxy.url}/hangs.bin": values})
    with mounted(source, tmp_path / "mnt", f"metrics={ADDRESS},prefetch=0B,coalesce_gap=0B") as root:
        client = Client(port_of(root))
        proxy.hold()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_all, root, whole(values), 16)
            assert proxy.held.wait(60)
            wait_for(lambda: client.scrape()["zarrfs_requests_in_flight"] >= 4)
            proxy.release()
            assert reading.result().right == 16
        wait_for(lambda: client.scrape()["zarrfs_requests_in_flight"] == 0)


def test_failures_are_counted_by_their_errno(tmp_path: Path) -> None:
    source = references(tmp_path, none=[str(tmp_path / "none.bin"), 0, 1])
    with mounted(source, tmp_path / "mnt", f"metrics={ADDRESS}") as root:
        client = Client(port_of(root))
        line = f'zarrfs_errors_total{{mount="{root}",source="{source}",errno="EIO"}} '
        assert f"{line}0\n" in client.ask()[1]
        assert error_of((root / "none").read_bytes) == errno.EIO
        told = json.loads(os.getxattr(root, "user.zarrfs.stats"))["errors"]["EIO"]
        assert f"{line}{told}\n" in client.ask()[1]
        assert f"failed        {told} EIO\n" in run("stats", root).stdout
        assert error_of(os.stat, root / "nothing") == errno.ENOENT  # ENOENT is an answer and no failure
        assert f"{line}{told}\n" in client.ask()[1]


def test_the_metrics_server_serves_nothing_else(tmp_path: Path) -> None:
    with mounted(references(tmp_path), tmp_path / "mnt", f"metrics={ADDRESS}") as root:
        port = port_of(root)
        client = Client(port)
        assert client.ask()[0] == 200
        assert client.ask("/metrics?name=x")[0] == 200
        for whole in ("http://host/metrics", "HTTP://127.0.0.1:1/metrics?name=x", "https://[::1]:2/metrics"):
            assert client.ask(whole)[0] == 200, whole
        for path in ("/", "/metrics/", "/metricsx", "//metrics", "/../metrics", "/mnt/a", "*", "metrics", "http:///metrics",
                     "http://host", "http://host/", "http://metrics", "ftp://host/metrics"):  # fmt: skip
            assert client.ask(path) == (404, "there is only /metrics\n"), path
        assert client.ask(method="HEAD") == (200, "")
        assert client.ask(method="DELETE")[0] == 405
        assert client.ask(headers={"Accept-Encoding": "gzip", "Accept": "application/openmetrics-text"})[0] == 200
        kind = {name.lower(): value for name, value in header_of(client)}["content-type"]
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        assert Client(port).ask(method="POST", body="x")[0] == 413
        assert Client(port).ask(headers={"X": "x" * 20_000})[0] == 431
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(b"\0\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 400 ")
        assert client.ask()[0] == 200


def header_of(client: Client) -> list[tuple[str, str]]:
    client.http.request("GET", "/metrics")
    answer = client.http.getresponse()
    answer.read()
    return answer.getheaders()


# zarrfs with a metrics server that waits 15 s for a request instead of 5 s, as the test makes 24 connections meanwhile
PATIENT = "from zarrfs.metrics import metricserver; metricserver._PATIENCE = 15.0; "
PATIENT += "from zarrfs.__main__ import program; program()"


def test_clients_that_are_slow_or_many(tmp_path: Path) -> None:
    """Silent connections occupy the sixteen places until they time out; reads of the mount do not wait for them."""
    source, patient = references(tmp_path), (sys.executable, "-c", PATIENT)
    with (
        mounted(source, tmp_path / "mnt", f"metrics={ADDRESS}", program=patient) as root,
        contextlib.ExitStack() as stack,
    ):
        port, pid = port_of(root), daemon_pid(root)
        before = len(os.listdir(f"/proc/{pid}/fd"))
        for _ in range(3):  # until all connections are made before the first ones time out
            began = time.monotonic()
            held = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(16)]
            while len(os.listdir(f"/proc/{pid}/fd")) < before + 16 and time.monotonic() - began < 14:
                time.sleep(0.01)
            for _ in range(8):  # all places are taken
                with socket.create_connection(("127.0.0.1", port), timeout=60) as more:
                    assert more.recv(100) == b""
            at_once = time.monotonic() - began < 15
            assert (root / "a").read_bytes() == b"hello"
            assert all(sock.recv(100) == b"" for sock in held)
            if at_once:
                break
        assert at_once
        assert Client(port).ask()[0] == 200
        gone = socket.create_connection(("127.0.0.1", port))
        gone.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 200)  # and reads no response
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        gone.close()
        assert Client(port).ask()[0] == 200
        assert alive(pid)


def test_ipv6(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with mounted(references(tmp_path), tmp_path / "mnt", "metrics=[::1]:0") as root:
        where = json.loads(os.getxattr(root, "user.zarrfs.mount"))["metrics"]
        port = int(re.fullmatch(r"http://\[::1\]:(\d+)/metrics", where)[1])  # type: ignore[index]
        connection = http.client.HTTPConnection("::1", port, timeout=60)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200


@pytest.mark.parametrize("foreground", [False, True])
def test_a_port_that_is_taken_is_an_error_before_anything_is_mounted(foreground: bool, tmp_path: Path) -> None:
    source, point = references(tmp_path), tmp_path / "mnt"
    point.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("mount", *(["-f"] if foreground else []), source, point, "-o", f"metrics={where}")
        assert done.returncode == 1
        assert f"metrics={where}: the port is in use: each mount has its own\n" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not mount_lines(point)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("9400", "expected ADDRESS:PORT"), ("127.0.0.1", "expected ADDRESS:PORT"), ("x.prom", "expected ADDRESS:PORT"),
        ("127.0.0.1:70000", "expected ADDRESS:PORT"), ("::1:9400", "expected ADDRESS:PORT"),
        ("192.0.2.1:9400", "cannot assign requested address"), ("nowhere.invalid:1", "metrics=nowhere.invalid:1: "),
        ("/nowhere/x.prom", "metrics=/nowhere/x.prom: no such file or directory"), ("/tmp", "is a directory"),
    ],
)  # fmt: skip
def test_bad_places_for_metrics_are_refused(where: str, says: str, tmp_path: Path) -> None:
    source, point = references(tmp_path), tmp_path / "mnt"
    point.mkdir()
    done = run("mount", source, point, "-o", f"metrics={where}")
    assert done.returncode != 0
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not mount_lines(point)


def test_a_port_can_be_used_again_after_an_unmount(tmp_path: Path) -> None:
    port = free_port()
    for _ in range(2):
        with mounted(references(tmp_path), tmp_path / "mnt", f"metrics=127.0.0.1:{port}") as root:
            assert Client(port_of(root)).ask()[0] == 200


# -- a file


@pytest.fixture
def collected(tmp_path: Path) -> Path:
    directory = tmp_path / "node_exporter"
    directory.mkdir()
    return directory


def test_the_file_for_the_node_exporter_is_written_and_finally_removed(collected: Path, tmp_path: Path) -> None:
    place = collected / "data.prom"
    place.write_text("# HELP zarrfs_inodes of an earlier mount\n")
    before = time.time()
    with mounted(references(tmp_path), tmp_path / "mnt", f"metrics={place}") as root:
        wait_for(lambda: place.exists() and "zarrfs_reads_total" in place.read_text())
        found = samples(place.read_text())
        assert before <= found["zarrfs_written_timestamp_seconds"] <= time.time()
        assert found["zarrfs_build_info"] == 1
        assert place.stat().st_mode & 0o777 == 0o644
        assert json.loads(os.getxattr(root, "user.zarrfs.mount"))["metrics"] == str(place)
        assert os.listdir(collected) == ["data.prom"]
    assert os.listdir(collected) == []  # metrics of an unmounted source would mislead


def test_the_file_of_a_killed_daemon_shows_when_it_was_written(collected: Path, tmp_path: Path) -> None:
    place, point = collected / "data.prom", tmp_path / "mnt"
    point.mkdir()
    assert run("mount", references(tmp_path), point, "-o", f"metrics={place}").returncode == 0
    try:
        wait_for(lambda: place.exists())
        os.kill(daemon_pid(point), signal.SIGKILL)
        assert samples(place.read_text())["zarrfs_written_timestamp_seconds"] <= time.time()
    finally:
        subprocess.run(["umount", "-l", point], capture_output=True, check=False)


def test_promtool_finds_no_fault(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here")
    with mounted(references(tmp_path), tmp_path / "mnt", f"metrics={ADDRESS}") as root:
        text = Client(port_of(root)).ask()[1]
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_other_file_is_replaced_by_metrics(tmp_path: Path) -> None:
    source, mnt, mine = references(tmp_path, a="x"), tmp_path / "mnt", tmp_path / "thesis.txt"
    mnt.mkdir()
    mine.write_text("my thesis\n")
    for place in (mine, Path("/dev/null")):
        done = run("mount", source, mnt, "-o", f"metrics={place}")
        assert done.returncode != 0
        assert f"metrics={place}: is there already" in done.stderr
        assert not mount_lines(mnt)
    assert mine.read_text() == "my thesis\n"


def test_the_file_of_another_mount_is_not_removed(tmp_path: Path) -> None:
    place = tmp_path / "all.prom"
    with mounted(references(tmp_path, a="x"), tmp_path / "one", f"metrics={place}"):
        wait_for(place.exists)
        place.unlink()
        place.write_text("# HELP zarrfs_inodes of another mount\n")
    assert place.exists()
