"""Moments of data far from zero, in one pass and in float32: the frames must be stable and refined."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf

pytestmark = pytest.mark.optimized


def moment(power):
    return lambda x: jnp.mean((x - jnp.mean(x, -1, keepdims=True)) ** power, -1)


@pytest.mark.sampled(8, cover=("target",))
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("tile", [256, 512, 1000, 8192])
@pytest.mark.parametrize("power", [2, 3])
def test_moments_far_from_zero(power, tile, target):
    x = (1e4 + np.random.default_rng(power).standard_normal((4, 8192))).astype(np.float32)
    centred = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    fused = pf.fuse(moment(power), target=target, options=pf.FuseOptions(tiles=(("j", tile),)))
    (kernel,) = fused.explain(x).kernels
    assert kernel.group.passes == 1
    assert kernel.strategy == ("rolling_update" if tile < 8192 else "single_pass")
    assert np.abs(np.asarray(fused(x), np.float64) - (centred**power).mean(-1)).max() <= 1e-5
