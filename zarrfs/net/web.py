"""Web: HTTP requests with their redirects, the credentials that each server gets, and the addresses that are allowed.

docs/security.md says which servers get headers, cookies and passwords of the user; this is decided again at every
redirect. Addresses are checked when a connection is made, so that neither the spelling of a host nor a change of its
address matters. Source: RFC 9110 (15.4 redirects), RFC 6265 (cookies).
"""

from __future__ import annotations

import contextlib
import re
import ssl
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from zarrfs.concurrency.lru import LRU
from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.config.urls import place_of, web_place
from zarrfs.errors import AccessDenied, ReadError
from zarrfs.net.addresses import is_public, literal, not_public
from zarrfs.net.connections import Hop, Pool, Server
from zarrfs.net.http_response import Response
from zarrfs.net.messages import Head
from zarrfs.net.reach import Trust
from zarrfs.net.responses import Transient
from zarrfs.net.tls import tls_error
from zarrfs.net.weboptions import basic, from_netrc, lines, proxy_of, web_options

if TYPE_CHECKING:
    import http.cookiejar

    import yarl

_REDIRECTS = 10
_STATUSES = (301, 302, 303, 307, 308)
_SERVERS = 256  # servers whose options and addresses are kept
_FOLLOWED = 60.0  # seconds for which a redirect is applied without a request to the original place
_REMEMBERED = 65_536  # redirects that are remembered for this time
_COOKIES = 1024  # cookies that are remembered
# Headers that are never taken from options.
_OURS = ("Accept-Encoding", "Range", "If-Range", "Connection", "Content-Length", "Transfer-Encoding")
# URLs of these characters, without "." and ".." as names, are sent as they are written. _PLAIN matches most of them;
# all others are parsed by yarl.
_LEGAL, _NO_DOTS = r"A-Za-z0-9._~!$'()*,+&=;:@/?-", r"(?!.*/\.{1,2}(?:[/?]|\Z))"
_PLAIN = re.compile(
    r"(https?)://([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::([0-9]{1,5}))?"
    rf"(?=/){_NO_DOTS}((?:[{_LEGAL}]++|%[0-9A-Fa-f]{{2}})*+)"
)
_WRITTEN = re.compile(rf"{_NO_DOTS}(?:[\[\]#{_LEGAL}]++|%[0-9A-Fa-f]{{2}})*+")


class Web:
    """The HTTP client of one RemoteFiles. `anonymous`: send no credentials, except those in the URL."""

    def __init__(self, options: Options, trust: Trust, anonymous: bool = False) -> None:
        self._trust, self._anonymous = trust, anonymous
        self._timeout = options.request_timeout
        self._pool = Pool()
        self._servers: LRU[object, Server] = LRU(_SERVERS)
        self._final: LRU[str, tuple[str, float]] = LRU(_REMEMBERED)  # by URL: (where it leads, when to forget that)
        self._jar: http.cookiejar.CookieJar | None = None

    async def request(self, method: str, url: str, more: str = "", slash: bool = False) -> Response:
        """Send a request, follow redirects, and return the last answer; `more` has further headers with line ends.

        `slash`: do not follow a redirect to the same name with "/", which means that the name is a directory. Its
        destination is then the last hop of the answer. Raise ReadError, Transient, OSError.
        """
        where = without_secrets(url)
        first = self._hop(url, None, where)
        final, until = self._final.get(url, ("", 0.0)) if method == "GET" else ("", 0.0)
        if until > time.monotonic():
            try:
                response = await self._send(method, [first, self._hop(final, first, where)], more, where)
            except BaseException:
                self._final.pop(url, None)
                raise
            if response.status < 300:
                return response
            self._final.pop(url, None)
            if response.status >= 500:
                return response
            await response.release()  # it may have expired: the original place knows
        hops, lasting = [first], True  # lasting: all redirects that were followed may be remembered
        while True:
            response = await self._send(method, hops, more, where)
            try:
                onward = self._onward(response, hops, where) if first.server.options.redirects else None
                if onward is None:
                    if len(hops) > 1 and lasting and response.status < 300 and hops[-1].url != url:
                        self._final.put(url, (hops[-1].url, time.monotonic() + _FOLLOWED))
                    return response
                hops.append(onward)
                if slash and onward.is_directory_of(first):
                    return response
                kept = response.headers.get("Cache-Control").lower()
                lasting = lasting and "set-cookie" not in response.headers and "no-" not in kept
                if len(hops) > _REDIRECTS + 1:
                    raise ReadError(where, f"is redirected more than {_REDIRECTS} times")  # noqa: TRY301
            except BaseException:
                response.close()
                raise
            await response.release()

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._pool.close()

    # -- places

    def _hop(self, url: str | yarl.URL, first: Hop | None, where: str) -> Hop:
        """Return the hop for a URL. `first` is the hop that led to it by redirects, else None."""
        credentials = ""
        if isinstance(url, str) and (match := _PLAIN.fullmatch(url)):
            scheme, name, given, target = match.groups()
            port = int(given) if given else 443 if scheme == "https" else 80
        else:
            found, target = self._parsed(url, where) if isinstance(url, str) else (url, url.raw_path_qs)
            url, scheme, name, port = str(found), found.scheme, found.raw_host or "", found.port or 0
            if found.raw_user is not None:
                credentials = lines({"Authorization": basic(found.user or "", found.password or "")})
        name = name.lower()
        place = place_of(scheme, name, port)
        server = self._server(url, scheme, name, port, place, first, where)
        if first is None and server.options.params:
            target += ("&" if "?" in target else "?") + urlencode(server.options.params)
        return Hop(url, place, target, server, credentials)

    def _server(
        self, url: str, scheme: str, name: str, port: int, place: str, first: Hop | None, where: str
    ) -> Server:  # fmt: skip
        redirected = first is not None and first.place != place
        by_trusted = redirected and first is not None and first.server.personal
        key = place, redirected, by_trusted
        server = self._servers.use(key)
        if server is not None:
            return server
        if not 0 < port < 65_536 or not name:
            raise ReadError(where, "not a URL: no such port or host")
        given = self._trust.given(url, redirected)
        personal = given.personal and not self._anonymous
        options = web_options(given.options, where)
        guarded = self._trust.must_be_public(place)
        address = literal(name) if guarded else None
        if address is not None and not is_public(address):
            shown = f"{where}: is redirected to {without_secrets(url)}" if first is not None else where
            raise AccessDenied(shown, not_public(address))
        headers = {"Accept": "*/*", "User-Agent": "zarrfs"}
        headers |= {header: value for header, value in options.headers.items() if header not in _OURS}
        headers["Accept-Encoding"] = (self._anonymous and options.headers.get("Accept-Encoding")) or "identity"
        # A host in ~/.netrc also gets its password if a server that may get the user's credentials has redirected to
        # it, because the login of Earthdata works like this.
        if "Authorization" not in headers and (personal or by_trusted) and (login := from_netrc(name)):
            headers["Authorization"] = login
        proxy = proxy_of(options, scheme, name, where)
        return self._servers.put(key, Server(scheme, name, port, guarded, personal, options, proxy, headers))

    def _parsed(self, url: str, where: str) -> tuple[yarl.URL, str]:
        """Parse a URL that _PLAIN does not match; return also its path and query. Raise ReadError if it is invalid."""
        import yarl

        try:
            found = yarl.URL(url)
            web_place(found)
            if found.scheme not in ("http", "https"):
                raise ValueError("not HTTP")  # noqa: TRY301
            return found, (yarl.URL(url, encoded=True) if _WRITTEN.fullmatch(url) else found).raw_path_qs
        except (ValueError, TypeError) as exc:
            raise ReadError(where, f"not a URL: {exc}") from exc

    def _onward(self, response: Response, hops: list[Hop], where: str) -> Hop | None:
        """Return the hop to which the answer redirects; None if it is not a redirect."""
        location = response.headers.get("Location")
        if response.status not in _STATUSES or not location:
            return None
        if not location.isascii():  # decoded as Latin-1, although servers send UTF-8
            location = location.encode("latin-1").decode("utf-8", "replace")
        import yarl

        written = _WRITTEN.fullmatch(location) is not None  # a signature covers it as written
        try:
            base = yarl.URL(hops[-1].url)
            onward = base.join(yarl.URL(location, encoded=written))
            web_place(onward)
        except ValueError as exc:
            raise ReadError(where, f"is redirected to an invalid URL: {exc}") from exc
        if onward.scheme not in ("http", "https"):
            raise ReadError(where, f"is redirected to {onward.scheme}:, which is not HTTP")
        if web_place(onward) == web_place(base) and onward.raw_user is None and base.raw_user is not None:
            onward = onward.with_user(base.user).with_password(base.password)
        return self._hop(onward, hops[0], where)

    # -- one request

    async def _send(self, method: str, hops: list[Hop], more: str, where: str) -> Response:
        """Send a request to the last of `hops`, and receive the head of its answer."""
        hop = hops[-1]
        server = hop.server
        if len(hops) > 1:
            where = f"{where}: is redirected to {without_secrets(hop.url)}"
        target = f"http://{server.host}{hop.target}" if server.forwarded else hop.target
        own = server.lines
        if hop.credentials:
            own = re.sub(r"(?i)^Authorization:.*\r\n", "", own, flags=re.MULTILINE) + hop.credentials
        if server.options.cookies or self._jar is not None:
            own += self._cookies(hop)
        request = f"{method} {target} HTTP/1.1\r\n{own}{more}\r\n".encode("latin-1")
        while True:
            connection, used = await self._pool.take(server, where, self._timeout)
            try:
                with contextlib.suppress(ConnectionError, ssl.SSLError):  # what the server sent last says why
                    await connection.send(request)
                head = await connection.head()
                if head is not None:
                    response = Response(connection, method, head, hops, self._pool.give)
                    break
                if not used:
                    raise Transient("the connection was closed before an answer came")  # noqa: TRY301
                connection.close()  # the server has closed it while it was idle
            except (ConnectionError, ssl.SSLError) as exc:
                connection.close()
                if not used:
                    raise (tls_error(exc, where) if isinstance(exc, ssl.SSLError) else exc) from exc
            except BaseException:
                connection.close()
                raise
        if "set-cookie" in head.headers:
            self._remember_cookies(hop, head)
        return response

    def _cookies(self, hop: Hop) -> str:
        """Return the header with the cookies of a request."""
        found = [hop.server.options.cookies] if hop.server.options.cookies else []
        if self._jar is not None:
            request: Any = _request(hop)
            self._jar.add_cookie_header(request)
            found += [text for text in [request.get_header("Cookie")] if text]
        return f"Cookie: {'; '.join(found)}\r\n" if found else ""

    def _remember_cookies(self, hop: Hop, head: Head) -> None:
        import email.message
        import http.cookiejar

        if self._jar is None:
            self._jar = http.cookiejar.CookieJar()
        message = email.message.Message()
        for cookie in head.headers["set-cookie"].split("\n"):
            message["Set-Cookie"] = cookie
        self._jar.extract_cookies(SimpleNamespace(info=lambda: message), _request(hop))  # type: ignore[arg-type]
        if len(self._jar) > _COOKIES:
            self._jar.clear()


def _request(hop: Hop) -> Any:
    """Return a request in the form that http.cookiejar needs."""
    import urllib.request

    return urllib.request.Request(f"{hop.place}{hop.target}")
