"""The sample stores in tests/data/zarr, written by other software, and the recorded contents of their arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import DATA

ROOT = DATA / "zarr"
# Arrays without a fill value and with chunks that were never written: their records are of uninitialised memory.
_UNDEFINED = {"v0_bytes48_08", "v0_datetime64_s_010", "v1_bytes48_08"}
# Arrays with codecs that zarrfs does not decode: Blosc with snappy or zstd 0.7, and JSON of items of a fixed size
_UNDECODED = {"v0_pickled_snappy", "v1_float64_05", "v1_float64_15", "v1_zstd_stored_split", "json_of_numbers",
              "json_of_text"}  # fmt: skip


class Sample(NamedTuple):
    """One array of a store."""

    store: Path
    path: str  # of the array in the store; "" if the store is the array
    shape: tuple[int, ...]
    dtype: str | list[Any]  # numpy's str, or its fields
    sha256: str  # of the decoded bytes in C order
    attributes: dict[str, Any] | None  # None: not recorded

    @property
    def defined(self) -> bool:
        """True if sha256 is that of written values or of the fill value, not of uninitialised memory."""
        return self.store.name not in _UNDEFINED

    @property
    def decoded(self) -> bool:
        """True if zarrfs decodes the chunks; otherwise reading them is an error."""
        return _UNDECODED.isdisjoint((self.store.name, self.path))

    @property
    def label(self) -> str:
        """The id of the array in parametrised tests."""
        return "-".join(filter(None, (self.store.name, self.path.replace("/", "-"))))


def _samples(pattern: str = "expected.*.json") -> list[Sample]:
    found = []
    for document in sorted(ROOT.glob(pattern)):
        hierarchy = document.name.removeprefix("expected")[1:].removesuffix(".json")
        for name, about in json.loads(document.read_text()).items():
            store, path = (ROOT / hierarchy, name) if (ROOT / hierarchy).is_dir() else (ROOT / name, "")
            # scalars are recorded with the shape (1,)
            shape = () if name == "scalar" else tuple(about["shape"])
            attributes = about.get("attrs")
            found.append(Sample(store, path, shape, about["dtype"], about["sha256"], attributes))
    return found


SAMPLES = _samples()
DRAFT = _samples("expected-v3_draft.json")  # experimental v3, by zarr-python 2.18
STORES = sorted({sample.store for sample in SAMPLES})
