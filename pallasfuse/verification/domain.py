"""The finite fields as a domain of the interpreters in `ir`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.reducers import Reducer
from pallasfuse.verification import kinds
from pallasfuse.verification.arithmetic import Numbers
from pallasfuse.verification.field import Array
from pallasfuse.verification.order import extremum
from pallasfuse.verification.value import FINITE, Value, stack


class FiniteFields(Numbers):
    """`ir.domain.Domain` over `Value`s."""

    def integers(self, values: Array, dtype: str) -> Value:
        return self.real(np.asarray(values)[..., None], dtype)

    def shape(self, value: Value) -> tuple[int, ...]:
        return value.shape

    def reshape(self, value: Value, shape: tuple[int, ...]) -> Value:
        return value.reshape(shape)

    def broadcast(self, value: Value, shape: tuple[int, ...]) -> Value:
        return value.broadcast(shape)

    def take(self, value: Value, index: tuple[Any, ...]) -> Value:
        return value.take(index)

    def number(self, value: Value) -> int:
        assert value.real is not None and value.real.size == 1
        return int(value.real.item())

    def finished(self, value: Value) -> Value:
        return value  # still the maximum of its members: joined with a number, it is that of all of them

    def reduce(
        self, reducer: Reducer, value: Value, dims: tuple[int, ...], dtype: str, *, joins: bool = False
    ) -> Value:
        value = value.full()
        shape = value.shape
        if 0 in shape:
            kept = tuple(1 if d in dims else n for d, n in enumerate(shape))
            return self.constant(reducer.identity(dtype), dtype, len(shape)).broadcast(kept)
        if reducer.name == "sum" and dtypes.is_float(value.dtype):
            return self._sum(value, dims)
        result = value
        for dim in dims:
            parts = [result.take((slice(None),) * dim + (slice(n, n + 1),)) for n in range(result.shape[dim])]
            if reducer.name in ("max", "min") and dtypes.is_float(value.dtype):
                result = extremum(self, reducer.name, parts, merge=joins or result is not value)
            else:
                result = parts[0]
                for part in parts[1:]:
                    result = self.apply(reducer.combine, (result, part), value.dtype)
        return result

    def _sum(self, value: Value, dims: tuple[int, ...]) -> Value:
        kind = value.kind
        for dim in dims:
            result = kind.take([0], axis=dim)
            for n in range(1, kind.shape[dim]):
                result = kinds.add(result, kind.take([n], axis=dim))
            kind = result

        def total(x: Array | None, p: int) -> Array | None:
            return None if x is None else np.where(value.kind == FINITE, x, 0).sum(dims, keepdims=True) % p

        residues = [total(x, p) for x, p in zip((*value.levels, value.turn), self.constants.moduli, strict=True)]
        with np.errstate(all="ignore"):
            real = None if value.real is None else value.real.sum(dims, keepdims=True)
        result_bad = value.bad.any(dims, keepdims=True)
        result_taint = np.bitwise_or.reduce(value.taint, axis=dims, keepdims=True)
        if real is not None:
            return self.from_real(real, value.dtype, residues, result_bad, result_taint)
        clean = [None if r is None else np.where(kind == FINITE, r, 0) for r in residues]
        return Value(value.dtype, kind, result_bad, result_taint, tuple(clean[:-1]), clean[-1])

    def assemble(self, parts: Sequence[tuple[tuple[Any, ...], Value]], shape: tuple[int, ...], dtype: str) -> Value:
        if not shape:
            return parts[-1][1].plain().typed(dtype)
        flat = [np.ravel_multi_index(index, shape) for index, _ in parts]
        joined = stack([part.typed(dtype) for _, part in parts], axis=0)
        position = np.full(int(np.prod(shape)), -1, np.int64)
        position[np.concatenate(flat)] = np.arange(sum(len(f) for f in flat))
        ordered = joined.take((np.maximum(position, 0),))
        missing = (position < 0)[:, None]
        ordered = replace(ordered, bad=ordered.bad | missing) if missing.any() else ordered
        return ordered.reshape(shape)
