"""Things that a process does once: warnings, imports that wait for the first plan, values that wait until they are asked for."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock, RLock

IMPORTS = RLock()
"""Held while the modules that make plans are imported, at the first call: two threads that import modules of one package in
different orders would wait for each other."""


class Once:
    """Answers True the first time it is asked about a thing, and False from then on. Every fused function has one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._told: set[str] = set()

    def first(self, what: str) -> bool:
        with self._lock:
            told = what in self._told
            self._told.add(what)
        return not told


class Later[T]:
    """A value that is made when it is first asked for."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: list[T] = []

    @property
    def value(self) -> T:
        if not self._made:
            self._made.append(self._make())  # of two threads that make it, both get the first one's
        return self._made[0]


class Recent[**P, T]:
    """A function that remembers what it returned for the last few arguments, told by their identity: they are never hashed.

    For what is asked several times in a row about one large value that does not change. The same arguments, the same result.
    """

    def __init__(self, function: Callable[P, T], most: int = 8) -> None:
        self._function, self._most = function, most
        self._found: tuple[tuple[tuple[int, ...], tuple[object, ...], T], ...] = ()
        """The results, with the arguments beside their identities, which are those of no others as long as they live."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        assert not kwargs
        own = tuple(map(id, args))
        for known, _, result in self._found:  # another thread may replace all of them, but changes none
            if known == own:
                return result
        result = self._function(*args, **kwargs)
        self._found = ((own, args, result), *self._found[: self._most - 1])
        return result


def known[T](value: T) -> Later[T]:
    """A value that is there already, where one may come later."""
    return Later(lambda: value)


_shared: ContextVar[list[tuple[object, object]] | None] = ContextVar("shared", default=None)
"""The values that the steps of the task in this context have in common, by what they are for; None outside of a task."""


@contextmanager
def one_task() -> Iterator[None]:
    """A task whose steps share values (`shared`), which are forgotten when it ends. A task inside another is a step of it."""
    token = _shared.set([]) if _shared.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _shared.reset(token)


def shared[T](what: object, make: Callable[[], T]) -> T:
    """The value for something that is compared by equality, made once in a task, and each time outside of one."""
    known = _shared.get()
    found: T
    for key, found in () if known is None else known:  # type: ignore[assignment]  # few, and not all can be hashed
        if key == what:
            return found
    found = make()
    if known is not None:
        known.append((what, found))
    return found


@contextmanager
def without_collection() -> Iterator[None]:
    """A time in which Python looks for no cycles of garbage, for a step that makes many objects and few cycles."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
