"""Upload of files to a URL, by any writable protocol of fsspec: concurrently, each verified, none sent twice."""

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
from zarrfs.errors import ReadError, SourceError, UsageError, reason_of
from zarrfs.jobs.stageout import StageOutReport, Tree, TreeFile, files, holds
from zarrfs.net.failures import failure, raise_from
from zarrfs.net.identity import endpoint
from zarrfs.net.openers import class_of, parts_of, ssh_defaults, unknown_key
from zarrfs.net.reach import Trust
from zarrfs.net.responses import Transient
from zarrfs.net.systems import SSH
from zarrfs.store.upper import PREFIX, RECORD

_JOBS = 16  # default number of files sent at the same time
_PAUSE = 0.5  # seconds before a request is repeated; doubled each time
_MD5 = re.compile(r"[0-9a-f]{32}")


class _Destination(NamedTuple):
    """The directory or prefix that files are sent to."""

    fs: Any
    path: str  # without a slash at its end
    family: str  # the first name of its protocol
    shown: str  # the URL without credentials, for messages
    endpoint: str = ""  # of a bucket; "": the default of the provider


class UploadOptions(NamedTuple):
    """The URL of an upload, and its options."""

    url: str
    jobs: int | None = None  # files sent at the same time
    keep_going: bool = False  # collect failures; otherwise the first failure ends the upload
    skip_unsupported: bool = False  # leave out entries other than files and directories


def send(tree: Tree, how: UploadOptions, options: Options, done: StageOutReport) -> None:
    """Copy the files of `tree` to a URL, or the whole tree to a directory. Blocks.

    Files that an earlier run sent, and that still exist at the destination, are skipped.

    Raise UsageError for a URL that cannot be written to, SourceError for an entry that cannot be stored at a URL, and
    for the first file that cannot be sent; with `keep_going` such files are added to `done` instead.
    """
    destination = _destination(how.url, options)
    local = destination.family == "file"
    if local and (source := holds(tree, destination.path)) is not None:
        raise UsageError(f"--to {destination.shown}: lies in {source}, which is to be copied")
    pending = list(files(tree, done, local, how.keep_going))
    if done.left_out and not how.skip_unsupported:
        rule = "neither a file nor a directory (--skip-unsupported leaves it out)"
        raise SourceError(tree.base, rule, done.left_out[0])
    done.expected_files, done.expected_bytes = len(pending), sum(file.size for file in pending)
    if local:
        done.empty_directories.clear()
        done.failed.clear()  # the copy reports these failures itself
        _copy(tree, destination, how, done)
        return
    jobs = 1 if destination.family == "ftp" else how.jobs or _JOBS  # the FTP client has one connection, and no lock
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    with _journal(tree.upper, destination) as journal, pool as threads:
        waiting = {threads.submit(_send_one, tree, destination, file, options, journal): file for file in pending}
        try:
            for future in concurrent.futures.as_completed(waiting):
                file = waiting[future]
                try:
                    done.skipped += not future.result()
                except (ReadError, SourceError) as exc:
                    if not how.keep_going:
                        raise SourceError(destination.shown, f"cannot be written: {exc}", file.key) from exc
                    done.failed.append({"key": file.key, "reason": str(exc)})
                else:
                    done.files += 1
                    done.bytes += file.size
        finally:
            threads.shutdown(wait=True, cancel_futures=True)


def _copy(tree: Tree, destination: _Destination, how: UploadOptions, done: StageOutReport) -> None:
    """Copy a tree to a directory with modes, times, symbolic links, holes, and empty directories.

    It is copied as by `zarrfs archive extract`. Raise UsageError, SourceError.
    """
    import trio

    from zarrfs.copying.copy import copy_store
    from zarrfs.copying.copy_report import CopiedEntry, CopyOptions, CopyReport
    from zarrfs.store.api import Kind
    from zarrfs.store.directory import FileSystemStore

    def count(found: CopiedEntry) -> None:
        if found.kind is Kind.FILE:
            if not _is_as_listed(os.path.join(tree.base, found.key), found.size, found.mtime_ns):
                changed.append(found.key)
            done.skipped += found.how == "kept"
            done.files += 1
            done.bytes += found.size
        elif found.kind is Kind.SYMLINK:
            done.links += 1

    async def body() -> None:
        store = FileSystemStore(tree.base)
        try:
            await copy_store(store, destination.path, choice, report, count)
        finally:
            await store.aclose()

    report, changed = CopyReport(), list[str]()
    ours = () if tree.base == tree.mounted else (f"{PREFIX}*", f"{RECORD}*")  # a mount hides these itself
    unsupported = tuple(f"/{glob.escape(key)}" for key in done.left_out)
    choice = CopyOptions("differs", exclude=(*ours, *unsupported), jobs=how.jobs, keep_going=how.keep_going, sync=True)
    try:
        os.makedirs(os.path.dirname(destination.path), exist_ok=True)
    except OSError as exc:
        raise UsageError(f"--to {destination.shown}: {reason_of(exc)}") from exc
    trio.run(body)
    done.failed += [{"key": bad.key, "reason": bad.reason} for bad in report.failed]
    done.failed += [{"key": key, "reason": "has changed or was removed while it was copied"} for key in changed]
    if done.failed and not how.keep_going:
        raise SourceError(destination.shown, done.failed[0]["reason"], done.failed[0]["key"])


def _is_as_listed(path: str, size: int, mtime_ns: int | None) -> bool:
    """Return whether a file has this size and time."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (size, mtime_ns)


class _Journal:
    """The journal of sent files, which a later run skips."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, int]] = {}
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError):  # a line that a full disk or a kill cut short
                    found = json.loads(line)
                    self._known[found["key"]] = (found["size"], found["mtime_ns"])
        self._file = open(path, "a", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115

    def has(self, file: TreeFile) -> bool:
        """Return whether this version of a file has been sent."""
        return self._known.get(file.key) == (file.size, file.mtime_ns)

    def note(self, file: TreeFile) -> None:
        """Append a file that was sent and verified. If that fails, as on a full disk, a later run sends it again."""
        with self._lock, contextlib.suppress(OSError):
            self._file.write(f"\n{json.dumps(file._asdict(), ensure_ascii=False)}")
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # lines that could not be written, as in note()
            self._file.close()


@contextlib.contextmanager
def _journal(upper: str, destination: _Destination) -> Iterator[_Journal]:
    place = f"{destination.shown} at {destination.endpoint}" if destination.endpoint else destination.shown
    name = f"{RECORD}-sent-{hashlib.sha256(os.fsencode(place)).hexdigest()[:16]}"
    try:
        journal = _Journal(os.path.join(upper, name))
    except OSError as exc:
        raise SourceError(upper, f"cannot note what was sent: {reason_of(exc)}") from exc
    with contextlib.closing(journal):
        yield journal


def _destination(url: str, options: Options) -> _Destination:
    protocols = urls.protocols(url) or ["file"]
    family = urls.names(protocols[0])[0]
    if len(protocols) > 1 or family == "http":
        raise UsageError(f"--to {without_secrets(url)}: cannot be written to")
    try:
        class_ = class_of(protocols[0], family)
        given, _ = Trust(options).given(url)
        parts, path = parts_of(class_, family, url)
        given = {**parts, **given}
        if family in SSH:  # without these defaults, sshfs accepts any host key
            given = {**ssh_defaults(), **given}
        fs = class_(**given, skip_instance_cache=True)
    except ReadError as exc:
        raise UsageError(f"--to {exc}") from None
    except Exception as exc:
        if type(exc).__name__ == "HostKeyNotVerifiable":
            raise UsageError(f"--to {unknown_key(protocols[0], given)}") from exc
        raise UsageError(f"--to {without_secrets(url)}: cannot be used with these options: {exc}") from exc
    at = endpoint(family, given) if family in urls.BUCKETS else ""
    return _Destination(fs, path.rstrip("/"), family, without_secrets(url).rstrip("/"), at)


def _send_one(tree: Tree, destination: _Destination, file: TreeFile, options: Options, journal: _Journal) -> bool:
    """Send a file unless an earlier run has sent it; return whether it was sent now. Raise ReadError, SourceError."""
    path = f"{destination.path}/{file.key}"
    source = os.path.join(tree.base, file.key)
    pause = _PAUSE
    for left in range(options.retries, -1, -1):
        try:
            if journal.has(file) and _size(destination, path) == file.size:
                return False
            _put(destination, source, path)
            _verify(destination, source, file, path)
            journal.note(file)
        except Exception as exc:
            found = failure(exc, f"{destination.shown}/{file.key}", options.request_timeout)
            if not isinstance(found, Transient):
                raise_from(found, exc)
            if not left:
                raise ReadError(f"{destination.shown}/{file.key}", str(found)) from exc
            time.sleep(pause)
            pause *= 2
        else:
            return True
    raise AssertionError("not reached")


def _put(destination: _Destination, source: str, path: str) -> None:
    if destination.family not in urls.BUCKETS:
        destination.fs.makedirs(os.path.dirname(path), exist_ok=True)
    destination.fs.put_file(source, path)


def _size(destination: _Destination, path: str) -> int | None:
    """Return the size of a file at the destination; None if it does not exist."""
    try:
        return int(_info(destination, path)["size"])
    except FileNotFoundError:
        return None


def _info(destination: _Destination, path: str) -> dict[str, Any]:
    destination.fs.invalidate_cache(os.path.dirname(path))
    found: dict[str, Any] = destination.fs.info(path)
    return found


def _verify(destination: _Destination, source: str, file: TreeFile, path: str) -> None:
    """Raise ReadError if the file has changed, or if its size, or MD5 if known, differs at the destination."""
    if not _is_as_listed(source, file.size, file.mtime_ns):
        raise ReadError(source, "has changed while it was sent")
    info = _info(destination, path)
    if info.get("size") != file.size:
        raise ReadError(f"{destination.shown}/{file.key}", f"has {info.get('size')} bytes there, not {file.size}")
    found = md5_of_info(info)
    if found and found != _md5_of(source) and not _has_other_tag(destination, path):
        raise ReadError(f"{destination.shown}/{file.key}", "has other bytes there than those that were sent (MD5)")


def md5_of_info(info: dict[str, Any]) -> str:
    """Return the MD5 in the info of a file, hexadecimal, or "". The ETag of a multipart upload is not an MD5.

    Nor is the ETag of an object that S3 encrypts with other keys than its own, but it looks like an MD5, and the info
    does not tell.
    """
    tag = str(info.get("ETag") or "").strip('"')
    if _MD5.fullmatch(tag):
        return tag
    found = info.get("md5Hash") or (info.get("content_settings") or {}).get("content_md5")
    return (base64.b64decode(found) if isinstance(found, str) else bytes(found)).hex() if found else ""


def _has_other_tag(destination: _Destination, path: str) -> bool:
    """Return whether an object in S3 is encrypted such that its ETag is not its MD5 (SSE-KMS, SSE-C)."""
    if destination.family != "s3":
        return False
    bucket, key, _ = destination.fs.split_path(path)
    head = destination.fs.call_s3("head_object", destination.fs.kwargs, Bucket=bucket, Key=key)
    return "SSECustomerAlgorithm" in head or head.get("ServerSideEncryption", "AES256") != "AES256"


def _md5_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
