"""Tests over finite fields, and what a difference that they find means.

What the fields find equal is equal. What they find different is different where every positive constant is a square in them; else
another tower is tried, in which it is. What still differs is run on real numbers: if these differ, too, they are the
counterexample, and if they do not, the stage is not covered, which is said.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Const, postorder
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.proof.result import Counterexample, Record
from pallasfuse.verification.chains import chain_of_squares
from pallasfuse.verification.constants import Constants
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import STANDARD, Chain, tower
from pallasfuse.verification.reals import RealComparison, Reals
from pallasfuse.verification.shrink import integers_of

_REAL_TRIALS = 128
_REAL_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Tests:
    """Counts the tests that were made and needed. `miss`: the probability that one test accepts two different results."""

    needed: int
    miss: float
    made: int
    constants: Constants


def decide(
    record: Record,
    program: LoopProgram,
    seed: int,
    over_fields: Callable[[Record, Chain], Tests],
    once: Callable[[Record, FiniteFields], None],
    far: frozenset[float] = frozenset(),
    *,
    ordered: bool = False,
) -> Tests:
    """Make the tests of a stage, and take a difference for one only where the numbers of the program are such numbers.

    Args:
      over_fields: makes all tests over towers of a chain of primes.
      once: makes one batch of them over given numbers.
      far: the numbers that count as infinities (`Sources`).
      ordered: elements are compared with their extremum, which in the fields none of them equals: real numbers are run in any case.
    """
    tests = over_fields(record, STANDARD)
    if record.counterexample() is not None and tests.constants.misplaced:
        chain = chain_of_squares(frozenset(tests.constants.rationals), tests.constants.tower.levels)
        if chain is not None:
            record.comparisons.clear()
            tests = over_fields(record, chain)
    found = record.mismatch()
    if ordered and found is None and record.wrong is None:
        record.wrong = next(iter(_on_reals(program, seed, once, far, record)), None)
    if found is None or record.wrong is not None:
        return tests
    real = _on_reals(program, seed, once, far)
    same = next((m for m in real if (m.stage, m.tensor) == (found.stage, found.tensor)), None)
    record.wrong = same or next(iter(real), None)
    record.drop_mismatches()
    if record.wrong is None:
        reason = (
            f"{found.stage}: {found.tensor} differs over the finite fields, but on none of {_REAL_TRIALS * _REAL_BATCHES} "
            "random inputs of real numbers: a relation of constants that the fields do not have"
        )
        record.uncovered[reason] = None
    return tests


def _on_reals(
    program: LoopProgram,
    seed: int,
    once: Callable[[Record, FiniteFields], None],
    far: frozenset[float],
    whole: Record | None = None,
) -> list[Counterexample]:
    """Finds the differences in float64; none where it cannot be evaluated. whole: the record that says what was not covered."""
    coarsest, runs = _coarsest_constant(program), 0
    for batch in range(_REAL_BATCHES):
        record = Record(comparing=partial(RealComparison, coarsest))
        fields = Reals(tower(1, _REAL_TRIALS, seed * 31 + batch), integers_of(program), far=far)
        try:
            once(record, fields)
        except (ArithmeticError, ValueError):  # numbers that only the fields have results for
            continue
        runs += 1
        if whole is not None:
            whole.uncovered.update(record.uncovered)
        found = list(record.mismatches())
        if found:
            return found
    if whole is not None and not runs:
        whole.uncovered["places of extrema: float64 has no result for any of the inputs"] = None
    return []


def _coarsest_constant(program: LoopProgram) -> str:
    """The type with the fewest digits in which constants were folded."""
    bodies = [n.body for n in program.nests if isinstance(n, Nest)]
    types = {n.dtype for n in postorder(*bodies) if isinstance(n, Const) and dtypes.is_float(n.dtype)}
    return next((t for t in ("float16", "bfloat16", "float32") if t in types), "float64")
