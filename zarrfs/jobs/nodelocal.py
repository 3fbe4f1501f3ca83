"""Node-local directories, for mounts and copies of a job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from zarrfs.errors import UsageError
from zarrfs.system import mounts

# Types, as in mountinfo, of file systems that may be shared with other nodes or a host.
_SHARED = frozenset(
    (
        "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "dvs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs",
        "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs",
    )
)  # fmt: skip
FLUX = "FLUX_JOB_TMPDIR"  # Flux deletes this directory at the end of a job, with all that is mounted in it


def directory(parent: str, name: str, mount: bool, writable: bool) -> str:
    """Return the path for a new directory `name` on this node, in `parent` or, if that is "", in a directory it finds.

    That is the first of SLURM_TMPDIR, FLUX_JOB_TMPDIR (not for mounts), TMPDIR, /tmp, /var/tmp and XDG_RUNTIME_DIR
    that is a writable directory of a local file system. Raise UsageError if `parent`, or every one of these, is not.
    """
    if parent:
        reason = _why_not(parent, mount and writable)
        if reason:
            raise UsageError(f"--node-local={parent}: {reason}")
        return os.path.join(os.path.realpath(parent), name)
    reasons = []
    for variable, parent in _candidates():
        reason = _why_not(parent, mount)
        if not reason:
            return os.path.join(os.path.realpath(parent), name)
        reasons.append(f"{variable + '=' if variable else ''}{parent}: {reason}")
    raise UsageError(f"no directory of this node can be used: {'; '.join(reasons)}")


def name_of(dest: str, job: str) -> str:
    """Return the name of the directory for `dest`: the same on all nodes of a job, so that they can share a link."""
    key = hashlib.sha256(os.fsencode(f"{os.geteuid()}\0{job}\0{dest}")).hexdigest()[:16]
    return f"zarrfs-stage-{key}"


def removed_by_flux(path: str) -> bool:
    """Return whether `path` is in the directory that Flux deletes, with all mounts in it, at the end of this job."""
    flux = os.environ.get(FLUX, "")
    return bool(flux) and mounts.beneath(os.path.realpath(path), os.path.realpath(flux))


def shared_type(path: str) -> str:
    """Return the type of the file system of `path` if it is not local to this node, else ""."""
    fstype = mounts.mount_around(os.path.realpath(path)).fstype
    return fstype if fstype in _SHARED or fstype.startswith("fuse") else ""


def _candidates() -> Iterator[tuple[str, str]]:
    for variable in ("SLURM_TMPDIR", FLUX, "TMPDIR"):
        if os.environ.get(variable):
            yield variable, os.environ[variable]
    yield "", "/tmp"
    yield "", "/var/tmp"
    if os.environ.get("XDG_RUNTIME_DIR"):
        yield "XDG_RUNTIME_DIR", os.environ["XDG_RUNTIME_DIR"]


def _why_not(parent: str, flux_removes: bool) -> str:
    """Return why `parent` cannot be used, or "". With `flux_removes`, it must not be in FLUX_JOB_TMPDIR."""
    if not parent.startswith("/"):
        return "not an absolute path"
    if not os.path.isdir(parent):
        return "no such directory"
    if flux_removes and removed_by_flux(parent):
        return "lies in FLUX_JOB_TMPDIR, which Flux deletes with all that is mounted there"
    kind = shared_type(parent)
    if kind:
        return f"is of type {kind}, not a local file system"
    if not os.access(parent, os.W_OK | os.X_OK):
        return "cannot be written to"
    return ""
