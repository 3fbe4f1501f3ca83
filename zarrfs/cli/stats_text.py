"""The counters of a mount as text."""

from __future__ import annotations

import time
from collections.abc import Iterator

from zarrfs.config.values import human
from zarrfs.errors import printable
from zarrfs.metrics.statistics import Statistics

_WIDTH = 12
_DISK = ("remote", "disk")
_TIERS = {  # name: (path of its counters, name of the counter of bytes read from it)
    "memory": (("remote", "cache"), "hit_bytes"),
    "disk": (_DISK, "bytes_read"),
}
HOSTS = 5  # servers that are listed


def table(counted: Statistics) -> Iterator[str]:
    """Yield lines about all counters that the mount has."""
    source = f"{printable(counted.source)} ({counted.kind}, pid {counted.pid})"
    yield from _line("mount", f"{printable(counted.mountpoint)}: {source}")
    yield from _line("served", _bytes(counted, "bytes"), _listed(counted, read="reads"))
    errors = counted.counters.get("errors") or {}
    if any(errors.values()):
        yield from _line("failed", _listed(counted, "errors", **{name: name for name in errors if errors[name]}))
    yield from _line("asked", _listed(counted, open="opens", lookup="lookups", readdir="readdirs"))
    if counted.number("local", "reads"):
        yield from _line("local", _listed(counted, "local", reads="reads", opens="files opened"))
    if counted.number("blob_reads"):
        yield from _line("blobs", _listed(counted, blob_reads="reads", blobs_verified="verified", blobs_held="held"))
    if counted.number("arrays", "budget"):
        kept = f"{_bytes(counted, 'arrays', 'kept')} kept, of {_bytes(counted, 'arrays', 'budget')}"
        yield from _line("chunks", _listed(counted, "arrays", decoded="decoded"), kept)
    for name, (tier, read) in _TIERS.items():
        ratio = hit_ratio(counted, *tier)
        share = "" if ratio is None else f"{ratio:.1%} of blocks"
        counts = _listed(counted, *tier, hits="hits", misses="misses", joins="joined")
        if name == "memory" and counted.number("remote", "prefetch", "used"):
            counts += ", " + _listed(counted, "remote", "prefetch", used="of these fetched ahead")
        yield from _line(f"from {name}", _bytes(counted, *tier, read), share, counts)
    counts = _listed(counted, "remote", requests="requests", repeated="repeated", failed="failed", merged="merged")
    yield from _line("from network", _bytes(counted, "remote", "bytes"), counts)
    yield from _line("latency", latency(counted))
    flying = _listed(counted, "remote", in_flight="requests", waiting="waiting")
    yield from _line("in flight", _bytes(counted, "remote", "in_flight_bytes"), flying)
    yield from _line("memory", memory(counted))
    names = {"writes": "blocks", "dropped": "not written", "evicted": "evicted", "errors": "errors"}
    yield from _line("to disk", _bytes(counted, *_DISK, "bytes_written"), _listed(counted, *_DISK, **names))
    ahead = _listed(counted, "remote", "prefetch", started="started", used="used", dropped="dropped")
    yield from _line("read-ahead", ahead)
    for host in hosts(counted)[:HOSTS]:
        counts = _listed(counted, "remote", "hosts", host, requests="requests", in_flight="in flight")
        yield from _line("host", printable(host), counts, outage(counted, host))


def hosts(counted: Statistics) -> list[str]:
    """Return the servers: those with an outage first, then those with more requests before those with fewer."""
    found = (counted.counters.get("remote") or {}).get("hosts", {})
    most = {host: counted.number("remote", "hosts", host, "requests") or 0 for host in found}
    return sorted(found, key=lambda host: ("outage" not in found[host], -most[host]))


def outage(counted: Statistics, host: str) -> str:
    """Describe the outage of a server: since when, how many requests wait, and why; "" if there is none."""
    found = counted.counters["remote"]["hosts"][host].get("outage")
    if not found:
        return ""
    since = time.strftime("%H:%M:%S", time.localtime(found["since"]))
    out = f"out for {found['seconds']:,.0f} s, since {since}"
    return f"{out}, {found['waiting']:,} waiting: {printable(found['reason'])}"


def latency(counted: Statistics) -> str:
    """Format the latency quantiles since the start of the mount, in milliseconds; "" before the first request."""
    found = ((name, counted.number("remote", "latency", name)) for name in ("p50", "p90", "p99", "max"))
    known = [f"{name} {milliseconds(value)}" for name, value in found if value is not None]
    return f"{', '.join(known)} ms" if known else ""


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with three digits, or with all digits before the point."""
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:,.0f}"


def hit_ratio(counted: Statistics, *tier: str) -> float | None:
    """Return the hit ratio of a cache tier; None before its first request."""
    hits, misses, joins = (counted.number(*tier, name) or 0 for name in ("hits", "misses", "joins"))
    asked = hits + misses + joins
    return hits / asked if asked else None


def memory(counted: Statistics) -> str:
    """Format the bytes of cached blocks and their bound; "" without a cache."""
    kept, limit = (counted.number("remote", "cache", name) for name in ("kept", "limit"))
    return "" if kept is None or limit is None else f"{human(kept)} kept, of {human(limit)}"


def _line(name: str, *parts: str) -> Iterator[str]:
    """Yield one line, or none if all parts are empty."""
    if any(parts):
        yield f"{name:{_WIDTH}}  {', '.join(filter(None, parts))}"


def _bytes(counted: Statistics, *path: str) -> str:
    value = counted.number(*path)
    return "" if value is None else human(value)


def _listed(counted: Statistics, *path: str, **names: str) -> str:
    """Format the counters below `path` that exist, each with its name in `names`."""
    found = ((text, counted.number(*path, name)) for name, text in names.items())
    return ", ".join(f"{value:,.0f} {text}" for text, value in found if value is not None)
