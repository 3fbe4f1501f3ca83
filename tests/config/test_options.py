"""The table of options: values, spellings, and the errors of bad values."""

from __future__ import annotations

import math
import os
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
    ("text", "value"),
    [
        ("0B", 0), ("512B", 512), ("1K", 1024), ("4KiB", 4096), ("4kB", 4000), ("64MiB", 64 << 20),
        ("1GB", 10**9), ("2G", 2 << 30), ("1TiB", 1 << 40), ("1PB", 10**15), ("1EiB", 1 << 60),
    ],
)  # fmt: skip
def test_sizes_with_units_are_parsed(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize(
    "text", ["", "64", "-1MiB", "1.5GiB", "MiB", "1XiB", "1 MiB", "1MiBs", "٣MiB", "9" * 5000 + "B"]
)
def test_a_size_needs_a_unit(text: str) -> None:
    with pytest.raises(ValueError, match="64MiB"):
        size(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("0.5", 0.5), ("500ms", 0.5), ("30s", 30), ("5m", 300), ("1h", 3600), ("1d", 86400), ("0", 0),
        ("10min", 600), ("90 s", 90), ("90sec", 90), ("1h30m", 5400), ("1h30min", 5400),
        ("1h 30min", 5400), ("2 d", 172_800), ("1hr", 3600), ("2days 1hour", 176_400), ("1.5h", 5400),
        ("1s500ms", 1.5), ("1 week", 604_800), (" 5 ", 5), ("250msec", 0.25), ("5us", 5e-6),
    ],
)  # fmt: skip
def test_times_with_and_without_units_are_parsed(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["", " ", "s", "-1", "1e3", "inf", "nan", "1h30", "1h,30m", "5M", "1y", "1 2s", "1.5.2s", "1..s", ".5", "5.", "٣s",
     "infinity", "9" * 5000, "1h-5m", "5 s s"],
)  # fmt: skip
def test_bad_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="30s"):
        seconds(text)


def test_permission_bits_are_octal() -> None:
    assert octal("0444") == 0o444
    for text in ("8", "0o444", "", "-1", "77777"):
        with pytest.raises(ValueError, match="octal"):
            octal(text)


@pytest.mark.parametrize(("item", "value"), [("guard", True), ("guard=yes", True), ("guard=false", False)])
def test_flags_may_have_a_value(item: str, value: bool) -> None:
    assert parse([item]).options.guard is value


def test_without_options_the_defaults_apply() -> None:
    parsed = parse([])
    assert parsed.options == Options()
    assert (parsed.kernel, parsed.writable) == ([], False)


def test_later_options_win_and_repeatable_options_add_up() -> None:
    options = parse(["retries=1", "blobs=/a", "retries=2", "blobs=/b"]).options
    assert options.retries == 2
    assert options.blobs == ("/a", "/b")


def test_dash_and_underscore_are_the_same() -> None:
    assert parse(["read-timeout=5s"]) == parse(["read_timeout=5s"])


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
    assert parse(["zzz", "guard"], sloppy=True).options.guard


def test_every_protocol_that_fsspec_has_may_have_options() -> None:
    """This includes protocols of packages and of register_implementation(); sloppy ignores others, as in mount(8)."""
    import fsspec

    protocols = {name for name in fsspec.available_protocols() if "_" not in name}
    protocols -= {"http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}  # their options are known
    fsspec.register_implementation("trial", "fsspec.implementations.memory.MemoryFileSystem", clobber=True)
    assert parse(["trial.x=1"]).options.storage == {"trial": {"x": "1"}}
    assert parse(["s4.anon=true", "guard"], sloppy=True).options == Options(guard=True)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ("memory_limit=5", "option memory_limit=5: expected a size with a unit, such as 64MiB"),
        ("memory_limit", "option memory_limit needs a value: memory_limit=SIZE"),
        ("retries=-1", "option retries=-1: expected a whole number from 0 to 1000"),
        ("retries=1000000000", "option retries=1000000000: expected a whole number from 0 to 1000"),
        ("read_timeout=0", "option read_timeout=0: expected a time from 10ms to 30d"),
        ("memory_limit=1EiB", "option memory_limit=1EiB: expected a size from 64KiB to 64TiB"),
        ("host_requests=0", "option host_requests=0: expected a whole number from 1 to 10000"),
        ("cache_size=0B", "option cache_size=0B: expected a size from 1MiB to 1EiB"),
        ("type=zip", "option type=zip: expected one of references, archive, zarr, icechunk"),
        ("view=array", "option view=array: expected one of v2, v3, arrays, netcdf (did you mean arrays?)"),
        ("allow=file,privat", "option allow=file,privat: expected all, credentials, file, private, or a protocol"
         " (did you mean private?)"),
        ("guard=maybe", "option guard=maybe: expected true or false"),
        ("guard=", "option guard=: expected true or false"),
        ("base=", "option base=: expected a value"), ("blobs=", "option blobs=: expected a value"),
        ("owner=", "option owner=: expected a whole number from 1 to 4194304"),
        ("s4.anon=true", "option s4.anon: unknown protocol 's4' (did you mean s3?)"),
        ("htpp://h.token=x", "option htpp://h.token: unknown protocol 'htpp' (did you mean http?)"),
        ("s3.anon=never", "option s3.anon: expected true or false"),
        ("s3.endpoint=x", "option s3.endpoint: unknown (did you mean endpoint_url?)"),
        ("az://c.acount_name=x", "option az://c.acount_name: unknown (did you mean account_name?)"),
        ("https.hedaers={}", "option https.hedaers: unknown (did you mean headers?)"),
        ("xyzzy.a=1", "option xyzzy.a: unknown protocol 'xyzzy': neither fsspec nor an installed package has it"),
        ("http.headers=x", 'option http.headers: expected names and values in JSON: {"NAME": "VALUE"}'),
        ("s3a.config_kwargs=3", 'option s3a.config_kwargs: expected names and values in JSON: {"NAME": "VALUE"}'),
        ('https.client_kwargs={"headers": "x"}',
         'option https.client_kwargs: headers: expected names and values in JSON: {"NAME": "VALUE"}'),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_what_is_expected(item: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([item])
    assert str(caught.value) == says


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


def test_storage_options_of_python_keep_their_types() -> None:
    given = {"sftp": {"n": 3, "password": "true", "x": "3", "y": None, "port": "22"}, "s3": {"secret": "null"}}
    expected = {"sftp": {"n": 3, "password": "true", "x": "3", "y": None, "port": 22}, "s3": {"secret": "null"}}
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
