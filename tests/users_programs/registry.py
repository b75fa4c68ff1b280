"""A collection of programs by name, each with the shapes and types of its arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

type Shape = tuple[int, ...]

F32, F16, BF16, I32, I8, BOOL = "float32", "float16", "bfloat16", "int32", "int8", "bool"
_LARGEST = 4
"""Integers of int32 are drawn below it."""


@dataclass(frozen=True)
class Program:
    """A function, and the shapes and types of its arguments."""

    function: Callable[..., Any]
    arguments: tuple[tuple[Shape, str], ...]

    def arrays(self, seed: int = 0) -> list[np.ndarray[Any, Any]]:
        random = np.random.default_rng(seed)
        return [_drawn(random, shape, dtype) for shape, dtype in self.arguments]


def _drawn(random: np.random.Generator, shape: Shape, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == BOOL:
        return random.random(shape) < 0.7
    if dtype == I8:
        return random.integers(-127, 128, shape).astype(np.int8)
    if dtype == "uint8":
        return random.integers(0, 256, shape).astype(np.uint8)
    if dtype == I32:
        return random.integers(0, _LARGEST, shape).astype(np.int32)
    return random.normal(size=shape).astype(jnp.dtype(dtype))


class Programs(dict[str, Program]):
    """Programs by name, in the order in which they are registered."""

    def register(self, *arguments: Shape | tuple[Shape, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Returns a decorator that registers a function. An argument is a shape (float32) or a shape and a type."""
        full = tuple((a[0], a[1]) if a and isinstance(a[0], tuple) else (a, F32) for a in arguments)

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self[function.__name__] = Program(function, full)  # type: ignore[arg-type]
            return function

        return register
