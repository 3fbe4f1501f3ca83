"""A permanent redirect of one name redirects others of the same prefix."""

from __future__ import annotations

import pytest

from zarrfs.net.redirects import PermanentRedirects


@pytest.mark.parametrize(
    ("url", "location", "other", "expected", "guessed"),
    [
        ("http://h/a/b", "https://h/a/b", "http://h/c", "https://h/c", False),
        ("http://h/a/b", "http://g:81/a/b", "http://h/", "http://g:81/", False),
        ("http://h/old/x/v", "/new/x/v", "http://h/old/y", "http://h/new/y", True),
        ("http://h/old/x/v", "/new/x/v", "http://h/older/y", "http://h/older/y", False),
        ("http://h/a", "/a/", "http://h/b", "http://h/b", False),
        ("http://h/a", "/login?from=a", "http://h/b", "http://h/b", False),
        ("http://h/a", "/sorry.html", "http://h/b", "http://h/b", False),
        ("http://h/a?key=1", "https://h/a?key=1", "http://h/b", "http://h/b", False),
        ("http://h/a", "https://me:secret@h/a", "http://h/b", "http://h/b", False),
        ("http://h/a", "ftp://h/a", "http://h/b", "http://h/b", False),
        ("http://h/a", "http://[/a", "http://h/b", "http://h/b", False),
        ("http://h/a", "http://h/a", "http://h/b", "http://h/b", False),
    ],
)
def test_one_redirect_predicts_others(url: str, location: str, other: str, expected: str, guessed: bool) -> None:
    moved = PermanentRedirects()
    moved.learn(url, location)
    assert moved.onward(other) == (expected, guessed)


def test_circles_and_exceptions_end() -> None:
    moved = PermanentRedirects()
    moved.learn("http://a/x", "http://b/x")
    moved.learn("http://b/x", "http://a/x")
    assert moved.onward("http://a/y")[0] in ("http://a/y", "http://b/y")
    moved.stays("http://a/z")
    assert moved.onward("http://a/z") == ("http://a/z", False)
    for number in range(1000):
        moved.learn(f"http://h{number}/x", "http://a/x")
    assert moved.onward("http://h999/x")[0] != "http://h999/x"
