"""Zarr stores at a URL: `scripts/bench stores`. A store of 300 chunks at 30 ms latency is read, walked and copied.

It is on nginx over https, with directory listings, and on S3 (moto behind nginx). Each sample is a fresh mount that
has no data of an earlier one (`cache=none`). Requests are counted in nginx's log.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import peers
import remote_peers
from measures import Result
from remote import in_turns, result
from remote_data import LATE, Tree, make_certificate

MB = 1e6
SHAPE = (300, 361, 720)  # float32, one chunk per time step
SIZE = SHAPE[0] * SHAPE[1] * SHAPE[2] * 4
VALUES = SHAPE[0] + 2  # chunks and two documents
MILLION = 100  # number of arrays, of rows in each, and of chunks in each row
_MODULES = "/usr/lib/nginx/modules"  # where Debian has them
_CONFIG = """
load_module {modules}/ndk_http_module.so;
load_module {modules}/ngx_http_lua_module.so;
daemon off; worker_processes 1; {user}
pid {directory}/pid; error_log {directory}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log {directory}/access.log; sendfile on; keepalive_requests 1000000; client_max_body_size 0;
    client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
    upstream moto {{ server 127.0.0.1:{moto}; keepalive 64; }}
    server {{
        listen 127.0.0.1:{https} ssl; ssl_certificate {directory}/certificate; ssl_certificate_key {directory}/key;
        ssl_session_cache shared:S:1m; root {root}; autoindex on; access_by_lua_block {{ ngx.sleep({delay}) }}
    }}
    server {{
        listen 127.0.0.1:{s3}; access_by_lua_block {{ ngx.sleep({delay}) }}
        location / {{
            proxy_pass http://moto; proxy_http_version 1.1;
            proxy_set_header Connection ""; proxy_set_header Host $http_host;
        }}
    }}
}}
"""
_READ = """
import sys, time, zarr
where, how, endpoint = sys.argv[1:]
at_once = 10 if how == "dask" else int(how)
zarr.config.set({"async.concurrency": at_once})
store = where
if where.startswith("s3:"):
    from obstore.store import S3Store
    bucket, _, prefix = where.removeprefix("s3://").partition("/")
    made = S3Store(bucket, prefix=prefix, endpoint=endpoint, access_key_id="a", secret_access_key="b",
                   region="us-east-1", client_options={"allow_http": True})
    store = zarr.storage.ObjectStore(made, read_only=True)
begun = time.perf_counter()
array = zarr.open_group(store, mode="r", use_consolidated=False)["x"]
if how == "dask":
    import dask
    import dask.array
    from multiprocessing.pool import ThreadPool
    with dask.config.set(scheduler="threads", pool=ThreadPool(16)):
        dask.array.from_zarr(array).sum().compute()
else:
    array[:].sum()
print(time.perf_counter() - begun)
"""
# Reads all of a variable with xarray, through a mount (a path) or with fsspec in process (a reference set).
_XARRAY = """
import sys, time
where, how = sys.argv[1:]
import aiohttp, fsspec, fsspec.implementations.reference, numpy, xarray, zarr
zarr.config.set({"async.concurrency": 10 if how == "dask" else int(how)})
if how == "dask":
    import dask, dask.array
    from multiprocessing.pool import ThreadPool
    dask.config.set(scheduler="threads", pool=ThreadPool(16))
begun = time.perf_counter()
store = where
if where.endswith(".json"):
    fs = fsspec.filesystem("reference", fo=where, remote_protocol="https", asynchronous=True,
                           remote_options={"asynchronous": True})
    store = zarr.storage.FsspecStore(fs, read_only=True, path="")
variable = xarray.open_zarr(store, consolidated=False, chunks={} if how == "dask" else None)["x"]
if how == "dask":
    variable.data.sum().compute()
else:
    variable.values.sum()
print(time.perf_counter() - begun)
"""
WALKS = {"find": ["find", "."], "du -s": ["du", "-s", "."], "ls -lR": ["ls", "-lR", "."]}

NOTES = f"""\
One float32 array {SHAPE} in chunks of a time step, zstd, Zarr v3, from nginx that answers after {LATE} ms: over https,
and as S3 (moto behind it). Readers are new processes of zarr-python, with 10 and 64 chunks at a time, and of dask with
16 threads; MB/s are of decoded bytes. "fsspec" and "obstore" read in process. References are read by xarray.
"""


class Stores(Tree):
    """Servers of a store: https with directory listings, and S3."""

    def __init__(self, directory: Path, size: int) -> None:
        super().__init__(directory, size)
        import numpy as np
        import zarr

        group = zarr.open_group(str(self.www / "x.zarr"), mode="w", zarr_format=3)
        array = group.create_array(
            "x", shape=SHAPE, chunks=(1, *SHAPE[1:]), dtype="f4", dimension_names=("t", "y", "x_")
        )
        rng = np.random.default_rng(1)
        yy, xx = np.mgrid[0 : SHAPE[1], 0 : SHAPE[2]]
        for step in range(SHAPE[0]):
            field = 280 + 20 * np.sin(yy / 60 + step / 9) + 5 * np.cos(xx / 40) + rng.normal(0, 0.2, SHAPE[1:])
            array[step] = field.astype("f4").round(2)
        self.references = self.directory / "references.json"
        self.https = self.endpoint = ""
        self._moto: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start nginx and moto; raise peers.Unavailable if one does not start."""
        program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
        if program is None or not Path(f"{_MODULES}/ngx_http_lua_module.so").exists():
            raise peers.Unavailable("nginx with its Lua module is not installed")
        os.chmod(self.directory, 0o755)
        https, s3, moto = peers.free_ports(3)
        make_certificate(self.directory)
        config = self.directory / "nginx.conf"
        text = _CONFIG.format(
            modules=_MODULES, directory=self.directory, root=self.www, https=https, s3=s3, moto=moto,
            delay=LATE / 1000, user="user root;" if os.geteuid() == 0 else "",
        )  # fmt: skip
        config.write_text(text)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(moto)]
        self._moto = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._nginx = subprocess.Popen([program, "-c", config, "-e", self.directory / "early.log"])
        for port in (https, s3, moto):
            self._wait_for(port)
        self.https, self.endpoint = f"https://localhost:{https}", f"http://127.0.0.1:{s3}"
        self._upload()
        self._refer()

    def stop(self) -> None:
        """Stop nginx and moto."""
        super().stop()
        if self._moto is not None:
            self._moto.terminate()
            self._moto.wait()

    def requests(self) -> int:
        """Return the number of requests that nginx has answered so far."""
        return (self.directory / "access.log").read_bytes().count(b"\n")

    def places(self) -> dict[str, tuple[str, str]]:
        """Return (URL, -o options) of the store on each server."""
        s3 = f"s3.endpoint_url={self.endpoint},s3.key=a,s3.secret=b,cache=none"
        return {"https": (f"{self.https}/x.zarr", "cache=none"), "S3": ("s3://data/x.zarr", s3)}

    def _refer(self) -> None:
        """Write one file with all chunks of the store to the server, and a reference set of it."""
        refs: dict[str, object] = {}
        with (self.www / "all").open("wb") as out:
            for path in sorted((self.www / "x.zarr").rglob("*")):
                key = str(path.relative_to(self.www / "x.zarr"))
                if path.name == "zarr.json":
                    refs[key] = path.read_text()
                elif path.is_file():
                    refs[key] = [f"{self.https}/all", out.tell(), path.stat().st_size]
                    out.write(path.read_bytes())
        self.references.write_text(json.dumps({"version": 1, "refs": refs}))

    def _upload(self) -> None:
        import boto3

        client = boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1", aws_access_key_id="a",
            aws_secret_access_key="b",
        )  # fmt: skip
        client.create_bucket(Bucket="data")
        for path in sorted((self.www / "x.zarr").rglob("*")):
            if path.is_file():
                client.put_object(Bucket="data", Key=str(path.relative_to(self.www)), Body=path.read_bytes())


def _read(run: Stores, where: str, how: str) -> float:
    """Return the MB/s of a new process that reads the array."""
    remote_peers.settle()
    command = [sys.executable, "-c", _READ, where, how, run.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise peers.Unavailable((done.stderr.strip().splitlines() or ["the reader failed"])[-1])
    return SIZE / float(done.stdout) / MB


def measure_read(run: Stores, rounds: int) -> Iterator[Result]:
    """Measure reading all of the array, and the requests that this takes."""
    for server, (url, options) in run.places().items():
        peer, hows = ("fsspec", ("10", "64", "dask")) if server == "https" else ("obstore", ("10",))
        for how in hows:
            counts: list[float] = []

            def ours(how: str = how, url: str = url, options: str = options, counts: list[float] = counts) -> float:
                before = run.requests()
                with remote_peers.mounted(run, url, options) as place:
                    found = _read(run, place.prefix, how)
                counts.append((run.requests() - before) / VALUES)
                return found

            samples = in_turns(rounds, {"ours": ours, peer: lambda how=how, url=url: _read(run, url, how)})
            limit = 0.9 if server == "S3" else {"10": 1.1, "64": 0.9, "dask": 1.0}[how]
            what = "dask, 16 threads" if how == "dask" else f"{how} at a time"
            yield result(f"{server}, all chunks, {what}", "MB/s", samples["ours"], peer, samples[peer], limit)
            yield Result(f"{server}, requests a value", "", counts, limit=1.05, at_most=True)


def _read_by_xarray(run: Stores, where: str, how: str) -> float:
    """Return the MB/s of a new process that reads the variable."""
    remote_peers.settle()
    command = [sys.executable, "-c", _XARRAY, where, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise peers.Unavailable((done.stderr.strip().splitlines() or ["the reader failed"])[-1])
    return SIZE / float(done.stdout) / MB


def measure_references(run: Stores, rounds: int) -> Iterator[Result]:
    """Measure xarray on a reference set over https: through a mount, beside fsspec in process."""
    for how, limit in (("10", 1.2), ("64", 1.0), ("dask", 1.2)):
        used: list[float] = []

        def ours(how: str = how, used: list[float] = used) -> float:
            with remote_peers.mounted(run, run.references) as place:
                before = place.cpu()
                found = _read_by_xarray(run, place.prefix, how)
                used.append((place.cpu() - before) / SIZE * remote_peers.GB)
                return found

        def twice(how: str = how) -> float:
            with tempfile.TemporaryDirectory(prefix="blocks-", dir=run.directory) as cache:
                for _ in range(2):
                    with remote_peers.mounted(run, run.references, f"cache_dir={cache}") as place:
                        found = _read_by_xarray(run, place.prefix, how)
                return found

        def theirs(how: str = how) -> float:
            return _read_by_xarray(run, str(run.references), how)

        def local(how: str = how) -> float:
            return _read_by_xarray(run, str(run.www / "x.zarr"), how)

        samplers = {"ours": ours, "fsspec": theirs, "twice": twice, "local": local}
        samples = in_turns(rounds, samplers)
        what = "references, dask, 16 threads" if how == "dask" else f"references, {how} at a time"
        yield result(what, "MB/s", samples["ours"], "fsspec in process", samples["fsspec"], limit)
        what = f"{what}, second mount with cache_dir="
        yield result(what, "MB/s", samples["twice"], "fsspec in process", samples["fsspec"], 2.0)
        yield result(what, "MB/s", samples["twice"], "a directory of the disk", samples["local"])
        yield Result(f"{what.partition(', second')[0]}, daemon CPU", "s/GB", used)


def measure_walks(run: Stores, rounds: int) -> Iterator[Result]:
    """Measure find, du and ls over all names."""
    for server, (url, options) in run.places().items():

        def walk(command: list[str], url: str = url, options: str = options) -> float:
            with remote_peers.mounted(run, url, options) as place:
                begun = time.perf_counter()
                subprocess.run(command, cwd=place.prefix, stdout=subprocess.DEVNULL, timeout=300, check=True)
                return time.perf_counter() - begun

        samples = in_turns(rounds, {name: lambda command=command: walk(command) for name, command in WALKS.items()})
        for name in WALKS:
            yield Result(f"{server}, {name}", "s", samples[name], limit=1.0 if server == "S3" else 3.0, at_most=True)


def measure_copy(run: Stores, rounds: int) -> Iterator[Result]:
    """Measure `cp -r` of a mount of the store on S3, `stage --copy` and `check` of it, beside `rclone copy`."""
    url, options = run.places()["S3"]
    counts: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[str], list[str | Path]]) -> float:
        place, before = tempfile.mkdtemp(dir=run.directory), run.requests()
        try:
            begun = time.perf_counter()
            subprocess.run(action(f"{place}/copy"), stdout=subprocess.DEVNULL, timeout=300, check=True)
            return time.perf_counter() - begun
        finally:
            shutil.rmtree(place)
            counts.setdefault(name, []).append((run.requests() - before) / VALUES)

    def copied() -> float:
        with remote_peers.mounted(run, url, options) as mount:
            return timed("cp -r", lambda place: ["cp", "-r", mount.prefix, place])

    def cloned(place: str) -> list[str | Path]:
        if shutil.which("rclone") is None:
            raise peers.Unavailable("rclone is not installed")
        remote = f":s3,provider=Other,endpoint='{run.endpoint}',access_key_id=a,secret_access_key=b:data/x.zarr"
        return ["env", "-u", "AWS_CA_BUNDLE", "rclone", "copy", "-q", remote, place]

    commands = {"stage --copy": lambda place: [peers.ZARRFS, "stage", "--copy", url, place, "-o", options],
                "check": lambda place: [peers.ZARRFS, "check", url, "-o", options], "rclone copy": cloned}  # fmt: skip
    samplers = {name: lambda name=name, action=action: timed(name, action) for name, action in commands.items()}
    samples = in_turns(rounds, {"cp -r": copied, **samplers})
    for name in ("cp -r", "stage --copy", "check"):
        found = result(f"S3, {name}", "s", samples[name], "rclone copy", samples["rclone copy"], 1.2)
        found.at_most = True
        yield found
        yield Result(f"S3, {name}, requests a value", "", counts.get(name, []), limit=1.05, at_most=True)


def measure_million(run: Stores, rounds: int) -> Iterator[Result]:
    """Measure `find` over a bucket of a million keys at 30 ms per page, beside one page after the other."""
    server = subprocess.Popen(
        [sys.executable, "-c", _MILLION.format(root=str(peers.HERE.parent.parent), count=MILLION, delay=LATE / 1000)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        memory: list[float] = []

        def found() -> float:
            options = f"s3.endpoint_url={endpoint},s3.key=a,s3.secret=b,cache=none,type=zarr"
            with remote_peers.mounted(run, "s3://b/x", options) as place:
                begun = time.perf_counter()
                done = subprocess.run(["find", "."], cwd=place.prefix, stdout=subprocess.PIPE, timeout=600, check=True)
                took = time.perf_counter() - begun
                lines = done.stdout.count(b"\n")
                if lines != 1 + MILLION * 2 + MILLION**2 + MILLION**3:
                    raise peers.Unavailable(f"{lines} names")
                status = Path(f"/proc/{place.pid}/status").read_text()
                memory.append(int(status.split("VmHWM:")[1].split()[0]) / 1000)
                return took

        samples = in_turns(rounds, {"find": found, "pages": lambda: _pages(endpoint)})
        yield result("S3, find of 10^6 keys, speed-up", "1/s", [1 / one for one in samples["find"]],
                     "one page after the other", [1 / one for one in samples["pages"]], 6.0)  # fmt: skip
        yield Result("memory of the daemon", "MB", memory, limit=150, at_most=True)
    finally:
        server.terminate()
        server.wait()


_MILLION = """
import sys, time
sys.path.insert(0, {root!r})
from tests.mounts.test_big_bucket import Bucket
bucket, numbers = Bucket(), range({count})
bucket.keys = sorted(f"x/a{{array:02}}/c/{{row}}/{{at}}" for array in numbers for row in numbers for at in numbers)
bucket.delay = {delay}
print(bucket.endpoint, flush=True)
time.sleep(100_000)
"""


def _pages(endpoint: str) -> float:
    """Request one page after the other; return the seconds."""
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
    begun, after, keys = time.perf_counter(), "", 0
    while True:
        connection.request("GET", f"/b?list-type=2&prefix=x/&start-after={after}")
        body = connection.getresponse().read()
        keys += body.count(b"<Key>")
        if b"<IsTruncated>true" not in body:
            break
        after = body.rpartition(b"<Key>")[2].partition(b"<")[0].decode()
    if keys != MILLION**3:
        raise peers.Unavailable(f"{keys} keys")
    return time.perf_counter() - begun


MEASURES = {
    "read": measure_read,
    "references": measure_references,
    "walks": measure_walks,
    "copy": measure_copy,
    "million": measure_million,
}
