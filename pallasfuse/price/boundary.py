"""How values enter and leave the body of a loop: what runs it from trip to trip, as records without a price."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Boundary:
    """How values enter and leave the body of a loop, by the positions of its arguments and results."""

    sliced: tuple[int, ...] = ()
    """The arguments that are elements of arrays that the loop runs over."""
    carried: tuple[tuple[int, int], ...] = ()
    """Each argument that comes from the trip before, with the result that goes to the next one."""
    stacked: tuple[int, ...] = ()
    """The results that are put together into arrays, one element for each trip."""


NO_LOOP = Boundary()
"""The boundary of a program that is no body of a loop: nothing is sliced, carried or stacked."""


@dataclass(frozen=True, slots=True)
class NamedBoundary:
    """A `Boundary` by the names of tensors."""

    sliced: frozenset[str] = frozenset()
    carried: frozenset[tuple[str, str]] = frozenset()
    stacked: frozenset[str] = frozenset()
