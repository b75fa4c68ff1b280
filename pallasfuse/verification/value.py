"""Numbers of the verifier: residues, with what the fields cannot hold beside them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]

FINITE, ZERO, POSITIVE_INFINITY, NEGATIVE_INFINITY, NAN = range(5)
"""Kinds. ZERO is known to be zero (exp(-inf), a sum of such), whatever the inputs are; a residue may be 0 by chance."""

ROOT = np.uint8(1)
"""The root or logarithm of a number that is not positive was taken, of its magnitude."""
ASSUMED = np.uint8(2)
"""A sign that the derivation relies on is another in this trial."""

REPRESENTATIVE = {ZERO: 0.0, POSITIVE_INFINITY: np.inf, NEGATIVE_INFINITY: -np.inf, NAN: np.nan}


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An array of numbers, for every trial of a batch. Each array has the value's dimensions and then one for the
    trials, any of which may be 1 where nothing varies.

    A float is its residues; one that depends on no input (a constant, a position) is known as a `real` number as well, and
    comparisons of those are decided. Integers and booleans are always `real`: inputs of these types are drawn as small numbers.
    """

    dtype: str
    kind: Array
    bad: Array
    """Undefined in this trial (a divisor is zero by chance): to be drawn again, so never compared."""
    taint: Array
    """Why a mismatch in this trial may prove nothing: 0, or the bits ROOT and ASSUMED."""
    levels: tuple[Array | None, ...] = ()
    """Residues modulo each prime of the chain; None where unknown (an exponential has no last one, a logarithm no first one)."""
    turn: Array | None = None
    """The residue modulo TURN, which sines and cosines need."""
    real: Array | None = None
    members: tuple["Value", ...] = ()
    """The values that this one is the opaque maximum or minimum of."""
    mode: Literal["max", "min", ""] = ""
    constant: bool = False
    """True for a number of the program, and what is computed of such: known, and the same everywhere."""

    @property
    def rank(self) -> int:
        return self.kind.ndim - 1

    @property
    def shape(self) -> tuple[int, ...]:
        arrays = (self.kind, self.bad, self.taint, self.turn, self.real, *self.levels)
        shapes = {a.shape[:-1] for a in arrays if a is not None}
        return shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)

    @property
    def lowest(self) -> int:
        """The first level that is known; -1 if there is none."""
        return next((i for i, x in enumerate(self.levels) if x is not None), -1)

    def map(self, change: Callable[[Array], Array]) -> "Value":
        """`change` applied to every array: a rearrangement of the leading dimensions."""
        return Value(
            self.dtype, change(self.kind), change(self.bad), change(self.taint),
            tuple(None if x is None else change(x) for x in self.levels),
            None if self.turn is None else change(self.turn), None if self.real is None else change(self.real),
            tuple(m.map(change) for m in self.members), self.mode, self.constant,
        )  # fmt: skip

    def broadcast(self, shape: tuple[int, ...]) -> "Value":
        return self.map(lambda x: x if x.shape[:-1] == shape else np.broadcast_to(x, (*shape, x.shape[-1])))

    def full(self) -> "Value":
        """Broadcasts every array to all dimensions."""
        arrays = (self.kind, self.bad, self.taint, self.turn, self.real, *self.levels)
        shapes = {a.shape[:-1] for a in arrays if a is not None}
        if len(shapes) == 1 and not self.members:
            return self
        return self.broadcast(np.broadcast_shapes(*shapes))

    def transpose(self, order: tuple[int, ...]) -> "Value":
        return self.map(lambda x: x.transpose((*order, x.ndim - 1)))

    def reshape(self, shape: tuple[int, ...]) -> "Value":
        return self.full().map(lambda x: x.reshape((*shape, x.shape[-1])))

    def expand(self, dims: tuple[int, ...]) -> "Value":
        """Inserts unit dimensions so that they become the dimensions `dims`."""
        return self.map(lambda x: np.expand_dims(x, dims))

    def take(self, index: Any) -> "Value":
        """NumPy indexing of the leading dimensions, after broadcasting to all of them."""
        return self.full().map(lambda x: x[index])

    def plain(self) -> "Value":
        """Returns the value without the members of a maximum."""
        return replace(self, members=(), mode="") if self.members else self

    def typed(self, dtype: str) -> "Value":
        return self if dtype == self.dtype else replace(self, dtype=dtype)


def stack(parts: list[Value], axis: int) -> Value:
    """Join values of one shape along a dimension that each has; maxima (and numbers) stay what they are maxima of."""
    modes = {p.mode for p in parts if p.members}
    of_each = [p.members or (p,) for p in parts]
    count = max(len(m) for m in of_each)
    if len(modes) == 1:
        # a repeated member changes nothing
        padded = [m + m[:1] * (count - len(m)) for m in of_each]
        members = tuple(stack([m[n].plain() for m in padded], axis) for n in range(count))
        return replace(stack([p.plain() for p in parts], axis), members=members, mode=modes.pop())
    parts = [p.plain().full() for p in parts]

    def join(arrays: list[Array]) -> Array:
        trials = max(a.shape[-1] for a in arrays)
        return np.concatenate([np.broadcast_to(a, (*a.shape[:-1], trials)) for a in arrays], axis=axis)

    def some(arrays: list[Array | None]) -> Array | None:
        known = [a for a in arrays if a is not None]
        return join(known) if len(known) == len(arrays) else None

    first = parts[0]
    return Value(
        first.dtype, join([p.kind for p in parts]), join([p.bad for p in parts]), join([p.taint for p in parts]),
        tuple(some(list(level)) for level in zip(*(p.levels for p in parts), strict=True)),
        some([p.turn for p in parts]), some([p.real for p in parts]),
    )  # fmt: skip
