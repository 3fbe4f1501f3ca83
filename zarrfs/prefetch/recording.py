"""Records of the reads in a mount, and prefetching from such a record later.

A record is text: a line {"zarrfs": "record", "version": 1, "source": ...}, then a line ["key", start, stop] for each
range that was read, in the order of first use. start and stop are bytes; stop may be beyond the end of the value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import IO, Any, NamedTuple

import trio

from zarrfs.config.options import Options
from zarrfs.config.shares import Share
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, SourceError, UsageError, ZarrfsError, reason_of
from zarrfs.store.api import Kind, Store, key_rule
from zarrfs.store.division import Division

log = logging.getLogger(__name__)

BLOCK = 4 << 20  # bytes: reads are recorded in whole blocks
_INTERVAL = 1.0  # seconds from one write to the next
_SETTLE = 0.05  # seconds between checks of the cache on disk
_NOTED_MAX = 5_000_000  # blocks in one record, which are held in memory
_LINE_MAX = 1 << 20  # characters
_BATCH = 256  # small values fetched in one call
_BATCH_BYTES = 16 << 20
_WORKERS = 4  # batches, or pieces of large values, at a time


class RecordedRead(NamedTuple):
    """A range of a value that was read."""

    key: str
    start: int
    stop: int


class Recorder:
    """A writer of a record: it notes the blocks of 4 MiB that are read, in order of first use.

    Create it before trio runs. The file, with its first line, replaces an older one atomically, and grows by whole
    lines. A failing disk ends the record with one warning.
    """

    def __init__(self, path: str, source: str = "") -> None:
        """Create the file. Raise UsageError if `path` cannot be written, or is a file that is not a record."""
        self._first: set[str] = set()  # keys whose first block is recorded
        self._later: set[tuple[str, int]] = set()  # recorded later blocks, by key and number
        self._lines: list[tuple[str, int, int]] = []
        self._path = path
        self._writing = threading.Lock()
        self._full = False
        check_record(path)
        try:
            self._descriptor = _new_file(path, {"zarrfs": "record", "version": 1, "source": source})
        except OSError as exc:
            raise UsageError(f"option record={path}: {reason_of(exc)}") from exc

    def read(self, key: str, start: int, stop: int) -> None:
        """Record a read of the bytes [start, stop) of a value; a repeated read costs less than a microsecond."""
        if stop <= BLOCK:
            if key not in self._first and start < stop:
                self._note(key, 0)
            return
        for number in range(start // BLOCK, -(-stop // BLOCK) if start < stop else 0):
            if (key, number) not in self._later if number else key not in self._first:
                self._note(key, number)

    async def run(self) -> None:
        """Write new lines every second, until cancelled."""
        while True:
            await trio.sleep(_INTERVAL)
            if self._lines:
                lines, self._lines = self._lines, []
                try:
                    await trio.to_thread.run_sync(self._write, lines)
                except RuntimeError:  # out of threads: try again later
                    self._lines[:0] = lines

    def close(self) -> None:
        """Write the remaining lines and close the file."""
        lines, self._lines = self._lines, []
        self._write(lines)
        with self._writing:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                with contextlib.suppress(OSError):  # NFS, for example, may report an exceeded quota here
                    os.close(descriptor)

    def _note(self, key: str, number: int) -> None:
        if self._full:
            return
        if len(self._first) + len(self._later) >= _NOTED_MAX:
            self._full = True
            log.warning("%s: the record is full at %d blocks", self._path, _NOTED_MAX)
            return
        if number:
            self._later.add((key, number))
        else:
            self._first.add(key)
        start = number * BLOCK
        if self._lines and number and self._lines[-1][0] == key and self._lines[-1][2] == start:
            start = self._lines.pop()[1]
        self._lines.append((key, start, (number + 1) * BLOCK))

    def _write(self, lines: list[tuple[str, int, int]]) -> None:
        with self._writing:
            if self._descriptor < 0 or not lines:
                return
            data = memoryview("".join(json.dumps(line) + "\n" for line in lines).encode())
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError as exc:
                log.warning("%s: the record ends here: %s", self._path, reason_of(exc))
                failed, self._descriptor, self._full = self._descriptor, -1, True
                with contextlib.suppress(OSError):  # the same failure again
                    os.close(failed)


def check_record(path: str) -> None:
    """Raise UsageError if a Recorder could not write to `path`. Nothing is created or replaced."""
    place = os.path.realpath(path)
    try:
        if os.path.isdir(path):
            raise UsageError(f"option record={path}: is a directory")
        if os.path.exists(path) and not os.path.isfile(path):
            return  # do not open it: if it is a pipe, its reader would take the close for the end of the record
        if not _replaceable(place):
            raise UsageError(f"option record={path}: is no record of reads, and is not replaced")
        directory = os.path.dirname(place)
        os.stat(f"{directory}/")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError("permission denied")
    except OSError as exc:
        raise UsageError(f"option record={path}: {reason_of(exc)}") from None


def _new_file(path: str, header: dict[str, Any]) -> int:
    """Create the file `path` with its first line, replacing an older one; return a descriptor for appending."""
    line = json.dumps(header).encode() + b"\n"
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a terminal: do not wait for its reader
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        os.write(descriptor, line)
        return descriptor
    path = os.path.realpath(path)
    descriptor, beside = tempfile.mkstemp(".part", os.path.basename(path), os.path.dirname(path))
    try:
        os.fchmod(descriptor, 0o644)
        os.write(descriptor, line)
        os.replace(beside, path)
    except BaseException:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    return descriptor


def _replaceable(path: str) -> bool:
    """Return whether a new record may replace `path`: it is a record or empty, or it does not exist."""
    try:
        with open(path, "rb") as file:
            first = file.readline(_LINE_MAX)
    except FileNotFoundError:
        return True
    try:
        return not first or json.loads(first)["zarrfs"] == "record"
    except (ValueError, RecursionError, TypeError, LookupError):
        return False


def read_record(path: str) -> Iterator[RecordedRead]:
    """Open a record, check its first line, and return an iterator over the other lines.

    An incomplete last line, as after a crash, is skipped. Raise SourceError with file, line and rule for a bad record.
    """
    try:
        file = open(path, encoding="utf-8", errors="strict", newline="\n")  # noqa: SIM115 - the generator closes it
    except OSError as exc:
        raise SourceError(path, reason_of(exc)) from exc
    try:
        _check_header(path, _line(path, 1, file))
    except BaseException:
        file.close()
        raise
    return _records(path, file)


def _check_header(path: str, line: str) -> None:
    header = None
    with contextlib.suppress(ValueError, RecursionError):
        header = json.loads(line)
    if not isinstance(header, dict) or header.get("zarrfs") != "record":
        raise SourceError(path, 'not a record: expected {"zarrfs": "record", ...}', "line 1")
    if header.get("version") != 1:
        raise SourceError(path, f"version {header.get('version')!r} of records; this program reads 1", "line 1")


def _records(path: str, file: IO[str]) -> Iterator[RecordedRead]:
    with file:
        number = 2
        while line := _line(path, number, file):
            yield _record(path, number, _parsed(path, number, line))
            number += 1


def _line(path: str, number: int, file: IO[str]) -> str:
    """Return the next complete line; "" at the end of the file, or for an incomplete last line."""
    try:
        line = file.readline(_LINE_MAX)
    except UnicodeDecodeError:
        raise SourceError(path, "not UTF-8", f"line {number}") from None
    except OSError as exc:
        raise SourceError(path, reason_of(exc), f"line {number}") from exc
    if len(line) == _LINE_MAX:
        raise SourceError(path, f"a line of more than {_LINE_MAX} characters", f"line {number}")
    return line if line.endswith("\n") else ""


def _parsed(path: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise SourceError(path, "not JSON", f"line {number}") from None


def _record(path: str, number: int, value: Any) -> RecordedRead:
    rule = None
    if not isinstance(value, list) or len(value) != 3 or type(value[0]) is not str:
        rule = 'expected ["key", start, stop]'
    elif (broken := key_rule(value[0])) is not None:
        rule = f"not a key: {broken}"
    elif not (type(value[1]) is int and type(value[2]) is int and 0 <= value[1] < value[2] < 1 << 63):
        rule = "expected whole numbers with 0 <= start < stop"
    if rule is not None:
        raise SourceError(path, rule, f"line {number}")
    return RecordedRead(*value)


@dataclasses.dataclass
class Warmed:
    """The counts of warm(); a value with several recorded ranges counts once for each."""

    found: int = 0
    absent: int = 0  # values removed since they were recorded
    failed: int = 0
    bytes: int = 0
    dropped: int = 0  # blocks and blobs that the cache on disk did not keep, counted by settle()


async def warm(
    store: Store, records: Iterable[RecordedRead], warmed: Warmed | None = None, share: Share | None = None
) -> Warmed:
    """Fetch the recorded ranges in order, or a share of them; return the counts. Bound requests and bytes in flight.

    The counts are added to `warmed` during the work. If the record itself is bad, raise SourceError after all values
    before the bad line are fetched.
    """
    warmed = Warmed() if warmed is None else warmed
    units = _units(store, records, warmed, None if share is None else Division(share))
    taking, failure = trio.Lock(), None

    async def worker() -> None:
        nonlocal failure
        while failure is None:
            async with taking:
                try:
                    unit = await anext(units, None)
                except SourceError as exc:
                    failure = exc
                    return
            if unit is None:
                return
            await _fetch(store, unit, warmed)

    async with contextlib.aclosing(units), trio.open_nursery() as nursery:
        for _ in range(_WORKERS):
            nursery.start_soon(worker)
    if failure is not None:
        raise failure
    return warmed


async def settle(store: Store, warmed: Warmed) -> None:
    """Wait until the cache on disk has written all fetched blocks and blobs; count those that it did not keep."""
    while any(disk.get("queued") for disk in _disks(store)):  # noqa: ASYNC110
        await trio.sleep(_SETTLE)
    warmed.dropped = sum(disk.get("dropped", 0) for disk in _disks(store))


def _disks(store: Store) -> tuple[dict[str, int], dict[str, int]]:
    """Return the counters of the blocks and of the blobs on disk."""
    stats = store.stats()
    return stats.get("remote", {}).get("disk", {}), stats.get("blob_disk", {})


async def _units(
    store: Store, records: Iterable[RecordedRead], warmed: Warmed, division: Division | None
) -> AsyncGenerator[list[RecordedRead], None]:
    """Yield batches: small values to fetch together, or a piece of a large one, cut at the value's end."""
    batch: list[RecordedRead] = []
    held, failure = 0, None
    try:
        for key, start, stop in records:
            if division is not None and not division.mine(key, await _recorded_bytes(store, key, start, stop)):
                continue
            size = await _size(store, key, warmed)
            if size is None:
                continue
            stop = min(stop, size)
            if size <= BLOCK:
                batch.append(RecordedRead(key, start, stop))
                held += size
            if batch and (len(batch) == _BATCH or held >= _BATCH_BYTES or size > BLOCK):
                yield batch
                batch, held = [], 0
            if size > BLOCK:
                for at in range(start, stop, BLOCK):
                    yield [RecordedRead(key, at, min(stop, at + BLOCK))]
    except SourceError as exc:  # the record is bad from here on
        failure = exc
    if batch:
        yield batch
    if failure is not None:
        raise failure


async def _recorded_bytes(store: Store, key: str, start: int, stop: int) -> int:
    """Return the bytes of a recorded range, cut at the value's end only if that is known without a request."""
    if store.sizes_known:
        try:
            stop = min(stop, (await store.info(key)).size or 0)
        except (ZarrfsError, OSError):
            return 0
    return max(0, stop - start)


async def _size(store: Store, key: str, warmed: Warmed) -> int | None:
    """Return the size of a value in bytes. If that fails, count the value in `warmed` and return None."""
    try:
        info = await store.info(key)
    except (ZarrfsError, OSError) as exc:
        _missed(exc, warmed)
        return None
    if info.kind is Kind.FILE:
        return info.size or 0
    _missed(IsDirectory(key), warmed)
    return None


def _missed(exc: Exception, warmed: Warmed) -> None:
    """Count a value that is absent or unreadable."""
    log.debug("warm: %s", exc)
    if isinstance(exc, NotFound | NotDirectory | IsDirectory):
        warmed.absent += 1
    else:
        warmed.failed += 1


async def _fetch(store: Store, unit: list[RecordedRead], warmed: Warmed) -> None:
    if len(unit) > 1:
        await store.prefetch([record.key for record in unit])
    for key, start, stop in unit:
        try:
            data = await store.get(key, start, max(0, stop - start))
        except (ZarrfsError, OSError) as exc:
            _missed(exc, warmed)
        else:
            warmed.found += 1
            warmed.bytes += len(data)


def records_to_warm(options: Options) -> Iterator[RecordedRead] | None:
    """Open the record of -o warm=. Call this before the Recorder of -o record=, which may replace the same file.

    Return None without the option, or if record= names the same file and it does not exist yet. Raise SourceError if
    the file is not a record.
    """
    if options.warm is None or (options.warm == options.record and not os.path.exists(options.warm)):
        return None
    return read_record(options.warm)


async def warm_mount(store: Store, path: str, records: Iterable[RecordedRead]) -> None:
    """Run warm() as a task of a mount: log the outcome and raise no error."""
    try:
        done = await warm(store, records)
    except SourceError as exc:
        log.warning("warm: %s", exc)
    except Exception:  # it must not end the mount
        log.warning("warm=%s: stopped", path, exc_info=True)
    else:
        log.info("warm=%s: %d found, %d absent, %d failed, %d bytes", path, done.found, done.absent, done.failed,
                 done.bytes)  # fmt: skip
