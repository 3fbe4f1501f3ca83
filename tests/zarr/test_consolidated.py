"""Consolidated metadata, compared with the documents of the hierarchy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zarrfs.zarr.consolidated import consolidated
from zarrfs.zarr.errors import MetadataError


@pytest.mark.parametrize("path", ["..", "a/../b", "/a", "a//b", "a/.", "a\0b", "/"])
def test_invalid_paths_are_refused(path: str) -> None:
    for name, document in (
        (".zmetadata", {"metadata": {f"{path}/.zarray": {}}}),
        ("zarr.json", {"consolidated_metadata": {"metadata": {path: {}}}}),
    ):
        with pytest.raises(MetadataError, match="is not the path of a node"):
            consolidated(name, json.dumps(document).encode())


@pytest.mark.parametrize(
    ("name", "document"),
    [
        (".zmetadata", []), (".zmetadata", {"metadata": []}), ("zarr.json", {"consolidated_metadata": 3}),
        ("zarr.json", {"consolidated_metadata": {}}), ("zarr.json", {"consolidated_metadata": {"metadata": []}}),
        ("zarr.json", {"consolidated_metadata": {"kind": "elsewhere", "metadata": {}}}),
    ],
)  # fmt: skip
def test_malformed_consolidated_metadata_is_refused(name: str, document: Any) -> None:
    with pytest.raises(MetadataError):
        consolidated(name, json.dumps(document).encode())
