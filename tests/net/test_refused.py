"""Protocols that are refused."""

from __future__ import annotations

import pytest
import trio

from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.store.remotefiles import RemoteFiles


def test_ftp_is_refused_with_what_to_use_instead() -> None:
    async def main() -> None:
        files = RemoteFiles(Options(allow=("ftp",)))
        try:
            await files.read("ftp://me:hush@127.0.0.1/x", 0, 1, 0, 1)
        finally:
            await files.aclose()

    with pytest.raises(ReadError, match=r"^ftp://127\.0\.0\.1/x: FTP is not supported: use HTTP or SFTP"):
        trio.run(main)
