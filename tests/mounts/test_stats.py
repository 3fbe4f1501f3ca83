"""Tests of `zarrfs stats` on real mounts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import counters_of, daemon_pid, mounted
from tests.servers import Nginx, nginx
from zarrfs.metrics.counters import METRICS

__all__ = ["nginx"]

ATTRIBUTE = "user.zarrfs.stats"
SIZE, NUMBER = 40_000, 5


@pytest.fixture
def mount(nginx: Nginx, tmp_path: Path) -> Iterator[Path]:
    """Mount five values that lie far apart in one target on nginx, without read-ahead."""
    value = os.urandom(1 << 20)
    (nginx.plain.root / "stats.bin").write_bytes(value)
    url = f"{nginx.plain.url}/stats.bin"
    refs = {f"a/{number}": [url, number * 200_000, SIZE] for number in range(NUMBER)}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", "prefetch=0B") as root:
        yield root


def read(path: Path) -> int:
    """Drop a file's pages from the page cache, read it from the daemon, and return the number of bytes."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return len(file.readall())


def test_counters_move_by_what_was_read(mount: Path) -> None:
    assert counters_of(mount)["requests_total"] == 0
    for number in range(NUMBER):
        assert read(mount / "a" / str(number)) == SIZE
    first = counters_of(mount)
    assert first["read_bytes_total"] == first["network_bytes_total"] == NUMBER * SIZE
    for name in "opens", "requests", "memory_misses":
        assert first[f"{name}_total"] == NUMBER, name
    for name in "requests_repeated_total", "requests_failed_total", "requests_in_flight", "requests_waiting":
        assert first[name] == 0, name
    assert first["histogram"][-1][1] == NUMBER
    assert read(mount / "a/0") == SIZE
    second = counters_of(mount)
    assert second["read_bytes_total"] == (NUMBER + 1) * SIZE
    assert second["requests_total"] == NUMBER
    assert second["memory_hits_total"] > first["memory_hits_total"]


def test_rates_are_those_since_the_last_table(mount: Path) -> None:
    command = [PROGRAM, "stats", "--every", "500ms", mount]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        assert next(lines).startswith(f"{mount}: ")
        read(mount / "a/1")
        while not (found := re.match(r"read_bytes +39\.1 KiB +([0-9.]+) KiB/s", next(lines))):
            pass
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == ""
    assert 0 < float(found[1]) <= 78.2
    assert process.returncode == -signal.SIGINT


def test_json_table_and_prometheus_output_agree(mount: Path, tmp_path: Path) -> None:
    read(mount / "a/1")
    (tmp_path / "link").symlink_to(mount)
    found = json.loads(run("stats", "--json", "link/a", cwd=tmp_path).stdout)
    assert found["mount"] == str(mount)
    assert found["pid"] == daemon_pid(mount)
    counted = {name: value for name, value in counters_of(mount).items() if name.endswith("_total")}
    assert found.items() >= counted.items()
    table = run("stats", mount).stdout
    assert re.search(rf"^network_bytes +{SIZE / 1024:.1f} KiB  ", table, re.MULTILINE)
    assert table.startswith(f"{mount}: {found['source']} (references, pid {found['pid']})\n")
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(run("stats", "--prometheus", mount).stdout)
        for sample in family.samples
    }
    assert samples["zarrfs_network_bytes_total"].value == SIZE
    assert samples["zarrfs_requests_total"].labels == {"mount": str(mount), "source": found["source"]}
    assert samples["zarrfs_request_duration_seconds_count"].value == 1
    assert samples.keys() >= {f"zarrfs_{metric.name}" for metric in METRICS}


def test_the_attribute_is_large_and_not_listed(mount: Path, tmp_path: Path) -> None:
    """Tools that copy listed attributes do not copy it: other file systems may refuse its size."""
    read(mount / "a/1")
    assert 0 < len(os.getxattr(mount, ATTRIBUTE)) < 65_536
    assert os.listxattr(mount) == ["user.zarrfs.mount"]
    for path in (mount / "a", mount / "a/1"):
        with pytest.raises(OSError, match="No data available"):
            os.getxattr(path, ATTRIBUTE)
    assert ATTRIBUTE.encode() not in subprocess.run(["getfattr", "-d", mount], capture_output=True, check=True).stdout
    subprocess.run(["cp", "-a", mount, tmp_path / "copy"], check=True)
    assert ATTRIBUTE not in os.listxattr(tmp_path / "copy")


# -- mounts that do not answer


def test_prometheus_gets_all_mounts_also_dead_ones(tmp_path: Path) -> None:
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"a": "1", "bad": ["/none.bin", 0, 1]}}))
    roots = [tmp_path / name for name in ("one", "two", "dead")]
    roots[2].mkdir()
    assert run("mount", tmp_path / "refs.json", roots[2]).returncode == 0
    try:
        os.kill(daemon_pid(roots[2]), signal.SIGKILL)
        with mounted(tmp_path / "refs.json", roots[0]), mounted(tmp_path / "refs.json", roots[1]):
            with pytest.raises(OSError, match="Input/output"):
                (roots[1] / "bad").read_bytes()
            counted = counters_of(roots[1])["errors"]["EIO"]
            done = run("stats", "--prometheus")
    finally:
        subprocess.run(["umount", "-l", roots[2]], check=True)
    assert done.returncode == 0
    assert f"{roots[2]}: its daemon has died" in done.stderr
    families = {family.name: family.samples for family in text_string_to_metric_families(done.stdout)}
    up = {sample.labels["mount"]: sample.value for sample in families["zarrfs_up"]}
    assert [up[str(root)] for root in roots] == [1, 1, 0]
    failed = {sample.labels["mount"]: sample.value for sample in families["zarrfs_errors"]}
    assert (failed[str(roots[0])], failed[str(roots[1])]) == (0, counted)
    assert done.stdout.count("# TYPE zarrfs_errors_total ") == 1  # the samples of a metric are together
