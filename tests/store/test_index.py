"""IndexStore: the tests that do not belong to one of the index compilers."""

from __future__ import annotations

import pytest
import trio

from tests.references.referencesets import compiled
from zarrfs.store import index


@pytest.mark.parametrize("piece", [1, 2, 3, 4, 5, 100])
def test_all_entries_are_counted_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first statfs(2) counts the entries; between two pieces a mount serves other requests."""
    monkeypatch.setattr(index, "_COUNTED", piece)
    refs = {"a": "1", "d/b": "22", "d/c": ["file:///x", 0, 300], "e": "4444"}
    with compiled({"version": 1, "refs": refs}) as made:
        statements: list[str] = []
        made.store._db.set_trace_callback(statements.append)
        usage = trio.run(made.store.usage)
        assert (usage.files, usage.bytes) == (4, 307)
        assert len(statements) >= 2 * 4 // piece
