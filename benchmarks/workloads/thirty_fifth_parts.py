"""Small parts that language models of the thirty-fifth set and later ones share: stacks of layers, and what lies around them."""

from collections.abc import Sequence
from typing import Any

from benchmarks.workloads.registry import Random, gain, normal


def stack_of(depth: int, dtype: Any, **shapes: Sequence[int]) -> dict[str, Random]:
    """This describes matrices of layers, stacked, and gains where a shape has one axis."""

    def one(shape: Sequence[int]) -> Random:
        if len(shape) == 1:
            return normal(depth, *shape, dtype=dtype, scale=0.1, offset=1.0)
        return normal(depth, *shape, dtype=dtype, scale=shape[-2] ** -0.5)

    return {name: one(shape) for name, shape in shapes.items()}


def ends_of(words: int, n: int, dtype: Any) -> dict[str, Random]:
    """This describes the table of words, the last norm and the last matrix."""
    head = normal(n, words, dtype=dtype, scale=2 * n**-0.5)
    return {"table": normal(words, n, dtype=dtype), "norm": gain(n, dtype), "head": head}
