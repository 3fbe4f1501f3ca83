"""The templates of reference sets: jinja2 in a sandbox, and the expansion of `gen`.

Source: the fsspec reference set specification, version 1 ("jinja-str", "templates", "gen"). A document may come from
anywhere, so its templates can access nothing but each other, and limits of the process bound their cost.
"""

from __future__ import annotations

import contextlib
import itertools
import keyword
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zarrfs.references.gen import RENDERED_MAX, Gen, TemplateError
from zarrfs.system.bounded import limit_memory

CPU_SECONDS = 2.0  # processor time of a document,
SECONDS_EACH = 0.005  # more for every text,
SECONDS_A_ROW = 0.0003  # and for every combination of a gen: about ten times the usual time
MEMORY = 256 << 20  # bytes of address space, in addition to those in use when rendering starts

_CHUNK = 512  # rows rendered each time the limits are set
_SHOWN = 200  # characters of a reason given by jinja2 or Python
_RESERVED = frozenset((*keyword.kwlist, "true", "false", "none", "self"))  # never names of templates
_NAME = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}", re.ASCII)


class Templates:
    """The named templates of one reference set, and the sandbox that renders texts with them.

    Every error in the document is raised as TemplateError. In a text, {{f}} is replaced by the template f rendered
    without variables, and {{f(c='text')}} by f rendered with these values. Rendering that takes too much time ends the
    process by SIGPROF, because an operation in C cannot be interrupted; one that needs too much memory is an error.
    """

    def __init__(self, sources: Mapping[str, str], seconds: float = CPU_SECONDS) -> None:
        self._seconds = seconds  # of processor time that are left
        self._environment = environment = ImmutableSandboxedEnvironment(undefined=_Undefined, cache_size=0)
        environment.globals.clear()
        for name in ("attr", "random"):  # access to attributes, and randomness
            del environment.filters[name]
        self.named: dict[str, object] = {
            name: _Template(self, name, source) if "{{" in source else source for name, source in sources.items()
        }
        self._plain = {name: text for name, text in self.named.items() if isinstance(text, str)}
        for name in _RESERVED & self._plain.keys():
            del self._plain[name]

    def text(self, source: str) -> str:
        """Render `source`, in which no names but those of the templates are defined. Raise TemplateError."""
        pieces = _NAME.split(source)  # text, name, text, name, ..., text
        if all(name in self._plain for name in pieces[1::2]) and not any(
            set("{\r\n") & set(text) for text in pieces[::2]
        ):  # nothing that jinja2 would interpret or change
            pieces[1::2] = [self._plain[name] for name in pieces[1::2]]
            return _joined(pieces)
        try:
            with self._bounded(SECONDS_EACH):
                return self.render(self.compile(source), {})
        except Exception as exc:
            raise TemplateError(_reason(exc)) from None

    def rows(self, gen: Gen) -> Iterator[tuple[str, ...]]:
        """Yield the rendered fields of all combinations, in order.

        Raise TemplateError with the field and the combination at which rendering fails.
        """
        self._seconds += gen.count * SECONDS_A_ROW
        rows = self._rows(gen)
        while True:
            try:
                with self._bounded():
                    chunk = list(itertools.islice(rows, _CHUNK))
            except MemoryError as exc:
                raise TemplateError(_reason(exc), gen.where) from None
            if not chunk:
                return
            yield from chunk

    @contextlib.contextmanager
    def _bounded(self, more: float = 0.0) -> Iterator[None]:
        """Run the block within the limits of memory, and of the time that is left, with `more` seconds added."""
        signal.setitimer(signal.ITIMER_PROF, self._seconds + more)
        limit_memory(MEMORY)
        try:
            yield
        finally:
            limit_memory(None)
            self._seconds = signal.setitimer(signal.ITIMER_PROF, 0)[0]

    def compile(self, source: str) -> jinja2.Template:
        """Compile a template. Raise TemplateError and the errors of jinja2."""
        tree = self._environment.parse(source)
        if any(name.name == "self" for name in tree.find_all(nodes.Name)):
            raise TemplateError("'self' is undefined")  # jinja2 would supply its own object
        code = self._environment.compile(tree)
        return self._environment.template_class.from_code(self._environment, code, self._environment.globals)

    def render(self, code: jinja2.Template, values: Mapping[str, Any]) -> str:
        """Render a template with `values` and the named templates."""
        return _joined(code.root_render_func(code.new_context({**self.named, **values})))

    def _rows(self, gen: Gen) -> Iterator[tuple[str, ...]]:
        at, values = "", {}
        try:
            codes = {}
            for at, source in gen.fields.items():
                codes[at] = self.compile(source)
            for number in range(gen.count):
                values = gen.combination(number)
                row = []
                for at, code in codes.items():  # noqa: B007  (read below)
                    row.append(self.render(code, values))
                yield tuple(row)
        except Exception as exc:
            where = f" ({', '.join(f'{name}={values[name]}' for name in gen.dimensions)})" if values else ""
            raise TemplateError(_reason(exc) + where, f"{gen.where}.{at}") from None


class _Undefined(jinja2.StrictUndefined):
    """The value of an undefined name. Using it is an error, even if only a list that contains it is printed."""

    __repr__ = jinja2.StrictUndefined._fail_with_undefined_error


class _Template:
    """A named template as a value in other templates, which can call it with named values.

    All attributes are private, because the sandbox denies access to private attributes.
    """

    __slots__ = ("_code", "_name", "_owner", "_source")

    def __init__(self, owner: Templates, name: str, source: str) -> None:
        self._owner, self._name, self._source = owner, name, source
        self._code: jinja2.Template | None = None

    def __call__(self, /, *args: object, **values: object) -> str:
        if args:
            raise TemplateError(f"template {self._name} takes named values only, such as c='text'")
        try:
            if self._code is None:
                self._code = self._owner.compile(self._source)
            return self._owner.render(self._code, values)
        except (TemplateError, MemoryError, RecursionError):
            raise
        except Exception as exc:
            raise TemplateError(f"in template {self._name}: {_reason(exc)}") from None

    def __str__(self) -> str:
        return self()

    __repr__ = __str__


def _joined(pieces: Iterable[str]) -> str:
    parts, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > RENDERED_MAX:
            raise TemplateError(f"renders to more than {RENDERED_MAX} characters")
        parts.append(piece)
    return "".join(parts)


def _reason(exc: Exception) -> str:
    """Return one line that says why rendering failed."""
    if isinstance(exc, TemplateError):
        return exc.rule
    if isinstance(exc, MemoryError):
        return "takes too much memory to render"
    if isinstance(exc, RecursionError):
        return "nested too deeply"
    text = " ".join(str(exc).split())[:_SHOWN]
    if isinstance(exc, jinja2.UndefinedError | SecurityError):
        return text
    if isinstance(exc, jinja2.TemplateSyntaxError | SyntaxError):
        return f"not a template: {text}"
    return f"cannot be rendered: {text or type(exc).__name__}"
