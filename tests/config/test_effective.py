"""zarrfs.toml and environment variables: precedence, errors of bad values, and which files are read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from tests.conftest import run
from zarrfs.config import effective as configuration
from zarrfs.config.effective import settings
from zarrfs.config.keywords import as_items
from zarrfs.config.options import Options
from zarrfs.errors import UsageError

SOURCE = "s3://bucket/climate/era5.json"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the path of the system's zarrfs.toml, in this process."""
    path = tmp_path / "system.toml"
    monkeypatch.setattr(configuration, "SYSTEM", str(path))
    return path


@pytest.fixture
def user(tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the path of the user's zarrfs.toml, also in child processes; this process has no system file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "zarrfs/zarrfs.toml"
    path.parent.mkdir()
    return path


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def held(*items: str, source: str | None = None) -> Options:
    """Return the effective options."""
    return settings(items, [] if source is None else [source]).parsed.options


def refused(*items: str, source: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        settings(items, [] if source is None else [source])
    return str(caught.value)


# -- precedence

Values = dict[str, Any]
NAMES = ("retries", "host_requests", "log_level", "guard")
VALUES = {
    "retries": st.integers(0, 99), "host_requests": st.integers(1, 99), "guard": st.booleans(),
    "log_level": st.sampled_from(["debug", "info", "error"]),
}  # fmt: skip
SAID = st.fixed_dictionaries({}, optional=VALUES)
STORAGE = st.dictionaries(st.sampled_from(["key", "region", "profile"]), st.integers(0, 9), max_size=3)


def toml(values: dict[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layers")


@contextlib.contextmanager
def variables(values: dict[str, Any]) -> Iterator[None]:
    names = {f"ZARRFS_{name.upper()}": str(value) for name, value in values.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


@settings_of_hypothesis(max_examples=40)
@given(st.lists(st.tuples(SAID, STORAGE), min_size=4, max_size=4), SAID, SAID)
def test_the_stronger_place_wins_option_by_option(
    place: Path, layers: list[tuple[Values, dict[str, int]]], environment: Values, line: Values
) -> None:
    """Compare with a dict. `layers` are the sections of the two files, the weakest first."""
    files = []
    for number, name in enumerate(("system.toml", "named.toml")):
        (all_, all_storage), (near, near_storage) = layers[2 * number : 2 * number + 2]
        sections = [("[options]", toml(all_)), ("[storage.s3]", toml(all_storage))]
        sections.append(("[source.x]", f'source = "{SOURCE}"\n{toml(near)}'))
        sections.append(("[source.x.storage.s3]", toml(near_storage)))
        sections.append(("[source.y]", f'source = "{SOURCE}"\n{toml({"retries": 100})}'))
        files.append(write(place / name, "".join(f"{head}\n{text}" for head, text in sections)))
    expected: dict[str, Any] = {}
    storage: dict[str, str] = {}
    for said, of_storage in layers:
        expected |= said
        storage |= {name: str(value) for name, value in of_storage.items()}
    expected |= environment | line
    items = [f"{name}={str(value).lower()}" for name, value in line.items()] + [f"config={files[1]}"]
    with pytest.MonkeyPatch.context() as patch, variables(environment):
        patch.setattr(configuration, "SYSTEM", str(files[0]))
        found = held(*items, source="x")
    assert {name: getattr(found, name) for name in NAMES} == {
        name: expected.get(name, getattr(Options(), name)) for name in NAMES
    }
    assert found.storage.get("s3", {}) == storage


def test_lists_replace_those_of_weaker_places(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(user, '[options]\nblobs = ["/a", "/b"]\nmissing_status = [404, 403]\nallow = "file,private"\n')
    assert held().blobs == ("/a", "/b")
    assert held().missing_status == (404, 403)
    assert held().allow == ("file", "private")
    assert held("blobs=/c", "blobs=/d").blobs == ("/c", "/d")
    monkeypatch.setenv("ZARRFS_BLOBS", r"/x,/y\,z")
    assert held().blobs == ("/x", "/y,z")
    assert held("blobs=/c").blobs == ("/c",)
    monkeypatch.setenv("ZARRFS_BLOBS", "")
    assert held().blobs == ("/a", "/b")
    for line in "allow = []", "allow = []\nblobs = []":  # as docs/options.md promises: an empty list is a value
        write(user, f'[options]\nallow = "all"\nblobs = ["/a"]\n[source.a]\nsource = "/s"\n{line}\n')
        assert held(source="a").allow == ()
        assert held(source="a").blobs == (() if "blobs" in line else ("/a",))
    assert held(*as_items({"allow": [], "blobs": []})).blobs == held("allow=[]").allow == ()


def test_defaults_of_a_command_are_the_weakest(user: Path) -> None:
    assert settings([], log_level="warning").parsed.options.log_level == "warning"
    write(user, '[options]\nlog_level = "debug"\n')
    assert settings([], log_level="warning").parsed.options.log_level == "debug"


def test_an_explicit_rw_overrides_ro_of_a_file(user: Path) -> None:
    write(user, "[options]\nro = true\n")
    assert held("rw").ro is False
    assert held().ro is True


def test_names_of_one_protocol_share_their_options(user: Path) -> None:
    """The last origin wins, under whichever name."""
    write(user, '[storage.gs]\ntoken = "cloud"\n[storage.https]\ntoken = "a"\n[storage."s3a://b"]\nanon = true\n')
    found = settings(["gcs.token=anon", "http.token=b", "s3://b.anon=false", "https://h.token=c"])
    assert found.parsed.options.storage == {
        "gcs": {"token": "anon"}, "http": {"token": "b"}, "s3://b": {"anon": False}, "https://h": {"token": "c"},
    }  # fmt: skip
    assert not any("zarrfs.toml" in line for line in found.described)


# -- sources


def test_the_name_of_a_section_is_replaced_by_its_source(user: Path) -> None:
    text = f'[source.a]\nsource = "{SOURCE}"\nretries = 7\n'
    write(user, text + '[source.b]\nsource = "https://me:pw@host/x?sig=1"\nfsname = "c"\n')
    found = settings([], ["a", "b", "./a"])
    assert found.sources == [SOURCE, "https://me:pw@host/x?sig=1", "./a"]
    assert (found.parsed.options.retries, found.parsed.options.fsname) == (7, "a")
    assert held(source="b").fsname == "c"


@pytest.mark.parametrize(
    ("source", "found"),
    [("sets/a.json", "HERE/sets/a.json"), ("~/a.json", "HOME/a.json"), ("zip://a::b.zip", "zip://a::b.zip"),
     ("file:///a", "file:///a"), ("/a:b", "/a:b"), ("flux:", "flux:")],
)  # fmt: skip
def test_a_relative_source_or_base_resolves_beside_the_file(user: Path, source: str, found: str) -> None:
    write(user, f'[source.a]\nsource = "{source}"\n')
    expected = found.replace("HERE", str(user.parent)).replace("HOME", os.path.expanduser("~"))
    assert settings([], ["a"]).sources == [expected]
    write(user, f'[source.a]\nsource = "x"\nbase = "{source}"\n')
    assert held(source="a").base == expected


# -- values


def test_values_of_toml_are_read(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/joe")
    write(
        user, 'options = {guard = true, retries = 9, read-timeout = 2.5, umask = "0022", cache_size = "5GiB", '
        'cache_dir = "~/blocks", log_file = "log", blobs = ["blobs", "https://host/b"]}\n'
        '[storage.http]\nclient_cert = "a.pem"\nclient_key = "~/b.pem"\n',
    )  # fmt: skip
    found = held()
    assert (found.guard, found.retries, found.read_timeout, found.umask) == (True, 9, 2.5, 0o022)
    assert (found.cache_size, found.cache_dir) == (5 << 30, "/home/joe/blocks")
    assert found.log_file == f"{user.parent}/log"
    assert found.blobs == (f"{user.parent}/blobs", "https://host/b")
    assert found.storage["http"] == {"client_cert": f"{user.parent}/a.pem", "client_key": "/home/joe/b.pem"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[options]\ncach_dir = '/x'", "[options] unknown option 'cach_dir' (did you mean cache_dir?)"),
        ("[options]\ncache_size = '5'", "[options] option cache_size=5: expected a size with a unit"),
        ("[options]\nretries = 5.5", "[options] option retries=5.5: expected a whole number"),
        ("[options]\nretries = true", "[options] option retries: expected a value, not true"),
        ("[options]\numask = 20", "[options] option umask: expected text, in quotes"),
        ("[options]\nlog_level = ['info']", "[options] option log_level: expected one value"),
        ("[options]\nbase = 'x'", "[options] option base is for one source"),
        ("[options]\nconfig = 'x'", "[options] option config cannot be set in a file"),
        ("[source.x]\nsource = '/x'\nconfig = 'x'", "[source.x] option config cannot be set in a file"),
        ('[options]\ncache_dir = "~\\u0000x"', "[options] option cache_dir="),
        ('[source.x]\nsource = "/q\\u0000x"', "[source.x]: "),
        ("#" * (1 << 20) + "\n", "holds more than 1 MiB"),
        ("options = 1", "[options]: expected a section, not a value"),
        ("retries = 1", "retries: unknown section: set it below a line [options]"),
        ("[storages]", "storages: unknown section (did you mean storage?)"),
        ("[storage.'s3://b/c']\nx = 1", '[storage."s3://b/c"]: expected a protocol'),
        ("[storage.s3]\nregion = 2020-01-01", "[storage.s3] option s3.region: "),
        ("[source.x]\nsource = '/x'\n[source.x.storage.s3]\nendpoint = 'http://h'",
         "[source.x.storage.s3] option s3.endpoint: unknown (did you mean endpoint_url?)"),
        ("[storage.s4]\nanon = true", "[storage.s4] option s4.anon: unknown protocol 's4' (did you mean s3?)"),
        ("[storage.fsname]\nkey = 'secret'", "[storage.fsname] option fsname.key: unknown protocol 'fsname'"),
        ("[options]\ncache_dir = {key = 'secret'}", "[options] option cache_dir: expected text"),
        ("[source.x]\n", "[source.x]: expected a line source ="),
        ("[source.'/x']\nsource = '/y'", '[source."/x"]: '),
        ("[source.'https://u:secret@h/']\n", '[source."https://h/"]: '),
        ("[options\n", "not TOML: "),
        ("\xff", "not TOML: "),
        ("a = " + "[" * 9999, "not TOML: "),
    ],
)  # fmt: skip
def test_errors_in_files_name_the_place(user: Path, text: str, says: str) -> None:
    user.write_bytes(text.encode("latin-1"))
    said = refused(source="/x")
    assert said.startswith(f"{user}: {says}")
    assert "secret" not in said


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("CACHE_SIZE", "5", "option cache_size=5: expected a size with a unit"),
        ("GUARD", "maybe", "option guard=maybe: expected true or false"),
        ("CONFIG", "/nonexistent/x.toml", ""),
    ],
)
def test_bad_variables(user: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str) -> None:
    monkeypatch.setenv(f"ZARRFS_{variable}", value)
    said = refused()
    assert said.startswith(f"$ZARRFS_{variable}: {says}" if says else "/nonexistent/x.toml: no such file or directory")


# -- files


def test_a_named_file_replaces_the_users_file(
    user: Path, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(system, "[options]\nretries = 1\n")
    write(user, "[options]\nretries = 2\nhost_requests = 2\n")
    named = write(user.parent / "named.toml", "[options]\nretries = 3\n")
    assert (held().retries, held().host_requests) == (2, 2)
    assert (held(f"config={named}").retries, held(f"config={named}").host_requests) == (3, 32)
    monkeypatch.setenv("ZARRFS_CONFIG", str(named))
    assert held().retries == 3
    assert held("config=/dev/null").retries == 1
    assert refused("config=/nonexistent") == "/nonexistent: no such file or directory"
    assert refused(f"config={user.parent}") == f"{user.parent}: is a directory"


def test_missing_files_change_nothing(user: Path) -> None:
    assert held() == Options()


SECRETS = [
    '[storage.s3]\nsecret = "hush"\n', '[storage."s3://b"]\nkey = "hush"\n',
    '[storage.http.headers]\nAuthorization = "hush"\n',
    '[source.x]\nsource = "https://me:hush@host/"\n', '[source.x]\nsource = "https://host/?sig=hush"\n',
    '[source.x.storage.s3]\ntoken = "hush"\n[source.x]\nsource = "/"\n',
    '[storage.s3.client_kwargs]\naws_secret_access_key = "hush"\n',
    '[storage.http]\nproxy = "http://me:hush@host"\n', '[options]\nblobs = ["https://h/x", "https://me:hush@h/y"]\n',
]  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_in_a_world_readable_file_is_refused(user: Path, text: str) -> None:
    write(user, text, 0o644)
    said = refused()
    section = re.sub(r"[.](headers|client_kwargs)", "", text.splitlines()[0])
    assert said.startswith(f"{user}: {section} ")
    assert " is a secret, and all may read this file: chmod o-r" in said
    assert "hush" not in said
    write(user, text, 0o640)
    held()


def test_other_values_may_be_in_a_world_readable_file(user: Path) -> None:
    text = '[storage.s3]\nanon = true\nendpoint_url = "http://h"\nsecret = "@/run/s3"\n[storage.gcs]\ntoken = "anon"\n'
    write(user, text + '[source.x]\nsource = "https://host/?a=1"\n', 0o644)
    assert refused() == "option s3.secret: /run/s3: no such file or directory"


def test_files_of_others_are_not_read(user: Path, system: Path) -> None:
    write(user, "", 0o666)
    assert refused() == f"{user}: may be written by others: chmod go-w"
    write(user, "", 0o644)
    if os.geteuid() == 0:
        os.chown(user, 1234, -1)
        assert refused() == f"{user}: belongs to user 1234: without --config only root's and your own are read"
        assert held(f"config={user}") == Options(config=str(user))
        os.chown(user, 0, 1234)
        user.chmod(0o664)
        assert refused() == f"{user}: may be written by others: chmod go-w"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_an_unreadable_system_file_is_ignored() -> None:
    code = (
        "import os, sys, tomllib; from zarrfs.config import effective as c, file; c.SYSTEM = sys.argv[1];"
        "os.setuid(1234); os.environ['XDG_CONFIG_HOME'] = '/nonexistent';"
        "print(c.settings([]).parsed.options.retries)"
    )
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        path = write(Path(directory) / "system.toml", "[options]\nretries = 1\n")
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert done.stdout == "4\n", done.stderr


# -- secrets in files


def test_values_are_read_from_files(user: Path, tmp_path: Path) -> None:
    one = write(tmp_path / "one", "  geheim,\n")
    two = write(tmp_path / "two", '{"Authorization": "Bearer x"}')
    write(user, f'[storage.s3]\nsecret = "@{one}"\n[storage.http]\nheaders = {{X-Token = "@{one}", A = ["@{one}"]}}\n')
    found = held(f"https://h.headers=@{two}", f"s3.key=@{one}", "s3.token=@@/x", "s3.region=@y").storage
    assert found["s3"] == {"secret": "geheim,", "key": "geheim,", "token": "@/x", "region": "@y"}
    assert found["http"] == {"headers": {"X-Token": "geheim,", "A": ["geheim,"]}}
    assert found["https://h"] == {"headers": {"Authorization": "Bearer x"}}


@pytest.mark.parametrize(
    ("content", "rule"),
    [(None, "no such file or directory"), (b" \n", "holds nothing"), (b"\xffhush", "neither text nor JSON"),
     (b'{"hush', "neither text nor JSON"), (b"hush" * 300_000, "holds more than 1 MiB")],
)  # fmt: skip
def test_bad_files_of_secrets_are_refused(tmp_path: Path, content: bytes | None, rule: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    said = refused(f"s3.secret=@{path}")
    assert said == f"option s3.secret: {path}: {rule}"


def test_fifos_and_devices_are_refused_without_waiting(user: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for special in (pipe, "/dev/zero"):
        assert refused(f"s3.secret=@{special}") == f"option s3.secret: {special}: is not a regular file"
        assert refused(f"config={special}") == f"{special}: is not a regular file"
    os.mkfifo(user)
    assert refused() == f"{user}: is not a regular file"


def test_pipes_of_shells_are_read() -> None:
    line = 'sleep 0.2; echo "[options]"; echo "retries = 3"'
    code = f'exec "$0" -m zarrfs ls -d --config <({line}) -o s3.secret=@/dev/fd/3 . 3< <(echo geheim)'
    command = ["bash", "-c", code, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "option retries=3" in done.stderr
    assert "geheim" not in done.stderr


def test_json_values_are_checked_for_nul_and_depth(user: Path) -> None:
    write(user, '[storage.http]\nclient_cert = "~\\u0000x"\n')
    assert refused() == "option http.client_cert: has a NUL character"
    user.unlink()
    deep = "[" * 200 + "]" * 200
    assert refused(f"s3.key={deep}") == "option s3.key: nested too deeply"
    assert refused(r's3.key=["\u0000"]') == "option s3.key: has a NUL character"
    assert refused(f"s3.key={'[' * 100_000}") == "the value of a storage option is nested too deeply"


def test_a_secret_with_a_comma_is_not_shown_in_the_error() -> None:
    said = refused("s3.secret=hush", "hush2")
    assert said == r"option s3.secret: followed by an unknown option (write a comma in a value as \,)"
    assert "hush" not in refused("base=https://h/?sig=hush", "hush2")
    for rest in "hush.2", "hush.2=x", "hu-sh://x.y", "hush.h", "http.hush=x", "s3.hush":
        assert refused("s3.secret=hush", rest) == said, rest
    assert "did you mean guard" in refused("s3.anon=true", "guar")
    assert "hush" not in refused("s3://b/c.secret=hush")


def test_an_unknown_option_after_a_secret_is_named_where_no_comma_separates_them(user: Path) -> None:
    write(user, '[storage.http]\nauth = "a:hush"\nclient_kwargs = {x = "hush"}\n')
    assert "option http.client_kwargs: unknown: there are allow_redirects, " in refused()


# -- the program


def test_every_command_reads_the_file(user: Path, references: Path) -> None:
    document = next(references.glob("*.json"))
    write(user, f'[options]\nretries = 3\n[source.short]\nsource = "{document}"\n')
    assert run("ls", "short").stdout == run("ls", document).stdout != ""
    write(user, "[options]\nretrys = 1\n")
    for words in ["ls", document], ["mount", document, "/mnt"]:
        done = run(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"zarrfs: {user}: [options] unknown option 'retrys' (did you mean retries?)\n"
    assert run("ls", document, "-o", "config=/dev/null").returncode == 0
