"""Latency compared with a sorted list of the same times."""

from __future__ import annotations

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarrfs.net.latency import Latency

times = st.lists(st.floats(1e-6, 1000.0), min_size=1, max_size=300)


def filled(seconds: list[float]) -> Latency:
    meter = Latency()
    for one in seconds:
        meter.add(one)
    return meter


def nearest_rank(seconds: list[float], part: float) -> float:
    return sorted(seconds)[math.ceil(part * len(seconds)) - 1]


@given(times)
def test_quantiles_are_those_of_the_sorted_list(seconds: list[float]) -> None:
    found = filled(seconds).quantiles()
    assert list(found) == ["p50", "p90", "p99", "max"]
    for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found[name] == pytest.approx(nearest_rank(seconds, part), rel=0.05), name
    assert found["max"] == max(seconds)
    assert list(found.values()) == sorted(found.values())


@given(st.lists(st.one_of(st.floats(0.0, 1e9), st.integers(-30, 20).map(lambda power: 2.0**power)), max_size=300))
def test_the_histogram_counts_the_times_up_to_each_bound(seconds: list[float]) -> None:
    meter = filled(seconds)
    assert meter.histogram() == [(bound, sum(one <= bound for one in seconds)) for bound, _ in meter.histogram()]
    assert meter.count == len(seconds)
    assert meter.total == pytest.approx(sum(seconds))


def test_the_bounds_do_not_depend_on_the_counted_times() -> None:
    bounds = [bound for bound, _ in Latency().histogram()]
    assert bounds == [2.0**power for power in range(-14, 11)]
    assert bounds == [bound for bound, _ in filled([1e-9, 0.03, 5e6]).histogram()]


def test_without_requests_there_are_no_quantiles() -> None:
    assert Latency().quantiles() == {}
    assert {count for _, count in Latency().histogram()} == {0}


def test_times_beyond_the_bounds_are_counted() -> None:
    assert filled([0.0, 0.0]).quantiles() == {"p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}
    assert filled([5000.0, 9000.0]).quantiles() == {"p50": 9000.0, "p90": 9000.0, "p99": 9000.0, "max": 9000.0}


def test_memory_does_not_grow() -> None:
    meter = Latency()
    size = sys.getsizeof(meter._counts)
    for number in range(10_000):
        meter.add(number / 997)
    assert sys.getsizeof(meter._counts) == size < 4096
    json.dumps(meter.histogram(), allow_nan=False)
