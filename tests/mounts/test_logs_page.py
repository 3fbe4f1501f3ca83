"""docs/monitoring.md: every command in "Logs" and "Prometheus" prints the output shown below it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pages import DOCS, blocks, check_transcript
from tests.servers import free_port

PAGE = DOCS / "monitoring.md"
VARYING = (
    r"(?<=zarrfs\[)\d+", r'(?<="pid": )\d+', r"(?<=after )[\d.]+ s", r"\d+ more like it", r"\d+(?= blocks from)",
    r"\d+ requests(?: \(|, )\d+ repeated, \d+ failed", r"\d+ errors", r"(?<=errno=\"EIO\"} )\d+", r"\d+(?= EIO\n)",
)  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make the directory that the page calls /data, with a set whose targets cannot be read."""
    refs = {"air/0.0": ["http://127.0.0.1:9/x.nc", 18368, 8000], "sea/0.0": [f"{tmp_path}/none.nc", 0, 80]}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    for name in ("mnt", "collected"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_the_transcript_about_logs_shows_the_real_output(source: Path) -> None:
    check_transcript(source, PAGE, section="Logs", masks=VARYING, least=11)


def test_metrics(source: Path) -> None:
    refs = {"air/0.0": [f"{source}/none.nc", 0, 80]}
    (source / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    check_transcript(source, PAGE, section="Prometheus", names={"9417": str(free_port())}, masks=VARYING, least=8)


def test_prometheus_accepts_the_configuration_and_queries(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here")
    [config] = [block.text for block in blocks(PAGE) if block.language == "yaml"]
    queries = re.findall(r"^\| .*\? \| `(.+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert len(queries) == 6
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "q", "rules": rules}]}))
    (tmp_path / "prometheus.yml").write_text(f"rule_files: [rules.yml]\n{config}")
    done = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
