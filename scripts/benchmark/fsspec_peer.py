"""Load or mount a reference set with fsspec.

    fsspec_peer.py load DOCUMENT                load and list it; print the seconds (without imports) and the peak
                                                memory of the process (bytes)
    fsspec_peer.py gen DOCUMENT                 the same, and expand its gen
    fsspec_peer.py mount DOCUMENT MOUNTPOINT    mount it with fsspec.fuse, single-threaded, as fsspec recommends
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any


class Rooted:
    """A reference file system that accepts keys with a leading "/", as fsspec.fuse passes them."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def info(self, path: str) -> Any:
        return self.fs.info(path.strip("/"))

    def ls(self, path: str, detail: bool = True) -> Any:
        return self.fs.ls(path.strip("/"), detail)

    def open(self, path: str, mode: str = "rb") -> Any:
        return self.fs.open(path.strip("/"), mode)


def main() -> None:
    import fsspec
    import fsspec.implementations.reference

    what, document, *rest = sys.argv[1:]
    began = time.perf_counter()
    fs = fsspec.filesystem("reference", fo=document, simple_templates=what != "gen")
    if what in ("load", "gen"):
        fs.ls("", detail=False)
        took = time.perf_counter() - began
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": took, "memory": memory}))
    else:
        from fsspec.fuse import run

        run(Rooted(fs), "", rest[0], foreground=True, threads=False)


if __name__ == "__main__":
    main()
