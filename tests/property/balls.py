"""Values with error bounds; `error_bounds.py` says what they mean."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

LAMBDA = 6.0
Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Ball:
    value: Array
    radius: Array

    @property
    def certain(self) -> bool:
        return not self.radius.any()


def is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def exactly(x: Any, dtype: Any = None) -> Ball:
    """A value without error: floats are widened to float64, integers and booleans keep their type."""
    x = np.asarray(x, dtype)
    x = x.astype(np.float64) if is_float(x.dtype) else x
    return Ball(x, np.zeros(x.shape))


@dataclass(frozen=True)
class Arithmetic:
    """Of which precision the program's operations are."""

    unit: float | None = None
    """The unit roundoff of every floating-point type; None: of its own."""
    operations: float = 1.0
    """How many roundings there are for each one of the program."""

    def roundoff(self, dtype: Any) -> float:
        if not is_float(dtype):
            return 0.0
        return self.operations * (self.unit if self.unit is not None else float(jnp.finfo(dtype).eps) / 2)

    def gamma(self, n: int, dtype: Any) -> float:
        return min(max(n - 1, 0), LAMBDA * math.sqrt(n)) * self.roundoff(dtype)

    def rounded(self, value: Array, radius: Array, dtype: Any, roundings: float = 1.0) -> Ball:
        """A result of so many roundings to `dtype`, with `radius` inherited from its operands."""
        value = np.asarray(value)
        radius = np.broadcast_to(np.asarray(radius, np.float64), value.shape)
        if not is_float(dtype):
            return Ball(value, np.where(np.isnan(radius), np.inf, radius))
        value = value.astype(np.float64)
        info = jnp.finfo(dtype)
        # XLA may take what is not a normal number for zero, even where nothing is rounded
        tiny = 1e-300 if self.unit is not None else float(info.tiny if dtype != np.float16 else info.smallest_subnormal)
        flushed = (np.abs(value) - radius < tiny) & ((value != 0) | (radius > 0))
        size = np.where(np.isfinite(value), np.abs(value), 0.0)
        radius = radius + roundings * self.roundoff(dtype) * (size + radius) + np.where(flushed, tiny, 0.0)
        if self.unit is None and dtype == np.float16:  # below the normal numbers a rounding is absolute
            low = (np.abs(value) - radius < float(info.tiny)) & ((value != 0) | (radius > 0))
            radius = radius + np.where(low, roundings * float(info.smallest_subnormal), 0.0)
        largest = float(info.max) * (1 + self.roundoff(dtype)) if self.unit is None else float(np.finfo(np.float64).max)
        over = np.isfinite(value) & (np.abs(value) + radius > largest)
        certain = ~np.isfinite(value) & ~np.isposinf(np.where(np.isnan(radius), 0.0, radius))
        return Ball(value, np.where(certain, 0.0, np.where(over | np.isnan(radius), np.inf, radius)))


def distance(a: Array, b: Array) -> Array:
    """|a - b|; 0 for the same infinity and for two NaN, inf where only one is a number."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    d = np.abs(a - b)
    return np.where(same, 0.0, np.where(np.isnan(d), np.inf, d))


def corners(f: Callable[..., Array], *balls: Ball) -> tuple[Array, Array]:
    """`f`, monotone in each operand: the value, and how far it lies from those at the corners of the operands' balls."""
    centre = np.asarray(f(*(b.value for b in balls)))
    radius = np.zeros(centre.shape)
    options = [(0.0,) if b.certain else (-1.0, 1.0) for b in balls]
    if all(len(o) == 1 for o in options):
        return centre, radius
    for signs in itertools.product(*options):
        at = f(*(b.value if s == 0 else b.value + s * b.radius for s, b in zip(signs, balls, strict=True)))
        radius = np.maximum(radius, distance(np.asarray(at), centre))
    unknown = np.zeros(centre.shape, bool)
    if centre.shape == np.broadcast_shapes(*(b.value.shape for b in balls)):
        for b in balls:
            unknown = unknown | np.isposinf(b.radius)
    return centre, np.where(unknown, np.inf, radius)
