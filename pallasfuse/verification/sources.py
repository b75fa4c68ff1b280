"""Values of the finite fields, from constants, known numbers and random draws."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.verification.constants import Constants
from pallasfuse.verification.field import Array, Tower
from pallasfuse.verification.value import FINITE, NAN, NEGATIVE_INFINITY, POSITIVE_INFINITY, ZERO, Value

type Residues = list[Array | None]

_FAR = 8
"""Some integers are drawn from a range that is this many times as wide as the largest literal."""
_NO = np.zeros(1, bool)
_CLEAN = np.zeros(1, np.uint8)


class Sources:
    """Makes `Value`s in one tower. `notes` collects what was not interpreted."""

    def __init__(self, tower: Tower, literals: Collection[int] = (), *, far: Collection[float] = ()) -> None:
        """Makes values in one tower. literals: integers that inputs may be compared with; they are drawn among others.

        far: numbers that masks fill in, which are taken to be far from all others: they are infinities.
        """
        self.tower, self.far = tower, far
        self.literals = sorted({n + near for n in literals for near in (-1, 0, 1)})
        self.constants = Constants(tower)
        self.notes: dict[str, None] = {}

    def real(self, values: Any, dtype: str) -> Value:
        """Known numbers, with the trials (or 1) as their last dimension."""
        values = np.asarray(values)
        flags = np.zeros((1,) * values.ndim, bool)
        if not dtypes.is_float(dtype):
            return Value(dtype, np.full_like(flags, FINITE, np.int8), flags, flags.astype(np.uint8), real=values)
        return self.from_real(values.astype(np.float64), dtype, None)

    def constant(self, value: float | int | bool, dtype: str, rank: int) -> Value:
        shape = (1,) * (rank + 1)
        if not dtypes.is_float(dtype):
            return replace(self.real(np.full(shape, value), dtype), constant=True)
        value = float(value)
        if value in self.far:
            value = math.copysign(math.inf, value)
        residues = self.constants.embed(value if np.isfinite(value) else 0.0, dtype)
        full: Residues = [r.reshape((1,) * rank + r.shape[-1:]) for r in residues]
        return replace(self.from_real(np.full(shape, value), dtype, full), constant=True)

    def of_constants(self, result: Value) -> Value:
        """The result of an operation on constants, which is a constant too."""
        if result.real is None or not dtypes.is_float(result.dtype):
            return result
        value = float(result.real.reshape(-1)[0])
        if not np.isfinite(value) or value == 0:
            return replace(result, constant=True)
        residues = self.constants.computed(value, [*result.levels, result.turn])
        full = [r.reshape((1,) * result.rank + r.shape[-1:]) for r in residues]
        return replace(result, levels=tuple(full[:-1]), turn=full[-1], constant=True)

    def random(self, shape: Sequence[int], dtype: str) -> Value:
        """An input: uniform residues; small integers and fair booleans."""
        shape = tuple(shape)
        bad = np.zeros((1,) * (len(shape) + 1), bool)
        kind, taint = bad.astype(np.int8), bad.astype(np.uint8)
        generator = self.tower.generator
        if dtype == "bool":
            return Value(dtype, kind, bad, taint, real=generator.random((*shape, self.tower.trials)) < 0.5)
        if dtypes.is_integer(dtype):
            drawn = self._integers((*shape, self.tower.trials), dtype)
            return Value(dtype, kind, bad, taint, real=drawn)
        levels = tuple(self.tower.random(p, shape) for p in self.tower.primes)
        return Value(dtype, kind, bad, taint, levels, self.tower.random(self.tower.chain.turn, shape))

    def _integers(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Numbers about zero, numbers near the literals of a program, and some far beyond them: predicates of sums and remainders
        have both outcomes, too."""
        generator, bounds = self.tower.generator, np.iinfo(dtype)
        least, most = int(bounds.min), int(bounds.max)
        drawn = generator.integers(max(-3, least), 6, shape)
        near = [n for n in self.literals if least <= n <= most]
        if not near:
            return drawn
        far = min(_FAR * max(map(abs, near)), most)
        kinds = generator.random(shape)
        drawn = np.where(kinds < 0.5, drawn, generator.choice(near, shape))
        return np.where(kinds < 0.9, drawn, generator.integers(max(-far, least), far, shape, endpoint=True))

    def squares(self, value: Value) -> Value:
        """Positive numbers, from any."""
        levels = tuple(None if x is None else x * x % p for x, p in zip(value.levels, self.tower.primes, strict=True))
        return replace(value, levels=levels)

    def from_real(
        self, values: Array, dtype: str, residues: Residues | None, bad: Array = _NO, taint: Array = _CLEAN
    ) -> Value:
        if residues is None:
            residues = list(self.constants.dyadic(np.where(np.isfinite(values), values, 0.0)))
        kind = np.select(
            [np.isnan(values), values == 0, values == np.inf, values == -np.inf],
            [NAN, ZERO, POSITIVE_INFINITY, NEGATIVE_INFINITY], FINITE,
        ).astype(np.int8)  # fmt: skip
        levels = tuple(None if r is None else np.where(kind == FINITE, r, 0) for r in residues[:-1])
        turn = residues[-1]
        turn = None if turn is None else np.where(kind == FINITE, turn, 0)
        flat = (1,) * values.ndim
        return Value(dtype, kind, np.broadcast_to(bad, bad.shape if bad.ndim == values.ndim else flat),
                     np.broadcast_to(taint, taint.shape if taint.ndim == values.ndim else flat), levels, turn, values)  # fmt: skip
