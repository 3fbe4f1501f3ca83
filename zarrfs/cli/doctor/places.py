"""Checks of a user's files by zarrfs doctor: caches, job records, dead mounts, configuration, packages."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from zarrfs.cli.doctor.findings import OK, PROBLEM, WARNING, Finding, size_text
from zarrfs.config.options import Options
from zarrfs.config.redaction import redact_text
from zarrfs.errors import MountError, reason_of
from zarrfs.jobs import nodelocal
from zarrfs.system import mounts

_ROOM = 64 << 20  # free bytes: less is too little for the index of a large source
_NAMED = 5  # leftovers of one kind that a line lists by name
_PATIENCE = 1.0  # seconds to wait for mounts; if one is silent, ending the child that probes it takes another second
_PACKAGES = {  # by the extra that installs them
    "s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs", "sftp": "sshfs", "fast": "obstore", "parquet": "pyarrow",
    "netcdf": "h5netcdf", "flux": "lz4",
}  # fmt: skip


def indexes(options: Options) -> Iterator[Finding]:
    """indexes: whether the directory of compiled documents can be used."""
    from zarrfs.sources.index_cache import unsafe, usual_directory

    if options.cache == "none":
        yield Finding("indexes", OK, "none are kept (cache=none)")
        return
    where = os.path.abspath(options.index_dir or usual_directory())
    state, advice = WARNING, "sources are compiled at every mount: name another one with index_dir="
    if options.index_dir:
        state, advice = PROBLEM, "sources that have to be compiled cannot be mounted: name another one"
    if os.path.isdir(where) and (rule := unsafe(where)) is not None:
        yield Finding("indexes", state, f"{where} {rule}", advice)
        return
    yield from _directory("indexes", where, state, advice)
    if os.path.isdir(where):
        kept = sum(name.endswith(".index") for name in os.listdir(where))
        yield Finding("indexes", OK, f"{kept:,} documents are compiled already")


def blocks(options: Options) -> Iterator[Finding]:
    """blocks: whether the cache on disk can be used."""
    if options.cache_dir is None or options.cache == "none":
        yield Finding("blocks", OK, "none are kept on disk (cache_dir= names a directory for them)")
        return
    yield from _directory("blocks", options.cache_dir, WARNING, "nothing will be kept on disk")


def runtime(options: Options) -> Iterator[Finding]:
    """records: whether there is a directory for the records of zarrfs stage and run."""
    from zarrfs.jobs import records

    reasons = []
    for path in records.places():
        parent = _existing(path)
        if os.access(parent, os.W_OK | os.X_OK):
            yield Finding("records", OK, f"of stage and run: {path}")
            return
        reasons.append(f"{parent} cannot be written to")
    yield Finding("records", WARNING, "; ".join(reasons), f"zarrfs stage and run need one: set {records.VARIABLE}")


def log(options: Options) -> Iterator[Finding]:
    """log: where the log of a mount goes."""
    from zarrfs.metrics import logs

    if where := logs.destination(options):
        yield Finding("log", OK, f"of mounts: {where}")
    else:
        text = f"of mounts goes nowhere: there is neither a journal nor {logs.SYSLOG}"
        yield Finding("log", WARNING, text, "name a file with log_file=, to have the reasons of failed reads")


def mounted(options: Options) -> Iterator[Finding]:
    """leftovers: mounts whose daemon has died or is silent, and stale records; then servers that mounts wait for."""
    ours = sorted({one.mountpoint for one in mounts.mounts() if one.fstype == mounts.FSTYPE})
    dead, silent = mounts.unanswered(ours, _PATIENCE)
    yield from _leftovers(len(ours), dead, silent)
    yield from _servers([path for path in ours if path not in dead and path not in silent])


def _leftovers(count: int, dead: Sequence[str], silent: Sequence[str]) -> Iterator[Finding]:
    if dead:
        remedy = shlex.join(["zarrfs", "umount", *dead])
        yield Finding("leftovers", WARNING, _counted(dead, "mount", "with a daemon that has died"), remedy)
    if silent:
        text = _counted(silent, "mount", "with a daemon that does not answer")
        yield Finding("leftovers", WARNING, text, "it may be stopped, or very busy")
    from zarrfs.jobs import records
    from zarrfs.jobs.unstage import why_stale

    damaged: list[MountError] = []
    stale = [one for one in records.found(damaged) if why_stale(one)]
    if stale:
        text = _counted([one.dest for one in stale], "staged source", "that nobody needs")
        yield Finding("leftovers", WARNING, text, "zarrfs unstage --stale")
    if damaged:
        text = _counted([str(exc) for exc in damaged], "damaged record", "of stage and run")
        yield Finding("leftovers", WARNING, text, "remove these files")
    if not (dead or silent or stale or damaged):
        yield Finding("leftovers", OK, f"none; {count} mounts of zarrfs")


def _counted(names: Sequence[str], noun: str, what: str) -> str:
    """Return "2 NOUNs WHAT: a, b", with the first _NAMED names."""
    more = len(names) - _NAMED
    named = ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")
    return f"{len(names):,} {noun}{'' if len(names) == 1 else 's'} {what}: {named}"


def _servers(mountpoints: Sequence[str]) -> Iterator[Finding]:
    """Find servers that do not answer while readers of mounts wait for them."""
    from zarrfs.cli.stats_text import hosts, outage
    from zarrfs.metrics.statistics import statistics

    found = False
    for path in mountpoints:
        try:
            counted = statistics(path)
        except MountError:  # the mount of another user, or unmounted meanwhile
            continue
        for host in hosts(counted):
            if text := outage(counted, host):
                found = True
                yield Finding("servers", WARNING, f"{path}: {redact_text(host)} is {redact_text(text)}",
                              "its readers go on when it answers, or fail after read_timeout=")  # fmt: skip
    if not found:
        yield Finding("servers", OK, "no mount waits for one that is out")


def configuration(options: Options) -> Iterator[Finding]:
    """configuration: which files are read."""
    from zarrfs.config import effective as settings

    read = []
    for path, _kind, outcome in settings.files(options.config):
        if outcome == "read":
            read.append(path)
        elif outcome != "missing":
            state = WARNING if "not for this user" in outcome else PROBLEM
            yield Finding("configuration", state, f"{path}: {outcome}")
    for name in settings.unknown_variables():
        yield Finding("configuration", WARNING, f"{name} is no option of zarrfs")
    yield Finding("configuration", OK, f"read: {', '.join(read)}" if read else "no zarrfs.toml")


def packages(options: Options) -> Iterator[Finding]:
    """packages: optional ones that some sources need."""
    there, missing = [], []
    for extra, name in _PACKAGES.items():
        try:
            there.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(f"{name} (zarrfs[{extra}])")
    text = ", ".join(there) or "none of the optional ones"
    if missing:
        from zarrfs.system.packages import install_command

        text += f"; not installed: {', '.join(missing)}; to install that of one: {install_command('EXTRA')}"
    yield Finding("packages", OK, text)


def _directory(check: str, path: str, state: str, advice: str) -> Iterator[Finding]:
    """Check that a directory exists or can be created, is writable, and has room.

    Too little room is a WARNING; any other problem is a finding in the given `state`.
    """
    place = _existing(path)
    try:
        status, disk = os.stat(place), os.statvfs(place)
    except OSError as exc:
        yield Finding(check, state, f"{path}: {reason_of(exc)}", advice)
        return
    made = "" if place == path else " (not there yet)"
    if not stat.S_ISDIR(status.st_mode):
        yield Finding(check, state, f"{place} is no directory", advice)
        return
    if disk.f_flag & os.ST_RDONLY or not os.access(place, os.W_OK | os.X_OK):
        yield Finding(check, state, f"{place} cannot be written to", advice)
        return
    free, kind = disk.f_bavail * disk.f_frsize, nodelocal.shared_type(place)
    text = f"{path}{made}, {size_text(free)} free"
    if free < _ROOM:
        yield Finding(check, WARNING, text, "make room, or name another one")
    else:
        yield Finding(check, OK, f"{text}{f', on {kind}' if kind else ''}")


def _existing(path: str) -> str:
    """Return `path` if it exists, else the nearest directory above it that does."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path


CHECKS = (indexes, blocks, runtime, log, mounted, configuration, packages)
