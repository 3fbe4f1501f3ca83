"""Sums of the counters of several processes."""

from __future__ import annotations

from zarrfs.metrics.sums import summed


def test_counters_are_added_and_other_values_are_those_of_the_first_process() -> None:
    first = {"open": 1, "version": "1", "process": {"started": 5, "cpu_seconds": 0.5}, "errors": {"EIO": 1}}
    second = {"open": 2, "version": "1", "process": {"started": 9, "cpu_seconds": 1.0}, "errors": {"ENOENT": 2}}
    assert summed([first, second]) == {
        "open": 3, "version": "1", "process": {"started": 5, "cpu_seconds": 1.5}, "errors": {"EIO": 1, "ENOENT": 2},
    }  # fmt: skip
    assert first["open"] == 1
    assert first["errors"] == {"EIO": 1}


def test_histograms_are_added_by_bound() -> None:
    one, other = ({"remote": {"latency_histogram": pairs}} for pairs in ([(0.1, 1), (1.0, 3)], [(0.1, 2), (2.0, 4)]))
    assert summed([one, other])["remote"]["latency_histogram"] == [(0.1, 3), (1.0, 3), (2.0, 4)]


def test_the_highest_latencies_and_the_longest_outage_are_kept() -> None:
    one, other = (
        {
            "remote": {
                "latency": {"p50": p50, "max": 3 * p50},
                "hosts": {"h": {"requests": 1, "outage": {"since": since, "seconds": 100 - since, "waiting": 2}}},
            }
        }
        for p50, since in ((0.1, 90.0), (0.2, 95.0))
    )
    assert summed([one, other])["remote"] == {
        "latency": {"p50": 0.2, "max": 0.6000000000000001},
        "hosts": {"h": {"requests": 2, "outage": {"since": 90.0, "seconds": 10.0, "waiting": 4}}},
    }
