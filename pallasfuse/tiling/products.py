"""Tensorization: recognise a sum of products as a matrix product over named axes (Neptune, section 5)."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, apply, const, convert


@dataclass(frozen=True, slots=True)
class Product:
    """`lhs * rhs`, where each side keeps an axis that the other lacks."""

    lhs: Expr
    rhs: Expr


_MOST_FACTORS = 64


def _factors(root: Expr) -> list[tuple[Expr, bool]]:
    """(factor, inverted) of the top-level product. A longer one, like a square of squares, counts as one factor."""
    found: list[tuple[Expr, bool]] = []
    stack = [(root, False)]
    while stack:
        if len(found) + len(stack) > _MOST_FACTORS:
            return [(root, False)]
        node, inverted = stack.pop()
        match node:
            case Apply("mul", (a, b)):
                stack += [(b, inverted), (a, inverted)]
            case Apply("div", (a, b)):
                stack += [(b, not inverted), (a, inverted)]
            case _:
                found.append((node, inverted))
    return found


def _join(factors: list[tuple[Expr, bool]], dtype: str) -> Expr:
    upper = [f for f, inverted in factors if not inverted]
    result = upper[0] if upper else const(1.0, dtype)
    for factor in upper[1:]:
        result = apply("mul", result, factor)
    for factor, inverted in factors:
        if inverted:
            result = apply("div", result, factor)
    return result


def split_product(
    body: Expr, over: AbstractSet[Axis], ignored: AbstractSet[Axis], *, batched: bool = False
) -> Product | None:
    """The two sides of `body` as a contraction over the axes `over`, or None when it is not a matrix product.

    `ignored` axes have a tile of one element; they do not count. Both sides must vary along every contracted axis. A product of
    integers is one only where both factors are signed bytes that are summed as int32. batched: both may keep the same axes, too,
    beside those of their own.
    """
    factors = _factors(body)
    if len(factors) < 2 or not (
        dtypes.is_float(body.dtype) or all(_is_byte(f) and not inverted for f, inverted in factors)
    ):
        return None
    kept = {f: frozenset(f.axes) - over - ignored for f, _ in factors}
    all_kept = frozenset().union(*kept.values())
    for seed, _ in factors:
        own = kept[seed]
        if not own or own == all_kept:
            continue
        # the left side is everything that varies within the seed's axes
        lhs = [(f, inv) for f, inv in factors if kept[f] <= own and (kept[f] or _leans(f, seed, over))]
        rhs = [(f, inv) for f, inv in factors if (f, inv) not in lhs]
        if not rhs or all(inv for _, inv in lhs):
            continue
        left, right = _join(lhs, body.dtype), _join(rhs, body.dtype)
        if left.axes & right.axes - ignored - over:
            own_axes = (left.axes - right.axes - over - ignored, right.axes - left.axes - over - ignored)
            if not batched or not all(own_axes):
                continue  # left to an elementwise product
        if over <= left.axes and over <= right.axes and (right.axes - over - ignored):
            return Product(left, right)
    return None


def _is_byte(factor: Expr) -> bool:
    """Is a factor a signed byte that is cast to int32, in which its products are summed?"""
    return (
        isinstance(factor, Apply)
        and factor.op == "convert"
        and (factor.args[0].dtype, factor.dtype) == ("int8", "int32")
    )


def _leans(factor: Expr, seed: Expr, over: AbstractSet[Axis]) -> bool:
    """Factors without kept axes go to the left side."""
    return factor is seed or bool(factor.axes <= over | seed.axes)


def narrow(side: Expr) -> Expr:
    """Drop an exact cast from a half type, or from a signed byte: matrix units take such operands and accumulate wide."""
    match side:
        case Apply("convert", (x,), "float32") if x.dtype in dtypes.HALF:
            return x
    return side.args[0] if _is_byte(side) else side


def narrow_sides(lhs: Expr, rhs: Expr) -> tuple[Expr, Expr]:
    """Drop the exact casts of both sides of a product, as `narrow`. Beside a half type, integers of a byte become that type, which
    has all of them: the product is one of half operands then, also for the rules of `arithmetic`."""
    sides = narrow(lhs), narrow(rhs)
    half = next((s.dtype for s in sides if s.dtype in dtypes.HALF), None)
    return sides if half is None else (_with_bytes_as(half, sides[0]), _with_bytes_as(half, sides[1]))


def _with_bytes_as(half: str, side: Expr) -> Expr:
    match side:
        case Apply("convert", (x,), "float32") if x.dtype in ("int8", "uint8", "bool"):
            return convert(x, half)
    return side


def contracts(body: Expr, over: AbstractSet[Axis]) -> bool:
    """Returns whether two factors of `body` each keep an axis that the other lacks: worth a matrix product."""
    return any(True for _ in own_axes(body, over))


def own_axes(body: Expr, over: AbstractSet[Axis]) -> Iterator[frozenset[Axis]]:
    """Yields the axes that either of two factors keeps and the other lacks: the rows of a matrix product, and its columns."""
    kept = [frozenset(f.axes) - over for f, _ in _factors(body) if over & f.axes]
    for n, a in enumerate(kept):
        for b in kept[n + 1 :]:
            if a - b and b - a:
                yield from (a - b, b - a)
