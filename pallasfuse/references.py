"""References by name: where a wrapped function is found again by another process, so that it can be pickled as functions are.

A decorated function is the trap: its module has the decorated object under the name of the function, so that pickle, which looks
the function up by that name, says that it is not the same object. It is found from there along `__wrapped__`, which decorators set.
"""

import sys
from dataclasses import dataclass
from typing import Any, NoReturn, Self, SupportsIndex

_DEEPEST = 100
"""So many decorators are looked through; more are a circle."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A place: the attribute `name` of a module, and how many wrappers inside it the object is."""

    module: str
    name: str
    depth: int

    def resolve(self) -> Any:
        """Returns the object.

        Raises:
          ImportError, AttributeError: its module does not have it any more.
        """
        __import__(self.module)
        found: Any = sys.modules[self.module]
        for part in self.name.split("."):
            found = getattr(found, part)
        for _ in range(self.depth):
            found = found.__wrapped__
        return found


def reference_to(thing: Any) -> Reference | None:
    """Returns where an object is found by its own name, itself or inside wrappers; None where it is not."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    for depth in range(_DEEPEST):
        if found is thing:
            return Reference(module, name, depth)
        found = getattr(found, "__wrapped__", None)
        if found is None:
            break
    return None


def portable(function: Any) -> Any:
    """Returns what to pickle instead of a function: the function itself, or where it is found inside wrappers of it."""
    place = reference_to(function)
    return function if place is None or place.depth == 0 else place


def restored(function: Any) -> Any:
    """Returns the function for which `portable` gave this."""
    return function.resolve() if isinstance(function, Reference) else function


class OfThisProcess:
    """Base of values that nobody changes and no other process could use, as they hold traced programs: a copy is the same value."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"a {type(self).__name__.strip('_')} belongs to the process that made it: pickle the fused function or the "
                        "fold, and make it again there")  # fmt: skip
