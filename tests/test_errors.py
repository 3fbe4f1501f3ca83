"""The line that reports an exception always has a reason."""

from __future__ import annotations

import builtins
import errno
import inspect
import logging
import re
import sqlite3
from collections.abc import Callable

import aiohttp
import pytest
import trio

from zarrfs import errors
from zarrfs.cli import mount_helper
from zarrfs.cli.common import report_errors
from zarrfs.failures import Failures

Make = Callable[[], BaseException]


def of(module: object) -> list[type[BaseException]]:
    found = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Exception)]
    return [kind for kind in found if not issubclass(kind, BaseExceptionGroup | UnicodeError | Warning)]


def silent() -> dict[str, Make]:
    """Return {name: constructor} of exceptions without a message, one for each type that zarrfs may report."""
    made: dict[str, Make] = {}
    for kind in (*of(builtins), *of(trio), *of(sqlite3), aiohttp.ClientError, aiohttp.ClientPayloadError):
        try:
            kind()
        except TypeError:  # trio's exceptions have no public constructor
            made[kind.__name__] = lambda kind=kind: kind.__new__(kind)  # type: ignore[misc]
        else:
            made[kind.__name__] = kind
    for kind in of(errors):
        known = inspect.signature(kind.__init__).parameters.values()
        count = len([one for one in known if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]) - 1
        if issubclass(kind, errors.Refused):
            made[kind.__name__] = lambda kind=kind: kind("", 0)  # type: ignore[misc]
        else:
            made[kind.__name__] = lambda kind=kind, count=count: kind(*[""] * max(count, 0))  # type: ignore[misc]
    made["OSError with a number"] = lambda: OSError(5, "")
    made["ZarrfsError of blanks"] = lambda: errors.ZarrfsError(" ")
    return made


SILENT = silent()
# how zarrfs makes its errors of the messages of libraries
WRAPPED: dict[str, Callable[[str], BaseException]] = {
    "ReadError": lambda said: errors.ReadError("set/a", said),
    "ReadError, longer": lambda said: errors.ReadError("set/a", f"cannot be fetched: {said}"),
    "SourceError": lambda said: errors.SourceError("set", said, "a"),
    "MountError": lambda said: errors.MountError(f"/mnt: {said}"),
    "UsageError": lambda said: errors.UsageError(f"option x: {said}"),
}


def has_reason(line: str, about: str = "") -> bool:
    """Return whether a line has a reason besides its prefix `about` and its endings."""
    assert line.count("\n") == 0, line
    rest = re.sub(r" \[E\w+\]$| \(-d shows where\)$", "", line)
    for prefix in (about, "/: "):
        rest = rest.removeprefix(prefix)
    return re.search(r"\w", rest) is not None and not rest.rstrip().endswith(":")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "FAILURES", Failures())


def reported(exc: BaseException, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str],
             monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Return {place: (line, the line's fixed prefix)} for each place that reports the exception."""
    lines: dict[str, tuple[str, str]] = {}
    caplog.clear()
    with caplog.at_level(logging.INFO, "zarrfs"):
        errors.to_errno(exc, "read", "a/0")
    if not isinstance(exc, errors.StoreError):
        lines["log"] = caplog.messages[-1], "read a/0: "
    if not isinstance(exc, BrokenPipeError):  # on the command line, a closed standard output is not an error
        with pytest.raises(SystemExit), report_errors():
            raise exc
        lines["command line"] = capsys.readouterr().err.rstrip("\n"), "zarrfs: "

    def failing(*_: object, **__: object) -> None:
        raise exc

    monkeypatch.setattr(mount_helper, "_mount", failing)
    assert mount_helper.main(["set", "/mnt"]) in (1, 32)
    lines["mount helper"] = capsys.readouterr().err.rstrip("\n"), "mount.zarrfs: /mnt: "
    return lines


@pytest.mark.parametrize("name", SILENT)
def test_an_exception_without_a_message_is_reported_with_a_reason(
    name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for where, (line, about) in reported(SILENT[name](), caplog, capsys, monkeypatch).items():
        assert has_reason(line, about), (where, line)


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("name", ["TimeoutError", "ConnectionError", "OSError", "BusyResourceError", "ClientError"])
def test_an_error_made_of_an_exception_without_a_message_has_a_reason(
    name: str, kind: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    try:
        raise SILENT[name]()  # noqa: TRY301
    except Exception as exc:
        made = WRAPPED[kind](str(exc))
    said = "timed out" if name == "TimeoutError" else name
    for where, (line, about) in reported(made, caplog, capsys, monkeypatch).items():
        assert has_reason(line, about), (where, line)
        assert said in line, (where, line)


@pytest.mark.parametrize("kind", [errors.ReadError, *errors.ReadError.__subclasses__()])
def test_a_failed_read_never_reads_as_a_missing_chunk(kind: type[errors.ReadError]) -> None:
    expected = {errors.AccessDenied: errno.EACCES, errors.Loop: errno.ELOOP}.get(kind, errno.EIO)
    assert errors.to_errno(kind("s3://b/k", "no answer")) == expected


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENOTCONN, 0])
def test_an_os_error_never_reads_as_a_missing_chunk(code: int) -> None:
    """Only a store may report that a value is absent: ENOENT from anywhere else becomes EIO."""
    assert errors.to_errno(OSError(code, "")) == errno.EIO
    assert errors.to_errno(FileNotFoundError()) == errno.EIO


def test_a_local_os_error_keeps_its_errno() -> None:
    for code in (errno.ENOSPC, errno.EACCES, errno.ENOMEM, errno.EROFS):
        assert errors.to_errno(OSError(code, "")) == code


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert errors.printable("a\x1b[2Jb\nc") == r"a\x1b[2Jb\nc"
    assert errors.printable("é ü") == "é ü"
    assert errors.printable("\udcff") == "\udcff"
    assert errors.printable("\u202e") == r"\u202e"
