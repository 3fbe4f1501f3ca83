"""Loader of archives in the KVS of the running Flux instance, and of jobspecs, by `flux kvs get` and `flux job info`.

FLUX_URI selects the instance, as for every command of Flux. Blobs are loaded by flux_blobs.py.
Sources: flux-kvs(1), flux-job(1).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess

from zarrfs.archives.source_kinds import FLUX
from zarrfs.errors import SourceError, reason_of

_MESSAGE_MAX = 300  # characters quoted of a command's message


class FluxFailure(Exception):
    """A failed command of Flux, with its message."""


def document(source: str, timeout: float) -> bytes:
    """Fetch the archive "flux:NAME" or the jobspec "flux:job/ID". Blocks.

    Raise SourceError for a malformed name, and with the message of the command if that fails.
    """
    name = source.removeprefix(FLUX)
    job = name.removeprefix("job/") if name.startswith("job/") else None
    if not name or job == "" or name.startswith("-") or (job or "").startswith("-") or "\0" in name:
        raise SourceError(source, "expected flux:NAME (an archive of the Flux instance) or flux:job/ID (of a job)")
    command = ["kvs", "get", f"archive.{name}"] if job is None else ["job", "info", job, "jobspec"]
    try:
        return run(command, timeout)
    except FluxFailure as exc:
        raise SourceError(source, str(exc)) from None


def run(arguments: list[str], timeout: float) -> bytes:
    """Run `flux ARGUMENTS` for at most `timeout` seconds and return its output. Raise FluxFailure."""
    shown = "flux " + shlex.join(arguments)
    try:
        process = subprocess.Popen(
            ["flux", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, env=os.environ | {"FLUX_KVS_NAMESPACE": "primary"},  # not a job's namespace
        )  # fmt: skip
    except OSError as exc:
        raise FluxFailure(f"{shown}: cannot run flux: {reason_of(exc)}") from None
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            raise FluxFailure(f"{shown}: no answer within {timeout:g} s") from None
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        said = " ".join(err.decode(errors="replace").split())[:_MESSAGE_MAX] or f"status {process.returncode}"
        raise FluxFailure(f"{shown}: {said}")
    return out


def _end(process: subprocess.Popen[bytes]) -> None:
    try:  # kill the group: flux runs subcommands as child processes, which inherit the pipes
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        process.kill()
    process.wait()
