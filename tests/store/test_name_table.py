"""The table of names: the file that keeps it, and names that a web server's listing hides."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from zarrfs.net.responses import Entry
from zarrfs.store.name_table import NameTable


@pytest.mark.parametrize("name", [b"plain", b"c\xff", b"c\xc3\xa9 %41?#&;", b"new\nline"])
def test_a_table_is_kept_in_any_directory(name: bytes, tmp_path: Path) -> None:
    path = os.path.join(tmp_path, os.fsdecode(name), "t.names")
    entry = Entry("k", False, 5, None, '"1"')
    for _ in range(2):
        table = NameTable(300.0, 300.0)
        table.path = path
        table.put("a/k", entry)
        table.keep()
        table.close()
    assert os.listdir(os.path.dirname(path)) == ["t.names"]
    again = NameTable(300.0, 300.0)
    again.path = path
    known = again.get("a/k")
    again.close()
    assert known is not None
    assert known.entry == entry


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        (".zarray", True), ("HEADER_x", True), ("README.md", True), ("RCS", True), ("CVS", True), ("a~", True),
        ("a#", True), ("a,v", True), ("a,t", True), ("RCS2", False), ("readme", False), ("a,x", False),
        ("0.0", False), ("c", False), ("#a", False),
    ],
)  # fmt: skip
def test_a_web_servers_listing_does_not_prove_that_a_hidden_name_is_absent(name: str, hidden: bool) -> None:
    table = NameTable(300.0, 300.0, in_memory=True)
    table.put_listing("d", [], time.time())
    known = table.get(f"d/{name}")
    assert known is not None
    assert known.entry is None
    table.may_omit_names = True
    assert (table.get(f"d/{name}") is None) is hidden
    table.close()
