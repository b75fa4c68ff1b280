"""Other chains of primes, for programs whose constants the standard one does not order.

A positive number must be a square in every field of a tower: only then do roots, maxima and absolute values of its multiples
behave as those of positive numbers do. Of a rational number it depends on the primes: 17 is no square modulo the
first prime of `field.STANDARD`. So a chain is looked for in which the constants of one program are squares.
"""

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

import numpy as np

from pallasfuse.verification.field import STANDARD, Array, Chain

_WINDOW = 1 << 20
_MOST_WINDOWS = 40
"""The primes stay near the standard ones, which the bound on the error counts with."""
_SMALL_PRIMES = tuple(p for p in range(5, 400) if all(p % d for d in range(2, int(p**0.5) + 1)))
_WITNESSES = (2, 3, 5, 7)
"""Bases for which the Miller-Rabin test is exact below 3 215 031 751."""
_SMALLEST_TURN = 1 << 15


def is_square(value: Fraction, p: int) -> bool:
    """Says whether the number is a nonzero square modulo p."""
    return pow(value.numerator * value.denominator, (p - 1) // 2, p) == 1


@lru_cache(maxsize=64)
def chain_of_squares(positive: frozenset[Fraction], levels: int) -> Chain | None:
    """A chain of `levels` primes modulo each of which all numbers are squares, or None where none is found nearby."""
    for last in _last_primes(levels):
        primes = tuple(((last + 1) << n) - 1 for n in range(levels - 1, -1, -1))
        if not all(is_square(value, p) for p in primes for value in positive):
            continue
        if all(_is_prime(p) for p in primes):
            turn = _largest_factor(last + 1)
            if turn >= _SMALLEST_TURN:
                return Chain(primes, turn)
    return None


def _last_primes(levels: int) -> Iterator[int]:
    """Candidates for the last prime of a chain, from the largest down: no number of the chain has a small factor."""
    top = (STANDARD.primes[0] + 1 >> levels - 1) // 12 * 12
    for window in range(_MOST_WINDOWS):
        # 3 mod 4, for square roots, and 2 mod 3, for cube roots
        candidates = top - 1 - 12 * (np.arange(_WINDOW // 12, dtype=np.int64) + window * (_WINDOW // 12))
        candidates = candidates[candidates > 1 << 20]
        for r in _SMALL_PRIMES:
            candidates = _without_factor(candidates, r, levels)
        yield from candidates.tolist()


def _without_factor(last: Array, r: int, levels: int) -> Array:
    allowed = np.array([all(n * 2**level % r != 1 for level in range(levels)) for n in range(r)])
    return np.asarray(last[allowed[(last + 1) % r]])


def _is_prime(n: int) -> bool:
    """The Miller-Rabin test, for odd numbers that fit in 31 bits."""
    odd = n - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    for witness in _WITNESSES:
        x = pow(witness, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def _largest_factor(n: int) -> int:
    """The largest prime factor of a number that fits in 31 bits."""
    largest, divisor = 1, 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            n //= divisor
            largest = divisor
        divisor += 1
    return max(largest, n)
