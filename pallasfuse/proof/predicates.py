"""Predicates that had one outcome in all tests, so that nothing was seen of the other one, and those that ask for no number."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Expr, postorder
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.verification.ranges import decided
from pallasfuse.verification.value import NAN, Value

_SHARE = 0.2
"""The share of elements that are no numbers, where some are."""


def compares(body: Expr) -> bool:
    """Is a predicate an order, or an equality of integers? Floats are equal by chance only: no test shows both cases."""
    match body:
        case Apply("lt" | "le" | "gt" | "ge"):
            return True
        case Apply("eq" | "ne", (a, _)):
            return not dtypes.is_float(a.dtype)
    return False


def one_sided(outcomes: Mapping[str, set[bool]], program: LoopProgram, short: LoopProgram) -> Iterator[str]:
    """Yields what is to be said of predicates with one outcome, unless no input gives them another.

    outcomes: of each predicate, in all tests. short: the program over the axes that were tested.
    """
    always = decided(program) & decided(short)
    for name, found in outcomes.items():
        if len(found) == 1 and name not in always:
            yield f"the predicate {name} was {next(iter(found))} in every test"


def asks_for_no_number(program: LoopProgram) -> bool:
    """Does a program compare a value with itself, to find what is no number? So the place of a maximum does."""
    nodes = (n for nest in program.nests if isinstance(nest, Nest) for n in postorder(nest.body))
    return any(isinstance(n, Apply) and n.op in ("eq", "ne") and n.args[0] is n.args[1] for n in nodes)


def with_no_numbers(value: Value, generator: np.random.Generator) -> Value:
    """Replaces some elements of a drawn value by what is no number."""
    if not dtypes.is_float(value.dtype):
        return value
    trials = max(x.shape[-1] for x in (value.real, *value.levels) if x is not None)
    here = generator.random((*value.shape, trials)) < _SHARE
    if not value.levels:  # real numbers
        assert value.real is not None
        return replace(value, real=np.where(here, np.nan, value.real))
    levels = tuple(None if x is None else np.where(here, 0, x) for x in value.levels)
    turn = None if value.turn is None else np.where(here, 0, value.turn)
    return replace(value, kind=np.where(here, NAN, value.kind).astype(np.int8), levels=levels, turn=turn)
