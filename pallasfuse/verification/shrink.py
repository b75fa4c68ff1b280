"""Small instances of a program: the same nests and groups over short axes.

Axes are symbols; what is proven of them for extents 5, 3 and 2 uses no other property of the extents. Numbers that stand for
extents shrink with them: strides, the count in a mean, offsets and widths of masks. Every stage is shrunk by the same map, so a
number that is taken for an extent by mistake is the same number everywhere.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import combinations, pairwise, product
from typing import Any

from pallasfuse.errors import Refusal
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.domain import FLOAT64, Array
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, apply, const, index, postorder, read, rebuild
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.loop_program import LoopProgram, Nest

_COEFFICIENTS = frozenset({2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24})
"""Counts that may also be coefficients of a repair: they do not shrink."""
_SHORT = 32
_RATHER_SHORT = 128
"""Axes up to these extents may be kept as they are: those whose extents become floats, those of which numbers are computed."""
_ROUNDING = {"float64": 1e-12, "float32": 5e-7, "float16": 2e-3, "bfloat16": 1e-2}
"""The largest relative error of a folded constant, compared with the number that it stands for."""
_KEPT = 4
"""Integers up to this size are not taken for extents."""


_NOTHING: frozenset[str] = frozenset()
_STRIDES, _OFFSETS = frozenset({"mul", "div", "rem"}), frozenset({"add", "sub"})


@dataclass(frozen=True, eq=False)
class Shrinking:
    """A map of extents, and of the numbers that stand for extents."""

    extents: Mapping[int, int]
    integers: Mapping[int, int]
    counts: Mapping[int, int]
    """Volumes of reduced axes, which divide means."""
    computed: Mapping[float, float] = field(default_factory=dict)
    """Numbers that the program computes of such volumes, N - 1 or the root of N, as they are over short axes: a plan may have
    folded them."""

    def axis(self, axis: Axis) -> Axis:
        return Axis(axis.name, self.extents[axis.extent])

    def number(self, value: float | int | bool, dtype: str) -> float | int | bool:
        """Returns the number that a constant becomes over short axes."""
        if isinstance(value, bool) or dtype == "bool":
            return value
        if not dtypes.is_float(dtype):
            return self._integer(int(value))
        near = [n for n in self.computed if math.isclose(n, value, rel_tol=_ROUNDING[dtype])]
        if near:
            return self.computed[min(near, key=lambda n: abs(n - value))]
        return self._float(float(value))

    def _integer(self, value: int) -> int:
        if value < 0:
            return -self._integer(-value)
        if value in self.integers:
            return self.integers[value]
        largest = max(self.extents, default=0)
        if value <= _KEPT or value >= largest:
            return value
        # between extents: between what these become
        anchors = sorted({0: 0, **{e: s for e, s in self.extents.items() if e}}.items())
        (e0, s0), (e1, s1) = next((a, b) for a, b in pairwise(anchors) if a[0] <= value <= b[0])
        between = round(s0 + (s1 - s0) * (value - e0) / (e1 - e0))
        return max(2, min(between, self.extents[largest] - 1))

    def _float(self, value: float) -> float:
        if not math.isfinite(value) or abs(value) in (0.0, 1.0):
            return value
        # the count itself before the one of which it is a multiple
        for count, small in sorted(self.counts.items(), reverse=True):
            ratio = value / count
            if math.isclose(abs(ratio), 1.0) or (count >= 32 and ratio == int(ratio) and abs(ratio) <= _KEPT):
                return ratio * small
            if math.isclose(abs(value) * count, 1.0, rel_tol=1e-6):
                return math.copysign(1 / small, value)
        return value

    def expr(self, root: Expr) -> Expr:
        """Returns the expression over short axes."""
        exponents = {n.args[1] for n in postorder(root) if isinstance(n, Apply) and n.op == "integer_pow"}

        def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
            match node:
                case Const(value, dtype):
                    return const(self.number(value, dtype), dtype)
                case Index(axis, dtype):
                    return index(self.axis(axis), dtype)
                case Read(tensor, indices, dtype):
                    return read(tensor, (self.axis(a) for a in indices), dtype)
                case Apply("integer_pow", (_, exponent), dtype) if exponent in exponents:
                    return apply("integer_pow", args[0], exponent, dtype=dtype)
                case Apply(op, _, dtype):
                    return apply(op, *args, dtype=dtype)

        return rebuild(root, step)

    def of(self, node: Any) -> Any:
        """Any node of the IR (a program, a group) over short axes."""
        match node:
            case Axis():
                return self.axis(node)
            case Const() | Index() | Read() | Apply():
                return self.expr(node)
            case Lookup():  # what is gathered is any array on short axes, which have no blocks
                return None
            case tuple():
                return tuple(self.of(x) for x in node)
            case _ if is_dataclass(node) and not isinstance(node, type):
                changed = {f.name: self.of(getattr(node, f.name)) for f in fields(node)}
                return replace(node, **{k: v for k, v in changed.items() if v is not getattr(node, k)})
        return node


def shrinking(program: LoopProgram, wanted: Mapping[Axis, int]) -> Shrinking | Refusal:
    """The map under which each axis has at most its `wanted` extent (default 2). Axes of one extent keep one extent; along
    axes that positions are compared on, longer ones stay at least as long."""
    small = _shrinking(program, wanted, frozenset())
    if not isinstance(small, Refusal):
        found = _with_computed(program, small)
        if not isinstance(found, Refusal):
            return found
        # a number stands for two: the extents that numbers are computed of stay as they are
        small = _shrinking(program, wanted, _computed_of(program))
    return small if isinstance(small, Refusal) else _with_computed(program, small)


def _shrinking(program: LoopProgram, wanted: Mapping[Axis, int], unchanged: frozenset[int]) -> Shrinking | Refusal:
    """Maps the extents of a program to short ones, or says why that is not possible.

    unchanged: extents that stay, unless they are long.
    """
    axes = {a for d in program.definitions() for a in d.axes} | {
        a for n in program.nests if isinstance(n, Nest) for a in n.reduced
    }
    cast, uses = _cast_integers(program), _uses(program)
    kept = _counted(program) | {a for a in axes if a.extent in cast and a.extent <= _SHORT}
    kept |= {a for a in axes if a.extent in unchanged and a.extent <= _RATHER_SHORT}
    extents: dict[int, int] = {}
    for axis in axes:
        short = axis.extent if axis in kept else min(axis.extent, wanted.get(axis, 2))
        extents[axis.extent] = max(extents.get(axis.extent, 0), short)
    positional = {a.extent for a in compared_axes(program)}
    longest = 0
    for extent in sorted(positional):
        extents[extent] = longest = max(extents[extent], min(extent, longest))
    integers: dict[int, int] = {n: n for n in cast} | extents
    many = Counter(a.extent for a in sorted(axes))
    several = [
        # axes of one extent are alike, and a long program has hundreds of them
        chosen for spread in (2, 3)
        for chosen in combinations([e for e, count in many.items() for _ in range(min(count, spread))], spread)
    ]  # fmt: skip
    for chosen in (*several, *sorted(_behind_positions(program))):
        stride, small = math.prod(chosen), math.prod(extents[e] for e in chosen)
        if integers.setdefault(stride, small) != small and uses.get(stride, _NOTHING) & _STRIDES:
            return Refusal(f"{stride} is the product of different axes, which shrink differently")
    for a, b in combinations(sorted(extents), 2):
        is_offset = {a, b} <= positional and _NOTHING < uses.get(b - a, _NOTHING) <= _OFFSETS
        integers |= {b - a: extents[b] - extents[a]} if is_offset or b - a not in integers else {}
    counts = {}
    for nest in program.nests:
        if isinstance(nest, Nest) and volume(nest.reduced) > 1 and volume(nest.reduced) not in _COEFFICIENTS:
            counts[volume(nest.reduced)] = math.prod(extents[a.extent] for a in nest.reduced)
    kept_integers = {k: v for k, v in integers.items() if k > _KEPT or k in extents or k == v}
    found = Shrinking(extents, kept_integers, counts)
    return replace(found, integers=kept_integers | _apart(program, found)) if _has_remainders(program) else found


def _behind_positions(program: LoopProgram) -> set[tuple[int, ...]]:
    """Returns the lengths of the last dimensions, four of them or more, of what counts positions along more.

    One step along an outer dimension passes all of them."""
    asked = (
        n for n in program.nests if isinstance(n, Nest) and any(isinstance(x, Index) for x in postorder(n.body))
    )  # fmt: skip
    lengths = {tuple(a.extent for a in axes) for n in asked for axes in (n.axes, n.reduced)}
    return {dims[at:] for dims in lengths for at in range(1, len(dims) - 3)}


def _apart(program: LoopProgram, small: Shrinking) -> dict[int, int]:
    """Maps literals that stand for no extents so that what is less stays less, with a number between them if there was one: a
    remainder is compared with such numbers."""
    largest, last = max(small.extents, default=0), 0
    literals = {abs(n) for n in integers_of(program)}
    found: dict[int, int] = {0: 0}
    for n in sorted(n for n in literals if 0 < n < largest and n not in small.integers):
        found[n] = max(int(small.number(n, "int64")), found[last] + min(n - last, 2))
        last = n
    return found


def _has_remainders(program: LoopProgram) -> bool:
    return any(n.op == "rem" for nest in program.nests if isinstance(nest, Nest)
               for n in postorder(nest.body) if isinstance(n, Apply))  # fmt: skip


def _computed_of(program: LoopProgram) -> frozenset[int]:
    """The whole numbers in computations on constants only."""
    bodies = [n.body for n in program.nests if isinstance(n, Nest) and not n.axes and not n.reduced]
    numbers = [n.value for n in postorder(*bodies) if isinstance(n, Const) and n.dtype != "bool"]
    return frozenset(int(n) for n in numbers if math.isfinite(n) and n == int(n))


def _with_computed(program: LoopProgram, small: Shrinking) -> Shrinking | Refusal:
    """Extends the map to numbers that the program computes of constants, or says why that is not possible."""
    images: dict[float, float] = {}
    for actual, short in _computed(program, small):
        if images.setdefault(actual, short) != short:
            return Refusal(f"{actual:g} is computed of different extents")
    images = {n: short for n, short in images.items() if small.number(n, "float64") != short}
    literals = {float(n.value) for nest in program.nests if isinstance(nest, Nest) for n in postorder(nest.body)
                if isinstance(n, Const) and dtypes.is_float(n.dtype)} if images else set()  # fmt: skip
    for n, literal in product(images, literals):
        if math.isclose(n, literal, rel_tol=_ROUNDING["float32"]):
            return Refusal(f"{literal:g} is a number, and is computed of extents")
    return replace(small, computed=images)


def _computed(program: LoopProgram, small: Shrinking) -> Iterator[tuple[float, float]]:
    """Yields every number that is computed of constants, with the same one over short axes."""
    known: dict[str, tuple[Array, Array]] = {}
    for nest in program.nests:
        if not isinstance(nest, Nest) or nest.is_reduction or not nest.reads <= known.keys():
            continue
        values: dict[Expr, tuple[Array, Array]] = {}
        for node in postorder(nest.body):
            match node:
                case Const(value, dtype):
                    actual, short = (FLOAT64.constant(n, dtype, 0) for n in (value, small.number(value, dtype)))
                    values[node] = actual, short
                case Read(tensor):
                    values[node] = known[tensor]
                case Apply(op, args, dtype) if all(a in values for a in args):
                    actual, short = (FLOAT64.apply(op, [values[a][n] for a in args], dtype) for n in (0, 1))
                    values[node] = actual, short
                    if dtypes.is_float(dtype) and math.isfinite(actual.item()):
                        yield actual.item(), short.item()
        if nest.body in values:
            known[nest.name] = values[nest.body]


def _counted(program: LoopProgram) -> set[Axis]:
    """Reduced axes whose number of elements divides something, and is small enough to be mistaken for a coefficient."""
    constants = {float(n.value) for nest in program.nests if isinstance(nest, Nest) for n in postorder(nest.body)
                 if isinstance(n, Const) and dtypes.is_float(n.dtype)}  # fmt: skip
    kept: set[Axis] = set()
    for nest in program.nests:
        if isinstance(nest, Nest) and volume(nest.reduced) in _COEFFICIENTS:
            count = float(volume(nest.reduced))
            if any(math.isclose(c, count) or math.isclose(c * count, 1.0, rel_tol=1e-6) for c in constants):
                kept.update(nest.reduced)
    return kept


def _cast_integers(program: LoopProgram) -> set[int]:
    """Integer literals that become floats: they are no positions."""
    literals = {n.name: n.body for n in program.nests if isinstance(n, Nest) and isinstance(n.body, Const)}
    found: set[int] = set()
    for nest in program.nests:
        for node in postorder(nest.body) if isinstance(nest, Nest) else ():
            if isinstance(node, Apply) and node.op == "convert" and dtypes.is_float(node.dtype):
                value = literals.get(node.args[0].tensor) if isinstance(node.args[0], Read) else node.args[0]
                if isinstance(value, Const) and dtypes.is_integer(value.dtype):
                    found |= {int(value.value), abs(int(value.value))}
    return found


def small_integers(program: LoopProgram) -> int:
    """The largest of the integers that do not shrink, where positions are compared; else 0."""
    return max((n for n in integers_of(program) if n <= _KEPT), default=0) if compared_axes(program) else 0


def compared_axes(program: LoopProgram) -> set[Axis]:
    """The axes whose positions a program computes with."""
    return {
        n.axis for nest in program.nests if isinstance(nest, Nest) for n in postorder(nest.body) if isinstance(n, Index)
    }


def integers_of(program: LoopProgram) -> set[int]:
    """The integer literals of a program."""
    found: set[int] = set()
    for nest in program.nests:
        if isinstance(nest, Nest):
            found |= {
                int(n.value)
                for n in postorder(nest.body)
                if isinstance(n, Const) and n.dtype.startswith(("int", "uint"))
            }
    return found


def _uses(program: LoopProgram) -> dict[int, frozenset[str]]:
    """The operations in which each integer literal stands."""
    found: dict[int, frozenset[str]] = {}
    for nest in program.nests:
        applied = [n for n in postorder(nest.body) if isinstance(n, Apply)] if isinstance(nest, Nest) else []
        for node in applied:
            for n in node.args:
                if isinstance(n, Const) and dtypes.is_integer(n.dtype):
                    found[abs(int(n.value))] = found.get(abs(int(n.value)), _NOTHING) | {node.op}
    return found


def dims_of(shape: Sequence[int], axes: Iterable[Axis]) -> list[tuple[Axis, ...]]:
    """The axes of each dimension of an array: consecutive ones whose extents multiply to the dimension."""
    rest = list(axes)
    dims = []
    for size in shape:
        taken: list[Axis] = []
        while math.prod(a.extent for a in taken) != size:
            taken.append(rest.pop(0))
        dims.append(tuple(taken))
    return dims
