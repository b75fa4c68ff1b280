"""The results of the repair room: repairs with their conditions."""

from dataclasses import dataclass

from pallasfuse.ir.expr import Expr
from pallasfuse.ir.reducers import Reducer


def accumulator_name(position: int) -> str:
    """The tensor name by which `Accumulator.update` reads accumulator number `position`."""
    return f"acc.{position}"


ROUNDING = "rounding to "
"""The beginning of a condition that is about a rounding only; where any other fails, the result is not the program's."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One component of the carried state B.

    `term` is what one element adds, B_i(r', c): over the frames (read under their own names) and opaque parts.
    `update` is row i of B(r') = M(r, r') B(r): over accumulators (`accumulator_name`), frames (new values, under
    their own names) and their old values (names with the suffix OLD).
    """

    term: Expr
    reducer: Reducer
    update: Expr


@dataclass(frozen=True, slots=True)
class Repair:
    """A proven repair (design, rule 2). Accumulator 0 is the reduction itself; the others are its companions."""

    accumulators: tuple[Accumulator, ...]
    matrix: str
    """M(r, r') as text, for `explain`."""
    conditions: tuple[str, ...] = ()
    """Side conditions under which the algebra holds: roundings that move, and exceptions."""
    nonzero: tuple[Expr, ...] = ()
    """The divisors of the updates whose sign does not exclude zero: each is also among the conditions.

    Written over the frames' own names; a frame whose *old* value makes one of them zero must not be moved from.
    """

    @property
    def rank(self) -> int:
        return len(self.accumulators)
