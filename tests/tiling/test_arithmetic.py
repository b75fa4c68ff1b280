"""Cheaper arithmetic: an exponential less one, to which one is added."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.expr import Apply, apply, const, postorder, read, select
from pallasfuse.ir.tile_program import every, expressions
from pallasfuse.tiling.arithmetic import EXPONENTIAL_CONDITION, rewrite, shifts_exponentials


def _plan(feature, dtype=jnp.bfloat16):
    struct = jax.ShapeDtypeStruct((512, 64), dtype)
    return pf.fuse(lambda k, v: feature(k).T @ v).trace(struct, struct).fuse("triton").tile().plan


def _operations(plan):
    programs = [p.program for k in plan.kernels for p in k.phases]
    nodes = (n for p in programs for s in every(p.body) for root in expressions(s) for n in postorder(root))
    return {n.op for n in nodes if isinstance(n, Apply)}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_one_and_an_exponential_less_one_are_an_exponential(dtype):
    plan = _plan(lambda k: jax.nn.elu(k) + 1, dtype)
    assert "exp" in _operations(plan) and "expm1" not in _operations(plan)
    assert EXPONENTIAL_CONDITION in plan.conditions


@pytest.mark.parametrize("feature", [lambda k: jax.nn.elu(k) + 2, lambda k: jnp.expm1(k) - 1, lambda k: jnp.exp(k) + 1])
def test_other_sums_stay(feature):
    plan = _plan(feature)
    assert EXPONENTIAL_CONDITION not in plan.conditions
    assert ("expm1" in _operations(plan)) == ("expm1" in str(jax.make_jaxpr(feature)(jnp.ones(2))))


@pytest.mark.parametrize("feature", [lambda k: jax.nn.elu(k) + 1, lambda k: 1 + jnp.where(k < 1, k * 2, jnp.expm1(-k))])
def test_it_has_the_same_value(feature):
    struct = jax.ShapeDtypeStruct((48, 16), jnp.float32)

    def pooled(k):  # two reductions are a kernel
        return jax.nn.softmax(feature(k), 0)

    before = pf.fuse(pooled).trace(struct).fuse("interpret").tile().plan.kernels[0].phases[0].program
    after = rewrite(before)
    k = np.linspace(-9, 3, 48 * 16).reshape(48, 16)
    (name,) = (t.name for t in before.inputs)
    want, got = (evaluate_tiles(p, {name: k}) for p in (before, after))
    assert before != after
    for out in want:
        np.testing.assert_allclose(got[out], want[out], rtol=1e-12)


def test_choices_in_one_another_do_not_take_forever():
    x = read("x", (Axis("i", 4),), "float32")
    value = apply("expm1", x)
    for n in range(60):  # each is read twice by the next: as a tree there are 2 ** 60
        p = apply("lt", x, const(float(n), "float32"))
        value = select(p, value, select(apply("not", p), value, const(float(n), "float32")))
    start = time.perf_counter()
    shifts_exponentials([apply("add", value, const(1.0, "float32"))])
    assert time.perf_counter() - start < 1.0
