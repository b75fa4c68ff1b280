"""Mask intervals: which tiles of the rolled axis a predicate leaves entirely, partly, or not at all.

A predicate made of comparisons of affine index expressions is, on a block of rows and a tile of the rolled axis, bounded by
intervals in the rolled axis: `possible` contains every position where it may hold, `certain` only positions where it
holds for the whole block. Bounds are scalar expressions over the block's start positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, add, apply, const, convert, postorder, read
from pallasfuse.ir.simplify import OPPOSITE, simplify


@dataclass(frozen=True, slots=True)
class Affine:
    """`constant + sum(coefficient * position along axis) + sum(coefficient * read)`, in integers."""

    coefficients: tuple[tuple[Axis, int], ...]
    constant: int
    reads: tuple[tuple[Read, int], ...] = ()
    """Values that are known at run time only."""


_RING = frozenset({"int32", "int64"})
_SMALL = 2**29
"""Affine values beyond this are not analysed: bounds are computed in 32 bits."""
_LARGEST_READ = 2**27
"""Values of this size or more, known at run time only, leave a loop as it is."""


def affine(expr: Expr) -> Affine | None:
    """The affine form of an integer expression of positions and reads, or None.

    The program's integers wrap around. Sums and products are exact modulo the word size, so a form whose range fits is
    the wrapped value too; a cast is followed only when its operand's range fits both types. Reads count as `_LARGEST_READ`.
    """
    if expr.dtype not in _RING:
        return None
    total: dict[Axis, int] = {}
    reads: dict[Read, int] = {}
    constant = 0
    multiple = {expr: 1}
    for node in reversed(list(postorder(expr))):  # users before their arguments: a shared part is taken apart once
        k = multiple.pop(node, 0)
        if not k:
            continue
        parts: tuple[tuple[Expr, int], ...] = ()
        match node:
            case Const(value):
                constant += k * int(value)
            case Index(axis):
                total[axis] = total.get(axis, 0) + k
            case Read():
                reads[node] = reads.get(node, 0) + k
            case Apply("add", (a, b)):
                parts = (a, k), (b, k)
            case Apply("sub", (a, b)):
                parts = (a, k), (b, -k)
            case Apply("neg", (a,)):
                parts = ((a, -k),)
            case Apply("mul", (a, Const(value))) | Apply("mul", (Const(value), a)):
                parts = ((a, k * int(value)),)
            case Apply("convert", (a,)):
                inner = affine(a)
                if inner is None:
                    return None
                constant += k * inner.constant
                for axis, c in inner.coefficients:
                    total[axis] = total.get(axis, 0) + k * c
                for r, c in inner.reads:
                    reads[r] = reads.get(r, 0) + k * c
            case _:
                return None
        for part, times in parts:
            multiple[part] = multiple.get(part, 0) + times
    form = Affine(
        tuple(sorted((a, k) for a, k in total.items() if k)), constant, tuple(r for r in reads.items() if r[1])
    )
    largest = abs(constant) + sum(abs(k) * a.extent for a, k in form.coefficients)
    largest += _LARGEST_READ * sum(abs(k) for _, k in form.reads)
    return form if largest < _SMALL else None


@dataclass(frozen=True, slots=True)
class Interval:
    """Positions `[low, high)` of the rolled axis; None: unbounded on that side."""

    low: Expr | None
    high: Expr | None


@dataclass(frozen=True, slots=True)
class Extent:
    """`possible` contains all positions where the predicate may hold, `certain` some where it must (None: none known)."""

    possible: Interval
    certain: Interval | None


EVERYWHERE = Interval(None, None)


def integer(value: int) -> Expr:
    return const(value, "int32")


def maximum(a: Expr, b: Expr) -> Expr:
    return simplify(apply("max", a, b))


def minimum(a: Expr, b: Expr) -> Expr:
    return simplify(apply("min", a, b))


def _pick(a: Expr | None, b: Expr | None, join: Callable[[Expr, Expr], Expr]) -> Expr | None:
    return b if a is None else a if b is None else join(a, b)


def intersect(a: Interval, b: Interval) -> Interval:
    return Interval(_pick(a.low, b.low, maximum), _pick(a.high, b.high, minimum))


def _hull(a: Interval, b: Interval) -> Interval:
    low = None if a.low is None or b.low is None else minimum(a.low, b.low)
    high = None if a.high is None or b.high is None else maximum(a.high, b.high)
    return Interval(low, high)


def _union_inside(a: Interval | None, b: Interval | None) -> Interval | None:
    """An interval contained in the union: exact when both start (or end) unbounded, else one of the two."""
    if a is None or b is None:
        return a or b
    if a.low is None and b.low is None:
        return Interval(None, None if a.high is None or b.high is None else maximum(a.high, b.high))
    if a.high is None and b.high is None:
        return Interval(None if a.low is None or b.low is None else minimum(a.low, b.low), None)
    return a


Block = Callable[[Axis], tuple[Expr, int]]
"""First position and size of the current block along an axis that is not rolled."""
_LARGEST_COEFFICIENT = 512
"""Beyond this, bounds might overflow 32 bits: such a predicate is applied but not analysed."""


def _nonnegative(form: Affine, rolled: Axis, block: Block) -> Extent:
    """The extent of `form >= 0`."""
    if any(abs(c) > _LARGEST_COEFFICIENT for _, c in form.coefficients):
        return Extent(EVERYWHERE, None)
    if any(block(axis)[1] != 1 or axis == rolled for r, _ in form.reads for axis in r.indices):
        return Extent(EVERYWHERE, None)  # it differs within the block
    if form.reads:
        if abs(dict(form.coefficients).get(rolled, 0)) > 1:
            return Extent(EVERYWHERE, None)
        return _where_small(form, rolled, block)
    return _interval(form, integer(0), rolled, block)


def _where_small(form: Affine, rolled: Axis, block: Block) -> Extent:
    """As `_nonnegative`; where a value that is known at run time only is so large that sums might overflow: anything."""
    known: Expr = integer(0)
    small: Expr = const(True, "bool")
    for r, c in form.reads:
        known = add(known, apply("mul", convert(r, "int32"), integer(c)))
        within = apply(
            "and", apply("ge", r, const(-_LARGEST_READ, r.dtype)), apply("le", r, const(_LARGEST_READ, r.dtype))
        )
        small = apply("and", small, within)
    found = _interval(form, known, rolled, block)
    assert found.certain is not None

    def unless(value: Expr | None, otherwise: int) -> Expr | None:
        return None if value is None else simplify(apply("select", small, value, integer(otherwise)))

    far = 2**30
    return Extent(
        Interval(unless(found.possible.low, -far), unless(found.possible.high, far)),
        Interval(unless(found.certain.low, far), unless(found.certain.high, -far)),
    )


def _interval(form: Affine, known: Expr, rolled: Axis, block: Block) -> Extent:
    """The extent of `form + known >= 0`, whose reads are `known`."""
    k = dict(form.coefficients).get(rolled, 0)
    smallest: Expr = add(known, integer(form.constant))
    largest: Expr = smallest
    for axis, c in form.coefficients:
        if axis == rolled:
            continue
        first, size = block(axis)
        start = apply("mul", first, integer(c))
        span = c * (size - 1)
        smallest = add(add(smallest, start), integer(min(0, span)))
        largest = add(add(largest, start), integer(max(0, span)))
    smallest, largest = simplify(smallest), simplify(largest)
    if k == 0:
        # all or nothing: an interval that is empty unless the condition holds
        everything, nothing = integer(2**30), integer(-(2**30))
        zero = integer(0)
        may = apply("select", apply("ge", largest, zero), everything, nothing)
        must = apply("select", apply("ge", smallest, zero), everything, nothing)
        return Extent(Interval(None, simplify(may)), Interval(None, simplify(must)))
    if k > 0:  # k j + rest >= 0  <=>  j >= ceil(-rest / k)
        return Extent(
            Interval(_ceil_div(largest, k, negate=True), None), Interval(_ceil_div(smallest, k, negate=True), None)
        )
    # j <= floor(rest / -k)
    return Extent(Interval(None, _floor_plus_one(largest, -k)), Interval(None, _floor_plus_one(smallest, -k)))


def _ceil_div(x: Expr, k: int, *, negate: bool) -> Expr:
    y = apply("neg", x) if negate else x
    return simplify(y if k == 1 else _floor_div(add(y, integer(k - 1)), k))


def _floor_plus_one(x: Expr, k: int) -> Expr:
    return simplify(add(x if k == 1 else _floor_div(x, k), integer(1)))


def _floor_div(x: Expr, k: int) -> Expr:
    # integer division truncates: shift the (bounded) numerator into the positive range first
    shift = 2**20
    return apply("sub", apply("div", add(x, integer(k * shift)), integer(k)), integer(shift))


def both_hold(x: Extent, y: Extent) -> Extent:
    """The extent of the conjunction."""
    certain = None if x.certain is None or y.certain is None else intersect(x.certain, y.certain)
    return Extent(intersect(x.possible, y.possible), certain)


_MIRRORED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}


_DEEPEST = 64
"""Levels of a predicate that are looked at: what lies deeper is applied, but not analysed."""


def extent(predicate: Expr, rolled: Axis, block: Block) -> Extent:
    """The extent of a boolean expression along the rolled axis; unknown parts may hold anywhere and surely nowhere."""
    known: dict[Expr, Extent] = {}

    def at_level(part: Expr, level: int) -> Extent:
        if part not in known:
            inner = partial(at_level, level=level + 1)
            known[part] = _extent(part, rolled, block, inner) if level < _DEEPEST else Extent(EVERYWHERE, None)
        return known[part]

    return at_level(predicate, 0)


def _extent(predicate: Expr, rolled: Axis, block: Block, inner: Callable[[Expr], Extent]) -> Extent:
    match predicate:
        case Const(value):
            return Extent(EVERYWHERE, EVERYWHERE) if value else Extent(Interval(None, integer(-(2**30))), None)
        case Apply("and", (a, b), "bool"):
            return both_hold(inner(a), inner(b))
        case Apply("or", (a, b), "bool"):
            x, y = inner(a), inner(b)
            return Extent(_hull(x.possible, y.possible), _union_inside(x.certain, y.certain))
        case Apply("not", (a,), "bool"):
            negated = _negate(a)
            if negated is not None:
                return inner(negated)
        case Apply("ge" | "gt" | "le" | "lt" as op, (Apply("abs", (x,)), b)):
            # |x| < b holds when x < b and -x < b; |x| > b when x > b or -x > b
            join = "and" if op in ("lt", "le") else "or"
            return inner(apply(join, apply(op, x, b), apply(op, apply("neg", x), b)))
        case Apply("ge" | "gt" | "le" | "lt" as op, (a, Apply("abs") as b)):
            return inner(apply(_MIRRORED[op], b, a))
        case Apply("ge" | "gt" | "le" | "lt" as op, (a, b)):
            left, right = affine(a), affine(b)
            if left is not None and right is not None:
                form = _difference(left, right, 1 if op in ("ge", "gt") else -1)
                closed = replace(form, constant=form.constant - (1 if op in ("gt", "lt") else 0))
                return _nonnegative(closed, rolled, block)
        case Apply("eq", (a, b)) if dtypes.is_integer(a.dtype):
            both = apply("and", apply("ge", a, b), apply("le", a, b))
            return inner(both)
    return Extent(EVERYWHERE, None)


def _negate(p: Expr) -> Expr | None:
    match p:
        case Apply("ge" | "gt" | "le" | "lt" as op, (a, b)) if dtypes.is_integer(a.dtype):
            return apply(OPPOSITE[op], a, b)
        case Apply("not", (a,), "bool"):
            return a
        case Apply("and" | "or" as op, (a, b), "bool"):
            return apply("or" if op == "and" else "and", apply("not", a), apply("not", b))
    return None


def _difference(left: Affine, right: Affine, sign: int) -> Affine:
    """`sign * (left - right)`."""
    total: dict[Axis, int] = {}
    reads: dict[Read, int] = {}
    for form, s in ((left, sign), (right, -sign)):
        for axis, c in form.coefficients:
            total[axis] = total.get(axis, 0) + s * c
        for r, c in form.reads:
            reads[r] = reads.get(r, 0) + s * c
    return Affine(
        tuple((x, c) for x, c in total.items() if c), sign * (left.constant - right.constant),
        tuple((x, c) for x, c in reads.items() if c),
    )  # fmt: skip


def is_positional(predicate: Expr) -> bool:
    """True for boolean expressions of positions only."""
    return predicate.dtype == "bool" and not predicate.tensors


def narrows(predicate: Expr, rolled: Axis) -> bool:
    """May a predicate be known to be false on a tile of the rolled axis, before it is computed?"""
    if is_positional(predicate):
        return True
    found = extent(predicate, rolled, lambda axis: (read(f"start of {axis}", (), "int32"), 1)).possible
    return found != EVERYWHERE
