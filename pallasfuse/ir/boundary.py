"""Records of the boundary of a loop's body: what a loop slices, carries and stacks.

Their prices are in `price/xla_trips` and `price/stored_at_boundary`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Boundary:
    """The boundary of a loop's body: its arguments and results, by position, that the loop slices, carries or stacks."""

    sliced: tuple[int, ...] = ()
    """The arguments that are elements of arrays that the loop runs over."""
    carried: tuple[tuple[int, int], ...] = ()
    """Each argument that comes from the trip before, with the result that goes to the next one."""
    stacked: tuple[int, ...] = ()
    """The results that are put together into arrays, one element for each trip."""
    timed: bool = False
    """If a clock decides, it times the whole call, with the loop, after the body."""


NO_LOOP = Boundary()
"""The boundary of a program that is no body of a loop: nothing is sliced, carried or stacked."""


@dataclass(frozen=True, slots=True)
class NamedBoundary:
    """A `Boundary` by the names of tensors."""

    sliced: frozenset[str] = frozenset()
    carried: frozenset[tuple[str, str]] = frozenset()
    stacked: frozenset[str] = frozenset()
