"""Hoisting: pull factors that do not depend on the rolled axis out of a sum (Blockbuster, rule 4).

A hoisted factor needs no repair. It may leave the sum when what remains stays in range without it: what remains may be at
most linear in values that are not bounded (`degree`), and what passes a cast to a narrower exponent range must be bounded.
Factors are only taken from the top-level product, never out of `exp(a - b)`: that would give up the range the user's formula has.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, apply, const, convert, postorder, with_args


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of a product; `inverted` when the product is divided by it."""

    value: Expr
    inverted: bool


@dataclass(frozen=True, slots=True)
class Hoisted:
    """`body` = product of `factors` times `rest`, up to the roundings named in `conditions`."""

    rest: Expr
    factors: tuple[Factor, ...]
    conditions: tuple[str, ...]

    def finish(self, accumulated: Expr) -> Expr:
        """The reduction's value: the accumulated rest times the hoisted factors."""
        for factor in self.factors:
            value = convert(factor.value, accumulated.dtype)
            accumulated = apply("div" if factor.inverted else "mul", accumulated, value)
        return accumulated


_BOUNDED = frozenset({"tanh", "logistic", "sin", "cos", "sign", "erf", "erfc", "exp", "exp2"})


def _is_narrow(dtype: str) -> bool:
    """True for types whose every value is far from the largest float32."""
    return dtypes.itemsize_bytes(dtype) <= 2 and dtype != "bfloat16"


def is_bounded(root: Expr) -> bool:
    """Bounded by one, or a value of a narrow type. Exponentials count: `stability` has bounded their arguments."""
    bounded: dict[Expr, bool] = {}
    for node in postorder(root):
        match node:
            case Apply("convert", (x,)):
                bounded[node] = _is_narrow(x.dtype) or bounded[x]
            case Apply("mul", (a, b)) | Apply("select", (_, a, b)):
                bounded[node] = bounded[a] and bounded[b]
            case Apply(op):
                bounded[node] = op in _BOUNDED
            case _:
                bounded[node] = dtypes.itemsize_bytes(node.dtype) <= 2 or (not node.axes and not node.tensors)
    return bounded[root]


def degree(root: Expr, rolled: Axis) -> int:
    """How fast the values that vary along `rolled` can grow: 0 bounded, 1 linear in an unbounded input, 2 and more faster.

    Exponentials of differences with frames count as bounded (`stability` proves that), and so do float16 and small integers.
    """
    degrees: dict[Expr, int] = {}
    for node in postorder(root):
        found = 1
        match node:
            case _ if rolled not in node.axes or (not node.args and _is_narrow(node.dtype)):
                found = 0
            case Apply("convert" | "neg" | "abs" | "sqrt", (x,)):
                found = degrees[x]
            case Apply("mul", (a, b)):
                found = degrees[a] + degrees[b]
            case Apply("div", (a, b)):
                found = degrees[a] + (2 if rolled in b.axes else 0)
            case Apply("add" | "sub" | "max" | "min", (a, b)) | Apply("select", (_, a, b)):
                found = max(degrees[a], degrees[b])
            case Apply("square", (x,)):
                found = 2 * degrees[x]
            case Apply(op):
                found = 0 if op in _BOUNDED else 2
        degrees[node] = min(found, 2)
    return degrees[root]


_MOST_FACTORS, _DEEPEST = 32, 64
"""Of a product that is taken apart; beyond, it stays as it is."""


def hoist(body: Expr, hoistable: Callable[[Expr], bool]) -> Hoisted:
    """Take every factor that satisfies `hoistable` out of the top-level product of `body`."""
    conditions: list[str] = []
    known: dict[Expr, tuple[Expr | None, tuple[Factor, ...]]] = {}

    def take(node: Expr, depth: int = 0) -> tuple[Expr | None, tuple[Factor, ...]]:
        """(what remains, or None for 1; the factors taken)"""
        if node not in known:
            rest, taken = split(node, depth + 1)
            known[node] = (rest, taken) if len(taken) <= _MOST_FACTORS else (node, ())
        return known[node]

    def split(node: Expr, depth: int) -> tuple[Expr | None, tuple[Factor, ...]]:
        if depth > _DEEPEST:
            return node, ()
        if hoistable(node):
            return None, (Factor(node, False),)
        match node:
            case Apply("mul", (a, b)):
                rest_a, from_a = take(a, depth)
                rest_b, from_b = take(b, depth)
                if not from_a and not from_b:
                    return node, ()
                rests = [r for r in (rest_a, rest_b) if r is not None]
                return (apply("mul", *rests) if len(rests) == 2 else rests[0] if rests else None), from_a + from_b
            case Apply("div", (a, b)):
                rest, taken = take(a, depth)
                if hoistable(b):
                    return rest, (*taken, Factor(b, True))
                if not taken:
                    return node, ()
                return apply("div", const(1.0, b.dtype) if rest is None else rest, b), taken
            case Apply("neg", (a,)):
                rest, taken = take(a, depth)
                if not taken:
                    return node, ()
                return apply("neg", const(1.0, node.dtype) if rest is None else rest), taken
            case Apply("convert", (x,), dtype) if dtypes.is_float(dtype) and dtypes.is_float(x.dtype):
                rest, taken = take(x, depth)
                if not taken:
                    return node, ()
                if not dtypes.is_exact_cast(x.dtype, dtype):
                    if rest is not None and dtype == "float16" and not is_bounded(rest):
                        return node, ()
                    conditions.append(
                        f"the rounding to {dtype} is applied before a factor that the program applies first"
                    )
                return (None if rest is None else with_args(node, (rest,))), taken
        return node, ()

    rest, factors = take(body)
    if rest is None:
        rest = const(1.0, body.dtype)
    return Hoisted(rest, factors, tuple(conditions))
