"""Random merged trees: a source, changes to it that are made without a mount, and a plain model of the result."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import trio
from hypothesis import strategies as st

from tests.references.refsets import KEYS, TARGET, random_sets
from zarrfs.config.options import Options
from zarrfs.documents.plan import Plan
from zarrfs.errors import IsDirectory, NotDirectory
from zarrfs.sources import open_plan, plan_source
from zarrfs.store.api import Kind, Store, join_key, split_key
from zarrfs.store.overlay import Overlay

Model = dict[str, bytes | str | None]  # a file's bytes, a link's target, None for a directory
Operation = tuple[Any, ...]

SECOND = 10**9
_TIMES = st.integers(-(2**31), 2**33)
_DATA = st.binary(max_size=40) | st.binary(min_size=1, max_size=1).map(lambda one: one * 3000)


class Shown(NamedTuple):
    """The entry that a store shows at a key."""

    kind: Kind
    data: bytes | str | None
    mode: int | None
    mtime_ns: int | None


def operations() -> st.SearchStrategy[list[Operation]]:
    """Generate lists of changes, some of which are impossible."""
    kinds: list[st.SearchStrategy[Operation]] = [
        st.tuples(st.just("set"), KEYS, _DATA),
        st.tuples(st.just("delete"), st.integers(0, 99)),
        st.tuples(st.just("mkdir"), KEYS, st.sampled_from([0o755, 0o700, 0o2775])),
        st.tuples(
            st.just("patch"), st.integers(0, 99), st.integers(0, 300_000), st.binary(max_size=9),
            st.sampled_from([0o644, 0o400, 0o4755]), _TIMES,
        ),
        st.tuples(st.just("link"), KEYS, st.sampled_from(["a", "../x", "/é", "b c"])),
    ]  # fmt: skip
    return st.lists(st.one_of(kinds), max_size=10)


def model_of(entries: dict[str, Any]) -> Model:
    """Return the model of a reference set, `entries` of refsets.random_sets()."""
    model: Model = {}
    for key, value in entries.items():
        _add_above(model, key)
        if isinstance(value, bytes):
            model[key] = value
        else:
            offset, length = value[1:] or (0, len(TARGET))
            model[key] = TARGET[offset : offset + length]
    return model


def write_source(place: Path, kind: str, entries: dict[str, Any]) -> Path:
    """Write the reference set `entries` as a source of `kind` with the same content; return its path."""
    files = {key: value for key, value in model_of(entries).items() if isinstance(value, bytes)}
    path = place / "source"
    if kind == "zarr":
        path.mkdir()
        for key, data in files.items():
            (path / key).parent.mkdir(parents=True, exist_ok=True)
            (path / key).write_bytes(data)
        return path
    document: Any = [
        {"path": key, "mode": 0o100640, "mtime": 7, "encoding": "base64", "data": base64.b64encode(data).decode()}
        for key, data in files.items()
    ]
    if kind == "references":
        document = {"version": 1, "refs": {}}
        for key, value in entries.items():
            inline = isinstance(value, bytes)
            document["refs"][key] = "base64:" + base64.b64encode(value).decode() if inline else value
    path.write_text(json.dumps(document))
    return path


def sets(urls: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Generate reference sets whose URLs have no template."""
    return random_sets([url for url in urls if "{" not in url])


def opened(path: Path, upper: Path, **options: Any) -> tuple[Overlay, Plan]:
    """Open a source with the upper directory `upper`; return the overlay and the plan of the source."""
    chosen = Options(upperdir=str(upper), **options)
    plan = plan_source(str(path), chosen, child=False)
    overlay = open_plan(plan, chosen)
    assert isinstance(overlay, Overlay)
    return overlay, plan


def changed(upper: Path, source: Path) -> None:
    """Write the record to `upper` that a mount writes."""
    overlay, _plan = opened(source, upper)
    overlay.upper.lock(True)
    trio.run(overlay.aclose)


async def change(overlay: Overlay, model: Model, operation: Operation) -> None:
    """Make a change to the overlay and to the model; an impossible one changes neither."""
    name, *rest = operation
    if name == "set":
        key, data = rest
        above = ["/".join(key.split("/")[:depth]) for depth in range(1, key.count("/") + 1)]
        possible = model.get(key, b"") is not None and all(model.get(at) is None for at in above)
        with contextlib.suppress(IsDirectory, NotDirectory):
            await overlay.set(key, data)
            assert possible
            _add_above(model, key)
            model[key] = data
            return
        assert not possible
    elif name in ("mkdir", "link"):
        key, what = rest
        parent = split_key(key)[0]
        if key in model or model.get(parent, "" if parent else None) is not None:
            return
        await overlay.change(lambda now: now.make_parents(key))
        with overlay.upper.at(key) as (directory, at):
            if name == "link":
                os.symlink(what, at, dir_fd=directory)
            else:
                os.mkdir(at, dir_fd=directory)
                os.chmod(at, what, dir_fd=directory)
        model[key] = what if name == "link" else None
    elif name == "delete" and model:
        key = sorted(model)[rest[0] % len(model)]
        await overlay.delete(key)
        for gone in [at for at in model if at == key or at.startswith(f"{key}/")]:
            del model[gone]
    elif name == "patch":
        await _patch(overlay, model, *rest)


async def _patch(
    overlay: Overlay, model: Model, number: int, at: int, data: bytes, mode: int, seconds: int
) -> None:
    """Copy a file up and write `data` at offset `at`, which may be beyond the end and leave a hole."""
    files = sorted(key for key, value in model.items() if isinstance(value, bytes))
    if not files:
        return
    key = files[number % len(files)]
    old = model[key]
    assert isinstance(old, bytes)
    await overlay.copy_up(key)
    descriptor = overlay.upper.open(key, os.O_RDWR)
    os.pwrite(descriptor, data, at)
    os.ftruncate(descriptor, max(len(old), at + len(data)))
    os.fchmod(descriptor, mode)
    os.utime(descriptor, ns=(0, seconds * SECOND + 5))
    os.close(descriptor)
    model[key] = old[:at].ljust(at, b"\0") + data + old[at + len(data) :]


def _add_above(model: Model, key: str) -> None:
    for depth in range(1, key.count("/") + 1):
        model["/".join(key.split("/")[:depth])] = None


async def shown(store: Store, prefix: str = "") -> dict[str, Shown]:
    """Return every entry below a directory, read with list_dir(), info() and get()."""
    found: dict[str, Shown] = {}
    async for listed in store.list_dir(prefix):
        key = join_key(prefix, listed.name)
        info = await store.info(key)
        data: bytes | str | None = info.target
        if info.kind is Kind.FILE:
            data = bytes(await store.get(key))
            assert info.size == len(data)
        found[key] = Shown(info.kind, data, info.mode, info.mtime_ns)
        if info.kind is Kind.DIRECTORY:
            found |= await shown(store, key)
    return found
