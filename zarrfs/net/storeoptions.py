"""Translation of options of fsspec's object stores for obstore: options that are not fully understood are refused.

Ignoring an option could mean other bytes, another server or other credentials. So fsspec's client serves the URL then,
and the reason is logged. Sources: the parameters of s3fs, gcsfs and adlfs; the configuration keys of obstore;
botocore's order of credentials and its configuration file.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zarrfs.config.urls import BUCKETS
from zarrfs.net.identity import aws_profile, connection_string

# Environment variables that name proxies; clients interpret them differently.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# Options about how fsspec's file systems list, write and buffer, which do not affect the read of a range.
_INDIFFERENT = frozenset(
    (
        "asynchronous", "batch_size", "blocksize", "cache_regions", "cache_timeout", "check_connection", "consistency",
        "default_block_size", "default_cache_type", "default_fill_cache", "dircache", "listings_expiry_time",
        "max_concurrency", "max_paths", "project", "requests_timeout", "secure_serialize", "skip_instance_cache",
        "use_listings_cache",
    )
)  # fmt: skip
_AWS_CLIENT = {
    "endpoint_url": "endpoint_url", "region_name": "region", "aws_access_key_id": "key",
    "aws_secret_access_key": "secret", "aws_session_token": "token", "use_ssl": "use_ssl",
}  # fmt: skip
_AWS_FILE = ("endpoint_url", "services", "s3", "use_dualstack_endpoint", "use_fips_endpoint", "ca_bundle")
# Variables that obstore and botocore interpret in the same way, or that only one of them reads.
_AWS_HARMLESS = frozenset(
    (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
        "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3", "AWS_EC2_METADATA_DISABLED", "AWS_RETRY_MODE", "AWS_MAX_ATTEMPTS", "AWS_PAGER",
        "AWS_EXECUTION_ENV", "AWS_SDK_LOAD_CONFIG", "AWS_STS_REGIONAL_ENDPOINTS", "AWS_ROLE_ARN",
        "AWS_ROLE_SESSION_NAME", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    )
)  # fmt: skip
_GOOGLE_HARMLESS = frozenset(("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"))
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")  # a bucket that can be part of a host name


class Unserved(Exception):
    """obstore cannot serve a URL in the way in which fsspec's client would; the text is the reason."""


class ObstoreConfig(NamedTuple):
    """The configuration with which obstore reaches a bucket."""

    config: dict[str, Any]
    client: dict[str, Any]


def proxied() -> str:
    """Return the environment variable that names a proxy, or ""."""
    return next((name for name in os.environ if name.lower() in _PROXIES and os.environ[name]), "")


def configuration(protocols: tuple[str, ...]) -> dict[str, Any]:
    """Return the options that fsspec's configuration files and environment variables set for these protocols."""
    directory = os.environ.get("FSSPEC_CONFIG_DIR", os.path.expanduser("~/.config/fsspec"))  # as in fsspec.config
    given = os.path.isdir(directory) or any(name.startswith("FSSPEC") for name in os.environ)
    if not given and "fsspec.config" not in sys.modules:
        return {}  # importing fsspec takes longer than a request

    import fsspec.config

    found: dict[str, Any] = {}
    for name in reversed(protocols):
        found.update(fsspec.config.conf.get(name) or {})
    return found


def bucket(family: str, options: Mapping[str, Any], name: str) -> ObstoreConfig:
    """Translate fsspec's options for the bucket `name` to those of obstore. Raise Unserved if that is not possible."""
    if (variable := proxied()) and family in BUCKETS:
        raise Unserved(f"{variable} is set")
    known = {name: value for name, value in options.items() if name not in _INDIFFERENT}
    translate: dict[str, Callable[[dict[str, Any], str], ObstoreConfig]] = {"s3": _s3, "gcs": _gcs, "abfs": _azure}
    found = translate[family](known, name)
    if known:
        raise Unserved(f"option {family}.{min(known)} is for fsspec's client")
    return found


# -- S3


def _s3(options: dict[str, Any], name: str) -> ObstoreConfig:
    """Translate `options` of s3fs, and remove those that were translated."""
    _merge_client(options)
    if options.pop("s3_additional_kwargs", None) not in (None, {}):
        raise Unserved("option s3.s3_additional_kwargs is for fsspec's client")
    style = _addressing(options.pop("config_kwargs", None) or {})
    profile = _profile(options.pop("profile", None))
    endpoint = str(options.pop("endpoint_url", None) or os.environ.get("AWS_ENDPOINT_URL_S3")
                   or os.environ.get("AWS_ENDPOINT_URL") or "")  # fmt: skip
    plain = endpoint.startswith("http:")  # then no certificates are checked
    _check_environment("AWS_", _AWS_HARMLESS | ({"AWS_CA_BUNDLE"} if plain else set()))
    if os.environ.get("REQUESTS_CA_BUNDLE") and not plain:
        raise Unserved("REQUESTS_CA_BUNDLE is set")
    secure = options.pop("use_ssl", True)
    if secure is not True and not endpoint:
        raise Unserved("option s3.use_ssl is for fsspec's client")
    config = _s3_credentials(options, profile)
    region = options.pop("region", None) or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = region or profile.get("region")
    config["region"] = str(region or "us-east-1")
    config["request_payer"] = bool(options.pop("requester_pays", False))
    if not endpoint and config["region"].startswith(("cn-", "us-iso")):
        raise Unserved(f"region {config['region']}")
    if endpoint and style == "virtual":
        raise Unserved("addressing_style=virtual with an endpoint")
    config["virtual_hosted_style_request"] = not endpoint and style != "path" and bool(_BUCKET.fullmatch(name))
    if endpoint:
        config["endpoint"] = _endpoint(endpoint)
    return ObstoreConfig({**config, "bucket": name}, {"allow_http": plain})


def _merge_client(options: dict[str, Any]) -> None:
    """Merge client_kwargs= and aliases into `options`, under their names in s3fs."""
    client = options.pop("client_kwargs", None) or {}
    for name, value in client.items():
        if name not in _AWS_CLIENT:
            raise Unserved(f"option s3.client_kwargs has {name}, for fsspec's client")
        options.setdefault(_AWS_CLIENT[name], value)
    for here, there in (("username", "key"), ("password", "secret")):
        if here in options:
            options.setdefault(there, options.pop(here))


def _addressing(config: Mapping[str, Any]) -> str:
    config = dict(config)
    config.pop("retries", None)
    config.pop("max_pool_connections", None)
    of_s3 = dict(config.pop("s3", None) or {})
    style = of_s3.pop("addressing_style", "auto")
    if config or of_s3:
        raise Unserved("option s3.config_kwargs is for fsspec's client")
    return str(style)


def _profile(name: object) -> dict[str, str]:
    """Return the settings of an AWS profile in botocore's files; {} if there are none."""
    chosen = aws_profile(name) or "default"
    found: dict[str, str] = {}
    for variable, usual, prefix in (
        ("AWS_CONFIG_FILE", "~/.aws/config", "profile "),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", ""),
    ):
        file = configparser.RawConfigParser()
        try:
            file.read(os.path.expanduser(os.environ.get(variable) or usual), "utf-8")
        except (configparser.Error, ValueError, OSError):
            raise Unserved(f"the file of {variable} cannot be read") from None
        for section in (chosen, prefix + chosen):
            found.update(file[section] if file.has_section(section) else {})
    special = next((entry for entry in _AWS_FILE if entry in found), "")
    if special:
        raise Unserved(f"profile {chosen} has {special}")
    if name:
        found["named"] = chosen
    return found


def _s3_credentials(options: dict[str, Any], profile: Mapping[str, str]) -> dict[str, Any]:
    """Return keys from options, environment or files. Raise Unserved for other credentials (a role, ...)."""
    given = {name: options.pop(name, None) for name in ("key", "secret", "token")}
    if options.pop("anon", False):
        return {"skip_signature": True}
    environment = {name: os.environ.get(variable) for name, variable in (
        ("key", "AWS_ACCESS_KEY_ID"), ("secret", "AWS_SECRET_ACCESS_KEY"), ("token", "AWS_SESSION_TOKEN"),
    )}  # fmt: skip
    file = {name: profile.get(entry) for name, entry in (
        ("key", "aws_access_key_id"), ("secret", "aws_secret_access_key"), ("token", "aws_session_token"),
    )}  # fmt: skip
    for keys in (given, {} if "named" in profile else environment, file):
        if keys.get("key") and keys.get("secret"):
            found: dict[str, Any] = {"access_key_id": keys["key"], "secret_access_key": keys["secret"]}
            # without a token, obstore would take that of the environment, which belongs to other keys
            if not keys.get("token") and os.environ.get("AWS_SESSION_TOKEN"):
                raise Unserved("AWS_SESSION_TOKEN is set, and belongs to other keys")
            if keys.get("token"):
                found["session_token"] = keys["token"]
            return {**found, "skip_signature": False}
        if any(keys.values()):
            raise Unserved("half of a pair of keys")
        if "role_arn" in profile or "sso_session" in profile or "credential_process" in profile:
            break
    raise Unserved("no keys are written down: fsspec's client finds what else grants access")


# -- Google Cloud Storage


def _gcs(options: dict[str, Any], name: str) -> ObstoreConfig:
    token = options.pop("token", None)
    endpoint = str(options.pop("endpoint_url", None) or os.environ.get("STORAGE_EMULATOR_HOST") or "")
    if endpoint and "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    if options.pop("requester_pays", False):
        raise Unserved("option gcs.requester_pays is for fsspec's client")
    _check_environment("GOOGLE_", _GOOGLE_HARMLESS)
    if os.environ.get("FETCH_GCS_BASE_URL"):
        raise Unserved("FETCH_GCS_BASE_URL is set")
    if token == "anon":
        config: dict[str, Any] = {"skip_signature": True}
    else:
        config = {"service_account": _service_account(token), "skip_signature": False}
    config["base_url"] = _endpoint(endpoint) if endpoint else "https://storage.googleapis.com"
    return ObstoreConfig({**config, "bucket": name}, {"allow_http": endpoint.startswith("http:")})


def _service_account(token: object) -> str:
    """Return the file of a service account. Raise Unserved for other kinds of credentials."""
    file = token if isinstance(token, str) and "/" in token else ""
    if token in (None, "google_default"):
        file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    try:
        with open(file, "rb") as opened:
            if json.load(opened).get("type") == "service_account":
                return file
    except (OSError, ValueError, AttributeError):
        pass
    raise Unserved("no service account's file is named: fsspec's client finds what else grants access")


# -- Azure


def _azure(options: dict[str, Any], name: str) -> ObstoreConfig:
    _check_environment("AZURE_", frozenset())
    given = connection_string(str(options.pop("connection_string", None) or ""))
    account = str(options.pop("account_name", None) or given.get("accountname") or "")
    key = options.pop("account_key", None) or given.get("accountkey")
    sas = options.pop("sas_token", None) or given.get("sharedaccesssignature")
    host = options.pop("account_host", None)
    anonymous = options.pop("anon", None)
    if not account:
        raise Unserved("no account is named")
    endpoint = str(f"https://{host}" if host else given.get("blobendpoint") or "")
    if not endpoint and given.get("endpointsuffix", "core.windows.net") != "core.windows.net":
        endpoint = f"https://{account}.blob.{given['endpointsuffix']}"
    config: dict[str, Any] = {"account_name": account}
    if key:
        config["account_key"] = key
    elif sas:
        config["sas_key"] = str(sas).lstrip("?")
    elif anonymous:
        config["skip_signature"] = True
    else:  # adlfs tries the credentials of the machine in turn, and works without any if there are none
        raise Unserved("neither a key is written down nor anon: fsspec's client finds what else grants access")
    if endpoint:
        config["endpoint"] = _endpoint(endpoint)
    return ObstoreConfig({**config, "container_name": name}, {"allow_http": endpoint.startswith("http:")})


def _check_environment(prefix: str, harmless: frozenset[str]) -> None:
    names = (name for name, value in os.environ.items() if value and name.startswith(prefix))
    if found := sorted(set(names) - harmless):
        raise Unserved(f"{found[0]} is set")


def _endpoint(url: str) -> str:
    if not re.fullmatch(r"https?://[A-Za-z0-9._\-]+(:\d+)?(/[A-Za-z0-9._~\-]+)*/?", url):
        raise Unserved("an endpoint of an unusual kind")
    return url.rstrip("/")
