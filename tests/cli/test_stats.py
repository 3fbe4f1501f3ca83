"""The output of zarrfs stats and zarrfs top for given counters."""

from __future__ import annotations

import copy
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from zarrfs.cli import main, top_screen
from zarrfs.cli.stats_text import hosts, milliseconds, table
from zarrfs.errors import MountError
from zarrfs.metrics.counters import ERROR_METRICS, HOST_METRICS, LATENCY, METRICS, PLACE_METRICS, TEXTS
from zarrfs.metrics.exposition import exposition
from zarrfs.metrics.statistics import Statistics
from zarrfs.net.latency import Latency

METER = Latency()
for _number in range(1, 101):
    METER.add(_number / 1000)

KINDS = ("url", "flux")  # of places that hold blobs
ERRNOS = ("EIO", "EACCES", "ENOSPC")
COUNTERS: dict[str, Any] = {
    "inodes": 40, "open_files": 41, "blob_reads": 42, "blobs_verified": 43, "blob_bytes_verified": 44,
    "blobs_held": 45, "blob_bytes_held": 46 << 20,
    "blob_disk": {"writes": 47, "bytes_written": 48 << 20, "dropped": 49, "errors": 50, "evicted": 51},
    "blobs_fetched": {"url": 52, "flux": 53}, "blob_bytes_fetched": {"url": 54 << 20, "flux": 55 << 20},
    "lookup": 1, "readdir": 2, "open": 3, "read": 4000, "bytes": 5 << 30, "record_files": 6,
    "arrays": {"decoded": 61, "hits": 62, "kept": 63 << 20, "budget": 64 << 20},
    "errors": {"EIO": 71, "EACCES": 72, "ENOSPC": 0}, "log": {"lost": 73, "waiting": 82}, "version": "1.2.3",
    "process": {"cpu_seconds": 74.5, "started": 75.25, "resident": 76, "virtual": 77, "descriptors": 78,
                "descriptors_limit": 79},
    "local": {"open": 7, "opens": 8, "reads": 9, "waits": 10},
    "remote": {
        "requests": 100, "repeated": 12, "failed": 13, "bytes": 14 << 20, "in_flight": 15, "in_flight_bytes": 16 << 20,
        "waiting": 17, "merged": 18, "outages": 83, "hedged": 84, "hedged_won": 85,
        "latency": METER.quantiles(), "latency_histogram": METER.histogram(),
        "latency_sum": METER.total, "latency_count": METER.count,
        "hosts": {
            "slow.example": {"requests": 19, "in_flight": 20},
            "busy.example": {"requests": 81, "in_flight": 1,
                             "outage": {"since": 86.0, "seconds": 87.0, "reason": "HTTP status 503", "waiting": 88}},
        },
        "cache": {"hits": 60, "misses": 30, "joins": 10, "blocks": 24, "kept": 256 << 20, "expected": 26,
                  "limit": 1 << 30, "hit_bytes": 28 << 20},
        "disk": {"hits": 29, "misses": 1, "bytes_read": 31 << 20, "writes": 32, "bytes_written": 33 << 20,
                 "dropped": 34, "errors": 35, "evicted": 36},
        "prefetch": {"started": 37, "used": 38, "dropped": 39},
    },
}  # fmt: skip
COUNTED = Statistics("/mnt/data", "https://a.example/refs.json", "references", 4711, 100.0, COUNTERS)


def later(counted: Statistics, seconds: float, **grown: int) -> Statistics:
    """Return the statistics `seconds` later; a__b=n adds n to counter b in part a."""
    counters = copy.deepcopy(counted.counters)
    for path, much in grown.items():
        *parts, last = path.split("__")
        inner = counters
        for part in parts:
            inner = inner[part]
        inner[last] += much
    return counted._replace(counters=counters, taken=counted.taken + seconds)


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


# -- Prometheus


def test_every_metric_has_its_counter() -> None:
    text = exposition(COUNTED)
    labels = {"mount": "/mnt/data", "source": "https://a.example/refs.json"}
    found = samples(text)
    for metric in METRICS:
        assert found[metric.name] == [(labels, COUNTED.number(*metric.path))], metric.name
    for metric, values in zip(HOST_METRICS, ((19, 81), (20, 1), (None, 87), (None, 88)), strict=True):
        of_hosts = zip(("slow", "busy"), values, strict=True)
        each = [({**labels, "host": f"{host}.example"}, v) for host, v in of_hosts if v is not None]
        assert found[metric.name] == each
    for metric, values in zip(PLACE_METRICS, ((52, 53), (54 << 20, 55 << 20)), strict=True):
        each = [({**labels, "place": kind}, value) for kind, value in zip(KINDS, values, strict=True)]
        assert found[metric.name] == each
    for metric in ERROR_METRICS:
        assert found[metric.name] == [
            ({**labels, "errno": name}, COUNTERS["errors"][name]) for name in ERRNOS
        ]  # fmt: skip
    assert found["zarrfs_build_info"] == [({**labels, "version": "1.2.3"}, 1)]
    assert found["zarrfs_mount_info"] == [({**labels, "kind": "references"}, 1)]
    assert samples(exposition(COUNTED, written=81.5))["zarrfs_written_timestamp_seconds"] == [(labels, 81.5)]
    histogram = {f"{LATENCY}_{part}" for part in ("bucket", "sum", "count")}
    assert found.keys() == TEXTS.keys() - {LATENCY, "zarrfs_written_timestamp_seconds"} | histogram
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert kinds["zarrfs_reads"] == "counter"
    assert kinds["zarrfs_requests_in_flight"] == "gauge"
    assert kinds[LATENCY] == "histogram"


def numbers(part: dict[str, Any], *path: str) -> set[tuple[str, ...]]:
    found = set()
    for name, value in part.items():
        if isinstance(value, dict):
            found |= numbers(value, *path, name)
        elif isinstance(value, int | float):
            found.add((*path, name))
    return found


def test_every_counter_has_a_metric() -> None:
    """Except local.waits. Metrics with labels and the histogram are not in METRICS."""
    apart = {("local", "waits"), ("remote", "latency_sum"), ("remote", "latency_count")}
    apart |= {(metric.path[0], place) for metric in PLACE_METRICS for place in KINDS}
    apart |= {("errors", name) for name in ERRNOS}
    left = numbers(COUNTERS) - apart - {metric.path for metric in METRICS}
    assert {path[:2] for path in left} == {("remote", "hosts"), ("remote", "latency")}


def test_latencies_are_exposed_as_a_histogram() -> None:
    found = samples(exposition(COUNTED))
    buckets = [(labels["le"], value) for labels, value in found[f"{LATENCY}_bucket"]]
    assert buckets[-1] == ("+Inf", 100.0)
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)
    assert dict(buckets)["0.0625"] == 62
    assert found[f"{LATENCY}_count"][0][1] == 100
    assert found[f"{LATENCY}_sum"][0][1] == pytest.approx(5.05)


@given(st.text(max_size=20), st.binary(max_size=20))
def test_labels_are_escaped(source: str, mountpoint: bytes) -> None:
    source = source.encode("utf-8", "replace").decode()
    given = COUNTED._replace(source=source, mountpoint=mountpoint.decode("utf-8", "surrogateescape"))
    [(labels, _)] = samples(exposition(given).encode().decode())["zarrfs_reads_total"]
    assert labels == {"mount": mountpoint.decode("utf-8", "replace"), "source": source}


@pytest.mark.parametrize("counters", [{}, {"read": 1}, {"remote": None}, {"remote": {"cache": 5, "hosts": {}}}])
def test_missing_parts_are_left_out(counters: dict[str, Any]) -> None:
    counted = COUNTED._replace(counters=counters)
    assert len(samples(exposition(counted))) == 1 + ("read" in counters)  # zarrfs_mount_info is always present
    assert len(list(table(counted))) == 1 + ("read" in counters)
    assert drawn([counted, later(counted, 1)])


# -- the table


def test_the_table_shows_every_part() -> None:
    out = time.strftime("%H:%M:%S", time.localtime(86))
    assert list(table(COUNTED)) == [
        "mount         /mnt/data: https://a.example/refs.json (references, pid 4711)",
        "served        5.0 GiB, 4,000 reads",
        "failed        71 EIO, 72 EACCES",
        "asked         3 opens, 1 lookups, 2 readdirs",
        "local         9 reads, 8 files opened",
        "blobs         42 reads, 43 verified, 45 held",
        "chunks        61 decoded, 63.0 MiB kept, of 64.0 MiB",
        "from memory   28.0 MiB, 60.0% of blocks, 60 hits, 30 misses, 10 joined, 38 of these fetched ahead",
        "from disk     31.0 MiB, 96.7% of blocks, 29 hits, 1 misses",
        "from network  14.0 MiB, 100 requests, 12 repeated, 13 failed, 18 merged",
        "sent twice    84 requests, 85 answered so",
        f"latency       p50 {METER.quantiles()['p50'] * 1000:.3g}, p90 {METER.quantiles()['p90'] * 1000:.3g}, "
        f"p99 {METER.quantiles()['p99'] * 1000:.3g}, max 100 ms",
        "in flight     16.0 MiB, 15 requests, 17 waiting",
        "memory        256.0 MiB kept, of 1.0 GiB",
        "to disk       33.0 MiB, 32 blocks, 34 not written, 36 evicted, 35 errors",
        "read-ahead    37 started, 38 used, 39 dropped",
        f"host          busy.example, 81 requests, 1 in flight, out for 87 s, since {out}, 88 waiting: "
        "HTTP status 503",
        "host          slow.example, 19 requests, 20 in flight",
    ]


def test_the_table_escapes_control_characters() -> None:
    counted = COUNTED._replace(mountpoint="/mnt/\x1b[2J", source="s\n")
    assert next(table(counted)) == r"mount         /mnt/\x1b[2J: s\n (references, pid 4711)"


def test_the_table_has_the_number_of_processes() -> None:
    counted = COUNTED._replace(counters={**COUNTED.counters, "workers": 3})
    assert next(table(counted)).endswith("(references, pid 4711, 3 processes)")


def test_times_are_shown_in_milliseconds() -> None:
    told = [milliseconds(value) for value in (0.0, 0.00123456, 0.0301, 0.9, 1.5, 1234.5)]
    assert told == ["0", "1.23", "30.1", "900", "1,500", "1,234,500"]


def test_hosts_are_sorted_by_their_requests() -> None:
    assert hosts(COUNTED) == ["busy.example", "slow.example"]


def test_a_server_with_an_outage_comes_first() -> None:
    counters = copy.deepcopy(COUNTERS)
    servers = counters["remote"]["hosts"]
    servers["slow.example"]["outage"] = servers["busy.example"].pop("outage")
    assert hosts(COUNTED._replace(counters=counters)) == ["slow.example", "busy.example"]


# -- top


def drawn(history: list[Statistics], width: int = 100, ascii_only: bool = False) -> list[str]:
    return top_screen.frame(history, width, ascii_only)


def row(lines: list[str], title: str) -> str:
    [line] = [line for line in lines if re.match(rf"{title}\s", line)]
    return line.removeprefix(title).strip()


def test_rates_are_per_second() -> None:
    second = later(COUNTED, 2.0, read=500, bytes=3_000_000, remote__requests=10)
    third = later(second, 0.5, read=100, remote__bytes=1_000_000, remote__cache__hit_bytes=2_000_000,
                  remote__disk__bytes_read=4_000_000, remote__failed=1)  # fmt: skip
    assert top_screen.rates([COUNTED, second, third], "read") == [250.0, 200.0]
    lines = drawn([COUNTED, second])
    assert lines[0] == "/mnt/data  https://a.example/refs.json"
    assert row(lines, "reads").split()[:2] == ["250.0", "/s"]
    assert row(lines, "served").split()[:2] == ["1.5", "MB/s"]
    assert row(lines, "requests").split()[:2] == ["5.0", "/s"]
    lines = drawn([COUNTED, second, third])
    assert row(lines, "from memory").split()[:2] == ["4.0", "MB/s"]
    assert row(lines, "from disk").split()[:2] == ["8.0", "MB/s"]
    assert row(lines, "from network").split()[:2] == ["2.0", "MB/s"]
    assert row(lines, "failed").split()[:2] == ["2.0", "/s"]
    assert row(lines, "reads").endswith("/s  █▇")


def test_a_frame_shows_the_state_of_the_last_snapshot() -> None:
    lines = drawn([COUNTED, later(COUNTED, 1, remote__latency_count=4, remote__latency_sum=1, remote__in_flight=1)])
    assert row(lines, "in flight") == "16 requests, 16.0 MiB"
    assert row(lines, "latency") == "250 ms on average"
    assert row(lines, "memory") == "[#####...............] 256.0 MiB kept, of 1.0 GiB"
    assert row(lines, "hits") == "60.0% of blocks were in memory"


def test_hosts_are_sorted_by_their_current_rate() -> None:
    counters = copy.deepcopy(COUNTERS)
    counters["remote"]["hosts"]["slow.example"]["requests"] += 6
    counters["remote"]["hosts"]["new.example"] = {"requests": 4, "in_flight": 0}
    lines = drawn([COUNTED, COUNTED._replace(counters=counters, taken=102.0)])
    told = [line.split(None, 1)[1].strip() for line in lines if line.startswith("host ")]
    assert told == [
        "3.0 /s  20 in flight  slow.example", "0.0 /s  1 in flight  busy.example", "0.0 /s  0 in flight  new.example",
    ]  # fmt: skip


def test_another_daemon_starts_a_new_history() -> None:
    other = later(COUNTED, 1)._replace(pid=1)
    assert top_screen.since([COUNTED], other) == [other]
    history = [COUNTED]
    for _ in range(100):
        history = top_screen.since(history, later(history[-1], 1, read=1))
    assert len(top_screen.rates(history, "read")) == top_screen.HISTORY
    assert history[-1].number("read") == 4100


def test_bars_are_scaled_to_the_largest_value() -> None:
    assert top_screen.bars([0.0, 1.0, 7.0]) == "▁▂█"
    assert top_screen.bars([0.0, 0.0]) == "▁▁"
    assert top_screen.bars([0.0, 7.0], ascii_only=True) == "_@"
    assert top_screen.bars([]) == ""


@pytest.mark.parametrize("width", [20, 60, 100])
def test_a_frame_fits_its_width(width: int) -> None:
    counted = COUNTED._replace(mountpoint="/mnt/[bold]\x1b[2J", source="x" * 200)
    history = [counted]
    for _ in range(60):
        history = top_screen.since(history, later(history[-1], 1, read=7, bytes=10**9))
    lines = drawn(history, width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 15
    if width > 20:
        assert len(lines[1]) == min(width, 30 + top_screen.HISTORY)  # the newest interval is shown
    assert lines[0].startswith(r"/mnt/[bold]\x1b[2J")
    assert all(line.isascii() for line in drawn(history[:2], ascii_only=True))
    assert drawn([one._replace(mountpoint="数" * 20) for one in history], 21)[0] == "数" * 10
    coloured = top_screen.frame(history, width, colours=True)
    assert [re.sub(r"\x1b\[\d+m", "", line).rstrip() for line in coloured] == lines
    assert coloured[0].startswith("\x1b[1m")


def test_a_frame_in_a_pipe_has_whole_lines() -> None:
    long = COUNTED._replace(source="x" * 300)
    assert top_screen.frame([long, later(long, 1)], None)[0] == f"/mnt/data  {'x' * 300}"


# -- outside of mounts


@pytest.mark.parametrize("command", [["stats"], ["stats", "--json"], ["stats", "--prometheus"], ["top", "--once"]])
def test_a_path_outside_of_mounts_is_one_line(command: list[str], tmp_path: Any) -> None:
    for path, says in ((tmp_path, "not in a mount of zarrfs"), (tmp_path / "x", "no such file or directory")):
        result = CliRunner().invoke(main, [*command, str(path)])
        assert (result.exit_code, result.stdout) == (1, "")
        assert re.fullmatch(rf"zarrfs: {re.escape(str(path))}: {says}.*\n", result.stderr)


def test_top_once_fails_if_the_mount_ends_before_its_frame(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount ends during the interval. Without --once, that is no failure."""
    first = SimpleNamespace(mountpoint=str(tmp_path))
    asked: list[str] = []

    def once(path: str) -> Any:
        asked.append(path)
        if len(asked) > 1:
            raise MountError(f"{path}: not in a mount of zarrfs")
        return first

    monkeypatch.setattr("zarrfs.metrics.statistics.statistics", once)
    for arguments, status in (["--once"], 1), ([], 0):
        asked.clear()
        result = CliRunner().invoke(main, ["top", *arguments, "--interval", "100ms", str(tmp_path)])
        assert (result.exit_code, result.stdout) == (status, "")
        assert result.stderr == f"zarrfs: {tmp_path}: no longer mounted\n"


def test_an_interval_that_is_not_a_time_is_refused(tmp_path: Any) -> None:
    result = CliRunner().invoke(main, ["top", "--interval", "often", str(tmp_path)])
    assert result.exit_code == 2
    assert "--interval: expected a time" in result.stderr


@pytest.mark.parametrize("name", ["rw", "ro", "nosuid"])
def test_refresh_refuses_to_set_a_mount_flag_of_the_kernel(name: str, tmp_path: Any) -> None:
    done = CliRunner().invoke(main, ["refresh", "--set", f"retries=1,{name}", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr == f"zarrfs: option {name}: is a flag of the kernel: mount -o remount,{name}\n"
