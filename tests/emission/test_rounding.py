"""Rounding by additions, as the kernels for Triton do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse.emission.pallas_kernel import round_away, round_even
from tests.test_execution import on_h100

VALUES = np.concatenate([
    np.linspace(-5, 5, 401), [0.0, -0.0, -0.3], [0.49999997, 1.5, 2.5, 8388607.5],
    [8388609.0, 1e10, -1e10, 4194303.5, np.inf, -np.inf, np.nan],
    np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-5, 5).repeat(100),
])  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("ours", "method"), [
    (round_even, lax.RoundingMethod.TO_NEAREST_EVEN), (round_away, lax.RoundingMethod.AWAY_FROM_ZERO),
])  # fmt: skip
def test_it_is_xla_s_rounding(ours, method, dtype):
    x = jnp.asarray(VALUES, dtype)
    have, want = (np.asarray(a, np.float64) for a in (ours(x), lax.round(x, method)))
    np.testing.assert_array_equal(have, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(have)[number], np.signbit(want)[number])


def quantised_rows(x):
    """One value for each row is rounded, which has no dimension in a block of one row."""
    s = jnp.round(jnp.max(jnp.abs(x), -1, keepdims=True) * 16)
    return jnp.sum(x / (s + 1), -1), s[:, 0]


def rounded_weights(x, w):
    """Weights of three coordinates, which are written out."""
    return jnp.sum(jnp.sum(x * jnp.round(w), -1) ** 2, -1) + jnp.sum(jnp.max(x, -1), -1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("function", "shapes"), [
    (quantised_rows, [(64, 8192)]), (rounded_weights, [(64, 512, 3), (3,)]),
])  # fmt: skip
def test_triton_has_a_kernel_for_it(function, shapes, dtype):
    structs = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    fused = pf.fuse(function, target="triton", options=pf.FuseOptions(check=False, price=False))
    with on_h100():
        text = jax.jit(fused).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text
