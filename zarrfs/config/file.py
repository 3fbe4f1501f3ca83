"""Reader of zarrfs.toml: checks a file as a whole, and returns the options of its sections. docs/options.md"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from zarrfs.config.options import NO_FILE, ONE_SOURCE, TABLE, Assignments, put
from zarrfs.config.redaction import is_secret, names_file, without_secrets
from zarrfs.config.removed import removed_option
from zarrfs.config.storage import absolute, check_storage
from zarrfs.config.values import FLAG, OCTAL, content, did_you_mean, from_files, is_url, place_name
from zarrfs.errors import UsageError, reason_of

_SECTIONS = ("options", "storage", "source")
_SCHEME = re.compile(r"[A-Za-z0-9+.-]+:")  # matches text that is not a path
_NAME = re.compile(r"[^\s/:#?]+")


class Section(NamedTuple):
    """[source.NAME]: options of the sources that begin with NAME, or of `source`, for which NAME is an alias."""

    name: str
    source: str | None
    assignments: Assignments
    origin: str


class ConfigFile(NamedTuple):
    """The content of a zarrfs.toml."""

    options: Section  # of all sources: [options] and [storage]
    sections: tuple[Section, ...]


def read_file(path: str, owned: bool) -> ConfigFile:
    """Read and check a file; with `owned` it must belong to root or to the user.

    Raise FileNotFoundError or PermissionError if it cannot be opened. For any other fault raise UsageError, which
    names the file, the section, the key and the rule.
    """
    import tomllib

    try:
        data, status = content(path)
        tables = tomllib.loads(data.decode())
        if stat.S_ISREG(status.st_mode):
            _check_rights(status, owned)
        found = _file(path, tables)
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o004:
            _check_secrets(path, (found.options, *found.sections))
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as exc:
        raise UsageError(f"{path}: {reason_of(exc)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UsageError(f"{path}: not TOML: {exc}") from None
    except (UsageError, ValueError) as exc:
        raise UsageError(f"{path}: {exc}") from None
    return found


def source_of(section: Section) -> str:
    """Return the source of a named section; read it from a file if it is "@/path". Raise UsageError."""
    try:
        found = from_files(section.source)
    except ValueError as exc:
        raise UsageError(f"{section.origin}: source: {exc}") from None
    if not isinstance(found, str) or "\n" in found:
        raise UsageError(f"{section.origin}: source: {section.source}: expected one line")
    return found


def _check_rights(status: os.stat_result, owned: bool) -> None:
    """Raise UsageError for a file that others may write, because it decides where data goes.

    With `owned`, refuse also a file that is neither root's nor the user's, and, for root, one that a group other than
    root's may write.
    """
    if owned and status.st_uid not in (0, os.geteuid()):
        raise UsageError(f"belongs to user {status.st_uid}: without --config only root's and your own are read")
    if status.st_mode & 0o002 or (owned and os.geteuid() == 0 and status.st_mode & 0o020 and status.st_gid != 0):
        raise UsageError("may be written by others: chmod go-w")


def _check_secrets(path: str, sections: tuple[Section, ...]) -> None:
    """Raise UsageError for a secret, in a file that all may read."""
    for section in sections:
        given, at = section.assignments, section.origin.removeprefix(f"{path} ")
        below = f"{at[1:-1]}.storage" if section.name else "storage"
        found = [f"{_headed(below, place)} {name}" for place, storage in given.storage.items()
                 for name, value in storage.items() if is_secret(name, value)]  # fmt: skip
        texts = {name: value if isinstance(value, tuple) else (value,) for name, value in given.values.items()}
        texts["source"] = (section.source or "",)
        found += [f"{at} {name}" for name, each in texts.items()
                  if any(without_secrets(str(one)) != str(one) for one in each)]  # fmt: skip
        if found:
            raise UsageError(f"{found[0]} is a secret, and all may read this file: chmod o-r")


def _file(path: str, tables: Mapping[str, Any]) -> ConfigFile:
    for name in tables:
        if name not in _SECTIONS:
            hint = did_you_mean(name, _SECTIONS)
            raise UsageError(f"{name}: no section: expected {', '.join(f'[{one}]' for one in _SECTIONS)}{hint}")
    here = os.path.dirname(os.path.abspath(path))
    given = Assignments()
    _options(given, tables.get("options", {}), "[options]", here, NO_FILE, ONE_SOURCE)
    _storage(given, tables.get("storage", {}), "storage", here)
    sections = [
        _section(name, table, path, here) for name, table in _table(tables.get("source", {}), "[source]").items()
    ]
    return ConfigFile(Section("", None, given, f"{path} [options]"), tuple(sections))


def _section(name: str, value: Any, path: str, here: str) -> Section:
    at = _headed("source", name)
    table = dict(_table(value, at))
    source, storage = table.pop("source", None), table.pop("storage", {})
    plain = _NAME.fullmatch(name) is not None and not name.startswith("~")
    if without_secrets(name) != name:
        raise UsageError(f'{at}: its name has a secret in it; give it a plain name, and "source = URL"')
    if plain and source is None:
        raise UsageError(f"{at}: a plain name needs source=; a path or URL that sources begin with is absolute")
    if source is not None:
        if not plain:
            raise UsageError(f"{at}: with source= its name is a plain word, without / : # ?")
        if not isinstance(source, str) or not source or "\0" in source:
            raise UsageError(f"{at} source: expected text, in quotes")
        if not (_SCHEME.match(source) or names_file(source)):
            source = _located(here, source)
    given = Assignments()
    _options(given, table, at, here, NO_FILE)
    _storage(given, storage, f"{at[1:-1]}.storage", here)
    return Section(name, source, given, f"{path} {at}")


def _options(given: Assignments, table: Any, at: str, here: str, *refused: str) -> None:
    """Add the options of a section. `refused` are the values of Opt.where that are errors in it."""
    for key, value in _table(table, at).items():
        name = key.replace("-", "_")
        if name not in TABLE:
            raise UsageError(f"{at} {key}: {removed_option(name) or 'unknown option' + did_you_mean(name, TABLE)}")
        if TABLE[name].where in refused:
            raise UsageError(f"{at} {key}: can be set {TABLE[name].where}")
        if isinstance(value, list) and TABLE[name].many:
            given.values[name] = ()
        for one in value if isinstance(value, list) and TABLE[name].many else (value,):
            try:
                put(given, name, _text(name, one, here))
            except UsageError as exc:
                raise UsageError(f"{at} {key}: {exc}") from None


def _text(name: str, value: Any, here: str) -> str:
    """Return a value as it would be written in -o, with paths of files made absolute."""
    opt = TABLE[name]
    if isinstance(value, bool) and opt.kind is FLAG:
        return "true" if value else "false"
    if type(value) in (int, float) and opt.kind is not OCTAL:
        value = str(value)
    if not isinstance(value, str):
        raise UsageError("expected text, in quotes")
    local = opt.metavar in ("DIR", "FILE") and not is_url(value)  # for a URL the parser raises the error
    relative = opt.metavar in ("PLACE", "URL") and not _SCHEME.match(value)
    return _located(here, value) if value and "\0" not in value and (local or relative) else value


def _located(here: str, path: str) -> str:
    """Return an absolute path. A relative one starts in the directory of the configuration file; expand "~"."""
    return os.path.join(here, os.path.expanduser(path))


def _storage(given: Assignments, tables: Any, section: str, here: str) -> None:
    """Add the options of protocols, hosts and buckets: a table for each."""
    for place, table in _table(tables, f"[{section}]").items():
        at = _headed(section, place)
        if not place_name(place):
            raise UsageError(f'{at}: expected a protocol, as in [storage.s3], or [storage."PROTOCOL://HOST"]')
        _table(table, at)
        try:
            check_storage(place, table)
        except UsageError as exc:
            raise UsageError(f"{at}: {exc}") from None
        for name, value in table.items():
            try:
                json.dumps(value)
            except (TypeError, RecursionError):
                raise UsageError(f"{at} {name}: has a value that no option can have") from None
            given.storage.setdefault(place, {})[name] = absolute(place, name, value, here)


def _headed(section: str, name: str) -> str:
    """Return the heading of a section, with the name quoted as in TOML."""
    plain = _NAME.fullmatch(name) and "." not in name
    return f"[{section}.{name if plain else json.dumps(without_secrets(name), ensure_ascii=False)}]"


def _table(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{at}: expected a section, not a value")
    return value
