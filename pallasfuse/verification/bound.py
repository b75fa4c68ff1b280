"""How many random tests a stated bound on the error needs (Mirage, theorems 2 and 3).

An output of the fragment is a sum of k terms (f / g) e^(h / u); so is the difference of two outputs. One test accepts two
different ones with probability at most 1 - 1/k + o(1/k); without exponentials (k = 1) with at most d / p (Schwartz and Zippel), d
being the degree. k is counted on the loop program: sums add terms, divisors that vary along a summed axis multiply
them. A repair multiplies by single exponentials and adds none. An opaque or uninterpreted value is a variable of its own; a
square root counts as the norm of its argument, which squares the number of terms.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder, rename_axes
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.ops import OPS
from pallasfuse.verification.field import CHAIN

_MOST_TERMS = 10**9


@dataclass(frozen=True, slots=True)
class Size:
    """Terms of a numerator, divisors (with the terms of each), the degree, and whether exponentials occur."""

    terms: int
    divisors: tuple[tuple[Expr, int, int], ...] = ()
    """(divisor, its terms, its power)"""
    degree: int = 1
    exponential: bool = False

    @property
    def below(self) -> int:
        return min(_MOST_TERMS, math.prod(min(_MOST_TERMS, n**power) for _, n, power in self.divisors))


def _merged(a: Size, b: Size, *, product: bool) -> tuple[tuple[tuple[Expr, int, int], ...], int, int]:
    """(divisors of both together, what each numerator must be multiplied by)"""
    powers: list[Counter[Expr]] = [Counter({e: p for e, _, p in s.divisors}) for s in (a, b)]
    terms = {e: n for s in (a, b) for e, n, _ in s.divisors}
    joined = powers[0] + powers[1] if product else powers[0] | powers[1]
    factors = [math.prod(min(_MOST_TERMS, terms[e] ** (joined[e] - own[e])) for e in joined) for own in powers]
    return tuple((e, terms[e], p) for e, p in joined.items()), factors[0], factors[1]


def _apply(node: Apply, args: list[Size]) -> Size:
    exponential = any(a.exponential for a in args)
    degree = max(a.degree for a in args)
    match node.op:
        case "add" | "sub":
            divisors, fa, fb = _merged(args[0], args[1], product=False)
            total = min(_MOST_TERMS, args[0].terms * fa + args[1].terms * fb)
            return Size(total, divisors, args[0].degree + args[1].degree, exponential)
        case "select":
            a, b = args[1:]
            return Size(
                max(a.terms, b.terms),
                a.divisors + tuple(d for d in b.divisors if d not in a.divisors),
                degree,
                exponential,
            )
        case "mul":
            divisors, _, _ = _merged(args[0], args[1], product=True)
            return Size(
                min(_MOST_TERMS, args[0].terms * args[1].terms), divisors, args[0].degree + args[1].degree, exponential
            )
        case "square":
            divisors, _, _ = _merged(args[0], args[0], product=True)
            return Size(min(_MOST_TERMS, args[0].terms ** 2), divisors, 2 * degree, exponential)
        case "integer_pow" if isinstance(node.args[1], Const):
            power = min(64, abs(int(node.args[1].value)))
            return Size(
                min(_MOST_TERMS, args[0].terms ** max(1, power)), args[0].divisors, degree * max(1, power), exponential
            )
        case "div":
            divisor = (node.args[1], args[1].terms, 1)
            divisors, _, _ = _merged(args[0], Size(1, (divisor,)), product=True)
            return Size(
                min(_MOST_TERMS, args[0].terms * args[1].below), divisors, args[0].degree + args[1].degree, exponential
            )
        case "neg" | "abs" | "convert":
            return args[0]
        case "exp" | "exp2" | "expm1" | "logistic" | "tanh" | "sinh" | "cosh":
            return Size(1 if node.op in ("exp", "exp2") else 2, (), degree, True)
        case "sqrt" | "rsqrt":
            return Size(min(_MOST_TERMS, args[0].terms ** 2), args[0].divisors, 2 * degree, exponential)
        case _:
            return Size(1, (), 1, exponential)


def sizes(program: LoopProgram) -> dict[str, Size]:
    """The size of every tensor's elements."""
    known: dict[str, Size] = {t.name: Size(1) for t in program.inputs}
    axes: dict[str, tuple[Axis, ...]] = {}
    for nest in program.nests:
        if isinstance(nest, External):
            known[nest.name] = Size(1)
        else:
            known[nest.name] = _nest(nest, known, axes)
            axes[nest.name] = nest.axes
    return known


def _nest(nest: Nest, known: Mapping[str, Size], axes: Mapping[str, tuple[Axis, ...]]) -> Size:
    values: dict[Expr, Size] = {}
    for node in postorder(nest.body):
        match node:
            case Const() | Index():
                values[node] = Size(1, (), 0)
            case Read(tensor, indices):
                size = known[tensor]
                renaming = {a: b for a, b in zip(axes.get(tensor, ()), indices, strict=False) if a != b}
                values[node] = Size(size.terms, tuple((rename_axes(e, renaming), n, p) for e, n, p in size.divisors),
                                    size.degree, size.exponential)  # fmt: skip
            case Apply(op):
                assert op in OPS
                values[node] = _apply(node, [values[a] for a in node.args])
    size = values[nest.body]
    if nest.reducer is None:
        return size
    if nest.reducer.name not in ("sum", "prod"):
        return Size(1, (), 1, size.exponential)
    count = max(1, volume(nest.reduced))
    over = frozenset(nest.reduced)
    varying = [d for d in size.divisors if d[0].axes & over]
    if nest.reducer.name == "prod":
        return Size(min(_MOST_TERMS, size.terms**count), tuple((e, n, p * count) for e, n, p in size.divisors),
                    size.degree * count, size.exponential)  # fmt: skip
    each = math.prod(min(_MOST_TERMS, n**p) for _, n, p in varying)
    terms = min(_MOST_TERMS, count * size.terms * min(_MOST_TERMS, each ** (count - 1)))
    divisors = tuple((e, n, p * count if (e, n, p) in varying else p) for e, n, p in size.divisors)
    return Size(terms, divisors, size.degree + len(varying) * count, size.exponential)


def miss_probability(size: Size) -> float:
    """How likely one test accepts two different outputs, at most."""
    chance = min(0.5, 4.0 * max(1, size.degree) / CHAIN[1])
    if not size.exponential:
        return chance
    terms = 2 * size.terms * size.below
    return 1 - 1 / terms + chance if terms > 1 else chance


def trials_for(size: Size, delta: float) -> int:
    """The number of tests after which two different outputs are accepted with probability at most delta."""
    return max(2, math.ceil(math.log(delta) / math.log(miss_probability(size))))
