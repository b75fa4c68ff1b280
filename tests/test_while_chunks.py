"""Loops that go on while a condition holds, in chunks that are kernels: the same results, and never more time by the price."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import _compat
from pallasfuse.loop_calls import loops_as_kernels
from pallasfuse.proof.loops import prove_loop
from pallasfuse.recurrences import AsKernel
from pallasfuse.while_chunks import in_chunks
from tests.running_loops import DEVICE, run

RULE = AsKernel(DEVICE)
NUMBERS = np.abs(np.random.default_rng(0).standard_normal(48)).astype("float32") + 0.5


def root(a):
    """The root of one number by Newton's steps, and how many these are."""

    def goes_on(state):
        x, n = state
        return (jnp.abs(x * x - a) > 1e-5) & (n < 50)

    return lax.while_loop(goes_on, lambda s: (0.5 * (s[0] + a / s[0]), s[1] + 1), (a, 0))


def jointly(a, most=50):
    """The roots of all numbers, until the last of them is found."""

    def goes_on(state):
        x, n = state
        return (jnp.max(jnp.abs(x * x - a)) > 1e-5) & (n < most)

    return lax.while_loop(goes_on, lambda s: (0.5 * (s[0] + a / s[0]), s[1] + 1), (a, 0))


def wandering(a):
    """Random walks that end where they leave a strip, with keys handed on."""

    def goes_on(state):
        x, _, n = state
        return (jnp.abs(x) < 4.0) & (n < 39)

    def step(state):
        x, key, n = state
        key, own = jax.random.split(key)
        return x + jax.random.normal(own), key, n + 1

    def one(a, number):
        return lax.while_loop(goes_on, step, (a, jax.random.fold_in(jax.random.key(7), number), 0))[::2]

    return jax.vmap(one)(a, jnp.arange(a.shape[0]))


LOOPS = {"a batch": jax.vmap(root), "jointly": jointly, "random": wandering}


def chunked(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args)
    return jaxpr, in_chunks(jaxpr, RULE)


@pytest.mark.parametrize("name", LOOPS)
def test_results_are_the_same(name):
    function = LOOPS[name]
    jaxpr, form = chunked(function, NUMBERS)
    kernels = loops_as_kernels(form)
    assert kernels and jaxpr is not form
    want, steps = function(NUMBERS)
    for found, number in (_compat.eval_jaxpr(form, form.consts, NUMBERS), run(form, NUMBERS)):
        np.testing.assert_array_equal(number, steps)
        np.testing.assert_allclose(found, want, rtol=2e-6)
    assert int(jnp.max(steps)) % kernels[0].trips  # the last chunk has steps that change nothing


def test_a_loop_may_end_before_its_first_step():
    _, form = chunked(partial(jointly, most=0), NUMBERS)
    assert loops_as_kernels(form)
    got, steps = _compat.eval_jaxpr(form, form.consts, NUMBERS)
    np.testing.assert_array_equal(got, NUMBERS)
    assert int(steps) == 0


@pytest.mark.parametrize("name", LOOPS)
def test_a_chunk_takes_no_longer_than_one_trip_of_xla(name):
    _, form = chunked(LOOPS[name], NUMBERS)
    for kernel in loops_as_kernels(form):
        trip_us = kernel.price_of_xla(DEVICE).us / kernel.trips
        assert kernel.price.us - DEVICE.kernel_us - DEVICE.launch_us <= trip_us


def test_what_takes_as_long_as_a_trip_of_xla_stays():
    jaxpr, form = chunked(jointly, np.ones(1 << 22, "float32"))
    assert form is jaxpr


def test_what_a_user_leaves_stays():
    def named(a):
        with jax.named_scope("left"):
            return jointly(a)

    jaxpr = jax.make_jaxpr(named)(NUMBERS)
    assert in_chunks(jaxpr, AsKernel(DEVICE, ("left",))) is jaxpr
    assert in_chunks(jaxpr, AsKernel(DEVICE, ("other",))) is not jaxpr


def test_a_kernel_of_a_chunk_is_proved():
    _, form = chunked(jax.vmap(root), NUMBERS)
    (kernel,) = loops_as_kernels(form)
    proof = prove_loop(kernel)
    assert proof.holds, str(proof)


def test_loops_inside_of_others_go_on_in_chunks_too():
    def outer(a):
        return lax.scan(lambda s, x: (s + jnp.sum(jointly(a + x)[0]), None), 0.0, jnp.arange(3.0))[0]

    _, form = chunked(outer, NUMBERS)
    assert loops_as_kernels(form)
    (got,) = _compat.eval_jaxpr(form, form.consts, NUMBERS)
    np.testing.assert_allclose(got, outer(NUMBERS), rtol=1e-5)


def test_a_plan_for_a_gpu_has_them():
    options = pf.FuseOptions(check=False, price=True)
    plan = pf.fuse(jax.vmap(root), options=options).explain(NUMBERS, target="triton")
    assert len(plan.loops) == 1 and plan.written_out
    plan = pf.fuse(jax.vmap(root), options=options).explain(NUMBERS, target="xla")
    assert not plan.loops
