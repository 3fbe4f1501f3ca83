"""The templates of reference sets: jinja2 in a sandbox, and the expansion of `gen`.

Source: the fsspec reference set specification, version 1 ("jinja-str", "templates", "gen"). A document may come from
anywhere, so its templates can access nothing but each other, and Budget bounds their cost.
"""

from __future__ import annotations

import contextlib
import itertools
import keyword
import math
import re
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from zarrfs.references.gen import RENDERED_MAX, Gen, RenderedBatch, TemplateError, names_in

CPU_SECONDS = 2.0  # processor time of a document,
SECONDS_EACH = 0.005  # more for every text,
SECONDS_A_ROW = 0.00005  # and for every combination of a gen: about ten times the usual time
MEMORY = 256 << 20  # bytes of address space, in addition to those in use when rendering starts

_CHUNK = 512  # rows rendered each time the limits are set
_BLOCK = 1 << 16  # rows evaluated together
_FEW = 10_000  # rows of a gen; with more, numpy is imported to evaluate them together
_SHOWN = 200  # characters of a reason given by jinja2 or Python
_CPU_CLOCK = -8  # Linux's clock of the user and system time of the calling process, counted in ticks

# {{name}} and {{name(a='text', b='text')}}, which are rendered without jinja2, to the same text
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_VALUE = r"[A-Za-z][A-Za-z0-9_]*\s*=\s*'[^'\\\r\n]*'"
_CALL = rf"\(\s*(?:{_VALUE}\s*(?:,\s*{_VALUE}\s*)*)?\)"
_PIECE = re.compile(rf"\{{\{{\s*({_NAME})\s*(?:({_CALL})\s*)?\}}\}}", re.ASCII)
_VALUES = re.compile(r"([A-Za-z][A-Za-z0-9_]*)\s*=\s*'([^']*)'", re.ASCII)
_RESERVED = frozenset((*keyword.kwlist, "true", "false", "none", "self"))


class Budget:
    """A limit on the processor time (`seconds`) and the memory (MEMORY) for rendering the templates of one document.

    Inside `with budget.bounded():` the process's soft limits RLIMIT_CPU and RLIMIT_AS are lowered: SIGXCPU ends a
    process that takes too long, and an allocation beyond the limit raises MemoryError, even inside one operation in C.
    If the limits cannot be set, the block is not bounded.
    """

    def __init__(self, seconds: float = CPU_SECONDS) -> None:
        self.seconds = seconds
        self._inside = False

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """Run the block within the budget, and subtract its time; nested blocks have no effect.

        Raise TemplateError if the time was used up before.
        """
        if self._inside:
            yield
            return
        if self.seconds <= 0:
            raise TemplateError("takes too much time to render")
        start = time.process_time()
        saved: list[tuple[int, tuple[int, int]]] = []
        self._inside = True
        try:
            _lower(resource.RLIMIT_CPU, math.ceil(_limited_time() + self.seconds), saved)
            _lower(resource.RLIMIT_CORE, 0, saved)  # no core dump on SIGXCPU
            _lower(resource.RLIMIT_AS, _address_space() + MEMORY, saved)
            yield
        finally:
            self._inside = False
            for which, limits in reversed(saved):  # memory first: restoring the others may need some
                resource.setrlimit(which, limits)
            self.seconds -= time.process_time() - start


class Templates:
    """The named templates of one reference set, and the sandbox that renders texts with them.

    Every error in the document is raised as TemplateError. In a text, {{f}} is replaced by the template f rendered
    without variables, and {{f(c='text')}} by f rendered with these values.
    """

    def __init__(self, sources: Mapping[str, str], budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self._sources = sources
        self._values: dict[str, object] = {n: s for n, s in sources.items() if "{{" not in s}
        self._codes: dict[str, jinja2.Template] = {}
        self._trees: dict[str, nodes.Template] = {}
        self._active: list[str] = []
        self._environment = _Environment(self)

    def text(self, source: str) -> str:
        """Render `source`, in which no names but those of the templates are defined. Raise TemplateError."""
        try:
            simple = self._substitute(source)
            if simple is not None:
                return simple
            self.budget.seconds += SECONDS_EACH
            with self.budget.bounded():
                return self._render(self._code(self.parse(source)), {})
        except Exception as exc:
            raise TemplateError(_reason(exc)) from None

    def check(self, source: str) -> None:
        """Raise TemplateError if `source` is not a valid template."""
        try:
            self.budget.seconds += SECONDS_EACH
            with self.budget.bounded():
                self._code(self.parse(source))
        except Exception as exc:
            raise TemplateError(_reason(exc)) from None

    def batches(self, gen: Gen) -> Iterator[RenderedBatch]:
        """Yield the rendered fields of all combinations, in order, at most 65536 at a time. Raise TemplateError."""
        self.budget.seconds += gen.count * SECONDS_A_ROW
        done = 0
        fast = [self._rendered_together] if gen.count <= _FEW else [self._evaluated, self._rendered_together]
        for expanded in fast:
            with contextlib.suppress(Exception):
                for batch in expanded(gen, done):
                    done += len(batch.keys)
                    yield batch
                return
        try:  # fall back to field by field, which takes any template and locates errors
            yield from self._rendered_apart(gen, done)
        except TemplateError as exc:
            raise TemplateError(exc.rule, exc.entry or gen.where) from None
        except MemoryError as exc:
            raise TemplateError(_reason(exc), gen.where) from None

    def find(self, name: str) -> object:
        """Return the value of `name` in a text: a str, a callable, or jinja2's `missing` for an unknown name."""
        value = self._values.get(name)
        if value is None:
            if name not in self._sources:
                return missing
            value = self._values[name] = self._resolve(name)
        return value

    def call(self, name: str, values: Mapping[str, Any]) -> str:
        """Render the template `name` with `values` and the other templates."""
        with self.inside(name):
            if name not in self._codes:
                self.budget.seconds += SECONDS_EACH
            try:
                with self.budget.bounded():
                    return self._render(self._compiled(name), values)
            except (TemplateError, MemoryError, RecursionError):
                raise
            except Exception as exc:
                raise TemplateError(f"in template {name}: {_reason(exc)}") from None

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Mark the template `name` as being rendered. Raise TemplateError if it already is."""
        if name in self._active:
            circle = [*self._active[self._active.index(name) :], name]
            raise TemplateError(f"templates use each other in a circle: {' -> '.join(circle)}")
        self._active.append(name)
        try:
            yield
        finally:
            self._active.pop()

    def parse(self, source: str) -> nodes.Template:
        """Parse a template. Raise TemplateError and the errors of jinja2."""
        tree = self._environment.parse(source)
        if any(name.name == "self" for name in tree.find_all(nodes.Name)):
            raise TemplateError("'self' is undefined")  # jinja2 would supply its own object
        return tree

    def callee(self, name: str) -> nodes.Template | None:
        """Return the parsed template that {{name(...)}} renders.

        Return None if `name` is no template, or one without "{{", which cannot be called. Raise any error if the
        template is invalid.
        """
        value = self.find(name)
        if isinstance(value, _Text):
            value = value._template
        if not isinstance(value, _Template):
            return None
        if name not in self._trees:
            self._compiled(name)  # raises for an invalid template
            self._trees[name] = self.parse(self._sources[name])
        return self._trees[name]

    def renderer(self, body: Sequence[nodes.Node]) -> Callable[[Mapping[str, int]], str]:
        """Compile the nodes of a template to a function; every call must pass the same names."""
        tree = nodes.Template(list(body), lineno=1)
        tree.set_environment(self._environment)
        code = self._code(tree)
        if not all(isinstance(node, nodes.Output) for node in body):
            return lambda values: self._render(code, values)
        root, context = code.root_render_func, code.new_context({})  # expressions do not change a context

        def render(values: Mapping[str, int]) -> str:
            context.parent.update(values)
            return _joined(root(context))

        return render

    # -- parts

    def _resolve(self, name: str) -> object:
        """Return the text of a template if it needs no variables, else a callable that fails if used as a text."""
        template = _Template(self, name)
        try:
            text = _Text(self.call(name, {}))
        except TemplateError:
            return template
        text._template = template
        return text

    def _substitute(self, source: str) -> str | None:
        """Render `source` without jinja2 if it holds only text, {{name}} and {{name(a='text')}}; else return None."""
        pieces = _PIECE.split(source)  # text, name, call, text, name, call, ..., text
        if any("{" in text or "\n" in text or "\r" in text for text in pieces[::3]):
            return None  # jinja2 may interpret more of it
        parts = pieces[:1]
        for name, call, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            if name in _RESERVED or name not in self._sources:
                return None
            value = self.find(name)
            if call is not None:
                given = _VALUES.findall(call)
                if isinstance(value, _Text):
                    value = value._template
                if not isinstance(value, _Template) or len(dict(given)) < len(given):
                    return None
                self.budget.seconds += SECONDS_EACH
                value = value(**dict(given))
            parts += str(value), text
        return _joined(parts)

    def _compiled(self, name: str) -> jinja2.Template:
        code = self._codes.get(name)
        if code is None:
            code = self._codes[name] = self._code(self.parse(self._sources[name]))
        return code

    def _code(self, tree: nodes.Template) -> jinja2.Template:
        environment = self._environment
        return environment.template_class.from_code(environment, environment.compile(tree), environment.globals)

    def _render(self, code: jinja2.Template, values: Mapping[str, Any]) -> str:
        return _joined(code.root_render_func(code.new_context(dict(values))))

    def _chunks(self, rows: Iterator[tuple[str, ...]]) -> Iterator[RenderedBatch]:
        """Yield `rows` in batches, generated within the budget. Raise an error after yielding the rows before it."""
        failed: Exception | None = None
        while failed is None:
            chunk: list[tuple[str, ...]] = []
            try:
                with self.budget.bounded():
                    for row in itertools.islice(rows, _CHUNK):
                        chunk.append(row)
            except Exception as exc:
                failed = exc
            if chunk:
                keys, urls, *numbers = map(list, zip(*chunk, strict=True))
                offsets, lengths = numbers or (None, None)
                yield RenderedBatch(keys, urls, offsets, lengths)
            elif failed is None:
                return
        raise failed

    def _evaluated(self, gen: Gen, done: int) -> Iterator[RenderedBatch]:
        """Yield batches evaluated with numpy. Raise an error if the combinations must be rendered one by one."""
        from zarrfs.references.vectors import Expansion, TooLarge  # imports numpy before the limits are set

        with self.budget.bounded():
            expansion = Expansion(self, gen)
        rows = _BLOCK
        while done < gen.count:
            try:
                with self.budget.bounded():
                    batch = expansion.batch(gen.block(done, rows))
            except TooLarge:
                if rows <= _CHUNK:
                    raise
                rows //= 2
            else:
                done += len(batch.keys)
                yield batch

    def _rendered_together(self, gen: Gen, done: int) -> Iterator[RenderedBatch]:
        return self._chunks(self._rows_together(gen, done))

    def _rendered_apart(self, gen: Gen, done: int) -> Iterator[RenderedBatch]:
        return self._chunks(self._rows_apart(gen, done))

    def _rows_together(self, gen: Gen, start: int) -> Iterator[tuple[str, ...]]:
        """Yield rows from one compiled template for all fields. Raise an error for statements and non-ASCII names."""
        outputs: list[nodes.Node] = []
        for source in gen.fields.values():
            body = self.parse(source).body
            if not source.isascii() and any(not name.isascii() for name in names_in(body)):
                raise TemplateError("holds a name that may become another's in the compiled template")
            if not all(isinstance(node, nodes.Output) for node in body):
                raise TemplateError("holds a statement")
            pieces = [piece for node in body for piece in cast(nodes.Output, node).nodes]
            outputs.append(nodes.Output([nodes.Concat(pieces)], lineno=1))
        tree = nodes.Template(outputs, lineno=1)
        tree.set_environment(self._environment)
        code = self._code(tree)
        root, context = code.root_render_func, code.new_context(gen.combination(0) if gen.count else {})
        values = context.parent  # the values of names, changed for each row: one context is used for all
        name, last = next(reversed(gen.dimensions.items()))
        size = len(last) if gen.count else 1
        for number in range(start - start % size, gen.count, size):
            values.update(gen.combination(number))
            for value in last[max(0, start - number) :]:
                values[name] = value
                row = tuple(root(context))
                if max(map(len, row)) > RENDERED_MAX:
                    raise TemplateError("too long")
                yield row

    def _rows_apart(self, gen: Gen, start: int) -> Iterator[tuple[str, ...]]:
        """Yield rows from `start` on, field by field; a TemplateError names the field and the combination."""
        at, values = "", {}
        try:
            codes = {}
            for at, source in gen.fields.items():
                codes[at] = self._code(self.parse(source))
            for number in range(start, gen.count):
                values = gen.combination(number)
                row = []
                for at, code in codes.items():  # noqa: B007  (read below)
                    row.append(self._render(code, values))
                yield tuple(row)
        except Exception as exc:
            where = f" ({', '.join(f'{name}={values[name]}' for name in gen.dimensions)})" if values else ""
            raise TemplateError(_reason(exc) + where, f"{gen.where}.{at}") from None


# -- the sandbox


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2 without globals and loaders, and without the filters that access attributes or randomness."""

    def __init__(self, named: Templates) -> None:
        super().__init__(undefined=_Undefined, cache_size=0)
        self.named = named
        self.context_class = _Context
        self.globals.clear()
        for name in ("attr", "random"):
            del self.filters[name]


class _Undefined(jinja2.StrictUndefined):
    """The value of an undefined name. Using it is an error, even if only a list that contains it is printed."""

    __repr__ = jinja2.StrictUndefined._fail_with_undefined_error


class _Context(Context):
    """A context that looks up a name in the values passed, then in the named templates, resolved on first use."""

    def resolve_or_missing(self, key: str) -> Any:
        if key in self.vars:
            return self.vars[key]
        if key in self.parent:
            return self.parent[key]
        return cast(_Environment, self.environment).named.find(key)


class _Template:
    """A named template as a value in other templates, which can call it with named values.

    All attributes are private, because the sandbox denies access to private attributes.
    """

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Templates, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, /, *args: object, **values: object) -> str:
        if args:
            raise TemplateError(f"template {self._name} takes named values only, such as c='text'")
        return self._owner.call(self._name, values)

    def __str__(self) -> str:
        return self()

    __repr__ = __str__


class _Text(str):
    """The text of a template that needs no variables. It can also be called, as a _Template."""

    _template: _Template

    def __call__(self, /, *args: object, **values: object) -> str:
        return self._template(*args, **values)


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


# -- limits of the process


def _lower(which: int, soft: int, saved: list[tuple[int, tuple[int, int]]]) -> None:
    """Lower a soft limit to `soft` and append its old value to `saved`; do nothing if it cannot be set."""
    with contextlib.suppress(ValueError, OSError):
        old, hard = resource.getrlimit(which)
        bounds = [soft, *(limit for limit in (old, hard) if limit != resource.RLIM_INFINITY)]
        resource.setrlimit(which, (min(bounds), hard))
        saved.append((which, (old, hard)))


def _limited_time() -> float:
    """Return the seconds on the clock of RLIMIT_CPU.

    It counts ticks, so it drifts from process_time() by seconds.
    """
    try:
        return time.clock_gettime(_CPU_CLOCK)
    except OSError:
        return time.process_time()


def _address_space() -> int:
    """Return the bytes of address space in use now; 1 << 62, which is no limit in effect, if that is unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 1 << 62
