"""Forms of the documents that commands write: JSON, compressed or not."""

from __future__ import annotations

import contextlib
import os
from typing import IO, Any, cast

STDOUT = "-"
FORMATS = ("json", "json.gz", "json.zst", "json.xz", "json.bz2")


def form_of_name(path: str) -> str | None:
    """Return the format of a JSON document that the ending of a name implies; None for an unknown ending."""
    return next((form for form in FORMATS if path.lower().endswith(f".{form}")), None)


def archive_form(path: str) -> str:
    """Return the format of a file archive called `path`: JSON, compressed if its name ends so (.gz, for example)."""
    form = f"json{os.path.splitext(path.lower())[1]}"
    return form if form in FORMATS else "json"


def compressor(raw: IO[bytes], form: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open a file that writes to `raw` in the compression of `form` ("json.zst"); closing it leaves `raw` open."""
    file: Any
    match form.partition(".")[2]:
        case "gz":
            import gzip

            # without name and time, so that equal sets give equal files
            file = gzip.GzipFile("", "wb", fileobj=raw, compresslevel=6, mtime=0)
        case "zst":
            import zstandard

            file = zstandard.ZstdCompressor().stream_writer(raw, closefd=False)
        case "xz":
            import lzma

            file = lzma.LZMAFile(raw, "wb")  # noqa: SIM115  (the caller's to close)
        case "bz2":
            import bz2

            file = bz2.BZ2File(raw, "wb")
        case _:
            return contextlib.nullcontext(raw)
    return cast(contextlib.AbstractContextManager[IO[bytes]], file)
