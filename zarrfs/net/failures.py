"""Translation of HTTP statuses and exceptions of clients: into Transient, which is retried, or a final ReadError."""

from __future__ import annotations

import errno
import re
import time
from typing import NoReturn

import trio

from zarrfs.config.redaction import redact_text, without_secrets
from zarrfs.errors import AccessDenied, ReadError, TargetMissing
from zarrfs.net.responses import Transient, http_date

_BUSY = (408, 425, 429)
_RETRY_AFTER_MAX = 60.0  # seconds
_NO_BUCKETS = ("NoSuchBucket", "ContainerNotFound")  # of S3 and Google's XML interface, and of Azure
_NO_BUCKET = re.compile(f"<Code>(?:{'|'.join(_NO_BUCKETS)})</Code>")
BUCKET_RULE = "the bucket does not exist"
_LASTING = (errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTSUP)


def raise_for_status(status: int, url: str, reason: str = "", retry_after: str = "") -> NoReturn:
    """Raise the error for an HTTP status: Transient if a retry may help, else a ReadError."""
    where, what = without_secrets(url), f"HTTP status {status} {reason}".rstrip()
    if status in (404, 410):
        raise TargetMissing(where, what, status)
    if status in (401, 403, 407):
        raise AccessDenied(where, what, status)
    if status >= 500 or status in _BUSY:
        raise Transient(what, _seconds_until(retry_after), status)
    raise ReadError(where, what, status)


def check_bucket(answer: str, where: str) -> None:
    """Raise ReadError if an object store answers, in XML, that the bucket does not exist.

    Values of a missing bucket must not be reported as absent, because a reader would then use fill values.
    """
    if _NO_BUCKET.search(answer):
        raise ReadError(where, BUCKET_RULE)


def _seconds_until(retry_after: str) -> float:
    """Return the seconds that a Retry-After header asks to wait (RFC 9110, 10.2.3: a number or a date)."""
    if retry_after.isdecimal():
        return min(float(retry_after), _RETRY_AFTER_MAX)
    until = http_date(retry_after)
    return 0.0 if until is None else min(max(0.0, until - time.time()), _RETRY_AFTER_MAX)


def failure(exc: Exception, where: str, timeout: float) -> Exception:
    """Translate an exception of fsspec, or of a library that it uses, into a ReadError or Transient.

    NotADirectoryError is returned unchanged.
    """
    if isinstance(exc, ReadError | Transient | NotADirectoryError):
        return exc
    if isinstance(exc, TimeoutError | trio.TooSlowError):
        return Transient(f"no answer within {timeout:g} s")
    if isinstance(exc, FileNotFoundError):
        return TargetMissing(where, "not found")
    certificate = _certificate(exc)
    if certificate:
        hint = "($SSL_CERT_FILE names a site's own authority)"
        return ReadError(where, f"its certificate is refused: {certificate} {hint}")
    if isinstance(exc, PermissionError):
        return AccessDenied(where, _reason(exc))
    status = getattr(exc, "status", None) or getattr(exc, "status_code", None) or getattr(exc, "code", None)
    if isinstance(status, int) and 400 <= status < 600:
        try:
            raise_for_status(status, where, _reason(exc))
        except (ReadError, Transient) as found:
            return found
    if isinstance(exc, ValueError) or (isinstance(exc, OSError) and exc.errno in _LASTING):
        return ReadError(where, _reason(exc))
    if isinstance(exc, OSError) or type(exc).__module__.partition(".")[0] in _NETWORK:
        return Transient(_reason(exc))
    return ReadError(where, f"{type(exc).__name__}: {_reason(exc)}")


def raise_from(found: Exception, exc: Exception) -> NoReturn:
    """Raise `found`, the result of failure(exc, ...), with `exc` as its cause unless they are the same exception."""
    if found is exc:
        raise found
    raise found from exc


_NETWORK = ("aiohttp", "urllib3", "requests", "asyncssh")


def _certificate(exc: BaseException) -> str:
    """Return why a server's certificate was refused; "" if something else failed."""
    chain = (exc, exc.__cause__, exc.__context__, getattr(exc, "certificate_error", None))
    return next((found for one in chain if (found := getattr(one, "verify_message", ""))), "")


def _reason(exc: BaseException) -> str:
    """Return the message of an exception in one line, without secrets, error numbers and aiohttp's "ssl:default"."""
    if isinstance(exc, OSError) and exc.strerror and type(exc).__module__ in ("builtins", "socket"):
        return exc.strerror
    return redact_text(" ".join(str(exc).replace(" ssl:default", "").split())) or type(exc).__name__
