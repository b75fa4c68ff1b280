"""Predicates that had one outcome in all tests: then nothing was seen of the other one."""

from collections.abc import Iterator, Mapping

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Expr
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.verification.ranges import decided


def compares(body: Expr) -> bool:
    """An order, or an equality of integers: of floats, which are equal by chance only, and finite, no test shows the other case."""
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
