"""Values of extended attributes, which are JSON of a bounded size."""

from __future__ import annotations

import json

import pytest

from zarrfs.fuse.xattrs import bounded

REGION = {"url": "https://host/" + "x" * 400, "offset": 0, "length": 1}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"url": "/a"}, {"url": "/a"}),
        ({"regions": [REGION] * 9}, {"regions": [REGION] * 4, "count": 9}),
        ({"url": "x" * 3000}, {"too_long": 3010}),
        ({"regions": [{"url": "x" * 600}] * 9}, {"too_long": 2467}),
    ],
)
def test_a_source_is_json_of_a_bounded_size(value: dict[str, object], found: dict[str, object]) -> None:
    text = bounded(value)
    assert len(text) <= 2048
    assert json.loads(text) == found
