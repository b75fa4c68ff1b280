"""Programs as sequences of operators on whole tensors with named axes, and what those compute (Mirage's kernel graphs).

    operator = Input(read) | Map(function, a) | Join(operation, a, b) | Reduce(reducer, axes, a) | Contract(axes, a, b)

An operand is the number of an operator. A tensor has the axes of its operands, less those that it is reduced over; in a
join, each operand stretches along the axes that only the other one has. A `Contract` is the sum of a product, as one operator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, assert_never

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64, Array
from pallasfuse.ir.expr import (
    Apply,
    Const,
    Expr,
    Read,
    apply,
    const,
    convert,
    postorder,
    read,
    rebuild,
    substitute,
)
from pallasfuse.ir.loop_program import LoopProgram, Nest, verify
from pallasfuse.ir.reducers import SUM, Reducer
from pallasfuse.search.abstract import Abstraction, Polynomial, Tensor, TooLongError, atom

WIDE = "float64"
"""The type in which functions are written: numbers are real."""
HOLE = read("operand", (), WIDE)
"""The operand of a function."""
COMMUTATIVE = frozenset({"add", "mul", "max", "min"})


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the program, read along some axes."""

    read: Read


@dataclass(frozen=True, slots=True)
class Map:
    """A function of every element, in which `HOLE` stands for it."""

    function: Expr
    operand: int


@dataclass(frozen=True, slots=True)
class Join:
    """A scalar operation on the elements of two tensors; the operands of a commutative one are sorted."""

    operation: str
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """A tensor folded over axes."""

    reducer: Reducer
    axes: frozenset[Axis]
    operand: int


@dataclass(frozen=True, slots=True)
class Contract:
    """The sum, over axes that both have, of the product of two tensors."""

    axes: frozenset[Axis]
    left: int
    right: int


type Operator = Input | Map | Join | Reduce | Contract


def operands(operator: Operator) -> tuple[int, ...]:
    """The numbers of what an operator reads."""
    match operator:
        case Map(_, operand) | Reduce(_, _, operand):
            return (operand,)
        case Join(_, left, right) | Contract(_, left, right):
            return left, right
    return ()


@dataclass
class Operators:
    """A table of operators: equal ones have one number, operands have smaller numbers than what reads them."""

    axes_of_program: tuple[Axis, ...]
    rows: list[Operator] = field(default_factory=list)
    axes: list[frozenset[Axis]] = field(default_factory=list)
    _numbers: dict[Operator, int] = field(default_factory=dict)
    _arrays: dict[int, Array] = field(default_factory=dict)
    _drawn: dict[Read, Array] = field(default_factory=dict)

    def number(self, operator: Operator) -> int:
        """The number of an operator, which is added to the table if it is new."""
        commutes = isinstance(operator, Contract) or (isinstance(operator, Join) and operator.operation in COMMUTATIVE)
        if commutes and isinstance(operator, Join | Contract) and operator.left > operator.right:
            operator = replace(operator, left=operator.right, right=operator.left)
        known = self._numbers.get(operator)
        if known is None:
            known = self._numbers[operator] = len(self.rows)
            self.rows.append(operator)
            self.axes.append(self._axes_of(operator))
        return known

    def _axes_of(self, operator: Operator) -> frozenset[Axis]:
        own = frozenset[Axis]().union(*(self.axes[n] for n in operands(operator)))
        match operator:
            case Input(of):
                return of.axes
            case Reduce(_, axes, _) | Contract(axes, _, _):
                return own - axes
        return own

    def behind(self, number: int) -> tuple[int, ...]:
        """An operator and all that it is computed from, inputs too, in the order of their numbers."""
        found, waiting = {number}, [number]
        while waiting:
            new = set(operands(self.rows[waiting.pop()])) - found
            found |= new
            waiting += new
        return tuple(sorted(found))

    def expanded(self, number: int) -> int:
        """The number of the same form without contractions: reductions of products. Two ways to write one form have one number."""
        match self.rows[number]:
            case Map(function, operand):
                return self.number(Map(function, self.expanded(operand)))
            case Reduce(reducer, axes, operand):
                return self.number(Reduce(reducer, axes, self.expanded(operand)))
            case Join(operation, left, right):
                return self.number(Join(operation, self.expanded(left), self.expanded(right)))
            case Contract(axes, left, right):
                product = Join("mul", self.expanded(left), self.expanded(right))
                return self.number(Reduce(SUM, axes, self.number(product)))
        return number

    def value(self, number: int) -> Array:
        """Returns an operator in float64 on drawn inputs: an array with one dimension for each axis of the program.

        A dimension has as many elements as the short axis, or one where the operator does not vary along it.
        """
        if number not in self._arrays:
            with np.errstate(all="ignore"):
                self._arrays[number] = self._value(self.rows[number])
        return self._arrays[number]

    def _value(self, operator: Operator) -> Array:
        found = [self.value(n) for n in operands(operator)]
        match operator:
            case Input(of):
                order = sorted(of.indices, key=self._position.__getitem__)
                shape = [self._extents[a] if a in of.axes else 1 for a in self.axes_of_program]
                drawn = self._draw(of).transpose([of.indices.index(a) for a in order])
                return drawn.reshape(shape)
            case Map(function, _):
                return evaluate_function(function, found[0])
            case Join(operation, _, _):
                return FLOAT64.apply(operation, found, WIDE)
            case Reduce(reducer, axes, _):
                return FLOAT64.reduce(reducer, found[0], tuple(self._position[a] for a in axes), WIDE)
            case Contract(axes, _, _):
                return FLOAT64.reduce(SUM, found[0] * found[1], tuple(self._position[a] for a in axes), WIDE)
            case _:
                assert_never(operator)

    @cached_property
    def _position(self) -> dict[Axis, int]:
        return {axis: n for n, axis in enumerate(self.axes_of_program)}

    @cached_property
    def _extents(self) -> dict[Axis, int]:
        """Short extents: different ones for different extents, so that no tensor fits by chance where another one does."""
        lengths = sorted({a.extent for a in self.axes_of_program} - {1})
        short = {1: 1} | {n: 2 + k for k, n in enumerate(lengths)}
        return {a: short[a.extent] for a in self.axes_of_program}

    def _draw(self, of: Read) -> Array:
        """The same elements wherever a tensor is read."""
        shape = tuple(self._extents[a] for a in of.indices)
        key = read(of.tensor, (), of.dtype)
        if key not in self._drawn:
            draw = np.random.default_rng(list(of.tensor.encode()))
            self._drawn[key] = draw.uniform(0.5, 1.5, shape) * draw.choice([-1.0, 1.0], shape)
        return self._drawn[key]


def evaluate_function(function: Expr, operand: Array) -> Array:
    """A function of every element of an array."""
    values: dict[Expr, Any] = {HOLE: operand}
    for node in postorder(function):
        if isinstance(node, Const):
            values[node] = np.float64(node.value)
        elif isinstance(node, Apply):
            values[node] = FLOAT64.apply(node.op, [values[a] for a in node.args], WIDE)
    return np.asarray(values[function])


@dataclass
class Abstracts:
    """The abstract expressions of operators; None where one is too long to say."""

    table: Operators
    abstraction: Abstraction
    _known: dict[int, Polynomial | None] = field(default_factory=dict)

    def of(self, number: int) -> Polynomial | None:
        if number not in self._known:
            found = [self.of(n) for n in operands(self.table.rows[number])]
            try:
                parts = [p for p in found if p is not None]
                self._known[number] = self._of(self.table.rows[number], parts) if len(parts) == len(found) else None
            except TooLongError:
                self._known[number] = None
        return self._known[number]

    def _of(self, operator: Operator, found: list[Polynomial]) -> Polynomial:
        match operator:
            case Input(of):
                return atom(Tensor(of.tensor))
            case Map(function, _):
                return self.abstraction.expression(function, {HOLE.tensor: found[0]})
            case Join(operation, _, _):
                return self.abstraction.applied(operation, found)
            case Reduce(reducer, axes, _):
                return self.abstraction.reduced(reducer, axes, found[0])
            case Contract(axes, _, _):
                return self.abstraction.reduced(SUM, axes, self.abstraction.times(*found))
            case _:
                assert_never(operator)


@dataclass(frozen=True)
class Written:
    """A program as operators: the table that has them, the number of its output, and how that is stored."""

    table: Operators
    output: int
    program: LoopProgram
    root: Nest
    precision: str | None

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(n for n in self.table.behind(self.output) if isinstance(self.table.rows[n], Input))

    @property
    def operators(self) -> tuple[int, ...]:
        """The numbers of the operators that the program is written with."""
        return tuple(n for n in self.table.behind(self.output) if not isinstance(self.table.rows[n], Input))

    def nests(self, number: int) -> LoopProgram:
        """The program with another operator as its output, as nests: one for each operator, stored in the type of the output."""
        table, made, stored = self.table, list[Nest](), dict[int, Read]()
        taken = {t.name for t in self.program.inputs}
        names = (name for n in count() if (name := f"{self.root.name}.{n}") not in taken)
        wide = dtypes.accumulator(self.root.dtype)
        for n in table.behind(number):
            operator = table.rows[n]
            if isinstance(operator, Input):
                stored[n] = operator.read
                continue
            parts = [stored[p] for p in operands(operator)]
            order = tuple(dict.fromkeys(a for p in parts for a in p.indices))
            kept = tuple(a for a in order if a in table.axes[n])
            body, reducer = _body(operator, [convert(p, wide) for p in parts], wide)
            if n == number:
                kept = self.root.axes
            name = self.root.name if n == number else next(names)
            precision = self.precision if isinstance(operator, Contract) else None
            reduced = tuple(a for a in order if a not in table.axes[n])
            body = body if reducer else convert(body, self.root.dtype)
            made.append(Nest(name, kept, body, self.root.dtype, reduced, reducer, self.root.source, precision))
            stored[n] = read(name, kept, self.root.dtype)
        used = frozenset[str]().union(*(m.reads for m in made))
        inputs = tuple(t for t in self.program.inputs if t.name in used)
        return verify(LoopProgram(inputs, tuple(made), (self.root.name,)))


def _body(operator: Operator, parts: Sequence[Expr], dtype: str) -> tuple[Expr, Reducer | None]:
    match operator:
        case Map(function, _):
            return substitute(typed(function, dtype), {read(HOLE.tensor, (), dtype): parts[0]}), None
        case Join(operation, _, _):
            return apply(operation, *parts), None
        case Reduce(reducer, _, _):
            return parts[0], reducer
        case Contract():
            return apply("mul", *parts), SUM
    raise AssertionError(operator)


def typed(root: Expr, dtype: str) -> Expr:
    """An expression of real numbers in one type, without conversions."""

    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        match node:
            case Const(value, _):
                return const(value, dtype)
            case Read(tensor, indices, _):
                return read(tensor, indices, dtype)
            case Apply("convert"):
                return args[0]
            case Apply(op):
                return apply(op, *args, dtype=dtype)
        return node

    return rebuild(root, step)
