"""The how-to pages: every command prints the output shown below it, with test servers in place of the named ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pages import DOCS, check_transcript
from tests.servers import GCS, S3, Nginx
from tests.servers import gcs as gcs
from tests.servers import nginx as nginx
from tests.servers import s3 as s3

ARRAY = {"zarr_format": 2, "shape": [22], "chunks": [11], "dtype": "|u1", "compressor": None, "filters": None,
         "fill_value": None, "order": "C"}  # fmt: skip
VALUES = {".zarray": json.dumps(ARRAY).encode(), "0": b"first half", "1": b"second half"}


def test_the_transcript_about_s3_shows_the_real_output(s3: S3, tmp_path: Path) -> None:
    s3.client.create_bucket(Bucket="climate")
    for name, value in VALUES.items():
        s3.client.put_object(Bucket="climate", Key=f"rain.zarr/{name}", Body=value, ACL="public-read")
    home = tmp_path / "home"
    home.mkdir()
    check_transcript(
        tmp_path, DOCS / "howto-servers.md", section="S3", least=10,
        names={"https://storage.example.org": s3.endpoint, "/home/joe": str(home)},
        env={"HOME": str(home), "XDG_CONFIG_HOME": ""},
    )  # fmt: skip
    assert list((tmp_path / "blocks").iterdir())


def test_the_transcript_about_http_shows_the_real_output(nginx: Nginx, tmp_path: Path) -> None:
    base = nginx.plain.root / "howto"
    store = base / "rain.zarr"
    (store / "rain").mkdir(parents=True)
    for name, value in VALUES.items():
        (store / "rain" / name).write_bytes(value)
    (base / "both").write_bytes(VALUES["0"] + VALUES["1"])
    metadata = {".zgroup": {"zarr_format": 2}, "rain/.zarray": ARRAY}
    (store / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": metadata}))
    refs = {"rain/0": ["both", 0, 10], "rain/1": ["both", 10, 11]}
    (base / "rain.json").write_text(json.dumps({"version": 1, "refs": refs}))
    names = {"https://data.example.org": f"{nginx.plain.url}/howto"}
    check_transcript(tmp_path, DOCS / "howto-servers.md", section="HTTP servers", names=names, least=9)


def test_the_transcript_about_google_shows_the_real_output(gcs: GCS, tmp_path: Path) -> None:
    for name, value in VALUES.items():
        gcs.put(f"rain.zarr/{name}", value)
    names = {"gs://climate": f"gs://{gcs.bucket}", "gs.token=anon": f"gs.token=anon,gs.endpoint_url={gcs.endpoint}"}
    check_transcript(tmp_path, DOCS / "howto-servers.md", section="Google Cloud Storage", names=names, least=4)


@pytest.mark.parametrize(
    ("page", "section"), [("howto-servers.md", "Credentials"), ("howto-hpc.md", ""), ("howto-performance.md", "")]
)
def test_transcripts_without_a_server_show_the_real_output(page: str, section: str, tmp_path: Path) -> None:
    (tmp_path / "rain.json").write_text(json.dumps({"version": 1, "refs": {"rain/0": "text"}}))
    check_transcript(tmp_path, DOCS / page, section=section)
