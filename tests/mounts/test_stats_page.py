"""The transcript in docs/monitoring.md, "Statistics": `zarrfs stats` prints these lines, with other figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.conftest import run
from tests.mounts.mounting import mounted
from tests.pages import DOCS, as_written, masked, transcript
from tests.servers import Nginx
from tests.servers import nginx as nginx

FIGURES = (r"\d[\d,.]*(?: [KMGT]?i?B\b)?",)


def test_the_transcript(nginx: Nginx, tmp_path: Path) -> None:
    (nginx.plain.root / "page.bin").write_bytes(os.urandom(16 << 20))
    url = nginx.plain.url
    refs = {f"a/{number}": [f"{url}/page.bin", number * 400_000, 400_000] for number in range(40)}
    (nginx.plain.root / "combined.json").write_text(json.dumps({"version": 1, "refs": refs}))
    [(command, said)] = transcript(DOCS / "monitoring.md", "Statistics")
    assert command == "zarrfs stats /mnt/data\n"
    with mounted(f"{url}/combined.json", tmp_path / "mnt", f"cache_dir={tmp_path}/blocks") as root:
        for number in range(40):  # read-ahead fetches some of them
            (root / f"a/{number}").read_bytes()
        done = run("stats", root)
    assert done.returncode == 0
    host = url.removeprefix("http://")
    found = as_written(done.stdout, {"/mnt/data": str(root), "https://data.example": url, "data.example": host})
    assert masked(found, FIGURES) == masked(said, FIGURES)
