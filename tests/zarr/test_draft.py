"""The experimental Zarr v3 of zarr-python 2."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.zarr.sample_documents import V3
from tests.zarrsamples import DRAFT
from zarrfs.zarr import draft
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.model import GroupMetadata


def test_entry_points_keys_and_nodes_are_parsed() -> None:
    store = DRAFT[0].store
    entry = ".json"
    assert draft.entry_point((store / "zarr.json").read_bytes()) == entry
    assert draft.entry_point(json.dumps(V3).encode()) is None
    group = draft.parse("group", (store / draft.document_keys("", entry)[1]).read_bytes())
    assert group == GroupMetadata("v3-draft", {"title": "t"})
    assert draft.node_of_key("meta/root.group.json", entry) == ("", "group")
    for key in ("meta/root/a", "meta/root/.array.json", "meta/root/a/.array.json", "data/root/a.array.json"):
        assert draft.node_of_key(key, entry) is None
    assert draft.parse("group", b'{"attributes": null}') == GroupMetadata("v3-draft", {})


@pytest.mark.parametrize(
    ("members", "rule"),
    [
        ({"chunk_grid": {"type": "irregular"}}, "chunk_grid"), ({"chunk_grid": []}, "chunk_grid"),
        ({"attributes": []}, "attributes"),
        ({"chunk_grid": {"chunk_shape": [2], "separator": "-"}, "shape": [3]}, "separator"),
        ({"data_type": {}}, "type is missing"),
        ({"compressor": {"codec": "https://purl.org/zarr/spec/codec/new/1.0"}}, "is not known"),
        ({"compressor": {"codec": 3}}, "compressor"),
        ({"extensions": ["x"]}, "extension 'x' must be understood"),
        ({"extensions": [{"extension": "x", "must_understand": True}]}, "extension 'x' must be understood"),
        ({"storage_transformers": [1]}, "storage_transformers"),
        ({"attributes": {"filters": "x"}}, "filters"), ({"chunk_memory_layout": "A"}, "order"),
        ({"extensions": 1}, "extens"),
    ],
)  # fmt: skip
def test_invalid_documents_are_refused(members: dict[str, Any], rule: str) -> None:
    document = json.loads((DRAFT[0].store / "meta/root/S.array.json").read_text())
    with pytest.raises(MetadataError, match=rule):
        draft.parse("array", json.dumps({**document, **members}).encode())


@pytest.mark.parametrize("data", [
    b'{"zarr_format": "x"}', b'{"zarr_format": "https://purl.org/zarr/spec/protocol/core/4.0"}',
    b'{"zarr_format": "https://purl.org/zarr/spec/protocol/core/3.0", "metadata_key_suffix": "/x"}', b"{",
])  # fmt: skip
def test_invalid_entry_points_are_refused(data: bytes) -> None:
    with pytest.raises(MetadataError):
        draft.entry_point(data)
