"""The sessions in docs/python.md: every statement gives the output shown below it."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xarray as xr

from tests.pages import DOCS, blocks
from zarrfs.python.filesystem import ZarrfsFileSystem


def test_the_sessions_of_python_md(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fsspec.register_implementation("zarrfs", ZarrfsFileSystem, clobber=True)
    values = np.arange(2400, dtype="f4").reshape(4, 30, 20)
    dataset = xr.Dataset({"t2m": (("time", "lat", "lon"), values)}, {"lat": np.linspace(-90, 90, 30)})
    chunked = {"t2m": {"chunks": (1, 15, 20), "compressors": None}}
    dataset.to_zarr("forecast.zarr", zarr_format=3, consolidated=False, encoding=chunked)
    files = [path for path in Path("forecast.zarr").rglob("*") if path.is_file()]
    refs = {str(path.relative_to("forecast.zarr")): [str(path), 0, path.stat().st_size] for path in files}
    Path("set.json").write_text(json.dumps({"version": 1, "refs": refs}))
    session = "\n".join(text for text in blocks((DOCS / "python.md").read_text()) if text.startswith(">>> "))
    assert session
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(doctest.DocTestParser().get_doctest(session, {}, "python.md", "python.md", 0))
    assert runner.summarize(verbose=False).failed == 0, capsys.readouterr().out
