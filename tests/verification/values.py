"""Numbers of the verifier for tests, and what comparing them says."""

import numpy as np

from pallasfuse.ir.evaluate import evaluate_over
from pallasfuse.ir.expr import Expr, apply, const, read
from pallasfuse.verification.compare import Comparison
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import tower
from pallasfuse.verification.value import FINITE, NAN, NEGATIVE_INFINITY, POSITIVE_INFINITY, ZERO, Value

TRIALS = 40
KINDS = {"zero": ZERO, "inf": POSITIVE_INFINITY, "-inf": NEGATIVE_INFINITY, "nan": NAN}


X, Y, Z = (read(n, (), "float32") for n in "xyz")
ONE, TWO = const(1.0, "float32"), const(2.0, "float32")


def op(name: str, *args: Expr) -> Expr:
    return apply(name, *args, dtype="float32")


def inputs(fields, names="xyz"):
    return {n: fields.random((), "float32") for n in names}


def finite_fields(levels: int = 3, trials: int = TRIALS, seed: int = 0) -> FiniteFields:
    return FiniteFields(tower(levels, trials, seed))


def special(fields: FiniteFields, kind: int, shape=(), dtype="float32") -> Value:
    """A number of a kind that is not known as a real number: what a computation gives."""
    value = fields.random(shape, dtype)
    return Value(
        dtype, np.full_like(value.kind, kind), value.bad, value.taint,
        tuple(0 * x for x in value.levels), 0 * value.turn,
    )  # fmt: skip


def kinds_of(value: Value, trials: int = TRIALS):
    return np.broadcast_to(value.kind, (*value.shape, trials))


def compared(a: Value, b: Value, trials: int = TRIALS) -> Comparison:
    comparison = Comparison()
    comparison.add(a, b, trials)
    return comparison


def agree(a: Value, b: Value, trials: int = TRIALS, *, at_least: int = 1) -> bool:
    """No trial tells the values apart, and enough of them speak for each element."""
    comparison = compared(a, b, trials)
    return comparison.mismatch is None and comparison.fewest >= at_least


def differ(a: Value, b: Value, trials: int = TRIALS) -> bool:
    return compared(a, b, trials).mismatch is not None


def number(fields: FiniteFields, value, dtype="float32", rank=0) -> Value:
    return fields.constant(value, dtype, rank)


def evaluated(fields: FiniteFields, expr, **tensors: Value) -> Value:
    """A scalar expression over scalars."""
    return evaluate_over(expr, (), tensors, fields)


__all__ = [
    "FINITE",
    "KINDS",
    "ONE",
    "TRIALS",
    "TWO",
    "X",
    "Y",
    "Z",
    "agree",
    "compared",
    "differ",
    "evaluated",
    "finite_fields",
    "inputs",
    "kinds_of",
    "number",
    "op",
    "special",
]  # fmt: skip
