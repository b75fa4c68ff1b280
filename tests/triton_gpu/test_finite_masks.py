"""Kernels planned for Triton, run by the interpreter: rows that a finite mask covers from the first tile on."""

import jax
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import execution
from pallasfuse.pallas_backend import interpret
from tests.pallas_backend.variants import VARIANTS

pytestmark = pytest.mark.optimized


@pytest.mark.deep  # tests/property/test_finite_fills.py computes with such masks
@pytest.mark.parametrize("name", ["finite mask", "deep finite mask"])
def test_equal_masked_scores_cancel(monkeypatch, name):
    """exp2(a L - b L) of two equal scores of -1e9 is not 1 when one of the products is contracted into the difference."""
    monkeypatch.setitem(execution._EMITTERS, "triton", interpret.run)
    variant = VARIANTS[name]
    arrays = variant.arrays("bfloat16")
    plan = pf.fuse(variant.function).explain(*arrays, target="triton")
    assert "exp2(" in str(plan.kernels[0].program)
    (ours,) = execution.execute(plan, [*plan.converted.jaxpr.consts, *arrays])
    theirs = jax.jit(variant.function)(*arrays)
    with jax.enable_x64(True):
        exact = np.asarray(variant.function(*(np.asarray(a, np.float64) for a in arrays)))
    errors = [np.abs(np.asarray(x, np.float64) - exact).max() for x in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1] + 2.0**-8 * np.abs(exact).max()
