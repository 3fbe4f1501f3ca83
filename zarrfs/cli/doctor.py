"""zarrfs doctor: check each requirement of a mount, and advise what to do if one is not met."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import ssl
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import click

from zarrfs.cli import common
from zarrfs.config.options import Options, Parsed
from zarrfs.errors import MountError, message_line

EPILOG = """\b
Examples:
  zarrfs doctor
  zarrfs doctor -o allow_other      also what this option needs
\b
Nothing is mounted and nothing is changed."""
OK, WARNING, PROBLEM = "ok", "warning", "problem"
_LIMIT = 10.0  # seconds for all checks
_PACKAGES = {  # by the extra that installs them
    "s3": "botocore", "gcs": "google-auth", "azure": "azure-identity", "sftp": "sshfs", "parquet": "pyarrow",
    "netcdf": "h5py",
}  # fmt: skip


class Finding(NamedTuple):
    """One line of the output: the name of a check, the state (OK, WARNING or PROBLEM), the fact found, and advice."""

    check: str
    state: str
    fact: str
    advice: str = ""


def _in_time(checks: Callable[..., None]) -> Callable[..., None]:
    """Run `checks` in a child process: the home, or a directory in the options, may lie on a dead file server."""

    @functools.wraps(checks)
    def run(**given: Any) -> None:
        from zarrfs.system.mounts import from_child

        def check(pipe: int) -> None:
            os.dup2(pipe, 1)
            os.dup2(pipe, 2)
            status = 0
            try:
                checks(**given)
            except SystemExit as exc:
                status = int(exc.code or 0)
            except Exception:
                traceback.print_exc()
                status = 1
            os.write(pipe, bytes([status]))

        written, ended = from_child(check, _LIMIT)
        late = Finding("time", PROBLEM, f"the configuration cannot be read in {_LIMIT:g} s", "is a file server down?")
        text, status = (written[:-1], written[-1]) if ended and written else (f"{_line(late)}\n".encode(), 1)
        click.echo(text, nl=False, err=status == 2)  # 2: an error in the options
        sys.exit(status)

    return run


@click.command(context_settings=common.SETTINGS, epilog=EPILOG)
@_in_time
@common.source_options(log_level="error")
def doctor(parsed: Parsed) -> None:
    """Diagnose what prevents a mount by this user on this machine.

    Prints a line for each check: ok, warning or problem, what was found, and what to do. The exit status is 1 if
    a problem would keep a mount from working, else 0. All checks together may take 10 s.
    """
    found: list[Finding] = []
    for check in (_others, _device, _user, _fuse_conf, _mounts, _configuration):
        try:
            found += check(parsed.options)
        except Exception as exc:
            found.append(Finding(check.__name__[1:], PROBLEM, f"cannot be checked: {exc}"))
    for one in found:
        click.echo(_line(one))
    sys.exit(1 if any(one.state == PROBLEM for one in found) else 0)


def _line(one: Finding) -> str:
    advice = f": {one.advice}" if one.advice else ""
    return message_line(f"{one.state:<8} {one.check + ':':<15} {one.fact}{advice}")


def _device(options: Options) -> Iterator[Finding]:
    from zarrfs.system import requirements

    wrong, _, advice = requirements.device_problem().partition(": ")
    yield Finding("device", PROBLEM if wrong else OK, wrong or f"{requirements.DEVICE} can be opened", advice)


def _user(options: Options) -> Iterator[Finding]:
    """Check fusermount3, with which all but root mount."""
    from zarrfs.system import mounts

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


def _fuse_conf(options: Options) -> Iterator[Finding]:
    try:
        with open("/etc/fuse.conf") as file:
            permitted = any(line.partition("#")[0].strip() == "user_allow_other" for line in file)
    except OSError:
        permitted = False
    if not permitted and os.geteuid() != 0:
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

    for path, _ in effective.files(options.config):  # any fault in them has been reported as an error
        state = "not for this user" if not os.access(path, os.R_OK) else "read"
        yield Finding("configuration", OK, f"{path}: {state if os.path.lexists(path) else 'missing'}")
    for name in effective.unknown_variables():
        yield Finding("configuration", WARNING, f"{name} is not an option of zarrfs")


def _others(options: Options) -> Iterator[Finding]:
    """Check certificates, versions and extras."""
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
            yield Finding("packages", OK, f"{name} is not installed", f"it comes with the extra {extra}")
