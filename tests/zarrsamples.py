"""The genuine stores in tests/data/zarr: every array with what its makers read from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import DATA

ROOT = DATA / "zarr"
# No fill value, and chunks that were never written: the record is of what memory held when it was made.
_UNDEFINED = {"v0_bytes48_08", "v0_datetime64_s_010", "v1_bytes48_08"}


class Sample(NamedTuple):
    """One array of a store."""

    store: Path
    path: str  # of the array in the store; "" where the store is the array
    shape: tuple[int, ...]
    dtype: str | list[Any]  # numpy's str, or its fields
    sha256: str  # of the decoded bytes in C order
    attributes: dict[str, Any] | None  # None: not recorded

    @property
    def defined(self) -> bool:
        """Return whether sha256 is that of values that were written, or of the fill value."""
        return self.store.name not in _UNDEFINED

    @property
    def label(self) -> str:
        """For the parameters of tests."""
        return "-".join(filter(None, (self.store.name, self.path.replace("/", "-"))))


def _samples(pattern: str = "expected.*.json") -> list[Sample]:
    found = []
    for document in sorted(ROOT.glob(pattern)):
        hierarchy = document.name.removeprefix("expected")[1:].removesuffix(".json")
        for name, about in json.loads(document.read_text()).items():
            store, path = (ROOT / hierarchy, name) if (ROOT / hierarchy).is_dir() else (ROOT / name, "")
            # the records of scalars have the shape (1,)
            shape = () if name == "scalar" else tuple(about["shape"])
            attributes = about.get("attrs")
            found.append(Sample(store, path, shape, about["dtype"], about["sha256"], attributes))
    return found


SAMPLES = _samples()
DRAFT = _samples("expected-v3_draft.json")  # experimental v3, by zarr-python 2.18
STORES = sorted({sample.store for sample in SAMPLES})
