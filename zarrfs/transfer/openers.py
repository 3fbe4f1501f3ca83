"""Openers: from a URL to the System that serves it; each is made once, when first needed."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import trio

from zarrfs.errors import ReadError
from zarrfs.options import Options
from zarrfs.transfer import urls
from zarrfs.transfer.archives import Archive, LocalArchive, RemoteArchive, ZipSystem
from zarrfs.transfer.systems import CoroutineSystem, HttpSystem, System, ThreadSystem

if TYPE_CHECKING:
    from zarrfs.transfer.remote import RemoteFiles

# Names of one and the same protocol; the first is what its options are called, too.
_FAMILIES = (("http", "https"), ("s3", "s3a"), ("gcs", "gs"), ("abfs", "abfss", "az"), ("file", "local"))
_FAMILY = {name: family for family in _FAMILIES for name in family}
_EXTRAS = {"s3": "s3fs: pip install zarrfs[s3]", "gcs": "gcsfs: pip install zarrfs[gcs]"}
_ONE_SHOT: dict[str, Any] = {"retries": {"total_max_attempts": 1}}  # RemoteFiles repeats


class Openers:
    """The systems behind the URLs of one RemoteFiles."""

    def __init__(self, options: Options, files: RemoteFiles) -> None:
        self._options, self._files = options, files
        self._classes: dict[str, Any] = {}
        self._systems: dict[object, System] = {}
        self._lock = trio.Lock()

    async def find(self, url: str) -> tuple[System, str]:
        """(system, path in it) of `url`. ReadError for a protocol that is unknown or lacks its package."""
        protocols = urls.protocols(url)
        if len(protocols) > 1:
            return await self._archive(url, protocols[0])
        protocol = protocols[0] if protocols else "file"
        family = _FAMILY.get(protocol, (protocol,))[0]
        if family == "http":
            found = self._systems.get("http")
            return found or await self._make("http", "http", {}), url
        class_ = self._classes.get(protocol)
        if class_ is None:
            class_ = self._classes[protocol] = await trio.to_thread.run_sync(_class_of, protocol, family)
        parts = class_._get_kwargs_from_urls(url)  # host, user, ...: another server is another system
        key = family, repr(sorted(parts.items()))
        found = self._systems.get(key) or await self._make(key, protocol, parts)
        return found, class_._strip_protocol(url)

    async def aclose(self) -> None:
        """Close them all."""
        while self._systems:
            _, system = self._systems.popitem()
            await system.aclose()

    def _given(self, protocol: str) -> dict[str, Any]:
        """The options of a protocol that the user gave, under any of its names."""
        given: dict[str, Any] = {}
        for name in (*_FAMILY.get(protocol, ()), protocol):
            given.update(self._options.storage.get(name, {}))
        return given

    async def _make(self, key: object, protocol: str, parts: dict[str, Any]) -> System:
        async with self._lock:
            if key not in self._systems:
                family = _FAMILY.get(protocol, (protocol,))[0]
                options = {**parts, **self._given(protocol)}
                fs = await trio.to_thread.run_sync(_file_system, protocol, family, options)
                self._systems[key] = self._wrap(fs, protocol)
            return self._systems[key]

    def _wrap(self, fs: Any, protocol: str) -> System:
        timeout, limit = self._options.request_timeout, self._options.document_limit
        if protocol in ("http", "https"):
            return HttpSystem(fs, timeout, limit)
        if fs.async_impl:
            return CoroutineSystem(fs, protocol, timeout, limit)
        return ThreadSystem(fs, protocol, timeout, limit)

    async def _archive(self, url: str, protocol: str) -> tuple[System, str]:
        head, _, archive = url.partition("::")
        if protocol != "zip":
            raise ReadError(urls.without_secrets(url), f"{protocol} before '::' is not supported, only zip")
        path = head.partition("://")[2].strip("/")
        async with self._lock:
            system = self._systems.get(archive)
            if system is None:
                found = urls.protocols(archive)
                opened: Archive
                if not found or found in (["file"], ["local"]):
                    opened = LocalArchive(self._files.local, os.path.abspath(urls.file_path(archive)))
                else:
                    opened = RemoteArchive(self._files.below(), archive)
                system = self._systems[archive] = ZipSystem(opened, self._options.document_limit)
            return system, path


def _class_of(protocol: str, family: str) -> Any:
    """fsspec's class of a protocol; imports what it needs, so not on the loop."""
    import fsspec

    try:
        return fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ReadError(f"{protocol}://", f"the protocol {protocol!r} is unknown") from None
    except ImportError as exc:
        hint = _EXTRAS.get(family, str(exc))
        raise ReadError(f"{protocol}://", f"{protocol} needs the package {hint}") from None


def _file_system(protocol: str, family: str, options: dict[str, Any]) -> Any:
    if family == "s3":
        options["config_kwargs"] = {**_ONE_SHOT, **options.get("config_kwargs", {})}
    try:
        fs = _class_of(protocol, family)(**options, skip_instance_cache=True, use_listings_cache=False)
    except Exception as exc:
        raise ReadError(f"{protocol}://", f"cannot be used with these options: {exc}") from exc
    if family == "s3":
        fs.retries = 1
        importlib.import_module("aiobotocore.session")  # later it would hold up the loop of all requests
    return fs
