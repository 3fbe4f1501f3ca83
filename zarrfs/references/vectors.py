"""Expansion of `gen` over whole dimensions: templates evaluated with numpy, many combinations at a time.

A value is an array with one axis for each dimension that varies in a block of combinations. The axis has length 1 if
the value does not depend on the dimension, so that a text is made once for all combinations that share it; the parts
of a text are concatenated at the end. The evaluator accepts only expressions whose result certainly equals jinja2's:
names, whole numbers within 64 bits, texts, formats, and templates called with such values. The sandbox renders any
other expression, once for each combination of the dimensions that it uses. Source: the jinja2 documentation,
"Template Designer Documentation", Expressions.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
from jinja2 import nodes
from jinja2.filters import do_int
from numpy.typing import NDArray

from zarrfs.references.gen import RENDERED_MAX, Gen, RenderedBatch, names_in

SIZE_MAX = 64 << 20  # approximate bytes of all values of one block
STEPS_MAX = 1000  # nodes evaluated for one field of one block
PARTS_MAX = 50  # of a text before they are concatenated

_RENDERINGS_MAX = 8  # expressions of a field rendered separately; with more, the whole field is rendered
_OBJECT = 64  # bytes of a str without its characters, plus the pointer to it
_INT64 = np.iinfo(np.int64)
_LOWEST, _HIGHEST = int(_INT64.min), int(_INT64.max)
_HALF = 1 << 62  # differences of two numbers below it fit 64 bits
_FLOAT_EXACT = 1 << 53  # 64-bit floats represent whole numbers up to here exactly

# one conversion of '...' % values, without * and (name), and with width and precision below 1000
_CONVERSION = re.compile(r"(%(?:%|[-+ #0]*[0-9]{0,3}(?:\.[0-9]{0,3})?[diouxXsfFeEgG]))", re.ASCII)
# the specification of one field of '...'.format(values), with the same bounds, and not locale-dependent
_FIELD = re.compile(r"(?:[^{}]?[<>=^])?[-+ ]?#?0?[0-9]{0,3}[,_]?(?:\.[0-9]{1,3})?[bdeEfFgGosxX%]?", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
_PLAIN = ("%s", "")  # conversions and specifications equivalent to str(),
_PLAIN_INT = ("%d", "%i")  # and those that are so only for whole numbers
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)


class NotEvaluated(Exception):
    """An expression that the evaluator does not accept; the sandbox has to render it."""


class TooLarge(Exception):
    """A block whose texts would take too much memory; a smaller one may fit."""


class TextPart(NamedTuple):
    """Texts, and the largest length among them (characters)."""

    values: NDArray[np.object_]
    longest: int


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]  # quotients
Text = tuple[TextPart, ...]  # to be concatenated in this order
Value = Ints | Floats | Text


class NamedTemplates(Protocol):
    """The templates of a set, by name, for use in expressions (templates.Templates)."""

    def find(self, name: str) -> object:
        """Return the value of `name`: a text, a callable template, or jinja2's `missing`."""
        ...

    def callee(self, name: str) -> nodes.Template | None:
        """Return the parsed template that a call of `name` renders; None if `name` cannot be called.

        Raise any error if the template is invalid.
        """
        ...

    def inside(self, name: str) -> AbstractContextManager[None]:
        """Enter a template. Raise TemplateError if templates call each other in a circle."""
        ...

    def parse(self, source: str) -> nodes.Template:
        """Parse a template."""
        ...

    def renderer(self, body: Sequence[nodes.Node]) -> Callable[[Mapping[str, int]], str]:
        """Compile nodes to a function from the values of dimensions to a text."""
        ...


class Combinations:
    """A block of combinations: the shape of arrays over its dimensions, and the memory left for them."""

    def __init__(self, block: Mapping[str, Sequence[int]]) -> None:
        self.block = block
        varying = [name for name, values in block.items() if len(values) > 1]
        self.shape = tuple(len(block[name]) for name in varying) or (1,)
        self._axes = {name: axis for axis, name in enumerate(varying)}
        self._ones = (1,) * len(self.shape)
        self._left = SIZE_MAX

    def take(self, count: int, size: int) -> None:
        """Reserve memory for `count` objects of `size` bytes before they are made. Raise TooLarge."""
        self._left -= count * size
        if self._left < 0:
            raise TooLarge

    def shape_over(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the shape of an array that depends only on the dimensions `names`."""
        axes = {self._axes.get(name) for name in names}
        return tuple(size if axis in axes else 1 for axis, size in enumerate(self.shape))

    def dimension(self, name: str) -> Ints:
        """Return the values of a dimension. Raise NotEvaluated beyond 64 bits."""
        values = self.block[name]
        self.take(len(values), 8)
        return _int64(values).reshape(self.shape_over([name]))

    def number(self, value: int) -> Ints:
        """Return a number that is the same for all combinations. Raise NotEvaluated beyond 64 bits."""
        return _int64([value]).reshape(self._ones)

    def constant(self, text: str) -> TextPart:
        """Return a text that is the same for all combinations."""
        return self.part([text], self._ones)

    def part(self, texts: Sequence[str], shape: tuple[int, ...]) -> TextPart:
        """Return `texts`, which are in the order of their combinations, as an array of `shape`."""
        values = np.fromiter(texts, dtype=object, count=len(texts))
        return TextPart(values.reshape(shape), max(map(len, texts)))

    def column(self, values: NDArray[Any]) -> list[Any]:
        """Return one value for each combination; a text that several combinations share is one object."""
        rows: list[Any] = np.broadcast_to(values, self.shape).ravel().tolist()
        return rows


class Evaluator:
    """The evaluator of one field's expressions over one block.

    Raises NotEvaluated, TooLarge, or any other error if the document is faulty; rendering then reports the fault.
    """

    def __init__(self, space: Combinations, templates: NamedTemplates) -> None:
        self._space, self._templates = space, templates
        self._steps = STEPS_MAX

    def value(self, node: nodes.Node, scope: Mapping[str, Value] | None = None) -> Value:
        """Evaluate `node`; names are looked up in `scope` (None: the dimensions), then among the named templates."""
        self._steps -= 1
        if self._steps < 0:
            raise NotEvaluated
        method = _METHODS.get(type(node))
        if method is None:
            raise NotEvaluated
        return method(self, node, scope)

    def text(self, value: Value) -> Text:
        """Return str() of every element."""
        if isinstance(value, tuple):
            return value
        # no number has more than 24 characters
        self._space.take(value.size, _OBJECT + 24)
        return (self._space.part(list(map(str, value.ravel().tolist())), value.shape),)

    def joined(self, values: Iterable[Value]) -> Text:
        """Concatenate the texts of `values`."""
        parts: list[TextPart] = []
        for part in itertools.chain.from_iterable(map(self.text, values)):
            if parts and part.values.size == 1 == parts[-1].values.size:
                parts[-1] = self._added(parts[-1], part)
            else:
                parts.append(part)
        if len(parts) > PARTS_MAX or sum(part.longest for part in parts) > RENDERED_MAX:
            raise NotEvaluated
        return tuple(parts)

    def merged(self, text: Text) -> TextPart:
        """Concatenate the parts of a text to one array, beginning with the smallest concatenation."""
        parts = list(text) or [self._space.constant("")]
        while len(parts) > 1:
            sizes = [math.prod(_broadcast(a.values, b.values)) for a, b in itertools.pairwise(parts)]
            at = sizes.index(min(sizes))
            parts[at : at + 2] = [self._added(parts[at], parts[at + 1])]
        return parts[0]

    def _added(self, left: TextPart, right: TextPart) -> TextPart:
        longest = left.longest + right.longest
        self._space.take(math.prod(_broadcast(left.values, right.values)), _OBJECT + longest)
        return TextPart(np.add(left.values, right.values), longest)

    # -- nodes

    def _const(self, node: nodes.Const, _scope: Mapping[str, Value] | None) -> Value:
        if type(node.value) is int:
            return self._space.number(node.value)
        if type(node.value) is str:
            return (self._space.constant(node.value),)
        raise NotEvaluated

    def _data(self, node: nodes.TemplateData, _scope: Mapping[str, Value] | None) -> Value:
        return (self._space.constant(node.data),)

    def _name(self, node: nodes.Name, scope: Mapping[str, Value] | None) -> Value:
        if scope is None and node.name in self._space.block:
            return self._space.dimension(node.name)
        if scope is not None and node.name in scope:
            return scope[node.name]
        value = self._templates.find(node.name)
        if not isinstance(value, str):
            raise NotEvaluated
        return (self._space.constant(str(value)),)

    def _concat(self, node: nodes.Concat, scope: Mapping[str, Value] | None) -> Value:
        return self.joined([self.value(piece, scope) for piece in node.nodes])

    def _sign(self, node: nodes.UnaryExpr, scope: Mapping[str, Value] | None) -> Value:
        value = self.value(node.node, scope)
        if not _are_ints(value) or int(value.min()) == _LOWEST:
            raise NotEvaluated
        self._space.take(value.size, 8)
        return -value if isinstance(node, nodes.Neg) else value

    def _binary(self, node: nodes.BinExpr, scope: Mapping[str, Value] | None) -> Value:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        if isinstance(left, tuple):
            if isinstance(node, nodes.Mod):
                return self._converted(left, [right])
            if isinstance(node, nodes.Add) and isinstance(right, tuple):
                return self.joined([left, right])
        if not (_are_ints(left) and _are_ints(right) and _exact(node, left, right)):
            raise NotEvaluated
        self._space.take(math.prod(_broadcast(left, right)), 8)
        return _UFUNCS[type(node)](left, right)

    def _filter(self, node: nodes.Filter, scope: Mapping[str, Value] | None) -> Value:
        if node.node is None or node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise NotEvaluated
        if node.name not in ("format", "string", "int") or (node.args and node.name != "format"):
            raise NotEvaluated
        value = self.value(node.node, scope)
        if node.name == "int":
            return self._int(value) if isinstance(value, tuple) else value.astype(np.int64)
        if node.name == "string":
            return self.text(value)
        return self._converted(self.text(value), [self.value(argument, scope) for argument in node.args])

    def _call(self, node: nodes.Call, scope: Mapping[str, Value] | None) -> Value:
        if node.dyn_args or node.dyn_kwargs:
            raise NotEvaluated
        keys = [pair.key for pair in node.kwargs]
        if len(set(keys)) < len(keys) or not all(map(_NAME.fullmatch, keys)):
            raise NotEvaluated  # Python may normalise them to other names
        positional = [self.value(argument, scope) for argument in node.args]
        named = {pair.key: self.value(pair.value, scope) for pair in node.kwargs}
        if isinstance(node.node, nodes.Getattr) and node.node.attr == "format":
            source = self.value(node.node.node, scope)
            if isinstance(source, tuple):
                return self._formatted(source, positional, named)
        elif isinstance(node.node, nodes.Name) and not positional:
            return self._template(node.node.name, named, scope)
        raise NotEvaluated

    # -- templates and formats

    def _template(self, name: str, values: Mapping[str, Value], scope: Mapping[str, Value] | None) -> Text:
        """Evaluate {{name(a=value)}} for a named template."""
        if name in (self._space.block if scope is None else scope):
            raise NotEvaluated
        tree = self._templates.callee(name)
        pieces = None if tree is None else expressions(tree)
        if pieces is None:
            raise NotEvaluated
        with self._templates.inside(name):
            return self.joined([self.value(piece, values) for piece in pieces])

    def _converted(self, source: Text, values: Sequence[Value]) -> Text:
        """Evaluate source % values piece by piece: each conversion takes one value."""
        literals = _CONVERSION.split(self._constant(source))
        conversions, left = literals[1::2], list(values)
        if any("%" in literal for literal in literals[::2]):
            raise NotEvaluated
        if len(left) != sum(conversion != "%%" for conversion in conversions):
            raise NotEvaluated
        made: list[Value] = [(self._space.constant(literals[0]),)]
        for conversion, literal in zip(conversions, literals[2::2], strict=True):
            if conversion == "%%":
                made.append((self._space.constant("%"),))
            else:
                made.append(self._each(conversion, conversion.__mod__, left.pop(0)))
            made.append((self._space.constant(literal),))
        return self.joined(made)

    def _formatted(self, source: Text, positional: Sequence[Value], named: Mapping[str, Value]) -> Text:
        """Evaluate source.format(*positional, **named) piece by piece."""
        values: dict[str, Value] = {**named, **{str(at): value for at, value in enumerate(positional)}}
        fields = list(string.Formatter().parse(self._constant(source)))
        unnumbered = sum(field == "" for _literal, field, _spec, _conversion in fields)
        if unnumbered and any(field and field.isdigit() for _literal, field, _spec, _conversion in fields):
            raise NotEvaluated
        made: list[Value] = []
        numbers = itertools.count()
        for literal, field, spec, conversion in fields:
            made.append((self._space.constant(literal),))
            if field is None:
                continue
            value = values.get(field or str(next(numbers)))
            if value is None or conversion or not _FIELD.fullmatch(spec or ""):
                raise NotEvaluated
            made.append(self._each(spec or "", _format_with(spec or ""), value))
        return self.joined(made)

    def _each(self, spec: str, function: Callable[[Any], str], value: Value) -> Text:
        """Apply `function`, which formats by `spec`, to every element."""
        if spec in _PLAIN or (spec in _PLAIN_INT and _are_ints(value)):
            return self.text(value)
        # approximate bytes of one result: the width and precision of `spec`, and 128 more characters
        bound = _OBJECT + 128 + sum(map(int, re.findall("[0-9]+", spec)))
        if isinstance(value, tuple):
            part = self.merged(value)
            bound += part.longest
            items: NDArray[Any] = part.values
        else:
            items = value
        self._space.take(items.size, bound)
        return (self._space.part(list(map(function, items.ravel().tolist())), items.shape),)

    def _int(self, text: Text) -> Ints:
        part = self.merged(text)
        if part.longest > 18:  # up to 18 digits fit 64 bits
            raise NotEvaluated
        self._space.take(part.values.size, 8 + 32)
        return _int64([do_int(item) for item in part.values.ravel().tolist()]).reshape(part.values.shape)

    def _constant(self, text: Text) -> str:
        if any(part.values.size > 1 for part in text):
            raise NotEvaluated
        constant: str = self.merged(text).values.item()
        return constant


class Expansion:
    """The fields of one item of gen. Raises jinja2's errors, and TemplateError."""

    def __init__(self, templates: NamedTemplates, gen: Gen) -> None:
        self._fields = [
            _Field(templates, source, name in ("offset", "length")) for name, source in gen.fields.items()
        ]

    def batch(self, block: Mapping[str, Sequence[int]]) -> RenderedBatch:
        """Return the rows of all combinations in `block`.

        Raise TooLarge if a smaller block may fit. After any other error, the caller renders the rows instead, which
        reports the fault.
        """
        space = Combinations(block)
        keys, urls, *numbers = (field.column(space) for field in self._fields)
        offsets, lengths = numbers or (None, None)
        return RenderedBatch(keys, urls, offsets, lengths)


class _Field:
    """One field of an item: its expressions, and renderings of those that cannot be evaluated."""

    def __init__(self, templates: NamedTemplates, source: str, is_number: bool) -> None:
        self._templates, self._is_number = templates, is_number
        tree = templates.parse(source)
        self._pieces = expressions(tree)
        self._whole = _Rendering(templates, tree.body)  # an error if Python cannot compile it
        self._renderings: dict[int, _Rendering] = {}

    def column(self, space: Combinations) -> list[Any]:
        evaluator = Evaluator(space, self._templates)
        if self._pieces is not None:
            try:
                return self._finished(self._values(self._pieces, evaluator, space), evaluator, space)
            except NotEvaluated:
                self._pieces = None
        return self._finished([self._whole.text(space)], evaluator, space)

    def _values(self, pieces: list[nodes.Expr], evaluator: Evaluator, space: Combinations) -> list[Value]:
        values: list[Value] = []
        for number, piece in enumerate(pieces):
            rendering = self._renderings.get(number)
            if rendering is None:
                try:
                    values.append(evaluator.value(piece))
                    continue
                except NotEvaluated:
                    if len(self._renderings) == _RENDERINGS_MAX:
                        raise
                rendering = _Rendering(self._templates, [nodes.Output([piece], lineno=1)])
                self._renderings[number] = rendering
            values.append(rendering.text(space))
        return values

    def _finished(self, values: list[Value], evaluator: Evaluator, space: Combinations) -> list[Any]:
        """Concatenate pieces to a column: of ints if the field is numeric and all are whole numbers, else of texts."""
        if self._is_number and len(values) == 1 and _are_ints(values[0]):
            return space.column(values[0])
        part = evaluator.merged(evaluator.joined(values))
        if self._is_number:
            texts = part.values.ravel().tolist()
            if all(map(_NUMBER.fullmatch, texts)):
                return space.column(_int64(list(map(int, texts))).reshape(part.values.shape))
        return space.column(part.values)


class _Rendering:
    """Nodes that the sandbox renders, once for each combination of the dimensions that they use."""

    def __init__(self, templates: NamedTemplates, body: Sequence[nodes.Node]) -> None:
        self._names = names_in(body)
        self._render = templates.renderer(body)

    def text(self, space: Combinations) -> Text:
        used = [name for name in space.block if name in self._names]
        shape = space.shape_over(used)
        texts: list[str] = []
        expected = 0  # assume all are as long as the first, to detect too large a block early
        for combination in itertools.product(*(space.block[name] for name in used)):
            text = self._render(dict(zip(used, combination, strict=True)))
            if not texts:
                expected = len(text)
                space.take(math.prod(shape), _OBJECT + expected)
            elif len(text) > expected:
                space.take(1, len(text) - expected)
            texts.append(text)
        return (space.part(texts, shape),)


def expressions(tree: nodes.Template) -> list[nodes.Expr] | None:
    """Return the texts and expressions that a template outputs, in order; None if it does anything else."""
    if not all(name.isascii() for name in names_in(tree.body)):
        return None  # Python normalises identifiers: two names may be one in the compiled template
    pieces: list[nodes.Expr] = []
    for node in tree.body:
        if not isinstance(node, nodes.Output):
            return None
        pieces += node.nodes
    return pieces


def _int64(values: Sequence[int]) -> Ints:
    first, last = values[0], values[-1]
    if isinstance(values, range) and max(abs(first), abs(last), abs(values.step)) < _HALF:
        return np.arange(len(values), dtype=np.int64) * values.step + first
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise NotEvaluated from None


def _format_with(spec: str) -> Callable[[Any], str]:
    return lambda value: format(value, spec)


def _broadcast(left: NDArray[Any], right: NDArray[Any]) -> tuple[int, ...]:
    return tuple(map(max, left.shape, right.shape))


def _are_ints(value: Value) -> TypeGuard[Ints]:
    return not isinstance(value, tuple) and value.dtype == np.int64


def _exact(node: nodes.BinExpr, left: Ints, right: Ints) -> bool:
    """Return whether numpy's results equal Python's (none overflows), judging by the extremes of the operands."""
    a, b = (int(left.min()), int(left.max())), (int(right.min()), int(right.max()))
    if isinstance(node, nodes.FloorDiv | nodes.Mod):
        return a[0] > _LOWEST and bool((right != 0).all())  # no result is further from 0 than an operand
    if isinstance(node, nodes.Div):
        return max(map(abs, a + b)) <= _FLOAT_EXACT and bool((right != 0).all())
    if isinstance(node, nodes.Pow):
        return right.size == 1 and 0 <= b[0] < 64 and max(map(abs, a)) ** b[0] <= _HIGHEST
    corners = [_EXACT[type(node)](x, y) for x in a for y in b]
    return min(corners) >= _LOWEST and max(corners) <= _HIGHEST


_EXACT: dict[type, Callable[[int, int], int]] = {
    nodes.Add: operator.add, nodes.Sub: operator.sub, nodes.Mul: operator.mul,
}  # fmt: skip
_UFUNCS: dict[type, Callable[[Ints, Ints], Ints | Floats]] = {
    nodes.Add: np.add, nodes.Sub: np.subtract, nodes.Mul: np.multiply,
    nodes.FloorDiv: np.floor_divide, nodes.Mod: np.remainder, nodes.Pow: np.power, nodes.Div: np.true_divide,
}  # fmt: skip
_METHODS: dict[type, Callable[[Evaluator, Any, Mapping[str, Value] | None], Value]] = {
    nodes.Const: Evaluator._const, nodes.TemplateData: Evaluator._data, nodes.Name: Evaluator._name,
    nodes.Concat: Evaluator._concat, nodes.Filter: Evaluator._filter, nodes.Call: Evaluator._call,
    nodes.Neg: Evaluator._sign, nodes.Pos: Evaluator._sign,
    **dict.fromkeys(_UFUNCS, Evaluator._binary),
}  # fmt: skip
