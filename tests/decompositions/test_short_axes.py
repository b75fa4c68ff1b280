"""Arrays with a short last axis as one array for each position, against the same program as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse import _compat
from pallasfuse.decompositions.short_axes import LEAST_ELEMENTS, with_short_axes_apart
from pallasfuse.jaxpr_frontend import flatten
from tests.decompositions.test_windows import drawn

N = 96
POINTS, OTHERS, WEIGHTS = drawn((N, 3)), drawn((N, 3), seed=1), drawn((N, N), seed=2)


def distances(x, y):
    return jnp.sqrt(jnp.sum((x[:, None] - y[None]) ** 2, -1) + 1e-3)


def nearest(x, y):
    d = distances(x, y)
    return d.min(0), d.argmin(1)


def forces(x, y):
    return jax.grad(lambda p: jnp.sum(jnp.exp(-distances(p, y))))(x)


def weighted(x, y):
    d = x[:, None] - y[None]
    return jnp.einsum("ij,ijd->id", WEIGHTS, d / (1 + jnp.sum(d * d, -1, keepdims=True)))


def crossed(x, y):
    a, b = jnp.broadcast_to(x[:, None], (N, N, 3)), jnp.broadcast_to(y[None], (N, N, 3))
    return jnp.linalg.norm(jnp.cross(a, b), axis=-1)


def directions(x, y):
    d = x[:, None] - y[None]
    return d / jnp.linalg.norm(d, axis=-1, keepdims=True).clip(1e-3)


def turned(x, y):
    d = (x[:, None] - y[None]).transpose(2, 1, 0)
    return jnp.max(d, (0, 1)), d.reshape(3, N * N)[1], jnp.sort(d, axis=0)


def stacked(x, y):
    d = jnp.stack([x[:, None, 0] * y[None, :, 1], x[:, None, 1] - y[None, :, 2]], -1)
    return jax.nn.softmax(d, -1), jnp.prod(d, -1), jnp.any(d > 0, -1)


def chosen(x, y):
    d = x[:, None] - y[None]
    return jnp.where(jnp.asarray([True, False, True]), d, 0).sum(-1), d[..., 1], d[..., :2].sum(1), jnp.arange(3) * d


PROGRAMS = [distances, nearest, forces, weighted, crossed, directions, turned, stacked, chosen]


def apart(function, *args):
    jaxpr = flatten(jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*args))
    return jaxpr, with_short_axes_apart(jaxpr)


@pytest.mark.sampled(3, cover=("dtype",))
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_results_are_the_same(function, dtype):
    args = POINTS.astype(dtype), OTHERS.astype(dtype)
    jaxpr, made = apart(function, *args)
    assert made is not jaxpr
    found = _compat.eval_jaxpr(made, made.consts, *args)
    for have, want in zip(found, jax.tree.leaves(function(*args)), strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
        tolerance = 2e-5 if dtype == "float32" else 0.1
        got, expected = (np.asarray(a.astype("float32")) for a in (have, want))
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * max(1, np.abs(expected).max()))


def test_no_array_between_has_the_short_axis():
    """Neither the differences nor their squares are stored with three coordinates in the innermost loop."""
    _, made = apart(forces, POINTS, OTHERS)
    large = [v for e in made.eqns for v in e.outvars if np.prod(_compat.shape_of(v), dtype=int) >= LEAST_ELEMENTS]
    assert large and all(_compat.shape_of(v)[-1] == N for v in large)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: jnp.sum((x[:9, None] - y[None, :9]) ** 2, -1),
        lambda x, y: x[:, None] * 2 + 1,
        lambda x, y: jnp.sum((jnp.tile(x, (1, 3))[:, None] - jnp.tile(y, (1, 3))[None]) ** 2, -1),
        lambda x, y: lax.sort(x[:, None] - y[None].at[0].set(1)),
    ],
    ids=["few elements", "nothing is broadcast", "a longer axis", "sorted"],
)
def test_what_stays(function):
    jaxpr, made = apart(function, POINTS, OTHERS)
    assert made is jaxpr or not any(e.primitive.name == "reduce_sum" for e in jaxpr.eqns)


def test_what_the_user_leaves_stays():
    jaxpr = flatten(jax.make_jaxpr(distances)(POINTS, OTHERS))
    made = with_short_axes_apart(jaxpr, lambda eqn: eqn.primitive.name != "sub")
    (kept,) = (e for e in made.eqns if e.primitive.name == "sub")
    assert _compat.shape_of(kept.outvars[0]) == (N, N, 3)
    np.testing.assert_allclose(
        _compat.eval_jaxpr(made, made.consts, POINTS, OTHERS)[0], distances(POINTS, OTHERS), rtol=1e-5
    )
