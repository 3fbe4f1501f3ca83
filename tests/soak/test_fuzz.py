"""scripts/soak fuzz, run briefly: mutated samples yield a one-line error or the right content."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.soak import fuzz
from tests.soak.fuzz import Fuzz, Mutant, untouched


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    found = Fuzz(tmp_path_factory.mktemp("fuzz"))
    yield found
    found.close()


@pytest.mark.timeout(120)
def test_mutated_samples(running: Fuzz) -> None:
    fuzz.run(running, 23, 20, time.monotonic() + 100)
    assert running.counts["read"] > 2
    assert running.counts["refused"] > 2
    assert not running.violations, running.violations


def test_valid_samples_are_read_without_a_violation(running: Fuzz) -> None:
    for kind in "references", "archive":
        for sample in running.samples[kind]:
            assert running.judge(Mutant(sample, sample.data, "", False, {})) == []
            assert running._right_entries(sample, {})


def test_a_wrong_answer_is_a_violation(running: Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = next(sample for sample in running.samples["references"] if sample.name == "day0_v0.json")
    entries = running._right_entries(sample, {})
    key = next(key for key, digest in entries.items() if digest != "directory" and not digest.startswith("!"))
    monkeypatch.setitem(entries, key, "0" * 64)
    assert running.judge(Mutant(sample, sample.data + b"\n", "", False, {}))[0].startswith(f"wrong: {key}: ")
    assert running.judge(Mutant(sample, sample.data + b"}", "", False, {})) == []
    running.violations.clear()


def test_untouched_leaves_out_entries_that_a_mutation_may_affect() -> None:
    one = {"version": 1, "refs": {"a/0": "x", "a/1": "y", "b": "z", "c/0": ["u"]}}
    two = {"version": 1, "refs": {"a/0": "x", "a/1": "!", "b": "z", "c/0/d": 1, "c/0": ["u"]}}
    assert untouched(one, two) == {"a/0", "b"}
    assert untouched(one, two | {"templates": {}}) == set()
    entries = [{"path": "a", "mode": 1}, {"path": "b", "mode": 2}]
    assert untouched(entries, [*entries, {"path": "b", "mode": 3}]) == {"a"}
