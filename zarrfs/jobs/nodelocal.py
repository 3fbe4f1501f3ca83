"""Directories on the node itself, for mounts and copies that a job uses."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from zarrfs.errors import UsageError
from zarrfs.system import mounts

# Types of file systems that several nodes see, or that are served by a program: as mountinfo has them.
_SHARED = frozenset(
    (
        "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "dvs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs",
        "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs",
    )
)  # fmt: skip
FLUX = "FLUX_JOB_TMPDIR"  # removed by Flux with all that is mounted below it


def directory(said: str, name: str, mount: bool, writable: bool) -> str:
    """The path, not there yet, of a directory `name` on this node: in `said`, else where the job has room.

    In turn: SLURM_TMPDIR, FLUX_JOB_TMPDIR (not for mounts), TMPDIR, /tmp, /var/tmp, XDG_RUNTIME_DIR; the first that is
    a directory of a local file system in which we may write. UsageError where there is none, or `said` is none.
    """
    if said:
        reason = _why_not(said, mount and writable)
        if reason:
            raise UsageError(f"--node-local={said}: {reason}")
        return os.path.join(os.path.realpath(said), name)
    reasons = []
    for variable, place in _candidates():
        reason = _why_not(place, mount)
        if not reason:
            return os.path.join(os.path.realpath(place), name)
        reasons.append(f"{variable + '=' if variable else ''}{place}: {reason}")
    raise UsageError(f"no directory of this node can be used: {'; '.join(reasons)}")


def name_of(dest: str, job: str) -> str:
    """The name of the directory for `dest`: the same on all nodes of a job, so that one link serves them all."""
    key = hashlib.sha256(os.fsencode(f"{os.geteuid()}\0{job}\0{dest}")).hexdigest()[:16]
    return f"zarrfs-stage-{key}"


def removed_by_flux(path: str) -> bool:
    """Whether `path` lies in the directory that Flux deletes at the end of this job, across mounts."""
    flux = os.environ.get(FLUX, "")
    return bool(flux) and beneath(os.path.realpath(path), os.path.realpath(flux))


def beneath(path: str, above: str) -> bool:
    """Whether `path` is `above`, or lies below it; both are real paths."""
    return (path + "/").startswith(above.rstrip("/") + "/")


def shared_type(path: str) -> str:
    """The type of the file system of `path`, where that is none of this node alone; "" where it is."""
    path, best = os.path.realpath(path), ("", "")
    for mount in mounts.mounts():
        if beneath(path, mount.mountpoint) and len(mount.mountpoint) >= len(best[0]):
            best = (mount.mountpoint, mount.fstype)
    return best[1] if best[1] in _SHARED or best[1].startswith("fuse") else ""


def _candidates() -> Iterator[tuple[str, str]]:
    for variable in ("SLURM_TMPDIR", FLUX, "TMPDIR"):
        if os.environ.get(variable):
            yield variable, os.environ[variable]
    yield "", "/tmp"
    yield "", "/var/tmp"
    if os.environ.get("XDG_RUNTIME_DIR"):
        yield "XDG_RUNTIME_DIR", os.environ["XDG_RUNTIME_DIR"]


def _why_not(place: str, flux_removes: bool) -> str:
    """The reason why nothing can be put in `place`; "" where there is none. `flux_removes`: what Flux would delete."""
    if not place.startswith("/"):
        return "not an absolute path"
    if not os.path.isdir(place):
        return "no such directory"
    if flux_removes and removed_by_flux(place):
        return "lies in FLUX_JOB_TMPDIR, which Flux deletes with all that is mounted there"
    kind = shared_type(place)
    if kind:
        return f"is of type {kind}, not a local file system"
    if not os.access(place, os.W_OK | os.X_OK):
        return "cannot be written to"
    return ""
