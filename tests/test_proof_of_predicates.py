"""Predicates over integers: the tests of a right plan see them true and false, and prove it."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.form_choice import Placements, choose_groups
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import prove_plan, schedule_grouping
from pallasfuse.targets import XLA_CPU

pytestmark = pytest.mark.any_jax

KEYS = 256
J = jnp.arange(KEYS)

PREDICATES = {
    "sum modulo": lambda p, a, b: (J + p) % 8 < 5,
    "sum modulo, last": lambda p, a, b: (J + p) % 8 > 6,
    "remainder": lambda p, a, b: jax.lax.rem(J + p, 8) < 5,
    "floor division": lambda p, a, b: (J + p) // 16 == p // 16,
    "floor division, odd": lambda p, a, b: ((J + p) // 16) % 2 == 0,
    "bits": lambda p, a, b: ((J + p) & 7) < 5,
    "shift": lambda p, a, b: ((J >> p) & 1) == 0,
    "modulo an argument": lambda p, a, b: jnp.mod(J, p) < 3,
    "remainder by an argument": lambda p, a, b: jax.lax.rem(J, p) == 0,
    "array modulo": lambda p, a, b: a % 10 < 7,
    "array modulo a negative": lambda p, a, b: jnp.mod(a, -6) < -2,
    "offset that is never negative": lambda p, a, b: (a + 10) % 8 < 5,
    "bytes": lambda p, a, b: a.astype(jnp.uint8) % 10 < 7,
    "rows by columns": lambda p, a, b: (a * 31 + b[:, None]) % 17 < 9,
    "positions alone": lambda p, a, b: J % 128 < 100,
    "three moduli": lambda p, a, b: ((J + p) % 16 < 3) | ((J + p) % 7 < 4) | ((J - p) % 5 == 2),
    "ring buffer": lambda p, a, b: p - (p - J) % KEYS > p - 100,
    "pages": lambda p, a, b: (p // 16 > J // 16) | ((p // 16 == J // 16) & (p % 16 >= J % 16)),
}


def proof_of(predicate):
    def masked(x, p, a, b):
        return jax.nn.softmax(jnp.where(predicate(p, a, b), x, -jnp.inf), axis=-1)

    return proof_of_function(masked, ((64, KEYS), "float32"), ((), "int32"), ((KEYS,), "int32"), ((64,), "int32"))


def proof_of_function(function, *types):
    converted = convert(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(*t) for t in types)))
    placements = Placements(converted, XLA_CPU, FuseOptions(price=False))
    plan = schedule_grouping(placements, choose_groups(placements))
    assert plan.kernels
    return prove_plan(plan, delta=1e-4)


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("name", PREDICATES)
def test_masks_of_integers_are_proven(name):
    proof = proof_of(PREDICATES[name])
    assert proof.holds, (proof.uncovered, proof.counterexample)


def test_a_predicate_that_no_test_decides_is_not_covered():
    proof = proof_of(lambda p, a, b: (a % 128 < 100) & (a * a + p * p == -1))
    assert not proof.holds
    assert proof.counterexample is None
    assert any("was False in every test" in line for line in proof.uncovered)


def test_what_the_sign_of_a_number_decides_is_given():
    def entropy(x):
        p = jnp.exp(jax.nn.log_softmax(x, axis=-1))
        return jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0.0), axis=-1)

    proof = proof_of_function(entropy, ((64, KEYS), "float32"))
    assert proof.holds, (proof.uncovered, proof.counterexample)
    assert any(line.endswith(" is True") for line in proof.assumed)
