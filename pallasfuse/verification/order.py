"""Maxima and minima, which a field does not have: opaque, but exactly as free as they may be.

The maximum of a set is a random number that depends on the set and on nothing else, so that
- maxima of parts are arbitrary numbers, unlike the whole's: a repair that passes is right for every sequence of running maxima;
- the maximum of maxima is the maximum of the union: a lost element, or one too many, changes the result;
- max(a S + b) = a max(S) + b for a > 0, and max(-S) = -min(S): repairs of maxima, and scales taken out of them, hold.

For the last, a set is brought to a normal form by its mean and by a ratio of its central moments (of third and second order,
which is odd in the scale), and the number is drawn for the normal form.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from pallasfuse.verification import field
from pallasfuse.verification.field import Array, mix
from pallasfuse.verification.value import ASSUMED, FINITE, NAN, NEGATIVE_INFINITY, POSITIVE_INFINITY, ZERO, Value

if TYPE_CHECKING:
    from pallasfuse.verification.arithmetic import Numbers

Mode = Literal["max", "min"]
_MOST_MEMBERS = 2048


def extremum(numbers: "Numbers", mode: str, parts: Sequence[Value], *, merge: bool) -> Value:
    """The maximum or minimum of values, elementwise.

    merge: of maxima, that of the union. A reduction takes its elements as they are, whatever these are maxima of.
    """
    assert mode in ("max", "min")
    if all(p.real is not None for p in parts):
        return _known(mode, parts)
    members: list[Value] = []
    for part in parts:
        members.extend(part.members if merge and part.mode == mode and part.members else [part.plain()])
    if len(members) > _MOST_MEMBERS:
        members = [p.plain() for p in parts]
    return replace(_opaque(numbers, mode, members), members=tuple(members), mode=mode)  # type: ignore[arg-type]


def _known(mode: str, parts: Sequence[Value]) -> Value:
    """Returns the largest of real numbers, element by element (or the smallest, or NaN)."""
    result = parts[0]
    for part in parts[1:]:
        assert result.real is not None and part.real is not None
        first = result.real >= part.real if mode == "max" else result.real <= part.real
        result = _pick(first | np.isnan(result.real), result, part)
    return result


def _pick(where: Array, a: Value, b: Value) -> Value:
    def pick(x: Array | None, y: Array | None) -> Array | None:
        return None if x is None or y is None else np.where(where, x, y)

    return Value(
        a.dtype, np.where(where, a.kind, b.kind).astype(np.int8), a.bad | b.bad, a.taint | b.taint,
        tuple(pick(x, y) for x, y in zip(a.levels, b.levels, strict=True)), pick(a.turn, b.turn), pick(a.real, b.real),
    )  # fmt: skip


def _opaque(numbers: "Numbers", mode: str, members: Sequence[Value]) -> Value:
    first = members[0]
    shape = np.broadcast_shapes(*(m.shape for m in members))
    trials = numbers.tower.trials

    def together(arrays: list[Array]) -> Array:
        return np.stack([np.broadcast_to(a, (*shape, trials)) for a in arrays])

    kind = together([m.kind for m in members])
    present = kind <= ZERO
    bad = np.logical_or.reduce(together([m.bad for m in members]))
    taint = np.bitwise_or.reduce(together([m.taint for m in members]))
    moduli = numbers.constants.moduli
    columns = [list(c) for c in zip(*((*m.levels, m.turn) for m in members), strict=True)]
    levels = [together(c) if all(x is not None for x in c) else None for c in columns]
    lowest = next((i for i, x in enumerate(levels) if x is not None), None)
    absorbing, identity = (
        (POSITIVE_INFINITY, NEGATIVE_INFINITY) if mode == "max" else (NEGATIVE_INFINITY, POSITIVE_INFINITY)
    )
    result_kind = np.where(
        (kind == NAN).any(0),
        NAN,
        np.where((kind == absorbing).any(0), absorbing, np.where(present.any(0), FINITE, identity)),
    ).astype(np.int8)
    if lowest is None:
        nothing: list[Array | None] = [None] * len(moduli)
        return Value(first.dtype, result_kind, bad, taint, tuple(nothing[:-1]), nothing[-1])

    lead, p = levels[lowest], moduli[lowest]
    assert lead is not None
    distinct = _first_occurrences(lead, present)
    count = distinct.sum(0)
    alone, single = count == 1, np.argmax(distinct, axis=0)
    scale_of = _Scales(distinct, count)
    orientation, key = scale_of.normal_form(lead, p, mode)
    key = mix(numbers.tower.seeds, key, orientation)
    residues: list[Array | None] = []
    for index, (x, q) in enumerate(zip(levels, moduli, strict=True)):
        if x is None:
            residues.append(None)
            continue
        drawn = (mix(key, np.uint64(index)) % np.uint64(q)).astype(np.int64)
        mean, scale = scale_of.mean(x, q), scale_of.scale(x, q)
        # of two numbers, the normal form is symmetric: max and min are mirror images
        drawn = np.where((count == 2) & (mode == "min"), -drawn, drawn)
        value = (scale * drawn + mean) % q
        if alone.any():
            value = np.where(alone, np.take_along_axis(x, single[None], axis=0)[0], value)
        residues.append(np.where(result_kind == FINITE, value, 0))
    numbers.notes["max and min"] = None
    if alone.any():
        only_zero = alone & np.take_along_axis(kind == ZERO, single[None], axis=0)[0] & (result_kind == FINITE)
        result_kind = np.where(only_zero, ZERO, result_kind).astype(np.int8)
    return Value(first.dtype, result_kind, bad, taint, tuple(residues[:-1]), residues[-1])


def _first_occurrences(x: Array, present: Array) -> Array:
    """Marks one of each group of equal members."""
    values = np.where(present, x, -1)
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0)
    new = np.ones(x.shape, bool)
    new[1:] = ordered[1:] != ordered[:-1]
    result = np.empty_like(new)
    np.put_along_axis(result, order, new, axis=0)
    return np.asarray(result & present)


@lru_cache(maxsize=64)
def _inverses(count: int, p: int) -> Array:
    """Returns 1 / n for every n below `count`."""
    return field.inverse(np.arange(count), p)


class _Scales:
    """Mean and scale of sets, which are equivariant under every positive affine map."""

    def __init__(self, distinct: Array, count: Array) -> None:
        """The sets: `distinct` marks the members that count. Each prime is asked for one array of residues only."""
        self.distinct, self.count = distinct, count
        self._flip: Array | None = None
        self._means: dict[int, Array] = {}
        self._deviations: dict[int, Array] = {}
        self._scales: dict[int, Array] = {}

    def mean(self, x: Array, p: int) -> Array:
        if p not in self._means:
            total = np.where(self.distinct, x, 0).sum(0) % p
            self._means[p] = np.asarray(total * _inverses(len(x) + 1, p)[self.count] % p)
        return self._means[p]

    def deviation(self, x: Array, p: int) -> Array:
        """The members' distances from the mean."""
        if p not in self._deviations:
            self._deviations[p] = np.where(self.distinct, (x - self.mean(x, p)) % p, 0)
        return self._deviations[p]

    def _moments(self, x: Array, p: int) -> tuple[Array, Array]:
        deviation = self.deviation(x, p)
        second = deviation * deviation % p
        return second.sum(0) % p, (second * deviation % p).sum(0) % p

    def scale(self, x: Array, p: int) -> Array:
        """Third by second central moment; of two numbers the difference that is positive (on the level of the normal form)."""
        if p not in self._scales:
            self._scales[p] = self._scale(x, p)
        return self._scales[p]

    def _scale(self, x: Array, p: int) -> Array:
        second, third = self._moments(x, p)
        result = third * field.inverse(second, p) % p
        pair = self.count == 2
        if pair.any():
            first = np.argmax(self.distinct, axis=0)
            last = self.distinct.shape[0] - 1 - np.argmax(self.distinct[::-1], axis=0)
            ends = [np.take_along_axis(x, at[None], axis=0)[0] for at in (first, last)]
            difference = (ends[1] - ends[0]) % p
            if self._flip is None:
                self._flip = ~field.is_square(difference, p)
            result = np.where(pair, np.where(self._flip, -difference % p, difference), result)
        return np.asarray(result)

    def normal_form(self, x: Array, p: int, mode: str) -> tuple[Array, Array]:
        """Returns for a set: does its scale point the way of `mode`, and a hash of the set without its scale and mean."""
        scale = self.scale(x, p)
        shape = self.deviation(x, p) * field.inverse(scale, p) % p
        with np.errstate(over="ignore"):
            key = np.where(self.distinct, mix(shape), np.uint64(0)).sum(0, dtype=np.uint64)
        points_up = field.is_square(scale, p) == (mode == "max")
        return np.where(self.count == 2, True, points_up).astype(np.uint64), mix(key, self.count)


def carry_members(numbers: "Numbers", result: Value, op: str, args: Sequence[Value]) -> Value:
    """Writes a max(S) + b as the maximum of a S + b; as a minimum where a is negative.

    Not where b varies along more dimensions: x[j] - min(S) is no minimum that a later one over j should look into.
    """
    owner = next(n for n, a in enumerate(args) if a.members)
    other = args[1 - owner] if len(args) == 2 else None
    if other is not None and np.broadcast_shapes(args[owner].shape, other.shape) != args[owner].shape:
        return result
    mode = args[owner].mode
    flips = op == "neg" or (op == "sub" and owner == 1)
    doubtful: Array | None = None
    if op in ("mul", "div"):
        assert other is not None
        if op == "div" and owner == 1:
            return result
        negative = numbers.sign(other) < 0
        if other.real is not None and negative.all():
            flips = True
        elif negative.any() or (other.kind != FINITE).any():
            # a derivation that scales a maximum knows that the factor is positive: where it is not, nothing is proven
            doubtful = np.where(negative | (other.kind != FINITE), ASSUMED, np.uint8(0))
    moved = []
    for member in args[owner].members:
        operands = [member if n == owner else a.plain() for n, a in enumerate(args)]
        image = numbers.apply(op, operands, result.dtype)
        moved.append(image if doubtful is None else replace(image, taint=image.taint | doubtful))
    opposite: Mode = "min" if mode == "max" else "max"
    return replace(result, members=tuple(moved), mode=opposite if flips else mode)


def choose_members(where: Array, result: Value, a: Value, b: Value) -> Value:
    """The members of a choice between two maxima (or a maximum and a number)."""
    if a.members and b.members and a.mode != b.mode:
        return result
    of_a, of_b = (v.members or (v,) for v in (a, b))
    count = max(len(of_a), len(of_b))
    of_a, of_b = (m + m[:1] * (count - len(m)) for m in (of_a, of_b))  # a repeated member changes nothing
    members = tuple(_pick(where, x, y) for x, y in zip(of_a, of_b, strict=True))
    return replace(result, members=members, mode=a.mode or b.mode)
