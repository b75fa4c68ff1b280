"""Cheaper arithmetic for GPUs, as a rewrite of tile programs.

- `x / c` becomes `x * (1 / c)` for a constant c: for a power of two, and for coarse values;
- where values can be pinned, `x / y` of coarse x becomes `x * (1 / y)` if y varies along fewer axes, `c ? x : x e` becomes
  `x (c ? 1 : e)` likewise, and a sum of integers becomes one of float32 where it is converted, if none needs more than 24 bits;
- `exp(u)` becomes `exp2(u log2 e)` for coarse u, with the factor folded into a constant that u is multiplied by, and for any u
  where all results are rounded to half precision. It is not
  folded into the two sides of a difference: equal values, as two masked scores of -1e9, would differ by their rounding (where
  values can be pinned, `units` does it for all values that belong together);
- `expm1(x) + 1` becomes `exp(x)`, also in the branches of a choice: it is cheaper, and rounded less often;
- half-precision functions are computed in float32 and rounded;
- `max_j(c x) = c max_j(x)` for a constant c > 0 (exact: rounding is monotone), so that the maximum is taken of raw products.

A value is *coarse* when it comes from a matrix product of half-precision operands: it carries a rounding error in
proportion to its size, beside which one more rounding of that kind does not count.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import (
    Apply,
    Const,
    Expr,
    Index,
    add,
    apply,
    const,
    convert,
    div,
    mul,
    postorder,
    read,
    rebuild,
    select,
    with_args,
)
from pallasfuse.ir.reducers import MAX, MIN
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tile_program import (
    Buffer,
    Contract,
    Get,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Set,
    Statement,
    Store,
    TileProgram,
    every,
    expressions,
)
from pallasfuse.ir.unrolling import unrollable
from pallasfuse.resources.exponentials import coarse_values, is_approximate
from pallasfuse.targets import Target
from pallasfuse.tiling import contraction, legalize, units
from pallasfuse.tiling.units import LOG2_E

CONDITION = (
    "exp of a half-precision product, or where all results are half-precision, is exp2 of its argument times log2(e)"
)
"""How the rewrite rounds otherwise; it is infinite or zero where exp is."""


EXPONENTIAL_CONDITION = "expm1(x) + 1 is exp(x), which is rounded once"


def shifts_exponentials(roots: Iterable[Expr]) -> bool:
    """Returns whether these expressions add one to an `expm1`, which `rewrite` makes an `exp`."""
    nodes = (n for root in roots for n in postorder(root))
    return any(isinstance(n, Apply) and n.op == "add" and _plus_one(n.args[0], n.args[1]) is not None for n in nodes)


_CHOICES = 2
"""Choices in one another that are looked into for an `expm1`: expressions share their parts, and each would be visited again."""


def _plus_one(x: Expr, one: Expr, choices: int = _CHOICES) -> Expr | None:
    """Returns `x + 1` with `exp(u)` for an `expm1(u)` that x is or may choose; None where it has none, or `one` is not 1."""
    if isinstance(x, Const) and not isinstance(one, Const):
        x, one = one, x
    if not (isinstance(one, Const) and one.value == 1 and x.dtype == "float32"):
        return None
    match x:
        case Apply("expm1", (u,)):
            return apply("exp", u)
        case Apply("select", (p, a, b)) if choices:
            found = [_plus_one(value, one, choices - 1) for value in (a, b)]
            if found != [None, None]:
                by_case = zip((a, b), found, strict=True)
                return select(p, *(simplify(add(value, one)) if new is None else new for value, new in by_case))
    return None


INVERSE_CONDITION = "a quotient that is rounded to half precision is a product with the inverse of the divisor"


def inverts(program: TileProgram) -> bool:
    """Are there such products?"""
    return any(
        isinstance(n, Apply) and n.op == "convert" and n.dtype in dtypes.HALF and _is_by_inverse(n.args[0])
        for s in every(program.body)
        for root in expressions(s)
        for n in postorder(root)
    )


def _is_by_inverse(node: Expr) -> bool:
    match node:
        case Apply("mul", (x, Apply("div", (Const(1.0), y)))):
            return y.axes < x.axes
    return False


def rewrite_for(target: Target, program: TileProgram) -> TileProgram:
    """Returns the kernel with the arithmetic that a target has, and the cheaper of it; short axes are written out if it can."""
    unrolled = unrollable(program) if target.spreads_tiles else ()
    if not target.writes_kernels:
        return replace(program, later=(), unrolled=unrolled, late=target.spreads_tiles)
    legal = legalize.rewrite(program, target.legalized_ops)
    if target.pins:
        in_units = units.rewrite(legal, coarse_values(legal))
        cheaper = rewrite(in_units, pins=True, inverts=target.cluster > 0)
        return contraction.rewrite(cheaper, coarse_values(in_units))
    cheaper = rewrite(legal, powers=is_approximate((legal,)))
    return replace(cheaper, later=(), unrolled=unrolled, late=target.spreads_tiles)


def rewrite(program: TileProgram, *, pins: bool = False, inverts: bool = False, powers: bool = False) -> TileProgram:
    """The same kernel with cheaper arithmetic. pins: as `Target.pins`; its maxima and scores have one factor already.
    inverts: where quotients by a value of a row are rounded to half precision, the value is inverted once.
    powers: every `exp` becomes an `exp2`, not only those of coarse values."""
    coarse = coarse_values(program)
    body, later = (_block(b, coarse, pins, inverts, powers) for b in (program.body, program.later))
    return replace(program, body=body, later=later)


def _block(
    body: tuple[Statement, ...],
    coarse: frozenset[str],
    pins: bool,
    inverts: bool,
    powers: bool,
    along: Axis | None = None,
) -> tuple[Statement, ...]:
    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        made = _step(node, args, coarse, powers)
        made = _by_rows(made, coarse) if pins else made
        return made if along is None else _inverted(made, along)

    def cheaper(root: Expr) -> Expr:
        return rebuild(root, step)

    result: list[Statement] = []
    for s in body:
        match s:
            case Load() | Buffer() | Get():
                result.append(s)
            case Let(pinned=True):
                result.append(s)  # a division stays one: a product could be contracted into its users
            case Let():
                result.append(replace(s, value=cheaper(s.value)))
            case Reduce():
                reduce = replace(s, value=cheaper(s.value))
                result.extend([reduce] if pins else _reduce(reduce))
            case Contract():
                result.append(replace(s, lhs=cheaper(s.lhs), rhs=cheaper(s.rhs)))
            case Store() | Set():
                result.append(replace(s, value=cheaper(s.value)))
            case Loop():
                carries = tuple(replace(c, init=cheaper(c.init)) for c in s.carries)
                segments: tuple[Segment, ...] = tuple(
                    replace(g, body=_block(g.body, coarse, pins, inverts, powers, s.axis if inverts else None))
                    for g in s.segments
                )
                result.append(replace(s, carries=carries, segments=segments))
            case _:
                assert_never(s)
    return tuple(result)


_NATIVE_HALF = frozenset({"add", "sub", "mul", "neg", "abs", "max", "min", "select", "convert", "bitcast"})


def _step(node: Expr, args: tuple[Expr, ...], coarse: frozenset[str], powers: bool = False) -> Expr:
    if isinstance(node, Apply) and node.dtype in dtypes.HALF and node.op not in _NATIVE_HALF:
        wide = [a if isinstance(a, Const) and a.dtype == "int32" else convert(a, "float32") for a in args]
        return convert(_step(apply(node.op, *node.args, dtype="float32"), tuple(wide), coarse, powers), node.dtype)
    if node.dtype == "float32" and isinstance(node, Apply):
        match node.op, args:
            case "div", (x, Const(value)) if value and _has_exact_inverse(value):
                return _times(x, 1 / float(value))
            case "div", (x, Const(value)) if x.tensors & coarse and 2.0**-100 < abs(value) < 2.0**100:
                return _times(x, 1 / float(value))
            case "add", (a, b) if (found := _plus_one(a, b)) is not None:
                return _step(found, found.args, coarse, powers)
            case "exp", (u,) if powers or u.tensors & coarse:
                return apply("exp2", _times(u, LOG2_E))
    return apply(node.op, *args, dtype=node.dtype) if isinstance(node, Apply) else with_args(node, args)


def _by_rows(node: Expr, coarse: frozenset[str]) -> Expr:
    """Less work for every element where some of it is the same for a whole row."""
    match node:
        case Apply("div", (x, y), "float32") if x.tensors & coarse and y.axes < x.axes and y.axes:
            return _quotient(x, y)
        case Apply("select", (p, x, Apply("mul", (a, e))), "float32") if a is x and p.axes | e.axes < x.axes:
            return mul(x, select(p, const(1.0, x.dtype), e))
        case Apply("convert", (Apply("add" | "sub" as inner, (a, b), "int32") as whole,), "float32") if (
            _largest(whole) < 2**24 and a.axes < whole.axes and b.axes < whole.axes
        ):
            return apply(inner, convert(a, "float32"), convert(b, "float32"), dtype="float32")
    return node


def _quotient(x: Expr, y: Expr) -> Expr:
    """x / y with an inverse: of a subnormal number it would be infinite, and of a huge one subnormal."""
    size, one = apply("abs", y), const(1.0, "float32")
    down = select(apply("gt", size, const(2.0**100, "float32")), const(2.0**-64, "float32"), one)
    scale = select(apply("lt", size, const(2.0**-100, "float32")), const(2.0**64, "float32"), down)
    return mul(mul(x, scale), div(one, mul(y, scale)))


def _inverted(node: Expr, along: Axis) -> Expr:
    """One inverse for all elements of a row, where the quotients are rounded to half precision. along: the axis of the elements."""
    match node:
        case Apply("convert", (Apply("div", (x, y), "float32"),), "float16" | "bfloat16") if (
            along in x.axes and along not in y.axes
        ):
            narrow = isinstance(y, Apply) and y.op == "convert" and y.args[0].dtype == "float16"
            return convert(mul(x, div(const(1.0, "float32"), y)) if narrow else _quotient(x, y), node.dtype)
    return node


def _largest(node: Expr) -> float:
    """What the absolute value of an integer does not exceed, if it is made of positions and constants."""
    match node:
        case Const(value):
            return abs(value)
        case Index(axis):
            return axis.extent
        case Apply("add" | "sub", (a, b)):
            return _largest(a) + _largest(b)
        case Apply("mul", (a, b)):
            return _largest(a) * _largest(b)
        case Apply("neg" | "abs", (a,)):
            return _largest(a)
    return math.inf


def _has_exact_inverse(value: float) -> bool:
    return abs(math.frexp(value)[0]) == 0.5 and 2.0**-100 < abs(value) < 2.0**100


def _times(x: Expr, factor: float) -> Expr:
    match x:
        case Const(value, dtype):
            return const(float(value) * factor, dtype)
        case Apply("mul", (a, Const(value))) | Apply("mul", (Const(value), a)) if (
            2.0**-20 < abs(value * factor) < 2.0**100
        ):
            return mul(a, const(float(value) * factor, x.dtype))
    return mul(x, const(factor, x.dtype))


def _reduce(s: Reduce) -> list[Statement]:
    """Take a positive constant factor out of a maximum or minimum."""
    if s.reducer not in (MAX, MIN) or s.value.dtype != "float32":
        return [s]
    inner, factor = _positive_factor(s.value)
    if factor is None:
        return [s]
    raw = f"{s.name}.raw"
    return [
        replace(s, name=raw, value=inner),
        Let(s.name, s.axes, mul(read(raw, s.axes, "float32"), const(factor, "float32"))),
    ]


def _positive_factor(value: Expr) -> tuple[Expr, float | None]:
    match value:
        case Apply("mul", (x, Const(c))) | Apply("mul", (Const(c), x)) if (
            c > 0 and math.isfinite(c) and not isinstance(x, Const)
        ):
            return x, float(c)
        case Apply("select", (p, x, Const(c) as other)) if math.isinf(c):
            inner, factor = _positive_factor(x)
            return (value, None) if factor is None else (select(p, inner, other), factor)
    return value, None
