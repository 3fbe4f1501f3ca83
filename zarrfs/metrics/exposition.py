"""Renderer of the counters of mounts in the text exposition format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zarrfs.metrics.counters import (
    BUILD,
    BUILD_HELP,
    ERROR_METRICS,
    HOST_METRICS,
    LATENCY,
    LATENCY_HELP,
    METRICS,
    MOUNT,
    MOUNT_HELP,
    PLACE_METRICS,
    UP,
    UP_HELP,
    Metric,
)
from zarrfs.metrics.statistics import Statistics, timed


def exposition(several: Sequence[Statistics], failed: Iterable[str] = ()) -> str:
    """Render the metrics of mounts as text, except those that a mount does not count.

    `failed` are the mount points of mounts that do not report counters.
    """
    up = [_sample(UP, {"mount": each.mountpoint}, 1) for each in several]
    up += [_sample(UP, {"mount": mountpoint}, 0) for mountpoint in failed]
    lines = [
        *_metric(UP, UP_HELP, up),
        *_metric(MOUNT, MOUNT_HELP, [_sample(MOUNT, {**_labels(each), "kind": each.kind}, 1) for each in several]),
        *_metric(BUILD, BUILD_HELP, [
            _sample(BUILD, {**_labels(each), "version": str(each.counters.get("version"))}, 1) for each in several
        ]),
    ]  # fmt: skip
    for metric in METRICS:
        values = [(each, each.number(*metric.path)) for each in several]
        samples = [_sample(metric.name, _labels(each), value) for each, value in values if value is not None]
        lines += _metric(metric.name, metric.help, samples)
    for label, metrics in ("host", HOST_METRICS), ("place", PLACE_METRICS), ("errno", ERROR_METRICS):
        for metric in metrics:
            samples = [sample for each in several for sample in _of_each(metric, each, label)]
            lines += _metric(metric.name, metric.help, samples)
    lines += _metric(LATENCY, LATENCY_HELP, [line for each in several for line in _latency(each)], "histogram")
    return "".join(f"{line}\n" for line in lines)


def _labels(counted: Statistics) -> dict[str, str]:
    return {"mount": counted.mountpoint, "source": counted.source}


def _of_each(metric: Metric, counted: Statistics, label: str) -> Iterator[str]:
    """Yield the samples of a metric with one more label: a server, or a key of the dict at the metric's path."""
    if label == "host":
        paths = {host: ("remote", "hosts", host, *metric.path) for host in _remote(counted).get("hosts", {})}
    else:
        paths = {kind: (*metric.path, kind) for kind in counted.counters.get(metric.path[0], {})}
    for each, path in paths.items():
        value = counted.number(*path)
        if value is not None:
            yield _sample(metric.name, {**_labels(counted), label: each}, value)


def _latency(counted: Statistics) -> Iterator[str]:
    buckets: list[tuple[float, int]] = _remote(counted).get("latency_histogram", [])
    total, count, labels = counted.number("remote", "latency_sum"), timed(counted), _labels(counted)
    if not buckets or total is None or count is None:
        return
    for bound, below in buckets:
        yield _sample(f"{LATENCY}_bucket", {**labels, "le": repr(float(bound))}, below)
    yield _sample(f"{LATENCY}_bucket", {**labels, "le": "+Inf"}, count)
    yield _sample(f"{LATENCY}_sum", labels, total)
    yield _sample(f"{LATENCY}_count", labels, count)


def _remote(counted: Statistics) -> dict[str, Any]:
    """Return the counters of remote data; {} before anything remote was read."""
    return counted.counters.get("remote") or {}


def _metric(name: str, text: str, samples: Sequence[str], kind: str = "") -> list[str]:
    """Return the lines of a metric: the format wants all of its samples together."""
    kind = kind or ("counter" if name.endswith("_total") else "gauge")
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples] if samples else []


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inner}}} {value!r}"


def _escaped(text: str) -> str:
    """Escape the value of a label. The format is UTF-8, with escapes for backslash, line feed and quotation mark."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
