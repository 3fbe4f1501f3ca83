"""A mount with FUSE handlers that raise: faulty_daemon.py MOUNTPOINT.

The file MOUNTPOINT.fault names a handler and the exception that it raises inside the wrapper under test; without that
file all handlers work. The file MOUNTPOINT.raised has what was raised last.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
import tempfile
from typing import Any

from zarrfs import errors
from zarrfs.config.options import Options
from zarrfs.daemon import serve
from zarrfs.documents.plan import Plan
from zarrfs.fuse import operations
from zarrfs.store.indexfile import IndexWriter


def main() -> None:
    mountpoint = sys.argv[1]

    def broken(name: str) -> Any:
        try:
            with open(mountpoint + ".fault") as file:
                fault = file.read()
        except FileNotFoundError:
            return
        handler, exception = fault.split()
        if handler != name:
            return
        with open(mountpoint + ".raised", "w") as file:
            file.write(fault)
        if exception == "ReadError":
            raise errors.ReadError("file:///data/x", "no luck")
        raise getattr(builtins, exception)(2, "injected")

    def patch(name: str) -> None:
        wrapper = getattr(operations.Operations, name)

        async def inner(*given: Any) -> Any:
            broken(name)
            return await wrapper.__wrapped__(*given)

        setattr(operations.Operations, name, operations.handler(functools.wraps(wrapper.__wrapped__)(inner)))

    for name in ("lookup", "getattr", "readlink", "opendir", "readdir", "releasedir", "open", "read", "release",
                 "statfs", "getxattr", "listxattr"):  # fmt: skip
        patch(name)
    forget = operations.InodeTable.forget
    operations.InodeTable.forget = lambda *given: broken("forget") or forget(*given)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "index")
        with IndexWriter(path) as writer:
            writer.inline("file", b"content")
            writer.inline("other", b"more")
            writer.symlink("link", "file")
            writer.commit()
        # with timeouts of 0 the kernel caches no entries or attributes: every call reaches its handler
        options = Options(attr_timeout=0)
        serve.serve(
            Plan("faulty", "references", index=path), mountpoint, options, [],
            lambda: print("ready", flush=True), [],
        )  # fmt: skip


if __name__ == "__main__":
    main()
