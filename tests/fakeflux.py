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

# The part of the cffi binding of libflux-core that the helper uses: errno, messages, a descriptor to poll.
_BINDING = """
import errno, os, threading, time
_root = {root!r}
def _said(text):
    with open(os.path.join(_root, "calls"), "a") as calls:
        calls.write(text + "\\n")
def _stopped():
    return os.path.exists(os.path.join(_root, "stopped"))
class _Ffi:
    NULL = None
    errno = 0
    def new(self, kind):
        return _Match() if kind == "struct flux_match *" else [None]
    def typeof(self, function):
        return type("Type", (), {{"args": [None, None, None, "size_t *"]}})
    def buffer(self, data, size):
        return memoryview(data)[:size]
class _Match:
    def __getitem__(self, at):
        return self
def _failed(code, result=-1):
    ffi.errno = code
    return result
class _Handle:
    def __init__(self):
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.sent = []
class _Message:
    def __init__(self, digest):
        self.digest = digest
class _Lib:
    FLUX_MSGTYPE_RESPONSE, FLUX_O_NONBLOCK, FLUX_POLLERR = 2, 4, 4
    def flux_open(self, uri, flags):
        if _stopped():
            return _failed(errno.ENOENT, ffi.NULL)
        _said("open %d" % os.getpid())
        return _Handle()
    def flux_pollfd(self, handle):
        return handle.event
    def flux_pollevents(self, handle):
        try:
            os.eventfd_read(handle.event)
        except BlockingIOError:
            pass
        return self.FLUX_POLLERR if _stopped() else 0
    def flux_request_encode_raw(self, topic, data, length):
        assert (topic, length) == (b"content.load", len(data))
        return _Message(data)
    def flux_msg_set_matchtag(self, message, tag):
        message.tag = tag
        return 0
    def flux_msg_get_matchtag(self, message, tag):
        tag[0] = message.tag
        return 0
    def flux_send(self, handle, message, flags):
        delay = float(open(os.path.join(_root, "delay")).read())
        message.due = time.monotonic() + delay
        handle.sent.append(message)
        timer = threading.Timer(delay, os.eventfd_write, (handle.event, 1))
        timer.daemon = True
        timer.start()
        return 0
    def flux_recv(self, handle, match, flags):
        for message in handle.sent:
            if message.due <= time.monotonic():
                handle.sent.remove(message)
                return message
        return _failed(errno.EAGAIN, ffi.NULL)
    def flux_response_decode_raw(self, message, topic, data, size):
        name = {{20: "sha1-", 32: "sha256-"}}[len(message.digest)] + message.digest.hex()
        _said("load " + name)
        try:
            data[0] = open(os.path.join(_root, "content", name), "rb").read()
        except FileNotFoundError:
            return _failed(errno.ENOENT)
        size[0] = len(data[0])
        return 0
    def flux_msg_decref(self, message):
        pass
ffi, lib = _Ffi(), _Lib()
"""


class FakeFlux:
    """An instance in the directory `root`. `path` is for PATH; `flux python` imports its binding from `binding`."""

    def __init__(self, root: Path) -> None:
        self.root, self.path, self.binding = root, root / "bin", root / "python"
        for name in ("bin", "content", "kvs", "jobs", "python/_flux"):
            (root / name).mkdir(parents=True)
        self.delay(0)
        command = self.path / "flux"
        command.write_text(_COMMAND.format(python=sys.executable, root=str(root)))
        command.chmod(0o755)
        (self.binding / "_flux/__init__.py").write_text("")
        (self.binding / "_flux/_core.py").write_text(_BINDING.format(root=str(root)))

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
        """Return the command lines, the connections ("open PID") and the blobs loaded ("load BLOBREF"), in order."""
        calls = self.root / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def environment(self) -> dict[str, str]:
        """Return os.environ with the command's directory first in PATH."""
        return os.environ | {"PATH": f"{self.path}:{os.environ['PATH']}"}
