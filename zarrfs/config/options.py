"""The table of all options, for the command line, -o, the mount helper, docs/options.md and the man pages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from zarrfs.config.redaction import is_secret, redacted_storage, without_secrets
from zarrfs.config.storage import absolute, canonical, check_storage, is_known, storage_value
from zarrfs.config.values import (
    ALLOW,
    ALLOWED,
    DIRECTORY,
    FLAG,
    LIFETIME,
    LOCAL,
    NATURAL,
    OCTAL,
    PATH,
    PATHS,
    PLACE,
    SECONDS,
    SIZE,
    STATUSES,
    TEXT,
    USER,
    Kind,
    did_you_mean,
    from_files,
    words,
)  # fmt: skip
from zarrfs.errors import UsageError

# why an option may not be set in a section of zarrfs.toml; "" if it may
ONE_SOURCE = "is for one source: set it in a section [source.NAME], or with -o"
NO_FILE = "cannot be set in a file: use --config, or $ZARRFS_CONFIG"


@dataclasses.dataclass(frozen=True)
class Opt:
    """A row of the table: all that zarrfs says and checks about an option. `help` must state a default of None."""

    group: str
    default: str | None
    kind: Kind
    metavar: str
    help: str
    many: bool = False
    bounds: tuple[str, str] | None = None  # the least and the greatest value, as a user would write them
    common: bool = False  # shown first by `zarrfs mount --help`
    long: bool = False  # commands take it as --NAME, too
    where: str = ""


def _option(group: str, default: str | None, kind: Kind, metavar: str, help: str, **more: Any) -> Any:
    opt = Opt(group, default, kind, metavar, help, **more)
    value: Any = False if kind is FLAG else None if default is None else kind.parse(default)
    return dataclasses.field(default=(value or ()) if opt.many else value, metadata={"opt": opt})


_WAIT = ("10ms", "30d")  # bounds of timeouts
_KEPT = ("0s", "3650d")  # bounds of lifetimes
_MEMORY = ("64KiB", "64TiB")  # bounds of memory limits that must leave room for a block
_MANY = ("0B", "64TiB")  # bounds of sizes that may be zero


@dataclasses.dataclass(frozen=True)
class Options:
    """Every option of zarrfs, parsed; the metadata of each field holds its Opt.

    -o accepts every option in every command. The groups are the headings of the documentation.
    """

    # -- Source
    type: str | None = _option(
        "Source", None, words("references", "archive", "zarr", "icechunk"), "KIND",
        "Open SOURCE as KIND: references, archive, zarr or icechunk. By default name and content decide.",
        where=ONE_SOURCE,
    )
    branch: str | None = _option(
        "Source", None, TEXT, "NAME",
        "Icechunk: show the latest snapshot of this branch; `zarrfs refresh` moves on to newer ones. Default: main.",
    )
    tag: str | None = _option("Source", None, TEXT, "NAME", "Icechunk: show the snapshot with this tag.")
    snapshot: str | None = _option(
        "Source", None, TEXT, "ID", "Icechunk: show the snapshot with this ID."
    )
    base: str | None = _option(
        "Source", None, TEXT, "URL",
        "Reference sets: resolve relative URLs of targets against URL. By default they are relative to the document.",
        where=ONE_SOURCE,
    )
    blobs: tuple[str, ...] = _option(
        "Source", None, TEXT, "PLACE",
        "Archives: read blobs from PLACE: a directory or URL with a file for each blobref, or flux: for the "
        "running Flux instance. Repeatable; searched in the order given.", many=True, common=True, long=True,
    )
    members: tuple[str, ...] = _option(
        "Source", None, PATHS, "PATHS",
        "Zarr on a server that cannot list, without consolidated metadata: paths of groups and arrays to show, such "
        "as temp,wind/u. Repeatable.", many=True,
    )
    view: str | None = _option(
        "Source", None, words("v2", "v3", "arrays", "netcdf"), "VIEW",
        "Show a Zarr store or a reference set in another form (docs/views.md): in the Zarr version v2 or v3, its "
        "arrays as plain files (arrays), or the whole as NetCDF-4 (netcdf). Default: as it is.", common=True,
    )
    # -- Trust
    allow: tuple[str, ...] = _option(
        "Trust", None, ALLOW, "WHAT",
        "Let a reference set reach what it may not by default: file (local files), private (addresses that are not "
        "public), credentials (yours), the name of a protocol, or all. For sets that you trust (docs/security.md). "
        "Repeatable.",
        many=True, common=True,
    )
    allow_path: tuple[str, ...] = _option(
        "Trust", None, DIRECTORY, "DIR",
        "Let reference sets reach local files beneath DIR, and no others; needed for a mount by root with "
        "allow_other. Symbolic links of a Zarr store may then lead out of it, to files beneath DIR. Repeatable.",
        many=True,
    )
    # -- Writing
    upperdir: str | None = _option(
        "Writing", None, DIRECTORY, "DIR",
        "Make the mount writable: changes are stored in DIR and shown over the source, which stays as it is "
        "(docs/writes.md).", common=True, long=True, where=ONE_SOURCE,
    )
    ro: bool = _option(
        "Writing", None, FLAG, "",
        "Mount read-only, also with an upperdir=. Without an upperdir=, mounts are read-only by default; rw instead "
        "lets `zarrfs mount` change a local directory itself (docs/writes.md).",
    )
    # -- Cache and memory
    memory_limit: int | None = _option(
        "Cache and memory", None, SIZE, "SIZE",
        "Use up to SIZE of memory for cached, prefetched and requested bytes. Default: a quarter of the memory, at "
        "most 1GiB.",
        bounds=_MEMORY, common=True,
    )
    prefetch: int = _option(
        "Cache and memory", "64MiB", SIZE, "SIZE",
        "Fetch up to SIZE ahead of a sequential reader; 0B turns it off.", bounds=_MANY,
    )
    cache_dir: str | None = _option(
        "Cache and memory", None, DIRECTORY, "DIR",
        "Cache fetched blocks in DIR, where they outlive the mount; processes and nodes may share it. Without it, "
        "blocks are cached in memory only.", common=True,
    )
    cache_size: int = _option(
        "Cache and memory", "10GiB", SIZE, "SIZE",
        "Keep cache_dir= below SIZE: the blocks unused for longest are evicted.", bounds=("1MiB", "1EiB"), common=True,
    )
    metadata_ttl: float = _option(
        "Cache and memory", "300s", LIFETIME, "TIME",
        "Stores behind URLs: cache names, sizes and absences for TIME before asking the server again. Set forever for "
        "stores that never change.", bounds=_KEPT, common=True,
    )
    attr_timeout: float | None = _option(
        "Cache and memory", None, SECONDS, "TIME",
        "Let the kernel cache attributes for TIME. Default: 1s, 1d for immutable sources.", bounds=_KEPT,
    )
    # -- Network
    retries: int = _option(
        "Network", "4", NATURAL, "N",
        "Repeat a failed request up to N times, if its server answers others. 0 also turns off waiting for servers "
        "that are down.",
        bounds=("0", "1000"),
    )
    read_timeout: float = _option(
        "Network", "300s", SECONDS, "TIME",
        "Let one read(2) take up to TIME, with all its requests; then it fails with EIO. A server that is down is "
        "waited for until then. A request that takes longer than a fifth of TIME is repeated.", bounds=_WAIT,
    )
    host_requests: int = _option(
        "Network", "32", NATURAL, "N",
        "Send up to N requests to one server at a time. Lower it if the server throttles.", bounds=("1", "10000"),
    )
    missing_status: tuple[int, ...] = _option(
        "Network", "404,410", STATUSES, "STATUSES",
        "Zarr stores over HTTP: the statuses that mean that a key does not exist. Set 404,403 for buckets that answer "
        "403 to clients without the right to list. For targets of reference sets each of them is an error.",
        many=True,
    )
    # -- Ownership and permissions
    allow_other: bool = _option(
        "Ownership and permissions", None, FLAG, "",
        "Let other users use the mount. An ordinary user needs user_allow_other in /etc/fuse.conf.", common=True,
    )
    allow_root: bool = _option(
        "Ownership and permissions", None, FLAG, "",
        "Let root use the mount, as well as its owner. An ordinary user needs user_allow_other in /etc/fuse.conf.",
    )
    uid: int | None = _option(
        "Ownership and permissions", None, USER, "UID",
        "Show all files as owned by user UID. Default: the user who mounts.",
    )
    gid: int | None = _option(
        "Ownership and permissions", None, USER, "GID",
        "Show all files as owned by group GID. Default: the group of the user who mounts.",
    )
    umask: int = _option(
        "Ownership and permissions", "0000", OCTAL, "MODE",
        "Remove these permission bits from all files and directories.",
    )
    guard: bool = _option(
        "Ownership and permissions", None, FLAG, "",
        "Take all permissions off the directory beneath the mount, so that a reader gets an error, not an empty "
        "directory, while nothing is mounted.",
    )
    # -- Daemon
    hold: bool = _option(
        "Daemon", None, FLAG, "",
        "Keep the mount until `zarrfs umount`, or until all owner= have ended: SIGTERM and a plain umount do nothing. "
        "Set it in batch jobs, whose scheduler sends SIGTERM long before the job ends. Implies guard.",
    )
    owner: tuple[int, ...] = _option(
        "Daemon", None, NATURAL, "PID",
        "Unmount when process PID has ended, as soon as the mount is not in use. Repeatable: when all have ended.",
        many=True, bounds=("1", "4194304"),
    )
    foreground: bool = _option(
        "Daemon", None, FLAG, "",
        "Stay in the foreground and log to standard error; Ctrl-C unmounts. Set it under systemd and in containers.",
        where=ONE_SOURCE,
    )
    log_file: str | None = _option(
        "Daemon", None, LOCAL, "FILE",
        "Append the log to FILE. Default: the journal or syslog, standard error in the foreground.", common=True,
    )
    log_level: str = _option(
        "Daemon", "info", words("debug", "info", "warning", "error"), "LEVEL",
        "Log messages of this level and above: debug, info, warning or error.",
    )
    config: str | None = _option(
        "Daemon", None, PATH, "FILE",
        "Read options from FILE instead of the user's zarrfs.toml (docs/options.md).", long=True, where=NO_FILE,
    )
    fsname: str | None = _option(
        "Daemon", None, TEXT, "NAME",
        "Show NAME as the source in the output of mount(8). Default: SOURCE.", where=ONE_SOURCE,
    )
    # internal: cached facts about targets from before this time (seconds since 1970) are stale; by refresh, check
    asked_since: float = 0.0
    # internal: a mount of `zarrfs run`: its daemon logs to standard error, and removes the mount point at its end
    temporary: bool = False
    # internal: the largest document in bytes, as fetched or decompressed
    document_limit: int = 4 << 30
    # internal: which outages are waited for until read_timeout: "none", those of a server that has "answered" before,
    # or "all"
    wait_for_outages: str = "answered"
    # per protocol: -o s3.anon=true,s3.endpoint_url=...; per host or bucket: "s3://bucket" as the first key
    storage: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)

    @property
    def request_timeout(self) -> float:
        """Seconds after which a request is repeated."""
        return self.read_timeout / 5


TABLE: dict[str, Opt] = {
    field.name: field.metadata["opt"] for field in dataclasses.fields(Options) if "opt" in field.metadata
}
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(opt.group for opt in TABLE.values()))


def spelled(name: str) -> str:
    """Return an option as it is written in -o."""
    return name if TABLE[name].kind is FLAG else f"{name}={TABLE[name].metavar}"


def help_text(name: str) -> str:
    """Return the help of an option, with its default."""
    opt = TABLE[name]
    return opt.help if opt.default is None else f"{opt.help} Default: {opt.default}."


def bounds_of(name: str) -> tuple[Any, Any] | None:
    """Return the least and the greatest value of an option; None if only its parser bounds it."""
    bounds = TABLE[name].bounds
    return bounds and (TABLE[name].kind.parse(bounds[0]), TABLE[name].kind.parse(bounds[1]))


# Options of mount(8): those for the kernel, and those that only mount(8) itself reads.
KERNEL_FLAGS = frozenset(
    (
        "suid", "nosuid", "dev", "nodev", "exec", "noexec", "sync", "async", "dirsync", "atime",
        "noatime", "diratime", "nodiratime", "relatime", "strictatime", "lazytime", "nosymfollow",
    )
)  # fmt: skip
IGNORED = frozenset(
    (
        "defaults", "auto", "noauto", "user", "users", "nouser", "owner", "group", "_netdev", "nofail",
        "comment", "silent", "loud", "iversion", "noiversion", "nomand", "nolazytime", "norelatime", "nostrictatime",
    )
)  # fmt: skip


@dataclasses.dataclass
class Parsed:
    """The outcome of parse(): the options of zarrfs, and mount flags for the kernel."""

    options: Options
    kernel: list[str]
    writable: bool = False  # "rw" was given


# s3.anon, or s3://bucket.anon; the name is what follows the last dot
_PLACE = re.compile(rf"({PLACE})\.([A-Za-z_]\w*)")


def split_commas(text: str) -> list[str]:
    r"""Split "a,b=c\,d" into ["a", "b=c,d"]: a backslash escapes a comma (or a backslash)."""
    parts = re.findall(r"(?:[^,\\]|\\.|\\$)+", text, re.DOTALL)
    return [re.sub(r"\\([,\\])", r"\1", part) for part in parts]


def parse(items: Iterable[str]) -> Parsed:
    """Parse items, without configuration files."""
    given = Given()
    given.add(items)
    return given.parsed()


class Given:
    """The options of one origin (command line, variable, section of a file), or of several after update()."""

    def __init__(self, origin: str = "") -> None:
        self.values: dict[str, Any] = {}
        # In `storage` a value may still be the name of a file to read it from (values.from_files).
        self.storage: dict[str, dict[str, object]] = {}
        self.text: dict[str, str] = {}  # each option as given, without secrets
        self._origin = origin
        self._kernel: list[str] = []
        self._writable = False

    def add(self, items: Iterable[str]) -> None:
        """Parse items such as "ro", "blobs=/srv/blobs" or "s3.anon=true"; later ones win.

        "-" and "_" are the same in names. An item without "=" that is not an option continues the list before it,
        because "allow=file,private" has been split at its comma. Raise UsageError for a bad value or an unknown name;
        the message suggests a similar one.
        """
        before, secret = "", False  # the last item with a value: its name, and whether that is a secret
        for item in items:
            name, equals, value = item.partition("=")
            name = name.strip() if "." in name else name.strip().replace("-", "_")
            try:
                self._add(item, name, value if equals else None, before)
            except UsageError:
                if name not in TABLE and secret:  # the item may be half of it, and is not shown
                    rule = "followed by an unknown option (write a comma in a value as \\,)"
                    raise UsageError(f"option {before}: {rule}") from None
                raise
            if equals:
                place = _PLACE.fullmatch(name)
                before, secret = name, is_secret(place[2] if place else "", value)

    def _add(self, item: str, name: str, value: str | None, before: str) -> None:
        """Add an item. `before` is the name of the last item with a value."""
        if name in TABLE and not (value is None and name in IGNORED):  # "owner" alone is an option of mount(8)
            self._put(name, value)
        elif name == "rw":  # mount(8) always passes ro or rw, so this need not be the user's choice
            self._writable, self.values["ro"], self.text["ro"] = True, False, "rw"
        elif name in KERNEL_FLAGS:
            self._kernel.append(name)
        elif name in IGNORED or name[:2].lower() in ("x_", "x-"):
            pass
        elif (place := _PLACE.fullmatch(name)) and (value is not None or is_known(place[1])):
            parsed = True if value is None else storage_value(place[2], value)
            check_storage(place[1], {place[2]: parsed})
            at = canonical(place[1])
            self.storage.setdefault(at, {})[place[2]] = parsed
            shown = redacted_storage(place[2], "true" if value is None else value)
            self.text[f"{at}.{place[2]}"] = f"{name}={shown}"
        elif "://" in name:
            rule = "expected PROTOCOL://HOST.NAME=VALUE (for s3, gs, az, HOST is a bucket)"
            raise UsageError(f"option {without_secrets(name)}: {rule}")
        elif value is None and before in TABLE and TABLE[before].kind in (ALLOW, PATHS, STATUSES):
            self._put(before, item)
        else:
            hint = f" (did you mean allow={name}?)" if name in ALLOWED else did_you_mean(name, [*TABLE, *KERNEL_FLAGS])
            raise UsageError(f"unknown option {name!r}{hint}")

    def _put(self, name: str, value: str | None) -> None:
        """Parse a value of the option `name` (None: given without one). Raise UsageError if it is not acceptable."""
        opt = TABLE[name]
        if value is None and opt.kind is not FLAG:
            raise UsageError(f"option {name} needs a value: {name}={opt.metavar}")
        value = "true" if value is None else value
        if opt.many and value == "[]":  # as zarrfs.toml and Python write an empty list
            self.values[name], self.text[name] = (), f"{name}=[]"
            return
        shown = without_secrets(value)
        if "\0" in value:  # which no path, variable or argument can contain
            raise UsageError(f"option {name}={shown}: expected text without a NUL character")
        bounds = bounds_of(name)
        rule = "{} from {} to {}".format(opt.kind.noun, *opt.bounds) if opt.bounds else ""
        try:
            parsed = opt.kind.parse(value)
        except ValueError as exc:
            expected = rule if opt.kind is NATURAL and rule else exc
            raise UsageError(f"option {name}={shown}: expected {expected}") from None
        if bounds and not bounds[0] <= parsed <= bounds[1]:
            raise UsageError(f"option {name}={shown}: expected {rule}")
        if opt.many:
            parsed = parsed if isinstance(parsed, tuple) else (parsed,)
            if earlier := self.values.get(name):
                self.values[name], self.text[name] = (*earlier, *parsed), f"{self.text[name]},{shown}"
                return
        self.values[name], self.text[name] = parsed, f"{name}={shown}"

    def update(self, stronger: Given) -> None:
        """Add the options of a stronger origin."""
        self.values |= stronger.values
        self.text |= {name: f"{text} ({stronger._origin})" for name, text in stronger.text.items()}
        for place, options in stronger.storage.items():
            self.storage[place] = self.storage.get(place, {}) | options
        self._kernel += stronger._kernel
        self._writable |= stronger._writable

    def parsed(self) -> Parsed:
        """Return the outcome; storage options of the form "@/path" are read from that file.

        Raise UsageError for options that exclude each other and for bad storage options.
        """
        if self.values.get("allow_other") and self.values.get("allow_root"):
            raise UsageError("options allow_other and allow_root exclude each other")
        storage = {}
        for place, options in self.storage.items():
            storage[place] = found = dict(options)
            for name, value in options.items():
                try:
                    found[name] = absolute(place, name, from_files(value))
                except ValueError as exc:
                    raise UsageError(f"option {place}.{name}: {exc}") from None
            check_storage(place, found)
        options_ = Options(**self.values, storage=storage)
        return Parsed(options_, self._kernel, self._writable and not options_.ro)
