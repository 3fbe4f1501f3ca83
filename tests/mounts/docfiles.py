"""A program that writes the files used by the commands of the documentation; it runs inside a DocWorld.

All files are small. Every name that a page uses exists: in the working directory, in /data, in buckets, on an HTTP
server, or in a Flux instance.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from tests.fakeflux import FakeFlux, dump_tar
from zarrfs.cli import main as zarrfs

HOME = Path("/home/joe")
CASE = HOME / "case"  # the working directory
WEB = Path("/run/www")  # the document root of https://host and https://example.org
FLUX = Path("/run/flux")
S3_PORT = 5000
CHUNK = 8192  # bytes
CHUNKS = {"air/0.0.0": bytes(range(256)) * 32, "air/1.0.0": bytes(range(255, -1, -1)) * 32}
METADATA: dict[str, Any] = {
    ".zgroup": {"zarr_format": 2},
    "air/.zarray": {"zarr_format": 2, "shape": [2, 32, 32], "chunks": [1, 32, 32], "dtype": "<u8", "compressor": None,
                    "filters": None, "fill_value": 0, "order": "C"},
    "air/.zattrs": {"_ARRAY_DIMENSIONS": ["t", "y", "x"]},
}  # fmt: skip
# zarrfs commands that make further files, in this order; each runs in this process
MADE = """
archive create -C /data -O job.json --blobs /srv/blobs input config.toml
archive create -C /data -O inline.json --inline input config.toml
archive create -C /data -O old.json --blobs /srv/blobs input
archive create -C tree -O archive.json --inline .
archive create -C /data -O job.tar input config.toml
archive extract inline.json -C /scratch/job
refs convert combined.json combined.parq
refs convert b.json b.parq
refs convert air.json air.parq
refs convert moving.json set.parq
refs convert remote.json /run/www/combined.parq
index refs.json -O refs.index
"""
# A shell script for the files that need other programs or a mount
COPIED = """
set -e
cp job.json new.json
cp job.json /data/job.json
cp inline.json /run/www/job.json
cp job.tar /run/www/job.tar
zarrfs mount refs.json mnt -o upperdir=changes
echo '{}' >mnt/.zattrs
cp mnt/air/0.0.0 mnt/air/1.0.0
zarrfs umount mnt
"""


def write(path: Path, content: str | bytes | dict[str, Any]) -> None:
    """Write a file, and make its parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else (
        content if isinstance(content, str) else json.dumps(content)).encode())  # fmt: skip


def store(put: Callable[[str, bytes], object]) -> None:
    """Write a Zarr store of format 2."""
    for name, document in METADATA.items():
        put(name, json.dumps(document).encode())
    for name, value in CHUNKS.items():
        put(name, value)


def references(first: str, second: str | None = None) -> dict[str, Any]:
    """Return a reference set of version 1 whose two chunks are in `first` and `second`, or both in `first`."""
    refs: dict[str, Any] = {name: json.dumps(document) for name, document in METADATA.items()}
    refs |= {"air/0.0.0": [first, 0, CHUNK], "air/1.0.0": [second or first, CHUNK, CHUNK]}
    return {"version": 1, "refs": refs}


def templated() -> dict[str, Any]:
    """Return the same reference set, with a template and generated references."""
    made = references("")
    made["refs"] = {name: value for name, value in made["refs"].items() if name not in CHUNKS}
    gen = {"key": "air/{{i}}.0.0", "url": "{{u}}", "offset": f"{{{{i * {CHUNK}}}}}", "length": str(CHUNK)}
    return made | {"templates": {"u": "/data/air.bin"}, "gen": [gen | {"dimensions": {"i": {"stop": 2}}}]}


def local() -> None:
    """Write the local files and directories."""
    both = b"".join(CHUNKS.values())
    for name in ("air.bin", "fixed.bin"):
        write(Path("/data") / name, both)
    for name in ("combined", "refs", "a", "b", "base", "air"):
        write(CASE / f"{name}.json", references("/data/air.bin"))
    write(CASE / "set.json", references("/data/air.bin", "s3://mine/air.bin"))
    write(CASE / "remote.json", references("https://host/air.bin"))
    write(CASE / "moving.json", references("s3://old/air.bin", "/tmp/air.bin"))
    write(CASE / "fixes.json", {"version": 1, "refs": {"air/0.0.0": ["/data/fixed.bin", 0, CHUNK]}})
    write(CASE / "templated.json", templated())
    for place in (CASE / "store.zarr", CASE / "run42", Path("/data/store.zarr"), Path("/data/2016.zarr")):
        store(lambda name, value, place=place: write(place / name, value))  # type: ignore[misc]
    for name in ("combined", "set"):
        write(Path(f"/data/{name}.json"), references("/data/air.bin"))
    write(Path("/data/config.toml"), "steps = 3\n")
    for name in ("a", "b", "c"):
        write(Path(f"/data/input/{name}.nc"), name.encode() * 5000)
    write(CASE / "north.nc", b"nc" * 5000)
    write(CASE / "tree/etc/hosts", "127.0.0.1 localhost\n")
    write(CASE / "tree/etc/passwd", "joe:x:1000:\n")
    write(CASE / "tree/Makefile", "all:\n\techo made >result\n")
    write(CASE / "analyse.py", "import os, sys\nassert len(os.listdir(sys.argv[1])) == 4\n")
    write(CASE / "model.py", "import os, sys\nassert 'air' in os.listdir(sys.argv[1])\n")
    write(HOME / ".config/zarrfs/zarrfs.toml", f'[source.era5]\nsource = "{CASE}/refs.json"\nretries = 3\n')
    write(WEB / "set.json", references("air.bin"))
    write(WEB / "refs.json", references("air.bin"))
    write(WEB / "air.bin", both)
    places = ("/scratch/job", "/srv/blobs", "/srv/data", "/lustre/project", "/project", "/local", "/tmp/data",
              "/var/lib/node_exporter", "/var/tmp",
              CASE / "mnt", CASE / "changes", HOME / ".zfunc", HOME / ".config/fish/completions",
              HOME / ".local/share/bash-completion/completions")  # fmt: skip
    for directory in places:
        os.makedirs(directory, exist_ok=True)


def buckets() -> None:
    """Write the buckets. All objects are publicly readable."""
    import boto3

    client = boto3.client("s3")

    def put(bucket: str, name: str, value: bytes | dict[str, Any]) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        client.put_object(Bucket=bucket, Key=name, Body=body, ACL="public-read")

    for bucket in ("bucket", "site", "mine"):
        client.create_bucket(Bucket=bucket, ACL="public-read")
    both = b"".join(CHUNKS.values())
    put("mine", "air.bin", both)
    put("bucket", "data/air.bin", both)
    store(lambda name, value: put("bucket", f"store.zarr/{name}", value))
    for name in ("refs", "combined", "sea"):
        put("bucket", f"{name}.json", references("s3://bucket/data/air.bin"))


def archives() -> None:
    """Write the archives. The blobs of job.json are in three places: a directory, Flux and S3."""
    import boto3

    flux = FakeFlux(FLUX)
    blobs = [path.read_bytes() for path in sorted(Path("/srv/blobs").iterdir())]
    name = "sha1-" + hashlib.sha1(blobs[0]).hexdigest()
    assert Path("/srv/blobs", name).exists()
    write(Path("/scratch/blobs", name), blobs[0])
    flux.store(blobs[1])
    name = "sha1-" + hashlib.sha1(blobs[2]).hexdigest()
    client = boto3.client("s3")
    client.put_object(Bucket="site", Key=f"blobs/{name}", Body=blobs[2], ACL="public-read")
    document = json.loads((CASE / "inline.json").read_text())
    for key in ("main", "inputs"):
        flux.put(f"archive.{key}", document)
    flux.job("f26M1xTq", {"attributes": {"system": {"files": {"input.txt": {"mode": 0o100644, "data": "text"}}}}})
    dump_tar(CASE / "dump.tar", {"main": (document, []), "other": (document, [])})
    compressed = zstandard.compress(json.dumps(references("s3://bucket/data/air.bin")).encode())
    client.put_object(Bucket="bucket", Key="refs.json.zst", Body=compressed, ACL="public-read")
    for path in (WEB / "combined.parq").rglob("*.*"):
        if path.is_file():
            client.upload_file(str(path), "bucket", str(path.relative_to(WEB)), ExtraArgs={"ACL": "public-read"})


def program(line: str) -> None:
    """Run a zarrfs command in this process."""
    try:
        status = zarrfs(line.split(), standalone_mode=False)
    except SystemExit as end:  # some commands raise SystemExit in spite of standalone_mode=False
        status = end.code
    assert not status, line


def main() -> None:
    """Write all files, buckets and archives."""
    local()
    buckets()
    os.chdir(CASE)
    for line in MADE.strip().splitlines():
        program(line)
    subprocess.run(["bash", "-c", COPIED], check=True)
    archives()
    for name in ("refs", "combined", "set", "a", "b", "remote", "job", "archive", "inline"):
        program(f"index {name}.json")  # most commands would build the index first


if __name__ == "__main__":
    main()
