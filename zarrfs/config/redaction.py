"""Redaction of secrets: passwords in URLs, signed queries, values of storage options (docs/options.md).

All text that others may read (logs, errors, attributes, reports, ps) passes through these functions.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit, urlunsplit

HIDDEN = "***"  # in place of a value

_SEPARATOR = re.compile(r"://(?:[^/?#\[\]]*@)?\[[^\]/?#]*\]|::")
# Names of credentials, which net/identity.py leaves out of identities. _SECRET also matches names whose values are
# hidden but may decide which bytes are read (a connection string, a header of S3), so these must stay in identities.
CREDENTIALS = "token|key|secret|passw|pwd|credential|auth|session|cookie|bearer|jwt|^sas"
_SECRET = re.compile(f"{CREDENTIALS}|sig|x-amz-|x-goog-|policy|connection_string", re.IGNORECASE)
USERS = ("http", "https", "ftp", "ftps", "sftp", "ssh", "smb", "webdav", "webdavs", "dav", "davs")  # have user@host
# Each pattern takes linear time for any text: no two of its repetitions match the same characters one after the other,
# and no match is tried from the middle of what was tried before.
_PASSWORD = re.compile(r"(?<=://)[^/?#@\s:]*+:[^/?#@\s]*+@")
_PARAMETER = re.compile(r"[?&]([\w.%-]*+)=[^\s&#\"'<>`]++")
# without "key", which is a path's name in some stores
_SECRET_PARAMETER = re.compile("sig|token|secret|passw|pwd|credential|jwt|auth|session", re.IGNORECASE)
_URL = re.compile(r"(?<![A-Za-z0-9+.-])([0-9+.-]*+)([A-Za-z][A-Za-z0-9+.-]*+://[^\s\"'<>`]++)")
_MOST = 64 << 10  # characters of a foreign text that are kept
# Storage options whose values are not confidential; of all others only the name is shown.
_HARMLESS = (
    "anon", "account_name", "account_host", "allow_redirects", "endpoint_url", "host", "port", "project", "region",
    "requester_pays", "ssl", "timeout", "trust_env", "username", "verify_ssl",
)  # fmt: skip
_WELL_KNOWN = ("", "anon", "cache", "cloud", "google_default")  # values of token= that are not secret (gcsfs)


def split_chain(url: str) -> list[str]:
    """Split a chained URL into its links, outermost first; not at the "::" of an IPv6 address in brackets."""
    found, start = [], 0
    for match in _SEPARATOR.finditer(url):
        if match[0] == "::":
            found.append(url[start : match.start()])
            start = match.end()
    return [*found, url[start:]]


def without_secrets(url: str) -> str:
    """Return `url` without user:password@, and without a query or fragment that looks signed."""
    if not ("@" in url or "?" in url or "#" in url):
        return url
    shown = "::".join(_without_secrets(link) for link in split_chain(url))
    # a URL within a query, or in a text that is not a chain, may have a password as well
    return _PASSWORD.sub("", shown) if "@" in shown else shown


def _without_secrets(url: str) -> str:
    if "://" not in url or not ("@" in url or "?" in url or "#" in url):
        return url
    try:
        scheme, netloc, path, query, fragment = urlsplit(url)
    except ValueError:  # it cannot be opened, but may contain a password
        return url.partition("://")[0] + "://..."
    user, at, host = netloc.rpartition("@")
    shown = (
        scheme,
        host if at and (scheme.lower() in USERS or ":" in user) else netloc,
        path,
        "" if _signed(query) else query,
        "" if _signed(fragment) else fragment,
    )
    return url if shown == (scheme, netloc, path, query, fragment) else urlunsplit(shown)


def without_user(url: str) -> str:
    """Return `url` without user:password@. A query or fragment stays, because it may be part of the name."""
    *before, last = split_chain(url)
    scheme, mark, rest = last.partition("://")
    host, slash, path = rest.partition("/")
    return "::".join([*before, f"{without_secrets(scheme + mark + host)}{slash}{path}"])


def _signed(query: str) -> bool:
    return any(_SECRET.search(name) for name, _ in parse_qsl(query, keep_blank_values=True))


def redact_text(text: str) -> str:
    """Redact foreign text, such as a library's error: apply without_secrets() to each URL in it.

    Signatures and tokens are also hidden in a query that is quoted without its URL. A longer text is cut after a blank
    first, because half of a URL may end within its password.
    """
    if len(text) > _MOST:
        text = text[:_MOST].rpartition(" ")[0] + " ..."
    if "://" in text:
        text = _URL.sub(lambda match: match[1] + without_secrets(match[2]), text)
    return _PARAMETER.sub(_without_value, text) if "=" in text else text


def _without_value(parameter: re.Match[str]) -> str:
    return f"{parameter[0][0]}{parameter[1]}={HIDDEN}" if _SECRET_PARAMETER.search(parameter[1]) else parameter[0]


def is_secret(name: str, value: object) -> bool:
    """Return whether the value of a storage option is a secret: a key, a password, or headers that contain one.

    "@/path", the name of a file that contains the secret, is not secret.
    """
    if isinstance(value, dict):
        return any(is_secret(str(inner), one) for inner, one in value.items())
    if isinstance(value, list | tuple):
        return any(is_secret(name, one) for one in value)
    if not isinstance(value, str) or value.startswith("/") or value in _WELL_KNOWN or names_file(value):
        return False
    return bool(_SECRET.search(name)) or without_secrets(value) != value


def names_file(value: str) -> bool:
    """Return whether a value has the form "@/path": the value is then read from that file."""
    return value.startswith("@/")


def redacted_storage(name: str, text: str) -> str:
    """Return the value of a storage option, with secrets hidden."""
    if names_file(text) or (text in ("true", "false", "null") and not is_secret(name, text)):
        return text
    return without_secrets(text) if name in _HARMLESS else HIDDEN
