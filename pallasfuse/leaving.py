"""This says what stays with XLA: calls that a user marks by `leave`, which the frontend keeps, and functions with side effects."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol, overload

import jax

from pallasfuse._compat import Jaxpr

_MARK = "pallasfuse_leave_"
"""The name of a call that is left begins so: JAX keeps the name of a call under every transformation."""


class _Decorator(Protocol):
    """What `leave` without a function returns: it marks one, and keeps its type."""

    def __call__[**P, R](self, function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def leave[**P, R](
    function: Callable[P, R],
    /,
    *,
    static_argnums: int | Iterable[int] = ...,
    static_argnames: str | Iterable[str] = ...,
) -> Callable[P, R]: ...
@overload
def leave(*, static_argnums: int | Iterable[int] = ..., static_argnames: str | Iterable[str] = ...) -> _Decorator: ...
def leave(
    function: Callable[..., Any] | None = None,
    /,
    *,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """Leave whatever `function` computes to XLA, also where it is called by a fused function. Elsewhere it is `jax.jit(function)`.

    What the fused function computes before and after the call is fused as ever, but no kernel reaches into it. `jax.jit`, `grad`
    and `vmap` work through it. A function inside it that is fused itself has its own kernels.

    Args:
      function: any function that `jax.jit` accepts. Without it, `leave(...)` returns a decorator.
      static_argnums, static_argnames: as in `jax.jit`.
    """
    if function is None:
        return functools.partial(leave, static_argnums=static_argnums, static_argnames=static_argnames)
    if not callable(function):
        raise TypeError(f"pallasfuse.leave takes a function, got {type(function).__name__}")
    run: Callable[..., Any] = function
    argnums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    @functools.wraps(run)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    marked.__name__ = _MARK + getattr(run, "__name__", type(run).__name__)
    jitted = jax.jit(marked, static_argnums=argnums or None, static_argnames=static_argnames or None)

    @functools.wraps(run)
    def left(*args: Any, **kwargs: Any) -> Any:
        return jitted(*args, **kwargs)

    return left


def left_function(call_name: Any) -> str | None:
    """Returns the name of the function that `leave` has marked, from the name of a call; None for other calls."""
    return call_name.removeprefix(_MARK) if isinstance(call_name, str) and call_name.startswith(_MARK) else None


def stays_whole(jaxpr: Jaxpr) -> str | None:
    """Returns what in a function keeps it with XLA as a whole; None if nothing does."""
    if jaxpr.effects:
        return f"side effects or collectives ({', '.join(map(str, jaxpr.effects))})"
    # such an operation has no equations yet, and JAX asks whatever is around it for a rule
    return (
        "operations that JAX itself makes equations of later (lax.custom_root)"
        if getattr(jaxpr, "is_high", False)
        else None
    )
