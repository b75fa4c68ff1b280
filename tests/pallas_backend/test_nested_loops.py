"""Loops inside loops and buffers in Pallas kernels, interpreted: hand-written programs against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.emission import pallas_kernel
from tests.ir.nested_programs import EXAMPLES


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("name", EXAMPLES)
def test_nested_programs(name):
    example = EXAMPLES[name]
    inputs = example.inputs()
    arrays = {n: jnp.asarray(x, jnp.float32) for n, x in inputs.items()}
    got = pallas_kernel.call(example.program("masked"), arrays, interpret=True)
    for output, expected in example.expected(inputs).items():
        np.testing.assert_allclose(got[output], expected, rtol=2e-5, atol=1e-5)
