"""Checksums of uploaded files."""

from __future__ import annotations

from zarrfs.jobs import upload


def test_md5_of_info() -> None:
    known = "900150983cd24fb0d6963f7d28e17f72"
    assert upload.md5_of_info({"ETag": f'"{known}"'}) == known
    assert upload.md5_of_info({"ETag": f'"{known}-2"'}) == ""
    assert upload.md5_of_info({"md5Hash": "kAFQmDzST7DWlj99KOF/cg=="}) == known
    assert upload.md5_of_info({"content_settings": {"content_md5": bytearray.fromhex(known)}}) == known
    assert upload.md5_of_info({"size": 1}) == ""
