"""zarrfs doctor: check each requirement of a mount, and advise what to do if one is not met."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
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

EPILOG = """\b
Examples:
  zarrfs doctor
  zarrfs doctor s3://bucket/refs.json -o s3.anon=true
  zarrfs doctor --json | jq '.findings[] | select(.state != "ok")'
\b
Nothing is mounted and nothing is changed."""
OK, WARNING, PROBLEM = "ok", "warning", "problem"
_LIMIT = 5.0  # seconds: a directory on a dead server never answers
_READ, _LOOKED = 4096, 500  # bytes of a file of SOURCE; entries examined to find one with bytes in a target
_PACKAGES = {  # by the extra that installs them
    "s3": "botocore", "gcs": "google-auth", "azure": "azure-identity", "sftp": "sshfs", "parquet": "pyarrow",
    "netcdf": "h5py",
}  # fmt: skip
_ADVICE = {  # by a regular expression for the reason of a failure; the first match counts
    r"name or service not known|name resolution|dns|getaddrinfo|resolve host":
        "the name of the server is unknown here: look for a typing error, at DNS, or for a proxy (-o http.proxy=URL)",
    r"certificate|ssl|tls": "its certificate is not trusted: SSL_CERT_FILE names the file of your authority",
    r"\b40[137]\b|denied|forbidden|credential|signature|authori[sz]ed":
        "credentials are wrong or missing; for public data: -o s3.anon=true, gs.token=anon, az.anon=true",
    r"connect|refused|unreachable|timed? ?out|no answer": "nothing answers there: a firewall, a wrong port, a proxy",
    r"\b404\b|\b410\b|no such|not found|does not exist": "look for a typing error in the name",
    r"\b(429|5\d\d)\b": "the server has a problem of its own: try again later",
}  # fmt: skip


class Finding(NamedTuple):
    """One line of the output: the name of a check, the state (OK, WARNING or PROBLEM), the fact found, and advice."""

    check: str
    state: str
    fact: str
    advice: str = ""


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@click.argument("source", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option("--timeout", default="30s", metavar="TIME", show_default=True, callback=common.time_given,
              help="How long opening SOURCE may take.")  # fmt: skip
@common.source_options(log_level="error")
def doctor(source: str | None, as_json: bool, timeout: float, parsed: Parsed) -> None:
    """Diagnose what prevents a mount by this user on this machine; with SOURCE, open it and read a little.

    Prints a line for each check: ok, warning or problem, what was found, and what to do. The exit status is 1 if
    a problem would keep a mount from working, else 0.
    """
    checks = {"user": _user, "mounts": _mounts, "configuration": _configuration, "cache": _cache, "others": _others}
    found = [one for name, check in checks.items() for one in _run(name, check, parsed.options, _LIMIT, WARNING)]
    if source is not None:
        found += _run("source", lambda options: _source(source, options), parsed.options, timeout, PROBLEM)
    failed = any(one.state == PROBLEM for one in found)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [one._asdict() for one in found]}))
    for one in () if as_json else found:
        advice = f": {one.advice}" if one.advice else ""
        print(message_line(f"{one.state:<8} {one.check + ':':<15} {one.fact}{advice}"))
    sys.exit(1 if failed else 0)


def _run(
    name: str, check: Callable[[Options], Iterator[Finding]], options: Options, limit: float, otherwise: str
) -> list[Finding]:
    """Run `check` for at most `limit` seconds; a timeout or an exception is a finding in the state `otherwise`."""
    found: list[Finding] = []

    def look() -> None:
        try:
            found.extend(check(options))
        except Exception as exc:
            found.append(_failure(name, otherwise, exc))

    thread = threading.Thread(target=look, daemon=True)  # a daemon thread that hangs does not block the exit
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        return [Finding(name, otherwise, f"no answer within {limit:g} s", "a server or a daemon may be down")]
    return found


def _failure(check: str, state: str, exc: BaseException) -> Finding:
    text = redact_text(str(exc) if isinstance(exc, ZarrfsError | OSError) else f"{type(exc).__name__}: {exc}")
    advice = next((advice for words, advice in _ADVICE.items() if re.search(words, text, re.IGNORECASE)), "")
    return Finding(check, state, text, advice if state == PROBLEM else "")


def _user(options: Options) -> Iterator[Finding]:
    """Check /dev/fuse, and fusermount3 and /etc/fuse.conf, with which all but root mount."""
    from zarrfs.system import mounts, requirements

    wrong, _, advice = requirements.device_problem().partition(": ")
    yield Finding("device", PROBLEM if wrong else OK, wrong or f"{requirements.DEVICE} can be opened", advice)
    if os.geteuid() == 0:
        return
    try:
        path = mounts.fusermount()
        if os.stat(path).st_mode & stat.S_ISUID:
            yield Finding("user", OK, f"user {os.geteuid()} mounts with {path}")
        else:
            yield Finding("user", PROBLEM, f"{path} is not set-user-ID root", f"root can chmod u+s {path}")
    except MountError as exc:
        wrong, _, advice = str(exc).partition(": ")
        yield Finding("user", PROBLEM, wrong, advice)
    try:
        with open("/etc/fuse.conf") as file:
            permitted = any(line.partition("#")[0].strip() == "user_allow_other" for line in file)
    except OSError:
        permitted = False
    if not permitted:
        state = PROBLEM if options.allow_other or options.allow_root else OK
        yield Finding("fuse.conf", state, "/etc/fuse.conf does not permit allow_other", "add a line user_allow_other")


def _mounts(options: Options) -> Iterator[Finding]:
    """Name mounts whose daemon has died or is silent."""
    from zarrfs.system import mounts

    ours = sorted({one.mountpoint for one in mounts.mounts() if one.fstype == mounts.FSTYPE})
    dead, silent = mounts.unanswered(ours, 1.0)
    if dead:
        remedy = shlex.join(["zarrfs", "umount", *dead])
        yield Finding("mounts", WARNING, f"the daemon has died: {', '.join(dead)}", remedy)
    if silent:
        fact = f"the daemon does not answer: {', '.join(silent)}"
        yield Finding("mounts", WARNING, fact, "it may be stopped, or very busy")
    yield Finding("mounts", OK, f"{len(ours)} of zarrfs")


def _configuration(options: Options) -> Iterator[Finding]:
    from zarrfs.config import effective

    found = effective.files(options.config)
    for path, outcome in found:
        if outcome not in ("read", "missing"):
            yield Finding("configuration", WARNING, f"{path}: {outcome}")
    for name in effective.unknown_variables():
        yield Finding("configuration", WARNING, f"{name} is no option of zarrfs")
    read = [path for path, outcome in found if outcome == "read"]
    yield Finding("configuration", OK, f"read: {', '.join(read)}" if read else "no zarrfs.toml")


def _cache(options: Options) -> Iterator[Finding]:
    from zarrfs.sources.index_cache import usual_directory

    for path, state in ((usual_directory(), WARNING), (options.cache_dir, PROBLEM)):
        place = path and os.path.abspath(path)
        while place and not os.path.lexists(place):
            place = os.path.dirname(place)
        if place and os.access(place, os.W_OK | os.X_OK):
            yield Finding("cache", OK, path or "")
        elif place:
            yield Finding("cache", state, f"{place} cannot be written to", "name another one")


def _others(options: Options) -> Iterator[Finding]:
    """Check where the log goes, certificates, and versions and extras."""
    from zarrfs.metrics import logs

    where = logs.destination(options)
    yield Finding("log", OK, where) if where else Finding("log", WARNING, "goes nowhere", "name a file with log_file=")
    paths = ssl.get_default_verify_paths()
    named = ", ".join(path for path in (paths.cafile, paths.capath) if path)
    advice = "" if named else "install the package ca-certificates, or set SSL_CERT_FILE"
    yield Finding("certificates", OK if named else WARNING, named or "none", advice)
    text = f"zarrfs {version('zarrfs')}, Python {platform.python_version()}, pyfuse3 {version('pyfuse3')}"
    yield Finding("versions", OK, f"{text}, Linux {platform.release()}, at {sys.prefix}")
    for extra, name in _PACKAGES.items():
        try:
            yield Finding("packages", OK, f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("packages", OK, f"{name} is not installed", f"pip install 'zarrfs[{extra}]'")


def _source(source: str, options: Options) -> Iterator[Finding]:
    """Open a source as a mount would, and read the beginning of a file."""
    from zarrfs.concurrency import tasks
    from zarrfs.sources import open_plan, plan_source
    from zarrfs.store.api import Kind

    options = dataclasses.replace(options, read_timeout=min(options.read_timeout, 50), retries=0, upperdir=None)
    plan = plan_source(source, options)
    yield Finding("source", OK, f"{plan.source}: {plan.kind}")
    yield from (Finding("source", WARNING, redact_text(warning)) for warning in plan.warnings)

    async def read() -> str:
        store = open_plan(plan, options)
        try:
            looked = 0
            async for key in store.list_prefix(""):
                info, looked = await store.info(key), looked + 1
                if info.kind is Kind.FILE and (looked == _LOOKED or "inline" not in await store.locate(key)):
                    return f"{key}: {len(await store.get(key, 0, _READ)):,} bytes read"
            return "no file with bytes in a target"
        finally:
            await store.aclose()

    try:
        yield Finding("target", OK, tasks.run(read))
    except (ZarrfsError, OSError) as exc:
        yield _failure("target", PROBLEM, exc)
