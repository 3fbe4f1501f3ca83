"""Files to a URL of any protocol of fsspec that can be written to: many at once, each verified, none sent twice."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import glob
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import ReadError, SourceError, UsageError
from zarrfs.jobs.stageout import File, Kept, Tree, files, holds
from zarrfs.net.answers import Transient
from zarrfs.net.openers import class_of
from zarrfs.net.reach import Trust
from zarrfs.net.systems import failure, raise_from
from zarrfs.store.upper import PREFIX, RECORD

_JOBS = 16  # files at once, unless told otherwise
_PAUSE = 0.5  # seconds before a request is repeated; then twice as long each time
_MD5 = re.compile(r"[0-9a-f]{32}")


class _Place(NamedTuple):
    """Where files go."""

    fs: Any
    path: str  # without a slash at its end
    family: str  # of protocols
    shown: str


class Sending(NamedTuple):
    """Where files are sent, and how."""

    url: str
    jobs: int | None = None  # files at once
    keep_going: bool = False  # failures are collected; else the first one ends it
    skip_unsupported: bool = False  # leave out what is neither a file nor a directory


def send(tree: Tree, how: Sending, options: Options, kept: Kept) -> None:
    """Copy the files of `tree` to a URL, or to a directory with all that is in it; blocks.

    What an earlier run has sent, and is there, is skipped.

    UsageError for a URL that cannot be written to. SourceError for what no URL can hold, and naming the first key that
    could not be sent; with `keep_going` they are in `kept`.
    """
    place = _place(how.url, options)
    local = place.family == "file"
    if local and (source := holds(tree, place.path)) is not None:
        raise UsageError(f"--to {place.shown}: lies in {source}, which is to be copied")
    wanted = list(files(tree, kept, local, how.keep_going))
    if kept.left_out and not how.skip_unsupported:
        rule = "neither a file nor a directory (--skip-unsupported leaves it out)"
        raise SourceError(tree.base, rule, kept.left_out[0])
    kept.expected_files, kept.expected_bytes = len(wanted), sum(file.size for file in wanted)
    if local:
        kept.empty_directories.clear()
        kept.failed.clear()  # it finds them, too
        _copy(tree, place, how, kept)
        return
    pool = concurrent.futures.ThreadPoolExecutor(how.jobs or _JOBS)
    with _journal(tree.upper, place.shown) as journal, pool as threads:
        waiting = {threads.submit(_send_one, tree, place, file, options, journal): file for file in wanted}
        try:
            for future in concurrent.futures.as_completed(waiting):
                file = waiting[future]
                try:
                    kept.skipped += not future.result()
                except (ReadError, SourceError) as exc:
                    if not how.keep_going:
                        raise SourceError(place.shown, f"cannot be written: {exc}", file.key) from exc
                    kept.failed.append({"key": file.key, "reason": str(exc)})
                else:
                    kept.files += 1
                    kept.bytes += file.size
        finally:
            threads.shutdown(wait=True, cancel_futures=True)


def _copy(tree: Tree, place: _Place, how: Sending, kept: Kept) -> None:
    """Copy a tree to a directory as zarrfs archive extract does: modes, times, links, holes, empty directories."""
    import trio

    from zarrfs.copying.copy import CopyOptions, CopyReport, copy_store
    from zarrfs.copying.copy_report import CopiedEntry
    from zarrfs.store.api import Kind
    from zarrfs.store.directory import FileSystemStore

    def done(found: CopiedEntry) -> None:
        if found.kind is Kind.FILE:
            status = os.lstat(os.path.join(tree.base, found.key))
            if (status.st_size, status.st_mtime_ns) != (found.size, found.mtime_ns):
                changed.append(found.key)
            kept.skipped += found.how == "kept"
            kept.files += 1
            kept.bytes += found.size
        elif found.kind is Kind.SYMLINK:
            kept.links += 1

    async def body() -> None:
        store = FileSystemStore(tree.base)
        try:
            await copy_store(store, place.path, choice, report, done)
        finally:
            await store.aclose()

    report, changed = CopyReport(), list[str]()
    ours = () if tree.base == tree.mounted else (f"{PREFIX}*", f"{RECORD}*")  # a mount does not show them
    unsupported = tuple(f"/{glob.escape(key)}" for key in kept.left_out)
    choice = CopyOptions("differs", exclude=(*ours, *unsupported), jobs=how.jobs, keep_going=how.keep_going, sync=True)
    try:
        os.makedirs(os.path.dirname(place.path), exist_ok=True)
    except OSError as exc:
        raise UsageError(f"--to {place.shown}: {(exc.strerror or str(exc)).lower()}") from exc
    trio.run(body)
    kept.failed += [{"key": bad.key, "reason": bad.reason} for bad in report.failed]
    kept.failed += [{"key": key, "reason": "has changed while it was copied"} for key in changed]
    if kept.failed and not how.keep_going:
        raise SourceError(place.shown, kept.failed[0]["reason"], kept.failed[0]["key"])


class _Journal:
    """What has been sent: the marks by which a later run knows it."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, int]] = {}
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError):  # the last one may be cut short
                    said = json.loads(line)
                    self._known[said["key"]] = (said["size"], said["mtime_ns"])
        self._file = open(path, "a", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115

    def has(self, file: File) -> bool:
        """Whether this very version of a file has been sent."""
        return self._known.get(file.key) == (file.size, file.mtime_ns)

    def note(self, file: File) -> None:
        """That a file has been sent, and is there."""
        with self._lock:
            self._file.write(f"\n{json.dumps(file._asdict(), ensure_ascii=False)}")
            self._file.flush()

    def close(self) -> None:
        """Give the descriptor back."""
        self._file.close()


@contextlib.contextmanager
def _journal(upper: str, shown: str) -> Iterator[_Journal]:
    name = f"{RECORD}-sent-{hashlib.sha256(os.fsencode(shown)).hexdigest()[:16]}"
    try:
        journal = _Journal(os.path.join(upper, name))
    except OSError as exc:
        raise SourceError(upper, f"cannot note what was sent: {(exc.strerror or str(exc)).lower()}") from exc
    with contextlib.closing(journal):
        yield journal


def _place(url: str, options: Options) -> _Place:
    protocols = urls.protocols(url) or ["file"]
    family = urls.names(protocols[0])[0]
    if len(protocols) > 1 or family == "http":
        raise UsageError(f"--to {without_secrets(url)}: cannot be written to")
    try:
        class_ = class_of(protocols[0], family)
        given, _ = Trust(options).given(url)
        fs = class_(**{**class_._get_kwargs_from_urls(url), **given}, skip_instance_cache=True)
    except ReadError as exc:
        raise UsageError(f"--to {exc}") from None
    except Exception as exc:
        raise UsageError(f"--to {without_secrets(url)}: cannot be used with these options: {exc}") from exc
    return _Place(fs, class_._strip_protocol(url).rstrip("/"), family, without_secrets(url).rstrip("/"))


def _send_one(tree: Tree, place: _Place, file: File, options: Options, journal: _Journal) -> bool:
    """Whether a file had to be sent; it is there afterwards. ReadError, SourceError."""
    path = f"{place.path}/{file.key}"
    source = os.path.join(tree.base, file.key)
    pause = _PAUSE
    for left in range(options.retries, -1, -1):
        try:
            if journal.has(file) and _size(place, path) == file.size:
                return False
            _put(place, source, path)
            _verify(place, source, file, path)
            journal.note(file)
        except Exception as exc:
            found = failure(exc, f"{place.shown}/{file.key}", options.request_timeout)
            if not isinstance(found, Transient):
                raise_from(found, exc)
            if not left:
                raise ReadError(f"{place.shown}/{file.key}", str(found)) from exc
            time.sleep(pause)
            pause *= 2
        else:
            return True
    raise AssertionError("not reached")


def _put(place: _Place, source: str, path: str) -> None:
    if place.family not in urls.BUCKETS:
        place.fs.makedirs(os.path.dirname(path), exist_ok=True)
    place.fs.put_file(source, path)


def _size(place: _Place, path: str) -> int | None:
    """How large what is there is; None where there is nothing."""
    try:
        return int(_info(place, path)["size"])
    except FileNotFoundError:
        return None


def _info(place: _Place, path: str) -> dict[str, Any]:
    place.fs.invalidate_cache(os.path.dirname(path))
    found: dict[str, Any] = place.fs.info(path)
    return found


def _verify(place: _Place, source: str, file: File, path: str) -> None:
    """SourceError unless what is there has the size, and the MD5 where the server tells one, of a file that stayed."""
    status = os.lstat(source)
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise ReadError(source, "has changed while it was sent")
    info = _info(place, path)
    if info.get("size") != file.size:
        raise ReadError(f"{place.shown}/{file.key}", f"has {info.get('size')} bytes there, not {file.size}")
    said = md5_there(info)
    if said and said != _md5_of(source):
        raise ReadError(f"{place.shown}/{file.key}", "has other bytes there than those that were sent (MD5)")


def md5_there(info: dict[str, Any]) -> str:
    """The MD5 that a server tells, hexadecimal; "" for none. An ETag of an upload in parts is not one."""
    tag = str(info.get("ETag") or "").strip('"')
    if _MD5.fullmatch(tag) and not info.get("ServerSideEncryption", info.get("SSEKMSKeyId")):
        return tag
    said = info.get("md5Hash") or (info.get("content_settings") or {}).get("content_md5")
    return (base64.b64decode(said) if isinstance(said, str) else bytes(said)).hex() if said else ""


def _md5_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
