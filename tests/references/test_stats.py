"""zarrfs refs stats, compared with counts made byte by byte."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.references.refsets import KEYS, done, without_conflicts
from tests.references.test_output import _in_this_process, written
from tests.zarr.sample_documents import V0, V2, V3
from zarrfs.references.stats import gaps_and_overlaps

__all__ = ["_in_this_process"]

RANGES = st.tuples(st.sampled_from(["/t", "/u", "rel"]), st.integers(0, 20), st.integers(0, 9)).map(list)
SETS = st.dictionaries(KEYS, RANGES | st.just(["/t"]) | st.just(["/w"]) | st.binary(max_size=5), max_size=12)


def stats(path: Path, *said: str) -> Any:
    return json.loads(done("stats", path, "--json", *said).stdout)


def counted(document: dict[str, Any]) -> dict[str, Any]:
    """Return the same statistics, counted with plain loops."""
    times: dict[str, Counter[int]] = defaultdict(Counter)
    references: Counter[str] = Counter()
    ranges = {key: value for key, value in document.items() if isinstance(value, list) and len(value) == 3}
    for url, offset, length in ranges.values():
        times[url].update(range(offset, offset + length))
    for value in document.values():
        if isinstance(value, list):
            references[value[0]] += 1
    inline = [value for value in document.values() if isinstance(value, bytes)]
    lengths = [value[2] for value in ranges.values()]
    sizes = {url: sum(value[2] for value in ranges.values() if value[0] == url) for url in references}
    return {
        "files": len(document),
        "directories": len({key[:at] for key in document for at, char in enumerate(key) if char == "/"}),
        "inline": len(inline), "inline_bytes": sum(map(len, inline)), "ranges": len(ranges),
        "range_bytes": sum(lengths), "whole": len(document) - len(inline) - len(ranges), "targets": len(references),
        "holes": sum(max(found) - min(found) + 1 - len(found) for found in times.values() if found),
        "overlaps": sum(count > 1 for found in times.values() for count in found.values()),
        "lengths": (min(lengths, default=None), max(lengths, default=None)),
        "by_bytes": sorted((-size, url, references[url]) for url, size in sizes.items() if size),
        "by_references": sorted((-count, url, sizes[url]) for url, count in references.items()),
    }  # fmt: skip


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SETS.map(without_conflicts))
def test_random_sets_give_the_counts_of_plain_loops(tmp_path: Path, document: dict[str, Any]) -> None:
    document.pop("version", None)
    (tmp_path / "set.json").write_text(written(document))
    found = stats(tmp_path / "set.json")
    found["lengths"] = tuple(found[name] and found[name]["length"] for name in ("smallest", "largest"))
    found["by_bytes"] = [(-t["bytes"], t["url"], t["references"]) for t in found["top_by_bytes"]]
    found["by_references"] = [(-t["references"], t["url"], t["bytes"]) for t in found["top_by_references"]]
    expected = counted(document)
    assert {name: found[name] for name in expected} == expected


def test_sums_over_64_bits_are_exact(tmp_path: Path) -> None:
    one = np.array([7, 7, 7], np.int64)
    starts, lengths = np.array([0, 2**62, 2**62 + 5], np.int64), np.array([5, 2**62 - 1, 2**62 - 10], np.int64)
    assert gaps_and_overlaps(one, starts, lengths) == (2**62 - 5, 2**62 - 10)
    (tmp_path / "set.json").write_text(json.dumps({f"k{n}": [f"/t{n % 2}", 5, 2**62] for n in range(5)}))
    found = stats(tmp_path / "set.json")
    assert (found["range_bytes"], found["overlaps"]) == (5 * 2**62, 2 * 2**62)
    assert [target["bytes"] for target in found["top_by_bytes"]] == [3 * 2**62, 2 * 2**62]


ARRAYS: dict[str, Any] = {
    "two/.zarray": {**V2, "shape": [4, 25], "chunks": [2, 10]},
    "two/.zattrs": {}, "two/0.0": "", "two/0.2": "", "two/1.1": "", "two/1.3": "", "two/01.1": "", "two/0": "",
    "nested/.zarray": {**V2, "shape": [4, 25], "chunks": [2, 10], "dimension_separator": "/"},
    "nested/0/1": "", "nested/1/2": "", "nested/1.1": "", "nested/2/0": "",
    "scalar/.zarray": {**V2, "shape": [], "chunks": []}, "scalar/0": "",
    "v3/zarr.json": {**V3, "shape": [30], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10]}}},
    "v3/c/0": "", "v3/c/2": "", "v3/c/3": "", "v3/0": "",
    "dots/zarr.json": {**V3, "shape": [3, 3], "chunk_key_encoding": {"name": "v2"},
                       "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1]}}},
    "dots/0.0": "", "dots/2.2": "", "dots/3.0": "",
    "group/zarr.json": {"node_type": "group"}, "group/c/0": "", "broken/.zarray": {**V2, "shape": 5}, "broken/0": "",
    "old/.zarray": {**V2, "shape": [2, 2], "chunks": [1, 1]}, "old/0/1": "", "old/1/0": "", "old/1/2": "",
    "v0/__zmeta__": {**V0, "shape": [2, 2], "chunks": [1, 1]}, "v0/__zdata__/0.1.blosc": "",
    "v0/__zdata__/1.2.blosc": "",
}  # fmt: skip


def test_expected_and_present_chunks_of_arrays_are_counted(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text(json.dumps(ARRAYS))
    found = {array["key"]: (array["expected"], array["present"]) for array in stats(tmp_path / "set.json")["arrays"]}
    later = {"v3": (3, 2), "dots": (9, 2), "old": (4, 2), "v0": (4, 1)}
    assert found == {"two": (6, 3), "nested": (6, 2), "scalar": (1, 1), **later}
    shown = done("stats", tmp_path / "set.json").stdout.splitlines()
    assert f"{6:>14} {3:>14} {3:>14}  two" in shown


def test_an_array_at_the_root(tmp_path: Path) -> None:
    document = {".zarray": {**V2, "shape": [3], "chunks": [1]}, "0": "", "5": "", "2": ""}
    (tmp_path / "set.json").write_text(json.dumps(document))
    assert stats(tmp_path / "set.json")["arrays"] == [{"key": "", "expected": 3, "present": 2, "missing": 1}]


def test_memory_of_an_array_is_freed_once_it_is_counted(tmp_path: Path) -> None:
    document: dict[str, Any] = {}
    for number in range(12):
        document |= {f"{number}/.zarray": {**V2, "shape": [40_000], "chunks": [1]}, f"{number}/39999": ""}
    (tmp_path / "set.json").write_text(json.dumps(document))
    stats(tmp_path / "set.json")  # so that the modules it imports do not count
    tracemalloc.start()
    try:
        found = stats(tmp_path / "set.json")["arrays"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [array["present"] for array in found] == [1] * 12
    assert peak < 25 << 20  # the names of one array are 4 MB


@pytest.mark.parametrize("top", [0, 2])
def test_top_limits_the_targets_listed(top: int, tmp_path: Path) -> None:
    document = {f"k{n}": [f"/t{n}", 0, n] for n in range(5)} | {"k9": ["/t0", 0, 0]}
    (tmp_path / "set.json").write_text(json.dumps(document))
    found = stats(tmp_path / "set.json", "--top", str(top))
    assert [target["url"] for target in found["top_by_bytes"]] == ["/t4", "/t3"][:top]
    assert [target["references"] for target in found["top_by_references"]] == [2, 1][:top]
