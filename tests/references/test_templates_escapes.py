"""Known escapes from jinja2's sandbox, each in a whole document: none reads a file, runs a program or connects.

Sources: the issues of jinja2's sandbox (format, format_map, attr, map) and the usual lists for template injection.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from zarrfs.config.options import Options
from zarrfs.errors import SourceError
from zarrfs.sources import open_plan, plan_source
from zarrfs.store.index import IndexStore

TEMPLATES = {"u": "server/path", "f": "<{{c}}>", "t": "{{u}}/t"}
# In the escapes, @S is a file that must not be read, @M one that must not be created.
RUN = "os.popen('touch @M').read()"
ESCAPES = [
    # from a value to its class, and from there to everything
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__.mro()[-1].__subclasses__() }}",
    "{{ u.__class__ }}",
    "{{ u['__class__'] }}",
    "{{ u['__cla' ~ 'ss__'] }}",
    "{{ u['\\x5f\\x5fclass\\x5f\\x5f'] }}",
    "{{ u[['__cl', 'ass__'] | join] }}",
    "{% set a = '__class__' %}{{ u[a] }}",
    "{{ u.__getattribute__('__class__') }}",
    "{{ u.__init__.__globals__ }}",
    # from functions and objects that jinja2 or zarrfs provides
    "{{ f.__globals__ }}",
    "{{ f.__call__.__globals__ }}",
    "{{ u.format.__self__ }}",
    "{{ cycler.__init__.__globals__." + RUN + " }}",
    "{{ lipsum.__globals__.__builtins__.open('@S').read() }}",
    "{{ cycler('a').next() }}",
    "{{ dict.__subclasses__() }}",
    "{{ get_flashed_messages.__globals__.__builtins__.open('@S').read() }}",
    "{{ self }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ caller }}",
    "{{ context }}",
    "{{ config }}",
    "{{ request.application.__globals__.__builtins__.__import__('os').popen('touch @M').read() }}",
    "{{ __builtins__ }}",
    "{{ __import__('os').system('touch @M') }}",
    "{{ open('@S').read() }}",
    "{{ os.environ }}",
    "{% for a in 'x' %}{{ loop.__class__ }}{% endfor %}",
    "{% for a in 'x' recursive %}{{ loop.__call__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.__class__ }}",
    "{% filter attr('__class__') %}a{% endfilter %}",
    "{% block x %}{{ self.x.__class__ }}{% endblock %}",
    # filters and tests that take names of attributes
    "{{ '' | attr('__class__') }}",
    "{{ ['a'] | map(attribute='__class__') | list }}",
    "{{ ['a'] | map('attr', '__class__') | list }}",
    "{{ ['a'] | groupby('__class__') }}",
    "{{ ['a'] | sum(attribute='__class__') }}",
    # format strings
    "{{ '{0.__class__}'.format(u) }}",
    "{{ '{0[__class__]}'.format(f) }}",
    "{{ '{x.__class__}'.format_map({'x': u}) }}",
    "{{ '{0.__globals__}'.format(f) }}",
    "{{ '{:{0.__class__}}'.format(u) }}",
    "{{ ('{0.__class__}' | e).format(u) }}",
    "{{ {'a': '{0.__class__}'.format}.a(u) }}",
    # statements that load other templates
    "{% import '@S' as a %}{{ a }}",
    "{% include '@S' %}",
    "{% extends '@S' %}",
    # i18n, do, debug: extensions that are not loaded
    "{% trans %}{{ u.__class__ }}{% endtrans %}",
    "{% do [].append(1) %}",
    "{% debug %}",
    # from zarrfs's own names
    "{{ f._owner }}", "{{ f['_owner'] }}", "{{ f.__call__ }}", "{{ t._template }}", "{{ '{0._owner}'.format(f) }}",
    "{{ '{x._owner}'.format_map({'x': f}) }}", "{{ [f] | map(attribute='_owner') | list }}",
    "{{ ['{0._owner}'] | map('format', f) | list }}", "{{ f(**{'_owner': 1}) }}", "{{ [u] | random }}",
    "{% for a in 'x' %}{{ loop._recurse }}{% endfor %}", "{{ self._TemplateReference__context }}",
    # changing shared objects
    "{{ [].append(1) }}",
    "{{ {}.update(a=1) }}",
]
COSTLY = [  # templates that exceed the time limit are in test_templates.py
    "{{ range(10**9) | list | length }}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ 'x' * 10**10 }}",
    "{{ ('x' * 10**5) * 10**5 }}",
    "{{ 'x' | center(10**10) }}",
    "{{ ('a ' * 60000) | wordwrap(1) | replace('a', 'a' * 60000) }}",
    "{{ ('\\t' * 60000).expandtabs(10**6) }}",
    "{{ 'ab' | batch(10**10, 'x') | list }}",
]


class Watch:
    """An audit hook that records events which a template must not cause in this process."""

    kinds = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")

    def __init__(self) -> None:
        self.on = False
        self.secret = ""
        self.seen: list[tuple[str, str]] = []
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and (event in self.kinds or (event == "open" and arguments[0] == self.secret)):
            self.seen.append((event, str(arguments)))


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def in_url(text: str) -> dict[str, Any]:
    return {"version": 1, "templates": TEMPLATES, "refs": {"key": [text]}}


def in_called_template(text: str) -> dict[str, Any]:
    return {"version": 1, "templates": {**TEMPLATES, "x": text}, "refs": {"key": ["{{x(c='a')}}"]}}


def in_gen(text: str) -> dict[str, Any]:
    item = {"key": text, "url": "u", "offset": "0", "length": "1", "dimensions": {"i": {"stop": 2}}}
    return {"version": 1, "templates": TEMPLATES, "gen": [item]}


PLACES = {"url": in_url, "called": in_called_template, "gen": in_gen}


def rendered(text: str) -> str:
    """Return `text` with a template appended if it has none: text without `{{` is not rendered."""
    return text if "{{" in text else text + "{{u}}"


def outcome(document: dict[str, Any], directory: Path, child: bool = False) -> list[str] | None:
    """Return keys and URLs of the compiled document; None if it is refused."""
    path = directory / "set.json"
    path.write_text(json.dumps(document))
    try:
        plan = plan_source(str(path), Options(), child=child)
    except SourceError:
        return None

    async def found() -> list[str]:
        store = open_plan(plan, Options())
        assert isinstance(store, IndexStore)
        keys = [key async for key in store.list_prefix("")]
        told = keys + [str(await store.locate(key)) for key in keys]
        await store.aclose()
        return told

    return trio.run(found)


@pytest.mark.parametrize("text", ESCAPES)
def test_escapes(text: str, watch: Watch, tmp_path: Path) -> None:
    """An escape is refused in every place of a document that is rendered."""
    secret, made = tmp_path / "secret", tmp_path / "made"
    secret.write_text("a secret")
    text = rendered(text).replace("@S", str(secret)).replace("@M", str(made))
    watch.secret, watch.seen = str(secret), []
    watch.on = True
    try:
        told = {name: outcome(place(text), tmp_path) for name, place in PLACES.items()}
    finally:
        watch.on = False
    assert not watch.seen
    assert not made.exists()
    assert told == dict.fromkeys(PLACES)


@pytest.mark.parametrize("text", COSTLY)
def test_expensive_templates_are_ended(text: str, tmp_path: Path) -> None:
    """Rendering runs in a child process, as in production; the parent reports its refusal."""
    assert outcome(in_url(rendered(text)), tmp_path, child=True) is None
