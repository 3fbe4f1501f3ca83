"""zarrfs doctor: check each requirement of a mount, and advise what to do if one is not met."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import shlex
import signal
import ssl
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import click

from zarrfs.cli import common
from zarrfs.config.options import Options, Parsed
from zarrfs.config.redaction import redact_text
from zarrfs.errors import MountError, ZarrfsError, message_line
from zarrfs.system.processes import children

EPILOG = """\b
Examples:
  zarrfs doctor
  zarrfs doctor s3://bucket/refs.json -o s3.anon=true
  zarrfs doctor --json | jq '.findings[] | select(.state != "ok")'
\b
Nothing is mounted and nothing is changed. No check takes longer than a few seconds, that of SOURCE no longer than
--timeout."""
OK, WARNING, PROBLEM = "ok", "warning", "problem"
_LIMIT = 5.0  # seconds: a directory on a dead server never answers
_READ, _LOOKED = 4096, 500  # bytes of a file of SOURCE; entries examined to find one with bytes in a target
_PACKAGES = {  # by the extra that installs them
    "s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs", "sftp": "sshfs", "fast": "obstore", "parquet": "pyarrow",
    "netcdf": "h5netcdf",
}  # fmt: skip
_ADVICE = (  # (regular expression for the reason of a failure, advice); the first match counts
    (r"name or service not known|name resolution|dns|getaddrinfo|resolve host",
     "the name of the server is unknown here: look for a typing error, at DNS, or for a proxy (-o http.proxy=URL)"),
    (r"certificate|ssl|tls", "its certificate is not trusted: SSL_CERT_FILE names the file of your authority"),
    (r"\b40[137]\b|denied|forbidden|credential|signature|authori[sz]ed",
     "credentials are wrong or missing; for public data: -o s3.anon=true, gs.token=anon, az.anon=true"),
    (r"connect|refused|unreachable|timed? ?out|no answer", "nothing answers there: a firewall, a wrong port, a proxy"),
    (r"\b404\b|\b410\b|no such|not found|does not exist", "look for a typing error in the name"),
    (r"\b(429|5\d\d)\b", "the server has a problem of its own: try again later"),
)  # fmt: skip


class Finding(NamedTuple):
    """One line of the output: the name of a check, the state (OK, WARNING or PROBLEM), the fact found, and advice."""

    check: str
    state: str
    fact: str
    advice: str = ""


Check = Callable[[Options], Iterator[Finding]]


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option("--timeout", default="30s", metavar="TIME", show_default=True, callback=common.time_given,
              help="How long opening SOURCE may take.")  # fmt: skip
@common.source_options("source", "fetch", log_level="error")
def doctor(source: str | None, as_json: bool, timeout: float, parsed: Parsed) -> None:
    """Diagnose what prevents a mount by this user on this machine; with SOURCE, open it and read a little.

    Prints a line for each check: ok, warning or problem, what was found, and what to do. The exit status is 1 if
    a problem would keep a mount from working, else 0.
    """
    checks = (_versions, _device, _user, _fuse_conf, _mounts, _configuration, _cache, _log, _certificates, _packages)
    found = [one for check in checks for one in _run(check, parsed.options, _LIMIT, WARNING)]
    if source is not None:
        found += _run(lambda options: _source(source, options), parsed.options, timeout, PROBLEM, "source")
        for child in children():  # one that reads a document may still wait for a server
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    failed = any(one.state == PROBLEM for one in found)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [one._asdict() for one in found]}))
    else:
        for one in found:
            advice = f": {one.advice}" if one.advice else ""
            print(message_line(f"{one.state:<8} {one.check + ':':<15} {one.fact}{advice}"))
    sys.exit(1 if failed else 0)


def _run(check: Check, options: Options, limit: float, otherwise: str, name: str = "") -> list[Finding]:
    """Run `check` for at most `limit` seconds; a timeout or an exception is a finding in the state `otherwise`."""
    name = name or getattr(check, "__name__", "").strip("_").replace("_", ".")
    found: list[Finding] = []

    def look() -> None:
        try:
            found.extend(check(options))
        except BaseException as exc:
            found.append(_failure(name, otherwise, exc))

    thread = threading.Thread(target=look, daemon=True)  # a daemon thread that hangs does not block the exit
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        return [Finding(name, otherwise, f"no answer within {limit:g} s", "a server or a daemon may be down")]
    return found


def _failure(check: str, state: str, exc: BaseException) -> Finding:
    text = redact_text(str(exc) if isinstance(exc, ZarrfsError | OSError) else f"{type(exc).__name__}: {exc}")
    advice = next((advice for words, advice in _ADVICE if re.search(words, text, re.IGNORECASE)), "")
    return Finding(check, state, text, advice if state == PROBLEM else "")


def _of(check: str, problem: str, fact: str) -> Finding:
    """Return a PROBLEM from the text "fact: advice", or that `fact` is OK if the text is empty."""
    wrong, _, advice = problem.partition(": ")
    return Finding(check, PROBLEM, wrong, advice) if problem else Finding(check, OK, fact)


def _versions(options: Options) -> Iterator[Finding]:
    text = f"zarrfs {version('zarrfs')}, Python {platform.python_version()}, pyfuse3 {version('pyfuse3')}"
    yield Finding("versions", OK, f"{text}, Linux {platform.release()}, at {sys.prefix}")


def _device(options: Options) -> Iterator[Finding]:
    from zarrfs.system import requirements

    yield _of("device", requirements.device_problem(), f"{requirements.DEVICE} can be opened")


def _user(options: Options) -> Iterator[Finding]:
    """Check fusermount3, with which all but root mount."""
    from zarrfs.system import mounts

    if os.geteuid() == 0:
        yield Finding("user", OK, "root mounts without fusermount3")
        return
    path = problem = ""
    try:
        path = mounts.fusermount()
        if not os.stat(path).st_mode & stat.S_ISUID:
            problem = f"{path} is not set-user-ID root: root can chmod u+s {path}"
    except MountError as exc:
        problem = str(exc)
    yield _of("user", problem, f"user {os.geteuid()} mounts with {path}")


def _fuse_conf(options: Options) -> Iterator[Finding]:
    try:
        with open("/etc/fuse.conf") as file:
            permitted = any(line.partition("#")[0].strip() == "user_allow_other" for line in file)
    except OSError:
        permitted = False
    if not permitted and os.geteuid() != 0:
        asked = options.allow_other or options.allow_root
        text = 'allow_other is not permitted: /etc/fuse.conf has no line "user_allow_other"'
        yield Finding("fuse.conf", PROBLEM if asked else OK, text)


def _mounts(options: Options) -> Iterator[Finding]:
    """Name mounts whose daemon has died or is silent, and servers that readers wait for."""
    from zarrfs.cli.stats_text import hosts, outage
    from zarrfs.metrics.statistics import statistics
    from zarrfs.system import mounts

    ours = sorted({one.mountpoint for one in mounts.mounts() if one.fstype == mounts.FSTYPE})
    dead, silent = mounts.unanswered(ours, 1.0)
    if dead:
        remedy = shlex.join(["zarrfs", "umount", *dead])
        yield Finding("mounts", WARNING, f"the daemon has died: {', '.join(dead)}", remedy)
    if silent:
        fact = f"the daemon does not answer: {', '.join(silent)}"
        yield Finding("mounts", WARNING, fact, "it may be stopped, or very busy")
    for path in (path for path in ours if path not in dead and path not in silent):
        try:
            counted = statistics(path)
        except MountError:  # the mount of another user, or unmounted meanwhile
            continue
        for host in hosts(counted):
            if text := outage(counted, host):
                yield Finding("mounts", WARNING, redact_text(f"{path}: {host} is {text}"))
    yield Finding("mounts", OK, f"{len(ours)} of zarrfs")


def _configuration(options: Options) -> Iterator[Finding]:
    from zarrfs.config import effective

    read = []
    for path, _kind, outcome in effective.files(options.config):
        if outcome == "read":
            read.append(path)
        elif outcome != "missing":
            yield Finding("configuration", WARNING, f"{path}: {outcome}")
    for name in effective.unknown_variables():
        yield Finding("configuration", WARNING, f"{name} is no option of zarrfs")
    yield Finding("configuration", OK, f"read: {', '.join(read)}" if read else "no zarrfs.toml")


def _cache(options: Options) -> Iterator[Finding]:
    from zarrfs.sources.index_cache import usual_directory

    for path in filter(None, (options.index_dir or usual_directory(), options.cache_dir)):
        place = os.path.abspath(path)
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        if os.access(place, os.W_OK | os.X_OK):
            yield Finding("cache", OK, path)
        else:
            named = path in (options.index_dir, options.cache_dir)
            yield Finding("cache", PROBLEM if named else WARNING, f"{place} cannot be written to", "name another one")


def _log(options: Options) -> Iterator[Finding]:
    from zarrfs.metrics import logs

    where = logs.destination(options)
    yield Finding("log", OK, where) if where else Finding("log", WARNING, "goes nowhere", "name a file with log_file=")


def _certificates(options: Options) -> Iterator[Finding]:
    paths = ssl.get_default_verify_paths()
    named = [path for path in (paths.cafile, paths.capath) if path]
    advice = "install the package ca-certificates, or set SSL_CERT_FILE"
    yield Finding("certificates", OK, ", ".join(named)) if named else Finding("certificates", WARNING, "none", advice)


def _packages(options: Options) -> Iterator[Finding]:
    for extra, name in _PACKAGES.items():
        try:
            yield Finding("packages", OK, f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("packages", OK, f"{name} is not installed", f"pip install 'zarrfs[{extra}]'")


def _source(source: str, options: Options) -> Iterator[Finding]:
    """Open a source as a mount would, and read the beginning of a file."""
    import trio

    from zarrfs.sources import discard, open_plan, plan_source
    from zarrfs.store.api import Kind

    quick = dataclasses.replace(options, read_timeout=min(options.read_timeout, 50), retries=0, upperdir=None)
    try:
        plan = plan_source(source, quick)
    except ZarrfsError as exc:
        yield _failure("source", PROBLEM, exc)
        return

    async def read() -> str:
        store = open_plan(plan, quick)
        try:
            looked = 0
            async for key in store.list_prefix(""):
                info, looked = await store.info(key), looked + 1
                if info.kind is Kind.FILE and (looked == _LOOKED or "inline" not in await store.locate(key)):
                    return f"{key}: {len(await store.get(key, 0, _READ)):,} bytes read"
            return "no file with bytes in a target"
        finally:
            await store.aclose()

    yield Finding("source", OK, f"{plan.source}: {plan.kind}")
    for warning in plan.warnings:
        yield Finding("source", WARNING, redact_text(warning))
    try:
        yield Finding("target", OK, trio.run(read))
    except (ZarrfsError, OSError) as exc:
        yield _failure("target", PROBLEM, exc)
    finally:
        discard(plan)
