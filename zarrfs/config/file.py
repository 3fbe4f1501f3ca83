"""Reader of zarrfs.toml: checks a file as a whole, and returns the options of its sections. docs/options.md"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from zarrfs.config.options import NO_FILE, ONE_SOURCE, TABLE, Assignments, put
from zarrfs.config.redaction import is_secret, names_file, without_secrets
from zarrfs.config.removed import removed_option
from zarrfs.config.storage import absolute, check_storage
from zarrfs.config.values import DEPTH, FLAG, content, did_you_mean, is_url, place_name
from zarrfs.errors import UsageError, reason_of

SECTIONS = ("options", "storage", "source")
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

    path: str
    options: Assignments  # of all sources: [options] and [storage]
    sections: tuple[Section, ...]

    @property
    def origin(self) -> str:
        """The origin of the options of all sources."""
        return f"{self.path} [options]"


def read_file(path: str, owned: bool) -> ConfigFile:
    """Read and check a file; with `owned` it must belong to root or to the user.

    Raise FileNotFoundError or PermissionError if it cannot be opened. For any other fault raise UsageError, which
    names the file, the section, the key and the rule.
    """
    import tomllib

    try:
        data, status = content(path)
        tables = tomllib.loads(data.decode())
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as exc:
        raise UsageError(f"{path}: {reason_of(exc)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UsageError(f"{path}: not TOML: {exc}") from None
    except ValueError as exc:
        raise UsageError(f"{path}: {exc}") from None
    _check_rights(path, status, owned)
    reading = _Reading(path)
    found = reading.file(tables)
    if reading.secret and stat.S_ISREG(status.st_mode) and status.st_mode & 0o004:
        rule = "is a secret, and all may read this file: chmod o-r"
        other = ', or keep it in a file of its own and name that, as "@/path"' if reading.may_be_in_a_file else ""
        raise UsageError(f"{path}: {reading.secret}: {rule}{other}")
    return found


def _check_rights(path: str, status: os.stat_result, owned: bool) -> None:
    """Raise UsageError if all users may write the file, because it decides where data goes.

    With `owned`, refuse also a file that is neither root's nor the user's, and, for root, one that a group other than
    root's may write. Only regular files are checked.
    """
    if not stat.S_ISREG(status.st_mode):
        return
    if owned and status.st_uid not in (0, os.geteuid()):
        rule = f"belongs to user {status.st_uid}: without --config only root's and your own are read"
        raise UsageError(f"{path}: {rule}")
    if status.st_mode & 0o002 or (owned and os.geteuid() == 0 and status.st_mode & 0o020 and status.st_gid != 0):
        raise UsageError(f"{path}: may be written by others: chmod go-w")


class _Reading:
    """The state of reading one configuration file."""

    def __init__(self, path: str) -> None:
        self._path, self._at = path, ""
        self.secret = ""  # section and key of the first secret in the file
        self.may_be_in_a_file = True  # whether the value of that key may be "@/path"

    def file(self, content: Mapping[str, Any]) -> ConfigFile:
        """Check the whole content and return it. Raise UsageError."""
        for name in content:
            if name not in SECTIONS:
                at = f"[{name}]" if isinstance(content[name], dict) else name
                rule = f"no section: expected {', '.join(f'[{one}]' for one in SECTIONS)}"
                raise self._wrong(at, rule + did_you_mean(name, SECTIONS))
        given = Assignments()
        self._options(given, self._table(content.get("options", {}), "[options]"), one_source=False)
        self._storage(given, self._table(content.get("storage", {}), "[storage]"), "storage")
        sources = self._table(content.get("source", {}), "[source]")
        return ConfigFile(self._path, given, tuple(self._section(name, table) for name, table in sources.items()))

    def _section(self, name: str, value: Any) -> Section:
        at = f"[source.{name if _NAME.fullmatch(name) and '.' not in name else _quoted(without_secrets(name))}]"
        table = dict(self._table(value, at))
        source = table.pop("source", None)
        if without_secrets(name) != name:
            raise self._wrong(at, 'its name has a secret in it; give it a plain name, and "source = URL"')
        named = _NAME.fullmatch(name) is not None and not name.startswith("~")
        if source is None and named:
            raise self._wrong(at, "a plain name needs source=; a path or URL that sources begin with is absolute")
        if source is not None:
            if not isinstance(source, str) or not source:
                raise self._wrong(f"{at} source", "expected text, in quotes")
            if "\0" in source:
                raise self._wrong(f"{at} source", "has a NUL character")
            if not named:
                raise self._wrong(at, "with source= its name is a plain word, without / : # ?")
            if without_secrets(source) != source:
                self.secret = self.secret or f"{at} source"
            if not (_SCHEME.match(source) or names_file(source)):
                source = self._beside(source)
        given = Assignments()
        storage = self._table(table.pop("storage", {}), f"{at[:-1]}.storage]")
        self._options(given, self._table(table, at), one_source=True)
        self._storage(given, storage, f"{at[1:-1]}.storage")
        return Section(name, source, given, f"{self._path} {at}")

    def _options(self, given: Assignments, table: Mapping[str, Any], one_source: bool) -> None:
        """Add the options of `table`, a section that _table() has checked."""
        for key, value in table.items():
            name, at = key.replace("-", "_"), f"{self._at} {key}"
            if name not in TABLE:
                if removed := removed_option(name):
                    raise self._wrong(at, removed)
                raise self._wrong(at, "unknown option" + did_you_mean(name, TABLE))
            if TABLE[name].where == NO_FILE:
                raise self._wrong(at, "a file names no other")
            if TABLE[name].where == ONE_SOURCE and not one_source:
                raise self._wrong(at, "belongs to one source: in a [source] section")
            if isinstance(value, list) and TABLE[name].many:
                given.values[name] = ()
                for one in value:
                    self._put(given, name, one, at)
            else:
                self._put(given, name, value, at)

    def _put(self, given: Assignments, name: str, value: Any, at: str) -> None:
        kind, metavar = TABLE[name].kind, TABLE[name].metavar
        if isinstance(value, bool) and kind is FLAG:
            value = "true" if value else "false"
        elif isinstance(value, int | float) and not isinstance(value, bool) and kind.number:
            value = str(value)
        if not isinstance(value, str):
            raise self._wrong(at, "expected true or false" if kind is FLAG else "expected text, in quotes")
        if kind is FLAG and not value:
            raise self._wrong(at, "expected true or false")
        if "\0" in value:  # which no path, variable or argument can contain
            raise self._wrong(at, "has a NUL character")
        if not self.secret and without_secrets(value) != value:
            self.secret, self.may_be_in_a_file = at, False
        local = metavar in ("DIR", "FILE") and not is_url(value)  # for a URL the parser raises the error
        if value and (local or (metavar in ("PLACE", "URL") and not _SCHEME.match(value))):
            value = self._beside(value)
        try:
            put(given, name, value)
        except UsageError as exc:
            raise UsageError(f"{self._path}: {at}: {exc}") from None

    def _beside(self, path: str) -> str:
        """Return an absolute path. A relative one starts in the directory of the configuration file; expand "~"."""
        return os.path.join(os.path.dirname(os.path.abspath(self._path)), os.path.expanduser(path))

    def _storage(self, given: Assignments, table: Mapping[str, Any], name: str) -> None:
        """Add options of fsspec's file systems: a table for each protocol, host or bucket."""
        for place, value in table.items():
            at = f"[{name}.{place if _NAME.fullmatch(place) else _quoted(without_secrets(place))}]"
            if not place_name(place):
                raise self._wrong(at, 'expected a protocol, as in [storage.s3], or [storage."PROTOCOL://HOST"]')
            for key, one in self._table(value, at).items():
                if _depth(one) > DEPTH:
                    raise self._wrong(f"{at} {key}", "nested too deeply")
                if not _plain(one):
                    raise self._wrong(f"{at} {key}", "is no value that an option can have")
                if is_secret(key, one):
                    self.secret = self.secret or f"{at} {key}"
            try:
                check_storage(place, {key: one for key, one in value.items() if not _from_file(one)})
            except UsageError as exc:
                raise self._wrong(at, str(exc)) from None
            located = {key: self._located(place, key, one) for key, one in value.items()}
            given.storage.setdefault(place, {}).update(located)

    def _located(self, place: str, name: str, value: object) -> object:
        """Return the value of a storage option, with paths of files made absolute as by _beside()."""
        if isinstance(value, list):
            return [self._located(place, name, one) for one in value]
        if isinstance(value, str) and (names_file(value) or "\0" in value):  # combine() refuses a NUL
            return value
        return absolute(place, name, value, self._beside(""))

    def _table(self, value: Any, at: str) -> Mapping[str, Any]:
        """Return `value` if it is a table, else raise UsageError; name the section `at` in errors from now on."""
        self._at = at
        if not isinstance(value, dict):
            raise self._wrong(at, "expected a section, not a value")
        return value

    def _wrong(self, at: str, rule: str) -> UsageError:
        return UsageError(f"{self._path}: {at}: {rule}")


def _depth(value: object) -> int:
    """Return the nesting depth of tables and lists; DEPTH + 1 if it is greater than DEPTH."""
    found, layer = 0, [value]
    while found <= DEPTH and (layer := [one for one in layer if isinstance(one, dict | list)]):
        layer = [inner for one in layer for inner in (one.values() if isinstance(one, dict) else one)]
        found += 1
    return found


def _plain(value: object) -> bool:
    """Return whether JSON can express the value, so that it can be passed to another process."""
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    if isinstance(value, list):
        return all(map(_plain, value))
    return isinstance(value, str | int | float)


def _from_file(value: object) -> bool:
    return isinstance(value, str) and names_file(value)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def source_of(section: Section) -> str:
    """Return the source of a named section; read it from a file if it is "@/path".

    Raise UsageError if the file cannot be read, or does not hold one line.
    """
    assert section.source is not None
    if not names_file(section.source):
        return section.source
    try:
        found = content(section.source[1:])[0].decode().strip()
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not text" if isinstance(exc, UnicodeError) else ""
        raise UsageError(f"{section.origin}: source = {section.source}: {(reason or str(exc)).lower()}") from None
    if not found or "\n" in found or "\0" in found:
        raise UsageError(f"{section.origin}: source = {section.source}: expected one line")
    return found
