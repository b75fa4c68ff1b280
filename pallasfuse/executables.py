"""Compiles the programs that a check times: each once for all its comparisons, several at the same time."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from pallasfuse import timing
from pallasfuse.first_time import shared
from pallasfuse.isolation import together

Function = Callable[..., Any]
_OUT_OF_MEMORY = ("out of memory", "failed to allocate")
_CALLBACK = "callback"
"""A word in the names of all operations that call the user's functions."""


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """Asks for a function that is compiled for arguments of these shapes and types, in a program that runs it `times` times."""

    function: Function
    avals: Sequence[Any]
    times: int = 1

    @property
    def key(self) -> tuple[Function, tuple[str, ...], int]:
        return self.function, tuple(map(str, self.avals)), self.times


class Executables:
    """Holds the programs of one device that were compiled so far, by the functions that they run.

    Functions that are lowered to the same text share one program. What did not compile is known by its error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_functions: dict[tuple[Function, tuple[str, ...], int], Any] = {}
        self._of_texts: dict[str, Future[Any]] = {}

    def of(self, requests: Sequence[Request], device: Any) -> list[Any]:
        """Returns the programs that are asked for, or their errors. Those that there are not yet are compiled at the same time.

        To be called inside `isolation.apart`.
        """
        missing = {r.key: r for r in requests if r.key not in self._of_functions}
        made = together([partial(self._compiled, r, device) for r in missing.values()], device)
        self._of_functions.update(zip(missing, made, strict=True))
        for key, request in missing.items():  # by itself, it may find the memory that several together did not
            if len(missing) > 1 and _is_short(self._of_functions[key]):
                self._of_functions[key] = compiled(_repeated(request), request.avals, device)
        return [self._of_functions[r.key] for r in requests]

    def forget(self, functions: Iterable[Function]) -> None:
        """Lets go of the programs of functions, and of the device's memory that their constants take."""
        gone = set(functions)
        self._of_functions = {key: p for key, p in self._of_functions.items() if key[0] not in gone}
        used = {id(program) for program in self._of_functions.values()}
        with self._lock:
            self._of_texts = {text: f for text, f in self._of_texts.items() if id(f.result()) in used}

    def _compiled(self, request: Request, device: Any) -> Any:
        try:
            lowered = _lowered(_repeated(request), request.avals, device)
            text = lowered.as_text()
        except Exception as error:  # whatever a lowering raises
            return summary(error)
        if _CALLBACK in text:  # it says nothing of the user's functions that it calls
            return _executable(lowered)
        key, made = hashlib.sha256(text.encode()).hexdigest(), Future[Any]()
        with self._lock:
            known = self._of_texts.setdefault(key, made)
        if known is made:
            try:
                made.set_result(_executable(lowered))
            finally:  # whatever interrupts it: others may wait
                if not made.done():
                    made.set_result("its compilation was interrupted")
            if _is_short(made.result()):  # another time there may be memory
                with self._lock:
                    del self._of_texts[key]
        return known.result()


def executables_of_task() -> Executables:
    """Returns the programs that all comparisons of a task share (`first_time.one_task`); outside of one, none so far."""
    return shared(Executables, Executables)


def _repeated(request: Request) -> Function:
    return request.function if request.times == 1 else timing.repeated(request.function, request.times)


def compiled(function: Function, avals: Sequence[Any], device: Any) -> Any:
    """Returns a function compiled for a device, or the error that this ended with."""
    try:
        lowered = _lowered(function, avals, device)
    except Exception as error:  # whatever a lowering raises
        return summary(error)
    return _executable(lowered)


def _executable(lowered: Any) -> Any:
    """Returns a lowered program compiled, or the error that this ended with."""
    try:
        return lowered.compile()
    except Exception as error:  # whatever a compiler raises
        return summary(error)


def _lowered(function: Function, avals: Sequence[Any], device: Any) -> Any:
    def program(*args: Any) -> Any:  # whatever a function is called: its name stands in the text
        return function(*args)

    where = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(program).lower(*[jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for a in avals])


def summary(error: BaseException) -> str:
    """Returns an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def is_shortage(error: str) -> bool:
    """Does an error of a program say that there was no memory? It may run another time."""
    return any(sign in error.lower() for sign in _OUT_OF_MEMORY)


def _is_short(program: Any) -> bool:
    return isinstance(program, str) and is_shortage(program)
