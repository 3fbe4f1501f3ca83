"""The effective options of a command: zarrfs.toml, variables and the command line merged (docs/options.md).

Used by commands and by the functions of `import zarrfs`. Stores read neither configuration files nor the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zarrfs.config.options import TABLE, Given, Parsed, split_commas
from zarrfs.errors import UsageError, reason_of

if TYPE_CHECKING:
    from zarrfs.config.file import ConfigFile

SYSTEM = "/etc/zarrfs/zarrfs.toml"
PREFIX = "ZARRFS_"  # of environment variables
_NO_OPTIONS = frozenset((PREFIX + "MOUNT",))  # set by `zarrfs run`


class Settings(NamedTuple):
    """The effective options of one command."""

    parsed: Parsed
    sources: list[str]  # as given, but names of sections are replaced by the sources of those sections
    described: list[str]  # a line for each option that is set, with its value and origin, without secrets


def settings(
    items: Iterable[str], sources: Sequence[str] = (), defaults: Mapping[str, Any] | None = None, sloppy: bool = False
) -> Settings:
    """Return the effective options of a command with these `items` of -o and `sources`.

    `defaults` are the defaults of the command. With `sloppy`, unknown options among the items are ignored. Raise
    UsageError for any fault in a file, a variable or an item, even in the section of another source.
    """
    line, given, items, places = Given(), Given(defaults), [*items], [*sources]
    line.add(items, sloppy=sloppy)
    for path, kind in _paths(line.values.get("config")):
        _, file = _look(path, kind)
        if file is not None:
            sections = [*file.sections]
            for number, source in reversed([*enumerate(sources)]):  # the section of the first source wins
                if source in file.named:
                    places[number] = file.named[source].source
                    sections += file.named[source].sections
            for section in sections:
                given.add(section.items, f"{path} {section.name}")
    for variable, found in environment():
        given.add(found, variable)
    given.add(items, "the command line", sloppy)
    return Settings(given.parsed(), places, [*given.text.values()])


def files(named: str | None = None) -> list[tuple[str, str]]:
    """Return the configuration files, the weakest first, each with "read", "missing", or why it cannot be used.

    `named` is the file of --config, if given.
    """
    return [(path, _look(path, kind)[0]) for path, kind in _paths(named)]


def unknown_variables() -> list[str]:
    """Return the ZARRFS_ variables that zarrfs does not know. They are not an error: a site may define its own."""
    names = (name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX) and name not in _NO_OPTIONS)
    return sorted(PREFIX + name for name in names if name.lower() not in TABLE or name != name.upper())


def environment() -> Iterator[tuple[str, list[str]]]:
    """Yield each variable, such as $ZARRFS_CACHE_DIR for cache_dir=, with its items. An empty one is ignored."""
    for name in TABLE:
        variable = PREFIX + name.upper()
        text = os.environ.get(variable)
        if text:
            items = [f"{name}={one}" for one in (split_commas(text) if TABLE[name].many else (text,))]
            try:
                Given().add(items)
            except UsageError as exc:
                raise UsageError(f"${variable}: {exc}") from None
            yield f"${variable}", items


def _paths(named: str | None) -> list[tuple[str, str]]:
    """Return (path, kind) of the configuration files, the weakest first."""
    variable = os.environ.get(f"{PREFIX}CONFIG")
    if named or variable:
        return [(SYSTEM, "system"), (os.path.abspath(named or variable or ""), "named")]
    home = os.environ.get("XDG_CONFIG_HOME", "")
    directory = home if os.path.isabs(home) else os.path.expanduser("~/.config")
    path = os.path.join(directory, "zarrfs/zarrfs.toml")
    return [(SYSTEM, "system"), *([(path, "user")] if os.path.isabs(path) else [])]


def _look(path: str, kind: str) -> tuple[str, ConfigFile | None]:
    """Read a configuration file if it exists. Raise UsageError if it cannot be used."""
    if kind != "named" and not os.path.lexists(path):  # before the TOML parser is imported
        return "missing", None
    from zarrfs.config.file import read_file

    try:
        return "read", read_file(path, owned=kind == "user")
    except OSError as exc:
        reason = reason_of(exc)
    if kind == "system" and not os.access(path, os.R_OK):
        return f"not for this user: {reason}", None
    raise UsageError(f"{path}: {reason}")
