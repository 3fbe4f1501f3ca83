"""URLs: directories, parents, and relative names resolved against them."""

from __future__ import annotations

import pytest

from zarrfs.config import urls


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///a/file:b", "/a/file:b"), ("LOCAL:/a", "/a"), ("file:a", "a"), ("/a/profile:1/x", "/a/profile:1/x"),
        ("s3://b/local:x", "s3://b/local:x"),
    ],
)  # fmt: skip
def test_the_path_of_a_file_url(url: str, path: str) -> None:
    assert urls.file_path(url) == path


@pytest.mark.parametrize(
    ("base", "relative", "found"),
    [
        ("http://h/d/", "x/y", "http://h/d/x/y"),
        ("http://h/d/e", "./a/.././x", "http://h/d/e/x"),
        ("http://h/d/", "../../../x", "http://h/x"),
        ("https://h", "x", "https://h/x"),
        ("http://h/d/?sig=a/b", "../x", "http://h/x?sig=a/b"),
        ("http://h/d/?sig=a/b", "x?v=../1", "http://h/d/x?v=../1"),
        ("http://h/d/#a/b", "x", "http://h/d/x"),
        ("s3://b/a//c/", "x", "s3://b/a//c/x"),  # "a//c" is another directory than "a/c"
        ("s3://b/a//", "x//y", "s3://b/a//x//y"),
        ("s3://b/a//c/", "../x", "s3://b/a//x"),
        ("s3://b/w?y#z/", "x", "s3://b/w?y#z/x"),  # in a bucket, "?" and "#" are part of a name
        ("zip://d::http://h/a.zip", "x", None),
        ("/d/", "x", None),
    ],
)
def test_relative_names_are_resolved(base: str, relative: str, found: str | None) -> None:
    assert urls.join(base, relative) == found


@pytest.mark.parametrize(
    ("url", "directory", "parent"),
    [
        ("http://h/d/x", "http://h/d/x/", "http://h/d/"),
        ("http://h/d/x/?sig=a/b", "http://h/d/x/?sig=a/b", "http://h/d/x/"),
        ("HTTP://h/d/x?sig=a/b#c/d", "HTTP://h/d/x/?sig=a/b", "HTTP://h/d/"),
        ("http://h/d/x#a/b?c/d", "http://h/d/x/", "http://h/d/"),
        ("http://h/x?sig=a/b", "http://h/x/?sig=a/b", "http://h/"),
        ("s3://b/d?e/x#y", "s3://b/d?e/x#y/", "s3://b/d?e/"),
        ("zip://d/x::http://h/a.zip", "zip://d/x::http://h/a.zip/", "zip://d/x::http://h/"),
    ],
)
def test_directories_and_parents(url: str, directory: str, parent: str) -> None:
    assert (urls.directory(url), urls.parent(url)) == (directory, parent)
