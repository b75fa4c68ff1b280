"""A place to compile and run programs in the middle of a lowering: a thread of its own, which sees no trace, no mesh and no MLIR
context of the caller, with JAX's configuration as measurements want it. One at a time in a process."""

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

_TURN = threading.Lock()
_here = threading.local()
_MOST_AT_ONCE = 8
"""A compiler takes memory for each program that it works on, some hundred megabytes for large ones."""


def apart[T](function: Callable[[], T], device: Any) -> T:
    """`function()` in a thread of its own, when it is its turn; at once where the caller is such a thread already.

    Raises: what `function` raises.
    """
    if is_inside():
        return function()
    x64 = bool(jax.config.jax_enable_x64)
    result: Future[T] = Future()
    given_up = threading.Event()

    def run() -> None:
        _here.given_up = given_up
        try:
            with _TURN, _configured(device, x64), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*Triton.*deprecated", category=DeprecationWarning)
                result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="pallasfuse-check", daemon=True).start()
    try:
        return result.result()
    except BaseException:  # the caller was interrupted, and waits no longer
        given_up.set()
        raise


def is_inside() -> bool:
    """Does the caller run in such a thread?"""
    return getattr(_here, "inside", False)


def together[T](functions: Sequence[Callable[[], T]], device: Any) -> list[T]:
    """The results of functions that run at the same time, each as `apart` runs one. To be called from there."""
    assert is_inside(), "it is somebody else's turn"
    x64 = bool(jax.config.jax_enable_x64)
    given_up: threading.Event = _here.given_up

    def run(function: Callable[[], T]) -> T:
        if given_up.is_set():
            raise InterruptedError("nobody waits for it any longer")
        _here.given_up = given_up  # what it calls may ask for more
        with _configured(device, x64):
            return function()

    with ThreadPoolExecutor(max(1, min(cores(), _MOST_AT_ONCE, len(functions)))) as pool:
        return list(pool.map(run, functions))


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _configured(device: Any, x64: bool) -> Iterator[None]:
    """Applies the caller's 64-bit mode, and switches off all settings that would get in the way of measuring."""
    with (
        jax.enable_x64(x64), jax.default_device(device), jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False),
        jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.transfer_guard("allow"),
    ):  # fmt: skip
        _here.inside = True
        try:
            yield
        finally:
            _here.inside = False
