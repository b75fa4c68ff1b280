"""Axes: the named, independent loop dimensions that every representation shares (design, section 2)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from numbers import Integral
from threading import Lock
from typing import Any, Self
from weakref import WeakValueDictionary

_interned: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()
_lock = Lock()


@dataclass(frozen=True, slots=True, order=True, init=False, weakref_slot=True)
class Axis:
    """One loop dimension. Two axes are the same when name and extent are; names are unique within a program.

    Axes are interned, as expressions are: equal ones are one object, so that sets and dictionaries of them, of which planning
    asks millions of times, hash and compare by identity.
    """

    name: str
    extent: int

    def __new__(cls, name: str, extent: int) -> Self:
        given: Any = extent
        extent = int(given) if isinstance(given, Integral) else given  # else a symbol
        key = name, extent
        axis: Self | None = _interned.get(key)
        if axis is None:
            with _lock:  # another thread may have made it meanwhile
                axis = _interned.get(key)
                if axis is None:
                    axis = object.__new__(cls)
                    object.__setattr__(axis, "name", name)
                    object.__setattr__(axis, "extent", extent)
                    _interned[key] = axis
        return axis

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> "tuple[Callable[..., Axis], tuple[Any, ...]]":
        return Axis, (self.name, self.extent)

    def __str__(self) -> str:
        return self.name


def innermost(axes: Sequence[Axis]) -> Axis | None:
    """Returns the axis along which elements are neighbours in memory: the last one that is longer than one."""
    return next((a for a in reversed(axes) if a.extent > 1), None)


def volume(axes: Iterable[Axis]) -> int:
    """Number of points in the iteration space spanned by `axes`."""
    return prod(axis.extent for axis in axes)
