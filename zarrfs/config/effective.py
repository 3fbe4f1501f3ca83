"""What says which option, and which of them wins: zarrfs.toml, variables, the command line (docs/configuration.md).

For programs that a user starts: the library reads neither files nor environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zarrfs.config.options import TABLE, Parsed, Said, combine, put, read, split_commas
from zarrfs.config.redaction import links
from zarrfs.errors import UsageError

if TYPE_CHECKING:
    from zarrfs.config.file import File, Section

SYSTEM = "/etc/zarrfs/zarrfs.toml"
PREFIX = "ZARRFS_"  # of variables
COMMAND_LINE = "the command line"


class Layer(NamedTuple):
    """What one place says, and where that is."""

    origin: str
    said: Said


class Found(NamedTuple):
    """A file that is looked for, and what came of that: "read", "missing", or why it cannot be used."""

    path: str
    kind: str  # system, user, or named (--config)
    outcome: str


class Settings(NamedTuple):
    """What holds for one command."""

    parsed: Parsed
    sources: list[str]  # with what names stand for in their place
    layers: list[Layer]  # the weakest first
    files: list[Found]


def settings(
    items: Iterable[str], sources: Sequence[str] = (), defaults: Mapping[str, Any] | None = None, sloppy: bool = False
) -> Settings:
    """What holds for a command with `items` of -o and these sources; `defaults`: the command's own.

    UsageError for whatever is wrong in a file, a variable or an item, also in sections of other sources.
    """
    said = read(items, sloppy)
    layers: list[Layer] = []
    places = [*sources]
    looked = [_look(path, kind) for path, kind in _paths(said.values.get("config"))]
    for _found, file in looked:
        if file is not None:
            layers.append(Layer(file.origin, file.options))
            for number, source in reversed([*enumerate(sources)]):  # those of the first one win
                layers += [Layer(section.origin, section.said) for section in _of(file, source, number, places)]
    layers += [*environment(), Layer(COMMAND_LINE, said)]
    parsed = combine((layer.said for layer in layers), defaults)
    return Settings(parsed, places, layers, [found for found, _file in looked])


def files(named: str | None = None) -> list[Found]:
    """The files that are looked for, the weakest first; `named`: that of --config, if there is one."""
    found = []
    for path, kind in _paths(named):
        try:
            found.append(_look(path, kind)[0])
        except UsageError as exc:
            found.append(Found(path, kind, str(exc).removeprefix(f"{path}: ")))
    return found


def unknown_variables() -> list[str]:
    """Variables that look like options and are none; they are left alone, as schedulers' scripts have some."""
    names = (name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX))
    return sorted(PREFIX + name for name in names if name.lower() not in TABLE or name != name.upper())


def environment() -> list[Layer]:
    """What variables say, each for itself: ZARRFS_CACHE_DIR is cache_dir=. An empty one says nothing."""
    found = []
    for name in TABLE:
        variable = PREFIX + name.upper()
        text = os.environ.get(variable)
        if text:
            said = Said()
            listed = TABLE[name].metadata["many"] and name != "storage_options"
            try:
                for one in split_commas(text) if listed else (text,):
                    put(said, name, one)
            except UsageError as exc:
                raise UsageError(f"${variable}: {exc}") from None
            for place, options in said.values.get("storage_options", ()):
                said.storage[place] = dict(options)
            found.append(Layer(f"${variable}", said))
    return found


def _paths(named: str | None) -> list[tuple[str, str]]:
    """The files that are looked for, with their kind."""
    variable = os.environ.get(f"{PREFIX}CONFIG")
    if named or variable:
        return [(SYSTEM, "system"), (os.path.abspath(named or variable or ""), "named")]
    home = os.environ.get("XDG_CONFIG_HOME", "")
    directory = home if os.path.isabs(home) else os.path.expanduser("~/.config")
    path = os.path.join(directory, "zarrfs/zarrfs.toml")
    return [(SYSTEM, "system"), *([(path, "user")] if os.path.isabs(path) else [])]


def _look(path: str, kind: str) -> tuple[Found, File | None]:
    """What came of looking for a file, and the file; UsageError where it cannot be used."""
    if kind != "named" and not os.path.lexists(path):  # before anything is imported for it
        return Found(path, kind, "missing"), None
    from zarrfs.config.file import read_file

    try:
        return Found(path, kind, "read"), read_file(path, owned=kind == "user")
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
    if kind == "system" and not os.access(path, os.R_OK):
        return Found(path, kind, f"not for this user: {reason}"), None
    raise UsageError(f"{path}: {reason}")


def _of(file: File, source: str, number: int, places: list[str]) -> list[Section]:
    """The sections of a file that are of `source`, the weakest first; what its name stands for becomes its place."""
    from zarrfs.config.file import source_of

    named = [section for section in file.sections if section.source is not None and section.name == source]
    for section in named:
        places[number] = source_of(section)
        section.said.values.setdefault("fsname", section.name)  # which fstab has, too, and mount -a compares
    fitting = [
        section for section in file.sections
        if section.source is None and any(map(_begins(section.name), _spellings(places[number])))
    ]  # fmt: skip
    return [*sorted(fitting, key=lambda section: len(section.name)), *named]


def _begins(prefix: str) -> Callable[[str], object]:
    """What tells whether a spelling begins with `prefix`, which ends where a name does."""
    start = _spellings(os.path.expanduser(prefix) if prefix.startswith("~") else prefix)[0].rstrip("/")
    return re.compile(re.escape(start) + ("" if start.endswith(":") else "(?![^/?#])")).match


def _spellings(source: str) -> list[str]:
    """A source as sections are compared with it: an absolute path, a URL without user; of a chain also the last link.

    Names of a protocol and of a host are the same in all their spellings; http and https are two.
    """
    from zarrfs.config.urls import file_path, names

    found = []
    for text in dict.fromkeys((source, links(source)[-1])):
        path = file_path(text)
        protocol, separator, rest = path.partition("://")
        protocol = protocol.lower()
        if separator:
            host, slash, more = rest.partition("/")
            if protocol in ("http", "https"):
                host = host.rpartition("@")[2].lower()
            else:
                protocol = names(protocol)[0]
            found.append(f"{protocol}://{host}{slash}{more}")
        elif path is not text or not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text):
            found.append(os.path.abspath(path))
        else:
            found.append(text)
    return found
