"""docs/dashboards: the dashboard and the alerts query only metrics that a mount exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from zarrfs.metrics.counters import ALL, LATENCY, QUEUES, counters

DASHBOARDS = Path(__file__).parents[2] / "docs/dashboards"
ALERTS = DASHBOARDS / "alerts.yml"
PARTS = {f"zarrfs_{LATENCY.name}_{part}" for part in ("bucket", "sum", "count")}
KNOWN = PARTS | {f"zarrfs_{metric.name}" for metric in ALL}
LABELS = {"instance", "mount", "source", "errno", "le", "version", "kind"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DASHBOARDS / "zarrfs.json").read_text())
    return found


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from group["rules"]


def names(query: str) -> set[str]:
    """Return the metrics that a query names."""
    return set(re.findall(r"\bzarrfs_\w+", query))


def labels(query: str) -> set[str]:
    """Return the labels that a query names."""
    found = {name for inner in re.findall(r"\{([^}]*)\}", query) for name in re.findall(r"(\w+)\s*[=!]", inner)}
    for inner in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", query):
        found |= set(inner.replace(" ", "").split(","))
    return found


def test_panels_query_only_known_metrics_and_labels(dashboard: dict[str, Any]) -> None:
    asked = set().union(*map(names, queries(dashboard)))
    assert asked <= KNOWN
    assert set().union(*map(labels, queries(dashboard))) <= LABELS
    assert len(asked) > 10
    for query in queries(dashboard):
        assert '{instance=~"$instance",mount=~"$mount"' in query
        for name in re.findall(r"(?:rate|increase)\((\w+)", query):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), query


def test_alerts_query_only_known_metrics_and_labels() -> None:
    for rule in rules():
        assert names(rule["expr"]) <= KNOWN
        assert names(rule["expr"])
        assert labels(rule["expr"]) <= LABELS
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= LABELS


class _Out:
    """A queue of requests to a thousand servers, none of which answers."""

    def gauges(self) -> dict[str, float]:
        return {}

    def outages(self) -> dict[str, dict[str, Any]]:
        about = {"since": 1.8e9, "seconds": 1e5, "reason": "x" * 200, "waiting": 1000}
        return {f"{number:063}.example": about for number in range(1000)}


def test_outages_of_many_servers_fit_an_extended_attribute() -> None:
    out = _Out()
    QUEUES.add(out)
    assert len(json.dumps(counters())) < 32_768
