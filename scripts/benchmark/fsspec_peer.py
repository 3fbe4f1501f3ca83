"""fsspec on a reference set.

    fsspec_peer.py load DOCUMENT                load and list it; print the seconds that took, imports aside
    fsspec_peer.py mount DOCUMENT MOUNTPOINT    fsspec.fuse, single-threaded, which is what it recommends
"""

from __future__ import annotations

import sys
import time
from typing import Any


class Rooted:
    """A reference file system whose keys may begin with "/", as fsspec.fuse asks for them."""

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
    fs = fsspec.filesystem("reference", fo=document)
    if what == "load":
        fs.ls("", detail=False)
        print(time.perf_counter() - began)
    else:
        from fsspec.fuse import run

        run(Rooted(fs), "", rest[0], foreground=True, threads=False)


if __name__ == "__main__":
    main()
