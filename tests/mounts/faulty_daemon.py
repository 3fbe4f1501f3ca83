"""A mount with one FUSE handler that raises: faulty_daemon.py MOUNTPOINT HANDLER.

The handler raises inside the wrapper under test. The file MOUNTPOINT.fault names the exception to raise; without that
file the handler works. The file MOUNTPOINT.raised names the exception that was raised last.
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
    mountpoint, name = sys.argv[1:]

    def broken() -> Any:
        try:
            with open(mountpoint + ".fault") as file:
                exception = file.read()
        except FileNotFoundError:
            return
        with open(mountpoint + ".raised", "w") as file:
            file.write(exception)
        if exception == "ReadError":
            raise errors.ReadError("file:///data/x", "no luck")
        raise getattr(builtins, exception)(2, "injected")

    if name == "forget":
        original = operations.InodeTable.forget
        operations.InodeTable.forget = lambda *given: broken() or original(*given)  # type: ignore[method-assign]
    else:
        wrapper = getattr(operations.Operations, name)

        async def inner(*given: Any) -> Any:
            broken()
            return await wrapper.__wrapped__(*given)

        setattr(operations.Operations, name, operations.handler(functools.wraps(wrapper.__wrapped__)(inner)))
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
