"""The line that reports an exception always has a reason; no failure reads as a missing chunk."""

from __future__ import annotations

import errno
import logging
import re

import pytest
import trio

from zarrfs import errors
from zarrfs.cli import mount_helper
from zarrfs.cli.common import report_errors

SILENT = [
    TimeoutError(), ConnectionError(), OSError(5, ""), KeyError(), ValueError(), MemoryError(), RecursionError(),
    trio.BusyResourceError(), trio.TooSlowError(), errors.ZarrfsError(" "),
    errors.ReadError("set/a", ""), errors.SourceError("set", ""), errors.MountError("/mnt: "), errors.UsageError(""),
]  # fmt: skip


@pytest.mark.parametrize("exc", SILENT, ids=repr)
def test_an_exception_without_a_message_is_reported_with_a_reason(
    exc: Exception, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lines = []
    if not isinstance(exc, errors.ZarrfsError):
        with caplog.at_level(logging.INFO, "zarrfs"):
            errors.to_errno(exc, "read", "a/0")
        lines.append(caplog.messages[-1].removeprefix("read a/0: "))
    with pytest.raises(SystemExit), report_errors():
        raise exc
    lines.append(capsys.readouterr().err.removeprefix("zarrfs: "))

    def fail(*_: object, **__: object) -> None:
        raise exc

    monkeypatch.setattr(mount_helper, "settings", fail)
    assert mount_helper.main(["set", "/mnt"]) in (1, 32)
    lines.append(capsys.readouterr().err.removeprefix("mount.zarrfs: /mnt: "))
    for line in lines:
        rest = re.sub(r" \[E\w+\]$| \(.*-d .*shows where\)$", "", line.rstrip("\n"))
        assert "\n" not in rest
        assert re.search(r"\w", rest), line
        assert not rest.endswith(":"), line


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
