"""Contexts of TLS: which certificates are trusted and presented; and its errors."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import ssl
from typing import NamedTuple

import trio

from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.responses import Transient

# Reasons in OpenSSL's errors if the server rejects the certificate of the client, or wants one.
_ABOUT_CLIENT = (
    "CERTIFICATE_REQUIRED", "ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE", "ALERT_UNKNOWN_CA", "ACCESS_DENIED",
    "ALERT_HANDSHAKE_FAILURE",
)  # fmt: skip


class Tls(NamedTuple):
    """Authentication of a server and of the client; paths of PEM files."""

    verify: bool = True
    certificate: str = ""  # of the client, with its key unless that has a file of its own
    key: str = ""


def tls_error(exc: ssl.SSLError, where: str) -> Exception:
    """Translate an exception of OpenSSL into an error of the URL `where`."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return exc  # failures.failure() translates it
    reason = str(exc.reason or exc)
    if any(text in reason for text in _ABOUT_CLIENT):
        rule = f"the server refuses the connection: {reason}; it may want another certificate of the client"
        return AccessDenied(where, f"{rule} (http.client_cert=)")
    wrong = "WRONG_VERSION" in reason
    return Transient("the server does not speak TLS" if wrong else f"TLS failed: {reason}")


async def context_of(tls: Tls, where: str) -> ssl.SSLContext:
    """Return the context for `tls`; read its files again if they have changed. Raise ReadError if that fails."""
    authorities = os.environ.get("SSL_CERT_FILE", "") if tls.verify else ""
    named = [path for path in (authorities, tls.certificate, tls.key) if path]

    def make() -> ssl.SSLContext:
        return _made(tls, authorities, tuple(os.stat(path).st_mtime_ns for path in named))

    try:
        return await trio.to_thread.run_sync(make, abandon_on_cancel=True)
    except OSError as exc:  # includes ssl.SSLError
        rule = f"{' or '.join(named) or 'certificates'}: cannot be used: {exc.strerror or exc}"
        raise ReadError(where, rule) from exc


def preload_authorities() -> None:
    """Make the default context in advance (30 to 50 ms). Errors are left to the first connection."""
    authorities = os.environ.get("SSL_CERT_FILE", "")
    with contextlib.suppress(OSError):
        _made(Tls(), authorities, tuple(os.stat(path).st_mtime_ns for path in [authorities] if path))


@functools.lru_cache(32)
def _made(tls: Tls, _authorities: str, _times: tuple[int, ...]) -> ssl.SSLContext:
    context = ssl.create_default_context()  # with the authorities of the system, or of $SSL_CERT_FILE
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as curl: Python 3.13 refuses authorities without key identifiers
    context.set_alpn_protocols(["http/1.1"])
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.certificate:
        context.load_cert_chain(tls.certificate, tls.key or None, password=_no_password)
    return context


def _no_password() -> str:
    raise OSError(errno.EACCES, "the key has a passphrase; use a key without one")
