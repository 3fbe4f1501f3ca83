"""The effective options of a command: zarrfs.toml, variables and the command line merged (docs/options.md).

Used by commands and by the functions of `import zarrfs`. Stores read neither configuration files nor the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

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


def settings(items: Iterable[str], sources: Sequence[str] = (), log_level: str = "info") -> Settings:
    """Return the effective options of a command with these `items` of -o and `sources`; `log_level` is its default.

    Raise UsageError for any fault in a file, a variable or an item, even in the section of another source.
    """
    given, line, places = Given(), Given("the command line"), [*sources]
    given.values["log_level"] = log_level
    line.add(items)
    for path, kind in files(line.values.get("config")):
        if (file := _read(path, kind)) is not None:
            sections = [*file.sections]
            for number, source in reversed([*enumerate(sources)]):  # the section of the first source wins
                if source in file.named:
                    places[number], own = file.named[source]
                    sections += own
            for section in sections:
                given.update(section)
    for name in TABLE:
        if text := os.environ.get(variable := PREFIX + name.upper()):  # such as $ZARRFS_CACHE_DIR
            own_items = [f"{name}={one}" for one in (split_commas(text) if TABLE[name].many else (text,))]
            try:
                (found := Given(f"${variable}")).add(own_items)
            except UsageError as exc:
                raise UsageError(f"${variable}: {exc}") from None
            given.update(found)
    given.update(line)
    return Settings(given.parsed(), places, [*given.text.values()])


def unknown_variables() -> list[str]:
    """Return the ZARRFS_ variables that zarrfs does not know. They are not an error: a site may define its own."""
    names = (name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX) and name not in _NO_OPTIONS)
    return sorted(PREFIX + name for name in names if name.lower() not in TABLE or name != name.upper())


def files(named: str | None) -> list[tuple[str, str]]:
    """Return (path, kind) of the configuration files, the weakest first. `named` is the file of --config, if given."""
    variable = os.environ.get(f"{PREFIX}CONFIG")
    if named or variable:
        return [(SYSTEM, "system"), (os.path.abspath(named or variable or ""), "named")]
    home = os.environ.get("XDG_CONFIG_HOME", "")
    directory = home if os.path.isabs(home) else os.path.expanduser("~/.config")
    path = os.path.join(directory, "zarrfs/zarrfs.toml")
    return [(SYSTEM, "system"), *([(path, "user")] if os.path.isabs(path) else [])]


def _read(path: str, kind: str) -> ConfigFile | None:
    """Read a configuration file; None if it does not exist. Raise UsageError if it cannot be used."""
    if kind != "named" and not os.path.lexists(path):  # before the TOML parser is imported
        return None
    if kind == "system" and not os.access(path, os.R_OK):  # root may keep it from this user
        return None
    from zarrfs.config.file import read_file

    try:
        return read_file(path, owned=kind == "user")
    except OSError as exc:
        raise UsageError(f"{path}: {reason_of(exc)}") from None
