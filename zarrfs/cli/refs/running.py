"""Code shared by the commands of zarrfs refs: options for the output, opening of reference sets, progress."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zarrfs.cli import common
from zarrfs.system.signals import orderly_end
from zarrfs.system.terminal import replace_line, shows_progress

if TYPE_CHECKING:
    from zarrfs.config.options import Parsed
    from zarrfs.documents.plan import Plan
    from zarrfs.references.output import Output, ReferenceWriter
    from zarrfs.store.api import Store

T = TypeVar("T")
R = TypeVar("R")

# the formats of references.output, repeated here because --help does not import it; a test compares the two
FORMATS = ("json", "json.gz", "json.zst", "json.xz", "json.bz2", "parquet", "index")
_QUIET_FOR = 1.0  # seconds before progress is shown
_EVERY = 0.2  # seconds between updates
_LOOK = 4096  # references between two readings of the clock


def written_options(form: str = "--to") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the option `form` for the output format, --record-size and --force to a command.

    The command is called with `written`, an argument for output().
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(form: str | None, record_size: int | None, force: bool, **given: Any) -> Any:
            return function(written={"said": form, "record_size": record_size, "replace": force}, **given)

        decorated: Callable[..., Any] = run
        for option in (
            click.option("--force", is_flag=True, help="Replace the output if it exists."),
            click.option(
                "--record-size", type=click.IntRange(1), metavar="N", help="Parquet: N references in a record file."
            ),
            click.option(form, "form", type=common.Choice(FORMATS), help="The form (default: by the name)."),
        ):
            decorated = option(decorated)
        return decorated

    return decorate


def output(path: str | None, written: dict[str, Any], usual: str | None = None, version: int = 1) -> Output:
    """Return the output for `path`; None is standard output, as JSON unless `written` has another format.

    `usual` is the format of a name without a known ending; without `usual`, such a name is a UsageError.
    """
    from zarrfs.references.output import STDOUT, Output, output_format

    path = path or STDOUT
    form = output_format(path, written["said"], "json" if path == STDOUT else usual)
    return Output(path, form, written["replace"], written["record_size"], version)


def run_on_set(source: str, parsed: Parsed, body: Callable[[Store, Plan], Awaitable[T]]) -> T:
    """Open `source` and run `body` as common.run_on_store() does. Raise SourceError if it is no reference set."""
    from zarrfs.references.output import reference_set

    async def on_set(store: Store, plan: Plan) -> T:
        return await body(reference_set(store, plan), plan)

    return common.run_on_store(source, parsed, on_set)


def write_set(
    source: str,
    parsed: Parsed,
    to: Output,
    change: Callable[[Callable[[str], str], Plan], Callable[[str], str]] = lambda usual, plan: usual,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write the reference set `source` to `to`.

    `change(usual, plan)` returns the function that rewrites each URL, `usual` is the one that is used by default.
    `check` is called when all references are written, but not yet under the final name; it may raise.
    """
    from zarrfs.references.output import entries, notes
    from zarrfs.references.relocate import rewritten, written_urls

    async def body(store: Store, plan: Plan) -> None:
        urls = change(written_urls(plan, to), plan)
        async for reference in progress(rewritten(entries(store, plan), urls), parsed):
            add(reference)
        check()
        writer.notes |= notes(plan)

    with opened(to) as writer:
        add = writer.add
        run_on_set(source, parsed, body)


@contextlib.contextmanager
def opened(to: Output) -> Iterator[ReferenceWriter]:
    """Open `to` for writing. On SIGTERM or SIGHUP, nothing is left behind, as on Ctrl-C."""
    with orderly_end(), to.open_writer() as writer:
        yield writer


async def progress(items: AsyncIterator[R], parsed: Parsed, what: str = "references") -> AsyncIterator[R]:
    """Yield `items`. After a second, show their number so far if standard error is a terminal."""
    if not shows_progress() or parsed.options.log_level == "error":
        async for item in items:
            yield item
        return
    done, shown, began = 0, False, time.monotonic()
    following = began + _QUIET_FOR
    try:
        async for item in items:
            yield item
            done += 1
            if done % _LOOK == 0 and time.monotonic() > following:
                now = time.monotonic()
                replace_line(f"{done:,} {what}, {done / (now - began):,.0f}/s")
                shown, following = True, now + _EVERY
    finally:
        if shown:
            replace_line()
