"""Sources that are local paths, and the canonical URI of a directory (file system store 1.0; RFC 8089)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import run
from zarrfs.errors import UsageError
from zarrfs.store.uri import file_uri, path_of_uri


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("/data/x", "/data/x"),
        ("data/x", "data/x"),
        ("a:b", "a:b"),
        ("ab:c", "ab:c"),
        ("./a::b", "./a::b"),
        ("/a/b::c", "/a/b::c"),
        ("file:///my%20data", "/my data"),
        ("file://localhost/x", "/x"),
        ("FILE://LOCALHOST/x", "/x"),
        ("file:/x", "/x"),
        ("file:///", "/"),
        ("file:///%C3%A9/%ff", "/é/\udcff"),
        ("file:///100%", "/100%"),
        ("http://host/x", None),
        ("s3://bucket/x", None),
        ("memory:x", None),
        ("memory://x", None),
        ("zip://a::file:///x.zip", None),
        ("zip::http://x", None),
        ("gs+x.y-z://b", None),
    ],
)
def test_a_source_is_a_local_path_or_not(source: str, path: str | None) -> None:
    assert path_of_uri(source) == path


@pytest.mark.parametrize(
    "source", ["file://host/x", "file://relative", "file:x", "file:", "file:///a?b", "file:///a#b", "file:///a%00b"]
)
def test_file_uris_that_name_no_local_path(source: str) -> None:
    with pytest.raises(UsageError) as caught:
        path_of_uri(source)
    assert source in str(caught.value)


@pytest.mark.parametrize("command", [["ls"], ["mount", "{}/mnt"], ["copy", "{}/to"]])
def test_an_empty_source_is_an_error(tmp_path: Path, command: list[str]) -> None:
    """A shell variable that is not set yields an empty source; it must not mean the current directory."""
    (tmp_path / "mnt").mkdir()
    name, *more = (word.format(tmp_path) for word in command)
    done = run(name, "", *more, cwd=tmp_path)
    assert done.returncode == 2
    assert "an empty name of a source" in done.stderr
    assert not os.path.ismount(tmp_path / "mnt")


@pytest.mark.parametrize("name", ["my data", "100%", "é", "a?b#c", "\udcff", "a:b"])
def test_the_uri_of_a_directory_leads_back_to_it(tmp_path: Path, name: str) -> None:
    base = tmp_path / name
    uri = file_uri(str(base))
    assert uri.startswith("file:///")
    assert uri.isascii()
    assert path_of_uri(uri) == str(base)
