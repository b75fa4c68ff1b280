"""The number of terms, counted by hand, and the number of tests that follows."""

import math

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.verification.bound import Size, miss_probability, sizes, trials_for
from pallasfuse.verification.field import CHAIN
from tests.programs_by_name import log_sum_exp, program_of, softmax, variance

pytestmark = pytest.mark.any_jax

N = 13


def terms(function, *shapes):
    loops = program_of(function, *(shapes or ((5, N),)))
    return sizes(loops)[loops.outputs[0]].terms


def chosen(n, k):
    return math.comb(n + k - 1, k)


COUNTED = {
    # two functions of one exponent each: their difference has two terms
    "one exponential": (jnp.exp, 1),
    "a product of exponentials": (lambda x: jnp.exp(x) * jnp.exp(2 * x), 1),
    "a sum of two exponentials": (lambda x: jnp.exp(x) + jnp.exp(2 * x), 2 * 2),
    "the sum of a row": (lambda x: jnp.sum(jnp.exp(x), -1), 2 * N),
    "a sum times an exponential": (lambda x: jnp.sum(jnp.exp(x), -1)[:, None] * jnp.exp(x), 2 * N),
    "a weighted sum": (lambda x: jnp.sum(jnp.exp(x) * x * x, -1), 2 * N),
    "a square of a sum": (lambda x: jnp.sum(jnp.exp(x), -1) ** 2, 2 * chosen(N, 2)),
    "a cube of a sum": (lambda x: jnp.sum(jnp.exp(x), -1) ** 3, 2 * chosen(N, 3)),
    "a product of two sums": (lambda x: jnp.sum(jnp.exp(x), -1) * jnp.sum(jnp.exp(2 * x), -1), 2 * N * N),
    "a quotient by a sum": (lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True), 2 * N),
    "softmax": (softmax, 2 * N),
    "the mean of a softmax": (lambda x: jnp.sum(softmax(x) * x, -1), 2 * chosen(N, 2)),
    "no exponential": (variance, 1),
    "expm1": (lambda x: jnp.sum(jnp.expm1(x), -1), 2 * (N + 1)),
    "cosh": (lambda x: jnp.sum(jnp.cosh(x), -1), 2 * 2 * N),
    "a root of a sum": (lambda x: jnp.sqrt(jnp.sum(jnp.exp(x), -1)), 2 * chosen(N, 2)),
    "a logarithm is a variable of its own": (log_sum_exp, 1),
    "a maximum is opaque": (lambda x: jnp.max(jnp.exp(x), -1), 1),
    "both sums over one axis": (lambda x: jnp.sum(jnp.sum(jnp.exp(x), -1), -1), 2 * 5 * N),
}


@pytest.mark.parametrize("name", COUNTED)
def test_terms_as_counted_by_hand(name):
    function, want = COUNTED[name]
    assert terms(function) == want


def test_sums_in_divisors_that_vary_are_multiplied_out():
    """sum over i of exp(x_ij) / l_i, with l_i = sum over j of exp(x_ij): at least the products of the other l_i."""
    assert terms(lambda x: jnp.sum(softmax(x), 0), (2, 3)) >= 2 * 3 * 3
    assert terms(lambda x: jnp.sum(softmax(x), 0), (3, 3)) > terms(lambda x: jnp.sum(softmax(x), 0), (2, 3))


def test_comparisons_of_inputs_count_as_bits():
    loops = program_of(lambda x: jnp.any(x > 0, -1), (5, 7))
    size = sizes(loops)[loops.outputs[0]]
    assert size.bits == 7
    assert size.terms == 1 << 7


def test_the_count_is_limited():
    assert terms(lambda x: jnp.sum(jnp.exp(x), -1) ** 40, (2, 8192)) <= 2 * 10**9


def with_terms(count):
    size = sizes(program_of(lambda x: jnp.sum(jnp.exp(x), -1), (2, count)))
    (found,) = [s for s in size.values() if s.terms == 2 * count]
    return found


@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-15])
def test_trials_grow_as_terms_times_the_logarithm_of_the_bound(delta):
    for count in (10, 100, 1000):
        trials = trials_for(with_terms(count), delta)
        assert trials == pytest.approx(2 * count * math.log(1 / delta), rel=0.06)
        miss = miss_probability(with_terms(count))
        assert miss**trials <= delta < miss ** (trials - 1)


def test_few_trials_without_exponentials():
    assert trials_for(Size(degree=40), 1e-9) == 2
    assert miss_probability(Size(degree=40)) == pytest.approx(160 / CHAIN[1])
    assert trials_for(Size(degree=10**12), 1e-9) >= 30  # degree beyond the field: half of all tests might miss


def test_more_of_anything_is_never_less_likely_to_be_missed():
    misses = [miss_probability(with_terms(n)) for n in (2, 3, 10, 100)]
    assert misses == sorted(misses)
    assert all(0 < m < 1 for m in misses)


def test_huge_shapes_cost_nothing():
    arguments = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    assert arguments.size > 1e7
    assert terms(softmax, (8192, 8192)) == 2 * 8192
