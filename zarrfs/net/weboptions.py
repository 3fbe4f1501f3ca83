"""Options of HTTP servers: translated from those of fsspec, and some of zarrfs, to headers, TLS and proxies.

Sources: the parameters of fsspec's HTTPFileSystem; curl(1) for the variables that name proxies and for ~/.netrc.
"""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.config.storage import unknown_option
from zarrfs.config.urls import names
from zarrfs.errors import ReadError
from zarrfs.net.addresses import literal
from zarrfs.net.tls import Tls

log = logging.getLogger(__name__)

_TOKEN = re.compile(r"[!#-'*+.0-9A-Z^-z|~-]+")
_TEXT = re.compile(r"[\t -~\x80-\xff]*")


class Proxy(NamedTuple):
    """An HTTP proxy through which a server is reached, for https with CONNECT."""

    host: str
    port: int
    lines: str  # headers that only the proxy gets, each with its line end

    def __str__(self) -> str:
        """Return the name of the proxy in messages."""
        return f"proxy {self.host}:{self.port}"


class WebOptions(NamedTuple):
    """Options of the requests to one place."""

    headers: dict[str, str]  # in addition to the usual headers of requests; names in title case
    cookies: str  # value of the Cookie header; "": none
    params: dict[str, str]  # added to the query of the first URL
    proxy: str | None  # its URL; "": none; None: the one that the environment names
    proxy_user: tuple[str, str] | None  # user and password of the proxy; None: those in its URL
    tls: Tls
    redirects: bool  # whether they are followed


def check_web_options(options: Options) -> None:
    """Raise ReadError for an option of HTTP servers that is not understood."""
    for name, given in options.storage.items():
        if names(name.partition("://")[0])[0] == "http":
            web_options(given, name)


def proxy_options(options: Options) -> dict[str, Any]:
    """Return the options of all HTTP servers that name a proxy."""
    given: Mapping[str, Any] = options.storage.get("http", {})
    return {name: given.get(name) for name in ("proxy", "proxy_auth")}


def web_options(options: Mapping[str, Any], where: str) -> WebOptions:
    """Translate the storage options of a place. Raise ReadError for what is not understood."""
    try:
        return _translated(options)
    except (ValueError, TypeError, AttributeError) as exc:
        raise ReadError(where, f"cannot be requested with these options: {exc}") from exc


def _translated(options: Mapping[str, Any]) -> WebOptions:
    for name in options:
        if wrong := unknown_option("http", name):
            raise ValueError(wrong)
    headers = {name.title(): value for name, value in _checked(options.get("headers") or {}).items()}
    if options.get("token"):
        headers.setdefault("Authorization", f"Bearer {str(options['token']).strip()}")
    if options.get("auth"):
        headers.setdefault("Authorization", basic(*_pair("auth", options["auth"])))
    cookies = _checked(options.get("cookies") or {})
    proxy, login = options.get("proxy"), options.get("proxy_auth")
    proxy = "" if proxy is True else proxy  # -o http.proxy without a value
    proxy_user = _pair("proxy_auth", login) if login else None
    if proxy:
        _parsed_proxy(str(proxy), "http.proxy=", proxy_user)  # fail before anything is mounted
    verify = options.get("ssl") is not False and options.get("verify_ssl") is not False
    return WebOptions(
        _checked(headers), "; ".join(f"{name}={value}" for name, value in cookies.items()),
        {str(name): str(value) for name, value in (options.get("params") or {}).items()}, proxy, proxy_user,
        Tls(verify, _path(options.get("client_cert")), _path(options.get("client_key"))),
        bool(options.get("allow_redirects", True)),
    )  # fmt: skip


def lines(headers: Mapping[str, str]) -> str:
    """Format headers for a request, each with its line end."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def basic(user: str, password: str) -> str:
    """Return the value of an Authorization header for basic authentication. Source: RFC 7617."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _pair(name: str, value: object) -> tuple[str, str]:
    """Return user and password, which are given as "user:password" or as a list of two."""
    parts = value.partition(":")[::2] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise TypeError(f"http.{name} is not user:password")
    if len(parts) != 2:
        raise ValueError(f"http.{name} is not user:password")
    return str(parts[0]), str(parts[1])


def _checked(headers: Mapping[str, object]) -> dict[str, str]:
    found = {str(name): str(value) for name, value in headers.items()}
    for name, value in found.items():
        if not _TOKEN.fullmatch(name) or not _TEXT.fullmatch(value):
            name = name.partition(":")[0][:80]  # do not show a value, which may be secret
            raise ValueError(f"{name!r} is not a header, or its value has characters that no header has")
    return found


def _path(value: object) -> str:
    return os.path.expanduser(str(value)) if value else ""


# -- proxies


def proxy_of(options: WebOptions, scheme: str, host: str, where: str) -> Proxy | None:
    """Return the proxy for a server, from options or else the environment; None if there is none.

    Raise ReadError if the proxy cannot be used.
    """
    url, named = options.proxy, "http.proxy="
    if url is None:
        url, named = proxy_of_environment(scheme, host)
    if not url:
        return None
    try:
        return _parsed_proxy(url, named, options.proxy_user)
    except ValueError as exc:
        raise ReadError(where, str(exc)) from exc


def _parsed_proxy(url: str, named: str, login: tuple[str, str] | None = None) -> Proxy:
    """Return the proxy of a URL; a `login` takes the place of that in the URL.

    Raise ValueError, whose text does not show the password; `named` is the option or variable with the URL.
    """
    rule = "it must be http:// with HOST:PORT"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        # with such a character in it, a part of the password would be taken for a port, or ignored
        if "@" in parts.path + parts.query + parts.fragment:
            rule = "/, ? and # in its user and password must be written as %2F, %3F and %23"
        elif parts.scheme == "http" and parts.hostname:
            user, password = login or (unquote(parts.username or ""), unquote(parts.password or ""))
            own = lines({"Proxy-Authorization": basic(user, password)}) if user else ""
            return Proxy(parts.hostname, parts.port or 80, own)
    except ValueError:  # its text may show the password
        rule = "its host or port is invalid"
    raise ValueError(f"{named}{shown_proxy(url)}: the proxy cannot be used: {rule}")


def shown_proxy(url: str) -> str:
    """Return the URL of a proxy without user and password, even if these contain characters such as "/" or "?"."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    return without_secrets(scheme + mark + rest.rpartition("@")[2])


def proxy_of_environment(scheme: str, host: str) -> tuple[str, str]:
    """Return (URL of the proxy that the environment names, as for curl(1), "" if none; "$VARIABLE=" for messages)."""
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return "", ""
    import urllib.request

    proxies = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass_environment(host, proxies):  # type: ignore[attr-defined]
        return "", ""
    kind = scheme if proxies.get(scheme) else "all"
    variables = [name for name in os.environ if name.lower() == f"{kind}_proxy"]
    return proxies.get(kind) or "", f"${min(variables, key=str.isupper)}=" if variables else ""


# -- ~/.netrc


def from_netrc(host: str) -> str:
    """Return the value of an Authorization header for `host` from $NETRC or ~/.netrc; "" if it has no entry there.

    The `default` entry is not used, because any server would get its password.
    """
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    if not os.path.exists(path) or literal(host) == "169.254.169.254":
        return ""
    import netrc

    try:
        entry = netrc.netrc(path).hosts.get(host)
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError) as exc:
        log.warning("%s: not used: %s", path, exc)
        return ""
    return basic(entry[0] or entry[1] or "", entry[2] or "") if entry else ""
