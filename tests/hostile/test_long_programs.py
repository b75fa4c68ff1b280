"""Long and deep programs: no recursion limit, planning time about linear, and the result of the plain program."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.fusion.segments import MOST_NESTS
from pallasfuse.options import FuseOptions
from tests.programs_by_name import softmax

ROWS = jax.ShapeDtypeStruct((16, 512), jnp.float32)
X = np.random.default_rng(0).normal(size=(4, 96)).astype("float32")
TILED = FuseOptions(tiles=(("j", 32),))


def same(function, x=X, **tolerance):
    got = pf.fuse(function, options=TILED)(x)
    np.testing.assert_allclose(got, jax.jit(function)(x), **{"rtol": 1e-4, "atol": 1e-5} | tolerance)


def chain(length):
    """A softmax's denominator behind `length` elementwise operations."""

    def function(x):
        for n in range(length):
            x = jnp.sin(x) if n % 3 == 0 else x * 1.01 if n % 3 == 1 else x + 0.1
        return jnp.exp(x - x.max(-1, keepdims=True)).sum(-1)

    return function


def repeated(layers):
    """Layers of two dependent chains and a product."""

    def function(x):
        for _ in range(layers):
            h = x - x.mean(-1, keepdims=True)
            h = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5)
            x = x + softmax(h)
        return x

    return function


def seconds(function, limit=None):
    start = time.perf_counter()
    plan = pf.fuse(function).explain(ROWS)
    return time.perf_counter() - start, plan


def test_a_chain_of_thousands_of_operations():
    assert sys.getrecursionlimit() <= 1000
    took_s, plan = seconds(chain(1200))
    assert plan.kernels
    assert took_s < 60
    same(chain(MOST_NESTS + 100))


@pytest.mark.deep  # tests/test_repetition.py says that more layers derive and price nothing more
def test_planning_time_of_repeated_layers_is_about_linear():
    seconds(repeated(3))
    times = {n: seconds(repeated(n))[0] for n in (4, 12)}
    assert times[12] < 6 * times[4] + 0.5  # quadratic would be 9 times


def test_repeated_layers_are_right():
    same(repeated(3))


def test_a_mask_is_part_of_every_segment():
    def function(x):
        visible = jnp.arange(x.shape[1]) <= jnp.arange(x.shape[0])[:, None]
        for _ in range(13):
            x = jnp.where(visible, softmax(jnp.where(visible, x, -jnp.inf)), 0.0)
        return x

    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    fused = pf.fuse(function, options=TILED)
    kernels = fused.explain(x).kernels
    assert len(kernels) > 1
    assert all(t.dtype != "bool" for k in kernels for t in k.program.inputs)  # computed from positions in each
    np.testing.assert_allclose(fused(x), jax.jit(function)(x), rtol=1e-4, atol=1e-6)


# --- shared parts: as trees these programs have 2**60 nodes


def squares(x):
    y = jnp.exp(x - x.max(-1, keepdims=True))
    for _ in range(60):
        y = y * y
    return y.sum(-1)


def doublings(x):
    y = x - x.max(-1, keepdims=True)
    for _ in range(60):
        y = y + y
    return jnp.exp(y).sum(-1)


def doubled_positions(x):
    p = jnp.arange(x.shape[0])[:, None]
    for _ in range(60):
        p = p + p
    return softmax(jnp.where(jnp.arange(x.shape[1]) <= p, x, -jnp.inf))


def nested_masks(x):
    i, j = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])
    p, q, r = j <= i, j <= i + 3, j >= i - 30
    for _ in range(60):
        p = (p & q) | (p & r)
    return softmax(jnp.where(p, x, -jnp.inf))


def negated_masks(x):
    i, j = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])
    p = j <= i
    for n in range(60):
        p = ~(p & (j <= i + n))
    return softmax(jnp.where(p, x, -jnp.inf))


def nested_selects(x):
    y = jnp.exp(x - x.max(-1, keepdims=True))
    for n in range(60):
        y = jnp.where(x > n / 60, y, y * 0.5)
    return y.sum(-1)


def divided(x):
    y = jnp.exp(x - x.max(-1, keepdims=True))
    total = y.sum(-1, keepdims=True)
    for _ in range(60):
        y = y / total + y
    return y.sum(-1)


@pytest.mark.sampled(7, cover=())
@pytest.mark.parametrize(
    "function",
    [squares, doublings, doubled_positions, nested_masks, negated_masks, nested_selects, divided],
    ids=lambda f: f.__name__,
)
def test_shared_parts_are_looked_at_once(function):
    start = time.perf_counter()
    text = str(pf.fuse(function, options=TILED).explain(X))
    assert time.perf_counter() - start < 20
    assert len(text) < 5_000_000
    same(function)


@pytest.mark.parametrize("function", [squares, nested_masks], ids=lambda f: f.__name__)
def test_shared_parts_on_a_gpu(function):
    assert pf.fuse(function, options=TILED).explain(X, target="triton").kernels


# --- deep calls and containers


def test_nested_jit_calls():
    def deeper(function):
        return jax.jit(lambda x: function(x * 1.001))

    function = softmax
    for _ in range(30):
        function = deeper(function)
    same(function)


def test_deep_pytrees():
    tree = X
    for n in range(100):
        tree = {"a": tree} if n % 2 else [tree, None]

    def function(tree):
        (x,) = jax.tree.leaves(tree)
        return jax.tree.map(lambda _: softmax(x), tree)

    got = pf.fuse(function)(tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    np.testing.assert_allclose(jax.tree.leaves(got)[0], softmax(X), rtol=1e-5)


@pytest.mark.deep  # `test_deep_pytrees` and the workloads have many arguments
def test_many_arguments_and_results():
    arrays = [X + n for n in range(60)]
    got = pf.fuse(lambda arrays: [a - a.max() for a in arrays])(arrays)
    for a, b in zip(got, arrays, strict=True):
        np.testing.assert_allclose(a, b - b.max(), rtol=1e-6)
