"""gen evaluated over whole dimensions: the same rows and errors as rendering row by row."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.references.gens import gen, rows, rows_of
from zarrfs.references import templates as module
from zarrfs.references import vectors
from zarrfs.references.gen import Gen, TemplateError
from zarrfs.references.templates import Budget, Templates

NAMED = {
    "u": "U/p", "n": "40", "p": "%03d", "b": "{:>4}|", "f": "<{{c}}>", "g": "{{f(c=a)}}{{ b | default('-') }}",
    "t": "{{u}}/t", "h": "{{ '%05d' | format(c) }}{{ c + 1 }}\n", "w": "{% if c %}{{c}}{% endif %}",
    "s": "{{u}}{{c}}", "o": "{{o}}", "e": "{{i}}", "q": "{{ q(c=c) }}", "v": "{{ f(c=1) }}",
    "m": "{{c" + "()" * 201 + "}}",
    **{f"d{at}": f"{{{{d{at + 1}(c=c)}}}}" for at in range(150)}, "d150": "{{c}}",
}  # fmt: skip
Outcome = tuple[list[tuple[str, ...]], tuple[str, str | None] | None]


@pytest.fixture(autouse=True)
def _never_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate items with numpy however few rows they have."""
    monkeypatch.setattr(module, "_FEW", 0)


@contextmanager
def sizes(**changes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(vectors if hasattr(vectors, name) else module, name, value)
        yield


def collected(iterator: Iterator[tuple[str, ...]]) -> Outcome:
    """Return the rows, and the (rule, entry) of the error that follows them, or None."""
    found = []
    try:
        for row in iterator:
            found.append(row)
    except TemplateError as exc:
        return found, (exc.rule, exc.entry)
    return found, None


def rendered(item: Gen) -> Outcome:
    """Return the rows and the error of the model, which renders every row separately with jinja2."""
    named = Templates(NAMED, Budget(seconds=100))

    def limited() -> Iterator[tuple[str, ...]]:
        rows_apart = named._rows_apart(item, 0)
        for _ in range(item.count + 1):
            with named.budget.bounded():
                row = next(rows_apart, None)
            if row is not None:
                yield row

    return collected(limited())


def expanded(item: Gen) -> Outcome:
    return collected(rows_of(Templates(NAMED, Budget(seconds=100)), item))


def without_rendering(text: str, dimensions: dict[str, Any], field: str = "key") -> Any:
    """Return the values of `text` in `field`; fail if jinja2 renders any of them."""
    item = {"key": "k", "url": "u", "offset": "0", "length": "0", "dimensions": dimensions, field: text}
    read = gen(item, tuple(NAMED))

    def never(*_arguments: object) -> None:
        raise AssertionError("rendered")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (vectors._Rendering, "text"), (Templates, "_rows_together"), (Templates, "_rows_apart"):
            patch.setattr(owner, name, never)
        (batch,) = Templates(NAMED).batches(read)
    return getattr(batch, field + "s")


# -- evaluated and rendered expressions

DIMENSIONS = {"i": [2, -7, 0, 2**40], "j": {"start": 5, "stop": -9, "step": -3}, "k": {"stop": 2}}
EVALUATED = [
    "plain", "v/{{i}}.{{j}}.{{k}}", "{{k}}{{i}}", "{{ (i + 1) * 10 - j }}", "{{ i // 3 }} {{ -i % 7 }} {{ +i }}",
    "{{ 1 + 2 }}{{ 'a' 'b' }}", "{{ j // -4 }} {{ j % -4 }}", "{{ i ** 1 }}{{ k ** 63 }}{{ j ** 0 }}",
    "{{ i / 4 }}", "{{ (j / 4) | int }}",
    "{{ '%04d' | format(i) }}", "{{ '%-6d|%+d|% d|%x' | format(i, j, j, i) }}", "{{ '%03d' % i }}",
    "{{ '%5s' % u }}{{ '%s' % i }}", "{{ '%.3f' % i }}{{ '%d' % (i / 4) }}", "{{ 'no%%' | format }}",
    "{{ '{:03d}'.format(i) }}", "{{ '{1:>5}{0:,}{1}'.format(i, u) }}", "{{ '{a:x<9}{{{}}}'.format(i, a=j) }}",
    "{{ b.format(j) }}{{ p % i }}", "{{ i ~ '.' ~ j }}", "{{ u + '/' + t }}", "{{ f(c=i) }}{{ f(c=u) }}{{t()}}",
    "{{ h(c=k) }}", "{{ s(c=j, u=i) }}", "{{ (n | int) * i }}",
    "{{ ('%02d' | format(k)) | int }}", "{{ i | string }}{{ i | int }}",
    "{# c #}{%- raw %} {{ {% endraw %}\n{{i -}}  \n",
]  # fmt: skip


@pytest.mark.parametrize("text", EVALUATED)
def test_common_forms_are_evaluated_to_what_jinja_renders(text: str) -> None:
    item = gen({"key": text, "url": "u", "dimensions": DIMENSIONS}, tuple(NAMED))
    expected, error = rendered(item)
    assert error is None
    assert without_rendering(text, DIMENSIONS) == [key for key, _url in expected]


RENDERED = [
    "{{ '{!r}'.format(u) }}", "{{ '%c' % 65 }}", "{{ [i, j] | max }}", "{{ 'a' if j > 0 else nope | default('b') }}",
    "{{ w(c=j) }}", "{{ i * true }}{{ 1.5 }}", "{{ '%(a)s' | format(a=i) }}", "{{ i | int(5) }}", "{{ 'x' * k }}",
    "{{ (i,) }}", "{% set x = i %}{{ x }}", "{% for i in [1, 2] %}{{i}}{{loop.index}}{% endfor %}",
    "{{ x | default('d') }}{% set x = i %}", "{{ f(c=[i, j]) }}", "{{ '{:{}}'.format(i, 5) }}", "{{ f(**{'c': i}) }}",
    "{{ i * 2**60 * 2**60 }}", "{{ '1e300' | int }}", "{{ u | int(5) }}",
    "".join(f"{{{{ i | abs + {at} }}}}" for at in range(12)),
]  # fmt: skip


@pytest.mark.parametrize("text", RENDERED)
def test_other_forms_are_rendered(text: str) -> None:
    item = gen({"key": text, "url": "{{i}}", "dimensions": DIMENSIONS}, tuple(NAMED))
    found, error = expanded(item)
    assert error is None
    assert (found, error) == rendered(item)
    with pytest.raises(AssertionError, match="rendered"):
        without_rendering(text, DIMENSIONS)


@pytest.mark.parametrize("text", ["{{ (j * 100 + k) * 40000 + 4096 }}", "40000", "{{i}}{{k}}", "{{ -1 }}", "{{ n }}"])
def test_whole_numbers_are_ints(text: str) -> None:
    numbers = without_rendering(text, {**DIMENSIONS, "i": [1, 2]}, "offset")
    assert {type(number) for number in numbers} == {int}
    texts = rows({"key": text, "url": "u", "dimensions": {**DIMENSIONS, "i": [1, 2]}}, n="40")
    assert list(map(str, numbers)) == [row[0] for row in texts]


@pytest.mark.parametrize("text", ["007", "-0", "+1", " {{i}}", "{{ i / 2 }}", "1_0", "٣", "9" * 19, "", "{{ true }}"])
def test_texts_other_than_plain_64_bit_numbers_stay_text(text: str) -> None:
    item = gen({"key": "k", "url": "u", "offset": text, "length": text, "dimensions": {"i": [1, 2]}})
    (batch,) = Templates({}).batches(item)
    assert (batch.offsets, batch.lengths) == ([row[2] for row in rendered(item)[0]],) * 2
    assert {type(number) for number in batch.offsets or ()} == {str}


def test_an_item_without_offsets_has_none() -> None:
    (batch,) = Templates({}).batches(gen({"key": "{{i}}", "url": "u", "dimensions": {"i": [1, 2]}}))
    assert batch == (["1", "2"], ["u", "u"], None, None)


def test_equal_texts_are_one_object() -> None:
    urls = without_rendering("{{u}}{{i}}", {"i": [1, 2], "j": {"stop": 100}}, "url")
    assert len(urls) == 200
    assert len({id(url) for url in urls}) == 2


def test_an_expression_is_rendered_once_per_value_of_the_dimensions_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, int]] = []
    real = Templates.renderer

    def counted(self: Templates, body: Any) -> Any:
        render = real(self, body)
        return lambda values: calls.append(values) or render(values)

    monkeypatch.setattr(Templates, "renderer", counted)
    text = "{{i}}{{ 'a' if j else 'b' }}{{k}}"
    dimensions = {"i": {"stop": 50}, "j": [0, 1], "k": {"stop": 50}}
    item = gen({"key": text, "url": "{% if true %}{{u}}{% endif %}", "dimensions": dimensions}, tuple(NAMED))
    assert expanded(item) == rendered(item)
    assert calls == [{"j": 0}, {"j": 1}, {}]


def test_batches_are_bounded_and_complete() -> None:
    for dimensions in {"i": {"stop": 150_000}}, {"a": {"stop": 3}, "i": {"stop": 300}, "j": {"stop": 300}}:
        key = ".".join(f"{{{{{name}}}}}" for name in dimensions)
        item = gen({"key": key, "url": "u", "dimensions": dimensions})
        batches = list(Templates({}).batches(item))
        assert max(len(batch.keys) for batch in batches) <= 65536
        assert len(batches) < 8
        keys = [key for batch in batches for key in batch.keys]
        assert len(keys) == len(set(keys)) == item.count


def test_a_small_item_needs_no_numpy() -> None:
    code = (
        "import sys\nfrom zarrfs.references.gen import read_gen\nfrom zarrfs.references.templates import Templates\n"
        "item = {'key': '{{i}}', 'url': 'u', 'dimensions': {'i': {'stop': %d}}}\n"
        "batches = list(Templates({}).batches(read_gen([item], (), 10**6)[0]))\n"
        "assert sum(len(batch.keys) for batch in batches) == %d\nassert ('numpy' in sys.modules) == %s\n"
    )
    for count, numpy in (10_000, False), (10_001, True):
        subprocess.run([sys.executable, "-c", code % (count, count, numpy)], check=True)


# -- errors

BAD = [
    "{{nope}}", "{{ 6 // i }}", "{{ 6 / i }}", "{{ 6 % i }}", "{{ i + 'x' }}", "{{ 'x' + i }}", "{{ -u }}", "{{e}}",
    "{{o}}", "{{ 10 ** 5000 }}",
    "{{ f() }}", "{{ f(d=i) }}", "{{ f('x') }}", "{{ u(c=i) }}", "{{ i(c=1) }}", "{{ '%d' % u }}", "{{ '%d%d' % i }}",
    "{{ 'x' % i }}", "{{ '%d' | format }}", "{{ '{:d}'.format(u) }}", "{{ '{}{}'.format(i) }}", "{{ '{'.format(i) }}",
    "{{ '{0}{}'.format(i, i) }}", "{{ '%c' % (i - 5) }}", "{{ i.format(1) }}", "{{ '%1000000000d' % i }}",
    "{{ '{:1000000000d}'.format(i) }}", "{{ 'x' * 10**10 }}", "{{ '%40000d' | format(i) }}{{ '%40000d' | format(i) }}",
    "{{self}}", "{{", "{{ i | nope }}", "{{ f(c=i, c=i) }}", "{{ i ** -1 if i else nope }}",
    "{{ '%999d' | format(i) }}" * 66, "{{" + "f(c=" * 100 + "i" + ")" * 100 + "}}", "{{d0(c=i)}}", "{{ q(c=i) }}",
    "{{ e(c=1) }}", "{{ '%d%' | format(i) }}", "{{ '%5' % i }}", "{{ v(f=i) }}",
]  # fmt: skip


@pytest.mark.parametrize("field", ["key", "url", "offset", "length"])
@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_errors_are_those_of_rendering(text: str, field: str) -> None:
    item = {"key": "{{j}}", "url": "u", "offset": "1", "length": "1", field: text}
    read = gen({**item, "dimensions": {"j": {"stop": 70}, "i": [1, 0]}}, tuple(NAMED))
    with sizes(_BLOCK=50):
        found, error = expanded(read)
    assert error is not None
    assert (found, error) == rendered(read)


@pytest.mark.parametrize("text", ["{{i" + "()" * 201 + "}}", "{{ m(c=i) }}"], ids=["field", "template"])
def test_a_template_that_python_cannot_compile_is_an_error(text: str) -> None:
    item = gen({"key": text, "url": "u", "dimensions": {"i": [1, 2]}}, tuple(NAMED))
    found, error = expanded(item)
    assert error is not None
    assert "too many nested parentheses" in error[0]
    assert (found, error) == rendered(item)


@pytest.mark.parametrize("few", [0, 100])
def test_names_that_python_normalises_stay_apart_between_fields(few: int) -> None:
    item = gen({"key": "{{ﬁ}}", "url": "{{fi}}", "dimensions": {"ﬁ": [1, 2], "fi": [3]}})
    with sizes(_FEW=few):
        assert expanded(item) == ([("1", "3"), ("2", "3")], None)


def test_the_rows_before_a_bad_one_come_first() -> None:
    item = gen({"key": "{{i}}", "url": "{{ 7 // (i - 1500) }}", "dimensions": {"i": {"stop": 2000}}})
    with sizes(_BLOCK=1000):
        found, error = expanded(item)
    assert len(found) == 1500
    assert error == ("cannot be rendered: integer division or modulo by zero (i=1500)", "gen[0].url")


# -- limits on memory


@pytest.mark.parametrize(
    "text",
    [
        "{{ '%999d' | format(i) }}" * 60, "{{ 'x' * 60000 ~ i }}", "{{i}}" * 200, "{{ i ~ i }}" * 40,
        "{{ '%900d' % i ~ '%900d' % i ~ '%900d' % i ~ '%900d' % i }}", "{{" + "+".join("i" * 40) + "}}",
        "{{l0(c=i)}}", "{{ 'x' * ([i * 50, 60000] | min) }}",
    ],
)  # fmt: skip
def test_memory_is_bounded(text: str) -> None:
    laughs = {f"l{n}": f"{{{{l{n + 1}(c=c)}}}}" * 4 for n in range(3)} | {"l3": "{{c}}"}
    item = gen({"key": text, "url": text, "dimensions": {"i": {"stop": 10**8}}}, tuple(laughs), limit=10**9)
    tracemalloc.start()
    try:
        with sizes(SIZE_MAX=1 << 20, _CHUNK=20):
            batch = next(Templates(laughs).batches(item))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert [batch.keys[0], batch.urls[-1]] == [
        Templates(laughs)._render(Templates(laughs)._code(Templates(laughs).parse(text)), {"i": i})
        for i in (0, len(batch.keys) - 1)
    ]


def test_an_item_too_large_for_one_block_is_evaluated_in_smaller_ones() -> None:
    text = "{{i}}" * 40
    item = gen({"key": text, "url": "u", "dimensions": {"i": {"stop": 70_000}}})
    with sizes(SIZE_MAX=8 << 20), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Templates, "_rows_together", lambda *_arguments: pytest.fail("rendered"))
        batches = list(Templates({}).batches(item))
    assert len(batches) > 2
    assert [key for batch in batches for key in batch.keys] == [str(i) * 40 for i in range(70_000)]


# -- any template

NUMBERS = st.sampled_from(
    ["0", "1", "2", "7", "10", "40000", *(str(2**power + more) for power in (31, 53, 62, 63) for more in (-1, 0, 1))]
)
LEAVES = st.sampled_from(["i", "j", "k", "i", "j", "k", "(n | int)"]) | NUMBERS
TEXTS = st.sampled_from(["'a'", "''", "u", "t", "n", "'7'", "'-3.5'", "'%d'", "'é'", "b"])
JUNK = st.sampled_from(
    [
        "nope", "true", "none", "1.5", "[i, j]", "(i > 1)", "('a' if i else j)", "(i and j)", "(i | abs)",
        "(i is odd)", "([i, j] | max)", "(nope | default(i))", "w(c=j)", "w", "e", "f", "u(c=1)",
        "(u | upper)", "(u | length)", "('ab' * 3)", "('ab' * i)", "ﬁ", "fi", "u[0]", "(i,)", "{}", "self",
        "f(**{'c': i})", "f(c=i, c=j)", "f(i)",
        "('%c' | format(65))", "(i // 1 | float)", "('%(a)s' | format(a=i))", "'{0.real}'.format(i)", "loop", "t(u=i)",
    ]
)  # fmt: skip
CONVERSION = ["%d", "%03d", "%s", "%-5s", "%%", "x", "/", "%x", "%+.2f", "%5", "%g", "%i", "% d", "%#o", "%.0d"]
CONVERSIONS = st.lists(st.sampled_from(CONVERSION), max_size=3).map("".join)
FIELD = ["{}", "{:03d}", "{0}", "{1:>5}", "x", "{{", "}}", "{:,}", "{:x<6}", "{a}", "{a:.1f}", "{!r}", "{:}", "{:e}"]
FIELDS = st.lists(st.sampled_from([*FIELD, "{:%}", "{:=+7}"]), max_size=3).map("".join)
OPERATORS = ["+", "-", "*", "//", "%", "/"]
Texts = st.SearchStrategy[str]


def wider(inner: Texts) -> Texts:
    """Draw expressions made of `inner` ones, valid or not."""
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from([*OPERATORS, "~"]), inner),
        st.builds("({} ** {})".format, inner, st.sampled_from(["0", "1", "2", "3", "-1"])),
        st.builds("({}{})".format, st.sampled_from("-+"), inner),
        st.builds("({} | {})".format, inner, st.sampled_from(["int", "string", "format", "int(1)"])),
        st.builds("('{}' | format({}))".format, CONVERSIONS, st.lists(inner, max_size=2).map(", ".join)),
        st.builds("('{}' % {})".format, CONVERSIONS, inner),
        st.builds("'{}'.format({}, a={})".format, FIELDS, inner, inner),
        st.builds("{}(c={})".format, st.sampled_from("fhswf"), inner),
        st.builds("g(a={}, b={})".format, inner, inner),
        st.builds("s(c={}, u={})".format, inner, inner),
    )


def arithmetic(inner: Texts) -> Texts:
    return st.builds("({} {} {})".format, inner, st.sampled_from(OPERATORS), inner)


SOUND = st.one_of(  # expressions whose types mostly fit
    LEAVES,
    st.recursive(LEAVES, arithmetic, max_leaves=4),
    st.builds("('%0{}d' | format({}))".format, st.integers(0, 9), LEAVES),
    st.builds("('%d/%s' | format({}, {}))".format, LEAVES, TEXTS),
    st.builds("'{{:{}d}}'.format({})".format, st.integers(1, 9), LEAVES),
    st.builds("f(c={})".format, LEAVES | TEXTS),
    st.builds("({} ~ {})".format, LEAVES, TEXTS),
    st.builds("({} + {})".format, TEXTS, TEXTS),
)
ANY = st.recursive(LEAVES | TEXTS | LEAVES | JUNK, wider, max_leaves=5)
STATEMENTS = ["{# #}", "{% if i %}!{% endif %}", "{% set k = i %}", "{% raw %}{{i}}{% endraw %}", "{{''}}", "{{", "-"]
PIECES = st.one_of(
    *[st.builds("{{{{{}}}}}".format, SOUND)] * 4,
    st.builds("{{{{-{} -}}}}".format, ANY),
    st.sampled_from(["a", "/", ".", " ", "\n", "\r\n", "%", "0"]),
    st.sampled_from(["a", "/", ".", " ", "\n", "\r\n", "%", "0", *STATEMENTS]),
)
TEMPLATES = st.lists(PIECES, max_size=3).map("".join)
BIG = st.sampled_from([2**31, 2**53, 2**62, 2**63 - 2, 2**63, -(2**62), -(2**63), 2**64, 10**30])
DIMENSION = st.one_of(
    st.lists(st.integers(-3, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 99), min_size=2, max_size=4),
    st.lists(st.integers(-3, 9) | BIG, min_size=1, max_size=3),
    st.builds(
        lambda start, count, step: {"start": start, "stop": start + count * step, "step": step},
        st.integers(-9, 99) | BIG,
        st.integers(1, 4),
        st.sampled_from([1, 2, 10, -1, -3, 2**61, 2**63, -(2**62)]),
    ),
)
LIMITS = st.sampled_from(
    [{}, {"_BLOCK": 1}, {"_BLOCK": 5}, {"SIZE_MAX": 3000, "_CHUNK": 2}, {"_CHUNK": 3, "_BLOCK": 20}, {"STEPS_MAX": 5}]
)


@settings(deadline=None, max_examples=200)
@given(
    st.tuples(TEMPLATES, TEMPLATES),
    st.none() | st.tuples(TEMPLATES, TEMPLATES),
    st.lists(DIMENSION, min_size=3, max_size=3),
    st.permutations("ijk"),
    LIMITS,
)
@example(("{{ﬁ}}{{fi}}", "{{ﬁ}}"), None, [[1, 2], [3], [4, 5]], ["ﬁ", "fi", "k"], {})
@example(("{{i}}", "{{ i | nope }}"), None, [[1], [], [3]], "ijk", {})
def test_any_template_is_expanded_to_what_jinja_renders(
    first: tuple[str, str],
    second: tuple[str, str] | None,
    dimensions: list[Any],
    names: Sequence[str],
    limits: dict[str, int],
) -> None:
    texts = dict(zip(("key", "url", "offset", "length"), first + (second or ()), strict=False))
    item = gen({**texts, "dimensions": dict(zip(names, dimensions, strict=True))}, tuple(NAMED))
    with sizes(_FEW=0, **limits):
        assert expanded(item) == rendered(item)


# numbers around the limits of 64 bits and of floats, and around their square roots and quotients
EDGES = [0, 1, 2, 3, 7, 63, 10**9, 2**26 + 1, 2**31, 2**32, 2**53 - 1, 2**53, 2**53 + 1, 2**62 - 1, 2**62, 3 * 2**61]
EDGE = st.sampled_from([*EDGES, 2**63 - 1, 2**63, 2**64, 10**30]).flatmap(lambda edge: st.sampled_from([edge, -edge]))
EDGY = st.lists(EDGE, min_size=1, max_size=3) | st.builds(
    lambda first, last, count: {"start": first, "stop": last, "step": (last - first) // count or 1},
    EDGE, EDGE, st.integers(1, 4),
)  # fmt: skip
FORMS = ["{} + {}", "{} - {}", "{} * {}", "{} // {}", "{} % {}", "{} / {}", "({} / {}) | int", "'%d' % ({} / {})"]


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(FORMS),
    EDGE.map(str) | st.just("j"),
    st.sampled_from(["", "-", "1 * "]),
    EDGY,
    EDGY,
)
@example("{} + {}", "1", "", [2**63 - 1], [0])
@example("{} - {}", "1", "", [-(2**63)], [0])
@example("{} * {}", "j", "", [2**32], [2**31])
@example("{} + {}", "0", "-", [-(2**63)], [0])
@example("{} // {}", "j", "", [-(2**63)], [-1])
@example("{} / {}", "j", "", [2**53 + 1], [3])
@example("{} + 0 * {}", "j", "", {"start": -(2**63), "stop": 2**63, "step": 2**63}, [1])
def test_arithmetic_is_exact(form: str, other: str, sign: str, first: Any, second: Any) -> None:
    text = "{{ " + form.format(f"({sign}i)", other) + " }}"
    item = gen({"key": text, "url": "u", "offset": text, "length": "1", "dimensions": {"i": first, "j": second}})
    if item.count < 100:
        assert expanded(item) == rendered(item)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 30, 62, 63, 64, -1])
@pytest.mark.parametrize("base", [0, 1, -1, 2, -2, 3, 2**31, 2**32, -(2**63)])
def test_powers_are_exact(base: int, exponent: int) -> None:
    item = gen({"key": f"{{{{ i ** {exponent} }}}}", "url": "u", "dimensions": {"i": [base, 1]}})
    assert expanded(item) == rendered(item)
