"""The sources that can be mounted: plan_source() detects and compiles one, open_plan() opens it as a Store.

The two steps are separate because different processes run them. A short-lived child process makes the plan
(sources.prepare), because fetching and parsing a document takes memory, threads and event loops that the daemon should
not inherit. The plan is a few strings, and opening it is cheap.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
from base64 import b64encode
from collections.abc import Callable
from typing import Any

from zarrfs.archives.source_kinds import absolute, check_sources, is_flux
from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.urls import directory
from zarrfs.documents.plan import Plan
from zarrfs.documents.plan import discard as discard
from zarrfs.errors import SourceError, UsageError
from zarrfs.store.api import Store
from zarrfs.store.targets import TargetReader
from zarrfs.store.uri import path_of_uri

_DESCRIPTOR = re.compile("/dev/fd/|/proc/(self|thread-self)/fd/")


def plan_source(
    source: str, options: Options, child: bool = True, meanwhile: Callable[[], object] = lambda: None,
    forks: bool = False,
) -> Plan:  # fmt: skip
    """Detect the kind of `source`, check it and compile it. Raise SourceError or UsageError.

    The base of the plan is -o base= if that is given. With `child=False`, this process makes the plan instead of a
    child; it always does for a store at a `memory:` URL, which only this process has. `meanwhile` is called while the
    child works. `forks`: the caller is one of zarrfs's own programs, so that the child may be a fork of it.
    """
    plan = _planned(source, options, child, meanwhile, forks)
    try:
        return _finished(plan, options)
    except BaseException:
        discard(plan)
        raise


def _finished(plan: Plan, options: Options) -> Plan:
    """Apply -o base= to a plan. Raise UsageError if options select a version of a source that has no versions."""
    for name in ("branch", "tag", "snapshot"):
        if plan.kind != "icechunk" and getattr(options, name) is not None:
            raise UsageError(f"option {name}=: {plan.source} is no Icechunk repository")
    if options.base is None or plan.kind in ("zarr", "icechunk"):
        return plan
    base = options.base if "://" in options.base else absolute_source(options.base)
    return dataclasses.replace(plan, base=directory(base))


def absolute_source(source: str) -> str:
    """Return `source` in a form that is valid in any working directory."""
    if is_flux(source):
        return source
    path = path_of_uri(source)
    if path is not None:
        return os.path.abspath(path)
    end = urls.relative_end(source) if "::" in source else None  # of a chain of URLs: zip://member::file.zip
    return source if end is None or not end[1] else end[0] + os.path.abspath(end[1])


def absolute_options(options: Options) -> Options:
    """Return `options` with paths that are valid in any working directory."""
    return dataclasses.replace(
        options,
        log_file=options.log_file and os.path.abspath(options.log_file),
        blobs=tuple(map(absolute, options.blobs)),
        base=options.base and (options.base if "://" in options.base else absolute_source(options.base)),
    )


def _planned(source: str, options: Options, child: bool, meanwhile: Callable[[], object], forks: bool) -> Plan:
    check_sources(options.blobs)  # before a child is started, and also if the index exists already
    path = None if is_flux(source) else path_of_uri(source)
    if path is None:
        source = absolute_source(source)  # it may be opened later in another working directory
    if path is not None and options.type != "archive" and os.path.isdir(path):
        from zarrfs.sources.zarrstore import looks_like_repository, plan_directory

        if options.type != "icechunk" and not (options.type is None and looks_like_repository(path)):
            return plan_directory(source, path, options)
    if path is not None:
        source = os.path.abspath(path)
        if _DESCRIPTOR.match(source):  # such as <(...) of a shell: no other process can open it
            raise SourceError(source, "is open in this process alone; name a file")
    content = _in_memory(source) if source.startswith("memory:") else b""
    if child and content is not None:
        if path is not None:  # a set that is mounted again starts no child
            from zarrfs.sources.prepare import remembered

            plan = remembered(source, options)
            if plan is not None:
                return plan
        return _plan_in_child(source, options, meanwhile, forks, content)
    from zarrfs.sources.prepare import prepare

    return prepare(source, options)


def _in_memory(source: str) -> bytes | None:
    """Return the bytes of a document at a `memory:` URL, which no child could read; None if there is no document."""
    import fsspec

    system, path = fsspec.url_to_fs(source)
    return bytes(system.cat_file(path)) if system.isfile(path) else None


def open_plan(plan: Plan, options: Options) -> Store:
    """Open a plan as a Store, with the changes in -o upperdir= on top. Makes no network requests.

    Raise UsageError if options do not fit the plan, SourceError if an index or directory cannot be used.
    """
    if options.storage:
        from zarrfs.net.weboptions import check_web_options

        check_web_options(options)
    if options.upperdir is None:
        return _open(plan, options)
    from zarrfs.store.directory import FileSystemStore
    from zarrfs.store.overlay import Overlay
    from zarrfs.store.upper import Upper
    from zarrfs.system.mounts import beneath

    owner = (os.getuid() if options.uid is None else options.uid, os.getgid() if options.gid is None else options.gid)
    source = options.upperdir if plan.path is None else os.path.realpath(plan.path)
    if source != options.upperdir and beneath(options.upperdir, source):
        raise SourceError(options.upperdir, f"upperdir= lies inside the source {plan.source}")
    if source != options.upperdir and beneath(source, options.upperdir):
        raise SourceError(options.upperdir, f"the source {plan.source} lies inside upperdir=")
    if plan.path is not None and source == options.upperdir and plan.kind == "zarr" and options.view is None:
        return Overlay(FileSystemStore(options.upperdir), Upper(options.upperdir, plain=True), owner)
    over = {"source": plan.source, "fingerprint": plan.digest, "view": options.view}
    upper = Upper(options.upperdir, over=over)
    try:
        return Overlay(_open(plan, options), upper, owner)
    except BaseException:
        upper.close()
        raise


def _open(plan: Plan, options: Options) -> Store:
    store = _open_bare(plan, options)
    if options.view is None:
        return store
    from zarrfs.views import open_view

    try:
        return open_view(store, options, plan.source)
    except UsageError:
        discard(plan)
        raise


def _open_bare(plan: Plan, options: Options) -> Store:
    if plan.index is not None:
        return _open_index(plan, plan.index, options)
    if plan.kind == "references":
        from zarrfs.references.parquet import open_set

        return open_set(plan, options)
    if plan.path is not None:
        from zarrfs.sources.zarrstore import open_directory

        return open_directory(plan.path, options)
    from zarrfs.sources.zarrstore import open_remote

    return open_remote(plan, options)


def _open_index(plan: Plan, path: str, options: Options) -> Store:
    from zarrfs.store.index import IndexStore

    targets: TargetReader
    if plan.kind == "archive":
        from zarrfs.archives.blob_reader import BlobReader

        targets = BlobReader(options.blobs or plan.blobs, options)
    elif plan.kind == "icechunk":
        from zarrfs.icechunk.targets import RepositoryTargets

        targets = RepositoryTargets(options, plan.base, plan.origin)
    else:
        from zarrfs.store.targets import Targets

        targets = Targets(options, plan.base, plan.origin)
    store = IndexStore(path, targets, plan.mtime_ns)
    store.has_links = plan.kind == "archive"  # no other document has symbolic links
    discard(plan)
    return store


def _plan_in_child(
    source: str, options: Options, meanwhile: Callable[[], object], forks: bool, content: bytes
) -> Plan:
    """Let a child plan a source. `content`: its bytes, if the child cannot read them itself."""
    from zarrfs.sources import child

    asked = {
        "source": source, "options": dataclasses.asdict(options), "parent": os.getpid(),
        "content": b64encode(content).decode(),
    }  # fmt: skip
    try:
        started = child.start(json.dumps(asked).encode(), forks)
    except OSError as exc:
        raise SourceError(source, f"cannot start {sys.executable}: {exc.strerror}") from exc
    assert started.stdout is not None
    with started.stdout:
        try:
            meanwhile()
            reply = started.stdout.read()
        except BaseException:
            started.terminate()
            started.wait()
            raise
    status = started.wait()
    if status or not reply:
        raise SourceError(source, _death(status))
    answer: dict[str, Any] = json.loads(reply)
    if "usage" in answer:
        raise UsageError(answer["usage"])
    if "rule" in answer:
        raise SourceError(**answer)
    return Plan(**answer | {name: tuple(answer[name]) for name in ("warnings", "blobs")})


def _death(status: int) -> str:
    """Return why the child ended without an answer."""
    if status == -signal.SIGPROF:
        return "its templates take too much time to render"
    if status < 0:
        return f"reading it was ended by signal {-status} (out of memory?)"
    return f"reading it failed with status {status}; see the messages above"
