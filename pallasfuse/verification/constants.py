"""Real constants as residues.

A constant of a program is a rounded number: 0.1 stands for 1/10, 1.442695 for 1/log 2. The verifier computes with what it
stands for, so that a rewrite may fold constants: a small rational number, a rational multiple of log 2, or of another constant of
the program or its inverse. Any other constant is the dyadic number that it is.
"""

import math
from fractions import Fraction

import numpy as np

from pallasfuse.verification.field import CHAIN, TURN, Array, Tower, inverse

_ROUNDING = {"float64": 2.0**-46, "float32": 2.0**-21, "float16": 2.0**-9, "bfloat16": 2.0**-6}


_FEW = 1 << 12


def _rational(value: float, tolerance: float) -> Fraction | None:
    """A fraction so simple that it is no coincidence to find it within the tolerance."""
    if not math.isfinite(value):
        return None
    exact = Fraction(value)
    for largest in (16, 1 << 10, 1 << 20):
        near = exact.limit_denominator(largest)
        if near and abs(near - exact) <= tolerance * abs(exact):
            size = abs(near.numerator) * near.denominator
            return near if size < 0.002 / tolerance or (near == exact and size < _FEW) else None
    return None


class Constants:
    """Residues of real numbers, the same for every program that is evaluated with one tower."""

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self._atoms: list[tuple[float, list[Array]]] = []
        self._known: dict[tuple[float, str], list[Array]] = {}
        self._log2: list[Array] | None = None

    @property
    def moduli(self) -> tuple[int, ...]:
        """The primes of the levels, and that of the turn."""
        return (*self.tower.primes, TURN)

    def log2(self) -> list[Array]:
        """log 2: what makes exp(log 2) = 2; free where no exponential can tell."""
        if self._log2 is None:
            two = np.full(self.tower.trials, 2, np.int64)
            first = self.tower.random(CHAIN[0], ())
            rest = [self.tower.root_logarithm(i, two) for i in range(self.tower.levels - 1)]
            self._log2 = [first, *rest, self.tower.random(TURN, ())]
        return self._log2

    def dyadic(self, values: Array) -> list[Array]:
        """Finite floats as the dyadic numbers that they are, for each modulus."""
        mantissa, exponent = np.frexp(values)
        whole = (mantissa * 2.0**53).astype(np.int64)
        shift = exponent.astype(np.int64) - 53
        results = []
        for p in self.moduli:
            powers = np.array([pow(2, int(s), p) for s in shift.reshape(-1)], np.int64).reshape(shift.shape)
            results.append(whole % p * powers % p)
        return results

    def embed(self, value: float, dtype: str) -> list[Array]:
        """A finite constant, for each modulus: scalars of one or all trials, as arrays of one dimension."""
        key = (value, dtype)
        if key not in self._known:
            self._known[key] = self._find(value, _ROUNDING.get(dtype, 2.0**-46))
        return self._known[key]

    def _find(self, value: float, tolerance: float) -> list[Array]:
        if value == int(value) and abs(value) < 2**24:
            return self._fraction(Fraction(value))
        simple = _rational(value, tolerance)
        if simple is not None:
            return self._fraction(simple)
        log2 = math.log(2)
        for factor, invert in ((log2, False), (1 / log2, True)):
            ratio = _rational(value / factor, tolerance)
            if ratio is not None:
                return self._scaled(self.log2(), ratio, invert)
        for atom, residues in self._atoms:
            for base, of_atom in ((atom, False), (1 / atom, True)):
                for factor, of_log in ((1.0, None), (log2, False), (1 / log2, True)):
                    ratio = _rational(value / (base * factor), tolerance)
                    if ratio is not None and abs(ratio.numerator) * ratio.denominator < 64:
                        result = self._scaled(residues, ratio, of_atom)
                        if of_log is None:
                            return result
                        logs = self._scaled(self.log2(), Fraction(1), of_log)
                        return [a * b % p for a, b, p in zip(result, logs, self.moduli, strict=True)]
        residues = self.dyadic(np.array([value]))
        self._atoms.append((value, residues))
        return residues

    def _fraction(self, value: Fraction) -> list[Array]:
        return [np.array([value.numerator % p * pow(value.denominator, -1, p) % p], np.int64) for p in self.moduli]

    def _scaled(self, residues: list[Array], ratio: Fraction, invert: bool) -> list[Array]:
        base = [inverse(x, p) for x, p in zip(residues, self.moduli, strict=True)] if invert else residues
        return [x * f % p for x, f, p in zip(base, self._fraction(ratio), self.moduli, strict=True)]
