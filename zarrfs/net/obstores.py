"""Buckets of S3, Google Cloud Storage and Azure, read with obstore, whose client is not written in Python.

obstore serves a bucket only if it is certain to request the same bytes, with the same credentials, as fsspec's client
would. That client serves reads up to the end of a value, options that obstore does not have, and buckets whose
responses obstore has refused.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import trio

from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.config.urls import names
from zarrfs.errors import AccessDenied, ReadError, TargetMissing
from zarrfs.net import identity
from zarrfs.net.failures import certificate_refused, check_bucket, raise_for_status
from zarrfs.net.http import HttpSystem
from zarrfs.net.reach import Trust
from zarrfs.net.responses import Entry, Fetched, Page, System, Transient, checked_page
from zarrfs.net.storeoptions import Unserved, bucket, configuration
from zarrfs.net.systems import PAGE, OnLoop, store_host

log = logging.getLogger(__name__)

T = TypeVar("T")

_VERSION = 0, 12
_VALID = datetime.timedelta(hours=1)  # how long a signed URL grants access; it is used once, immediately
_STORES = 64  # buckets that have a client of obstore each; fsspec's client serves further ones
_REFUSALS = 8  # refused answers after which fsspec's client serves a bucket, even if obstore has served it before
_SETTLE = 0.1  # seconds after a request within which obstore's threads may still need the GIL
_KEY = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f]+/)*(?!\.{1,2}\Z)[^/\x00-\x1f\x7f]+")
_PLAIN = re.compile(r"[A-Za-z0-9._ =/-]*")  # keys that obstore sends unchanged as the start of a listing
_SHORT = 100  # keys: a page from this length on may be incomplete: some servers have short pages and omit the token
_MARKS = 16  # empty objects in a page that are looked up, because each may be the marker of a directory
_STATUS = re.compile(r" - Server returned non-2xx status code: (\d{3}) ?([A-Za-z' -]*)")
_MESSAGES = (
    re.compile(r'message: "([^"\n]{1,200})"'),  # of the operating system
    re.compile(r"(dns error|unexpected EOF|connection closed)", re.IGNORECASE),
)
_CERTIFICATE = re.compile(r"\bInvalidCertificate\(\s*(\w+)")  # of rustls
# Kinds of failures in the network, as object_store names them (HttpErrorKind).
_NETWORK = re.compile(r"HttpError \{\s*kind: (Connect|Request|Timeout|Interrupted|Decode)\b")


class ObstoreMismatch(ReadError):
    """obstore does not accept an answer of the server, or the server does not accept a request of obstore."""


def available() -> bool:
    """Return whether obstore is installed, in a version whose retries can be turned off."""
    import importlib.metadata
    import importlib.util

    if importlib.util.find_spec("obstore") is None:
        return False
    version = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("obstore"))  # of "0.13b1", too
    return version is not None and (int(version[1]), int(version[2])) >= _VERSION


class Unconnected(Transient):
    """No connection was made, so no request was sent."""


class _Place:
    """A bucket: obstore's client for it, or the reason why it has none."""

    def __init__(self) -> None:
        self.store: Any = None
        self.sign: Callable[[str], str | None] | None = None  # see _signer(); None: URLs are not signed
        self.signed = False  # a signed URL has served a range
        self.reason = ""
        self.proven = False  # obstore, or a signed URL, has served a range
        self.refusals = 0


class FastStore(System):
    """The buckets of one provider with one set of options; a path is bucket/key.

    obstore serves a bucket if it can. The system that `fallback` returns serves all other buckets and requests.
    """

    def __init__(
        self, options: Options, protocol: str, storage: dict[str, Any], fallback: Callable[[], Awaitable[System]],
        hint: str = "",
    ) -> None:  # fmt: skip
        self._protocol, self._storage = protocol, storage
        self._family = names(protocol)[0]
        self._endpoint = identity.endpoint(self._family, storage)
        self._fallback = fallback
        self._places: dict[str, _Place] = {}
        self._loop = OnLoop(options.request_timeout, hint)
        self._used = 0.0  # when the last request ended, on the monotonic clock
        # longer than the deadline of OnLoop, whose message says more; it ends requests that OnLoop has abandoned
        limit = f"{int(options.request_timeout * 1000) + 1000}ms"
        plain = dataclasses.replace(options, storage={"http": {"allow_redirects": False}})
        self._web = HttpSystem(plain, Trust(plain), anonymous=True)
        self._client = {"timeout": limit, "connect_timeout": limit}

    @property
    def sends_versions(self) -> bool:
        # among fsspec's clients, only the one for S3 does
        return self._family == "s3" or any(place.proven and place.store for place in self._places.values())

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        if stop is None:
            return await (await self._fallback()).fetch(path, start, stop)
        try:
            place, key = self._found(path)
            return await self._try(place, path, key, start, stop)
        except Unserved:
            return await (await self._fallback()).fetch(path, start, stop)

    async def _try(self, place: _Place, path: str, key: str, start: int, stop: int) -> Fetched:
        try:
            found = await self._signed(place, path, key, start, stop) if place.sign is not None else None
            if found is None:
                found = await self._call(path, self._get, place.store, path, key, start, stop)
        except ObstoreMismatch as exc:
            refusal: Exception = exc
        except ReadError as exc:
            # a server may deny one client what it grants to another
            if place.proven or isinstance(exc, TargetMissing):
                raise
            refusal = exc
        except Unconnected as exc:
            if place.proven:
                raise
            refusal = exc  # each client checks names, addresses and certificates by itself
        else:
            place.proven = True
            return found
        found = await (await self._fallback()).fetch(path, start, stop)
        place.refusals += 1
        if not place.store or place.refusals >= (_REFUSALS if place.proven else 1):
            if not place.reason:
                log.debug("%s: served by fsspec's client: %s", self.host(path), refusal)
            place.store, place.reason = None, str(refusal)
        return found

    async def _signed(self, place: _Place, path: str, key: str, start: int, stop: int) -> Fetched | None:
        """Fetch a range by a signed URL, without obstore; None if obstore must request it."""
        assert place.sign is not None
        url = place.sign(key)
        if url is None:
            return None
        try:
            found = await self._web.fetch(url, start, stop)
        except (AccessDenied, TargetMissing) as exc:
            if place.signed or isinstance(exc, TargetMissing):
                raise exc.at(self.shown(path)) from exc
            place.sign = None
            return None
        except ReadError as exc:
            log.debug("%s: requested by obstore: %s", self.shown(path), exc.reason)
            return None
        if not len(found.data):  # the range is beyond the end, and S3 does not send the size
            return None
        if not found.ranged:  # Google always decompresses values stored with Content-Encoding: gzip
            return None
        place.signed = True
        return found

    async def _call(self, path: str, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        try:
            return await self._loop.call(self.shown(path), function, *args)
        finally:
            self._used = time.monotonic()

    async def _get(self, store: Any, path: str, key: str, start: int, stop: int) -> Fetched:
        """Return the bytes [start, stop) by one request. Runs on asyncio's loop."""
        import obstore

        try:
            result = await obstore.get_async(store, key, options={"range": (start, stop)})
            fits = result.range[0] == start and result.range[1] <= stop
            plain = fits and not result.attributes.get("Content-Encoding")
            data = memoryview(await result.bytes_async()) if plain else memoryview(b"")
        except Exception as exc:
            if _status(exc) == 416:
                return await self._beyond(store, path, key, start)
            raise_for(exc, self.shown(path))
        if not plain:
            raise ObstoreMismatch(self.shown(path), "the server answers with another range than requested")
        found = Fetched(data, tag_of(result.meta), result.meta["size"])
        return found if start else found._replace(mtime_ns=_time_of(result.meta), html=_is_html(result))

    async def _beyond(self, store: Any, path: str, key: str, start: int) -> Fetched:
        """Return the result for a range that begins beyond the end of the value."""
        import obstore

        try:
            meta = await obstore.head_async(store, key)
        except Exception as exc:
            raise ObstoreMismatch(self.shown(path), "no such range") from exc
        if meta["size"] > start:
            raise ObstoreMismatch(self.shown(path), "no such range")
        return Fetched(b"", tag_of(meta), meta["size"])

    def _found(self, path: str) -> tuple[_Place, str]:
        """Return (place, key in it) of a path. Raise Unserved if obstore does not serve it."""
        at, key = self._split(path)
        place = self._places.get(at)
        if place is None:
            if len(self._places) >= _STORES:
                raise Unserved(f"more than {_STORES} servers")
            place = self._places[at] = _Place()
            try:
                place.store, place.sign = self._make(at)
            except Unserved as exc:
                place.reason = str(exc)
            except Exception as exc:
                log.debug("%s: obstore: %s", at, type(exc).__name__)
                place.reason = f"these options: {type(exc).__name__}"
        if place.store is None:
            raise Unserved(place.reason)
        return place, key

    def _split(self, path: str) -> tuple[str, str]:
        at, _, key = path.partition("/")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", at) or not _KEY.fullmatch(key):
            raise Unserved("a name that obstore does not have")
        return at, key

    def _make(self, at: str) -> tuple[Any, Callable[[str], str | None] | None]:
        """Return (obstore's client for a bucket, a function that signs URLs of its keys, or None)."""
        from obstore.store import AzureStore, GCSStore, S3Store

        if configuration(names(self._protocol)):
            raise Unserved(f"fsspec's configuration has options of {self._family}")
        config, client = bucket(self._family, self._storage, at)
        made: Any = {"s3": S3Store, "gcs": GCSStore, "abfs": AzureStore}[self._family]

        def store(config: dict[str, Any]) -> Any:
            return made(config=config, client_options={**self._client, **client}, retry_config={"max_retries": 0})

        return store(config), _signer(self._family, store, config)

    async def stat(self, path: str) -> Entry:
        # fsspec's client looks for names that exist but that obstore may not find
        try:
            place, key = self._found(path)
            try:
                found = await self._call(path, self._head, place.store, path, key)
                if found.size or self._family != "abfs":
                    return found
                raise Unserved("a blob of no bytes may mark a directory, by metadata that obstore does not show")
            except TargetMissing:
                if not (place.proven and self.flat and _PLAIN.fullmatch(key)):
                    raise
            if await self._call(path, self._has_below, place.store, path, key):
                return Entry(key.rpartition("/")[2], True)
            missing = True
        except (Unserved, ReadError):
            missing = False
        if missing:
            raise TargetMissing(self.shown(path), "not found")
        return self._plain(await (await self._fallback()).stat(path))

    async def _has_below(self, store: Any, path: str, key: str) -> bool:
        """Return whether there are keys below `key`, which makes it a directory."""
        import obstore

        try:
            return bool(await _first(obstore.list(store, key, chunk_size=1)))
        except Exception as exc:
            raise_for(exc, self.shown(path))

    async def _head(self, store: Any, path: str, key: str) -> Entry:
        import obstore

        try:
            meta = await obstore.head_async(store, key)
        except Exception as exc:
            raise_for(exc, self.shown(path))
        return _entry(key, meta)

    @property
    def flat(self) -> bool:
        return self._family in ("s3", "gcs")  # Azure cannot list from a given key on

    async def page(self, path: str, after: str) -> Page:
        path = path.rstrip("/")
        if _PLAIN.fullmatch(path + after):
            try:
                place, key = self._found(path)
            except Unserved:
                pass
            else:
                try:
                    found = await self._call(path, self._page, place.store, path, key, after)
                    if found is not None:
                        return found
                except ReadError as exc:
                    final = self._family == "s3" or isinstance(exc, AccessDenied | TargetMissing)
                    if place.proven and final and not isinstance(exc, ObstoreMismatch):
                        raise
                    log.debug("%s: listed by fsspec's client: %s", self.shown(path), exc)
        return await (await self._fallback()).page(path, after)

    async def _page(self, store: Any, path: str, key: str, after: str) -> Page | None:
        """Return a page; None if fsspec's client must list it. Runs on asyncio's loop."""
        import obstore

        within = after.rstrip("/") if after.endswith("/") else ""  # list this directory only, from its beginning
        prefix = f"{key}/{within}" if within else key
        begin = {"offset": f"{key}/{after}"} if after and not within else {}
        try:
            found = await _first(obstore.list(store, prefix, chunk_size=PAGE, **begin))
            more = len(found) == PAGE
            if self._family == "s3" and _SHORT <= len(found) < PAGE:
                # obstore takes a page without a token for the last one, even if the server has set IsTruncated. So
                # look for a key after the last one of this page.
                more = bool(await _first(obstore.list(store, prefix, chunk_size=1, offset=found[-1]["path"])))
        except Exception as exc:
            raise_for(exc, self.shown(path))
        objects = [(meta["path"][len(key) + 1 :], meta) for meta in found]
        entries = [(name, _entry(name, meta)) for name, meta in objects]
        marks = [name for name, entry in entries if not entry.size]
        if marks:
            if len(marks) > _MARKS:
                return None
            for name in marks:  # obstore lists "a/" as "a"
                try:
                    await obstore.head_async(store, f"{key}/{name}")
                except FileNotFoundError:
                    return None
                except Exception as exc:
                    raise_for(exc, self.shown(path))
        return checked_page(entries, after, more, self.shown(path), within)

    async def listing(self, path: str) -> list[Entry] | None:
        found = await (await self._fallback()).listing(path)
        return found and [self._plain(entry) for entry in found]

    def _plain(self, entry: Entry) -> Entry:
        """Drop the tag of an entry from fsspec's client if it may differ from the tag that comes with the bytes."""
        return entry if self._family == "s3" else entry._replace(tag=None, strong=False)

    def shown(self, path: str) -> str:
        return without_secrets(f"{self._protocol}://{path}")

    def host(self, path: str) -> str:
        return store_host(self._family, path, self._endpoint)

    def identity(self, path: str) -> str:
        return identity.of_store(self._family, path, self._endpoint)

    async def aclose(self) -> None:
        await self._web.aclose()  # the fallback is closed by its owner
        self._places.clear()
        rest = self._used + _SETTLE - time.monotonic()
        if rest > 0:  # if a thread of obstore acquires the GIL while Python exits, the process aborts
            with trio.CancelScope(shield=True):
                await trio.sleep(rest)


def _signer(
    family: str, store: Callable[[dict[str, Any]], Any], config: dict[str, Any]
) -> Callable[[str], str | None] | None:
    """Return a function that makes URLs which grant access to a key, without a request; None if that is impossible.

    The function returns None for a key that it cannot sign. Anonymous requests, and those with a token in the URL,
    need no signature: their URLs differ only in the key.
    """
    import obstore

    if family == "gcs":
        if not config["skip_signature"]:
            return None  # a signature takes a millisecond, or a request
        return lambda key: f"{config['base_url']}/{config['bucket']}/{quote(key)}"
    if family == "s3":
        dummy = {"access_key_id": "none", "secret_access_key": "none", "skip_signature": False}
        own = not config["skip_signature"]
    else:
        dummy = {"account_key": "bm9uZQ==", "skip_signature": False}
        own = "account_key" in config
    query = f"?{config['sas_key']}" if "sas_key" in config else ""
    bare = {name: value for name, value in config.items() if name != "sas_key"}
    signing = store(config if own else {**bare, **dummy})

    def sign(key: str) -> str | None:
        if family == "abfs" and own and quote(key) != key:
            return None  # obstore signs the quoted key, but Azure expects a signature of the key itself
        url: str = obstore.sign(signing, "GET", key, _VALID)
        return url if own else url.partition("?")[0] + query

    return sign


async def _first(pages: Any) -> Any:
    """Return the first page, or () if there is none. With obstore, anext() with a default would raise SystemError."""
    async for page in pages:
        return page
    return ()


def store_path(protocol: str, url: str) -> str | None:
    """Return bucket/key of a URL as fsspec does; None if that takes more than removing the protocol."""
    rest = url.partition("://")[2]
    if not re.fullmatch(r"[A-Za-z0-9._-]+/[^?#\x00-\x1f]*[^/?#\x00-\x1f]", rest):
        return None
    if protocol in ("abfs", "abfss") and "." in rest.partition("/")[0]:
        return None
    return rest


def tag_of(meta: Any) -> str | None:
    """Return a validator of the value, as http.tag() does: its ETag, else its modification time."""
    found: str | None = meta["e_tag"]
    if found:
        found = found.removeprefix("W/")
        return found if found.startswith('"') else f'"{found}"'
    import email.utils

    return email.utils.format_datetime(meta["last_modified"], usegmt=True) if _time_of(meta) else None


def _time_of(meta: Any) -> int | None:
    """Return the modification time of a value in nanoseconds; None if the server sends none (1970).

    Without an ETag, return None also for the time of the answer, which servers send in place of a modification time.
    """
    seconds = int(meta["last_modified"].timestamp())
    certain = seconds and (meta["e_tag"] or seconds <= time.time() - 1)
    return seconds * 1_000_000_000 if certain else None


def _entry(key: str, meta: Any) -> Entry:
    """Convert obstore's metadata of an object to an Entry."""
    mtime_ns = int(meta["last_modified"].timestamp()) * 1_000_000_000
    return Entry(key.rpartition("/")[2], False, meta["size"], mtime_ns, tag_of(meta), strong=bool(meta["e_tag"]))


def _is_html(result: Any) -> bool:
    return "html" in str(result.attributes.get("Content-Type", ""))


def _status(exc: Exception) -> int:
    found = _STATUS.search(str(exc))
    return int(found[1]) if found else 0


def raise_for(exc: Exception, where: str) -> NoReturn:
    """Translate an exception of obstore and raise it; its message is one line, without text sent by the server."""
    text = str(exc)
    check_bucket(text, where)
    found = _STATUS.search(text)
    if found:
        raise_for_status(int(found[1]), where, found[2].strip())
    if isinstance(exc, FileNotFoundError):
        raise TargetMissing(where, "not found") from None
    if type(exc).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        raise AccessDenied(where, "permission denied") from None
    certificate = _CERTIFICATE.search(text)
    if certificate:
        raise ObstoreMismatch(where, certificate_refused(certificate[1].removesuffix("Context"))) from None
    network = _NETWORK.search(text)
    if network and "Redirect" not in text:
        cut = "IncompleteBody" in text or "IncompleteMessage" in text
        raise (Unconnected if network[1] == "Connect" else Transient)(_reason(text, network[1]), begun=cut) from None
    raise ObstoreMismatch(where, " ".join(text.partition("\n")[0].split())[:200]) from None


def _reason(text: str, kind: str) -> str:
    if kind == "Timeout":
        return "no answer in time"
    for pattern in _MESSAGES:
        if found := pattern.search(text):
            return found[1]
    return "the answer was cut off" if "IncompleteBody" in text or "IncompleteMessage" in text else "connection failed"
