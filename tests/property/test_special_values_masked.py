"""Rows of which a mask leaves nothing: what is summed under the mask is zero then, not the NaN of an infinite maximum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from tests.property.programs import AXIS_NAMES

ROWS, COLUMNS, WIDTH = 9, 22, 3
TILES = tuple((name, 4) for name in AXIS_NAMES)


def masks():
    """Nothing, one element of the first, a middle and the last tile, whole tiles, and everything."""
    visible = np.random.default_rng(0).random((ROWS, COLUMNS)) < 0.6
    visible[0] = False
    for row, column in ((1, 0), (2, 9), (3, COLUMNS - 1)):
        visible[row] = np.arange(COLUMNS) == column
    visible[4, :8], visible[5, 8:], visible[6] = False, False, True
    return visible


X = np.random.default_rng(1).normal(size=(ROWS, COLUMNS)).astype(np.float32)
V = np.random.default_rng(2).normal(size=(COLUMNS, WIDTH)).astype(np.float32)


def below_the_largest(x, mask):
    y = jnp.where(mask, x, -jnp.inf)
    return y - jnp.max(y, -1, keepdims=True)


def exponentials(x, mask, v):
    return jnp.where(mask, jnp.exp(below_the_largest(x, mask)), 0).sum(-1)


def by_smallest(x, mask, v):
    y = jnp.where(mask, x, jnp.inf)
    return jnp.where(mask, jnp.exp(jnp.min(y, -1, keepdims=True) - y), 0).sum(-1)


def differences(x, mask, v):
    return jnp.where(mask, below_the_largest(x, mask), 0).sum(-1)


def weighted(x, mask, v):
    p = jnp.where(mask, jnp.exp(below_the_largest(x, mask)), 0)
    return p @ v / jnp.maximum(p.sum(-1, keepdims=True), 1e-9)


def softmax_where(x, mask, v):
    return jax.nn.softmax(x, where=mask) @ v


def softmax_of_masked(x, mask, v):
    return jax.nn.softmax(jnp.where(mask, x, -jnp.inf)) @ v


def guarded_largest(x, mask, v):
    y = jnp.where(mask, x, -jnp.inf)
    m = jnp.max(y, -1, keepdims=True)
    return jnp.exp(y - jnp.where(jnp.isfinite(m), m, 0)).sum(-1)


def compared_with_infinity(x, mask, v):
    y = jnp.where(mask, x, -jnp.inf)
    e = jnp.exp(y - jnp.max(y, -1, keepdims=True))
    return jnp.where(y == -jnp.inf, 0, e).sum(-1), jnp.where(jnp.isfinite(y), e, 0) @ v


def under_two_masks(x, mask, v):
    y = jnp.where(mask, x, -jnp.inf)
    e = jnp.exp(y - jnp.max(y, -1, keepdims=True))
    return jnp.where(mask & (jnp.arange(COLUMNS) % 3 > 0), e, 0).sum(-1)


def of_two_maxima(x, mask, v):
    """One of them is guarded, and hidden where the other is not."""
    y = jnp.where(mask, x, -jnp.inf)
    m = jnp.where(~mask & (x > 0.5), x, -jnp.inf).max(-1, keepdims=True)
    safe = jnp.where(jnp.isfinite(m), m, 0.0)
    return jnp.where(mask, y - y.max(-1, keepdims=True) + (x - safe), -jnp.inf).max(-1)


CHAINS = [
    compared_with_infinity,
    under_two_masks,
    of_two_maxima,
    exponentials,
    by_smallest,
    differences,
    weighted,
    softmax_where,
    softmax_of_masked,
    guarded_largest,
]


@pytest.mark.sampled(32, cover=("strict", "parts"))
@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize("strict", [False, True], ids=["usual", "strict"])
@pytest.mark.parametrize("chain", CHAINS, ids=lambda f: f.__name__)
def test_rows_without_a_visible_element(chain, strict, parts):
    fused = pf.fuse(chain, strict=strict, options=pf.FuseOptions(tiles=TILES, parts=parts))
    plan = fused.explain(X, masks(), V)
    assert plan.kernels
    if not strict and chain is not of_two_maxima:
        assert {k.strategy for k in plan.kernels} == {"rolling_update" if parts is None else "split_k"}
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), fused(X, masks(), V), chain(X, masks(), V))


@pytest.mark.sampled(16, cover=())
@pytest.mark.parametrize("chain", CHAINS, ids=lambda f: f.__name__)
def test_a_row_of_visible_infinities(chain):
    """Its sum is NaN in the program. A strict plan keeps that; another one lists where it does not."""
    x = X.copy()
    x[6] = -np.inf
    want, close = chain(x, masks(), V), functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(close, pf.fuse(chain, strict=True, options=pf.FuseOptions(tiles=TILES))(x, masks(), V), want)
    fused = pf.fuse(chain, options=pf.FuseOptions(tiles=TILES))
    got, exceptions = (
        fused(x, masks(), V),
        [e for k in fused.explain(x, masks(), V).kernels for e in k.group.exceptions],
    )
    if not any("is masked" in e for e in exceptions):
        jax.tree.map(close, got, want)
