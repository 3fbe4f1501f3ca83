"""Uploads of stage-out: checksums, journals, connections, and failures."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
from fsspec import AbstractFileSystem

from tests.servers import S3, Sftp
from zarrfs.config.options import Options, parse
from zarrfs.copying.destination_directory import DestinationDirectory, Staged
from zarrfs.errors import SourceError, UsageError
from zarrfs.jobs import upload
from zarrfs.jobs.stageout import StageOutReport, Tree
from zarrfs.store.api import Info


def test_the_md5_of_an_object_is_found_in_its_info() -> None:
    known = "900150983cd24fb0d6963f7d28e17f72"
    assert upload.md5_of_info({"ETag": f'"{known}"'}) == known
    assert upload.md5_of_info({"ETag": f'"{known}-2"'}) == ""
    assert upload.md5_of_info({"md5Hash": "kAFQmDzST7DWlj99KOF/cg=="}) == known
    assert upload.md5_of_info({"content_settings": {"content_md5": bytearray.fromhex(known)}}) == known
    assert upload.md5_of_info({"size": 1}) == ""


class Bucket(AbstractFileSystem):
    """A file system of buckets in memory, at several endpoints."""

    protocol = "s3"
    cachable = False
    held: ClassVar[dict[tuple[str, str], bytes]] = {}

    def __init__(self, endpoint_url: str = "", **more: object) -> None:
        super().__init__(**more)
        self.endpoint = endpoint_url

    def put_file(self, lpath: str, rpath: str, **more: object) -> None:
        self.held[self.endpoint, rpath] = Path(lpath).read_bytes()

    def info(self, path: str, **more: object) -> dict[str, object]:
        if (self.endpoint, path) not in self.held:
            raise FileNotFoundError(path)
        return {"size": len(self.held[self.endpoint, path])}


def test_a_file_sent_to_one_endpoint_is_not_skipped_at_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other bucket has a file of the same name and size, but with other bytes."""
    (tmp_path / "a").write_text("new")
    monkeypatch.setattr(upload, "class_of", lambda protocol, family: Bucket)
    monkeypatch.setattr(Bucket, "held", {("http://two", "b/res/a"): b"old"})
    tree, skipped = Tree(str(tmp_path), str(tmp_path)), []
    for where in "one", "one", "two", "two":
        options, report = Options(storage={"s3": {"endpoint_url": f"http://{where}"}}), StageOutReport()
        upload.send(tree, upload.UploadOptions("s3://b/res"), options, report)
        skipped.append(report.skipped)
    assert skipped == [0, 1, 0, 1]
    assert Bucket.held == {("http://one", "b/res/a"): b"new", ("http://two", "b/res/a"): b"new"}


def test_files_are_sent_if_the_journal_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper directory may be on a disk that the job has filled."""

    class Full(upload._Journal):
        def __init__(self, path: str) -> None:
            super().__init__(path)
            self._file.close()
            self._file = open("/dev/full", "w")  # noqa: SIM115

    for name in "ab":
        (tmp_path / name).write_text("new")
    monkeypatch.setattr(upload, "class_of", lambda protocol, family: Bucket)
    monkeypatch.setattr(upload, "_Journal", Full)
    monkeypatch.setattr(Bucket, "held", {})
    report = StageOutReport()
    upload.send(Tree(str(tmp_path), str(tmp_path)), upload.UploadOptions("s3://b"), Options(retries=0), report)
    assert (report.files, report.failed, len(Bucket.held)) == (2, [], 2)


def test_one_connection_of_ftp_sends_one_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Connection(Bucket):
        protocol = "ftp"
        lock = threading.Lock()

        def put_file(self, lpath: str, rpath: str, **more: object) -> None:
            assert self.lock.acquire(blocking=False), "another thread is using it"
            time.sleep(0.01)
            super().put_file(lpath, rpath)
            self.lock.release()

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            pass

    for number in range(8):
        (tmp_path / str(number)).write_text("new")
    monkeypatch.setattr(upload, "class_of", lambda protocol, family: Connection)
    monkeypatch.setattr(Bucket, "held", {})
    report = StageOutReport()
    how = upload.UploadOptions("ftp://host/d", keep_going=True)
    upload.send(Tree(str(tmp_path), str(tmp_path)), how, Options(retries=0), report)
    assert (report.files, report.failed) == (8, [])


@pytest.mark.parametrize("encrypted", ["", "AES256", "aws:kms"])
def test_the_etag_of_an_object_encrypted_with_kms_is_no_md5(
    encrypted: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of any other object is its MD5, so different bytes are noticed."""
    (tmp_path / "a").write_text("new")
    monkeypatch.setattr(upload, "_md5_of", lambda path: "0" * 32)  # a wrong MD5 here, as the server never gives one
    given = {"s3_additional_kwargs": {"ServerSideEncryption": encrypted}} if encrypted else {}
    options, report = Options(storage={"s3": {**s3.options, **given}}, retries=0), StageOutReport()
    how = upload.UploadOptions(f"s3://{s3.bucket}/encrypted-{encrypted.replace(':', '-')}")
    if encrypted == "aws:kms":
        upload.send(Tree(str(tmp_path), str(tmp_path)), how, options, report)
        assert report.files == 1
    else:
        with pytest.raises(SourceError, match=r"has other bytes there than those that were sent \(MD5\)"):
            upload.send(Tree(str(tmp_path), str(tmp_path)), how, options, report)


def test_an_unknown_host_key_is_refused(sftp: Sftp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper/a").write_text("new")
    (tmp_path / "known").write_text(sftp.known_host)
    tree = Tree(str(tmp_path / "upper"), str(tmp_path / "upper"))

    def send(*given: str) -> None:
        options = parse(["sftp.username=somebody", "sftp.password=secret", *given]).options
        upload.send(tree, upload.UploadOptions(f"{sftp.url}/uploaded"), options, StageOutReport())

    sftp.passwords.clear()
    with pytest.raises(UsageError, match=f"^--to {sftp.url}: its host key is not in ~/.ssh/known_hosts or "):
        send()
    assert sftp.passwords == []
    send(f"sftp.known_hosts={tmp_path}/known")
    assert (sftp.root / "uploaded/a").read_text() == "new"


def test_a_file_that_vanishes_while_it_is_copied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keep_going, the others are copied."""
    (tmp_path / "upper").mkdir()
    for name in "abc":
        (tmp_path / "upper" / name).write_text(name)
    finish = DestinationDirectory.place

    def place(self: DestinationDirectory, staged: Staged, directory: int, info: Info, new: bool) -> None:
        finish(self, staged, directory, info, new)
        if info.name == "b":
            (tmp_path / "upper/b").unlink()

    monkeypatch.setattr(DestinationDirectory, "place", place)
    tree, report = Tree(str(tmp_path / "upper"), str(tmp_path / "upper")), StageOutReport()
    upload.send(tree, upload.UploadOptions(str(tmp_path / "to"), jobs=1, keep_going=True), Options(), report)
    assert report.failed == [{"key": "b", "reason": "has changed or was removed while it was copied"}]
    assert sorted(os.listdir(tmp_path / "to")) == ["a", "b", "c"]
