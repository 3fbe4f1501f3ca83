"""A Flux instance for tests: what flux 0.88 says and writes, as recorded; the real one is in tests/flux.

FakeFlux has a `flux` command for PATH and a Python binding for PYTHONPATH, both on a directory with the content store
and the KVS. content_db() and dump_tar() write what a stopped instance leaves, and what flux dump writes of one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sqlite3
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

UNREACHABLE = "ERROR: Unable to connect to Flux: broker socket /run/flux/local was not found"
COMPRESSED_FROM = 256  # bytes: content-sqlite's compression_threshold

_COMMAND = """#!{python}
import os, sys, time
root, words = {root!r}, sys.argv[1:]
def fail(text):
    sys.stderr.write(text + "\\n")
    sys.exit(1)
with open(os.path.join(root, "calls"), "a") as calls:
    calls.write(" ".join(words) + "\\n")
time.sleep(float(open(os.path.join(root, "delay")).read()))
if os.path.exists(os.path.join(root, "stopped")):
    fail("flux-" + words[0] + ": " + open(os.path.join(root, "stopped")).read())
def give(path, absent, end=b""):
    try:
        data = open(os.path.join(root, *path), "rb").read()
    except FileNotFoundError:
        fail(absent)
    sys.stdout.buffer.write(data + end)
if words[:2] == ["content", "load"]:
    for blobref in words[2:]:
        give(("content", blobref), "flux-content: content_load: No such file or directory")
elif words[:2] == ["kvs", "get"]:
    namespace = os.environ.get("FLUX_KVS_NAMESPACE", "primary")
    where = "kvs" if namespace == "primary" else namespace
    give((where, words[2]), "flux-kvs: " + words[2] + ": No such file or directory", b"\\n")
elif words[:2] == ["job", "info"]:
    give(("jobs", words[2], words[3]), "flux-job: No such file or directory", b"\\n")
else:
    fail("flux: unknown command " + repr(words))
"""

# What cffi makes of libflux-core, as much of it as zarrfs uses: errno, futures, raw payloads.
_BINDING = """
import os, threading, time
_root = {root!r}
class _Ffi:
    NULL = None
    _local = threading.local()
    @property
    def errno(self):
        return getattr(self._local, "errno", 0)
    def new(self, kind):
        return [None]
    def typeof(self, function):
        return type("Type", (), {{"args": [None, None, "int *"]}})
    def buffer(self, data, size):
        return data[:size]
def _failed(code):
    ffi._local.errno = code
    return -1
class _Handle:
    thread = None
class _Future:
    def __init__(self, digest):
        self.digest, self.done = digest, False
class _Lib:
    def flux_open(self, uri, flags):
        if os.path.exists(os.path.join(_root, "stopped")):
            _failed(2)
            return ffi.NULL
        with open(os.path.join(_root, "calls"), "a") as calls:
            calls.write("open\\n")
        return _Handle()
    def flux_close(self, handle):
        with open(os.path.join(_root, "calls"), "a") as calls:
            calls.write("close\\n")
    def flux_rpc_raw(self, handle, topic, data, length, nodeid, flags):
        assert (topic, length, nodeid, flags) == (b"content.load", len(data), 0xFFFFFFFF, 0)
        assert handle.thread is None, "a handle that two threads use"
        handle.thread = threading.get_ident()
        future = _Future(data)
        future.handle = handle
        return future
    def flux_future_wait_for(self, future, timeout):
        delay = float(open(os.path.join(_root, "delay")).read())
        time.sleep(min(delay, timeout))
        return _failed(110) if delay >= timeout else 0
    def flux_rpc_get_raw(self, future, data, size):
        name = {{20: "sha1-", 32: "sha256-"}}[len(future.digest)] + future.digest.hex()
        try:
            data[0] = open(os.path.join(_root, "content", name), "rb").read()
        except FileNotFoundError:
            return _failed(2)
        size[0] = len(data[0])
        return 0
    def flux_future_destroy(self, future):
        future.handle.thread = None
ffi, lib = _Ffi(), _Lib()
"""


class FakeFlux:
    """An instance in the directory `root`; `path` is for PATH, `binding` for PYTHONPATH."""

    def __init__(self, root: Path) -> None:
        self.root, self.path, self.binding = root, root / "bin", root / "python"
        for name in ("bin", "content", "kvs", "jobs", "python/flux/core"):
            (root / name).mkdir(parents=True)
        self.delay(0)
        command = self.path / "flux"
        command.write_text(_COMMAND.format(python=sys.executable, root=str(root)))
        command.chmod(0o755)
        for package in ("flux", "flux/core"):
            (self.binding / package / "__init__.py").write_text("")
        (self.binding / "flux/core/inner.py").write_text(_BINDING.format(root=str(root)))

    def store(self, data: bytes, algorithm: str = "sha1") -> str:
        """flux content store."""
        blobref = f"{algorithm}-{hashlib.new(algorithm, data).hexdigest()}"
        (self.root / "content" / blobref).write_bytes(data)
        return blobref

    def put(self, key: str, value: Any) -> None:
        """flux kvs put."""
        (self.root / "kvs" / key).write_text(json.dumps(value))

    def job(self, ident: str, jobspec: Any) -> None:
        """A job with that jobspec."""
        (self.root / "jobs" / ident).mkdir()
        (self.root / "jobs" / ident / "jobspec").write_text(json.dumps(jobspec))

    def delay(self, seconds: float) -> None:
        """From now on all answers take that long."""
        (self.root / "delay").write_text(str(seconds))

    def stop(self, said: str = UNREACHABLE) -> None:
        """The broker is gone, and this is what the command says."""
        (self.root / "stopped").write_text(said)

    def calls(self) -> list[str]:
        """Return the calls of the command, and the handles that the binding has opened and closed."""
        calls = self.root / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def environment(self, binding: bool = False) -> dict[str, str]:
        """os.environ, with the command and perhaps the binding."""
        found = os.environ | {"PATH": f"{self.path}:{os.environ['PATH']}"}
        return found | ({"PYTHONPATH": str(self.binding)} if binding else {})


def content_db(path: Path, blobs: Iterable[bytes], algorithm: str = "sha1", compressed: bool = True) -> None:
    """The content.sqlite of an instance with these blobs."""
    import lz4.block

    db = sqlite3.connect(path)
    db.execute("CREATE TABLE objects(hash CHAR(20) PRIMARY KEY, size INT, object BLOB, epoch INT)")
    for data in blobs:
        size, stored = -1, data
        if compressed and len(data) >= COMPRESSED_FROM:
            size, stored = len(data), lz4.block.compress(data, store_size=False)
        digest = hashlib.new(algorithm, data).digest()
        db.execute("INSERT OR IGNORE INTO objects VALUES (CAST(? AS TEXT), ?, ?, 0)", (digest, size, stored))
    db.commit()
    db.close()


def dump_tar(path: Path, archives: dict[str, tuple[Any, list[bytes]]], mode: str = "w") -> None:
    """Build the tar that flux dump writes of an instance with these archives, preserved: {name: (document, blobs)}."""
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(data), 0o644, 1_700_000_000
            tar.addfile(member, io.BytesIO(data))

        add("resource/eventlog", b"{}\n")
        for name, (document, blobs) in archives.items():
            place = "archive/" + name.replace(".", "/")
            for number, data in reversed(list(enumerate(blobs))):  # the KVS gives them in no order
                add(f"{place}_blobs/{number}", data)
            add(place, json.dumps(document).encode())
        link = tarfile.TarInfo("archive/link")
        link.type, link.linkname = tarfile.SYMTYPE, "main"
        tar.addfile(link)
