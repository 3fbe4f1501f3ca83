"""Icechunk repositories as sources: detect them by their layout, and plan them with an index of one snapshot."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from typing import TYPE_CHECKING

from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.documents.plan import Plan
from zarrfs.errors import AccessDenied, ReadError, SourceError, TargetMissing, reason_of
from zarrfs.icechunk.files import MAGIC
from zarrfs.icechunk.repository import Fetch, Selected, compile_snapshot, select
from zarrfs.net.responses import System
from zarrfs.sources.fetching import run
from zarrfs.sources.index_cache import WAIT, IndexCache
from zarrfs.store.indexfile import INDEX_VERSION, IndexWriter

if TYPE_CHECKING:
    from zarrfs.store.remotefiles import RemoteFiles

KIND = "icechunk"
_LAYOUT = 5  # version of the content of indexes that this module writes
_MAIN = "refs/branch.main/ref.json"  # every repository of format 1 has it
NO_REPOSITORY = "is no Icechunk repository: neither a repo file nor refs/branch.main/ref.json there"


def is_repository(path: str) -> bool:
    """Return whether a local directory has the layout of a repository."""
    try:
        return _read(os.path.join(path, "repo"), len(MAGIC)) == MAGIC
    except OSError:
        return os.path.isfile(os.path.join(path, _MAIN)) and os.path.isdir(os.path.join(path, "snapshots"))


def plan_local(path: str, options: Options) -> Plan:
    """Plan the repository in the local directory `path` (absolute). Raise SourceError."""
    if not is_repository(path):
        raise SourceError(path, NO_REPOSITORY)

    async def fetch(name: str) -> bytes:
        where = os.path.join(path, name)
        try:
            data = _read(where, options.document_limit + 1)  # may block: nothing else runs in this child
        except (FileNotFoundError, NotADirectoryError):
            raise TargetMissing(where, "is not there") from None
        except OSError as exc:
            raise SourceError(path, reason_of(exc), name) from exc
        if len(data) > options.document_limit:
            raise SourceError(path, f"more than {options.document_limit} bytes", name)
        return data

    async def plan(_: RemoteFiles, source: str, options: Options) -> Plan:
        selected = await select(path, options, fetch, await _repo(fetch))
        place = os.path.realpath(path)
        found = Plan(path, KIND, path=path, base=path.rstrip("/") + "/")
        return await _indexed(found, place, selected, options, fetch)

    return run(path, options, plan)


def _read(path: str, most: int) -> bytes:
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
        return file.read(most)


async def plan_remote(
    remote: RemoteFiles, system: System, path: str, url: str, options: Options
) -> Plan | None:
    """Plan the repository at `url`; return None if there is none. Raise SourceError or ReadError."""

    async def fetch(name: str) -> bytes:
        where = path
        for part in name.split("/"):
            where = system.child(where, part)
        try:
            return await remote.read_all_at(system, where)
        except (NotADirectoryError, FileNotFoundError):
            raise TargetMissing(system.shown(where), "is not there") from None
        except AccessDenied as exc:
            if exc.status in options.missing_status:  # e.g. for the deletion mark, which most tags lack
                raise TargetMissing(exc.where, exc.reason, exc.status) from exc
            raise

    repo = await _repo(fetch)
    if repo is None and not await _is_older(fetch):
        return None
    shown = without_secrets(url)
    try:
        selected = await select(shown, options, fetch, repo)
        plan = Plan(shown, KIND, url=url, base=urls.directory(url), origin="" if urls.is_here(url) else shown)
        return await _indexed(plan, system.identity(path), selected, options, fetch)
    except ReadError as exc:
        raise SourceError(shown, exc.reason, exc.where) from exc


async def _repo(fetch: Fetch) -> bytes | None:
    """Return the content of the file `repo`; None if there is none, as in format 1."""
    with contextlib.suppress(TargetMissing, AccessDenied):
        content = await fetch("repo")
        return content if content.startswith(MAGIC) else None
    return None


async def _is_older(fetch: Fetch) -> bool:
    """Return whether this is a repository of format 1."""
    with contextlib.suppress(TargetMissing, AccessDenied):
        return (await fetch(_MAIN)).startswith(b"{")
    return False


async def _indexed(plan: Plan, place: str, selected: Selected, options: Options, fetch: Fetch) -> Plan:
    """Return `plan` with the index of the selected snapshot, from the cache or compiled now.

    `place` identifies the repository.
    """
    # The digest includes the place: a snapshot file only names its manifests, which differ between repositories.
    shape = repr((INDEX_VERSION, _LAYOUT, KIND, place)).encode("utf-8", "surrogateescape")
    digest = hashlib.sha256(shape + selected.content).hexdigest()
    cache = IndexCache()
    deadline = time.monotonic() + WAIT
    # blocks while another process compiles the snapshot: nothing else runs in this child
    with cache.locked(digest, deadline) as found:
        path = found[0] if found is not None else await _compile(plan, cache, digest, selected, options, fetch)
    return dataclasses.replace(
        plan, index=path, temporary=cache.temporary, mtime_ns=selected.snapshot.flushed_at * 1000,
        digest=digest, about=selected.about(),
    )  # fmt: skip


async def _compile(
    plan: Plan, cache: IndexCache, digest: str, selected: Selected, options: Options, fetch: Fetch
) -> str:
    notes = {"kind": KIND, "source": plan.source, "warnings": json.dumps([]), "snapshot": selected.snapshot.ident}
    with cache.new(plan.source) as scratch:
        with IndexWriter(scratch) as writer:
            await compile_snapshot(plan.source, selected, options, fetch, writer)
            writer.commit(notes.items())
        return cache.keep(scratch, digest)
