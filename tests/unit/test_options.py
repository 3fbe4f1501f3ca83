"""The table of options: values, spellings, and what a bad one says."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from zarrfs.errors import UsageError
from zarrfs.options import TABLE, Options, default_text, flag, octal, parse, seconds, size, split_commas


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0B", 0), ("512B", 512), ("1K", 1024), ("4KiB", 4096), ("4kB", 4000), ("64MiB", 64 << 20),
        ("1GB", 10**9), ("2G", 2 << 30), ("1TiB", 1 << 40),
    ],
)  # fmt: skip
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "64", "-1MiB", "1.5GiB", "MiB", "1XiB", "1 MiB", "1MiBs"])
def test_a_size_needs_a_unit(text: str) -> None:
    with pytest.raises(ValueError, match="64MiB"):
        size(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("0.5", 0.5), ("500ms", 0.5), ("30s", 30), ("5m", 300), ("1h", 3600), ("1d", 86400)],
)
def test_times(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "-1", "1w", "1e3", "inf", "nan"])
def test_bad_times(text: str) -> None:
    with pytest.raises(ValueError, match="30s"):
        seconds(text)


def test_permission_bits_are_octal() -> None:
    assert octal("0444") == 0o444
    for text in ("8", "0o444", "", "-1", "77777"):
        with pytest.raises(ValueError, match="octal"):
            octal(text)


@pytest.mark.parametrize(("item", "value"), [("strict", True), ("strict=yes", True), ("strict=false", False)])
def test_flags(item: str, value: bool) -> None:
    assert parse([item]).options.strict is value


def test_nothing_said_is_the_defaults() -> None:
    parsed = parse([])
    assert parsed.options == Options()
    assert (parsed.kernel, parsed.remount, parsed.writable) == ([], False, False)


def test_later_ones_win_and_repeatable_ones_add_up() -> None:
    options = parse(["retries=1", "blobs=/a", "retries=2", "blobs=/b"]).options
    assert options.retries == 2
    assert options.blobs == ("/a", "/b")


def test_dash_and_underscore_are_the_same() -> None:
    assert parse(["request-timeout=5s"]) == parse(["request_timeout=5s"])


def test_only_the_first_equals_sign_separates() -> None:
    assert parse(["base=https://host/?a=b"]).options.base == "https://host/?a=b"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b=c", ["a", "b=c"]),
        (r"a=x\,y,b", ["a=x,y", "b"]),
        (r"a=\\,b", ["a=\\", "b"]),
        (r"a=C:\dir", [r"a=C:\dir"]),
        ("a\\", ["a\\"]),
        (",a,,b,", ["a", "b"]),
        ("", []),
    ],
)
def test_commas(text: str, parts: list[str]) -> None:
    assert split_commas(text) == parts


def test_storage_options_are_kept_by_protocol() -> None:
    options = parse(["s3.anon=true", "s3.endpoint_url=http://host:1", "http.size=5", "gs.x"]).options
    assert options.storage == {
        "s3": {"anon": True, "endpoint_url": "http://host:1"},
        "http": {"size": 5},
        "gs": {"x": True},
    }


def test_options_of_a_host_or_bucket_are_kept_by_its_url() -> None:
    items = ["s3://my.bucket.anon=true", "http://[::1]:80.headers={}", "https://h.org:8443.x", "abfs://c@account.key=k"]
    assert parse(items).options.storage == {
        "s3://my.bucket": {"anon": True},
        "http://[::1]:80": {"headers": {}},
        "https://h.org:8443": {"x": True},
        "abfs://c@account": {"key": "k"},
    }
    for item in ("http://host/path.x=1", "s3://bucket=5", "http://127.0.0.1=5", "s3://bucket"):
        with pytest.raises(UsageError, match=r"expected PROTOCOL://HOST\.NAME=VALUE"):
            parse([item])


def test_what_sets_may_reach() -> None:
    options = parse(["allow=file", "allow=private,sftp", "allow_path=/usr/../usr/lib/.", "allow_path=x"]).options
    assert options.allow == ("file", "private", "sftp")
    assert options.allow_path == (os.path.realpath("/usr/lib"), os.path.realpath("x"))
    assert parse(split_commas("allow=file,private,ro")).options.allow == ("file", "private")
    with pytest.raises(UsageError, match=r"'private' \(did you mean allow=private\?\)"):
        parse(split_commas("ro,private"))
    with pytest.raises(UsageError, match="expected all, credentials, file, private, or a protocol"):
        parse(["allow=File"])


def test_options_survive_json() -> None:
    """As a child is told them."""
    options = parse(["s3://b.anon=true", "s3.key=a", "allow=file", "allow_path=/", "blobs=/x", "retries=7"]).options
    found = json.loads(json.dumps(dataclasses.asdict(options)))
    found |= {name: tuple(found[name]) for name, field in TABLE.items() if field.metadata["many"]}
    assert Options(**found) == options


def test_what_is_for_mount_itself() -> None:
    line = "rw,nosuid,noatime,_netdev,nofail,x-systemd.automount,X-mount.mkdir,comment=hi,user"
    parsed = parse(split_commas(line))
    assert parsed.kernel == ["nosuid", "noatime"]
    assert parsed.writable
    assert parsed.options == Options()
    assert parse(["remount", "user_id=0", "fd=3"]).remount


def test_an_unknown_option_suggests_the_closest() -> None:
    with pytest.raises(UsageError, match=r"unknown option 'memory_limits' \(did you mean memory_limit\?\)"):
        parse(["memory_limits=1GiB"])
    with pytest.raises(UsageError, match=r"unknown option 'zzz'$"):
        parse(["zzz"])
    assert parse(["zzz", "strict"], sloppy=True).options.strict


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ("memory_limit=5", "option memory_limit=5: expected a size with a unit, such as 64MiB"),
        ("memory_limit", "option memory_limit needs a value: memory_limit=SIZE"),
        ("retries=-1", "option retries=-1: expected a whole number"),
        ("type=zip", "option type=zip: expected one of references, archive, zarr"),
        ("strict=maybe", "option strict=maybe: expected nothing, true or false"),
        ("base=", "option base=: expected a value"),
    ],
)
def test_a_bad_value_is_named_with_what_is_expected(item: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([item])
    assert str(caught.value) == says


@pytest.mark.parametrize("name", TABLE)
def test_every_row_can_be_shown(name: str) -> None:
    about = TABLE[name].metadata
    assert about["scope"] in ("source", "fetch", "mount", "process")
    assert about["help"].endswith(".")
    assert (about["metavar"] == "") == (about["parse"] is flag)


@pytest.mark.parametrize("name", TABLE)
def test_a_default_is_shown_as_it_would_be_written(name: str) -> None:
    shown = default_text(name)
    if shown:
        assert getattr(parse([f"{name}={shown}"]).options, name) == TABLE[name].default
    else:
        assert TABLE[name].default in (None, (), True, False)


def test_defaults_have_round_units() -> None:
    assert default_text("read_ahead") == "1MiB"
    assert default_text("request_timeout") == "60s"
    assert default_text("on_exit") == "refuse"


# -- storage_options


def test_storage_options_are_those_of_a_protocol_or_of_a_bucket() -> None:
    found = parse(
        [
            'storage_options={"s3": {"anon": true, "key": "a"}, "s3://b.c": {"anon": false}}',
            "s3.key=b",
            'storage_options={"http": {"headers": {"A": "b"}}}',
        ]
    ).options
    assert found.storage == {
        "s3": {"anon": True, "key": "b"}, "s3://b.c": {"anon": False}, "http": {"headers": {"A": "b"}},
    }  # fmt: skip


@pytest.mark.parametrize("value", ["{", "[]", "5", '{"s3": 5}', '{"S 3": {}}', '{"s3": {"secret": "hidden"}', "null"])
def test_storage_options_that_are_none(value: str) -> None:
    with pytest.raises(UsageError, match="option storage_options: expected JSON such as") as caught:
        parse([f"storage_options={value}"])
    assert "hidden" not in str(caught.value)
