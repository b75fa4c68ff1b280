"""Rounding by additions, as the kernels for Triton do."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse.emission.pallas_kernel import round_away, round_even

VALUES = np.concatenate([
    np.linspace(-5, 5, 401), [0.49999997, 1.5, 2.5, 8388607.5, 8388609.0, 1e10, -1e10, 4194303.5, np.inf, -np.inf, np.nan],
    np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-5, 5).repeat(100),
])  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("ours", "method"), [
    (round_even, lax.RoundingMethod.TO_NEAREST_EVEN), (round_away, lax.RoundingMethod.AWAY_FROM_ZERO),
])  # fmt: skip
def test_it_is_xla_s_rounding(ours, method, dtype):
    x = jnp.asarray(VALUES, dtype)
    np.testing.assert_array_equal(np.asarray(ours(x), np.float64), np.asarray(lax.round(x, method), np.float64))
