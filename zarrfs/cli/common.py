"""What the commands share: click options made from the options table, and errors told in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zarrfs.config import values as optionvalues
from zarrfs.config.redaction import cleaned
from zarrfs.errors import UsageError, ZarrfsError, internal_error, message_line, reason_of

if TYPE_CHECKING:
    from zarrfs.config import options
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

T = TypeVar("T")
SOURCES = ("source", "archive", "place", "other", "to")  # of click's parameters: what sections of zarrfs.toml are for
Function = Callable[..., Any]

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
SHORT = {"foreground": "-f"}
_VERBOSITY = "zarrfs.log_level"  # in click's context: what -v, -q or -d said, to the group or to the command
_TAKES = ("zarrfs.store.remotefiles",)  # what most sources take
_PREFIX = "option_"  # of click's parameter names, so that a command's own never collide with the table's


def process_options(function: Function) -> Function:
    """Add -v, -q and -d, which are short for log_level=; -d shows tracebacks as well."""

    def remember(level: str) -> Callable[[click.Context, click.Parameter, bool], None]:
        def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
            if value:
                ctx.meta[_VERBOSITY] = level

        return callback

    for flags, level, text in (
        (("-d", "--debug"), "debug", "Log everything, and show tracebacks."),
        (("-q", "--quiet"), "error", "Say nothing but errors."),
        (("-v", "--verbose"), "info", "Say more."),
    ):
        function = click.option(
            *flags, is_flag=True, expose_value=False, callback=remember(level), help=text
        )(function)
    return function


def verbosity() -> str | None:
    """The log_level that -v, -q or -d of the command that runs, or of its group, said."""
    level: str | None = click.get_current_context().meta.get(_VERBOSITY)
    return level


def source_options(
    *scopes: str, output: str | None = None, **defaults: Any
) -> Callable[[Function], Function]:
    """Give a command -o (--option), the long options of `scopes` (default: all), and -v, -q, -d.

    The command is called with `parsed`, an options.Parsed, and its errors are told as errors_told() does.
    `--option` takes every option whatever the scopes, so that one line of options fits every command. Long
    options win over it. `defaults` replace those of the table. `output`, a line of help, is for a command that
    writes a file: it gets -o FILE (--output), is called with `output`, and its options are --option alone; with
    "" they are so, too, but the command names its file in another way.
    """

    from zarrfs.config import options

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(items: tuple[str, ...], **given: Any) -> Any:
            level = verbosity()
            with errors_told(debug=level == "debug"):
                said = [part for item in items for part in options.split_commas(item)]
                for name in options.TABLE:
                    said += _as_items(name, given.pop(_PREFIX + name, None))
                if level:
                    said.append(f"log_level={level}")
                try:
                    return function(parsed=_settled(said, given, defaults), **given)
                finally:
                    sys.stdout.flush()  # here, where a closed pipe is told as such

        decorated: Function = process_options(run)
        for name in reversed(options.TABLE):
            if not scopes or options.TABLE[name].metadata["scope"] in scopes or name in (*scopes, "config"):
                decorated = _click_option(name)(decorated)
        decorated = click.option(
            *(("-o",) if output is None else ()), "--option", "items", multiple=True, metavar="NAME[=VALUE],...",
            help="Options in the manner of mount(8): every option of zarrfs, by its name.",
        )(decorated)  # fmt: skip
        return click.option("-o", "--output", metavar="FILE", help=output)(decorated) if output else decorated

    return decorate


def _settled(said: list[str], given: dict[str, Any], defaults: dict[str, Any]) -> options.Parsed:
    """What the command line, variables and files say together; names in `given` become what they stand for."""
    from zarrfs.config.effective import settings

    names = [name for name in SOURCES if isinstance(given.get(name), str)]
    split: list[tuple[str, str]] = []
    if "sources" in given:
        from zarrfs.references.merge import split_prefix

        split = [split_prefix(text) for text in given["sources"]]
    found = settings(said, [*(given[name] for name in names), *(source for _prefix, source in split)], defaults)
    given |= zip(names, found.sources, strict=False)
    if split:
        prefixed = zip(split, found.sources[len(names) :], strict=True)
        given["sources"] = tuple(f"{prefix}={source}" if prefix else source for (prefix, _name), source in prefixed)
    return found.parsed


def _click_option(name: str) -> Callable[[Function], Function]:
    """The long option of one row of the table; its value is parsed by the table, not by click."""
    from zarrfs.config import options

    about = options.TABLE[name].metadata
    names = [f"--{name.replace('_', '-')}", _PREFIX + name]
    if name in SHORT:
        names.insert(0, SHORT[name])
    if about["parse"] is optionvalues.flag:
        return click.option(*names, is_flag=True, help=about["help"])
    default = options.default_text(name)
    text = f"{about['help'].removesuffix('.')} (default: {default})." if default else about["help"]
    return click.option(*names, metavar=about["metavar"], multiple=about["many"], help=text)


def _as_items(name: str, value: Any) -> list[str]:
    """What click found for a long option, as items for options.parse()."""
    if isinstance(value, bool):
        return [name] if value else []
    if isinstance(value, str):
        return [f"{name}={value}"]
    return [f"{name}={one}" for one in value or ()]


@contextlib.contextmanager
def errors_told(debug: bool = False, status: int = 1) -> Iterator[None]:
    """Turn errors into a line on standard error and an exit status: 2 for usage, 130 for Ctrl-C, else `status`."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit, SystemExit):
        raise
    except BaseException as exc:
        cause = first_cause(exc)
        if debug and not isinstance(cause, KeyboardInterrupt):
            click.echo(cleaned("".join(traceback.format_exception(exc))), err=True, nl=False)
        raise SystemExit(_tell(cause, status)) from None


@contextlib.contextmanager
def compared(exit_code: bool) -> Iterator[None]:
    """What tells differences, in the end on standard output: with --exit-code errors have status 2, as of diff(1)."""
    with errors_told(verbosity() == "debug", 2 if exit_code else 1):
        yield
        sys.stdout.flush()


def _tell(exc: BaseException, status: int) -> int:
    """Say what happened; returns the exit status."""
    if isinstance(exc, KeyboardInterrupt):
        return 130
    if isinstance(exc, BrokenPipeError):  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if isinstance(exc, OSError) and exc.filename is None:
        say(_output_failure() or reason_of(exc))
    elif isinstance(exc, ZarrfsError | OSError):
        say(str(exc))
    else:
        say(f"{internal_error(exc)} (-d shows where)")
    return 2 if isinstance(exc, UsageError) else status


def _output_failure() -> str:
    """What is wrong with standard output, which is given up then; "" where nothing is."""
    try:
        sys.stdout.flush()
    except OSError as exc:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"standard output: {(exc.strerror or str(exc)).lower()}"
    return ""


def first_cause(exc: BaseException) -> BaseException:
    """The error inside the groups that trio's nurseries make; Ctrl-C goes first."""
    while isinstance(exc, BaseExceptionGroup):
        interrupted = exc.subgroup(KeyboardInterrupt)
        exc = (interrupted or exc).exceptions[0]
    return exc


def say(text: str) -> None:
    """One line on standard error."""
    click.echo(f"zarrfs: {message_line(cleaned(text))}", err=True)


def tell_warnings(plan: Plan, chosen: options.Options) -> None:
    """What was odd about a source, a line each."""
    if chosen.log_level != "error":
        for warning in plan.warnings:
            say(f"warning: {warning}")


def run_on_store(
    source: str, parsed: options.Parsed, body: Callable[[Store, Plan], Awaitable[T]],
    child: Callable[[str], bool] = lambda source: True, reads: bool = True, takes: tuple[str, ...] = _TAKES,
) -> T:  # fmt: skip
    """Open `source`, tell its warnings, and run `body(store, plan)` on trio; more is as for run_on_stores()."""

    async def on_one(opened: list[tuple[Store, Plan]]) -> T:
        return await body(*opened[0])

    return run_on_stores([source], parsed, on_one, child, reads, takes)


def run_on_stores(
    sources: Sequence[str], parsed: options.Parsed, body: Callable[[list[tuple[Store, Plan]]], Awaitable[T]],
    child: Callable[[str], bool] = lambda source: True, reads: bool = True, takes: tuple[str, ...] = _TAKES,
) -> T:  # fmt: skip
    """As run_on_store, with several sources; those that are not for a `child` are planned in this process.

    What `reads` no files is not told that their blobs are missing, and takes none of the modules that are imported
    meanwhile.
    """
    from zarrfs.archives.source_kinds import NO_BLOBS
    from zarrfs.sources import discard, open_plan, plan_source

    chosen = dataclasses.replace(parsed.options, names_since=time.time())
    _prepare_output(chosen.log_level)

    async def run(plans: list[Plan]) -> T:
        import trio

        opened: list[tuple[Store, Plan]] = []
        try:
            for plan in plans:
                opened.append((open_plan(plan, chosen), plan))
            return await body(opened)
        finally:
            with trio.CancelScope(shield=True):
                for store, _plan in opened:
                    await store.aclose()

    plans: list[Plan] = []
    meanwhile = functools.partial(_import_meanwhile, takes if reads else ())
    try:
        for source in sources:
            plans.append(plan_source(source, chosen, child(source), meanwhile, forks=True))
            if chosen.log_level != "error" and not chosen.collect:
                where = f"{source}: " if len(sources) > 1 else ""
                for warning in plans[-1].warnings:
                    if reads or not warning.endswith(NO_BLOBS):
                        say(f"warning: {where}{warning}")
        import trio

        from zarrfs.system.memory import keep_what_is_here

        keep_what_is_here()  # modules: to go through them again and again takes a twentieth of a copy's time
        return trio.run(run, plans)
    finally:
        for plan in plans:
            discard(plan)


def _import_meanwhile(takes: tuple[str, ...]) -> None:
    """What our source takes, while a child prepares it."""
    for name in ("zarrfs.store.index", *takes):
        importlib.import_module(name)


def _prepare_output(level: str) -> None:
    logging.basicConfig(format="zarrfs: %(message)s", stream=sys.stderr, force=True)
    logging.getLogger("zarrfs").setLevel(level.upper())
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may hold bytes that are not UTF-8
        utf8 = sys.stdout.encoding.lower() in ("utf-8", "utf8")
        sys.stdout.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")


def time_given(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A callback of click: seconds, of an option that takes a time as those of the table do."""
    try:
        return None if value is None else optionvalues.seconds(value)
    except ValueError as exc:
        raise click.BadParameter(f"{value!r} is not {exc}", ctx, param) from None


def local_path(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A callback of click: a path on this machine; a URL would become a directory that is called so."""
    try:
        return None if value is None else optionvalues.local(value)
    except ValueError as exc:
        raise click.BadParameter(f"{value!r}: expected {exc}", ctx, param) from None


def clean_key(text: str) -> str:
    """A key as a user may write it: slashes at its ends do not matter."""
    from zarrfs.store.api import check_key

    return check_key(text.strip("/"), root=True)
