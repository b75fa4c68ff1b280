"""Programs as they are compiled to be timed: each once for all comparisons of a check, several at the same time."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from pallasfuse import timing
from pallasfuse.isolation import together

Function = Callable[..., Any]
_CALLBACK = "callback"
"""A word in the names of all operations that call the user's functions."""


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """A function that is to be compiled for arguments of these shapes and types. The program runs it `times` times."""

    function: Function
    avals: Sequence[Any]
    times: int = 1

    @property
    def key(self) -> tuple[Function, int]:
        return self.function, self.times


class Executables:
    """The programs of one device that were compiled so far, each with the function that it runs.

    Functions that are lowered to the same text share one program. What did not compile is known by its error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_functions: dict[tuple[Function, int], Any] = {}
        self._of_texts: dict[str, Future[Any]] = {}

    def of(self, requests: Sequence[Request], device: Any) -> list[Any]:
        """Returns the programs that are asked for, or their errors. Those that there are not yet are compiled at the same time.

        To be called inside `isolation.apart`.
        """
        missing = {r.key: r for r in requests if r.key not in self._of_functions}
        made = together([partial(self._compiled, r, device) for r in missing.values()], device)
        self._of_functions.update(zip(missing, made, strict=True))
        return [self._of_functions[r.key] for r in requests]

    def _compiled(self, request: Request, device: Any) -> Any:
        function = request.function if request.times == 1 else timing.repeated(request.function, request.times)
        try:
            lowered = _lowered(function, request.avals, device)
            text = lowered.as_text()
        except Exception as error:  # whatever a lowering raises
            return summary(error)
        made = Future[Any]()
        with self._lock:
            # a text says nothing of the user's functions that it calls
            known = None if _CALLBACK in text else self._of_texts.setdefault(_hash(text), made)
        if known not in (None, made):
            return known.result()
        try:
            made.set_result(lowered.compile())
        except Exception as error:  # whatever a compiler raises
            made.set_result(summary(error))
        except BaseException:
            made.set_result("its compilation was interrupted")
            raise
        return made.result()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def compiled(function: Function, avals: Sequence[Any], device: Any) -> Any:
    """Returns a function compiled for a device, or the error that this ended with."""
    try:
        return _lowered(function, avals, device).compile()
    except Exception as error:  # whatever a lowering or a compiler raises
        return summary(error)


def _lowered(function: Function, avals: Sequence[Any], device: Any) -> Any:
    def program(*args: Any) -> Any:  # whatever a function is called: its name stands in the text
        return function(*args)

    where = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(program).lower(*[jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for a in avals])


def summary(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
