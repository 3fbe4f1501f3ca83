"""The kinds of option values. Each parser raises ValueError, whose text says what was expected."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A kind of option values."""

    parse: Callable[[str], Any]
    noun: str = ""  # what messages about bounds call it


def size(text: str) -> int:
    """Parse a number with a unit (B, KiB, MiB, GiB, TiB, PiB, EiB; kB, MB, ... are decimal) into bytes."""
    match = re.fullmatch(r"([0-9]{1,18})(B|([kKMGTPE])(i?)B?)", text)
    if not match:
        raise ValueError("a size with a unit, such as 64MiB")
    number, unit, letter, binary = int(match[1]), match[2], match[3], match[4]
    if unit == "B":
        return number
    power = "kmgtpe".index(letter.lower()) + 1
    return number * int((1024 if binary or not unit.endswith("B") else 1000) ** power)


def human(count: float) -> str:
    """Format bytes with a unit that fits: 7.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:,.1f} TiB"


_UNITS = {  # of systemd.time(7), without months and years
    "us usec": 1e-6, "ms msec": 0.001, "s sec second seconds": 1, "m min minute minutes": 60, "h hr hour hours": 3600,
    "d day days": 86_400, "w week weeks": 604_800,
}  # fmt: skip
_SECONDS = {name: seconds for names, seconds in _UNITS.items() for name in names.split()}
_TIME = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]+)", re.ASCII)


def seconds(text: str) -> float:
    """Parse seconds, or a time with the units of systemd.time(7): 500ms, 90 s, 5m, 1h30min, 2d."""
    given = text.strip() + ("s" if re.fullmatch(r"[0-9.]+", text.strip()) else "")
    parts = _TIME.findall(given)
    if not parts or _TIME.sub("", given) or any(unit not in _SECONDS for _, unit in parts):
        raise ValueError("a time, such as 30s or 500ms")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


FOREVER = 315_360_000.0  # seconds: ten years


def lifetime(text: str) -> float:
    """Parse a time as seconds() does, or "forever"."""
    return FOREVER if text.strip() == "forever" else seconds(text)


def paths(text: str) -> tuple[str, ...]:
    """Parse paths of groups and arrays: a,b/c."""
    found = tuple(text.split(","))
    if any(name in ("", ".", "..") or "\0" in name for path in found for name in path.split("/")):
        raise ValueError("paths of groups and arrays, such as a,b/c")
    return found


def octal(text: str) -> int:
    """Parse permission bits in octal."""
    if not re.fullmatch(r"[0-7]{1,4}", text):
        raise ValueError("permission bits in octal, such as 0444")
    return int(text, 8)


def natural(text: str) -> int:
    """Parse a whole number, 0 or more."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError("a whole number")
    return int(text)


def statuses(text: str) -> tuple[int, ...]:
    """Parse HTTP statuses from 400 to 499, separated by commas."""
    if not re.fullmatch(r"4\d\d(,4\d\d)*", text):
        raise ValueError("statuses of HTTP from 400 to 499, such as 404,403")
    return tuple(int(part) for part in text.split(","))


def user_id(text: str) -> int:
    """Parse a user or group number. 4294967295 is refused because system calls read it as -1."""
    number = natural(text)
    if number >= 2**32 - 1:
        raise ValueError("a number below 4294967295")
    return number


def flag(text: str) -> bool:
    """Parse the value of a flag."""
    try:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
    except KeyError:
        raise ValueError("true or false") from None


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.76) -> str:
    """Return " (did you mean WORD?)" with the nearest of `choices`; "" if none reaches difflib's ratio `cutoff`."""
    close = difflib.get_close_matches(word, list(choices), 1, cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


def words(*choices: str) -> Kind:
    """Return the kind of one of `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}{did_you_mean(text, choices)}")
        return text

    return Kind(parse)


def text(value: str) -> str:
    """Accept any text that is not empty."""
    if not value:
        raise ValueError("a value")
    return value


def is_url(value: str) -> bool:
    """Return whether `value`, which was given as a local path, is a URL or a chain of URLs."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:[/:]|(?i:file|local):", value) is not None


def local(value: str) -> str:
    """Accept a local path as written, relative to the working directory; refuse a URL."""
    if is_url(value):
        raise ValueError("a path on this machine, not a URL")
    return text(value)


def path(value: str) -> str:
    """Return the absolute path of a local file; a relative one starts in the present working directory."""
    return os.path.abspath(local(value))


def directory(value: str) -> str:
    """Return the absolute path of a local directory, with symbolic links resolved now."""
    return os.path.realpath(local(value))


PLACE = r"[a-z][a-z0-9+]*(?:://[^/?#\s\\]+)?"  # a protocol, or PROTOCOL://HOST with a host or bucket


def place_name(name: str) -> bool:
    """Return whether `name` is a protocol or PROTOCOL://HOST, for which there may be storage options."""
    return re.fullmatch(PLACE, name) is not None


_FILE_SIZE = 1 << 20  # bytes: the largest configuration file, or file with the value of an option
DEPTH = 64  # nesting of objects and lists in the value of a storage option


def content(path: str) -> tuple[bytes, os.stat_result]:
    """Read a configuration file, or a file with the value of an option; return (its bytes, its status).

    Raise OSError if the file cannot be read. Raise ValueError if it is larger than 1 MiB, or neither a regular file
    nor /dev/null nor an unnamed pipe, which shells make of <(...): reading other files could block.
    """
    import stat

    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        descriptor = file.fileno()
        status = os.fstat(descriptor)
        if stat.S_ISFIFO(status.st_mode) and os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:"):
            os.set_blocking(descriptor, True)
        elif not stat.S_ISREG(status.st_mode) and os.path.realpath(path) != os.devnull:
            raise ValueError("is not a regular file")
        data = file.read(_FILE_SIZE + 1)
    if len(data) > _FILE_SIZE:
        raise ValueError("holds more than 1 MiB")
    return data, status


def from_files(value: object, depth: int = 0) -> object:
    """Replace "@/path" in the value of a storage option, at any depth, by the content of the file /path.

    White space around the content is removed; content that begins with { is parsed as JSON. A value that begins with
    "@@" is text that begins with "@". Raise ValueError, which names the file or the rule.
    """
    if depth > DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return {name: from_files(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list):
        return [from_files(one, depth + 1) for one in value]
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise ValueError("has a NUL character")
    if value.startswith("@@"):
        return value[1:]
    return _read_value(value[1:]) if value.startswith("@/") else value


def _read_value(path: str) -> object:
    try:
        data, _ = content(path)
    except OSError as exc:
        raise ValueError(f"{path}: {(exc.strerror or str(exc)).lower()}") from None
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from None
    try:
        held = data.decode().strip()
        found: object = json.loads(held) if held.startswith("{") else held
    except (ValueError, RecursionError):  # not quoted, as it would show the secret
        raise ValueError(f"{path}: neither text nor JSON") from None
    if not held:
        raise ValueError(f"{path}: holds nothing")
    if "\0" in held:
        raise ValueError(f"{path}: has a NUL character")
    return found


ALLOWED = ("all", "credentials", "file", "private")  # words of allow=, beside names of protocols


def allowed(value: str) -> tuple[str, ...]:
    """Parse the words of allow=, separated by commas."""
    words = tuple(value.split(","))
    hints = [did_you_mean(word, ALLOWED) for word in words if word not in ALLOWED]
    if any(hints) or not all(re.fullmatch(r"[a-z][a-z0-9+_]*", word) for word in words):
        raise ValueError(f"{', '.join(ALLOWED)}, or a protocol{next(filter(None, hints), '')}")
    return words


SIZE, SECONDS = Kind(size, "a size"), Kind(seconds, "a time")
LIFETIME = Kind(lifetime, "a time or forever")
NATURAL = Kind(natural, "a whole number")
OCTAL, STATUSES, USER, FLAG = Kind(octal), Kind(statuses), Kind(user_id), Kind(flag)
TEXT, PATHS, ALLOW = Kind(text), Kind(paths), Kind(allowed)
LOCAL, PATH, DIRECTORY = Kind(local), Kind(path), Kind(directory)
