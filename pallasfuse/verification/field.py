"""Arithmetic in a tower of prime fields, vectorized: what the verifier computes with instead of floats.

Mirage (section 5) evaluates a program in Z_p and, inside exponents, in Z_q with q | p - 1: exp(x) is a root of unity to the
power x. This is one step of a tower. With p_0 = 2 p_1 + 1, p_1 = 2 p_2 + 1, ... (a Cunningham chain) a number is its residues
modulo every p_i, and with a root w_i of order p_(i+1) in Z_(p_i)

    exp: residue i of the result is w_i to the power (residue i + 1 of the argument);   log: the inverse, one level down.

So exponentials may nest as deep as the tower is high, and `exp(log x)`, `log(exp x)`, products and roots are exact. In every
Z_(p_i) "positive" means "is a square": products and quotients of positive numbers are positive, -1 is negative, each
positive number has exactly one positive square root, and exponentials are positive. Sums of positive numbers need not be positive:
that is where the analogy ends, and where `taint` comes in (see `value`).

Sines and cosines are powers of an element of order `turn` in the norm-one groups of the Z_(p_i)[i], of order p_i + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

CHAIN = (2136452639, 1068226319, 534113159, 267056579)
"""p_i = 2 p_(i+1) + 1; all are 3 mod 4 and 2 mod 3, and 2, 3, 5, 7, 11 and 13 are squares modulo the first two."""
TURN = 635849
"""A prime that divides every p_i + 1."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A Cunningham chain of primes, with a prime that divides every p_i + 1."""

    primes: tuple[int, ...]
    turn: int


STANDARD = Chain(CHAIN, TURN)


def power(base: Array, exponent: int, p: int) -> Array:
    """base ** exponent mod p, elementwise."""
    result = np.ones_like(base)
    while exponent:
        if exponent & 1:
            result = result * base % p
        exponent >>= 1
        if exponent:
            base = base * base % p
    return result


_FEW = 24
"""So many numbers are inverted one by one sooner than together."""


def inverse(x: Array, p: int) -> Array:
    """1 / x mod p; 0 where x is 0. Pairs are inverted together (Montgomery's trick), so it costs three products for each."""
    flat = np.where(x == 0, 1, x).reshape(-1)
    chain = []
    while flat.size > _FEW:
        odd = flat.size % 2
        even = np.append(flat, np.int64(1)) if odd else flat
        chain.append((even, odd))
        flat = even[0::2] * even[1::2] % p
    flat = np.array([pow(n, -1, p) for n in flat.tolist()], np.int64)
    for even, odd in reversed(chain):
        wide = np.empty_like(even)
        wide[0::2] = flat * even[1::2] % p
        wide[1::2] = flat * even[0::2] % p
        flat = wide[:-1] if odd else wide
    return np.where(x == 0, 0, flat.reshape(x.shape))


def is_square(x: Array, p: int) -> Array:
    """Says whether x is a nonzero square, which stands for "positive"."""
    return np.asarray(power(x, (p - 1) // 2, p) == 1)


def magnitude(x: Array, p: int) -> Array:
    """x or -x, whichever is positive."""
    return np.where(is_square(x, p), x, -x % p)


def square_root(x: Array, p: int) -> Array:
    """The positive square root of `magnitude(x)`."""
    return power(magnitude(x, p), (p + 1) // 4, p)


def cube_root(x: Array, p: int) -> Array:
    """The only cube root: p is 2 mod 3."""
    return power(x, (2 * p - 1) // 3, p)


_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15))


def mix(*words: Any) -> Array:
    """A random-looking 64-bit number for each combination of words (splitmix64)."""
    state: Any = np.uint64(0)
    with np.errstate(over="ignore"):
        for word in words:
            z = np.asarray(word).astype(np.uint64) + (state + np.uint64(1)) * _MULTIPLIERS[2]
            z = (z ^ (z >> np.uint64(30))) * _MULTIPLIERS[0]
            z = (z ^ (z >> np.uint64(27))) * _MULTIPLIERS[1]
            state = z ^ (z >> np.uint64(31))
    return np.asarray(state)


_BABY_STEPS = 1 << 22
_FILTER_BITS = 26


@lru_cache(maxsize=2 * len(CHAIN))
def _discrete_logarithm_table(p: int) -> tuple[int, Array, Array, Array]:
    """A generator g of the squares mod p, its first powers sorted, their exponents, and a filter of their low bits."""
    g = 4
    values = np.ones(1, np.int64)
    while values.size < _BABY_STEPS:
        values = np.concatenate([values, values * pow(g, values.size, p) % p])
    bits = _BABY_STEPS.bit_length()
    ordered = np.sort(
        values << bits | np.arange(values.size)
    )  # in one word, numbers are sorted faster than by an index
    values, exponents = ordered >> bits, ordered & ((1 << bits) - 1)
    seen = np.zeros(1 << _FILTER_BITS, bool)
    seen[values & ((1 << _FILTER_BITS) - 1)] = True
    return g, values, exponents, seen


def discrete_logarithm(x: Array, p: int) -> Array:
    """The exponent mod (p - 1) / 2 to which the generator 4 gives `magnitude(x)` (baby steps, giant steps)."""
    order = p // 2
    g, values, exponents, seen = _discrete_logarithm_table(p)
    current = magnitude(x, p).reshape(-1)
    result = np.zeros(current.shape, np.int64)
    active = np.arange(current.size)
    stride = pow(g, -_BABY_STEPS, p)
    for giant in range(-(-order // _BABY_STEPS)):
        candidates = np.flatnonzero(seen[current & ((1 << _FILTER_BITS) - 1)])
        at = np.minimum(np.searchsorted(values, current[candidates]), values.size - 1)
        hit = values[at] == current[candidates]
        found = candidates[hit]
        result[active[found]] = (exponents[at[hit]] + giant * _BABY_STEPS) % order
        keep = np.ones(current.size, bool)
        keep[found] = False
        active, current = active[keep], current[keep]
        if not active.size:
            break
        current = current * stride % p
    return result.reshape(x.shape)


_WINDOW_BITS = 4


@dataclass(frozen=True, eq=False)
class Tower:
    """The fields of one batch of trials: `levels` residues for each number, and for each trial fresh roots and seeds.

    Arrays of residues have the trials as their last dimension (or 1 where all trials agree).
    """

    levels: int
    trials: int
    chain: Chain
    generator: np.random.Generator
    seeds: Array
    """One 64-bit seed for each trial, for the uninterpreted functions."""
    roots: tuple[Array, ...]
    windows: tuple[Array, ...]
    """windows[i][w, d]: root i to the power d << (4 w)."""
    turns: tuple[tuple[Array, Array], ...]
    """For each level, cosine and sine of one step of the circle."""

    @property
    def primes(self) -> tuple[int, ...]:
        return self.chain.primes[: self.levels]

    def random(self, p: int, shape: Sequence[int]) -> Array:
        """Uniform residues, fresh for each trial."""
        return self.generator.integers(0, p, (*shape, self.trials))

    def root_power(self, level: int, exponent: Array) -> Array:
        """w_level ** exponent."""
        p = self.primes[level]
        table = self.windows[level]
        trial = np.arange(self.trials)
        result: Array = table[0][exponent & 15, trial]
        for window in range(1, table.shape[0]):
            result = result * table[window][(exponent >> (_WINDOW_BITS * window)) & 15, trial] % p
        return result

    def root_logarithm(self, level: int, x: Array) -> Array:
        """The exponent of w_level that gives `magnitude(x)`."""
        p, order = self.primes[level : level + 2]
        base = inverse(discrete_logarithm(self.roots[level], p), order)
        return np.asarray(discrete_logarithm(x, p) * base % order)

    def turn(self, level: int, angle: Array) -> tuple[Array, Array]:
        """Cosine and sine of `angle` steps of the circle, by doubling and adding."""
        p = self.primes[level]
        c, s = self.turns[level]
        rc, rs = np.ones_like(c), np.zeros_like(s)
        for bit in range(self.chain.turn.bit_length()):
            on = (angle >> bit) & 1 == 1
            nc, ns = (rc * c - rs * s) % p, (rs * c + rc * s) % p
            rc, rs = np.where(on, nc, rc), np.where(on, ns, rs)
            c, s = (c * c - s * s) % p, 2 * s * c % p
        return rc, rs


def tower(levels: int, trials: int, seed: int, chain: Chain = STANDARD) -> Tower:
    """Fresh roots and seeds for `trials` trials; levels is 1 + how deep exponentials and logarithms nest, at most 4."""
    generator = np.random.default_rng(seed)
    levels = min(levels, len(chain.primes))
    roots, windows = [], []
    for p in chain.primes[: levels - 1]:
        root = generator.integers(2, p - 1, trials)
        root = root * root % p
        roots.append(root)
        steps = []
        base = root
        for _ in range(-(-31 // _WINDOW_BITS)):
            digits = [np.ones_like(base)]
            for _ in range((1 << _WINDOW_BITS) - 1):
                digits.append(digits[-1] * base % p)
            steps.append(np.stack(digits))
            base = digits[-1] * base % p
        windows.append(np.stack(steps))
    seeds = generator.integers(0, 1 << 62, trials)
    return Tower(
        levels,
        trials,
        chain,
        generator,
        seeds,
        tuple(roots),
        tuple(windows),
        tuple(_circle(generator, trials, p, chain.turn) for p in chain.primes[:levels]),
    )


def _circle(generator: np.random.Generator, trials: int, p: int, turn: int) -> tuple[Array, Array]:
    """An element of order `turn` of the norm-one group for each trial: (a + bi) / (a - bi), to the power (p + 1) / turn."""
    a, b = generator.integers(1, p, (2, trials))
    scale = inverse((a * a % p + b * b % p) % p, p)
    c, s = (a * a - b * b) % p * scale % p, 2 * a * b % p * scale % p
    rc, rs = np.ones_like(c), np.zeros_like(s)
    exponent = (p + 1) // turn
    while exponent:
        if exponent & 1:
            rc, rs = (rc * c - rs * s) % p, (rs * c + rc * s) % p
        c, s = (c * c - s * s) % p, 2 * s * c % p
        exponent >>= 1
    return rc, rs
