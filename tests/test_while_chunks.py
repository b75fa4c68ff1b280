"""Loops that go on while a condition holds, in chunks that are kernels: the same results, and two trips' time at most."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import _compat
from pallasfuse.jaxpr_frontend import called, flatten
from pallasfuse.loop_calls import loops_as_kernels
from pallasfuse.proof.loops import prove_loop
from pallasfuse.recurrences import AsKernel
from pallasfuse.unrolled_loops import priced_us
from pallasfuse.while_chunks import _While, in_chunks
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


def largest(m):
    """The direction in which a matrix of 64 rows is the largest, by its powers."""

    def step(state):
        v, _, n = state
        w = m @ v
        w = w / jnp.linalg.norm(w)
        return w, jnp.linalg.norm(w - v), n + 1

    start = jnp.ones(64, jnp.float32) / 8, jnp.float32(jnp.inf), 0
    return lax.while_loop(lambda s: (s[1] > 1e-6) & (s[2] < 200), step, start)


LOOPS = {"a batch": jax.vmap(root), "jointly": jointly, "random": wandering}


def chunked(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args)
    return jaxpr, in_chunks(jaxpr, RULE)


@pytest.mark.sampled(3, cover=())
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


def whiles(jaxpr):
    """The while loops of a jaxpr, also those in bodies of others."""
    for eqn in flatten(jaxpr).eqns:
        if eqn.primitive.name == "while":
            yield eqn
        for body in called(eqn):
            yield from whiles(body)


@pytest.mark.parametrize("name", LOOPS)
def test_a_chunk_takes_no_longer_than_two_trips_of_xla(name):
    """With its launch, what is beside its kernel, and the error of prices; XLA's trip is one of a loop that makes as many."""
    jaxpr, form = chunked(LOOPS[name], NUMBERS)
    ((plain,), (loop,)) = (list(whiles(j)) for j in (jaxpr, form))
    (kernel,) = loops_as_kernels(form)
    chunk_us = priced_us(loop.params["body_jaxpr"], DEVICE)
    assert chunk_us >= kernel.price.us

    def steps(*operands):
        found = _While.of(plain)
        given = operands[: found.of_condition + found.of_body]

        def step(state, _):
            return found.after(given, *state), None

        state = list(operands[found.of_condition + found.of_body :])
        return lax.scan(step, (found.goes_on(given, state), state), length=64)[0]

    by_xla = jax.make_jaxpr(steps)(*(_compat.struct_of(v) for v in plain.invars))
    assert chunk_us * DEVICE.price_error <= 2 * priced_us(by_xla, DEVICE) / 64


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("around", ["while", "while with a sort", "condition", "two vmaps"])
def test_loops_inside_of_loops_that_have_no_chunks_go_on_in_chunks(around):
    def inner(x):
        return jax.vmap(root)(x)[0]

    functions = {
        "while": lambda a: lax.while_loop(lambda s: s[1] < 3, lambda s: (inner(s[0] + 1), s[1] + 1), (a, 0)),
        "while with a sort": lambda a: lax.while_loop(
            lambda s: s[1] < 3, lambda s: (jnp.sort(inner(s[0] + 1)), s[1] + 1), (a, 0)
        ),
        "condition": lambda a: lax.while_loop(lambda s: jnp.sum(inner(s)) < 200.0, lambda s: jnp.sort(s) + 1.0, a),
        "two vmaps": lambda a: jax.vmap(jax.vmap(root))(a.reshape(6, 8)),
    }
    function = functions[around]
    _, form = chunked(function, NUMBERS)
    assert loops_as_kernels(form)
    got = _compat.eval_jaxpr(form, form.consts, NUMBERS)
    for a, b in zip(got, jax.tree.leaves(function(NUMBERS)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_states_of_other_kinds():
    """Booleans, arrays that are written to, and constants from outside that the condition of a batch reads."""
    limits = jnp.linspace(1.0, 3.0, 48)

    def one(a, limit):
        def step(state):
            x, seen, ends, n = state
            x = x * 1.25
            return x, seen.at[n % 4].set(x), ends | (x > limit), n + 1

        start = a, jnp.zeros(4, jnp.float32), jnp.asarray(False), 0
        return lax.while_loop(lambda s: ~s[2] & (s[0] < limit * 2) & (s[3] < 20), step, start)

    def function(a):
        return jax.vmap(one)(a, limits)

    _, form = chunked(function, NUMBERS)
    assert loops_as_kernels(form)
    want = jax.tree.leaves(function(NUMBERS))
    for got in (_compat.eval_jaxpr(form, form.consts, NUMBERS), run(form, NUMBERS)):
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6)


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


def test_a_loop_that_multiplies_is_not_kept_for_its_product():
    """Its steps' kernel multiplies, too: nothing that a body could have had is lost."""

    m = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert loops_as_kernels(in_chunks(jax.make_jaxpr(largest)(m), RULE))
    plan = pf.fuse(largest, options=pf.FuseOptions(check=False, price=True)).explain(m, target="triton")
    assert plan.loops
