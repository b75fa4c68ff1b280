"""Axes: the named, independent loop dimensions that every representation shares (design, section 2)."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Axis:
    """One loop dimension. Two axes are the same when name and extent are; names are unique within a program."""

    name: str
    extent: int

    def __str__(self) -> str:
        return self.name


def volume(axes: Iterable[Axis]) -> int:
    """Number of points in the iteration space spanned by `axes`."""
    return prod(axis.extent for axis in axes)
