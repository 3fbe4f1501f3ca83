"""Identities of values: names of their bytes, without secrets, that are the same in all processes and at all times.

The names of cached values on disk are made from identities. Two values must never share one. So in a URL only
parameters that are known to sign it are left out, and other parameters that look like secrets are replaced by digests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

from zarrfs.config.redaction import CREDENTIALS

_SECRET = re.compile(f"{CREDENTIALS}|anon|cert|^sig", re.IGNORECASE)

# Ways to sign a URL: (parameters that must all be present, parameters that belong to the signature), in lower case.
_SIGNED = (
    # AWS Signature Version 4, section "Authenticating requests: using query parameters"
    (
        {"x-amz-signature", "x-amz-credential"},
        {"x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-expires", "x-amz-signedheaders",
         "x-amz-signature", "x-amz-security-token"},
    ),
    # AWS Signature Version 2, and the older one of Google's XML API
    ({"awsaccesskeyid", "signature", "expires"}, {"awsaccesskeyid", "signature", "expires"}),
    ({"googleaccessid", "signature", "expires"}, {"googleaccessid", "signature", "expires"}),
    # Google Cloud Storage, V4 signing process
    (
        {"x-goog-signature", "x-goog-credential"},
        {"x-goog-algorithm", "x-goog-credential", "x-goog-date", "x-goog-expires", "x-goog-signedheaders",
         "x-goog-signature"},
    ),
    # CloudFront, signed URLs with a canned and with a custom policy
    ({"signature", "key-pair-id"}, {"signature", "key-pair-id", "expires", "policy"}),
    # Azure Storage, shared access signatures
    (
        {"sig", "sv", "se"},
        {"sig", "sv", "se", "st", "sp", "sr", "ss", "srt", "spr", "sip", "si", "skoid", "sktid", "skt", "ske", "sks",
         "skv"},
    ),
)  # fmt: skip


def of_web(url: str, options: Mapping[str, object]) -> str:
    """Return the identity of an HTTP URL: without user and signature, with a digest of `options` that select bytes.

    These are params= and the headers that are not credentials.
    """
    scheme, netloc, path, query, _ = urlsplit(url)
    if query:
        query = _query(query)
    chosen = {"params": options.get("params"), "headers": _public(options.get("headers"))}
    found = urlunsplit((scheme, netloc.rpartition("@")[2].lower(), path, query, ""))
    return found + _digest({name: value for name, value in chosen.items() if value})


def of_store(protocol: str, path: str, endpoint: str) -> str:
    """Return the identity of `path` (bucket/key) in an object store; `endpoint` "" is that of the provider."""
    where = f" at {of_web(endpoint, {})}" if endpoint else ""
    return f"{protocol}://{path}{where}"


def of_other(protocol: str, path: str, options: Mapping[str, object]) -> str:
    """Return the identity of `path` in a file system with `options`, such as host and user."""
    naming = _public(options)
    naming.pop("known_hosts", None)  # a local path, which may differ between machines
    return f"{protocol}://{path}{_digest(naming)}"


def _query(query: str) -> str:
    pairs = [part.partition("=") for part in query.split("&")]  # values are not decoded: "+" and "%20" may differ
    names = [unquote(name).lower() for name, _, _ in pairs]
    signing: set[str] = set()
    for marks, belonging in _SIGNED:
        if marks <= set(names):
            signing |= belonging
    kept = []
    for (name, mark, value), lower in zip(pairs, names, strict=True):
        if lower not in signing:
            secret = value and _SECRET.search(lower)
            kept.append(f"{name}{mark}{_hidden(value) if secret else value}")
    return "&".join(kept)


def _hidden(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _public(options: object) -> dict[str, object]:
    """Return options without credentials."""
    if not isinstance(options, Mapping):
        return {}
    return {str(name): value for name, value in options.items() if not _SECRET.search(str(name))}


def _digest(options: Mapping[str, object]) -> str:
    """Return " #DIGEST" for options; "" for none."""
    if not options:
        return ""
    return f" #{_hidden(repr(sorted(options.items(), key=lambda item: item[0])))}"
