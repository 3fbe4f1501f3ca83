"""Reader of zarrfs.toml: checks a file as a whole, and returns the options of its sections. docs/options.md"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zarrfs.config.keywords import as_items
from zarrfs.config.options import NO_FILE, ONE_SOURCE, TABLE, Given
from zarrfs.config.redaction import is_secret, without_secrets
from zarrfs.config.storage import absolute
from zarrfs.config.values import OCTAL, content, did_you_mean, is_url, place_name
from zarrfs.errors import UsageError, reason_of

_SECTIONS = ("options", "storage", "source")
_SCHEME = re.compile(r"[A-Za-z0-9+.-]+:")  # matches text that is not a path
_NAME = re.compile(r"[^\s/:#?~][^\s/:#?]*")


class ConfigFile(NamedTuple):
    """The content of a zarrfs.toml."""

    sections: list[Given]  # of all sources: [options] and [storage]
    named: dict[str, tuple[str, list[Given]]]  # the source and the sections of each [source.NAME]


def read_file(path: str, owned: bool) -> ConfigFile:
    """Read and check a file; with `owned` it must belong to root or to the user.

    Raise FileNotFoundError or PermissionError if it cannot be opened. For any other fault raise UsageError, which
    names the file, the section, the option and the rule.
    """
    import tomllib

    try:
        data, status = content(path)
        tables = tomllib.loads(data.decode())
        regular = stat.S_ISREG(status.st_mode)
        if regular:
            _check_rights(status, owned)
        return _Reader(path, regular and bool(status.st_mode & 0o004)).file(tables)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as exc:
        raise UsageError(f"{path}: {reason_of(exc)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UsageError(f"{path}: not TOML: {exc}") from None
    except (UsageError, ValueError) as exc:
        raise UsageError(f"{path}: {exc}") from None


def _check_rights(status: os.stat_result, owned: bool) -> None:
    """Raise UsageError for a file that others may write, because it decides where data goes.

    With `owned`, refuse also a file that is neither root's nor the user's, and, for root, one that a group other than
    root's may write.
    """
    if owned and status.st_uid not in (0, os.geteuid()):
        raise UsageError(f"belongs to user {status.st_uid}: without --config only root's and your own are read")
    if status.st_mode & 0o002 or (owned and os.geteuid() == 0 and status.st_mode & 0o020 and status.st_gid != 0):
        raise UsageError("may be written by others: chmod go-w")


class _Reader(NamedTuple):
    """A reader of the tables of one file."""

    path: str
    public: bool  # all users may read the file, so it must not have a secret

    def file(self, tables: Mapping[str, Any]) -> ConfigFile:
        for name in tables:
            if name not in _SECTIONS:
                hint = ": set it below a line [options]" if name in TABLE else did_you_mean(name, _SECTIONS)
                raise UsageError(f"{name}: unknown section{hint}")
        sections = [self._options(tables.get("options", {}), "options", (NO_FILE, ONE_SOURCE))]
        sections += self._storage(tables.get("storage", {}), "storage")
        named = _table(tables.get("source", {}), "source")
        return ConfigFile(sections, {name: self._named(name, table) for name, table in named.items()})

    def _named(self, name: str, value: Any) -> tuple[str, list[Given]]:
        at = f"source.{_quoted(name)}"
        table = dict(_table(value, at))
        source, storage = table.pop("source", None), table.pop("storage", {})
        if _NAME.fullmatch(name) is None:
            raise UsageError(f"[{at}]: the name of a source has no blanks and none of / : # ?")
        if not isinstance(source, str) or not source or "\0" in source:
            raise UsageError(f'[{at}]: expected a line source = "PATH OR URL"')
        if self.public and without_secrets(source) != source:
            raise _secret(f"[{at}] source")
        own = self._options({"fsname": name} | table, at, (NO_FILE,))  # as in fstab: mount -a compares the two names
        source = source if _SCHEME.match(source) else self._located(source)
        return source, [own, *self._storage(storage, f"{at}.storage")]

    def _options(self, value: Any, at: str, refused: tuple[str, ...]) -> Given:
        """Return the options of a section. `refused` are the values of Opt.where that are errors in it."""
        table = {}
        for key, one in _table(value, at).items():
            name = key.replace("-", "_")
            if name not in TABLE:
                raise UsageError(f"[{at}] unknown option {key!r}{did_you_mean(name, TABLE)}")
            if (where := TABLE[name].where) in refused:
                raise UsageError(f"[{at}] option {name} {where}")
            if TABLE[name].kind is OCTAL and not isinstance(one, str):
                raise UsageError(f"[{at}] option {name}: expected text, in quotes")
            table[name] = [self._path(name, each) for each in one] if isinstance(one, list) else self._path(name, one)
        return self._given(table, at)

    def _path(self, name: str, value: Any) -> Any:
        """Return a value of an option, with paths of files made absolute."""
        metavar = TABLE[name].metavar
        local = metavar in ("DIR", "FILE") and not is_url(str(value))  # for a URL the parser raises the error
        relative = metavar in ("PLACE", "URL") and not _SCHEME.match(str(value))
        return self._located(value) if value and isinstance(value, str) and (local or relative) else value

    def _located(self, path: str) -> str:
        """Return an absolute path; expand "~"."""
        return os.path.join(self._here(), os.path.expanduser(path)) if "\0" not in path else path

    def _here(self) -> str:
        return os.path.dirname(os.path.abspath(self.path))

    def _storage(self, tables: Any, section: str) -> Iterator[Given]:
        """Yield the options of protocols, hosts and buckets: a table for each."""
        for place, table in _table(tables, section).items():
            at = f"{section}.{_quoted(place)}"
            if not place_name(place):
                raise UsageError(f'[{at}]: expected a protocol, as in [storage.s3], or [storage."PROTOCOL://HOST"]')
            located = {name: absolute(place, name, one, self._here()) for name, one in _table(table, at).items()}
            yield self._given({"storage_options": {place: located}}, at)

    def _given(self, table: Mapping[str, Any], at: str) -> Given:
        """Parse a section."""
        given = Given(f"{self.path} [{at}]")
        try:
            given.add(as_items(table))
        except UsageError as exc:
            raise UsageError(f"[{at}] {exc}") from None
        found = [name for table in given.storage.values() for name, value in table.items() if is_secret(name, value)]
        for name, value in given.values.items():
            texts = map(str, value if isinstance(value, tuple) else (value,))
            found += [name for text in texts if without_secrets(text) != text]
        if found and self.public:
            raise _secret(f"[{at}] {found[0]}")
        return given


def _secret(what: str) -> UsageError:
    return UsageError(f"{what} is a secret, and all may read this file: chmod o-r")


def _quoted(name: str) -> str:
    """Return the name of a section as in TOML, without secrets."""
    return name if re.fullmatch(r"[\w-]+", name) else f'"{without_secrets(name)}"'


def _table(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"[{at}]: expected a section, not a value")
    return value
