"""Exception types, and to_errno(): the only place that knows errno."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from zarrfs.failures import FAILURES

log = logging.getLogger(__name__)


def reason_of(exc: BaseException) -> str:
    """Return the reason of an exception in one line; the name of its type if it gives none. Never ""."""
    said = exc.strerror.lower() if isinstance(exc, OSError) and exc.strerror else " ".join(str(exc).split())
    return said or ("timed out" if isinstance(exc, TimeoutError) else type(exc).__name__)


def causes(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and its causes or contexts; each once, because the chain may be circular."""
    seen: set[int] = set()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def behind(exc: BaseException) -> BaseException | None:
    """Return the KeyboardInterrupt in the chain of causes and contexts of `exc`; None if there is none.

    Code that is interrupted by a signal handler may replace the handler's exception: before Python 3.12, type() raises
    RuntimeError for one in __set_name__ (functools.cached_property), and C modules raise ImportError for one in their
    initialisation.
    """
    return next((link for link in causes(exc) if isinstance(link, KeyboardInterrupt)), None)


def first_cause(exc: BaseException) -> BaseException:
    """Return the first error inside the exception groups of trio's nurseries; KeyboardInterrupt has precedence.

    If an unexpected error has replaced the exception of a signal handler, return that exception (see behind()).
    """
    while isinstance(exc, BaseExceptionGroup):
        interrupted = exc.subgroup(KeyboardInterrupt)
        exc = (interrupted or exc).exceptions[0]
    return exc if isinstance(exc, ZarrfsError | OSError) else behind(exc) or exc


def internal_error(exc: BaseException) -> str:
    """Return a line about an unexpected exception: its type and its message."""
    said = " ".join(str(exc).split())
    return f"internal error: {type(exc).__name__}{f': {said}' if said else ''}"


def _complete(text: str) -> str:
    """Return `text`; if it lacks a reason ("", "file: "), add that of the exception being handled.

    Messages of zarrfs quote exceptions of libraries, and some of those have no text.
    """
    if text.strip() and not text.rstrip().endswith(":"):
        return text
    handled = sys.exception()
    return f"{text.rstrip()} {reason_of(handled) if handled is not None else 'no reason was given'}".lstrip()


class ZarrfsError(Exception):
    """Base of all deliberate errors of zarrfs; str() is one line for a terminal, and always has a reason."""

    def __init__(self, text: str = "") -> None:
        super().__init__(_complete(text))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without a call of __init__: subclasses take other arguments than the text that is in `args`."""
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[ZarrfsError], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> ZarrfsError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


class UsageError(ZarrfsError):
    """An option or argument that cannot be used."""


class SourceError(ZarrfsError):
    """A source that cannot be opened. The message names the file, the entry (if any) and the rule that it breaks."""

    def __init__(self, source: str, rule: str, entry: str | None = None) -> None:
        rule = _complete(rule)
        self.source, self.rule, self.entry = source, rule, entry
        where = source if entry is None else f"{source}: {entry}"
        super().__init__(f"{where}: {rule}")


class MountError(ZarrfsError):
    """A mount point that cannot be used, or a mount that failed."""


class StoreError(ZarrfsError):
    """Base of the negative answers of a store, such as "not found" or "read-only"; carries the key.

    The docstring of a subclass is its default reason.
    """

    errno = errno.EIO
    quiet = True  # an answer, not a failure: not logged

    def __init__(self, key: str, reason: str = "") -> None:
        self.key, self.reason = key, reason
        super().__init__(f"{key or '/'}: {reason.strip() or self.__class__.__doc__}")


class NotFound(StoreError):
    """no such key"""

    errno = errno.ENOENT


class InvalidKey(StoreError):
    """not a key"""

    errno = errno.EINVAL


class NameTooLong(InvalidKey):
    """a name over 255 bytes"""

    errno = errno.ENAMETOOLONG


class IsDirectory(StoreError):
    """is a directory"""

    errno = errno.EISDIR


class NotDirectory(StoreError):
    """is not a directory"""

    errno = errno.ENOTDIR


class Refused(StoreError):
    """a refusal of the file system, with its errno (EEXIST, ENOTEMPTY, EXDEV, ...)"""

    def __init__(self, key: str, code: int) -> None:
        super().__init__(key, os.strerror(code).lower())
        self.errno = code


class ReadError(ZarrfsError):
    """A failed read of bytes that the store lists: EIO, never ENOENT.

    A Zarr reader returns the fill value for "not found", so a failure below a listed key is never reported as that.
    `kind` is the row that counts the error in the table of `zarrfs check`.
    """

    errno = errno.EIO
    kind = "unreadable"

    def __init__(self, where: str, reason: str, status: int | None = None) -> None:
        reason = _complete(reason)
        self.where, self.reason = where, reason
        self.status = status  # HTTP status, if a server answered
        self.url: str | None = None  # of the target, without credentials
        self.offset: int | None = None  # bytes
        self.length: int | None = None  # bytes
        super().__init__(f"{where}: {reason}")

    def about(self, url: str, offset: int, length: int) -> None:
        """Add the request (length 0: no range), unless a lower layer has done so."""
        if self.url is None:
            self.url = url
            self.offset, self.length = (offset, length) if length else (None, None)

    def at(self, where: str) -> ReadError:
        """Return the same failure under the name `where`, by which readers know the value."""
        found = type(self)(where, self.reason, self.status)
        found.url, found.offset, found.length = self.url, self.offset, self.length
        return found

    def reason_for(self, key: str) -> str:
        """Return the reason for a line that already names `key`; add the name of what failed only if it differs."""
        return self.reason if self.where == key else str(self)

    def described(self) -> str:
        """Return all facts in one line."""
        if self.url is None:
            return str(self)
        extent = f" [{self.offset}, +{self.length}]" if self.length else ""
        if self.where == self.url:
            return f"{self.url}{extent}: {self.reason}"
        return f"{self}: {self.url}{extent}" if self.url not in self.where else str(self)


class TargetMissing(ReadError):
    """The target of a reference, or a blob, does not exist."""

    kind = "missing"


class OutOfRange(ReadError):
    """The target ends before the referenced range does."""

    kind = "out of range"


class WrongHash(ReadError):
    """The bytes of a blob do not have the hash that names it."""

    kind = "wrong hash"


class TargetChanged(ReadError):
    """The target is not the version that was read first."""

    kind = "changed"


class AccessDenied(ReadError):
    """The target refuses access (permissions, 401, 403)."""

    errno = errno.EACCES


class Loop(ReadError):
    """The target is in the mount that refers to it."""

    errno = errno.ELOOP


# The errnos of a bare OSError that reach the kernel. ENOENT, ENOTDIR and EISDIR are not among them, because only a
# store may answer those (NotFound, NotDirectory, IsDirectory): a Zarr reader would take them for a missing chunk.
_OS_ERRNOS = frozenset(
    (
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE,
        errno.ENOMEM, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL,
        errno.EFBIG, errno.EXDEV, errno.EBUSY, errno.ESTALE,
    )
)  # fmt: skip


def to_errno(exc: BaseException, operation: str = "", key: str = "") -> int:
    """Return the errno of the FUSE reply for `exc`; count and log it if it is a failure (failures.py).

    Negative answers of a store (not found, read-only, ...) are not failures. Unknown exceptions become EIO.
    """
    if isinstance(exc, StoreError):
        return exc.errno
    code = errno.EIO
    kind = type(exc).__name__
    text = str(exc).strip() or reason_of(exc)
    if isinstance(exc, ReadError) or (isinstance(exc, OSError) and exc.errno in _OS_ERRNOS):
        code = exc.errno or code
    elif not isinstance(exc, OSError):
        frame = traceback.extract_tb(exc.__traceback__)[-1:]
        place = "".join(f" at {os.path.basename(step.filename)}:{step.lineno}" for step in frame)
        text = f"{internal_error(exc).removeprefix('internal error: ')}{place}"
    if isinstance(exc, ReadError):
        text = exc.described()
    key, name = key or "/", errno.errorcode[code]
    if FAILURES.add(operation, key, name, kind, f"{operation} {key}: {text} [{name}]"):
        log.debug("where it came from:", exc_info=exc)
    return code


def printable(text: str) -> str:
    """Return `text` with control characters escaped, so that it is one line and cannot control a terminal."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def message_line(text: str) -> str:
    """Return printable(text) for a UTF-8 stream: bytes in names that are not UTF-8 are escaped, too."""
    return printable(text).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def message_lines(text: str) -> str:
    """Return the lines of `text`, such as a traceback, each as message_line() returns it."""
    return "\n".join(map(message_line, text.split("\n")))


def _escaped(char: str) -> str:
    if char.isprintable() or "\udc80" <= char <= "\udcff":  # surrogates: bytes that are not UTF-8
        return char
    return char.encode("unicode_escape").decode()
