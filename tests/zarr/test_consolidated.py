"""Consolidated metadata, compared with the documents of the hierarchy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.zarrsamples import ROOT
from zarrfs.zarr import NODE_DOCUMENTS
from zarrfs.zarr.consolidated import consolidated
from zarrfs.zarr.documents import parse_document
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import load_json
from zarrfs.zarr.model import ArrayMetadata


@pytest.mark.parametrize(("store", "name"), [("v2_hier", ".zmetadata"), ("v3_hier", "zarr.json")])
def test_consolidated_metadata_equals_the_documents(store: str, name: str) -> None:
    found = consolidated(name, (ROOT / store / name).read_bytes())
    assert found is not None
    documents: dict[str, dict[str, Any]] = {}
    for path in (ROOT / store).rglob("*"):
        if path.name in (*NODE_DOCUMENTS, ".zattrs"):
            node = str(path.parent.relative_to(ROOT / store)).removeprefix(".")
            documents.setdefault(node, {})[path.name] = load_json(path.read_bytes())
    if name == "zarr.json":
        documents[""]["zarr.json"].pop("consolidated_metadata")
        for nodes in (documents, found):  # zarr-python writes an empty member for inner groups
            for node in nodes.values():
                node["zarr.json"].pop("consolidated_metadata", None)
    assert found == documents
    for node, about in found.items():
        document = next(each for each in NODE_DOCUMENTS if each in about)
        metadata = parse_document(document, about[document], about.get(".zattrs"))
        assert isinstance(metadata, ArrayMetadata) == ("shape" in about[document]), node


@pytest.mark.parametrize("name", [".zmetadata", "zarr.json"])
def test_documents_without_consolidated_metadata_give_none(name: str) -> None:
    assert consolidated(name, b'{"zarr_format": 3, "node_type": "group"}') is None
    assert consolidated(name, b'{"consolidated_metadata": null, "metadata": null}') is None


def test_keys_of_other_values_are_ignored() -> None:
    document = {"metadata": {".zgroup": {"zarr_format": 2}, "a/.zarray": {}, "a/0.0": "x", "b": {}}, "record_size": 10}
    found = consolidated(".zmetadata", json.dumps(document).encode())
    assert found == {"": {".zgroup": {"zarr_format": 2}}, "a": {".zarray": {}}}


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
