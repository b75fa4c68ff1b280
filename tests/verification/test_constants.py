"""What real constants stand for."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.verification.arithmetic import Numbers
from pallasfuse.verification.chains import chain_of_squares
from pallasfuse.verification.constants import Constants
from pallasfuse.verification.field import inverse, is_square, square_root, tower

pytestmark = pytest.mark.any_jax

TRIALS = 6


def constants(levels=3):
    return Constants(tower(levels, TRIALS, 0))


def residues(found, value: float, dtype="float32"):
    return [np.broadcast_to(r, (TRIALS,)) for r in found.embed(value, dtype)]


def same(found, a, b):
    return all((x == y).all() for x, y in zip(a, b, strict=True))


def of_fraction(found, value: Fraction):
    return [np.full(TRIALS, value.numerator * pow(value.denominator, -1, p) % p) for p in found.moduli]


SIMPLE = [(0.1, Fraction(1, 10)), (0.5, Fraction(1, 2)), (0.001, Fraction(1, 1000)), (-3.0, Fraction(-3)),
          (2.0, Fraction(2)), (1 / 3, Fraction(1, 3)), (0.7, Fraction(7, 10)), (0.125, Fraction(1, 8)),
          (8192.0, Fraction(8192)), (1 / 8192, Fraction(1, 8192)), (0.0, Fraction(0))]  # fmt: skip


@pytest.mark.parametrize(("value", "fraction"), SIMPLE)
def test_rounded_fractions_stand_for_the_fraction(value, fraction):
    found = constants()
    rounded = float(np.float32(value))
    assert same(found, residues(found, rounded), of_fraction(found, fraction))


@pytest.mark.parametrize(("value", "dtype"), [(0.1, "float16"), (1e-6, "float32"), (0.7341921, "float32"), (-1e30, "float32"),
                                              (3.3, "bfloat16"), (1e-30, "float64")])  # fmt: skip
def test_numbers_that_would_be_simple_by_coincidence_are_variables_of_their_sign(value, dtype):
    found = constants()
    rounded = float(jnp.dtype(dtype).type(value))
    for x, p in zip(residues(found, rounded, dtype), found.tower.primes, strict=False):
        assert len(set(x.tolist())) == TRIALS
        assert (is_square(x, p) == (value > 0)).all()
    assert not found.rationals


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_tenth_in_every_type(dtype):
    found = constants()
    assert same(found, residues(found, float(np.dtype(dtype).type(0.1)), dtype), of_fraction(found, Fraction(1, 10)))


def test_the_logarithm_of_two_is_the_one_that_the_exponential_has():
    found = constants()
    for level in range(found.tower.levels - 1):
        log2 = residues(found, float(np.float32(math.log(2))))[level + 1]
        assert (found.tower.root_power(level, log2[None]) == 2).all()


@pytest.mark.parametrize("factor", [Fraction(1), Fraction(1, 2), Fraction(1, 8), Fraction(-3)])
def test_scales_with_a_logarithm_folded_in_are_recognised(factor):
    """1 / sqrt(64) * log2(e), as the GPU's exp2 has it."""
    found = constants()
    log2 = residues(found, math.log(2), "float64")
    direct = residues(found, float(np.float32(float(factor) * math.log2(math.e))))
    scale = of_fraction(found, factor)
    want = [inverse(x, p) * s % p for x, s, p in zip(log2, scale, found.moduli, strict=True)]
    assert same(found, direct, want)


def test_a_multiple_of_another_constant_is_recognised():
    found = constants()
    odd = 0.7341921  # stands for nothing
    base = residues(found, odd, "float64")
    for value, ratio in ((odd * 2, Fraction(2)), (-odd / 3, Fraction(-1, 3))):
        want = [b * s % p for b, s, p in zip(base, of_fraction(found, ratio), found.moduli, strict=True)]
        assert same(found, residues(found, float(np.float32(value))), want)
    inverted = [inverse(b, p) for b, p in zip(base, found.moduli, strict=True)]
    assert same(found, residues(found, float(np.float32(1 / odd))), inverted)
    log2 = residues(found, math.log(2), "float64")
    want = [b * n % p for b, n, p in zip(base, log2, found.moduli, strict=True)]
    assert same(found, residues(found, float(np.float32(odd * math.log(2)))), want)


def test_unrelated_constants_stay_distinct():
    found = constants()
    values = [0.1, 0.2, 0.3, 1.5957691, 0.044715, 0.7978846, 3.1415927, 2.7182817, 0.6931472, 1.442695, 1e-5, 1e-6, 1.0,
              -1.0, 0.0, 0.70710677, 0.5772157, 1.618034, 12.345678, 1e30, -1e30, 3.4e38]  # fmt: skip
    known = [tuple(int(r[0]) for r in residues(found, float(np.float32(v)))) for v in values]
    assert len(set(known)) == len(values)


def test_neighbours_that_stand_for_nothing_stay_distinct():
    found = constants()
    a = float(np.float32(0.7341921))
    b = float(np.float32(0.7351926))
    assert not same(found, residues(found, a), residues(found, b))


def test_dyadic_numbers_are_exact():
    found = constants()
    values = np.array([1.0, -0.375, 2.0**40, 3 * 2.0**-60, 0.0])
    for p, got in zip(found.moduli, found.dyadic(values), strict=True):
        fractions = [Fraction(float(v)) for v in values]
        assert got.tolist() == [f.numerator * pow(f.denominator, -1, p) % p for f in fractions]


def test_the_same_constant_is_the_same_in_every_program():
    found = constants()
    assert found.embed(0.7341921, "float32") is found.embed(0.7341921, "float32")


# --- roots, products, and what operations on constants give


@pytest.mark.parametrize(("value", "degree", "power"), [(32.0, 2, 1), (40.0, 2, 1), (2 / 3, 2, 1), (1 / 8, 2, 1), (48.0, 4, 1),
                                                        (55.0, 2, -1)])  # fmt: skip
def test_a_literal_root_is_the_positive_root(value, degree, power):
    found = constants()
    number = of_fraction(found, Fraction(value).limit_denominator(100) ** power)
    root = residues(found, float(np.float32(value ** (power / degree))))
    for x, n, p in zip(root, number, found.tower.primes, strict=False):
        assert (is_square(x, p)).all()
        assert (x**2 % p == (n if degree == 2 else square_root(n, p))).all()


COMPUTED = {
    "root": ("sqrt", 32.0, "float32"),
    "root that no field has": ("sqrt", 17.0, "float32"),
    "in float16": ("sqrt", 40.0, "float16"),
    "in bfloat16": ("sqrt", 40.0, "bfloat16"),
    "inverse root": ("rsqrt", 7.0, "float32"),
    "logarithm": ("log", 10.0, "float32"),
    "exponential": ("exp", 0.3, "float32"),
    "opaque": ("tanh", 0.5, "float32"),
    "negative": ("log", 0.1, "float32"),
    "cube root": ("cbrt", 5.0, "float32"),
    "of a variable": ("sqrt", 0.0447153, "float32"),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_folded_operation_is_the_operation(name):
    """The number that folding gives is the result of the operation; so are its multiples, its inverse, its products."""
    op, value, dtype = COMPUTED[name]
    numbers = Numbers(tower(3, TRIALS, 0))
    x = numbers.constant(value, dtype, 0)
    result = numbers.apply(op, [x], dtype)
    assert result.constant and all(level is not None for level in result.levels)
    exact = float(result.real.item())

    def folded(number, dtype=dtype):
        return numbers.constant(float(jnp.dtype(dtype).type(number)), dtype, 0)

    assert_same(folded(exact), result)
    if dtype == "float32":
        assert_same(folded(3 * exact), numbers.apply("mul", [result, numbers.constant(3.0, dtype, 0)], dtype))
        assert_same(folded(1 / exact), numbers.apply("div", [numbers.constant(1.0, dtype, 0), result], dtype))
        other = numbers.apply("sinh", [numbers.constant(0.7, dtype, 0)], dtype)
        product = numbers.apply("mul", [result, other], dtype)
        assert_same(folded(exact * float(other.real.item())), product)
    for x, p in zip(result.levels, numbers.tower.primes, strict=True):
        assert (is_square(x, p) == (exact > 0)).all()


def assert_same(a, b):
    for x, y in zip(a.levels, b.levels, strict=True):
        assert (x == y).all()


def test_what_is_folded_again_and_again_is_the_same():
    numbers = Numbers(tower(3, TRIALS, 0))
    total = numbers.constant(0.7, "float32", 0)
    rounded = np.float32(0.7)
    for op, evaluate in (("exp", np.exp), ("sqrt", np.sqrt), ("log", np.log), ("cosh", np.cosh), ("tanh", np.tanh)):
        total, rounded = numbers.apply(op, [total], "float32"), evaluate(rounded)
        assert_same(numbers.constant(float(rounded), "float32", 0), total)


def test_neighbouring_literals_of_a_coarse_type_stay_distinct():
    found = constants()
    a, b = (residues(found, float(jnp.bfloat16(v)), "bfloat16") for v in (0.6992, 0.7032))
    assert not same(found, a, b)
    assert same(found, residues(found, float(jnp.bfloat16(0.6992)), "float32"), a)  # a cast keeps the number


# --- chains in which given numbers are squares


def test_a_chain_in_which_the_constants_are_squares():
    standard = constants()
    residues(standard, 17.0)
    residues(standard, -19.0)
    assert standard.misplaced
    chain = chain_of_squares(frozenset(standard.rationals), 3)
    other = Constants(tower(3, TRIALS, 0, chain))
    for value in (17.0, -19.0, 17.0 / 19.0):
        for x, p in zip(residues(other, value), other.tower.primes, strict=False):
            assert (is_square(x, p) == (value > 0)).all()
    assert not other.misplaced


@pytest.mark.parametrize("root", [np.sqrt(80.0), 48**0.25, np.sqrt(2 / 3)])
def test_a_root_with_a_logarithm_folded_in_is_recognised(root):
    """1 / sqrt(80) * log2(e), as the GPU's exp2 has it."""
    found = constants()
    inverse_root = [inverse(x, p) for x, p in zip(residues(found, float(np.float32(root))), found.moduli, strict=True)]
    log2 = residues(found, math.log(2), "float64")
    want = [inverse(x, p) * r % p for x, r, p in zip(log2, inverse_root, found.moduli, strict=True)]
    folded = residues(found, float(np.float32(1 / np.float32(root) * np.log2(np.e))))
    for x, y, _ in zip(folded, want, found.tower.primes, strict=False):  # an angle it has not
        assert (x == y).all()
