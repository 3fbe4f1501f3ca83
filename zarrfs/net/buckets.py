"""Buckets: values and listings of S3, Google Cloud Storage and Azure, requested by HttpSystem."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import AccessDenied, ReadError, TargetMissing
from zarrfs.net import identity
from zarrfs.net.credentials import Access, Credentials
from zarrfs.net.failures import BUCKET_RULE
from zarrfs.net.http import HttpSystem, web_host
from zarrfs.net.reach import Trust
from zarrfs.net.responses import Entry, Fetched, Page, System, checked_page
from zarrfs.net.services import Listed, Service
from zarrfs.net.weboptions import proxy_options

T = TypeVar("T")

_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]*")
_REFUSED = (400, 401, 403)  # S3 answers 400 if a token has expired
_PAGE_MAX = 16 << 20  # bytes of a page of a listing: 1000 keys and, on Azure, their metadata
DENIED = {  # next steps, by the name of the storage options
    "s3": "(credentials: -o s3.profile=NAME, or s3.key= and s3.secret=; public data: -o s3.anon=true)",
    "gcs": "(credentials: -o gs.token=FILE; public data: -o gs.token=anon)",
    "abfs": "(credentials: -o az.account_key= or az.sas_token=; public data: -o az.anon=true)",
}
_EMPTY_PAGES = 100  # in a row; Azure and Google send some where a listing goes on in another partition
_DOTS = re.compile(r"(?:\A|/)\.{1,2}(?:/|\Z)")


class Buckets(System):
    """The buckets of one provider with one set of options; a path is bucket/key."""

    sends_versions = True

    def __init__(self, options: Options, protocol: str, service: Service, hint: str) -> None:
        """`hint` is added to the message if access is denied."""
        self._options, self._protocol, self._service, self._hint = options, protocol, service, hint
        self._credentials = Credentials(service.make_find, options.request_timeout)
        self._client: tuple[str, HttpSystem] | None = None  # with its token; "": without one
        self._regions: dict[str, str] = {}

    @property
    def flat(self) -> bool:
        return self._service.flat

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        found = await self._value("GET", path, lambda client, url: client.fetch(url, start, stop))
        if not found.ranged and (start or stop is not None) and found.data:
            # Google decompresses a value that is stored with Content-Encoding: gzip, so these are other bytes
            raise ReadError(self.shown(path), "the server sends all of it instead of a range")
        if not found.data and found.total is None:  # S3 does not send the size with 416
            found = found._replace(total=(await self.stat(path)).size)
        return found

    async def stat(self, path: str) -> Entry:
        key = self._split(path)[1].rstrip("/")
        name, found = key.rpartition("/")[2], None
        if key and not path.endswith("/"):
            with contextlib.suppress(TargetMissing):
                found = await self._value("HEAD", path, lambda client, url: client.stat(url))
            if found is not None and (found.size or self._service.family != "abfs"):
                return found._replace(name=name)
        # a blob of no bytes may mark a directory
        below = await self._list(path, key and f"{key}{'' if found else '/'}", {})
        if found is not None:
            return Entry(name, True) if f"{key}/" in below.directories else found._replace(name=name)
        if key and not below.entries and not below.directories:
            raise TargetMissing(self.shown(path), "not found")
        return Entry(name, True)

    async def listing(self, path: str) -> list[Entry]:
        prefix = self._prefix(path)
        found, names, query, empty = list[Entry](), set[str](), {"delimiter": "/"}, True
        while True:
            page = await self._list(path, prefix, query)
            empty = empty and not page.entries and not page.directories
            found += [entry for name, entry in page.entries if name != prefix]
            names.update(name[len(prefix) :].removesuffix("/") for name in page.directories)
            listed = (*page.directories, *(name for name, _ in page.entries))
            if any("/" in name[len(prefix) :].removesuffix("/") for name in listed):
                raise ReadError(self.shown(path), "its listing names something that is not directly in it")
            if not page.more:
                break
            query = self._next(path, query, page)
        if empty and prefix and not (await self.stat(path)).directory:
            raise TargetMissing(self.shown(path), "not found")
        return found + [Entry(name, True) for name in names]

    async def page(self, path: str, after: str) -> Page:
        prefix = self._prefix(path)
        page = await self._list(path, prefix, {"after": prefix + after} if after else {})
        found = [(name[len(prefix) :], entry) for name, entry in page.entries]
        # Google lists the key after which the page begins; a directory may have a marker, an object of its own name
        found = [(name, entry) for name, entry in found if name not in ("", after)]
        return checked_page(found, after, page.more, self.shown(path))

    def shown(self, path: str) -> str:
        return without_secrets(f"{self._protocol}://{path}")

    def host(self, path: str) -> str:
        at = self._service.endpoint
        bucket = path.partition("/")[0]
        return f"{self._service.family}://{bucket}{' at ' + web_host(at) if at else ''}"

    def identity(self, path: str) -> str:
        return identity.of_store(self._service.family, path, self._service.endpoint)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client[1].aclose()

    # -- requests

    def _split(self, path: str) -> tuple[str, str]:
        bucket, _, key = path.partition("/")
        bucket = bucket.partition("@")[0]  # the container of CONTAINER@ACCOUNT
        if not _BUCKET.fullmatch(bucket):
            raise ReadError(self.shown(path), "no such bucket can be: of an access point, its alias is the bucket")
        if _DOTS.search(key):
            raise ReadError(self.shown(path), 'a key with "." or ".." between its slashes cannot be requested')
        return bucket, key

    def _prefix(self, path: str) -> str:
        """Return what the keys in a directory begin with."""
        key = self._split(path)[1].rstrip("/")
        return f"{key}/" if key else ""

    async def _value(self, method: str, path: str, ask: Callable[[HttpSystem, str], Awaitable[T]]) -> T:
        bucket, key = self._split(path)

        def url(access: Access, region: str) -> str:
            return self._service.value(method, bucket, key, access, region)

        return await self._ask(path, bucket, url, ask)

    async def _list(self, path: str, prefix: str, query: dict[str, str]) -> Listed:
        """Request a page of a listing, and the next ones while they are empty."""
        for _ in range(_EMPTY_PAGES):
            found = await self._page(path, prefix, query)
            if found.entries or found.directories or not found.more:
                return found
            query = self._next(path, query, found)
        raise ReadError(self.shown(path), f"its listing has {_EMPTY_PAGES} pages without a name")

    def _next(self, path: str, query: dict[str, str], page: Listed) -> dict[str, str]:
        """Return the query of the page after `page`."""
        if not page.token or page.token == query.get("token"):
            raise ReadError(self.shown(path), "its listing is truncated, without a token for the next page")
        return {**query, "token": page.token}

    async def _page(self, path: str, prefix: str, query: dict[str, str]) -> Listed:
        """Request a page of a listing. Raise ReadError also if the bucket does not exist."""
        bucket, _ = self._split(path)

        def url(access: Access, region: str) -> str:
            return self._service.page(bucket, prefix, query, access, region)

        try:
            body = await self._ask(path, bucket, url, lambda client, url: client.answer(url, _PAGE_MAX))
            found = await trio.to_thread.run_sync(self._service.listed, body, abandon_on_cancel=True)
        except TargetMissing as exc:
            if self._service.family != "gcs":  # the others state in XML that the bucket does not exist
                raise
            raise ReadError(self.shown(path), BUCKET_RULE) from exc
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            raise ReadError(self.shown(path), f"its listing cannot be read: {exc}") from exc
        for name in (*(name for name, _ in found.entries), *found.directories):
            if not name.startswith(prefix):
                raise ReadError(self.shown(path), f"its listing names something outside of it: {name[:200]!r}")
        return found

    async def _ask(
        self, path: str, bucket: str, url: Callable[[Access, str], str],
        ask: Callable[[HttpSystem, str], Awaitable[T]],
    ) -> T:  # fmt: skip
        where = self.shown(path)
        access = self._service.static
        if access is None:
            access = await self._credentials.get(where)
        client = await self._client_with(access.bearer)
        region = self._regions.get(bucket, "")
        try:
            if not region and (at := self._service.region_url(bucket)):
                region = await client.header(at, "x-amz-bucket-region")
                if region:
                    self._regions[bucket] = region
            try:
                return await ask(client, url(access, region))
            except ReadError as exc:
                if self._service.static is not None or exc.status not in _REFUSED:
                    raise
                other = await self._credentials.get(where, access)
                if other == access:
                    raise
                client = await self._client_with(other.bearer)
                return await ask(client, url(other, region))
        except AccessDenied as exc:
            endpoint = self.host(path).partition(" ")[2]
            rule = f"{exc.reason} {endpoint}".rstrip()
            raise AccessDenied(where, f"{rule} {self._hint or DENIED[self._service.family]}", exc.status) from exc
        except ReadError as exc:
            raise exc.at(where) from exc

    async def _client_with(self, token: str) -> HttpSystem:
        if self._client is not None and self._client[0] == token:
            return self._client[1]
        before = self._client
        headers = {**self._service.headers, **({"Authorization": f"Bearer {token}"} if token else {})}
        web: dict[str, Any] = {"headers": headers, "allow_redirects": False}
        web |= {"verify_ssl": self._service.verify, **proxy_options(self._options)}
        plain = dataclasses.replace(self._options, storage={"http": web})
        client = HttpSystem(plain, Trust(plain), of_buckets=True)
        self._client = token, client
        if before is not None:
            await before[1].aclose()  # the connections that are not in use
        return client
