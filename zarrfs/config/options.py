"""The one table of options, read by the command line, -o, the mount helper and docs/options.md."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from zarrfs.config.redaction import redacted_item, without_secrets
from zarrfs.config.values import (
    ALLOWED,
    FOREVER,
    allowed,
    directory,
    flag,
    from_files,
    lifetime,
    local,
    metrics_place,
    natural,
    niceness,
    octal,
    path,
    paths,
    seconds,
    size,
    statuses,
    storage_options,
    text,
    user_id,
    words,
)  # fmt: skip
from zarrfs.errors import UsageError

T = TypeVar("T")


def _option(
    scope: str, default: T, parse: Callable[[str], Any], metavar: str, help: str, many: bool = False,
    bounds: tuple[str, str] | None = None,
) -> T:  # fmt: skip
    """Make a row of the table; `bounds` are the least and the greatest value, as a user would write them."""
    return dataclasses.field(
        default=default,
        metadata={"scope": scope, "parse": parse, "metavar": metavar, "help": help, "many": many, "bounds": bounds},
    )


_WAIT = ("10ms", "30d")  # bounds of timeouts
_KEPT = ("0s", "3650d")  # of lifetimes
_PART = ("4KiB", "1GiB")  # of the size of one request
_MEMORY = ("64KiB", "64TiB")  # of memory that has to hold at least a block
_MANY = ("0B", "64TiB")  # of memory that may be none at all
_NOUNS = {seconds: "a time", lifetime: "a time or forever", size: "a size", natural: "a whole number"}


@dataclasses.dataclass(frozen=True)
class Options:
    """Every option of zarrfs, parsed; field metadata holds scope, parser, metavar and help.

    The scopes (source, fetch, mount, process) say which commands list an option; -o takes all everywhere.
    """

    # the source
    type: str | None = _option(
        "source", None, words("references", "archive", "zarr", "icechunk"), "KIND",
        "What SOURCE is: references, archive, zarr or icechunk. Detected by content and name otherwise.",
    )
    strict: bool = _option(
        "source", False, flag, "", "Refuse a document with a bad entry, instead of leaving that entry out."
    )
    branch: str | None = _option(
        "source", None, text, "NAME",
        "Icechunk repositories: show the last snapshot of this branch (default: main); a refresh follows it.",
    )
    tag: str | None = _option("source", None, text, "NAME", "Icechunk repositories: show the snapshot of this tag.")
    snapshot: str | None = _option("source", None, text, "ID", "Icechunk repositories: show the snapshot of this id.")
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
        "Local targets only beneath DIR. A mount by root with allow_other has none without it. Symbolic links of a "
        "Zarr store lead out of it only to files beneath DIR. Repeatable.",
        many=True,
    )
    links: str | None = _option(
        "source", None, words("follow", "keep"), "HOW",
        "Symbolic links of a directory: show what they lead to (follow, the default of read-only Zarr stores and of "
        "views), or the links themselves (keep). Out of the directory, links are followed beneath allow_path=.",
    )
    blobs: tuple[str, ...] = _option(
        "source", (), text, "PLACE",
        "Where blobs lie: a directory or URL with one file per blobref, a content.sqlite or dump tar of Flux, "
        "or flux: for the running instance. Repeatable, tried in that order.", many=True,
    )
    gen_limit: int = _option(
        "source", 50_000_000, natural, "N", "Refuse a reference set whose gen entries expand to more than N.",
        bounds=("0", "1000000000000"),
    )
    document_limit: int = _option(
        "source", 4 << 30, size, "SIZE", "Refuse a document of more than SIZE, fetched or expanded.",
        bounds=("1KiB", "64TiB"),
    )
    missing_records: str = _option(
        "source", "absent", words("absent", "error"), "WHAT",
        "Reference sets in Parquet: a record file that is not in the set stands for absent chunks, or is an error of "
        "those, for sets of which all record files were written.",
    )
    view: str | None = _option(
        "source", None, words("v2", "v3", "arrays", "netcdf"), "VIEW",
        "Show Zarr of any generation as a hierarchy of v2 or v3 (docs/zarr-views.md), its arrays as plain files "
        "(docs/array-views.md), or all of it as a NetCDF-4 file (docs/netcdf.md).",
    )
    arrays: str = _option(
        "source", "npy", words("npy", "raw"), "FORM", "With view=arrays: NAME.npy, or NAME.bin beside NAME.json."
    )
    netcdf: str = _option(
        "source", "file", words("file", "groups"), "FORM",
        "With view=netcdf: one file for the root group and all below it, or a file for each group.",
    )
    grid: str | None = _option(
        "source", None, words("list", "ask", "hide"), "WHAT",
        "Where a server cannot list: show every chunk that an array may have (list, the default of mounts), those "
        "that the server has (ask: a request each, the default of commands), or none (hide).",
    )
    members: tuple[str, ...] = _option(
        "source", (), paths, "PATHS",
        "Where a server cannot list, and no consolidated metadata does: these groups and arrays are there.", many=True,
    )
    index_dir: str | None = _option(
        "source", None, local, "DIR",
        "Where indexes are kept (default: zarrfs/index in the user's cache directory).",
    )
    # fetching
    memory_limit: int | None = _option(
        "fetch", None, size, "SIZE",
        "Bound on bytes kept, read ahead and in flight (default: a quarter of the memory, at most 1GiB).",
        bounds=_MEMORY,
    )
    array_cache: int = _option(
        "fetch", 256 << 20, size, "SIZE",
        "With view=arrays or netcdf: bound on decoded chunks that are kept in memory.", bounds=_MANY,
    )
    request_timeout: float = _option("fetch", 60.0, seconds, "TIME", "How long one request may take.", bounds=_WAIT)
    read_timeout: float = _option(
        "fetch", 300.0, seconds, "TIME",
        "How long one read may take. An outage of its server is waited for until then.", bounds=_WAIT,
    )
    retries: int = _option(
        "fetch", 4, natural, "N",
        "How often a failed request is repeated while its server answers others. 0: no outage is waited for, either.",
        bounds=("0", "1000"),
    )
    host_requests: int = _option(
        "fetch", 32, natural, "N", "Requests in flight to one server at once.", bounds=("1", "10000"),
    )
    host_bytes: int = _option(
        "fetch", 128 << 20, size, "SIZE", "Bytes in flight from one server at once.", bounds=_MEMORY,
    )
    part_size: int = _option(
        "fetch", 4 << 20, size, "SIZE", "Larger values are fetched in parts of SIZE, several at once.", bounds=_PART,
    )
    coalesce_size: int = _option(
        "fetch", 4 << 20, size, "SIZE", "Neighbouring ranges of a target are fetched as one, up to SIZE.",
        bounds=("0B", "1GiB"),
    )
    coalesce_gap: int = _option(
        "fetch", 32 << 10, size, "SIZE", "Ranges are neighbours where no more than SIZE lies between them.",
        bounds=("0B", "1GiB"),
    )
    prefetch: int = _option(
        "fetch", 64 << 20, size, "SIZE", "Fetch at most SIZE ahead of a reader that reads in order; 0B: nothing.",
        bounds=_MANY,
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
    metadata_ttl: float = _option(
        "fetch", 300.0, lifetime, "TIME",
        "Stores behind URLs: how long names, sizes and absences are believed until the server is asked again "
        "(forever: of what never changes).", bounds=_KEPT,
    )
    client: str = _option(
        "fetch", "auto", words("auto", "fsspec", "obstore"), "WHICH",
        "Who speaks S3, GCS and Azure: obstore where it is installed and can, else fsspec's own.",
    )
    ca_bundle: str | None = _option(
        "fetch", None, path, "FILE",
        "Trust the authorities in FILE (PEM), or in a directory, in place of the system's: of a private network.",
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
    cache_size: int = _option(
        "fetch", 10 << 30, size, "SIZE", "Hard bound on what is kept in cache_dir.", bounds=("1MiB", "1EiB"),
    )
    cache_min_free: int = _option(
        "fetch", 1 << 30, size, "SIZE", "Keep nothing where less than SIZE would be left free on that disk.",
        bounds=("0B", "1EiB"),
    )
    cache_validity: float = _option(
        "fetch", 3600.0, seconds, "TIME",
        "How long blocks on disk are believed to be of the target's version before its server is asked.", bounds=_KEPT,
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
    fmask: int | None = _option("mount", None, octal, "MODE", "The same of files alone, in place of umask.")
    dmask: int | None = _option("mount", None, octal, "MODE", "The same of directories alone, in place of umask.")
    file_mode: int | None = _option(
        "mount", None, octal, "MODE", "Permission bits of files (default: as stored, else 0444)."
    )
    dir_mode: int | None = _option(
        "mount", None, octal, "MODE", "Permission bits of directories (default: as stored, else 0555)."
    )
    attr_timeout: float | None = _option(
        "mount", None, seconds, "TIME",
        "How long the kernel keeps attributes (default: 1s, immutable sources 1d).", bounds=_KEPT,
    )
    entry_timeout: float | None = _option(
        "mount", None, seconds, "TIME", "How long the kernel keeps names (default: as attr_timeout).", bounds=_KEPT,
    )
    negative_timeout: float | None = _option(
        "mount", None, seconds, "TIME",
        "How long the kernel remembers that a name is absent (default: likewise).", bounds=_KEPT,
    )
    upperdir: str | None = _option(
        "source", None, directory, "DIR",
        "Changes go to DIR: the mount is writable, and what DIR holds is shown over the source (docs/writes.md).",
    )
    read_ahead: int = _option(
        "mount", 1 << 20, size, "SIZE",
        "The kernel's read-ahead on this mount; set by root, or as root permits.", bounds=("0B", "1GiB"),
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
    idle_timeout: float | None = _option(
        "mount", None, seconds, "TIME",
        "Unmount when nothing was open and nobody asked for anything for TIME; 0: never.", bounds=_KEPT,
    )
    auto_unmount: bool = _option(
        "mount", False, flag, "",
        "Unmount when the daemon dies. Dangerous: a reader sees an empty directory, not an error.",
    )
    fsname: str | None = _option(
        "mount", None, text, "NAME", "The source that mount(8) shows (default: SOURCE)."
    )
    mount_timeout: float = _option(
        "mount", 300.0, seconds, "TIME",
        "How long to wait for the mount, once the source has been read, and for another process that compiles it.",
        bounds=_WAIT,
    )
    notify_pipe: int | None = _option(
        "mount", None, natural, "FD", "Write a newline to this descriptor when the mount is ready.",
        bounds=("0", "2147483647"),
    )
    nice: int | None = _option(
        "mount", None, niceness, "N",
        "The priority of the daemon (default: -5 where that is permitted, as for root: its readers wait for it).",
    )
    pid_file: str | None = _option("mount", None, local, "FILE", "Write the daemon's process number to FILE.")
    metrics: str | None = _option(
        "mount", None, metrics_place, "WHERE",
        "Metrics for Prometheus: over HTTP at ADDRESS:PORT, or in a FILE, by its absolute path (docs/metrics.md).",
    )
    # the process
    config: str | None = _option(
        "process", None, path, "FILE", "Read FILE in place of the user's zarrfs.toml (docs/configuration.md)."
    )
    foreground: bool = _option("process", False, flag, "", "Stay in the foreground; Ctrl-C unmounts.")
    log_file: str | None = _option(
        "process", None, local, "FILE", "Append the log to FILE (default: the journal or syslog)."
    )
    log_level: str = _option(
        "process", "info", words("debug", "info", "warning", "error"), "LEVEL",
        "debug, info, warning or error.",
    )
    log_format: str = _option(
        "process", "text", words("text", "json"), "FORM", "Lines of the log: text, or json, an object each."
    )
    # not an option of users: collect all faults of a document for the caller, instead of stopping at the first
    collect: bool = False
    # likewise: cached facts of targets from before that time (seconds since 1970) are stale; set by a refresh
    asked_since: float = 0.0
    # likewise for cached names: a command sees the present ones, whatever mounts have cached
    names_since: float = 0.0
    # likewise: outages that are waited for until read_timeout: "none", of a server that has "answered", or "all"
    patience: str = "answered"
    # per protocol: -o s3.anon=true,s3.endpoint_url=...; per host or bucket: "s3://bucket" as the first key
    storage: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)


TABLE: dict[str, dataclasses.Field[Any]] = {
    field.name: field for field in dataclasses.fields(Options) if "parse" in field.metadata
}


def bounds_of(name: str) -> tuple[Any, Any] | None:
    """Return the least and the greatest value of an option; None if only its parser bounds it."""
    about = TABLE[name].metadata
    return about["bounds"] and tuple(map(about["parse"], about["bounds"]))


def check_bounds(name: str, value: Any, written: object) -> None:
    """Raise UsageError for a value of an option that is not a number within its bounds. None is always accepted."""
    bounds = bounds_of(name) if name in TABLE else None  # Options has fields beside those of the table
    if value is None or bounds is None:
        return
    if not (isinstance(value, int | float) and bounds[0] <= value <= bounds[1]):
        raise UsageError(f"option {name}={written}: expected {_rule(name)}")


def _rule(name: str) -> str:
    """Return the text of what the option `name`, which has bounds, expects."""
    return "{} from {} to {}".format(_NOUNS[TABLE[name].metadata["parse"]], *TABLE[name].metadata["bounds"])


def default_text(name: str) -> str:
    """Return the default of an option as a user would write it; "" if there is none or the help text states it."""
    default = TABLE[name].default
    return "" if TABLE[name].metadata["parse"] is flag or default is None or default == () else written(name, default)


def written(name: str, value: Any) -> str:
    """Return the value of an option as a user would write it; that of storage_options is redacted."""
    parser = TABLE[name].metadata["parse"]
    if value is None:
        return "none"
    if parser is storage_options:
        return "***"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if parser is octal:
        return f"{value:04o}"
    if parser is lifetime and value == FOREVER:
        return "forever"
    if parser in (seconds, lifetime):
        return f"{value:.15g}s"
    if parser is not size:
        return without_secrets(str(value))
    power = max(power for power in range(5) if value % 1024**power == 0) if value else 0
    return f"{value // 1024**power}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


# Options of mount(8): those for the kernel, and those that only mount(8) itself reads.
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
    """The outcome of parse(): our options, flags for the kernel, and whether `remount` was given."""

    options: Options
    kernel: list[str]
    remount: bool = False
    writable: bool = False  # "rw" was given


@dataclasses.dataclass
class Assignments:
    """The options of one origin, a command line or a section of a file: parsed, but not merged with others.

    In `storage` a value may still be the name of a file to read it from (values.from_files).
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    storage: dict[str, dict[str, object]] = dataclasses.field(default_factory=dict)
    kernel: list[str] = dataclasses.field(default_factory=list)
    remount: bool = False
    writable: bool = False


# s3.anon, or s3://bucket.anon; the name is what follows the last dot
_PLACE = re.compile(r"([a-z][a-z0-9+]*(?:://[^/?#\s\\]+)?)\.([A-Za-z_]\w*)")


def split_commas(text: str) -> list[str]:
    r"""Split "a,b=c\,d" into ["a", "b=c,d"]: a backslash escapes a comma (or a backslash)."""
    parts = re.findall(r"(?:[^,\\]|\\.|\\$)+", text, re.DOTALL)
    return [re.sub(r"\\([,\\])", r"\1", part) for part in parts]


_WRITTEN = ("json", "gz", "zst", "xz", "bz2", "parq", "parquet", "index", "tar", "zip", "zarr")  # endings of outputs


def looks_like_path(item: str) -> bool:
    """Return whether a value of -o is no option but the name of a file that a command writes."""
    if "=" in item or any(split in TABLE or split in KERNEL_FLAGS | IGNORED for split in item.split(",")):
        return False
    place = _PLACE.fullmatch(item)
    return place is None or place[2] in _WRITTEN or "/" in item


def parse(items: Iterable[str], sloppy: bool = False, defaults: Mapping[str, Any] | None = None) -> Parsed:
    """Parse one list of items and nothing else: read() and combine() in one."""
    return combine([read(items, sloppy)], defaults)


def read(items: Iterable[str], sloppy: bool = False) -> Assignments:
    """Parse items such as "ro", "blobs=/srv/blobs" or "s3.anon=true"; later ones win.

    "-" and "_" are the same in names. Raise UsageError for a bad value, and unless `sloppy` for an unknown name, with
    the closest known one.
    """
    given, single = Assignments(), dict[str, dict[str, object]]()
    naming = False  # items after "members=a," are more members
    before = ""  # the storage option before this item: a comma in its value makes the rest look like an item
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip().replace("-", "_") if "." not in name else name.strip()
        place = _PLACE.fullmatch(name)
        if name in TABLE:
            put(given, name, value if equals else None)
        elif name == "rw":  # mount(8) always passes ro or rw, so this need not be the user's choice
            given.writable, given.values["ro"] = True, False
        elif place:
            single.setdefault(place[1], {})[place[2]] = _json(value) if equals else True
        elif "://" in name:
            raise UsageError(
                f"option {redacted_item(item)}: expected PROTOCOL://HOST.NAME=VALUE (for s3, gs, az, HOST is a bucket)"
            )
        elif name in KERNEL_FLAGS:
            given.kernel.append(name)
        elif name == "remount":
            given.remount = True
        elif not equals and (list_ := _list_of(name)) in given.values:  # "-o allow=file,private" is split already
            put(given, list_, name)
        elif not equals and naming and name not in IGNORED | REMOUNT_ONLY and not name.startswith(("x_", "x-")):
            put(given, "members", item)
        elif not (name in IGNORED or name in REMOUNT_ONLY or name[:2].lower() in ("x_", "x-") or sloppy):
            hint = _hint(name)
            if before and not hint:  # it may be half a password
                raise UsageError(f"option {before}: what follows its comma is no option (a comma in a value is \\,)")
            raise UsageError(f"unknown option {name!r}{hint}")
        before = name if place else ""
        naming = name == "members" or (naming and not equals and name not in TABLE)
    for place_, options in (*given.values.get("storage_options", ()), *single.items()):  # single options win
        given.storage.setdefault(place_, {}).update(options)
    return given


def combine(given: Iterable[Assignments], defaults: Mapping[str, Any] | None = None) -> Parsed:
    """Merge the options of several origins: for each option the last origin wins.

    Storage options are merged name by name, and read from files if they name one. `defaults` are parsed values of
    fields. Raise UsageError.
    """
    outcome = Parsed(Options(), [])
    values: dict[str, Any] = dict(defaults or {})
    storage: dict[str, dict[str, object]] = {}
    for one in given:
        values |= one.values
        for place, options in one.storage.items():
            storage.setdefault(place, {}).update(options)
        outcome.kernel += one.kernel
        outcome.remount |= one.remount
        outcome.writable |= one.writable
    if values.get("allow_other") and values.get("allow_root"):
        raise UsageError("options allow_other and allow_root: only one of them can be had")
    for place, options in storage.items():
        for name, value in options.items():
            try:
                options[name] = from_files(value)
            except ValueError as exc:
                raise UsageError(f"option {place}.{name}: {exc}") from None
    outcome.options = Options(**values, storage=storage)
    outcome.writable &= not values.get("ro")
    return outcome


def _list_of(word: str) -> str:
    """Return the option in whose value `word` may follow a comma; "" if none."""
    return "allow" if word in ALLOWED else "missing_status" if word.isdigit() else ""


def put(given: Assignments, name: str, value: str | None) -> None:
    """Parse a value of the option `name` and add it to `given`; None: no value was given. Raise UsageError."""
    about = TABLE[name].metadata
    parser = about["parse"]
    if value is None and parser is not flag:
        raise UsageError(f"option {name} needs a value: {name}={about['metavar']}")
    try:
        parsed = parser(value or "")
    except ValueError as exc:
        shown = name if parser is storage_options else f"{name}={without_secrets(value or '')}"  # JSON: passwords
        rule = _rule(name) if parser is natural and about["bounds"] else exc
        raise UsageError(f"option {shown}: expected {rule}") from None
    check_bounds(name, parsed, value)
    if about["many"]:
        parsed = (*given.values.get(name, ()), *(parsed if isinstance(parsed, tuple) else (parsed,)))
    given.values[name] = parsed


def _hint(name: str) -> str:
    if name in ALLOWED:
        return f" (did you mean allow={name}?)"
    close = difflib.get_close_matches(name, [*TABLE, *KERNEL_FLAGS], 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _json(value: str) -> object:
    """Parse a storage option's value: as JSON if it is (true, 5, {...}), else it is the text itself."""
    try:
        return json.loads(value)
    except RecursionError:
        raise UsageError("the value of a storage option is nested too deeply") from None
    except ValueError:
        return value
