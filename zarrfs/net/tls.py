"""TLS on non-blocking sockets: contexts, handshakes, errors, and TLS within TLS."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import ssl
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import trio

from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.certificates import check_variables
from zarrfs.net.responses import Transient

T = TypeVar("T")
Resumable = tuple[ssl.SSLContext, ssl.SSLSession | None]  # OpenSSL resumes a session in its own context only

WAITS = (BlockingIOError, ssl.SSLWantReadError)  # raised if there is nothing to receive yet
_AT_ONCE = 64 << 10  # bytes that are received from the outer connection in one call
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


class TlsInTls:
    """TLS over a connection that has TLS already, such as one to a server through an https:// proxy.

    It has the methods of a non-blocking socket that Connection needs. They raise the exceptions of the outer socket,
    such as ssl.SSLWantReadError: the caller then waits for that socket and calls the method again.
    """

    def __init__(
        self, outer: ssl.SSLSocket, context: ssl.SSLContext, server_hostname: str, session: ssl.SSLSession | None
    ) -> None:
        self.outer, self.context = outer, context
        self._received, self._made = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._inner = context.wrap_bio(self._received, self._made, server_hostname=server_hostname, session=session)
        self._unsent = b""  # encrypted by the inner TLS, not sent yet

    @property
    def session(self) -> ssl.SSLSession | None:
        """Return the session of the inner TLS."""
        return self._inner.session

    def fileno(self) -> int:
        """Return the descriptor of the outer socket."""
        return self.outer.fileno()

    def close(self) -> None:
        """Close the outer socket."""
        self.outer.close()

    def do_handshake(self) -> None:
        """Do the handshake, as ssl.SSLSocket.do_handshake()."""
        self._received_by(self._inner.do_handshake)
        self._flush()

    def send(self, data: bytes) -> int:
        """Send bytes, as ssl.SSLSocket.send(). Those that the outer socket does not take are sent before the next."""
        self._flush()
        count = self._inner.write(data)
        with contextlib.suppress(*WAITS, ssl.SSLWantWriteError):
            self._flush()
        return count

    def recv(self, most: int, _flags: int = 0) -> bytes:
        """Receive bytes, as ssl.SSLSocket.recv()."""
        return self._received_by(lambda: self._inner.read(most))

    def recv_into(self, view: memoryview) -> int:
        """Receive bytes into `view`, as ssl.SSLSocket.recv_into()."""
        return self._received_by(lambda: self._inner.read(len(view), view))  # type: ignore[return-value]

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Do nothing: it is unknown how many bytes of the outer connection make up the bytes to wait for."""

    def _received_by(self, step: Callable[[], T]) -> T:
        """Return the result of `step`, after receiving the bytes that it needs from the outer connection."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._flush()
                data = self.outer.recv(_AT_ONCE)
                if data:
                    self._received.write(data)
                else:
                    self._received.write_eof()

    def _flush(self) -> None:
        self._unsent += self._made.read()
        while self._unsent:
            self._unsent = self._unsent[self.outer.send(self._unsent) :]


async def encrypted(
    sock: socket.socket | TlsInTls, tls: Tls, name: str, where: str, earlier: Resumable | None = None
) -> ssl.SSLSocket | TlsInTls:
    """Return a TLS connection to the server `name` over `sock`, which is closed with it, or if this fails.

    `sock` may have one layer of TLS, but not two. The `earlier` session is resumed unless certificates have been read
    again since. Raise ReadError and OSError, which includes ssl.SSLError.
    """
    with contextlib.ExitStack() as closing:
        closing.callback(sock.close)
        context = await context_of(tls, where)
        session = earlier[1] if earlier is not None and earlier[0] is context else None
        made: ssl.SSLSocket | TlsInTls
        assert not isinstance(sock, TlsInTls)
        if isinstance(sock, ssl.SSLSocket):
            made = TlsInTls(sock, context, name, session)
        else:
            made = context.wrap_socket(
                sock, server_hostname=name, do_handshake_on_connect=False, suppress_ragged_eofs=False, session=session
            )
        closing.callback(made.close)
        while True:
            try:
                made.do_handshake()
            except WAITS:
                await trio.lowlevel.wait_readable(made)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(made)
            else:
                break
        closing.pop_all()
    return made


def tls_error(exc: ssl.SSLError, where: str) -> Exception:
    """Translate an exception of OpenSSL into an error of the URL `where`."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return exc  # failures.failure() translates it
    reason = str(exc.reason or exc)
    if any(text in reason for text in _ABOUT_CLIENT):
        rule = f"the server refuses the connection: {reason}; it may want another certificate of the client"
        return AccessDenied(where, f"{rule} (http.client_cert=)")
    return Transient(tls_reason(exc, "the server"))


def tls_reason(exc: ssl.SSLError, whose: str) -> str:
    """Return the message of an exception of OpenSSL; `whose` names the other side of the connection."""
    reason = str(exc.reason or exc)
    return f"{whose} does not speak TLS" if "WRONG_VERSION" in reason else f"TLS failed: {reason}"


async def context_of(tls: Tls, where: str) -> ssl.SSLContext:
    """Return the context for `tls`; read its files again if they have changed. Raise ReadError if that fails."""
    authorities = os.environ.get("SSL_CERT_FILE", "") if tls.verify else ""
    named = [path for path in (authorities, tls.certificate, tls.key) if path]
    if not named and tls in _plain_contexts:
        return _plain_contexts[tls]
    if tls.verify:
        check_variables("http", where)

    def make() -> ssl.SSLContext:
        return _made(tls, authorities, tuple(os.stat(path).st_mtime_ns for path in named))

    try:
        found = await trio.to_thread.run_sync(make)
    except OSError as exc:  # includes ssl.SSLError
        rule = f"{' or '.join(named) or 'certificates'}: cannot be used: {exc.strerror or exc}"
        raise ReadError(where, rule) from exc
    if not named:
        _plain_contexts[tls] = found
    return found


_plain_contexts: dict[Tls, ssl.SSLContext] = {}  # contexts without files of their own: at most two


@functools.lru_cache(32)
def _made(tls: Tls, _authorities: str, _changed: tuple[int, ...]) -> ssl.SSLContext:
    context = ssl.create_default_context()  # with the authorities of the system, or of $SSL_CERT_FILE
    context.set_alpn_protocols(["http/1.1"])
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.certificate:
        context.load_cert_chain(tls.certificate, tls.key or None, password=_no_password)
    return context


def _no_password() -> str:
    raise OSError(errno.EACCES, "the key has a passphrase; use a key without one")
