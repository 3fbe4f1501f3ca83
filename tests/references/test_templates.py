"""Templates of reference sets: rendering, the sandbox, and limits on memory, output and time."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.references.gens import gen, rows
from tests.references.referencesets import Plain
from zarrfs import sources
from zarrfs.config.options import Options
from zarrfs.errors import SourceError
from zarrfs.references.gen import TemplateError
from zarrfs.references.templates import Templates

NAMED = {"u": "server/path", "f": "<{{c}}>", "t": "{{u}}/t", "g": "{{f(c=a)}}{{ b | default('-') }}"}


def render(text: str, **named: str) -> str:
    return Templates({**NAMED, **named}).text(text)


def refused(text: str, **named: str) -> str:
    """Render `text`, which must be refused, and return the rule of the error."""
    with pytest.raises(TemplateError) as caught:
        render(text, **named)
    assert "\n" not in caught.value.rule
    return caught.value.rule


# -- rendering


def test_a_template_without_double_braces_is_literal() -> None:
    assert render("{{a}}|{{b}}", a="{% x %}\n", b="{# y #}") == "{% x %}\n|{# y #}"


def test_passed_names_hide_templates_within_one_call() -> None:
    named = {"a": "{{b}}{{c}}", "b": "b", "c": "[{{b}}]"}
    assert render("{{a(b='B')}}", **named) == "B[b]"


def test_a_circle_of_templates_is_an_error_if_it_is_used() -> None:
    circle = {"a": "{{b}}", "b": "{{c}}", "c": "{{b}}"}
    assert refused("{{a}}", **circle) == "nested too deeply"
    assert render("{{u}}", **circle) == "server/path"  # the text does not use the circle


def test_deep_chains_are_an_error_not_a_crash() -> None:
    chain = {f"c{number}": f"{{{{c{number + 1}}}}}" for number in range(3000)}
    assert refused("{{c0}}", **chain, c3000="end") == "nested too deeply"
    assert render("{{c2990}}", **chain, c3000="end") == "end"
    assert refused("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}") == "nested too deeply"
    assert refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}") == "nested too deeply"


# -- compared with plain jinja2


def outcome(function: Any, *arguments: object, **more: object) -> str | None:
    """Return the result of `function`; None for any error."""
    try:
        return str(function(*arguments, **more))
    except Exception:
        return None


PIECES = st.one_of(
    st.text(max_size=5),
    st.text(alphabet="{}%#'\"() uf\n\r=", max_size=8),
    st.sampled_from(
        [
            "{{u}}", "{{ t }}", "{{f(c='x')}}", "{{ f ( c = 'a b' ) }}", "{{f(c='{{u}}')}}",
            "{{f(c='x',c='y')}}", "{{f(d='x')}}", "{{f()}}", "{{u()}}", "{{t()}}", "{{t(u='v')}}",
            "{{f}}", "{{in}}", "{{true}}", "{{none}}", "{{self}}", "{{ u|upper }}", "{{-u-}}", "{{u}}}",
            "{{{u}}}", "{{f(c='\\'')}}", "{{\nu\n}}", "{% set u = 'z' %}", "{% if u %}", "{% endif %}",
            "{% raw %}", "{% endraw %}", "{#", "#}", "}}", "\n", "{{not}}", "{{f(c='a\nb')}}",
            "{{f(c='a\\nb')}}", "{{f(true='x', c='y')}}", "{{f('x')}}", "{{f(c=f(c=u))}}", "{{t ~ u.nope}}",
            "{{ '%03d' | format(7) }}", "{% for a in 'xy' %}{{f(c=a)}}{% endfor %}", "{{ nope | default('d') }}",
        ]
    ),
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(st.lists(PIECES, max_size=5).map("".join))
@example("{% set f = 1 %}{{f}}")
@example("{{true}}")
@example("{{f(c='x',c='y')}}")
@example("{{u}}\r\n{{u}}\n")
def test_texts_render_as_plain_jinja_renders_them(text: str) -> None:
    named = {"u": "U", "f": "<{{c}}>", "t": "{{u}}/t", "in": "I", "true": "T", "none": "N", "not": "X"}
    if "self" in text:  # an object of jinja2, which zarrfs does not define
        return
    expected = outcome(Plain(named).render, text) if "{{" in text else text
    if "{{" in text:
        assert outcome(Templates(named).text, text) == expected


# -- the sandbox: escapes are in test_templates_escapes


def test_no_global_name_of_jinja_is_defined() -> None:
    for name in ("range", "dict", "lipsum", "cycler", "joiner", "namespace", "self", "caller"):
        for text in (name, f"{name}(3)"):
            assert refused(f"{{{{ {text} }}}}") == f"'{name}' is undefined"
    assert refused("{{ [nope] }}") == "'nope' is undefined"  # also where jinja2 would print it


# -- limits on memory, output and time


@pytest.fixture
def limits() -> Any:
    """Yield a function that tells whether the resource limits are unchanged; check this after the test, too."""

    def state() -> tuple[object, ...]:
        return resource.getrlimit(resource.RLIMIT_AS), signal.getitimer(signal.ITIMER_PROF)

    before = state()
    yield lambda: state() == before
    assert state() == before


def test_memory_in_gen_is_bounded_and_the_error_names_the_place(limits: Any) -> None:
    item = {"key": "{{i}}", "url": "{{ 'x' * 10 ** (5 * i) }}", "dimensions": {"i": [0, 2]}}
    with pytest.raises(TemplateError) as caught:
        rows(item)
    assert (caught.value.entry, caught.value.rule) == ("gen[0].url", "takes too much memory to render (i=2)")


def test_output_is_bounded() -> None:
    assert refused("{{ 'x' * 70000 }}") == "renders to more than 65536 characters"
    assert len(render("{{ 'x' * 65536 }}")) == 65536
    laughs = {f"l{n}": f"{{{{l{n + 1}}}}}" * 10 for n in range(9)} | {"l9": "ha"}
    assert "more than 65536 characters" in refused("{{l0}}", **laughs)
    with pytest.raises(TemplateError) as caught:
        rows({"key": "k", "url": "{{ 'x' * 70000 }}", "dimensions": {"i": [5]}})
    assert caught.value.entry == "gen[0].url"


def test_all_rendering_shares_one_time_budget(tmp_path: Path) -> None:
    text = "{% for a in 'x' * 2000000 %}{% endfor %}{{ 1 }}"  # takes far less than the limit
    refs = {str(number): [f"{text}{number}"] for number in range(200)}
    path = tmp_path / "set.json"
    path.write_text(json.dumps({"version": 1, "templates": {"u": "x"}, "refs": refs}))
    with pytest.raises(SourceError, match="its templates take too much time to render"):
        sources.plan_source(str(path), Options())


def test_no_limit_is_in_force_between_rows(limits: Any) -> None:
    item = {"key": "{{i}}", "url": "u", "dimensions": {"i": {"stop": 2000}}}
    for number, row in enumerate(Templates({}).rows(gen(item))):
        assert row == (str(number), "u")
        assert number % 500 or limits()
