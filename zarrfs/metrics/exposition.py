"""Renderer of a mount's counters in the text exposition format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    WRITTEN,
    WRITTEN_HELP,
    Metric,
)
from zarrfs.metrics.statistics import Statistics, timed

TYPE = "text/plain; version=0.0.4; charset=utf-8"  # the Content-Type in HTTP


def exposition(counted: Statistics, written: float | None = None) -> str:
    """Render the metrics as text, except those that the mount does not count.

    For a file, `written` is the time of writing, in seconds since 1970.
    """
    labels = {"mount": counted.mountpoint, "source": counted.source}
    lines = [*_head(MOUNT, MOUNT_HELP), _sample(MOUNT, {**labels, "kind": counted.kind}, 1)]
    version = counted.counters.get("version")
    if isinstance(version, str):
        lines += [*_head(BUILD, BUILD_HELP), _sample(BUILD, {**labels, "version": version}, 1)]
    if written is not None:
        lines += [*_head(WRITTEN, WRITTEN_HELP), _sample(WRITTEN, labels, written)]
    for metric in METRICS:
        value = counted.number(*metric.path)
        if value is not None:
            lines += _head(metric.name, metric.help)
            lines.append(_sample(metric.name, labels, value))
    for metric in HOST_METRICS:
        hosts = {host: ("remote", "hosts", host, *metric.path) for host in _remote(counted).get("hosts", {})}
        lines += _of_each(metric, counted, labels, "host", hosts)
    for label, metrics in ("place", PLACE_METRICS), ("errno", ERROR_METRICS):
        for metric in metrics:
            kinds = {kind: (*metric.path, kind) for kind in counted.counters.get(metric.path[0], {})}
            lines += _of_each(metric, counted, labels, label, kinds)
    lines += _latency(counted, labels)
    return "".join(f"{line}\n" for line in lines)


def _of_each(
    metric: Metric, counted: Statistics, labels: dict[str, str], label: str, paths: dict[str, tuple[str, ...]]
) -> Iterator[str]:
    """Yield the lines of a metric with one more label: `paths` maps each value of `label` to the path of a counter."""
    samples = []
    for each, path in paths.items():
        value = counted.number(*path)
        if value is not None:
            samples.append(_sample(metric.name, {**labels, label: each}, value))
    if samples:
        yield from _head(metric.name, metric.help)
        yield from samples


def _latency(counted: Statistics, labels: dict[str, str]) -> Iterator[str]:
    buckets: list[tuple[float, int]] = _remote(counted).get("latency_histogram", [])
    total, count = counted.number("remote", "latency_sum"), timed(counted)
    if not buckets or total is None or count is None:
        return
    yield from _head(LATENCY, LATENCY_HELP, "histogram")
    for bound, below in buckets:
        yield _sample(f"{LATENCY}_bucket", {**labels, "le": repr(float(bound))}, below)
    yield _sample(f"{LATENCY}_bucket", {**labels, "le": "+Inf"}, count)
    yield _sample(f"{LATENCY}_sum", labels, total)
    yield _sample(f"{LATENCY}_count", labels, count)


def _remote(counted: Statistics) -> dict[str, Any]:
    """Return the counters of remote data; {} before anything remote was read."""
    return counted.counters.get("remote") or {}


def _head(name: str, text: str, kind: str = "") -> Iterable[str]:
    kind = kind or ("counter" if name.endswith("_total") else "gauge")
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inner}}} {value!r}"


def _escaped(text: str) -> str:
    """Escape the value of a label. The format is UTF-8, with escapes for backslash, line feed and quotation mark."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
