"""Operations that a target lacks, written with those that it has, as a rewrite of tile programs.

Each rule holds in real arithmetic, for infinities and NaN too, and keeps the digits that the operation has near zero. It may be
wrong by a few units in the last place, powers by as many as their exponent has bits, remainders where quotients have more digits
than `_rem` says, and the error function's complement as `error_function` says. Half types are computed in float32.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import (
    Apply,
    Const,
    Expr,
    add,
    apply,
    const,
    convert,
    div,
    mul,
    read,
    rebuild,
    select,
    sub,
    with_args,
)
from pallasfuse.ir.reducers import AND, MAX, MIN, OR
from pallasfuse.ir.tile_program import Contract, Let, Loop, Reduce, Set, Statement, Store, TileProgram
from pallasfuse.targets import Target
from pallasfuse.tiling import error_function

type Rule = Callable[..., Expr | None]


def _number(x: Expr, value: float) -> Expr:
    return const(value, x.dtype)


def _floor(x: Expr) -> Expr:
    rounded = apply("round_even", x)
    return select(apply("gt", rounded, x), sub(rounded, _number(x, 1.0)), rounded)


def _ceil(x: Expr) -> Expr:
    return apply("neg", _floor(apply("neg", x)))


def _expm1(x: Expr) -> Expr:
    """tanh(x / 2) (e^x + 1), which cancels nothing; e^x - 1 for large x, where the other is inf / inf."""
    small = mul(apply("tanh", mul(x, _number(x, 0.5))), add(apply("exp", x), _number(x, 1.0)))
    return select(apply("lt", apply("abs", x), _number(x, 1.0)), small, sub(apply("exp", x), _number(x, 1.0)))


def _log1p(x: Expr) -> Expr:
    """log(u) x / (u - 1) for u = 1 + x as rounded: the two errors cancel (Goldberg 1991, theorem 4)."""
    u = add(x, _number(x, 1.0))
    near = apply("eq", u, _number(x, 1.0))
    far = apply("gt", apply("abs", x), _number(x, 1.0))
    safe = select(near, _number(x, 2.0), u)
    quotient = div(mul(apply("log", safe), x), sub(safe, _number(x, 1.0)))
    return select(far, apply("log", u), select(near, x, quotient))


def _pow(x: Expr, y: Expr) -> Expr | None:
    """c^y of a positive constant c other than 1, whose every power is 1."""
    if isinstance(x, Const) and 0 < x.value < math.inf and x.value != 1 and dtypes.is_float(y.dtype):
        return apply("exp2", mul(y, _number(y, math.log2(x.value))))
    return None


def _cosh(x: Expr) -> Expr:
    """(e^|x| + e^-|x|) / 2 from e^(|x| / 2), which is in range wherever the result is."""
    root = apply("exp", mul(apply("abs", x), _number(x, 0.5)))
    half = mul(root, _number(x, 0.5))
    return add(mul(half, root), div(div(_number(x, 0.5), root), root))


def _is_finite(x: Expr) -> Expr:
    return apply("lt", apply("abs", x), _number(x, math.inf))


def _integer_pow(x: Expr, n: Expr) -> Expr | None:
    """x^-n as the inverse of x^n."""
    if isinstance(n, Const) and n.value < 0:
        return div(_number(x, 1.0), apply("integer_pow", x, const(-int(n.value), n.dtype), dtype=x.dtype))
    return None


_HALVES = {4: (12, 12, 100), 8: (26, 27, 900)}
"""The digits of half a number of a float type of so many bytes, those that are split off, and an exponent from which numbers are
scaled before they are split."""


def _rem(x: Expr, y: Expr) -> Expr | None:
    """Returns x - q y, where q is x / y without what is behind the point; it has the sign of x, and is less than y.

    Products of half of the digits of q with half of those of y are exact, and so is each difference: q is taken in three steps, of
    12 digits each in float32 and 26 in float64. A compiler that makes one operation of a product and a difference may split nothing
    off, and needs not to: then whole numbers q are all that counts. Where q has more digits, the remainder is some number between 0
    and y. Of integers, every target has remainders, but not by zero, which leaves x, nor of the least one by -1.
    """
    if dtypes.is_integer(x.dtype):
        return _integer_rem(x, y)
    if dtypes.itemsize_bytes(x.dtype) not in _HALVES:
        return None
    digits, lower_digits, largest = _HALVES[dtypes.itemsize_bytes(x.dtype)]
    zero, split = _number(x, 0.0), _number(x, 2.0**lower_digits + 1.0)
    is_large = apply("ge", apply("abs", y), _number(x, 2.0**largest))
    scale = select(is_large, _number(x, 2.0 ** (-2 * digits)), _number(x, 1.0))
    divisor = mul(y, scale)
    upper = _upper(divisor, split)
    lower = sub(divisor, upper)
    left = mul(x, scale)
    for last in (False, False, True):
        quotient = div(left, divisor)
        if last:
            whole = _whole(quotient)
        else:
            many = apply("ge", apply("abs", quotient), _number(x, 2.0**digits))
            whole = select(many, _whole(_upper(quotient, split)), zero)
        left = sub(sub(left, mul(whole, upper)), mul(whole, lower))
    is_below, size = apply("lt", x, zero), apply("abs", divisor)
    step = select(is_below, apply("neg", size), size)

    def agrees(value: Expr) -> Expr:
        """Has a value the sign of x, or is it zero? Of products of small numbers no sign is left."""
        above, below = apply("ge", value, zero), apply("le", value, zero)
        return apply("or", apply("and", is_below, below), apply("and", apply("ge", x, zero), above))

    left = select(agrees(left), left, add(left, step))  # a rounded quotient may be one off
    left = select(apply("ge", apply("abs", left), size), sub(left, step), left)
    fits = apply("and", apply("lt", apply("abs", left), size), agrees(left))
    defined = apply("and", _is_finite(x), apply("gt", size, zero))
    nowhere = select(defined, zero, div(sub(x, x), sub(y, y)))
    found = select(fits, div(left, scale), nowhere)
    return select(
        apply("lt", apply("abs", x), apply("abs", y)), x, select(apply("eq", found, zero), mul(x, zero), found)
    )


def _whole(x: Expr) -> Expr:
    """Returns a number without what is behind its point."""
    return select(apply("lt", x, _number(x, 0.0)), apply("ceil", x), apply("floor", x))


def _upper(x: Expr, split: Expr) -> Expr:
    """Returns a number with the first half of the digits of x (Dekker 1971)."""
    more = mul(x, split)
    return sub(more, sub(more, x))


def _integer_rem(x: Expr, y: Expr) -> Expr | None:
    """Returns a remainder of integers that never divides by zero; None where the divisor is a number that is safe."""
    if isinstance(y, Const) and y.value not in (0, -1):
        return None
    by_zero = apply("eq", y, const(0, y.dtype))
    unsafe = by_zero if y.dtype.startswith("u") else apply("or", by_zero, apply("eq", y, const(-1, y.dtype)))
    return select(by_zero, x, apply("rem", x, select(unsafe, const(1, y.dtype), y)))


_NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _not(p: Expr) -> Expr | None:
    """The opposite comparison, of integers: with a NaN both are false."""
    if isinstance(p, Apply) and p.op in _NEGATED and all(dtypes.is_integer(a.dtype) for a in p.args):
        return apply(_NEGATED[p.op], *p.args)
    return None


RULES: dict[str, Rule] = {
    "floor": _floor, "ceil": _ceil, "expm1": _expm1, "log1p": _log1p, "pow": _pow, "cosh": _cosh,
    "is_finite": _is_finite, "not": _not, "integer_pow": _integer_pow, "rem": _rem,
    "erf": error_function.error_function, "erfc": error_function.complement,
}  # fmt: skip


APPROXIMATED = frozenset({"erf", "erfc"})
"""Operations whose rules have their digits, but are no identities: a proof takes them for functions of which nothing is known."""


def exactly(target: Target) -> Target:
    """Returns a target that keeps the operations whose rules are no identities."""
    return replace(target, legalized_ops=target.legalized_ops - APPROXIMATED)


_REDUCTION = "reduce_{}"
"""A target lists a reducer among the operations that it lacks under this name."""
_COUNTED = {AND: MIN, OR: MAX}
"""Each reducer of booleans has one that gives the same of numbers which are 1 where they are true, and 0 elsewhere."""


def _as_number(x: Expr) -> Expr:
    """Returns 1 where a boolean is true, else 0."""
    return select(x, const(1, "int32"), const(0, "int32"))


def rewrite(program: TileProgram, lacking: frozenset[str]) -> TileProgram:
    """Returns the same kernel without the operations of `lacking`, as far as there are rules; reductions as `reduce_and`."""

    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if isinstance(node, Apply) and node.op in lacking and node.op in RULES:
            half = args[0].dtype in dtypes.HALF
            written = RULES[node.op](*(convert(a, "float32") if half and dtypes.is_float(a.dtype) else a for a in args))
            if written is not None:
                return convert(written, node.dtype)
        return with_args(node, args)

    def expression(root: Expr) -> Expr:
        return rebuild(root, step)

    def block(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return tuple(new for s in body for new in statements(s))

    def statements(s: Statement) -> Iterator[Statement]:
        if isinstance(s, Reduce) and _REDUCTION.format(s.reducer) in lacking:
            counted = replace(
                s, name=f"{s.name}.counted", reducer=_COUNTED[s.reducer], value=_as_number(expression(s.value))
            )
            yield counted
            yield Let(s.name, s.axes, apply("ne", read(counted.name, s.axes, "int32"), const(0, "int32")))
        else:
            yield statement(s)

    def statement(s: Statement) -> Statement:
        match s:
            case Let() | Reduce() | Store() | Set():
                return replace(s, value=expression(s.value))
            case Contract():
                return replace(s, lhs=expression(s.lhs), rhs=expression(s.rhs))
            case Loop():
                carries = tuple(replace(c, init=expression(c.init)) for c in s.carries)
                return replace(s, carries=carries, segments=tuple(replace(g, body=block(g.body)) for g in s.segments))
        return s

    return replace(program, body=block(program.body)) if lacking else program
