"""Domains are the numbers that programs are evaluated over: NumPy's float64, or the finite fields of the verifier.

One interpreter serves both.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.ops import evaluated, wrapped
from pallasfuse.ir.reducers import Reducer

Array = np.ndarray[Any, Any]


class Domain[V](Protocol):
    """Arrays of numbers: a value has a shape, and is made and changed only by these operations."""

    def constant(self, value: float | int | bool, dtype: str, rank: int) -> V:
        """A scalar with `rank` unit dimensions."""

    def integers(self, values: Array, dtype: str) -> V:
        """Known integers: positions along axes, bounds of loops."""

    def apply(self, op: str, args: Sequence[V], dtype: str) -> V:
        """An operation of `ir.ops`, elementwise, with broadcasting of unit dimensions."""

    def reduce(self, reducer: Reducer, value: V, dims: tuple[int, ...], dtype: str, *, joins: bool = False) -> V:
        """`value` folded over `dims`, which become unit dimensions; over no elements: the identity of `dtype`.

        joins: the elements are folded already, of parts of one axis.
        """

    def finished(self, value: V) -> V:
        """The value of a fold that nothing continues any more."""

    def shape(self, value: V) -> tuple[int, ...]: ...

    def reshape(self, value: V, shape: tuple[int, ...]) -> V: ...

    def broadcast(self, value: V, shape: tuple[int, ...]) -> V: ...

    def take(self, value: V, index: tuple[Any, ...]) -> V:
        """NumPy's indexing by arrays."""

    def number(self, value: V) -> int:
        """The integer that a value of one element is."""

    def assemble(self, parts: Sequence[tuple[tuple[Any, ...], V]], shape: tuple[int, ...], dtype: str) -> V:
        """An array whose elements `index` are the part that comes with it; later parts win."""


def wide_type(dtype: str) -> Any:
    return np.float64 if dtypes.is_float(dtype) else np.bool_ if dtype == "bool" else np.int64


class Arrays:
    """The base class of domains whose values are NumPy arrays."""

    def finished(self, value: Array) -> Array:
        return value

    def shape(self, value: Array) -> tuple[int, ...]:
        return tuple(value.shape)

    def reshape(self, value: Array, shape: tuple[int, ...]) -> Array:
        return value.reshape(shape)

    def broadcast(self, value: Array, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(value, shape)

    def take(self, value: Array, index: tuple[Any, ...]) -> Array:
        return np.asarray(value[index])


class Float64(Arrays):
    """NumPy arrays of float64, int64 and bool. Integers wrap as those of their type; casts between float types are not
    rounded: this says what a program means, not how it rounds."""

    def constant(self, value: float | int | bool, dtype: str, rank: int) -> Array:
        return np.full((1,) * rank, value, wide_type(dtype))

    def integers(self, values: Array, dtype: str) -> Array:
        return values

    def apply(self, op: str, args: Sequence[Array], dtype: str) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(evaluated(op, args, dtype))

    def reduce(
        self, reducer: Reducer, value: Array, dims: tuple[int, ...], dtype: str, *, joins: bool = False
    ) -> Array:
        with np.errstate(all="ignore"):
            if 0 in value.shape:
                shape = [1 if d in dims else n for d, n in enumerate(value.shape)]
                return np.full(shape, reducer.identity(dtype), wide_type(dtype))
            result = np.asarray(reducer.reduce(value, axis=dims, keepdims=True))
            return np.asarray(wrapped(result, dtype)) if dtypes.is_integer(dtype) else result

    def number(self, value: Array) -> int:
        return int(value.item())

    def assemble(self, parts: Sequence[tuple[tuple[Any, ...], Array]], shape: tuple[int, ...], dtype: str) -> Array:
        wide = wide_type(dtype)
        result: Array = np.full(shape, np.nan if wide is np.float64 else 0, wide)
        for index, part in parts:
            result[index] = part
        return result


FLOAT64 = Float64()
