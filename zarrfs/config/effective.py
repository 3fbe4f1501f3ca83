"""The effective options of a command: zarrfs.toml, variables and the command line merged (docs/options.md).

Used by commands and by the functions of `import zarrfs`. Stores read neither configuration files nor the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zarrfs.config.options import TABLE, Assignments, Parsed, combine, put, read, split_commas, written
from zarrfs.config.redaction import USERS, redacted_storage, split_chain
from zarrfs.config.removed import OPTIONS, removed_option
from zarrfs.errors import UsageError, reason_of

if TYPE_CHECKING:
    from zarrfs.config.file import ConfigFile, Section

SYSTEM = "/etc/zarrfs/zarrfs.toml"
PREFIX = "ZARRFS_"  # of environment variables
_NO_OPTIONS = frozenset((PREFIX + "MOUNT",))  # set by `zarrfs run`
COMMAND_LINE = "the command line"


class Layer(NamedTuple):
    """The options of one origin: a section of a file, a variable, or the command line."""

    origin: str
    assignments: Assignments


class Settings(NamedTuple):
    """The effective options of one command."""

    parsed: Parsed
    sources: list[str]  # as given, but names of sections are replaced by the sources of those sections
    layers: list[Layer]  # the weakest first


def described(layers: Sequence[Layer]) -> list[str]:
    """Return a line for each option that is set, with its value and origin; values of storage options are hidden."""
    lines: dict[str, str] = {}
    for layer in layers:  # a later layer overrides an earlier one
        for name, value in layer.assignments.values.items():
            lines[name] = f"{name}={written(name, value)} ({layer.origin})"
        for place, storage in layer.assignments.storage.items():
            for key, value in storage.items():
                lines[f"{place}.{key}"] = f"{place}.{key}={redacted_storage(key, value)} ({layer.origin})"
    return list(lines.values())


def settings(
    items: Iterable[str], sources: Sequence[str] = (), defaults: Mapping[str, Any] | None = None, sloppy: bool = False
) -> Settings:
    """Return the effective options of a command with these `items` of -o and `sources`.

    `defaults` are the defaults of the command. With `sloppy`, unknown options among the items are ignored. Raise
    UsageError for any fault in a file, a variable or an item, even in the section of another source.
    """
    given = read(items, sloppy)
    layers: list[Layer] = []
    places = [*sources]
    for path, kind in _paths(given.values.get("config")):
        _, file = _look(path, kind)
        if file is not None:
            layers.append(Layer(file.options.origin, file.options.assignments))
            for number, source in reversed([*enumerate(sources)]):  # sections of the first source win
                layers += [Layer(section.origin, section.assignments) for section in _of(file, source, number, places)]
    layers += [*environment(), Layer(COMMAND_LINE, given)]
    parsed = combine((layer.assignments for layer in layers), defaults)
    return Settings(parsed, places, layers)


def files(named: str | None = None) -> list[tuple[str, str]]:
    """Return the configuration files, the weakest first, each with "read", "missing", or why it cannot be used.

    `named` is the file of --config, if given.
    """
    return [(path, _look(path, kind)[0]) for path, kind in _paths(named)]


def unknown_variables() -> list[str]:
    """Return the ZARRFS_ variables that zarrfs does not know. They are not an error: a site may define its own."""
    names = (name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX) and name not in _NO_OPTIONS)
    return sorted(PREFIX + name for name in names if name.lower() not in TABLE or name != name.upper())


def environment() -> list[Layer]:
    """Return a layer for each variable, such as ZARRFS_CACHE_DIR for cache_dir=. An empty variable is ignored."""
    found = []
    for name in OPTIONS:
        if os.environ.get(PREFIX + name.upper()):
            raise UsageError(f"${PREFIX}{name.upper()}: {removed_option(name)}")
    for name in TABLE:
        variable = PREFIX + name.upper()
        text = os.environ.get(variable)
        if text:
            given = Assignments()
            try:
                for one in split_commas(text) if TABLE[name].many else (text,):
                    put(given, name, one)
            except UsageError as exc:
                raise UsageError(f"${variable}: {exc}") from None
            found.append(Layer(f"${variable}", given))
    return found


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


def _of(file: ConfigFile, source: str, number: int, places: list[str]) -> list[Section]:
    """Return the sections for `source`, the weakest first.

    If `source` is the name of a section, set places[number] to the source of that section.
    """
    from zarrfs.config.file import source_of

    named = [section for section in file.sections if section.source is not None and section.name == source]
    for section in named:
        places[number] = source_of(section)
        section.assignments.values.setdefault("fsname", section.name)  # as in fstab, with which mount -a compares it
    fitting = [
        section for section in file.sections
        if section.source is None and any(map(_begins(section.name), _spellings(places[number])))
    ]  # fmt: skip
    return [*sorted(fitting, key=lambda section: len(_start(section.name))), *named]


def _begins(prefix: str) -> Callable[[str], object]:
    """Return a function that tests whether a spelling begins with `prefix`, as whole path components or a host."""
    start = _start(prefix)
    return re.compile(re.escape(start) + ("" if start.endswith(":") else "(?![^/?#])")).match


def _start(prefix: str) -> str:
    return _spellings(os.path.expanduser(prefix) if prefix.startswith("~") else prefix)[0].rstrip("/")


def _spellings(source: str) -> list[str]:
    """Return a source in normal form: an absolute path, or a URL without user; of a chained URL also its last link.

    Names of the same protocol (s3, s3a) and spellings of a host become equal. http and https stay distinct.
    """
    from zarrfs.config.urls import file_path, names

    found = []
    for text in dict.fromkeys((source, split_chain(source)[-1])):
        path = file_path(text)
        protocol, separator, rest = path.partition("://")
        protocol = protocol.lower()
        if separator:
            host, slash, more = rest.partition("/")
            if protocol in USERS:
                host = host.rpartition("@")[2].lower()
            else:
                protocol = names(protocol)[0]
            found.append(f"{protocol}://{host}{slash}{more}")
        elif path is not text or not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text):
            found.append(os.path.abspath(path))
        else:
            found.append(text)
    return found
