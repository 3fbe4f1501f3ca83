"""The transcript in docs/configuration.md: every command prints the output shown below it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.pages import DOCS, check_transcript


def test_the_transcript_shows_the_real_output(tmp_path: Path) -> None:
    home, sets = tmp_path / "home", tmp_path / "sets"
    home.mkdir()
    sets.mkdir()
    (sets / "refs.json").write_text(json.dumps({"version": 1, "refs": {"a": "text"}}))
    check_transcript(
        tmp_path, DOCS / "configuration.md", names={"/home/joe": str(home)},
        env={"HOME": str(home), "XDG_CONFIG_HOME": ""}, masks=[r"(?<=/etc/zarrfs/zarrfs.toml: )\w+"], least=14,
    )  # fmt: skip
