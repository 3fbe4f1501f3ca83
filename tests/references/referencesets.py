"""Helpers for the tests of reference sets: compile a set, catch its error, and render templates with plain jinja2."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
import pytest
import trio

from zarrfs.config.options import Options
from zarrfs.documents.compilation import Compilation
from zarrfs.documents.document import Document
from zarrfs.documents.json_document import JsonDocument
from zarrfs.errors import SourceError
from zarrfs.references.parse import compile_document
from zarrfs.store.index import IndexStore
from zarrfs.store.indexfile import IndexWriter
from zarrfs.store.targets import Targets

SPEC_EXAMPLE = {
    "version": 1,
    "templates": {"u": "server.domain/path", "f": "{{c}}"},
    "gen": [
        {
            "key": "gen_key{{i}}",
            "url": "http://{{u}}_{{i}}",
            "offset": "{{(i + 1) * 1000}}",
            "length": "1000",
            "dimensions": {"i": {"stop": 5}},
        }
    ],
    "refs": {
        "key0": "data",
        "key1": ["http://target_url", 10000, 100],
        "key2": ["http://{{u}}", 10000, 100],
        "key3": ["http://{{f(c='text')}}", 10000, 100],
    },
}
SPEC_EQUIVALENT = {
    "key0": "data",
    "key1": ["http://target_url", 10000, 100],
    "key2": ["http://server.domain/path", 10000, 100],
    "key3": ["http://text", 10000, 100],
    "gen_key0": ["http://server.domain/path_0", 1000, 1000],
    "gen_key1": ["http://server.domain/path_1", 2000, 1000],
    "gen_key2": ["http://server.domain/path_2", 3000, 1000],
    "gen_key3": ["http://server.domain/path_3", 4000, 1000],
    "gen_key4": ["http://server.domain/path_4", 5000, 1000],
}


class Compiled:
    """A compiled document: its store, its problems and its warnings."""

    def __init__(self, store: IndexStore, compilation: Compilation) -> None:
        self.store, self.compilation = store, compilation
        self.problems = trio.run(store.problems)
        self.warnings = compilation.warnings

    def keys(self) -> list[str]:
        async def collect() -> list[str]:
            return [key async for key in self.store.list_prefix("")]

        return trio.run(collect)

    def get(self, key: str) -> bytes:
        return bytes(trio.run(self.store.get, key))

    def size(self, key: str) -> int | None:
        return trio.run(self.store.info, key).size

    def locate(self, key: str) -> Any:
        return trio.run(self.store.locate, key)

    def value(self, key: str) -> Any:
        """Return the bytes of an inline value, [url] or [url, offset, length]."""
        place = self.locate(key)
        return self.get(key) if "inline" in place else list(place.values())

    def tree(self) -> dict[str, Any]:
        """Return the values of all entries that can be read."""
        return {key: self.value(key) for key in self.keys() if key not in self.broken}

    @functools.cached_property
    def broken(self) -> dict[str, str]:
        """The entries that break a rule, and the rules."""

        async def find() -> dict[str, str]:
            places = {key: await self.store.locate(key) async for key in self.store.list_prefix("")}
            return {key: place["broken"] for key, place in places.items() if "broken" in place}

        return trio.run(find)


@contextmanager
def compiled(document: Any, base: str = "", **options: Any) -> Iterator[Compiled]:
    """Compile `document`, bytes or a value to encode as JSON; relative targets resolve against `base`."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "index")
        with IndexWriter(path) as writer:
            compilation = Compilation("set.json", writer, Options(**options))
            text = document if isinstance(document, bytes) else json.dumps(document).encode()
            compile_document(JsonDocument(Document("set.json", text, "/", None), 1 << 30), compilation)
            writer.commit()
        store = IndexStore(path, Targets(Options(), base))
        yield Compiled(store, compilation)
        trio.run(store.aclose)


def refusal(document: Any, **options: Any) -> tuple[str | None, str]:
    """Compile `document`, which must be refused, and return (entry, rule) of the error."""
    with pytest.raises(SourceError) as caught, compiled(document, **options):
        pass
    assert caught.value.source == "set.json"
    assert len(str(caught.value).splitlines()) == 1
    return caught.value.entry, caught.value.rule


class Plain:
    """Named templates rendered by plain jinja2: the model to compare with."""

    def __init__(self, named: dict[str, str]) -> None:
        self.environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
        self.environment.globals.clear()
        self.names: dict[str, Any] = {}
        for name, source in named.items():
            self.names[name] = self._function(source) if "{{" in source else source

    def render(self, text: str, **values: object) -> str:
        return self.environment.from_string(text).render(**{**self.names, **values})

    def _function(self, source: str) -> Any:
        plain = self

        class Function:
            def __call__(self, **values: object) -> str:
                return plain.render(source, **values)

            def __str__(self) -> str:
                return self()

        return Function()
