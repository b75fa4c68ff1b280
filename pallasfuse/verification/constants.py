"""Real constants as residues.

A constant of a program is a rounded number: 0.1 stands for 1/10, 1.442695 for 1/log 2, 5.656854 for the root of 32. The verifier
computes with what it stands for, so that a rewrite may fold constants. A positive constant is, in this order,
- the result of an operation on constants that the program has: that result;
- a simple rational number, or a root of one: a rational number is itself in every field, a root is the positive one;
- a rational multiple of log 2, of another constant of the program, of its root or inverse, of a product of two;
- else a variable: a random square in every field, because it is positive. What holds for every positive number holds for this
  one, and what is wrong for this one fails for almost every other.

A negative constant is the negative of a positive one.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache, partial

import numpy as np

from pallasfuse.verification.chains import is_square
from pallasfuse.verification.field import Array, Tower, inverse, square_root
from pallasfuse.verification.field import is_square as are_squares

type Residues = list[Array]

_SEVERAL_ROUNDINGS = {"float64": 2.0**-46, "float32": 2.0**-21, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""The largest relative error of a constant that was computed in a type."""
_FINE = 2.0**-20
"""Types coarser than this have too few numbers for a product of two constants to be no coincidence."""
_FEW, _VERY_FEW = 1 << 12, 1 << 6
"""The product of numerator and denominator of an exact fraction, and of the ratio of two constants, that may be no coincidence."""
_DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Digits of the binary mantissa."""
_LOG2 = math.log(2)
_LARGEST_INTEGER = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A positive constant that is no simple number."""

    value: float
    residues: Residues
    dtype: str
    """The type of a literal, which is rounded to it once; "" for the result of an operation."""

    def is_meant_by(self, value: float, dtype: str) -> bool:
        """Says whether a constant of another type (or another rounding) stands for this one."""
        if not self.dtype:
            return abs(value - self.value) <= _SEVERAL_ROUNDINGS[dtype] * self.value
        return self.value in (value, _rounded(value, self.dtype)) or _rounded(self.value, dtype) == value


def _rounded(value: float, dtype: str) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 2.0 ** _DIGITS[dtype]), exponent - _DIGITS[dtype])


@lru_cache(maxsize=1 << 14)
def _rational(value: float, tolerance: float) -> Fraction | None:
    """A fraction so simple that it is no coincidence to find it within the tolerance."""
    if not math.isfinite(value):
        return None
    exact = Fraction(value)
    odd = exact.numerator // (exact.numerator & -exact.numerator or 1)
    if abs(odd) < _VERY_FEW and exact.denominator & (exact.denominator - 1) == 0:
        return exact
    for largest in (16, 1 << 10, 1 << 20):
        near = exact.limit_denominator(largest)
        if near and abs(near - exact) <= tolerance * abs(exact):
            size = abs(near.numerator) * near.denominator
            return near if size < 0.002 / tolerance or (near == exact and size < _FEW) else None
    return None


def _simple_ratio(value: float, tolerance: float) -> Fraction | None:
    """One of the few fractions of very small numbers."""
    ratios, fractions = _simple_ratios()
    at = bisect_left(ratios, value)
    for n in (at - 1, at):
        if 0 <= n < len(ratios) and abs(ratios[n] - value) <= tolerance * value:
            return fractions[n]
    return None


@cache
def _simple_ratios() -> tuple[list[float], list[Fraction]]:
    found = sorted({Fraction(a, b) for a in range(1, _VERY_FEW) for b in range(1, _VERY_FEW // a + 1)})
    return [float(f) for f in found], found


class Constants:
    """Residues of real numbers, the same for every program that is evaluated with one tower."""

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self.rationals: set[Fraction] = set()
        """The positive rational numbers that were asked for."""
        self._entries: list[_Entry] = []
        self._independent: list[_Entry] = []
        self._known: dict[tuple[float, str], Residues] = {}
        self._log2: Residues | None = None

    @property
    def moduli(self) -> tuple[int, ...]:
        """The primes of the levels, and that of the turn."""
        return (*self.tower.primes, self.tower.chain.turn)

    @property
    def misplaced(self) -> bool:
        """Says whether a positive rational number is no square in one of the fields, and so behaves as a negative one."""
        return not all(is_square(n, p) for n in self.rationals for p in self.tower.primes)

    def log2(self) -> Residues:
        """log 2: what makes exp(log 2) = 2; free where no exponential can tell."""
        if self._log2 is None:
            two = np.full(self.tower.trials, 2, np.int64)
            first = self.tower.random(self.moduli[0], ())
            rest = [self.tower.root_logarithm(i, two) for i in range(self.tower.levels - 1)]
            self._log2 = [first, *rest, self.tower.random(self.tower.chain.turn, ())]
        return self._log2

    def dyadic(self, values: Array) -> Residues:
        """Finite floats as the dyadic numbers that they are, for each modulus."""
        mantissa, exponent = np.frexp(values)
        whole = (mantissa * 2.0**53).astype(np.int64)
        shift = exponent.astype(np.int64) - 53
        results = []
        for p in self.moduli:
            powers = np.array([pow(2, int(s), p) for s in shift.reshape(-1)], np.int64).reshape(shift.shape)
            results.append(whole % p * powers % p)
        return results

    def embed(self, value: float, dtype: str) -> Residues:
        """A finite constant, for each modulus: scalars of one or all trials, as arrays of one dimension."""
        key = (value, dtype)
        if key not in self._known:
            if value < 0:
                self._known[key] = self._negative(self.embed(-value, dtype))
            else:
                self._known[key] = self._number(value, dtype) or self._new(value, self._squares(), dtype)
        return self._known[key]

    def computed(self, value: float, residues: list[Array | None]) -> Residues:
        """The result of an operation on constants: as the operation has it, unless the number is known already."""
        if value < 0:
            turned = [None if x is None else -x % p for x, p in zip(residues, self.moduli, strict=True)]
            return self._negative(self.computed(-value, turned))
        key = (value, "")
        if value == int(value) and value < _LARGEST_INTEGER:
            return self._fraction(Fraction(value))
        if key not in self._known:
            known = self._number(value, "float64")
            self._known[key] = self._new(value, self._ordered(residues) if known is None else known, "", known is None)
        return self._known[key]

    def _ordered(self, residues: list[Array | None]) -> Residues:
        """Residues of a positive number; a variable where the operation does not give any, or gives those of a negative one."""
        free = self._squares()
        whole = [f if x is None else x.reshape(-1) for x, f in zip(residues, free, strict=True)]
        positive = all(are_squares(x, p).all() for x, p in zip(whole, self.tower.primes, strict=False))
        return whole if positive else free

    # --- known numbers

    def _number(self, value: float, dtype: str) -> Residues | None:
        """A positive number that is simple, or made of others."""
        if value == int(value) and value < _LARGEST_INTEGER:
            return self._fraction(Fraction(value))
        found = self._entry(value, dtype)
        if found is not None:
            return found
        number = _rational(value, _SEVERAL_ROUNDINGS[dtype])
        if number is not None:
            return self._fraction(number)
        root = self._root_of_rational(value, dtype)
        made = root or self._of_log2(value, dtype) or self._of_entries(value, dtype)
        return None if made is None else self._new(value, made, dtype, root is not None)

    def _entry(self, value: float, dtype: str) -> Residues | None:
        found = [e for e in self._entries if e.is_meant_by(value, dtype)]
        return min(found, key=lambda e: abs(e.value - value)).residues if found else None

    def _root_of_rational(self, value: float, dtype: str) -> Residues | None:
        for degree in (2, 4):
            tolerance = degree * _SEVERAL_ROUNDINGS[dtype]
            number = _rational(value**degree, tolerance) if 2.0**-64 < value < 2.0**64 else None
            if number is not None and number.numerator * number.denominator < _FEW:
                return self._root(self._fraction(number), degree)
        return None

    def _of_log2(self, value: float, dtype: str) -> Residues | None:
        for factor, invert in ((_LOG2, False), (1 / _LOG2, True)):
            ratio = _rational(value / factor, _SEVERAL_ROUNDINGS[dtype])
            if ratio is not None:
                return self._scaled(self.log2(), ratio, invert)
        return None

    def _of_entries(self, value: float, dtype: str) -> Residues | None:
        """A simple multiple of what can be made of the constants that are known."""
        tolerance = _SEVERAL_ROUNDINGS[dtype]
        for made, residues in self._made(tolerance):
            ratio = _simple_ratio(value / made, tolerance) if 0 < made < math.inf else None
            if ratio is not None:
                return self._scaled(residues(), ratio, False)
        for entry in self._independent:
            for base, inverted in ((entry.value, False), (1 / entry.value, True)):
                ratio = _simple_ratio(value * value / base, 2 * tolerance)
                if ratio is not None:
                    return self._root(self._scaled(entry.residues, ratio, inverted), 2)
        return None

    def _made(self, tolerance: float) -> Iterator[tuple[float, Callable[[], Residues]]]:
        """Known constants and their inverses; the same times and over log 2; products of two."""
        single: list[tuple[float, Callable[[], Residues]]] = []
        for entry in self._independent:
            single.append((entry.value, partial(self._itself, entry.residues)))
            single.append((1 / entry.value, partial(self._inverse, entry.residues)))
        yield from single
        for a, left in single:
            yield a * _LOG2, partial(self._later_product, left, self.log2)
            yield a / _LOG2, partial(self._later_product, left, lambda: self._inverse(self.log2()))
        if tolerance > _FINE:
            return
        for n, (a, left) in enumerate(single):
            for b, right in single[n:]:
                yield a * b, partial(self._later_product, left, right)

    # --- residues

    def _new(self, value: float, residues: Residues, dtype: str, independent: bool = True) -> Residues:
        """Remembers a constant with its residues.

        independent: it is not a multiple of other constants, so that others may be multiples of it.
        """
        entry = _Entry(value, residues, dtype)
        self._entries.append(entry)
        if independent:
            self._independent.append(entry)
        return residues

    def _squares(self) -> Residues:
        roots = [self.tower.random(p, ()) for p in self.moduli]
        return [np.maximum(x, 1) ** 2 % p for x, p in zip(roots, self.moduli, strict=True)]

    def _fraction(self, value: Fraction) -> Residues:
        if value > 0:
            self.rationals.add(value)
        return [np.array([value.numerator % p * pow(value.denominator, -1, p) % p], np.int64) for p in self.moduli]

    def _root(self, residues: Residues, degree: int) -> Residues:
        """The positive root. As an angle it is any number."""
        levels = residues[:-1]
        while degree > 1:
            levels = [square_root(x, p) for x, p in zip(levels, self.tower.primes, strict=True)]
            degree //= 2
        return [*levels, self.tower.random(self.tower.chain.turn, ())]

    def _negative(self, residues: Residues) -> Residues:
        return [-x % p for x, p in zip(residues, self.moduli, strict=True)]

    def _inverse(self, residues: Residues) -> Residues:
        return [inverse(x, p) for x, p in zip(residues, self.moduli, strict=True)]

    def _itself(self, residues: Residues) -> Residues:
        return residues

    def _later_product(self, a: Callable[[], Residues], b: Callable[[], Residues]) -> Residues:
        return self._product(a(), b())

    def _product(self, a: Residues, b: Residues) -> Residues:
        return [x * y % p for x, y, p in zip(a, b, self.moduli, strict=True)]

    def _scaled(self, residues: Residues, ratio: Fraction, invert: bool) -> Residues:
        return self._product(self._inverse(residues) if invert else residues, self._fraction(ratio))
