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
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ [].__class__.__bases__[0].__subclasses__() | list }}",
    "{{ {}.__class__ }}",
    "{{ 1 .__class__ }}",
    "{{ true.__class__ }}",
    "{{ none.__class__ }}",
    "{{ u.__class__ }}",
    "{{ u['__class__'] }}",
    "{{ u['__cla' + 'ss__'] }}",
    "{{ u['__cla' ~ 'ss__'] }}",
    "{{ u['\\x5f\\x5fclass\\x5f\\x5f'] }}",
    "{{ u['\\u005f\\u005fclass\\u005f\\u005f'] }}",
    "{{ u['__ssalc__'[::-1]] }}",
    "{{ u[['__cl', 'ass__'] | join] }}",
    "{{ u['%c%cclass%c%c' | format(95, 95, 95, 95)] }}",
    "{% set a = '__class__' %}{{ u[a] }}",
    "{{ u.__getattribute__('__class__') }}",
    "{{ u.__init__.__globals__ }}",
    "{{ u.__reduce_ex__(2) }}",
    "{{ u.__doc__ }}",
    "{{ u.__dict__ }}",
    # from functions and objects that jinja2 or zarrfs provides
    "{{ f.__globals__ }}",
    "{{ f.__call__.__globals__ }}",
    "{{ f.__class__.__init__.__globals__ }}",
    "{{ t.__class__ }}",
    "{{ f.__func__ }}",
    "{{ u.format.__self__ }}",
    "{{ u.upper.__self__.__class__ }}",
    "{{ cycler.__init__.__globals__." + RUN + " }}",
    "{{ joiner.__init__.__globals__." + RUN + " }}",
    "{{ namespace.__init__.__globals__." + RUN + " }}",
    "{{ lipsum.__globals__['os'].popen('touch @M').read() }}",
    "{{ lipsum.__globals__.__builtins__.open('@S').read() }}",
    "{{ lipsum | attr('__globals__') }}",
    "{{ cycler('a').next() }}",
    "{{ range.__class__ }}",
    "{{ dict.__subclasses__() }}",
    "{{ dict(__class__=1).__class__ }}",
    "{{ get_flashed_messages.__globals__.__builtins__.open('@S').read() }}",
    "{{ url_for.__globals__ }}",
    "{{ self }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__." + RUN + " }}",
    "{{ self.x }}",
    "{{ caller }}",
    "{{ varargs }}",
    "{{ kwargs }}",
    "{{ context }}",
    "{{ environment }}",
    "{{ loop }}",
    "{{ config }}",
    "{{ config.items() }}",
    "{{ request.application.__globals__.__builtins__.__import__('os').popen('touch @M').read() }}",
    "{{ request | attr('application') }}",
    "{{ g }}",
    "{{ session }}",
    "{{ __builtins__ }}",
    "{{ __import__('os').system('touch @M') }}",
    "{{ open('@S').read() }}",
    "{{ eval('1') }}",
    "{{ exec('1') }}",
    "{{ globals() }}",
    "{{ os.environ }}",
    "{% for a in 'x' %}{{ loop.__class__ }}{% endfor %}",
    "{% for a in 'x' %}{{ loop._iterator.__class__ }}{% endfor %}",
    "{% for a in 'x' %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% for a in 'x' recursive %}{{ loop.__call__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._environment }}",
    "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% macro m() %}{{ varargs.__class__ }}{% endmacro %}{{ m(1) }}",
    "{% macro m() %}{{ kwargs.__class__ }}{% endmacro %}{{ m(a=1) }}",
    "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.__class__ }}",
    "{% set x %}a{% endset %}{{ x.__class__ }}",
    "{% with a = u.__class__ %}{{ a }}{% endwith %}",
    "{% if u.__class__ %}a{% endif %}{{ u.__class__ }}",
    "{% filter attr('__class__') %}a{% endfilter %}",
    "{% block x %}{{ self.x.__class__ }}{% endblock %}",
    "{% block x %}{{ super.__class__ }}{% endblock %}",
    # filters and tests that take names of attributes
    "{{ '' | attr('__class__') }}",
    "{{ '' | attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ '' | attr('__cla' ~ 'ss__') }}",
    "{{ ['a'] | map(attribute='__class__') | list }}",
    "{{ ['a'] | map('attr', '__class__') | list }}",
    "{{ [['a']] | map(attribute='0.__class__') | list }}",
    "{{ ['a'] | selectattr('__class__') | map(attribute='__class__') | list }}",
    "{{ ['a'] | groupby('__class__') }}",
    "{{ ['a'] | groupby(attribute='__class__.__mro__') | list }}",
    "{{ ['a'] | sort(attribute='__class__.__name__') | map(attribute='__class__') | list }}",
    "{{ ['a'] | unique(attribute='__class__') | map(attribute='__class__') | list }}",
    "{{ ['a'] | sum(attribute='__class__') }}",
    "{{ ['a'] | join(attribute='__class__') }}",
    "{{ ['a'] | max(attribute='__class__.__name__') ~ ''.__class__ }}",
    # format strings
    "{{ '{0.__class__}'.format(u) }}",
    "{{ '{0.__class__.__mro__}'.format(u) }}",
    "{{ '{0[__class__]}'.format(f) }}",
    "{{ '{x.__class__}'.format(x=u) }}",
    "{{ '{x.__class__}'.format_map({'x': u}) }}",
    "{{ '{0.__globals__}'.format(f) }}",
    "{{ '{:{0.__class__}}'.format(u) }}",
    "{{ ('{0.__cl' ~ 'ass__}').format(u) }}",
    "{{ ('{0.__class__}' | string).format(u) }}",
    "{{ ('{0.__class__}' | safe).format(u) }}",
    "{{ ('{0.__class__}' | e).format(u) }}",
    "{{ ['{0.__class__}'.format][0](u) }}",
    "{{ {'a': '{0.__class__}'.format}.a(u) }}",
    "{% set a = '{0.__class__}'.format %}{{ a(u) }}",
    "{{ '{0.__class__}'['format'](u) }}",
    "{{ ['{0.__class__}'] | map('format', u) | first }}{{ ''.__class__ }}",
    "{{ ''.__format__('') }}",
    "{{ ''.__mod__(1) }}",
    # statements that load other templates
    "{% import '@S' as a %}{{ a }}",
    "{% from '@S' import a %}{{ a }}",
    "{% include '@S' %}",
    "{% include ['@S', 'a'] %}",
    "{% extends '@S' %}",
    # i18n, do, debug: extensions that are not loaded
    "{% trans %}{{ u.__class__ }}{% endtrans %}",
    "{{ _('a') }}",
    "{{ gettext('a') }}",
    "{% do [].append(1) %}",
    "{% debug %}",
    # changing shared objects
    "{{ [].append(1) }}",
    "{{ {}.update(a=1) }}",
    "{{ {}.setdefault('a', 1) }}",
    "{% set a = [1] %}{{ a.clear() }}{{ a.pop() }}",
]
COSTLY = [  # templates that exceed the time limit are in test_templates.py
    "{{ range(10**9) | list | length }}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%*d' | format(10**9, 1) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ 'x' * 10**10 }}",
    "{{ ('x' * 10**5) * 10**5 }}",
    "{{ [0] * 10**10 }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x' | indent(10**10, true) }}",
    "{{ ('a ' * 60000) | wordwrap(1) | replace('a', 'a' * 60000) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
    "{{ ('\\t' * 60000).expandtabs(10**6) }}",
    "{{ 'ab' | batch(10**10, 'x') | list }}",
    "{{ lipsum(n=10**9) }}",
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


def in_template(text: str) -> dict[str, Any]:
    return {"version": 1, "templates": {**TEMPLATES, "x": text}, "refs": {"key": ["{{x}}"]}}


def in_called_template(text: str) -> dict[str, Any]:
    return {"version": 1, "templates": {**TEMPLATES, "x": text}, "refs": {"key": ["{{x(c='a')}}"]}}


def in_gen(name: str) -> Any:
    def document(text: str) -> dict[str, Any]:
        item = {"key": "{{i}}", "url": "u", "offset": "0", "length": "1", "dimensions": {"i": {"stop": 2}}}
        return {"version": 1, "templates": TEMPLATES, "gen": [{**item, name: text}]}

    return document


PLACES = {"url": in_url, "template": in_template, "called": in_called_template,
          **{name: in_gen(name) for name in ("key", "url", "offset", "length")}}  # fmt: skip


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


def test_the_audit_hook_records_events(watch: Watch, tmp_path: Path) -> None:
    """Without events, an empty record in test_escapes would prove nothing."""
    secret = tmp_path / "secret"
    secret.touch()
    watch.secret, watch.seen, watch.on = str(secret), [], True
    try:
        secret.read_text()
        import subprocess

        subprocess.run(["true"], check=True)
    finally:
        watch.on = False
    assert {event for event, _ in watch.seen} >= {"open", "subprocess.Popen"}
    assert outcome(in_url("http://{{t}}"), tmp_path) == ["key", "{'url': 'http://server/path/t'}"]
