"""Constant arrays of positions, like `np.arange(n)` in the mask of a library, as the operations that compute them.

To a plan, a constant array is data. As positions, it bounds loops and needs no memory.
"""

import functools
from typing import Any

import jax
import numpy as np

from pallasfuse._compat import Jaxpr

_MOST_ELEMENTS = 1 << 20
"""Larger arrays are not looked at."""


def as_operations(constant: Any) -> Jaxpr | None:
    """Returns a jaxpr without arguments whose result is an array of integers that are affine in its positions.

    None for any other constant, and for one that does not vary. Equal arrays have the same jaxpr.
    """
    shape, dtype = getattr(constant, "shape", ()), str(getattr(constant, "dtype", ""))
    if isinstance(constant, jax.core.Tracer) or dtype not in _types() or not 1 < np.prod(shape) <= _MOST_ELEMENTS:
        return None
    array = np.asarray(constant)
    first = (0,) * array.ndim
    start = int(array[first])
    steps = tuple(int(array[(*first[:d], 1, *first[d + 1 :])]) - start if n > 1 else 0 for d, n in enumerate(shape))
    limits = np.iinfo(array.dtype)
    if not all(limits.min <= step <= limits.max for step in steps):
        return None
    expected = np.full((), start, array.dtype)
    for step, positions in zip(steps, np.indices(shape, dtype=array.dtype, sparse=True), strict=True):
        expected = expected + positions * array.dtype.type(step)
    return (
        _traced(jax.config.jax_enable_x64, dtype, tuple(shape), start, steps)
        if any(steps) and np.array_equal(array, expected)
        else None
    )


def _types() -> tuple[str, ...]:
    return ("int32", "int64") if jax.config.jax_enable_x64 else ("int32",)


@functools.lru_cache(256)
def _traced(_: bool, dtype: str, shape: tuple[int, ...], start: int, steps: tuple[int, ...]) -> Jaxpr:
    def run() -> Any:
        total: Any = None
        for dimension, step in enumerate(steps):
            if step:
                term = jax.lax.broadcasted_iota(dtype, shape, dimension)
                term = term if step == 1 else term * np.asarray(step, dtype)
                total = term if total is None else total + term
        return total + np.asarray(start, dtype) if start else total

    traced: Jaxpr = jax.make_jaxpr(run)()
    return traced
