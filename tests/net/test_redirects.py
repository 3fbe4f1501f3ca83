"""A permanent redirect of one URL predicts the redirects of others with the same prefix."""

from __future__ import annotations

import pytest

from zarrfs.net.redirects import PermanentRedirects


@pytest.mark.parametrize(
    ("url", "location", "other", "expected"),
    [
        ("http://h/a/b", "https://h/a/b", "http://h/c", "https://h/c"),
        ("http://h/a/b", "http://g:81/a/b", "http://h/", "http://g:81/"),
        ("http://h/old/x/v", "/new/x/v", "http://h/old/y", "http://h/new/y"),
        ("http://h/old/x/v", "/new/x/v", "http://h/older/y", "http://h/older/y"),
        ("http://h/a", "/a/", "http://h/b", "http://h/b"),
        ("http://h/a", "/login?from=a", "http://h/b", "http://h/b"),
        ("http://h/a", "/sorry.html", "http://h/b", "http://h/b"),
        ("http://h/a?key=1", "https://h/a?key=1", "http://h/b", "http://h/b"),
        ("http://h/a", "https://me:secret@h/a", "http://h/b", "http://h/b"),
        ("http://h/a", "ftp://h/a", "http://h/b", "http://h/b"),
        ("http://h/a", "http://[/a", "http://h/b", "http://h/b"),
        ("http://h/a", "http://h/a", "http://h/b", "http://h/b"),
    ],
)
def test_one_redirect_predicts_others(url: str, location: str, other: str, expected: str) -> None:
    moved = PermanentRedirects()
    moved.learn(url, location)
    assert moved.onward(other) == expected


def test_redirect_loops_end_and_exceptions_are_kept() -> None:
    moved = PermanentRedirects()
    moved.learn("http://a/x", "http://b/x")
    moved.learn("http://b/x", "http://a/x")
    assert moved.onward("http://a/y") in ("http://a/y", "http://b/y")
    moved.exclude("http://a/z")
    assert moved.onward("http://a/z") == "http://a/z"
    for number in range(1000):
        moved.learn(f"http://h{number}/x", "http://a/x")
    assert moved.onward("http://h999/x") != "http://h999/x"
