"""The interfaces of S3, Google Cloud Storage and Azure: URLs of values and listings, signatures, answers. No I/O.

Options have the names of fsspec's file systems (s3fs, gcsfs, adlfs). Sources: "AWS Signature Version 4: using query
parameters" and ListObjectsV2 of S3; "Objects: list" of Google's JSON interface; "Create a service SAS" and "List
Blobs" of Azure.
"""

from __future__ import annotations

import abc
import base64
import datetime
import functools
import gzip
import hashlib
import hmac
import json
import os
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from zarrfs.config.storage import unknown_option
from zarrfs.net import credentials
from zarrfs.net.credentials import Access, Find
from zarrfs.net.responses import Entry, http_date

PAGE = 1000  # keys of a listing in one request
_MINUTE = 60
_VALID = 3600  # seconds for which a signed URL grants access
_S3_CLIENT = {"endpoint_url": "endpoint_url", "region_name": "region", "verify": "verify"}  # in client_kwargs=
_IN_ENVIRONMENT = ("account_key", "sas_token", "connection_string")
_AZURE_VERSION = "2020-12-06"
_LABEL = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")  # a bucket that can be part of a host name
_ACCOUNT = re.compile(r"[A-Za-z0-9-]+")


class Listed(NamedTuple):
    """A page of a listing: keys, directories (keys up to a "/"), and the token of the next page, if there is one."""

    entries: list[tuple[str, Entry]]
    directories: list[str]
    more: bool
    token: str


class Service(abc.ABC):
    """The buckets of one provider with one set of options."""

    family: str
    flat = True  # a listing can begin after any key
    headers: Mapping[str, str] = {}  # of each request
    verify = True  # check certificates
    endpoint: str  # "": that of the provider
    static: Access | None  # the access that options name; None: make_find() finds it
    _listing: Mapping[str, str]  # the query of each page of a listing
    _names: Mapping[str, str]  # how such a query spells "after" and "token"

    @abc.abstractmethod
    def make_find(self) -> Find:
        """Return the function that finds the access, for Credentials."""

    def region_url(self, bucket: str) -> str:
        """Return the URL whose answer names the region of a bucket; "": the region is known, or there are none."""
        return ""

    def value(self, method: str, bucket: str, key: str, access: Access, region: str) -> str:
        """Return the URL of a value."""
        return self._url(method, bucket, f"/{_path(key)}", {}, access, region)

    def page(self, bucket: str, prefix: str, query: Mapping[str, str], access: Access, region: str) -> str:
        """Return the URL of a page of a listing; `query` has delimiter=, and after= or token=."""
        asked = {self._names.get(name, name): value for name, value in query.items()}
        return self._url("GET", bucket, "", {**self._listing, "prefix": prefix, **asked}, access, region)

    @abc.abstractmethod
    def _url(self, method: str, bucket: str, path: str, query: dict[str, str], access: Access, region: str) -> str:
        """Return the URL of a path in a bucket; of the bucket itself if `path` is empty."""

    @abc.abstractmethod
    def listed(self, body: bytes) -> Listed:
        """Parse a page. Raise ValueError if it is none."""


class S3(Service):
    """Amazon S3 and its like."""

    family = "s3"
    _listing: Mapping[str, str] = {"list-type": "2", "encoding-type": "url", "max-keys": str(PAGE)}
    _names: Mapping[str, str] = {"after": "start-after", "token": "continuation-token"}

    def __init__(self, options: Mapping[str, Any]) -> None:
        client = options.get("client_kwargs") or {}
        if unknown := client.keys() - _S3_CLIENT.keys():
            raise ValueError(f"s3.client_kwargs: {min(unknown)} is unknown: there are {', '.join(_S3_CLIENT)}")
        given = {**{_S3_CLIENT[name]: value for name, value in client.items()}, **options}
        _check("s3", given)
        style = _addressing(given.get("config_kwargs") or {})
        environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        self.endpoint = _endpoint(given.get("endpoint_url") or environment)
        if given.get("verify") not in (None, True, False):
            raise ValueError("s3.verify= is true or false; a file with certificates is named by $SSL_CERT_FILE")
        self.verify = given.get("verify") is not False
        self._region = str(given.get("region") or "")
        self._virtual = style == "virtual" or (style != "path" and not self.endpoint)
        self._pays = bool(given.get("requester_pays"))
        self._profile = given.get("profile")
        environment = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        self._usual = environment or credentials.region_of_s3(self._profile) or "us-east-1"
        keys = [str(given.get(name) or "") for name in ("key", "secret", "token")]
        self.static = Access() if given.get("anon") else Access(*keys) if any(keys) else None
        if any(keys) and not (keys[0] and keys[1]):
            raise ValueError("s3.key= and s3.secret= belong together, and s3.token= to them")

    def make_find(self) -> Find:
        return credentials.of_s3(self._profile)

    def region_url(self, bucket: str) -> str:
        # the partitions of China and of governments do not know the buckets of each other
        known = self.endpoint or self._region or self._usual.startswith(("cn-", "us-gov-", "us-iso"))
        # each region knows it; from within a network, maybe only the servers of its own region can be reached
        return "" if known else f"https://s3.{self._usual}.amazonaws.com/{bucket}"

    def value(self, method: str, bucket: str, key: str, access: Access, region: str) -> str:
        key, _, version = key.partition("?versionId=")  # as in s3fs
        return self._url(method, bucket, f"/{_path(key)}", {"versionId": version} if version else {}, access, region)

    def _url(self, method: str, bucket: str, path: str, query: dict[str, str], access: Access, region: str) -> str:
        region = self._region or region or self._usual
        suffix = ".cn" if region.startswith("cn-") else ""
        base = self.endpoint or f"https://s3.{region}.amazonaws.com{suffix}"
        if self._virtual and _LABEL.fullmatch(bucket):
            scheme, _, rest = base.partition("://")
            url = f"{scheme}://{bucket}.{rest}{path or '/'}"
        else:
            url = f"{base}/{bucket}{path}"
        if self._pays:
            query["x-amz-request-payer"] = "requester"
        return signed(method, url, query, access, region) if access.key else _with(url, query)

    def listed(self, body: bytes) -> Listed:
        root = _xml(body, "ListBucketResult")
        encoded = root.findtext("{*}EncodingType") == "url"
        text: Callable[[str], str] = _unquoted if encoded else str
        found, directories = [], []
        for child in root:
            kind = _kind(child)
            if kind == "Contents":
                about = {_kind(part): part.text or "" for part in child}
                when = datetime.datetime.fromisoformat(about["LastModified"]).timestamp()
                key, tag = text(about["Key"]), about.get("ETag") or None
                found.append((key, _entry(key, about["Size"], when, tag)))
            elif kind == "CommonPrefixes":
                directories.append(text(child.findtext("{*}Prefix") or ""))
        more = root.findtext("{*}IsTruncated") == "true"
        return Listed(found, directories, more, root.findtext("{*}NextContinuationToken") or "")


class Google(Service):
    """Google Cloud Storage."""

    family = "gcs"
    _listing: Mapping[str, str] = {"maxResults": str(PAGE)}
    _names: Mapping[str, str] = {"after": "startOffset", "token": "pageToken"}
    # else a value that is stored with Content-Encoding: gzip is decompressed, and ranges of it are not sent
    headers: Mapping[str, str] = {"Accept-Encoding": "gzip"}

    def __init__(self, options: Mapping[str, Any]) -> None:
        _check("gcs", options)
        endpoint = str(options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST") or "")
        self.endpoint = _endpoint(endpoint if "://" in endpoint or not endpoint else f"http://{endpoint}")
        self._base = self.endpoint or "https://storage.googleapis.com"
        pays = options.get("requester_pays")
        project = pays if isinstance(pays, str) else options.get("project")
        if pays and not project:
            raise ValueError("gcs.requester_pays= needs gcs.project=")
        self._more = {"userProject": str(project)} if pays else {}
        token = options.get("token")
        self._token = None if token in (None, "google_default", "cloud", "cache") else token
        self.static: Access | None = None
        if token == "anon":
            self.static = Access()
        elif isinstance(self._token, str) and not os.path.isfile(self._token):
            self.static = Access(bearer=self._token)

    def make_find(self) -> Find:
        return credentials.of_google(self._token)

    def _url(self, method: str, bucket: str, path: str, query: dict[str, str], access: Access, region: str) -> str:
        at = f"/{bucket}{path}" if path else f"/storage/v1/b/{bucket}/o"
        return _with(self._base + at, query | self._more)

    def listed(self, body: bytes) -> Listed:
        answer = json.loads(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body)
        if not isinstance(answer, dict) or answer.get("kind") != "storage#objects":
            raise ValueError("not a list of objects")
        found = []
        for one in answer.get("items", ()):
            when = datetime.datetime.fromisoformat(one["updated"]).timestamp()
            # without a tag: those of this interface differ from those that come with the bytes
            found.append((one["name"], _entry(one["name"], one["size"], when, None)))
        token = answer.get("nextPageToken") or ""
        return Listed(found, answer.get("prefixes", []), bool(token), token)


class Azure(Service):
    """Blob storage of Azure; a bucket is a container."""

    family, flat = "abfs", False
    headers: Mapping[str, str] = {"x-ms-version": _AZURE_VERSION}
    _listing: Mapping[str, str] = {
        "restype": "container", "comp": "list", "include": "metadata", "maxresults": str(PAGE)
    }  # fmt: skip
    _names: Mapping[str, str] = {"token": "marker"}

    def __init__(self, options: Mapping[str, Any]) -> None:
        _check("abfs", options)
        self._options = options
        given = dict(options)
        anonymous = bool(options.get("anon"))
        if not anonymous and not any(map(options.get, _IN_ENVIRONMENT)):
            given |= {name: os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in _IN_ENVIRONMENT}
        text = str(given.get("connection_string") or "")
        parts = {name.strip().lower(): value for name, _, value in (part.partition("=") for part in text.split(";"))}
        named, connected = str(options.get("account_name") or ""), _account(parts)
        if named and named.lower() != connected.lower():
            parts = {}  # of another account
        account = named or connected or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or ""
        host = options.get("account_host") or f"{account}.blob.{parts.get('endpointsuffix', 'core.windows.net')}"
        endpoint = f"https://{host}" if options.get("account_host") else parts.get("blobendpoint") or f"https://{host}"
        endpoint, _, query = endpoint.partition("?")
        if not account:  # of an endpoint: https://ACCOUNT.blob.core.windows.net
            account = (urlsplit(endpoint).hostname or "").partition(".")[0]
        if not _ACCOUNT.fullmatch(account):
            raise ValueError("no account of Azure is named (-o abfs.account_name=)")
        self.endpoint = _endpoint(endpoint)
        key = str(given.get("account_key") or parts.get("accountkey") or "")
        try:
            base64.b64decode(key, validate=True)
        except ValueError:
            raise ValueError("abfs.account_key= is not a key: it is not base64") from None
        sas = str(given.get("sas_token") or parts.get("sharedaccesssignature") or query).lstrip("?")
        pairs = (pair.partition("=") for pair in sas.split("&") if pair and not (anonymous or key))
        self._sas = {name: unquote(value) for name, _, value in pairs}
        self.static = Access(account, key) if key and not anonymous else Access() if anonymous or sas else None

    def make_find(self) -> Find:
        return credentials.of_azure(self._options)

    def _url(self, method: str, bucket: str, path: str, query: dict[str, str], access: Access, region: str) -> str:
        granted = container_sas(access, bucket, int(time.time()) // _VALID) if access.secret else self._sas
        return _with(f"{self.endpoint}/{bucket}{path}", query | granted)

    def listed(self, body: bytes) -> Listed:
        root = _xml(body, "EnumerationResults")
        found, directories = [], []
        for blob in root.iterfind("Blobs/*"):
            name = blob.findtext("Name") or ""
            if _kind(blob) == "BlobPrefix":
                directories.append(name)
            elif (blob.findtext("Metadata/hdi_isfolder") or "").lower() == "true":  # of blobfuse and Hadoop
                directories.append(f"{name}/")
            else:
                when = http_date(blob.findtext("Properties/Last-Modified")) or 0.0
                tag = (blob.findtext("Properties/Etag") or "").strip('"')
                size = blob.findtext("Properties/Content-Length") or ""
                found.append((name, _entry(name, size, when, f'"{tag}"' if tag else None)))
        token = root.findtext("NextMarker") or ""
        return Listed(found, directories, bool(token), token)


SERVICES: dict[str, Callable[[Mapping[str, Any]], Service]] = {"s3": S3, "gcs": Google, "abfs": Azure}


def _path(key: str) -> str:
    return quote(key, safe="/~", errors="surrogateescape")


# -- options


def _account(parts: Mapping[str, str]) -> str:
    """Return the account of a connection string; "" if it names none."""
    if "accountname" in parts:
        return parts["accountname"]
    at = urlsplit(parts.get("blobendpoint", ""))  # https://ACCOUNT.blob.core.windows.net, or http://ADDRESS/ACCOUNT
    host = at.hostname or ""
    return host.partition(".")[0] if ".blob." in host else at.path.strip("/")


def _check(family: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that no client takes, such as one of fsspec's configuration."""
    for name in options:
        if wrong := unknown_option(family, name):
            raise ValueError(wrong)


def _addressing(config: Mapping[str, Any]) -> str:
    """Return the addressing_style of config_kwargs=, which is all that may be in it."""
    of_s3 = config.get("s3") or {}
    if config.keys() - {"s3"} or of_s3.keys() - {"addressing_style"}:
        raise ValueError('s3.config_kwargs is not {"s3": {"addressing_style": "path"}}, or "virtual"')
    return str(of_s3.get("addressing_style", "auto"))


def _endpoint(url: object) -> str:
    """Return an endpoint in the form in which its host is sent to the server, which signatures cover."""
    if not url:
        return ""
    try:
        parts = urlsplit(str(url))
        port = "" if parts.port in (None, {"http": 80, "https": 443}.get(parts.scheme)) else f":{parts.port}"
    except ValueError:
        parts, port = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ValueError("its endpoint is not http://HOST or https://HOST")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"


# -- signatures


def signed(method: str, url: str, query: Mapping[str, str], access: Access, region: str) -> str:
    """Return the URL of S3 with a query that grants access; the names in `query` are in lower case."""
    now, scope, text, key = _grant(access, region, int(time.time()) // _MINUTE)
    if query:
        text = f"{text}&{_text(query)}"
    _, _, host, path = url.split("/", 3)
    request = f"{method}\n/{path}\n{text}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    digest = hashlib.sha256(request.encode()).hexdigest()
    signature = _hmac(key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}")
    return f"{url}?{text}&X-Amz-Signature={signature.hex()}"


@functools.lru_cache(64)
def _grant(access: Access, region: str, minute: int) -> tuple[str, str, str, bytes]:
    """Return the time, scope and query of all signatures of a minute, and the key for them."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(minute * _MINUTE))
    places = now[:8], region, "s3", "aws4_request"
    scope = "/".join(places)
    query = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256", "X-Amz-Credential": f"{access.key}/{scope}", "X-Amz-Date": now,
        "X-Amz-Expires": str(_VALID), "X-Amz-SignedHeaders": "host",
    }  # fmt: skip
    if access.session:
        query["X-Amz-Security-Token"] = access.session
    return now, scope, _text(query), functools.reduce(_hmac, places, f"AWS4{access.secret}".encode())


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


@functools.lru_cache(64)
def container_sas(access: Access, container: str, hour: int) -> dict[str, str]:
    """Return the query that grants access to a container of Azure from before the `hour` (since 1970) to beyond it."""
    begin, end = (
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds * _VALID)) for seconds in (hour - 1, hour + 3)
    )
    place = f"/blob/{access.key}/{container}"
    fields = ["rl", begin, end, place, "", "", "", _AZURE_VERSION, "c", *[""] * 7]
    signature = base64.b64encode(_hmac(base64.b64decode(access.secret), "\n".join(fields))).decode()
    return {"sp": "rl", "st": begin, "se": end, "sv": _AZURE_VERSION, "sr": "c", "sig": signature}


def _text(query: Mapping[str, str]) -> str:
    """Format a query in the form that a signature covers: sorted, and quoted except for unreserved characters."""
    return "&".join(
        f"{quote(name, safe='~')}={quote(value, safe='~', errors='surrogateescape')}"
        for name, value in sorted(query.items())
    )


def _with(url: str, query: Mapping[str, str]) -> str:
    return f"{url}?{_text(query)}" if query else url


# -- answers


def _xml(body: bytes, name: str) -> ET.Element:
    if b"<!DOCTYPE" in body:
        raise ValueError("not a listing")
    try:
        root = ET.fromstring(body)
    except ET.ParseError as exc:
        raise ValueError(f"not XML: {exc}") from None
    if _kind(root) != name:  # such as <Error> or <html>, which must not pass for an empty listing
        raise ValueError(f"not a listing, but <{_kind(root)[:40]}>")
    return root


def _kind(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def _unquoted(text: str) -> str:
    return unquote(text.replace("+", " "), errors="surrogateescape")


def _entry(key: str, size: str, seconds: float, tag: str | None) -> Entry:
    name = key.rstrip("/").rpartition("/")[2]
    if key.endswith("/"):
        return Entry(name, True)
    return Entry(name, False, int(size), int(seconds) * 1_000_000_000, tag, strong=tag is not None)
