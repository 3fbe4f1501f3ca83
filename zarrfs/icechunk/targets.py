"""Reader of the chunks of an Icechunk repository: in its own files, or virtual chunks in other files.

A target in the index is a URL; for files of the repository, it is relative. If the repository records the version of a
virtual chunk's file, the URL is followed by a line with the ETag and a line with the time of the last change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import AccessDenied, ReadError, TargetChanged
from zarrfs.net.responses import Entry
from zarrfs.store.targets import Targets
from zarrfs.system.buffers import Buffer
from zarrfs.system.localfiles import LocalFiles

_REMEMBERED = 65_536  # targets whose compared version is cached


def target(url: str, tag: str | None, changed: int) -> str:
    """Return a target whose file must have the ETag `tag`, and no change after `changed` (seconds since 1970).

    A condition that is None or 0 does not apply.
    """
    return f"{url}\n{tag or ''}\n{changed or ''}" if tag or changed else url


def _parts(target: str) -> tuple[str, str, int]:
    url, _, rest = target.partition("\n")
    tag, _, changed = rest.partition("\n")
    return url, tag, int(changed) if changed.isdigit() else 0


class RepositoryTargets(Targets):
    """A reader of the chunks of the repository at `base`.

    The rules for targets of reference sets (net/reach.py) decide which virtual chunks may be read. For a refused one,
    read() raises a plain ReadError in place of AccessDenied, as for any chunk that cannot be read. Files of the
    repository itself may be read even if local targets are restricted, because the user named the repository.
    """

    def __init__(self, options: Options, base: str, origin: str = "") -> None:
        super().__init__(options, base, origin)
        roots, rule = self._trust.local_roots(self._base)
        if roots is not None and self._base.startswith("/"):
            self.local = LocalFiles((*roots, os.path.realpath(self._base)), rule)
        self._compared: LRU[str, Entry | None] = LRU(_REMEMBERED)  # by target: its version; None for a local file

    async def read(self, url: str, offset: int, length: int, low: int, high: int) -> Buffer:
        try:
            if "\n" not in url:
                return await super().read(url, offset, length, low, high)
            entry = self._compared[url] if url in self._compared else await self._compare(url)
            plain = _parts(url)[0]
            if entry is None:
                return await super().read(plain, offset, length, low, high)
            remote = self._remotely()
            system, path = await remote.find(plain)
            return await remote.read_at(system, path, offset, length, low, high, entry)
        except AccessDenied as exc:
            raise ReadError(exc.where, exc.reason) from exc

    async def prefetch(self, wanted: Sequence[tuple[str, int, int]]) -> None:
        # a target whose version was not compared yet is not fetched ahead: its first reader compares the version
        await super().prefetch([one for one in wanted if "\n" not in one[0]])
        blocks = []
        for url, low, high in wanted:
            entry = self._compared.get(url) if "\n" in url else None
            if entry is not None:
                remote = self._remotely()
                system, path = await remote.find(_parts(url)[0])
                blocks.append(remote.first_block(system, path, low, high, entry))
        if blocks:
            await self._remotely().blocks.prefetch(blocks)

    async def size(self, url: str, begin: bool = False) -> int:
        return await super().size(_parts(url)[0], begin)

    def resolve(self, url: str, shown: bool = True) -> str:
        return super().resolve(_parts(url)[0], shown)

    async def _compare(self, url: str) -> Entry | None:
        """Return the version of a target; None for a local file.

        Raise TargetChanged if it is not the version that the repository records, and ReadError if no read could
        confirm that the bytes are of this version.
        """
        plain, tag, changed = _parts(url)
        path, remote = await self._find(plain)
        if path is not None:
            await self.local.size(path)  # pins the version, so that a later change raises TargetChanged
            status = await trio.to_thread.run_sync(os.stat, path)
            found_tag = f"{status.st_ino:x}-{status.st_mtime_ns // 1000:x}-{status.st_size:x}"  # as object_store does
            _check(path, tag, changed, found_tag, status.st_mtime_ns)
            return self._compared.put(url, None)
        files = self._remotely()
        system, where = await files.find(remote)
        if not (system.immutable or system.sends_versions):
            rule = "the repository records its version, and its protocol sends none with its bytes"
            raise ReadError(without_secrets(remote), rule)
        entry = await files.stat_at(system, where)
        _check(without_secrets(remote), tag, changed, entry.tag, entry.mtime_ns)
        return self._compared.put(url, entry)


def _check(where: str, tag: str, changed: int, found_tag: str | None, mtime_ns: int | None) -> None:
    if tag and (found_tag is None or found_tag.removeprefix("W/").strip('"') != tag.removeprefix("W/").strip('"')):
        found = "no ETag" if found_tag is None else f"the ETag {found_tag}"
        raise TargetChanged(where, f"has {found}; the repository was written for {tag}")
    if changed and (mtime_ns is None or mtime_ns // 1_000_000_000 > changed):
        raise TargetChanged(where, "has changed since the repository was written (its time of change says so)")
