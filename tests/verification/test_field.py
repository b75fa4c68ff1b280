"""The tower of prime fields: its primes, roots, logarithms and circles."""

from itertools import pairwise

import numpy as np
import pytest
import sympy

from pallasfuse.verification import field
from pallasfuse.verification.field import CHAIN, TURN, tower

pytestmark = pytest.mark.any_jax

LEVELS = range(len(CHAIN))


def random_residues(p: int, count: int = 300, seed: int = 0):
    return np.random.default_rng(seed).integers(1, p, count)


# --- the chain


def test_the_chain_is_a_cunningham_chain_of_primes_near_two_to_the_31():
    assert all(sympy.isprime(p) for p in CHAIN)
    assert 2**30 < CHAIN[0] < 2**31
    for p, q in pairwise(CHAIN):
        assert p == 2 * q + 1
    for p in CHAIN:
        assert p % 4 == 3
        assert p % 3 == 2


def test_the_turn_is_a_prime_that_divides_the_order_of_every_circle():
    assert sympy.isprime(TURN)
    assert all((p + 1) % TURN == 0 for p in CHAIN)


def test_small_primes_are_positive():
    for p in CHAIN[:2]:
        assert field.is_square(np.array([2, 3, 5, 7, 11, 13]), p).all()


# --- one field


@pytest.mark.parametrize("p", CHAIN)
def test_powers_and_inverses(p):
    x = random_residues(p)
    assert field.power(x[:5], 12345, p).tolist() == [pow(int(n), 12345, p) for n in x[:5]]
    assert (field.power(x, 0, p) == 1).all()
    assert (x * field.inverse(x, p) % p == 1).all()


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 129, 1000])
def test_inverses_of_any_number_of_elements(count):
    x = random_residues(CHAIN[0], count)
    x[::7] = 0
    expected = [pow(int(n), -1, CHAIN[0]) if n else 0 for n in x]
    assert field.inverse(x, CHAIN[0]).tolist() == expected


def test_inverses_keep_the_shape():
    x = random_residues(CHAIN[1], 120).reshape(3, 8, 5)
    assert field.inverse(x, CHAIN[1]).shape == (3, 8, 5)


@pytest.mark.parametrize("p", CHAIN)
def test_positive_numbers_are_closed_under_products_and_have_one_positive_root(p):
    x = random_residues(p, seed=1)
    positive = field.is_square(x, p)
    assert (positive != field.is_square(-x % p, p)).all()  # minus one is negative
    y = random_residues(p, seed=2)
    assert (field.is_square(x * y % p, p) == (positive == field.is_square(y, p))).all()
    root = field.square_root(x, p)
    assert (root * root % p == field.magnitude(x, p)).all()
    assert field.is_square(root, p).all()
    assert (field.magnitude(x, p)[positive] == x[positive]).all()
    assert not field.is_square(np.array([0]), p).any()


@pytest.mark.parametrize("p", CHAIN)
def test_cube_roots(p):
    x = random_residues(p)
    root = field.cube_root(x, p)
    assert (root * root % p * root % p == x).all()


# --- exponentials and logarithms


def test_roots_have_the_order_of_the_next_prime():
    fields = tower(4, 20, 0)
    for level, root in enumerate(fields.roots):
        p, q = CHAIN[level], CHAIN[level + 1]
        assert (root != 1).all()
        assert (field.power(root, q, p) == 1).all()  # q is prime: the order is q


def test_powers_of_the_root():
    fields = tower(4, 7, 3)
    for level, root in enumerate(fields.roots):
        exponent = fields.random(CHAIN[level + 1], (4,))
        found = fields.root_power(level, exponent)
        expected = [[pow(int(r), int(e), CHAIN[level]) for r, e in zip(root, row, strict=True)] for row in exponent]
        assert found.tolist() == expected
        assert (fields.root_power(level, np.zeros_like(exponent)) == 1).all()


def test_a_discrete_logarithm_undoes_a_power():
    fields = tower(4, 3, 1)
    for level in range(2):
        exponent = fields.random(CHAIN[level + 1], (3,))
        power = fields.root_power(level, exponent)
        assert (fields.root_logarithm(level, power) == exponent).all()
        assert (fields.root_logarithm(level, -power % CHAIN[level]) == exponent).all()  # of the magnitude
        x = random_residues(CHAIN[level], 5)
        found = field.discrete_logarithm(x, CHAIN[level])
        magnitudes = field.magnitude(x, CHAIN[level])
        assert [pow(4, int(n), CHAIN[level]) for n in found] == magnitudes.tolist()


# --- circles


def test_turns_have_the_order_of_a_circle():
    fields = tower(2, 9, 0)
    for level, p in enumerate(fields.primes):
        c, s = fields.turns[level]
        assert ((c * c + s * s) % p == 1).all()
        assert ((c != 1) | (s != 0)).all()
        whole = fields.turn(level, np.full((1, 9), TURN - 1))  # one step short of all the way round
        assert (whole[0] == c).all()
        assert (whole[1] == -s % p).all()


def test_angles_add():
    fields = tower(2, 5, 0)
    a, b = (fields.random(TURN, (6,)) for _ in range(2))
    for level, p in enumerate(fields.primes):
        (ca, sa), (cb, sb), (cc, sc) = (fields.turn(level, angle % TURN) for angle in (a, b, a + b))
        assert (cc == (ca * cb - sa * sb) % p).all()
        assert (sc == (sa * cb + ca * sb) % p).all()


# --- what is drawn


def test_a_tower_is_fresh_in_every_trial_and_for_every_seed():
    one, same, other = tower(3, 50, 1), tower(3, 50, 1), tower(3, 50, 2)
    for name in ("seeds", "roots"):
        a, b, c = (np.asarray(getattr(t, name)) for t in (one, same, other))
        assert (a == b).all()
        assert not (a == c).any()
        assert all(len(np.unique(row)) == 50 for row in a.reshape(-1, 50))
    for (a, _), (b, _) in zip(one.turns, other.turns, strict=True):
        assert len(np.unique(a)) == 50
        assert not (a == b).any()
    assert one.random(CHAIN[0], (2, 3)).shape == (2, 3, 50)


def test_a_tower_has_at_most_as_many_levels_as_the_chain():
    assert tower(9, 1, 0).primes == CHAIN
    assert tower(1, 1, 0).roots == ()


def test_mixed_words_look_random():
    x = np.arange(1 << 14)
    mixed = field.mix(x)
    assert len(np.unique(mixed)) == len(x)
    ones = np.unpackbits(mixed.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.005
    assert (field.mix(x, 1) != field.mix(1, x)).sum() > len(x) - 2  # the order of the words counts
    assert field.mix(np.uint64(3), np.uint64(4)) == field.mix(3, 4)
