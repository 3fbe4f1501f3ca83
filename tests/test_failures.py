"""Log lines of failures: which ones are written, and their text."""

from __future__ import annotations

import errno
import logging
import random
import re

import pytest

from zarrfs import errors, failures
from zarrfs.errors import AccessDenied, NotFound, ReadError, TargetMissing, to_errno
from zarrfs.failures import BURST, RATE, REMEMBERED, SILENCE, Failures


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def told(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Failures:
    """Return the Failures that to_errno() logs to, with the test's clock."""
    found = Failures(clock)
    monkeypatch.setattr(errors, "FAILURES", found)
    return found


def add(told: Failures, key: str, number: int = 1, operation: str = "read", code: str = "EIO") -> None:
    for _ in range(number):
        told.add(operation, key, code, "missing", f"{operation} {key}: gone [{code}]")


def test_the_same_failure_is_logged_once_a_minute(
    told: Failures, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    add(told, "a", 154)
    add(told, "b")
    assert caplog.messages == ["read a: gone [EIO]", "read b: gone [EIO]"]
    clock.now += SILENCE - 1
    add(told, "a")
    told.flush()
    assert len(caplog.messages) == 2
    clock.now += 1
    add(told, "a")
    assert caplog.messages[2:] == ["read a: gone [EIO] (155 more like it since the last line)"]
    assert told.counts == {"EIO": 157}


def test_suppressed_failures_are_logged_by_flush(
    told: Failures, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    add(told, "a", 3)
    add(told, "b")
    clock.now += SILENCE
    told.flush()
    told.flush()
    assert caplog.messages[2:] == ["read a: gone [EIO] (2 more like it since the last line)"]
    add(told, "a", 5)  # within a minute of that line
    add(told, "b")  # flush() has forgotten it, as it had no repetitions
    assert caplog.messages[3:] == ["read b: gone [EIO]"]
    told.flush(end=True)
    assert caplog.messages[4:] == ["read a: gone [EIO] (5 more like it since the last line)"]
    told.flush(end=True)
    assert len(caplog.messages) == 5


def test_another_errno_operation_or_kind_is_another_failure(
    told: Failures, caplog: pytest.LogCaptureFixture
) -> None:
    add(told, "a")
    add(told, "a", operation="lookup")
    told.add("read", "a", "EIO", "changed", "read a: changed [EIO]")
    assert len(caplog.messages) == 3


def test_all_lines_together_are_bounded(told: Failures, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(10_000):
        add(told, str(number))
        clock.now += 0.01  # a hundred failures a second
    add(told, "x", 3, "lookup", "EACCES")
    assert len(caplog.messages) <= BURST + 100 * RATE + 1
    lines = len(caplog.messages)
    clock.now += SILENCE
    told.flush()
    [said] = [text for text in caplog.messages[lines:] if "not logged one by one" in text]
    missed = 10_003 - lines
    assert said == (
        f"{missed:,} failures were not logged one by one: {missed - 3:,} read EIO, 3 lookup EACCES"
    )
    assert told.counts == {"EIO": 10_000, "EACCES": 3}


@pytest.mark.parametrize("seed", range(20))
def test_counts_in_log_lines_add_up_to_the_failures(
    seed: int, told: Failures, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines and the repetitions that they report add up to all failures, in whatever order these happen."""
    monkeypatch.setattr(failures, "REMEMBERED", 10)
    chance = random.Random(seed)
    for _ in range(3000):
        add(told, str(int(chance.expovariate(0.05))))
        clock.now += chance.choice((0, 0, 0.01, 0.3, 5 if chance.random() < 0.05 else 0))
        if chance.random() < 0.02:
            told.flush()
    told.flush(end=True)
    own = [text for text in caplog.messages if text.startswith("read ")]
    found = [re.search(r"\(([\d,]+) more like it|^([\d,]+) failures were not", text) for text in caplog.messages]
    more = sum(int((one[1] or one[2]).replace(",", "")) for one in found if one)
    repeated = sum("more like it" in text for text in own)
    # A line written by add() is one failure besides its repetitions, a line written by flush() is repetitions only.
    # The lines do not show which of the two wrote them.
    assert len(own) - repeated <= 3000 - more <= len(own)
    assert len(told._logged) <= 10
    assert told.counts == {"EIO": 3000}


def test_the_number_of_remembered_failures_is_bounded(told: Failures, clock: Clock) -> None:
    for number in range(REMEMBERED + 500):
        clock.now += 1.0
        add(told, str(number))
    assert len(told._logged) <= REMEMBERED


# -- the text of a line


def line(exc: Exception, caplog: pytest.LogCaptureFixture, operation: str = "read", key: str = "a/0.0") -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, "zarrfs"):
        to_errno(exc, operation, key)
    [text] = caplog.messages
    return text


def test_a_line_says_everything_known_about_the_failure(told: Failures, caplog: pytest.LogCaptureFixture) -> None:
    error = ReadError("https://h/x.nc", "HTTP status 503 (5 attempts)")
    error.about("https://h/x.nc", 18368, 8000)
    error.about("https://h/x.nc", 0, 10**6)  # by an outer caller: the first range remains
    assert line(error, caplog) == "read a/0.0: https://h/x.nc [18368, +8000]: HTTP status 503 (5 attempts) [EIO]"
    missing = TargetMissing("https://h/y.nc", "HTTP status 404", 404)
    missing.about("https://h/y.nc", 0, 0)  # a request about the file, not for a range of it
    assert line(missing, caplog, "getattr") == "getattr a/0.0: https://h/y.nc: HTTP status 404 [EIO]"
    elsewhere = AccessDenied("/srv/a", "permission denied")
    elsewhere.about("/srv/b", 5, 6)
    assert line(elsewhere, caplog) == "read a/0.0: /srv/a: permission denied: /srv/b [5, +6] [EACCES]"
    assert line(elsewhere.at("set/refs.0.parq"), caplog, key="r") == (
        "read r: set/refs.0.parq: permission denied: /srv/b [5, +6] [EACCES]"
    )


def test_an_unexpected_exception_is_logged_with_its_line(told: Failures, caplog: pytest.LogCaptureFixture) -> None:
    try:
        {}["x"]  # type: ignore[index]
    except KeyError as exc:
        said = line(exc, caplog, "readdir", "")
    assert said.startswith("readdir /: KeyError: 'x' at test_failures.py:")
    assert said.endswith(" [EIO]")
    assert line(OSError(errno.ENOSPC, "No space left on device"), caplog, "write").endswith("[ENOSPC]")


def test_not_found_is_not_logged(told: Failures, caplog: pytest.LogCaptureFixture) -> None:
    assert to_errno(NotFound("x"), "lookup", "x") == errno.ENOENT
    assert not caplog.messages
    assert not told.counts
