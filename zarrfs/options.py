"""The one table of options: the command line, -o, the mount helper and docs/options.md all read it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from zarrfs.errors import UsageError

T = TypeVar("T")


def size(text: str) -> int:
    """Bytes: a number with a unit (B, KiB, MiB, GiB, TiB; kB, MB, GB, TB are decimal)."""
    match = re.fullmatch(r"(\d+)(B|([kKMGT])(i?)B?)", text)
    if not match:
        raise ValueError("a size with a unit, such as 64MiB")
    number, unit, letter, binary = int(match[1]), match[2], match[3], match[4]
    if unit == "B":
        return number
    power = "kmgt".index(letter.lower()) + 1
    return number * int((1024 if binary or not unit.endswith("B") else 1000) ** power)


def seconds(text: str) -> float:
    """Seconds as a number, or with a unit: 500ms, 30s, 5m, 1h, 1d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?", text)
    if not match:
        raise ValueError("a time, such as 30s or 500ms")
    return float(match[1]) * {"ms": 0.001, None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def octal(text: str) -> int:
    """Permission bits in octal."""
    if not re.fullmatch(r"[0-7]{1,4}", text):
        raise ValueError("permission bits in octal, such as 0444")
    return int(text, 8)


def natural(text: str) -> int:
    """A whole number, 0 or more."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError("a whole number")
    return int(text)


def niceness(text: str) -> int:
    """As nice(1) has it: -20 (before all others) to 19."""
    if not re.fullmatch(r"-?[0-9]{1,2}", text) or not -20 <= int(text) <= 19:
        raise ValueError("a whole number from -20 to 19")
    return int(text)


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    number = natural(text)
    if not number:
        raise ValueError("a whole number above 0")
    return number


def statuses(text: str) -> tuple[int, ...]:
    """Statuses of HTTP, with commas between them."""
    if not re.fullmatch(r"4\d\d(,4\d\d)*", text):
        raise ValueError("statuses of HTTP from 400 to 499, such as 404,403")
    return tuple(int(part) for part in text.split(","))


def user_id(text: str) -> int:
    """A user or group number; the last one, -1 to the system, is none."""
    number = natural(text)
    if number >= 2**32 - 1:
        raise ValueError("a number below 4294967295")
    return number


def flag(text: str) -> bool:
    """A flag: named alone it is on; NAME=false turns it off."""
    try:
        return {"": True, "true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
            text.lower()
        ]
    except KeyError:
        raise ValueError("nothing, true or false") from None


def words(*choices: str) -> Callable[[str], str]:
    """One of `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return parse


def text(value: str) -> str:
    """Any text but the empty one."""
    if not value:
        raise ValueError("a value")
    return value


def path(value: str) -> str:
    """A file by its absolute path, as it is when the option is read."""
    return os.path.abspath(text(value))


def directory(value: str) -> str:
    """A directory by its real path, as it is when the option is read."""
    return os.path.realpath(text(value))


def storage_options(text: str) -> tuple[tuple[str, Mapping[str, object]], ...]:
    """JSON: for each protocol (s3), or server or bucket (s3://bucket), an object with options of fsspec's."""
    wanted = 'JSON such as {"s3": {"anon": true}}'
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise ValueError(f"{wanted} ({exc})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{wanted}, an object")  # noqa: TRY004
    for name, options in found.items():
        if not re.fullmatch(r"[a-z][a-z0-9+]*(?:://[^/?#\s\\]+)?", name):
            raise ValueError(f"{wanted}: {json.dumps(name)} is neither a protocol nor PROTOCOL://HOST")
        if not isinstance(options, dict):
            raise ValueError(f"{wanted}: what {name} has is no object")  # noqa: TRY004
    return tuple(found.items())


ALLOWED = ("all", "credentials", "file", "private")  # words of allow=, beside names of protocols


def allowed(value: str) -> tuple[str, ...]:
    """Words of allow=: one, or more with commas between them."""
    words = tuple(value.split(","))
    if not all(re.fullmatch(r"[a-z][a-z0-9+_]*", word) for word in words):
        raise ValueError(f"{', '.join(ALLOWED)}, or a protocol")
    return words


def _option(
    scope: str, default: T, parse: Callable[[str], Any], metavar: str, help: str, many: bool = False
) -> T:
    return dataclasses.field(
        default=default,
        metadata={"scope": scope, "parse": parse, "metavar": metavar, "help": help, "many": many},
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """Every option of zarrfs, parsed; field metadata holds scope, parser, metavar and help.

    The scopes (source, fetch, mount, process) say which commands list an option; -o takes all everywhere.
    """

    # the source
    type: str | None = _option(
        "source", None, words("references", "archive", "zarr"), "KIND",
        "What SOURCE is: references, archive or zarr. Detected by content and name otherwise.",
    )
    strict: bool = _option(
        "source", False, flag, "", "Refuse a document with a bad entry, instead of leaving that entry out."
    )
    conflict: str = _option(
        "source", "directory", words("error", "directory", "file"), "WHAT",
        "Reference sets: what wins where a key is also the directory of others, or error to refuse the set.",
    )
    compat: bool = _option(
        "source", False, flag, "",
        "Archives: zero-pad a file whose size is larger than its data, as Flux does.",
    )
    base: str | None = _option(
        "source", None, text, "URL",
        "Resolve relative target URLs against URL, not against the document's place.",
    )
    allow: tuple[str, ...] = _option(
        "source", (), allowed, "WHAT",
        "What a reference set may reach that it may not by default: file, private, credentials, all, or a "
        "protocol (docs/trust.md). Repeatable.", many=True,
    )
    allow_path: tuple[str, ...] = _option(
        "source", (), directory, "DIR",
        "Local targets only beneath DIR. A mount by root with allow_other has none without it. Repeatable.",
        many=True,
    )
    blobs: tuple[str, ...] = _option(
        "source", (), text, "PLACE",
        "Where blobs lie: a directory or URL with one file per blobref, a content.sqlite or dump tar of Flux, "
        "or flux: for the running instance. Repeatable, tried in that order.", many=True,
    )
    gen_limit: int = _option(
        "source", 50_000_000, natural, "N", "Refuse a reference set whose gen entries expand to more than N."
    )
    document_limit: int = _option(
        "source", 4 << 30, size, "SIZE", "Refuse a document of more than SIZE, fetched or expanded."
    )
    view: str | None = _option(
        "source", None, words("v2", "v3", "arrays"), "VIEW",
        "Show Zarr of any generation as a hierarchy of v2 or v3, or its arrays as plain files (docs/zarr-views.md).",
    )
    arrays: str = _option(
        "source", "npy", words("npy", "raw"), "FORM", "With view=arrays: NAME.npy, or NAME.bin beside NAME.json."
    )
    grid: str | None = _option(
        "source", None, words("list", "ask", "hide"), "WHAT",
        "Where a server cannot list: show every chunk that an array may have (list, the default of mounts), those "
        "that the server has (ask: a request each, the default of commands), or none (hide).",
    )
    index_dir: str | None = _option(
        "source", None, text, "DIR",
        "Where indexes are kept (default: zarrfs/index in the user's cache directory).",
    )
    # fetching
    memory_limit: int | None = _option(
        "fetch", None, size, "SIZE",
        "Bound on bytes kept, read ahead and in flight (default: a quarter of the memory, at most 1GiB).",
    )
    array_cache: int = _option(
        "fetch", 256 << 20, size, "SIZE", "With view=arrays: bound on decoded chunks that are kept in memory."
    )
    request_timeout: float = _option("fetch", 60.0, seconds, "TIME", "How long one request may take.")
    read_timeout: float = _option(
        "fetch", 300.0, seconds, "TIME", "How long one read may take, repetitions included."
    )
    retries: int = _option("fetch", 4, natural, "N", "How often a failed request is repeated.")
    host_requests: int = _option("fetch", 32, positive, "N", "Requests in flight to one server at once.")
    host_bytes: int = _option("fetch", 128 << 20, size, "SIZE", "Bytes in flight from one server at once.")
    part_size: int = _option(
        "fetch", 4 << 20, size, "SIZE", "Larger values are fetched in parts of SIZE, several at once."
    )
    coalesce_size: int = _option(
        "fetch", 4 << 20, size, "SIZE", "Neighbouring ranges of a target are fetched as one, up to SIZE."
    )
    coalesce_gap: int = _option(
        "fetch", 32 << 10, size, "SIZE", "Ranges are neighbours where no more than SIZE lies between them."
    )
    prefetch: int = _option(
        "fetch", 64 << 20, size, "SIZE", "Fetch at most SIZE ahead of a reader that reads in order; 0B: nothing."
    )
    stale: str = _option(
        "fetch", "error", words("error", "reread"), "WHAT",
        "Where a target is not the one that was read first: error, or reread the one that is there now.",
    )
    missing_status: tuple[int, ...] = _option(
        "fetch", (404, 410), statuses, "STATUSES",
        "Zarr stores over HTTP: statuses that say a key is absent. References: always an error.",
        many=True,
    )
    client: str = _option(
        "fetch", "auto", words("auto", "fsspec", "obstore"), "WHICH",
        "Who speaks HTTP, S3, GCS and Azure: obstore where it is installed and can, else fsspec's own.",
    )
    storage_options: tuple[tuple[str, Mapping[str, object]], ...] = _option(
        "fetch", (), storage_options, "JSON",
        'Options of fsspec\'s file systems, as {"s3": {"anon": true}}; -o s3.anon=true says the same. Repeatable.',
        many=True,
    )
    # what is kept on disk
    cache: str = _option(
        "fetch", "on", words("on", "none"), "WHAT", "none: nothing is kept on disk, neither blocks nor indexes."
    )
    cache_dir: str | None = _option(
        "fetch", None, directory, "DIR", "Keep fetched blocks in DIR, which any number of processes may share."
    )
    cache_size: int = _option("fetch", 10 << 30, size, "SIZE", "Hard bound on what is kept in cache_dir.")
    cache_min_free: int = _option(
        "fetch", 1 << 30, size, "SIZE", "Keep nothing where less than SIZE would be left free on that disk."
    )
    cache_validity: float = _option(
        "fetch", 3600.0, seconds, "TIME",
        "How long blocks on disk are believed to be of the target's version before its server is asked.",
    )
    record: str | None = _option("fetch", None, path, "FILE", "Write to FILE which keys are read, in order.")
    warm: str | None = _option("fetch", None, path, "FILE", "Fetch ahead what FILE, of record=, says is read.")
    # the mount
    ro: bool = _option("mount", False, flag, "", "Mount read-only, although there is an upperdir=; without one it is.")
    uid: int | None = _option("mount", None, user_id, "UID", "Owner of everything (default: who mounts).")
    gid: int | None = _option(
        "mount", None, user_id, "GID", "Group of everything (default: that of who mounts)."
    )
    umask: int = _option("mount", 0, octal, "MODE", "Permission bits taken from every file and directory.")
    file_mode: int | None = _option(
        "mount", None, octal, "MODE", "Permission bits of files (default: as stored, else 0444)."
    )
    dir_mode: int | None = _option(
        "mount", None, octal, "MODE", "Permission bits of directories (default: as stored, else 0555)."
    )
    attr_timeout: float | None = _option(
        "mount", None, seconds, "TIME",
        "How long the kernel keeps attributes (default: 1s, immutable sources 1d).",
    )
    entry_timeout: float | None = _option(
        "mount", None, seconds, "TIME", "How long the kernel keeps names (default: as attr_timeout)."
    )
    negative_timeout: float | None = _option(
        "mount", None, seconds, "TIME",
        "How long the kernel remembers that a name is absent (default: likewise).",
    )
    upperdir: str | None = _option(
        "source", None, directory, "DIR",
        "Changes go to DIR: the mount is writable, and what DIR holds is shown over the source (docs/writes.md).",
    )
    read_ahead: int = _option(
        "mount", 1 << 20, size, "SIZE",
        "The kernel's read-ahead on this mount; set by root, or as root permits.",
    )
    on_exit: str = _option(
        "mount", "refuse", words("refuse", "abort"), "WHAT",
        "On SIGTERM while files are open: refuse to unmount, or abort and leave a dead endpoint.",
    )
    guard: bool = _option(
        "mount", False, flag, "",
        "Take all permissions off the directory beneath, so that readers without the mount get an error.",
    )
    allow_other: bool = _option("mount", False, flag, "", "Let other users use the mount.")
    allow_root: bool = _option("mount", False, flag, "", "Let root use the mount.")
    auto_unmount: bool = _option(
        "mount", False, flag, "",
        "Unmount when the daemon dies. Dangerous: a reader sees an empty directory, not an error.",
    )
    fsname: str | None = _option(
        "mount", None, text, "NAME", "The source that mount(8) shows (default: SOURCE)."
    )
    mount_timeout: float = _option(
        "mount", 300.0, seconds, "TIME", "How long to wait for the mount, once the source has been read."
    )
    notify_pipe: int | None = _option(
        "mount", None, natural, "FD", "Write a newline to this descriptor when the mount is ready."
    )
    nice: int | None = _option(
        "mount", None, niceness, "N",
        "The priority of the daemon (default: -5 where that is permitted, as for root: its readers wait for it).",
    )
    pid_file: str | None = _option("mount", None, text, "FILE", "Write the daemon's process number to FILE.")
    # the process
    foreground: bool = _option("process", False, flag, "", "Stay in the foreground; Ctrl-C unmounts.")
    log_file: str | None = _option("process", None, text, "FILE", "Append the log to FILE (default: syslog).")
    log_level: str = _option(
        "process", "info", words("debug", "info", "warning", "error"), "LEVEL",
        "debug, info, warning or error.",
    )
    # not an option of users: note every fault of a document and go on; who asked for them tells them
    collect: bool = False
    # per protocol: -o s3.anon=true,s3.endpoint_url=...; per host or bucket: "s3://bucket" as the first key
    storage: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)


TABLE: dict[str, dataclasses.Field[Any]] = {
    field.name: field for field in dataclasses.fields(Options) if "parse" in field.metadata
}


def default_text(name: str) -> str:
    """The default of an option as it would be written; empty where there is none, or the help tells it."""
    default, parser = TABLE[name].default, TABLE[name].metadata["parse"]
    if parser is flag or default is None or default == ():
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if parser is seconds:
        return f"{default:g}s"
    if parser is not size:
        return str(default)
    power = max(power for power in range(5) if default % 1024**power == 0)
    return f"{default // 1024**power}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


# Facts of mount(8): what the kernel takes, and what is for mount's own eyes.
KERNEL_FLAGS = frozenset(
    (
        "suid", "nosuid", "dev", "nodev", "exec", "noexec", "sync", "async", "dirsync", "atime",
        "noatime", "nodiratime", "relatime", "strictatime", "lazytime",
    )
)  # fmt: skip
IGNORED = frozenset(
    (
        "defaults", "auto", "noauto", "user", "users", "nouser", "owner", "group", "_netdev", "nofail",
        "comment",
    )
)  # fmt: skip
REMOUNT_ONLY = frozenset(("user_id", "group_id", "rootmode", "fd", "subtype", "default_permissions"))


@dataclasses.dataclass
class Parsed:
    """The outcome of parse(): our options, flags for the kernel, and whether `remount` was asked."""

    options: Options
    kernel: list[str]
    remount: bool = False
    writable: bool = False  # "rw" was said


# s3.anon, or s3://bucket.anon; the name is what follows the last dot
_PLACE = re.compile(r"([a-z][a-z0-9+]*(?:://[^/?#\s\\]+)?)\.([A-Za-z_]\w*)")


def split_commas(text: str) -> list[str]:
    r"""Split "a,b=c\,d" into ["a", "b=c,d"]: a backslash escapes a comma (or a backslash)."""
    parts = re.findall(r"(?:[^,\\]|\\.|\\$)+", text, re.DOTALL)
    return [re.sub(r"\\([,\\])", r"\1", part) for part in parts]


def parse(items: Iterable[str], sloppy: bool = False, defaults: Mapping[str, Any] | None = None) -> Parsed:
    """Parse items such as "ro", "blobs=/srv/blobs" or "s3.anon=true"; later ones win.

    "-" and "_" are the same in names; an unknown name is a UsageError that suggests the closest, unless
    `sloppy`. `defaults` are values of fields that are parsed already.
    """
    values: dict[str, Any] = dict(defaults or {})
    storage: dict[str, dict[str, object]] = {}
    kernel: list[str] = []
    remount = writable = False
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip().replace("-", "_") if "." not in name else name.strip()
        place = _PLACE.fullmatch(name)
        if name in TABLE:
            _set(values, TABLE[name], value, bool(equals))
        elif name == "rw":  # mount(8) always says ro or rw, so this is no wish
            writable, values["ro"] = True, False
        elif place:
            storage.setdefault(place[1], {})[place[2]] = _json(value) if equals else True
        elif "://" in name:
            raise UsageError(f"option {item}: expected PROTOCOL://HOST.NAME=VALUE (for s3, gs, az, HOST is a bucket)")
        elif name in KERNEL_FLAGS:
            kernel.append(name)
        elif name == "remount":
            remount = True
        elif not equals and (list_ := _list_of(name)) in values:  # "-o allow=file,private" is split before we see it
            _set(values, TABLE[list_], name, True)
        elif not (name in IGNORED or name in REMOUNT_ONLY or name[:2].lower() in ("x_", "x-") or sloppy):
            raise UsageError(f"unknown option {name!r}{_hint(name)}")
    if values.get("allow_other") and values.get("allow_root"):
        raise UsageError("options allow_other and allow_root: only one of them can be had")
    merged: dict[str, dict[str, object]] = {}
    for place_, options in (*values.get("storage_options", ()), *storage.items()):  # single options win
        merged.setdefault(place_, {}).update(options)
    return Parsed(Options(**values, storage=merged), kernel, remount, writable and not values.get("ro"))


def _list_of(word: str) -> str:
    """The option whose value may have `word` after a comma."""
    return "allow" if word in ALLOWED else "missing_status" if word.isdigit() else ""


def _set(values: dict[str, Any], field: dataclasses.Field[Any], value: str, given: bool) -> None:
    parser = field.metadata["parse"]
    if not given and parser is not flag:
        raise UsageError(f"option {field.name} needs a value: {field.name}={field.metadata['metavar']}")
    try:
        parsed = parser(value)
    except ValueError as exc:
        shown = field.name if parser is storage_options else f"{field.name}={value}"  # JSON may have a password in it
        raise UsageError(f"option {shown}: expected {exc}") from None
    if field.metadata["many"]:
        parsed = (*values.get(field.name, ()), *(parsed if isinstance(parsed, tuple) else (parsed,)))
    values[field.name] = parsed


def _hint(name: str) -> str:
    if name in ALLOWED:
        return f" (did you mean allow={name}?)"
    close = difflib.get_close_matches(name, [*TABLE, *KERNEL_FLAGS], 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _json(value: str) -> object:
    """A storage option's value: JSON where it is (true, 5, {...}), else the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value
