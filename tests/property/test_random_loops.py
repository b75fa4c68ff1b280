"""Random loops: their kernels, run in the interpreter, compute what the loops do, and so do those of their gradients."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loops_of_programs import normal
from tests.running_loops import scans_of, with_kernels

STEPS = (
    "row", "gain", "tanh", "shift", "centre", "scores", "weights", "choose", "running", "best", "flip", "pair", "norm",
)  # fmt: skip


def trip_of(seed):
    """A random body: the state is a matrix, a number for each of its rows, and a counter."""
    names = random.Random(seed).choices(STEPS, k=random.Random(seed + 1).randint(2, 6))

    def trip(constants, state, row):
        gain, weights, table = constants
        x, level, count = state
        own, mask = row
        left = [jnp.sum(x, -1)]
        for name in names:
            match name:
                case "row":
                    x = 0.5 * x + own
                case "gain":
                    x = x * gain
                case "tanh":
                    x = jnp.tanh(x)
                case "shift":
                    x = jnp.concatenate([level[:, None], x[:, :-1]], 1)
                case "centre":
                    x = x - x.mean(-1, keepdims=True)
                case "scores":
                    x = jax.nn.logsumexp(x[:, :, None] + table, axis=1) * 0.5
                case "weights":
                    x = x @ weights
                case "choose":
                    x = jnp.where(mask[:, None], x, own)
                case "running":
                    x = jnp.cumsum(x, 1) * 0.25
                case "best":
                    level = level + jnp.argmax(x, 1).astype(jnp.float32) * 0.125
                case "flip":
                    x = x[:, ::-1]
                case "pair":
                    x = x + (x[:, :, None] * own[:, None, :]).mean(1)
                case "norm":
                    level = 0.5 * level + jnp.max(jnp.abs(x), -1)
        left.append(x)
        return (x, level + 0.5, count + 1), tuple(left)

    return trip


def loop(seed):
    trip, rng = trip_of(seed), random.Random(seed)
    n, reverse = rng.choice((4, 6)), rng.random() < 0.3

    def function(gain, weights, table, x, level, rows, mask):
        def step(state, row):
            return trip((gain, weights, table), state, row)

        return jax.lax.scan(step, (x, level, jnp.int32(0)), (rows, mask), reverse=reverse)

    args = (
        normal(seed, n),
        normal(seed + 1, n, n, scale=0.4),
        normal(seed + 2, n, n),
        normal(seed + 3, 3, n),
        normal(seed + 4, 3),
    )
    return function, (*args, normal(seed + 5, 6, 3, n), normal(seed + 6, 6, 3) > 0)


def compared(function, args, rtol):
    """Compare a program with the kernels of its loops; returns how many loops it has, and how many kernels."""
    jaxpr, loops = scans_of(function, *args)
    results, count = with_kernels(jaxpr, loops, *args)
    for got, want in zip(results, jax.tree.leaves(function(*args)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)
    return len(loops), count


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.deep] if n not in (1, 3) else []) for n in range(60)]
)
def test_a_random_loop_is_one_kernel(seed):
    function, args = loop(seed)
    assert compared(function, args, 1e-4) == (1, 1)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.deep] if n != 1 else []) for n in range(40)])
def test_gradients_of_random_loops(seed):
    function, args = loop(seed)

    def loss(*floats):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(*floats, args[-1])) if x.dtype == jnp.float32)

    loops, count = compared(jax.grad(loss, argnums=(0, 1, 2, 3, 4, 5)), args[:-1], 1e-3)
    assert loops == count == 2
