"""Code shared by the commands: click options made from the options table, one-line errors, and opening of sources."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zarrfs.config import values as optionvalues
from zarrfs.config.redaction import redact_text
from zarrfs.config.shares import share_of
from zarrfs.errors import UsageError, ZarrfsError, first_cause, internal_error, message_line, message_lines, reason_of

if TYPE_CHECKING:
    from zarrfs.config import options
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store

T = TypeVar("T")
SOURCES = ("source", "archive", "place", "other", "to")  # click parameters that may name a section of zarrfs.toml
Function = Callable[..., Any]

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_VERBOSITY = "zarrfs.log_level"  # key in click's Context.meta: the level set by -v, -q or -d of group or command
OWN = "option_"  # prefix of the parameters of long options, so that they never collide with a command's own


def process_options(function: Function) -> Function:
    """Add -v, -q and -d, which are short for log_level=; -d shows tracebacks as well."""

    def remember(level: str) -> Callable[[click.Context, click.Parameter, bool], None]:
        def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
            if value:
                ctx.meta[_VERBOSITY] = level

        return callback

    for flags, level, text in (
        (("-d", "--debug"), "debug", "Log everything, and show tracebacks of errors."),
        (("-q", "--quiet"), "error", "Print errors only."),
        (("-v", "--verbose"), "info", "Print what is done."),
    ):
        function = click.option(
            *flags, is_flag=True, expose_value=False, callback=remember(level), help=text
        )(function)
    return function


def verbosity() -> str | None:
    """Return the log_level given by -v, -q or -d to the running command or to its group; None without them."""
    level: str | None = click.get_current_context().meta.get(_VERBOSITY)
    return level


def source_options(*, output: str | None = None, log_level: str = "info") -> Callable[[Function], Function]:
    """Add -o, the long options of the table, and -v, -q and -d to a command.

    The command is called inside report_errors(), with `parsed`, an options.Parsed. A long option overrides -o.
    `log_level` is the command's default. `output` is the help text of -O FILE (--output), which is added only with
    that text; the command gets FILE as its parameter `output`.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(items: tuple[str, ...], **given: Any) -> Any:
            level = verbosity()
            with report_errors(debug=level == "debug"):
                words = option_words(items)
                for parameter in [one for one in given if one.startswith(OWN)]:
                    name, value = parameter.removeprefix(OWN), given.pop(parameter)
                    words += [name] * value if isinstance(value, bool) else [f"{name}={one}" for one in value]
                if level:
                    words.append(f"log_level={level}")
                return function(parsed=_merge(words, given, log_level), **given)

        from zarrfs.config.options import TABLE, help_text

        decorated: Function = process_options(run)
        for name in reversed([name for name, opt in TABLE.items() if opt.long]):
            text = help_text(name)
            decorated = click.option(f"--{name}", OWN + name, metavar=TABLE[name].metavar, multiple=True, help=text)(
                decorated
            )
        decorated = option_items(decorated)
        return click.option("-O", "--output", metavar="FILE", help=output)(decorated) if output else decorated

    return decorate


def _callback(parse: Callable[[str], T], error: str) -> Callable[..., T | None]:
    """Return a click callback for a parser of config/values.py; `error` is formatted with the value and its error."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> T | None:
        try:
            return None if value is None else parse(value)
        except ValueError as exc:
            raise click.BadParameter(error.format(value, exc), ctx, param) from None

    return callback


# callbacks of options that are not in the table; local_path refuses a URL, which would create a directory of that name
size = _callback(lambda text: int(text) if text.isdecimal() else optionvalues.size(text), "{!r} is not {}")
seconds = _callback(optionvalues.seconds, "{!r} is not {}")
local_path = _callback(optionvalues.local, "{!r}: expected {}")

option_items = click.option(
    "-o", "--option", "items", multiple=True, metavar="NAME[=VALUE],...",
    help="Give options as in mount(8): -o ro,retries=8. Takes every option of `zarrfs mount --help`, and those of "
    "protocols: -o s3.anon=true.",
)  # fmt: skip


def option_words(items: Sequence[str]) -> list[str]:
    """Split the values of -o into single options."""
    from zarrfs.config.options import split_commas

    return [part for item in items for part in split_commas(item)]


def _merge(words: list[str], given: dict[str, Any], log_level: str) -> options.Parsed:
    """Merge the options of command line, variables and files; replace names of zarrfs.toml in `given` by sources."""
    from zarrfs.config.effective import settings

    names = [name for name in SOURCES if isinstance(given.get(name), str)]
    found = settings(words, [given[name] for name in names], log_level)
    if verbosity() == "debug":
        for line in found.described:
            say(f"option {line}")
    given |= zip(names, found.sources, strict=False)
    return found.parsed


shard_option = click.option(
    "--shard", "share", metavar="I/N", callback=lambda ctx, param, value: share_of(value),
    help="Process share I of N (0 to N-1) only, by a hash of the key; other processes do the rest.",
)  # fmt: skip


@contextlib.contextmanager
def report_errors(debug: bool = False, status: int = 1) -> Iterator[None]:
    """Report an exception as one line on standard error, and exit. Ctrl-C and a closed pipe are not reported.

    The exit status is 2 for UsageError, 130 for Ctrl-C, 141 for a closed pipe, else `status`. With `debug`, print a
    traceback as well, except for Ctrl-C.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # inside the outer try, so that a failing flush is reported, too
    except (click.ClickException, click.Abort, click.exceptions.Exit, SystemExit):
        raise
    except BaseException as exc:
        cause = first_cause(exc)
        if debug and not isinstance(cause, KeyboardInterrupt):
            click.echo(message_lines(redact_text("".join(traceback.format_exception(exc)))), err=True, nl=False)
        raise SystemExit(_report(cause, status)) from None


def _report(exc: BaseException, status: int) -> int:
    """Write the error to standard error; return the exit status."""
    if isinstance(exc, KeyboardInterrupt):
        return 130
    if isinstance(exc, BrokenPipeError):  # the reader of standard output has closed it
        return 141
    if isinstance(exc, OSError) and exc.filename is None:
        say(reason_of(exc))
    elif isinstance(exc, ZarrfsError | OSError):
        say(str(exc))
    else:
        say(f"{internal_error(exc)} (-d shows where)")
    return 2 if isinstance(exc, UsageError) else status


def say(text: str) -> None:
    """Write one line to standard error, without secrets and control characters."""
    click.echo(f"zarrfs: {message_line(redact_text(text))}", err=True)


def run_on_store(
    source: str, parsed: options.Parsed, body: Callable[[Store, Plan], Awaitable[T]], reads: bool = True
) -> T:
    """Open `source`, print its warnings, and run `body(store, plan)` on trio; return its result.

    A child process plans the source; meanwhile this process imports modules. `reads` is false for a command that reads
    no files: missing blobs cause no warning then. Raise SourceError or UsageError.
    """
    from zarrfs.archives.source_kinds import NO_BLOBS
    from zarrfs.sources import discard, open_plan, plan_source

    chosen = parsed.options
    _prepare_output(chosen.log_level)

    async def run(plan: Plan) -> T:
        import trio

        store = open_plan(plan, chosen)
        try:
            return await body(store, plan)
        finally:
            with trio.CancelScope(shield=True):
                await store.aclose()

    plan = plan_source(source, chosen, meanwhile=lambda: _import_modules(reads), forks=True)
    try:
        for warning in () if chosen.log_level == "error" else plan.warnings:
            if reads or not warning.endswith(NO_BLOBS):
                say(f"warning: {warning}")
        from zarrfs.concurrency import tasks
        from zarrfs.system.memory import freeze_garbage_collector

        freeze_garbage_collector()  # collections that scan all modules take a twentieth of a copy's time
        return tasks.run(run, plan)
    finally:
        discard(plan)


def _import_modules(reads: bool) -> None:
    """Import the modules that most sources need."""
    importlib.import_module("zarrfs.store.index")
    if reads:
        importlib.import_module("zarrfs.store.remotefiles")


def _prepare_output(level: str) -> None:
    logging.basicConfig(format="zarrfs: %(message)s", stream=sys.stderr, force=True)
    logging.getLogger("zarrfs").setLevel(level.upper())
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may hold bytes that are not UTF-8
        utf8 = sys.stdout.encoding.lower() in ("utf-8", "utf8")
        sys.stdout.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")


def clean_key(text: str) -> str:
    """Return the key for a path typed by the user, without slashes at its ends. Raise InvalidKey if it is none."""
    from zarrfs.store.api import check_key

    return check_key(text.strip("/"), root=True)
