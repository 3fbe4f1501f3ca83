"""Trust: what the targets of a document may reach, and which servers get the user's credentials.

A local document may name anything; one from the network is not trusted. docs/security.md has the rules.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import split_chain, without_secrets
from zarrfs.errors import AccessDenied, ReadError

LOCAL = ("file", "local")
# Protocols that are enabled by default.
PROTOCOLS = frozenset(
    ("file", "local", "memory", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "zip")
)
# Protocols that are never enabled: they run code from documents, write to disk unasked, or open any other protocol.
FORBIDDEN = frozenset(
    (
        "reference", "simplecache", "filecache", "blockcache", "cached", "generic", "dir", "asyncwrapper",
        "async_wrapper",
    )
)  # fmt: skip
# Options of the connection, without credentials. A place that the user did not name gets only these.
_CONNECTION: dict[str, tuple[str, ...]] = {
    "http": ("proxy", "proxy_auth", "ssl", "verify_ssl", "timeout", "allow_redirects"),
    "s3": ("endpoint_url", "region", "verify", "config_kwargs"),
    "gcs": ("endpoint_url",),
    "abfs": ("account_name", "account_host"),
}  # fmt: skip
_S3_CLIENT = ("endpoint_url", "region_name", "verify")  # such options within s3.client_kwargs=
_ANONYMOUS: dict[str, dict[str, Any]] = {
    "s3": {"anon": True},
    "gcs": {"token": "anon"},
    "abfs": {"anon": True},
}


class Given(NamedTuple):
    """Options of the user for one URL; without credentials unless `personal`."""

    options: dict[str, Any]
    personal: bool


class Trust:
    """The rules for the targets of one document, which came from the URL `origin`; "" for a local document."""

    def __init__(self, options: Options, origin: str = "") -> None:
        self._options = options
        self._origin = split_chain(origin)[-1]  # of a chain: where the archive is
        here = not self._origin or (urls.protocols(self._origin) or LOCAL)[0] in (*LOCAL, "memory")
        self.remote = not here

    def admit(self, protocol: str, link: str, shown: str) -> None:
        """Raise AccessDenied if targets may not use `protocol`, that of the URL `link` (of a chain, one of its links).

        `shown` names the target in the error.
        """
        allowed = self._options.allow
        if protocol == "memory" and self.remote and not self._allows("memory"):
            raise AccessDenied(shown, "a set from the network reaches no memory: URL (-o allow=memory)")
        enabled = protocol in PROTOCOLS or protocol in allowed
        if not enabled:
            at = _place(link)
            enabled = at in self._named or (self.remote and at == self._own != "")
        if not enabled and not self.remote:
            enabled = protocol in self._options.storage
        if protocol in FORBIDDEN or not enabled:
            hint = "" if protocol in FORBIDDEN else f" (-o allow={protocol})"
            raise AccessDenied(shown, f"the protocol {protocol!r} is not enabled for targets{hint}")

    def local_roots(self, base: str) -> tuple[tuple[str, ...] | None, str]:
        """Return (the directories beneath which local targets must be, or None for any; the rule, for messages).

        `base` is the directory or URL against which relative targets are resolved.
        """
        roots: tuple[str, ...] = self._options.allow_path
        if os.geteuid() == 0 and self._options.allow_other:
            return roots, "a mount by root for others reaches local files only beneath -o allow_path=DIR"
        if not roots and (not self.remote or self._allows("file")):
            return None, ""
        if self.remote and base.startswith("/"):
            roots += (os.path.realpath(base),)
        if not roots:
            return roots, "a set from the network reaches no local file (-o allow=file, or allow_path=DIR)"
        return roots, f"lies not beneath {' or '.join(roots)} (-o allow_path=DIR)"

    def given(self, url: str, redirected: bool = False) -> Given:
        """Return the options for `url` (not a chain). `redirected`: another server has redirected to it.

        Raise ReadError if `url` is invalid.
        """
        protocol = url.partition("://")[0].lower()
        family = urls.names(protocol)[0]
        wide = dict(self._options.storage.get(family, {}))
        try:
            at = urls.place(url)
        except ValueError as exc:
            raise ReadError(without_secrets(url), f"not a URL: {exc}") from None
        named = self._named.get(at)
        stranger = self.remote or redirected
        if stranger and named is None and at not in (self._own, self._base) and not self._allows("credentials"):
            return Given(_impersonal(family, wide), False)
        return Given({**wide, **(named or {})}, True)

    def must_be_public(self, place: str) -> bool:
        """Return whether connections to this server may lead to public addresses only."""
        return self.remote and not self._allows("private") and place not in (self._own, self._base)

    def _allows(self, what: str) -> bool:
        return what in self._options.allow or "all" in self._options.allow

    @functools.cached_property
    def _own(self) -> str:
        """The place of the origin."""
        return _place(self._origin) if self.remote else ""

    @functools.cached_property
    def _base(self) -> str:
        """The place that the user named for relative targets."""
        return _place(self._options.base or "")

    @functools.cached_property
    def _named(self) -> dict[str, dict[str, Any]]:
        """The storage options by place, for the places that have options of their own."""
        found: dict[str, dict[str, Any]] = {}
        for name, options in self._options.storage.items():
            if "://" in name and (at := _place(name)):
                found.setdefault(at, {}).update(options)
        return found


def _place(url: str) -> str:
    """Return urls.place(url); "" for a path, a chain or an invalid URL."""
    try:
        return urls.place(url) if "://" in url and len(split_chain(url)) == 1 else ""
    except ValueError:
        return ""


def _impersonal(family: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` without credentials."""
    found = {name: value for name, value in options.items() if name in _CONNECTION.get(family, ())}
    client = options.get("client_kwargs")
    if isinstance(client, Mapping) and family == "s3":
        found["client_kwargs"] = {name: value for name, value in client.items() if name in _S3_CLIENT}
    return {**found, **_ANONYMOUS.get(family, {})}
