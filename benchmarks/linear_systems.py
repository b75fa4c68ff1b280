"""Factorisations of matrices and solutions of linear systems, of one matrix and of many at a time."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.alone_cases import Case, case

MATRICES = (
    (1, 64), (1, 512), (1, 2048), (64, 16), (64, 128), (1024, 4), (1024, 16), (1024, 64), (16384, 2), (16384, 4), (16384, 8),
    (16384, 16), (131072, 2), (131072, 4),
)  # fmt: skip
"""How many matrices there are, and how many rows and columns each has."""
RIGHT_SIDES = (1, 8)


def _positive(x: Any) -> Any:
    """Makes matrices whose factors are numbers: symmetric, with a large diagonal."""
    return x + jnp.swapaxes(x, -1, -2) + 2 * x.shape[-1] * jnp.eye(x.shape[-1], dtype=x.dtype)


def _solved(a: Any, b: Any) -> Any:
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


FACTORS: dict[str, Callable[[Any], Any]] = {
    "Cholesky": lambda x: jnp.linalg.cholesky(_positive(x)),
    "with pivots": lambda x: lax.linalg.lu(_positive(x))[0],
    "by reflections": lambda x: jnp.linalg.qr(_positive(x))[1],
}
SYSTEMS: dict[str, Callable[[Any, Any], Any]] = {
    "triangular": _solved,
    "general": lambda a, b: jnp.linalg.solve(_positive(a), b),
}


def systems(platform: str) -> Iterator[Case]:
    """Yields factorisations and systems with one right side and with several."""
    sizes = MATRICES if platform == "gpu" else [(m, n) for m, n in MATRICES if m * n**2 <= 1 << 20]
    for (many, n), (words, factors) in itertools.product(sizes, FACTORS.items()):
        if words != "by reflections" or many * n <= 1 << 16:
            yield case("systems", f"factors {words}", factors, ((many, n, n), "float32"))
    for (many, n), (words, solved), sides in itertools.product(sizes, SYSTEMS.items(), RIGHT_SIDES):
        arrays = ((many, n, n), "float32"), ((many, n, sides), "float32")
        yield case("systems", f"{words}, right sides {sides}", solved, *arrays)
