"""Code shared by the commands that read archives: open an archive, or refuse another kind of source."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from zarrfs.cli import common
from zarrfs.config.options import Parsed
from zarrfs.errors import SourceError, reason_of
from zarrfs.system.signals import orderly_end

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

T = TypeVar("T")

STDIN = "-"
_HERE = 32 << 20  # bytes: a larger document is always compiled in a child process


def run_on_archive(
    source: str, parsed: Parsed, body: Callable[[Store, Plan], Awaitable[T]], reads: bool = True,
    takes: tuple[str, ...] = (),
) -> T:  # fmt: skip
    """Open the archive `source` ("-" is standard input), and run `body` as common.run_on_store() does.

    Raise SourceError if `source` is no archive.
    """

    async def on_store(store: Store, plan: Plan) -> T:
        await check_archive(store, plan)
        return await body(store, plan)

    with orderly_end(), given(source) as path:
        return common.run_on_store(path, parsed, on_store, in_child, reads, ("zarrfs.archives.blob_reader", *takes))


async def check_archive(store: Store, plan: Plan) -> None:
    """Raise SourceError for a source of another kind."""
    # {} is detected as a reference set, but may as well be an empty archive
    if plan.kind != "archive" and (plan.kind != "references" or await anext(store.list_dir(""), None) is not None):
        raise SourceError(plan.source, "is not a file archive; `zarrfs copy` copies other sources")


@contextlib.contextmanager
def given(source: str) -> Iterator[str]:
    """Yield `source`; for "-", the path of a temporary file with the content of standard input."""
    if source != STDIN:
        yield source
        return
    with tempfile.NamedTemporaryFile(prefix="zarrfs-", suffix=".json") as file:
        try:
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
        except OSError as exc:
            reason = reason_of(exc)
            raise SourceError("standard input", f"cannot be kept in a temporary file: {reason}") from exc
        try:
            yield file.name
        except SourceError as exc:
            if exc.source != file.name:
                raise
            raise SourceError("standard input", exc.rule, exc.entry) from exc


def in_child(source: str) -> bool:
    """Return whether a child process should compile a document.

    A small document that begins with "[" is an archive, which is safe to parse in this process.
    """
    try:
        with open(source, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            return not (stat.S_ISREG(status.st_mode) and status.st_size <= _HERE and file.read(1) == b"[")
    except OSError:
        return True
