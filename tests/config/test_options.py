"""The table of options: values, spellings, and the errors of bad values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarrfs.config.file import read_file
from zarrfs.config.keywords import as_items
from zarrfs.config.options import NO_FILE, TABLE, Options, bounds_of, parse, split_commas
from zarrfs.config.redaction import without_secrets
from zarrfs.config.values import natural, octal, seconds, size, user_id
from zarrfs.errors import UsageError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        *((size, text, value) for text, value in (
            ("0B", 0), ("512B", 512), ("1K", 1024), ("4KiB", 4096), ("4kB", 4000), ("64MiB", 64 << 20),
            ("1EiB", 1 << 60),
        )),
        *((seconds, text, value) for text, value in (
            ("0.5", 0.5), ("500ms", 0.5), ("30s", 30), ("5m", 300), ("1d", 86400), ("0", 0), ("10min", 600),
            ("90 s", 90), ("1h30min", 5400), ("1h 30min", 5400), ("2days 1hour", 176_400), ("1.5h", 5400),
            ("1 week", 604_800), ("5us", 5e-6),
        )),
        (octal, "0444", 0o444),
    ],
)  # fmt: skip
def test_sizes_times_and_permission_bits_are_parsed(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-12)


BAD = {
    size: ["", "64", "-1MiB", "1.5GiB", "MiB", "1XiB", "1 MiB", "1MiBs", "٣MiB", "9" * 5000 + "B"],
    seconds: ["", " ", "s", "-1", "1e3", "inf", "nan", "1h30", "1h,30m", "5M", "1y", "1.5.2s", "1..s", ".5", "5.",
              "٣s", "9" * 5000, "1h-5m", "5 s s"],
    octal: ["8", "0o444", "", "-1", "77777"],
}  # fmt: skip


@pytest.mark.parametrize("parse", BAD)
def test_bad_sizes_times_and_permission_bits_are_refused(parse: Callable[[str], float]) -> None:
    for text in BAD[parse]:
        with pytest.raises(ValueError, match="such as"):
            parse(text)


def test_spellings_of_options() -> None:
    """Flags may have a value, later options win, repeatable ones add up, only the first "=" separates."""
    for item, value in ("guard", True), ("guard=yes", True), ("guard=false", False):
        assert parse([item]).options.guard is value
    options = parse(["retries=1", "blobs=/a", "retries=2", "blobs=/b", "read-timeout=5s", "base=https://h/?a=b"]).options
    assert (options.retries, options.blobs, options.read_timeout) == (2, ("/a", "/b"), 5)
    assert options.base == "https://h/?a=b"
    assert parse(["metadata_ttl=forever"]).options.metadata_ttl == 10 * 365 * 86_400
    parsed = parse([])
    assert (parsed.options, parsed.kernel, parsed.writable) == (Options(), [], False)


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
def test_unescaped_commas_separate_options(text: str, parts: list[str]) -> None:
    assert split_commas(text) == parts


def test_storage_options_are_kept_by_protocol() -> None:
    options = parse(["s3.anon=true", "s3.endpoint_url=http://host:1", "http.timeout=5", "gs.requester_pays"]).options
    assert options.storage == {
        "s3": {"anon": True, "endpoint_url": "http://host:1"},
        "http": {"timeout": 5},
        "gcs": {"requester_pays": True},
    }


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("password=123456", "123456"), ("password=1e5", "1e5"), ("password=01", "01"), ("secret=NaN", "NaN"),
        ('secret="a"', '"a"'), ("region=2", "2"), ("port=2222", 2222), ("timeout=0.5", 0.5), ("port=x", "x"),
        ("anon=0", False), ("anon=1", True), ("anon=true", True), ("anon=no", False), ("requester_pays=False", False),
        ("x=false", False), ("x=null", None),
        ("x=[1]", [1]), ('x={"a": 1}', {"a": 1}), ("x={a", "{a"), ("x=", ""),
    ],
)  # fmt: skip
def test_values_of_storage_options_are_text_unless_they_are_meant_as_json(item: str, value: object) -> None:
    found = parse([f"sftp.{item}"]).options.storage["sftp"][item.partition("=")[0]]
    assert (found, type(found)) == (value, type(value))


def test_paths_in_storage_options_resolve_against_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths become absolute because a daemon has a different working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("key.json", "anon"):
        (tmp_path / name).write_text("{}")
    items = [
        "http.client_cert=a.pem", "https://h.client_key=~/b.pem", "sftp.known_hosts=hosts",
        'ssh.client_keys=["k","/l"]', "gcs.token=key.json", "gs://c.token=anon", "gs://b.token=raw.token", "sftp://h.known_hosts=",
        "ssh.known_hosts=null", "s3.token=key.json",
    ]  # fmt: skip
    assert parse(items).options.storage == {
        "http": {"client_cert": f"{tmp_path}/a.pem"}, "https://h": {"client_key": "/home/me/b.pem"},
        "sftp": {"known_hosts": f"{tmp_path}/hosts"},
        "ssh": {"client_keys": [f"{tmp_path}/k", "/l"], "known_hosts": None},
        "gcs": {"token": f"{tmp_path}/key.json"}, "gcs://c": {"token": "anon"}, "gcs://b": {"token": "raw.token"},
        "sftp://h": {"known_hosts": ""}, "s3": {"token": "key.json"},
    }  # fmt: skip


def test_options_of_a_host_or_bucket_are_kept_by_its_url() -> None:
    items = ["s3://my.bucket.anon=true", "http://[::1]:80.headers={}", "https://h.org:8443.ssl", "abfs://c@account.anon=1"]
    assert parse(items).options.storage == {
        "s3://my.bucket": {"anon": True},
        "http://[::1]:80": {"headers": {}},
        "https://h.org:8443": {"ssl": True},
        "abfs://c@account": {"anon": True},
    }
    for item in ("http://host/path.x=1", "s3://bucket=5", "http://127.0.0.1=5", "s3://bucket"):
        with pytest.raises(UsageError, match=r"expected PROTOCOL://HOST\.NAME=VALUE"):
            parse([item])


def test_values_of_allow_and_allow_path() -> None:
    options = parse(["allow=file", "allow=private,sftp", "allow_path=/usr/../usr/lib/.", "allow_path=x"]).options
    assert options.allow == ("file", "private", "sftp")
    assert options.allow_path == (os.path.realpath("/usr/lib"), os.path.realpath("x"))
    assert parse(split_commas("allow=file,private,ro")).options.allow == ("file", "private")
    assert parse(split_commas("allow=sftp,nofail,gs,all,ro,ftp")).options.allow == ("sftp", "gs", "all", "ftp")
    with pytest.raises(UsageError, match="unknown option 'gs'"):
        parse(split_commas("ro,gs"))
    for name in "allow_path", "blobs", "owner":
        with pytest.raises(UsageError, match=r"unknown option 'gard' \(did you mean guard\?\)"):
            parse(split_commas(f"{name}=1,gard"))
    assert parse(split_commas("members=a,X-mount.mkdir,b/c,nofail")).options.members == ("a", "b/c")
    with pytest.raises(UsageError, match=r"'private' \(did you mean allow=private\?\)"):
        parse(split_commas("ro,private"))
    with pytest.raises(UsageError, match="expected all, credentials, file, private, or a protocol"):
        parse(["allow=File"])


def test_options_of_mount_are_separated_from_ours() -> None:
    line = "rw,nosuid,noatime,_netdev,nofail,x-systemd.automount,X-mount.mkdir,comment=hi,user"
    parsed = parse(split_commas(line))
    assert parsed.kernel == ["nosuid", "noatime"]
    assert parsed.writable
    assert parsed.options == Options()


def test_an_unknown_option_suggests_the_closest() -> None:
    with pytest.raises(UsageError, match=r"unknown option 'memory_limits' \(did you mean memory_limit\?\)"):
        parse(["memory_limits=1GiB"])
    with pytest.raises(UsageError, match=r"unknown option 'zzz'$"):
        parse(["zzz"])


def test_every_protocol_that_fsspec_has_may_have_options() -> None:
    """This includes protocols of packages and of register_implementation()."""
    import fsspec

    protocols = {name for name in fsspec.available_protocols() if "_" not in name}
    protocols -= {"http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}  # their options are known
    fsspec.register_implementation("trial", "fsspec.implementations.memory.MemoryFileSystem", clobber=True)
    assert parse(["trial.x=1"]).options.storage == {"trial": {"x": "1"}}


@pytest.mark.parametrize(
    ("item", "rule"),
    [
        ("memory_limit=5", "64MiB"), ("memory_limit", "memory_limit=SIZE"), ("retries=-1", "0 to 1000"),
        ("read_timeout=0", "10ms to 30d"), ("type=zip", "zarr"), ("view=array", "did you mean arrays?"),
        ("allow=file,privat", "did you mean private?"), ("guard=maybe", "true or false"), ("guard=", "true or false"),
        ("base=", "a value"), ("owner=", "a whole number"), ("s4.anon=true", "did you mean s3?"),
        ("htpp://h.token=x", "did you mean http?"), ("s3.anon=never", "true or false"),
        ("s3.endpoint=x", "did you mean endpoint_url?"), ("az://c.acount_name=x", "did you mean account_name?"),
        ("xyzzy.a=1", "unknown protocol 'xyzzy'"), ("http.headers=x", "JSON"), ("s3a.config_kwargs=3", "JSON"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_what_is_expected(item: str, rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([item])
    assert str(caught.value).startswith(f"option {item.partition('=')[0]}")
    assert rule in str(caught.value)


PARSERS = (natural, seconds, size, user_id, octal)
NUMBERS = [name for name in TABLE if TABLE[name].kind.parse in PARSERS]
UNITS = {seconds: ["", "ms", "s", "min", "h", "d", "w"], size: ["B", "KiB", "MB", "GiB", "TiB", "PB", "EiB"]}


@given(data=st.data())
def test_a_number_is_within_its_bounds_or_an_error_that_names_them(data: st.DataObject) -> None:
    """Any text parses to a value within the bounds, or raises an error that names the option and the text."""
    name = data.draw(st.sampled_from(NUMBERS))
    parser = TABLE[name].kind.parse
    number = st.one_of(st.integers(-5, 5), st.integers(), st.floats(), st.integers(0, 2**70)).map(str)
    text = data.draw(st.one_of(number, st.text(max_size=8))) + data.draw(st.sampled_from(UNITS.get(parser, [""])))
    least, greatest = bounds_of(name) or (-20, 2**32 - 2)
    try:
        value = getattr(parse([f"{name}={text}"]).options, name)
    except UsageError as exc:
        said: str | None = str(exc)
    else:
        said = None
        [value] = value if isinstance(value, tuple) else [value]
        assert math.isfinite(value)
        assert least <= value <= greatest
    assert said is None or said.startswith(f"option {name}={without_secrets(text)}: expected ")


PATHS = [name for name in TABLE if TABLE[name].metavar in ("DIR", "FILE")]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("url", ["http://host/x", "s3://b", "file:///tmp/x", "FILE:x", "zip://a::b", "http:/x", "memory://"])
def test_a_url_is_refused_as_a_path(name: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rule = f"option {name}={url}: expected a path on this machine, not a URL"
    with pytest.raises(UsageError) as caught:
        parse([f"{name}={url}"])
    assert str(caught.value) == rule
    for path in ("x:y", "./http://host/x", "/a/b", "~"):
        assert getattr(parse([f"{name}={path}"]).options, name)
    if TABLE[name].where == NO_FILE:
        return
    file = tmp_path / "zarrfs.toml"
    file.write_text(f'[source.a]\nsource = "/"\n{name} = "{url}"\n')
    with pytest.raises(UsageError) as caught:
        read_file(str(file), owned=False)
    assert str(caught.value).endswith(rule)


# -- Python's keywords


@pytest.mark.parametrize(
    "given", [{"s3.key": "a", "s3.anon": True}, {"s3": {"key": "a", "anon": True}},
              {"storage_options": {"s3": {"key": "a", "anon": True}}},
              {"storage_options": {"s3": {"key": "a", "anon": False}}, "s3": {"anon": True}}],
)  # fmt: skip
def test_storage_options_of_python_are_as_those_of_the_command_line(given: dict[str, object]) -> None:
    assert parse(as_items(given)).options.storage == {"s3": {"anon": True, "key": "a"}}


@pytest.mark.parametrize("value", ["{", [1], 5, {"s3": 5}])
def test_bad_storage_options_of_python_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="storage_options: expected"):
        as_items({"storage_options": value})


def test_storage_options_of_python_are_text() -> None:
    given = {"sftp": {"n": 3, "password": "true", "x": True, "y": None, "port": "22"}, "s3": {"secret": "false"}}
    expected = {"sftp": {"n": "3", "password": "true", "x": True, "y": None, "port": 22}, "s3": {"secret": "false"}}
    assert parse(as_items(given)).options.storage == expected


@pytest.mark.parametrize("value", [True, False])
def test_unknown_flags_of_python_are_refused(value: bool) -> None:
    assert parse(as_items({"nosuid": value})).kernel == ["nosuid"] * value
    with pytest.raises(UsageError, match="unknown option 'foo'"):
        as_items({"foo": value})


def test_numbers_of_python_may_be_those_of_numpy() -> None:
    options = parse(as_items({"umask": np.int64(0o22), "memory_limit": np.int32(1 << 30), "retries": 3})).options
    assert (options.umask, options.memory_limit, options.retries) == (0o22, 1 << 30, 3)


@pytest.mark.parametrize("value", [True, False])
def test_only_a_flag_of_python_is_true_or_false(value: bool) -> None:
    assert parse(as_items({"guard": value})).options.guard is value
    for name in "cache_dir", "blobs", "umask":
        with pytest.raises(UsageError, match=f"option {name}: expected a value, not {str(value).lower()}"):
            as_items({name: value})
