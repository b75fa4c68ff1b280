"""Chains of primes in which given numbers are squares."""

from fractions import Fraction
from itertools import pairwise

import pytest
import sympy

from pallasfuse.verification.chains import chain_of_squares, is_square
from pallasfuse.verification.field import STANDARD, tower

pytestmark = pytest.mark.any_jax

ODD = {"one prime": (17,), "a fraction": (Fraction(19, 23),), "several": (17, 19, 23), "small ones too": (2, 3, 5, 17)}


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("name", ODD)
def test_a_chain_is_a_chain_of_primes_of_which_all_are_squares(name, levels):
    positive = frozenset(map(Fraction, ODD[name]))
    chain = chain_of_squares(positive, levels)
    assert len(chain.primes) == levels
    for p in chain.primes:
        assert sympy.isprime(p)
        assert p % 4 == 3 and p % 3 == 2  # roots
        assert (p + 1) % chain.turn == 0
        for value in positive:
            assert pow(value.numerator * pow(value.denominator, -1, p), (p - 1) // 2, p) == 1
        assert not is_square(Fraction(-1), p)
    assert all(p == 2 * q + 1 for p, q in pairwise(chain.primes))
    assert sympy.isprime(chain.turn)
    assert STANDARD.primes[0] // 2 < chain.primes[0] < 2**31


@pytest.mark.deep  # `test_a_chain_is_a_chain_of_primes_of_which_all_are_squares` has chains of fewer numbers
def test_there_is_none_for_too_many_numbers():
    assert chain_of_squares(frozenset(Fraction(p) for p in sympy.primerange(3, 200)), 3) is None


@pytest.mark.deep
def test_a_negative_number_is_none():
    assert chain_of_squares(frozenset({Fraction(-4)}), 1) is None


def test_a_tower_of_another_chain():
    fields = tower(3, 20, 0, chain_of_squares(frozenset({Fraction(17)}), 3))
    p, q, _ = fields.primes
    exponent = fields.random(q, (4,))
    power = fields.root_power(0, exponent)
    assert (fields.root_logarithm(0, power) == exponent).all()
    cos, sin = fields.turn(0, fields.random(fields.chain.turn, (4,)))
    assert ((cos * cos + sin * sin) % p == 1).all()
