"""Rules for storage options: the known protocols, the options whose values are objects, and those that name files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping

from zarrfs.config.redaction import is_secret
from zarrfs.config.urls import names
from zarrfs.config.values import did_you_mean, flag
from zarrfs.errors import UsageError

# Protocols that are known without importing fsspec, which takes half a second.
KNOWN = frozenset(
    (
        "abfs", "abfss", "az", "file", "ftp", "gcs", "gs", "http", "https", "memory", "reference", "s3", "s3a",
        "sftp", "ssh", "zip",
    )
)  # fmt: skip
_FSSPEC = (  # options of fsspec's file systems that have no effect here: they are about listings, buffers and caches
    "asynchronous", "cache_options", "cache_regions", "cache_type", "check_connection", "consistency",
    "default_block_size", "default_cache_type", "default_fill_cache", "listings_expiry_time", "max_concurrency",
    "max_paths", "requests_timeout", "skip_instance_cache", "use_listings_cache", "use_ssl", "version_aware",
)  # fmt: skip
NAMES: Mapping[str, tuple[str, ...]] = {  # options by the first name of their protocol; others are not checked
    "http": (
        "allow_redirects", "auth", "client_cert", "client_key", "cookies", "headers", "params", "proxy",
        "proxy_auth", "ssl", "token", "verify_ssl",
        "block_size", "raise_for_status", "simple_links", "size_policy", "timeout", "trust_env",  # without effect
    ),
    "s3": (
        "anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "profile", "region", "requester_pays",
        "secret", "token", "verify",
    ),
    "gcs": ("endpoint_url", "project", "requester_pays", "token"),
    "abfs": (
        "account_host", "account_key", "account_name", "anon", "client_id", "client_secret", "connection_string",
        "sas_token", "tenant_id",
    ),
}  # fmt: skip
_SSH_FILES = ("known_hosts", "client_keys")
_OBJECTS = {  # options whose value is an object (names and values), by the first name of their protocol
    "http": ("cookies", "headers", "params"),
    "s3": ("client_kwargs", "config_kwargs"),
}
_GCS_TOKENS = ("anon", "cache", "cloud", "google_default")  # values of token= that name a way to log in
_FILES = {  # options that name local files, by the first name of their protocol
    "http": ("client_cert", "client_key"), "gcs": ("token",), "sftp": _SSH_FILES, "ssh": _SSH_FILES,
}  # fmt: skip
# Options for which clients need a number; all other values are text, even if they look like a number (a password).
_NUMBERS = frozenset(
    (
        "block_size", "blocksize", "connect_timeout", "connection_timeout", "default_block_size", "keepalive_interval",
        "login_timeout", "max_concurrency", "port", "read_timeout", "replication", "requests_timeout",
        "timeout",
    )
)  # fmt: skip
# Options that are flags. Only gs.requester_pays may be other text, a project.
_FLAGS = frozenset(
    (
        "allow_redirects", "anon", "kerberos", "requester_pays", "ssl", "tls", "use_https", "use_ssl",
        "verify_ssl", "version_aware",
    )
)  # fmt: skip


def storage_value(name: str, text: str) -> object:
    """Return the value of a storage option: text, unless it is true, false or null, or begins with "{" or "[".

    Options that are always numbers or flags get one. A credential, such as the password "true", stays text.
    """
    if name in _FLAGS:
        with contextlib.suppress(ValueError):
            return flag(text)
    word = text == "null" or (text in ("true", "false") and not is_secret(name, text))
    if not (word or text[:1] in ("{", "[") or name in _NUMBERS):
        return text
    try:
        return json.loads(text)
    except RecursionError:
        raise UsageError("the value of a storage option is nested too deeply") from None
    except ValueError:
        return text


def canonical(place: str) -> str:
    """Return PROTOCOL or PROTOCOL://HOST with the first of the names of its protocol, which share their options."""
    protocol, mark, host = place.partition("://")
    return place if mark and protocol in ("http", "https") else f"{names(protocol)[0]}{mark}{host}"


def is_known(place: str) -> bool:
    """Return whether fsspec or an installed package knows the protocol of `place`, PROTOCOL or PROTOCOL://HOST."""
    protocol = place.partition("://")[0]
    return protocol in KNOWN or protocol in _installed()


def unknown_option(place: str, name: str) -> str:
    """Return the error for a storage option that no client takes; "" for others, and if the protocol has no table."""
    known = NAMES.get(names(place.partition("://")[0])[0])
    if known is None or name in known or name in _FSSPEC:
        return ""
    hint = did_you_mean(name, known) or f": there are {', '.join(known)}"
    return f"option {place}.{name}: unknown{hint}"


def check_storage(place: str, options: Mapping[str, object]) -> None:
    """Raise UsageError for an unknown protocol or option, suggesting a known one, or if a value should be an object.

    `place` is PROTOCOL or PROTOCOL://HOST.
    """
    protocol = place.partition("://")[0]
    if not is_known(place):
        hint = did_you_mean(protocol, sorted({*KNOWN, *_installed()}), 0.5)
        more = hint or ": neither fsspec nor an installed package has it"
        raise UsageError(f"option {place}.{next(iter(options), 'NAME')}: unknown protocol {protocol!r}{more}")
    family = names(protocol)[0]
    for name, value in options.items():
        if wrong := unknown_option(place, name):
            raise UsageError(wrong)
        if name == "anon" and value not in (None, True, False):
            raise UsageError(f"option {place}.{name}: expected true or false")
        is_object = value is None or isinstance(value, Mapping) or str(value).startswith("@/")
        if name in _OBJECTS.get(family, ()) and not is_object:
            raise UsageError(f'option {place}.{name}: expected names and values in JSON: {{"NAME": "VALUE"}}')


def absolute(place: str, name: str, value: object, directory: str = "") -> object:
    """Return the value of a storage option, with paths of files made absolute: a daemon works in another directory.

    Relative paths start in `directory`, by default the working directory.
    """
    if name not in _FILES.get(names(place.partition("://")[0])[0], ()):
        return value
    if isinstance(value, list):
        return [absolute(place, name, one, directory) for one in value]
    if not isinstance(value, str) or not value or value.startswith("@/") or "\0" in value:
        return value
    path = os.path.abspath(os.path.join(directory, os.path.expanduser(value)))
    return value if name == "token" and (value in _GCS_TOKENS or not os.path.isfile(path)) else path


def _installed() -> Iterator[str]:
    """Yield the protocols that fsspec or an installed package implements, and those registered in this process."""
    import fsspec
    from fsspec.registry import known_implementations

    yield from known_implementations  # includes the entry points of packages
    yield from fsspec.registry
