"""Checks of a source by zarrfs doctor: open it as a mount would, and read a little of it."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Iterator
from urllib.parse import SplitResult, quote, urlsplit

from zarrfs.cli.doctor.findings import OK, PROBLEM, WARNING, Check, Finding
from zarrfs.config.options import Options
from zarrfs.config.redaction import redact_text, split_chain, without_secrets
from zarrfs.documents.plan import Plan
from zarrfs.errors import AccessDenied, ReadError, StoreError, ZarrfsError, reason_of
from zarrfs.net.storeoptions import proxied
from zarrfs.sources import discard, open_plan, plan_source
from zarrfs.store.api import Kind, Store, join_key

_READ = 4096  # bytes
_LOOKED = 500  # entries examined to find a file with bytes in a target
_OF_URLS = "!#$%&'()*+,/:;=?@[]~"  # characters that need no escape in a request: RFC 3986
_PORTS = {"http": 80, "https": 443}
_CREDENTIALS = {  # by protocol: where credentials come from
    "s3": "AWS_ACCESS_KEY_ID, AWS_PROFILE, ~/.aws/credentials, or -o s3.anon=true for public buckets",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or -o gs.token=anon for public buckets",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and a key, or -o az.anon=true for public ones",
    "http": "-o http.headers=..., a netrc file, or the token in the URL may be wrong or missing",
}
# (regular expression for the reason of a failure, advice); the first match counts
_ADVICE = (
    (r"name or service not known|name resolution|nodename nor servname|dns error|getaddrinfo|no address",
     "the name of the server is unknown here: look for a typing error, at the machine's DNS, or for {proxy}"),
    (r"certificate|ssl|tls",
     "the server's certificate is not trusted: with an authority of your site's own, SSL_CERT_FILE names its file"),
    (r"\b407\b|proxy", "the proxy refuses: look at {proxy}"),
    (r"\b401\b|\b403\b|permission denied|forbidden|access ?denied|credential|signature|not authorized|unauthorized",
     "credentials: {credentials}"),
    (r"connect|refused|unreachable|no route", "nothing answers there: a firewall, a wrong port, or {proxy}"),
    (r"timed? ?out|deadline|no answer", "no answer in time: a firewall, or {proxy}"),
    (r"\b404\b|\b410\b|no such (file|key|bucket)|not found|does not exist", "look for a typing error in the URL"),
    (r"\b(429|5\d\d)\b|slow ?down", "the server has a problem of its own: try again later"),
    (r"not enabled|allow=|allow_path", "docs/security.md says what a document may reach"),
)  # fmt: skip


def open_and_read(source: str) -> Check:
    """Return a check that opens `source` and reads a little of it."""

    def check(options: Options) -> Iterator[Finding]:
        """source: whether it can be opened and read."""
        import trio

        url = split_chain(source)[-1]
        yield from _server(url)
        timeout, retries = min(options.request_timeout, 10), min(options.retries, 1)
        quick = dataclasses.replace(options, request_timeout=timeout, retries=retries)
        try:
            plan = plan_source(source, quick)
        except ZarrfsError as exc:
            reason = getattr(exc, "rule", str(exc))
            status = "" if re.search(r"status \d", reason) else _status(url)
            text = redact_text(f"{exc}{f' (its server says {status})' if status else ''}")
            yield Finding("source", PROBLEM, text, advice_for(f"{status} {reason}", url))
            return
        try:
            yield Finding("source", OK, f"{without_secrets(plan.source)}: {plan.kind}")
            for warning in plan.warnings:
                yield Finding("source", WARNING, redact_text(warning))
            yield trio.run(_read_some, plan, quick)
        finally:
            discard(plan)

    return check


def advice_for(reason: str, url: str) -> str:
    """Return advice for a source or target that failed with `reason`; "" if none is known."""
    protocol = url.partition("://")[0].lower().partition("+")[0] if "://" in url else ""
    protocol = {"https": "http", "s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}.get(protocol, protocol)
    variable = proxied()
    proxy = f"the proxy of {variable}" if variable else "a proxy (-o http.proxy=URL)"
    if not protocol:
        return ""
    for words, advice in _ADVICE:
        if re.search(words, reason, re.IGNORECASE):
            credentials = _CREDENTIALS.get(protocol, "those of this protocol are wrong or missing")
            return advice.format(proxy=proxy, credentials=credentials)
    return ""


def _web_server(url: str) -> tuple[SplitResult, str, int] | None:
    """Return (parts, host, port) of an HTTP URL, else None. None also if it is malformed, which opening reports."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or host is None:
        return None
    return parts, host, port or _PORTS[parts.scheme]


def _server(url: str) -> Iterator[Finding]:
    """Check that an HTTP server's name resolves and that its port accepts connections; skipped behind a proxy."""
    server = _web_server(url)
    if server is None or proxied():
        return
    _, host, port = server
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as exc:
        yield Finding("server", PROBLEM, f"{host}: {exc.strerror or exc}".lower(), advice_for("name resolution", url))
        return
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as exc:
        reason = reason_of(exc)
        yield Finding("server", PROBLEM, f"{host} ({address}) port {port}: {reason}", advice_for("connect", url))
        return
    yield Finding("server", OK, f"{host} ({address}) port {port} answers")


def _status(url: str) -> str:
    """Return the HTTP status of a request without credentials, such as "403"; "" for success or without an answer."""
    import http.client

    server = _web_server(url)
    if server is None:
        return ""
    parts, host, port = server
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=5)
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", quote(path, _OF_URLS, errors="surrogateescape"), headers={"Range": "bytes=0-0"})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
    return str(status) if status >= 400 else ""


async def _read_some(plan: Plan, options: Options) -> Finding:
    """Read the beginning of a file with bytes in a target; of any other file if there is none."""
    store = open_plan(plan, dataclasses.replace(options, upperdir=None))
    try:
        try:
            key, place = await _some_file(store)
            if not key:
                return Finding("target", OK, "there is no file to read")
            data = await store.get(key, 0, _READ)
        except (ReadError, StoreError) as exc:
            url = getattr(exc, "where", "")
            denied = isinstance(exc, AccessDenied)
            reason = f"{getattr(exc, 'reason', exc)} {'access denied' if denied else ''}"
            advice = advice_for(reason, str(url) or plan.url or "")
            return Finding("target", PROBLEM, redact_text(str(exc)), advice)
        where = f" ({redact_text(without_secrets(place))})" if place else ""
        return Finding("target", OK, f"{key}: {len(data):,} bytes read{where}")
    finally:
        await store.aclose()


async def _some_file(store: Store) -> tuple[str, str]:
    """Return (key, URL) of a file with bytes in a target, else (key, "") of a file, else ("", "").

    At most _LOOKED entries are examined.
    """
    some, looked, folders = "", 0, [""]
    while folders and looked < _LOOKED:
        folder = folders.pop(0)
        async for info in store.list_dir(folder):
            looked += 1
            key = join_key(folder, info.name)
            if info.kind is Kind.DIRECTORY:
                folders.append(key)
            elif info.kind is Kind.FILE and info.size != 0:
                place = await store.locate(key)
                regions = place.get("regions") or [place]
                url = next((str(one["url"]) for one in regions if isinstance(one, dict) and one.get("url")), "")
                if url:
                    return key, url
                some = some or key
            if looked >= _LOOKED:
                break
    return some, ""
