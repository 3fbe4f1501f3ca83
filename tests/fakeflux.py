"""A fake Flux instance: the recorded output and files of flux 0.88. The tests in tests/flux use a real instance.

FakeFlux has a `flux` command for PATH and a binding that `flux python` imports; both read a directory with the content
store and the KVS.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

UNREACHABLE = "ERROR: Unable to connect to Flux: broker socket /run/flux/local was not found"

_COMMAND = """#!{python}
import os, sys, time
root, words = {root!r}, sys.argv[1:]
def fail(text):
    sys.stderr.write(text + "\\n")
    sys.exit(1)
with open(os.path.join(root, "calls"), "a") as calls:
    calls.write(" ".join(words) + "\\n")
if words[0] == "python":
    os.environ["PYTHONPATH"] = os.path.join(root, "python")
    os.execv(sys.executable, [sys.executable, *words[1:]])
time.sleep(float(open(os.path.join(root, "delay")).read()))
if os.path.exists(os.path.join(root, "stopped")):
    fail("flux-" + words[0] + ": " + open(os.path.join(root, "stopped")).read())
def give(path, absent, end=b""):
    try:
        data = open(os.path.join(root, *path), "rb").read()
    except FileNotFoundError:
        fail(absent)
    sys.stdout.buffer.write(data + end)
if words[:2] == ["kvs", "get"]:
    namespace = os.environ.get("FLUX_KVS_NAMESPACE", "primary")
    where = "kvs" if namespace == "primary" else namespace
    give((where, words[2]), "flux-kvs: " + words[2] + ": No such file or directory", b"\\n")
elif words[:2] == ["job", "info"]:
    give(("jobs", words[2], words[3]), "flux-job: No such file or directory", b"\\n")
else:
    fail("flux: unknown command " + repr(words))
"""

# The functions of the cffi binding of libflux-core that the helper calls.
_BINDING = """
import errno, os, time
_root = {root!r}
def _stopped():
    return os.path.exists(os.path.join(_root, "stopped"))
def _failed(code, result=-1):
    ffi.errno = code
    return result
class _Ffi:
    NULL = None
    def new(self, kind):
        return [None]
    def typeof(self, function):
        return type("Type", (), {{"args": [None, None, "size_t *"]}})
    def buffer(self, data, size):
        return memoryview(data)[:size]
    def string(self, text):
        return text
class _Lib:
    FLUX_NODEID_ANY, FLUX_POLLERR = 2**32 - 1, 4
    def flux_open(self, uri, flags):
        with open(os.path.join(_root, "helpers"), "a") as helpers:
            helpers.write("%d\\n" % os.getpid())
        return _failed(errno.ENOENT, ffi.NULL) if _stopped() else "handle"
    def flux_rpc_raw(self, handle, topic, data, length, node, flags):
        assert (topic, length) == (b"content.load", len(data))
        return data
    def flux_rpc_get_raw(self, digest, data, size):
        while time.sleep(0.01) or float(open(os.path.join(_root, "delay")).read()):
            pass
        if _stopped():
            return _failed(errno.ECONNRESET)
        try:
            name = {{20: "sha1-", 32: "sha256-"}}[len(digest)] + digest.hex()
            data[0] = open(os.path.join(_root, "content", name), "rb").read()
        except FileNotFoundError:
            return _failed(errno.ENOENT)
        size[0] = len(data[0])
        return 0
    def flux_future_error_string(self, future):
        return os.strerror(ffi.errno).encode()
    def flux_pollevents(self, handle):
        return self.FLUX_POLLERR if _stopped() else 0
    def flux_future_destroy(self, future):
        pass
ffi, lib = _Ffi(), _Lib()
"""


class FakeFlux:
    """An instance in the directory `root`. `path` is for PATH."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "bin"
        for name in ("bin", "content", "kvs", "jobs", "python/_flux"):
            (root / name).mkdir(parents=True)
        self.delay(0)
        command = self.path / "flux"
        command.write_text(_COMMAND.format(python=sys.executable, root=str(root)))
        command.chmod(0o755)
        (root / "python/_flux/_core.py").write_text(_BINDING.format(root=str(root)))

    def store(self, data: bytes, algorithm: str = "sha1") -> str:
        """Store a blob as `flux content store` does; return its blobref."""
        blobref = f"{algorithm}-{hashlib.new(algorithm, data).hexdigest()}"
        (self.root / "content" / blobref).write_bytes(data)
        return blobref

    def put(self, key: str, value: Any) -> None:
        """Set a key as `flux kvs put` does."""
        (self.root / "kvs" / key).write_text(json.dumps(value))

    def job(self, ident: str, jobspec: Any) -> None:
        """Add a job with this jobspec."""
        (self.root / "jobs" / ident).mkdir()
        (self.root / "jobs" / ident / "jobspec").write_text(json.dumps(jobspec))

    def delay(self, seconds: float) -> None:
        """Delay all answers from now on by `seconds`."""
        (self.root / "delay").write_text(str(seconds))

    def stop(self, said: str = UNREACHABLE) -> None:
        """Stop the broker: from now on the command fails with the message `said`."""
        (self.root / "stopped").write_text(said)

    def calls(self) -> list[str]:
        """Return the arguments of each command so far, in order."""
        calls = self.root / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def helpers(self) -> list[int]:
        """Return the pids of the helpers that have connected so far, in order."""
        helpers = self.root / "helpers"
        return list(map(int, helpers.read_text().split())) if helpers.exists() else []

    def environment(self) -> dict[str, str]:
        """Return os.environ with the command's directory first in PATH."""
        return os.environ | {"PATH": f"{self.path}:{os.environ['PATH']}"}
