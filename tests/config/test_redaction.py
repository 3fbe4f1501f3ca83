"""Redaction of URLs, options, command lines and messages of other programs."""

from __future__ import annotations

import time

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from zarrfs.cli.command_line import redacted_arguments
from zarrfs.config.options import Options
from zarrfs.config.redaction import (
    is_secret,
    redact_text,
    redacted_storage,
    split_chain,
    without_secrets,
    without_user,
)
from zarrfs.errors import ReadError
from zarrfs.store.remotefiles import RemoteFiles


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:hush@host/a", "https://host/a"),
        ("https://token@host/a", "https://host/a"),
        ("webdav://me:hush@host/a", "webdav://host/a"),
        ("redis://me:hush@host/a?b=c", "redis://host/a?b=c"),
        ("abfs://container@account.dfs/a", "abfs://container@account.dfs/a"),
        ("https://h/a?X-Amz-Signature=hush&b=1", "https://h/a"),
        ("https://h/a?sv=1&sig=hush", "https://h/a"),
        ("https://h/a#access_token=hush", "https://h/a"),
        ("https://h/a?jwt=hush", "https://h/a"),
        ("https://h/a?b=1#c", "https://h/a?b=1#c"),
        ("zip://a::https://me:hush@h/b.zip?token=hush", "zip://a::https://h/b.zip"),
        ("https://me:hush@[::1]:80/a", "https://[::1]:80/a"),
        ("https://me:hush@[h/a?sig=hush", "https://..."),
        ("https://h/a?next=https://me:hush@g/", "https://h/a?next=https://g/"),
        ("/a/b?c=d#e", "/a/b?c=d#e"),
        ("HTTPS://Host/a?b", "HTTPS://Host/a?b"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
    message = redact_text(f"cannot read <{url}>, sorry")
    assert message in (f"cannot read <{shown}>, sorry", f"cannot read <{url}>, sorry")


@given(st.text("ab:/@?#=&%[]. ", max_size=40))
def test_any_text_is_redacted_without_an_error(text: str) -> None:
    for url in text, f"https://{text}", f"https://me:hush@host/{text}", f"zip://{text}::https://me:hush@h/{text}":
        assert "hush" not in without_secrets(url)
        assert "hush" not in redact_text(url)


PIECES = (":", "@", "/", "=", "sig", "%", "?", "&", "://", "::", "[", "a", ":a", "a:@", "&sig", "?sig=", "://a:", "1.")


@pytest.mark.parametrize("start", ["", "http://", "http://h/?", "zip://a::http://h/?sig=", "GET /x?a=1&"])
def test_redaction_takes_linear_time(start: str) -> None:
    """Nested repetitions took 14 s for 64 kB, a second for 16."""
    began = time.process_time()
    for piece in PIECES:
        for end in ("", "@/x"):
            text = start + piece * (16384 // len(piece)) + end
            for function in (without_secrets, redact_text, without_user, split_chain):
                function(text)
    assert time.process_time() - began < 5


def test_messages_of_other_programs_are_redacted() -> None:
    assert redact_text("403, message='Forbidden', url='https://h/x?sig=hush'") == "403, message='Forbidden', url='https://h/x'"
    assert redact_text("GET /x?a=1&X-Amz-Signature=hush&b=2 failed") == "GET /x?a=1&X-Amz-Signature=***&b=2 failed"
    for name in ("jwt", "auth", "session", "sessionid", "pwd"):
        assert redact_text(f"GET /x?a=1&{name}=hush failed") == f"GET /x?a=1&{name}=*** failed"
    assert redact_text("GET /x?key=a/b failed") == "GET /x?key=a/b failed"
    assert redact_text("a=b, c?d") == "a=b, c?d"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("secret", "x", True), ("key", "x", True), ("token", "anon", False), ("token", "/a/b.json", False),
        ("anon", True, False), ("secret", "@/run/x", False), ("secret", "", False),
        ("endpoint_url", "http://h", False), ("endpoint_url", "http://a:b@h", True),
        ("headers", {"Authorization": "x"}, True), ("headers", {"A": "x"}, False),
        ("client_kwargs", {"a": [{"password": "x"}]}, True), ("connection_string", "x", True), ("secret", 5, False),
    ],
)  # fmt: skip
def test_which_options_are_secrets(name: str, value: object, secret: bool) -> None:
    assert is_secret(name, value) is secret


def test_only_harmless_storage_options_are_shown() -> None:
    assert redacted_storage("endpoint_url", "http://a:b@h/") == "http://h/"
    assert redacted_storage("anything", "x") == redacted_storage("headers", '{"A": "x"}') == "***"
    assert redacted_storage("password", "true") == "***"
    assert (redacted_storage("anon", "true"), redacted_storage("secret", "@/run/x")) == ("true", "@/run/x")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("zarrfs mount https://me:hush@h/x?sig=hush /mnt", "zarrfs mount https://h/x /mnt"),
        ("zarrfs ls a -o ro,s3.secret=hu,sh,retries=2", "zarrfs ls a -o ro,s3.secret=***"),
        ("zarrfs ls a -vos3.secret=hush", "zarrfs ls a -vos3.secret=***"),
        ("zarrfs ls a --option=s3.secret=hush", "zarrfs ls a --option=s3.secret=***"),
        ("zarrfs ls a -o s3://my.bucket.secret=hush", "zarrfs ls a -o s3://my.bucket.secret=***"),
        ("zarrfs ls a -o http.headers={hush,hush},s3.anon=1", "zarrfs ls a -o http.headers=***"),
        ("zarrfs ls a -o s3.secret-key=hush", "zarrfs ls a -o s3.secret-key=***"),
        ("zarrfs ls a --base https://me:hush@h/", "zarrfs ls a --base https://h/"),
        ("zarrfs ls a --base=https://me:hush@h/", "zarrfs ls a --base=https://h/"),
        ("zarrfs run a -- zarrfs ls b -os3.secret=hush", "zarrfs run a -- zarrfs ls b -os3.secret=***"),
        ("zarrfs mount -oro https://u:p@h.x/y?token=abc m", "zarrfs mount -oro https://h.x/y m"),
        ("mount.zarrfs a /mnt -o rw,user_id=0,s3.key=hush", "mount.zarrfs a /mnt -o rw,user_id=0,s3.key=***"),
        ("zarrfs ls dir/x.y z=1", "zarrfs ls dir/x.y z=1"),
    ],
)
def test_command_lines_are_redacted(line: str, shown: str) -> None:
    assert redacted_arguments(line.split(" ")) == shown.split(" ")


def test_a_blank_before_an_option_does_not_show_its_secret() -> None:
    assert redacted_arguments(["ro, s3.secret =hush, hush", "s3.secret:=hush"]) == [
        "ro, s3.secret =***", "s3.secret:=***",
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", ["s3", "gs", "abfs", "az"])
def test_a_password_in_a_bucket_url_is_refused_without_showing_it(protocol: str) -> None:
    async def main() -> None:
        files = RemoteFiles(Options(retries=0))
        try:
            await files.read(f"{protocol}://key:hush@bucket/x", 0, 1, 0, 1)
        finally:
            await files.aclose()

    with pytest.raises(ReadError, match=f"^{protocol}://bucket/x: user:password@ is for servers") as caught:
        trio.run(main)
    assert "hush" not in str(caught.value)
