"""A process that opens each requested source in a forked child, reads everything in it, and measures that.

It reads requests from standard input, a line of JSON each: {"source", "options"}. It answers each with a line: the
child's result, {"error"} or {"entries", "check"}, with "unexpected" exceptions; and "seconds", "cpu", "late" (killed
after TIME_MAX), "memory" (peak bytes of the child, or of a child of its own if that had more) and exit "status".
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import resource
import select
import signal
import sys
import time
import traceback
from typing import Any

import trio

from zarrfs.config.options import TABLE, Options
from zarrfs.copying.array_check import ArrayChecks
from zarrfs.copying.check import check
from zarrfs.copying.check_report import CheckReport
from zarrfs.errors import ZarrfsError
from zarrfs.sources import open_plan, plan_source
from zarrfs.store.api import Info, Kind, Store
from zarrfs.store.traversal import walk

TIME_MAX = 10.0  # seconds
_MEMORY_MAX = 4 << 30  # bytes of address space: protects the machine from a bug
_WINDOW = 1 << 20  # bytes read at the start and at the end of a file
_ENTRIES_MAX = 5000
_WARM = (
    "zarrfs.sources.prepare", "zarrfs.archives.parse", "zarrfs.references.parse", "zarrfs.references.templates",
    "zarrfs.sources.zarrstore", "zarrfs.store.directory", "zarrfs.store.remotefiles", "zarrfs.store.targets",
    "zarrfs.views.arrays", "zarrfs.views.translated", "zarrfs.archives.blob_reader", "zarrfs.zarr.codecs", "orjson",
)  # fmt: skip


class _Unexpected(logging.Handler):
    """A log handler that keeps logged exceptions other than ZarrfsError and OSError."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        exc = record.exc_info[1] if record.exc_info else None
        if exc is not None and not isinstance(exc, ZarrfsError | OSError):
            self.found.append("".join(traceback.format_exception(exc)))


async def _read(store: Store, key: str, info: Info) -> str:
    """Return a digest of a file's size, first and last bytes; for a symlink, its target."""
    if info.kind is Kind.SYMLINK:
        return f"-> {info.target}"
    if info.kind is Kind.DIRECTORY:
        return "directory"
    size = info.size if info.size is not None else (await store.info(key)).size or 0
    hashed = hashlib.sha256(str(size).encode())
    hashed.update(await store.get(key, 0, min(size, _WINDOW)))
    if size > _WINDOW:
        hashed.update(await store.get(key, size - _WINDOW, _WINDOW))
    return hashed.hexdigest()


async def _everything(store: Store, unexpected: list[str]) -> dict[str, Any]:
    entries: dict[str, str] = {}
    try:
        async for key, info in walk(store, "", lambda key, exc: entries.update({key: f"! {exc}"})):
            if len(entries) >= _ENTRIES_MAX:
                break
            try:
                entries[key] = await _read(store, key, info)
            except (ZarrfsError, OSError) as exc:
                entries[key] = f"! {exc}"
            except Exception:
                unexpected.append(f"{key}: {traceback.format_exc()}")
        report = CheckReport(keep=5)
        with trio.move_on_after(2 * TIME_MAX):
            await check(store, "", report, 64 << 20, ArrayChecks(store, True, 64 << 20))
        return {"entries": entries, "check": report.as_json()}
    finally:
        await store.aclose()


def opened_and_read(source: str, options: Options) -> dict[str, Any]:
    """Open a source and read everything in it."""
    unexpected = _Unexpected()
    log = logging.getLogger("zarrfs")
    log.addHandler(unexpected)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    found: dict[str, Any] = {}
    try:
        plan = plan_source(source, options, forks=True)
        found = trio.run(_everything, open_plan(plan, options), unexpected.found)
    except (ZarrfsError, OSError) as exc:
        found = {"error": str(exc)}
    except BaseException as exc:
        leaf: BaseException = exc
        while isinstance(leaf, BaseExceptionGroup) and len(leaf.exceptions) == 1:  # as the commands do
            leaf = leaf.exceptions[0]
        found = {"error": str(leaf)}
        if not isinstance(leaf, ZarrfsError | OSError):
            unexpected.found.append("".join(traceback.format_exception(leaf)))
    return found | {"unexpected": unexpected.found}


def _child(request: dict[str, Any], out: int) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_MAX, _MEMORY_MAX))
    given = request["options"]
    given |= {name: tuple(value) for name, value in given.items() if TABLE[name].metadata["many"]}
    found = opened_and_read(request["source"], Options(**given))
    with open(out, "w") as file:
        json.dump(found, file)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request in a forked child, which is killed after TIME_MAX."""
    began, (read, write) = time.monotonic(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(read)
            _child(request, write)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    parts: list[bytes] = []
    late = False
    while True:
        left = TIME_MAX - (time.monotonic() - began)
        ready = select.select([read], [], [], max(left, 0))[0]
        if not ready:
            late = True
            os.killpg(pid, signal.SIGKILL)
            break
        if not (part := os.read(read, 1 << 20)):
            break
        parts.append(part)
    os.close(read)
    _, status, usage = os.wait4(pid, 0)
    found: dict[str, Any] = json.loads(b"".join(parts)) if parts and not late else {}
    return found | {
        "seconds": time.monotonic() - began, "cpu": usage.ru_utime + usage.ru_stime, "late": late,
        "memory": usage.ru_maxrss << 10, "status": os.waitstatus_to_exitcode(status),
    }  # fmt: skip


def main() -> None:
    """Answer requests until standard input ends."""
    for name in _WARM:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
