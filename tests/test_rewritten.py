"""tests/rewritten.py: modules are written once, and not at all by a pytest without the functions that it uses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests import rewritten


def test_a_module_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    shutil.copyfile(__file__, path)
    assert [rewritten.write(path) for _ in range(2)] == [True, False]


def test_another_pytest_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delattr(rewrite, "_read_pyc")
    rewritten.main()
    assert "this pytest has no _read_pyc" in capsys.readouterr().out
