"""The figures of mounts in the text exposition format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from zarrfs.metrics.counters import ERRORS, LATENCY, METRICS, MOUNT, UP, Metric
from zarrfs.metrics.statistics import Statistics


def exposition(several: Sequence[Statistics], failed: Iterable[str] = ()) -> str:
    """Render the figures of mounts. `failed` are the mount points of mounts that report none."""
    up = [*((each.mountpoint, 1) for each in several), *((mountpoint, 0) for mountpoint in failed)]
    lines = _metric(UP, [_sample(UP.name, {"mount": mountpoint}, value) for mountpoint, value in up])
    for metric, each_of in (MOUNT, _about), (ERRORS, _errors):
        lines += _metric(metric, [_sample(metric.name, *found) for each in several for found in each_of(each)])
    for metric in METRICS:
        values = ((each, each.counters.get(metric.name)) for each in several)
        samples = [_sample(metric.name, _labels(each), value) for each, value in values if value is not None]
        lines += _metric(metric, samples)
    lines += _metric(LATENCY, [line for each in several for line in _latency(each)], "histogram")
    return "".join(f"{line}\n" for line in lines)


def _labels(counted: Statistics) -> dict[str, str]:
    return {"mount": counted.mountpoint, "source": counted.source}


def _about(counted: Statistics) -> Iterator[tuple[dict[str, str], float]]:
    yield {**_labels(counted), "kind": counted.kind, "version": str(counted.counters.get("version"))}, 1


def _errors(counted: Statistics) -> Iterator[tuple[dict[str, str], float]]:
    for errno, count in counted.counters.get("errors", {}).items():
        yield {**_labels(counted), "errno": errno}, count


def _latency(counted: Statistics) -> Iterator[str]:
    found, labels = counted.counters, _labels(counted)
    if found.get("latency_count"):
        for bound, below in [*found["histogram"], ("+Inf", found["latency_count"])]:
            yield _sample(f"{LATENCY.name}_bucket", {**labels, "le": str(bound)}, below)
        yield _sample(f"{LATENCY.name}_sum", labels, found["latency_sum"])
        yield _sample(f"{LATENCY.name}_count", labels, found["latency_count"])


def _metric(metric: Metric, samples: Sequence[str], kind: str = "") -> list[str]:
    """Return the lines of a metric: the format wants all of its samples together."""
    kind = kind or ("counter" if metric.name.endswith("_total") else "gauge")
    head = [f"# HELP zarrfs_{metric.name} {metric.help}", f"# TYPE zarrfs_{metric.name} {kind}"]
    return [*head, *samples] if samples else []


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"zarrfs_{name}{{{inner}}} {value!r}"


def _escaped(text: str) -> str:
    """Escape the value of a label. The format is UTF-8, with escapes for backslash, line feed and quotation mark."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
