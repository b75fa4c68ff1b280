"""Loops inside loops and buffers as loops of XLA: hand-written programs against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.xla_backend import loops
from tests.ir.nested_programs import EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_nested_programs(name):
    example = EXAMPLES[name]
    inputs, program = example.inputs(), example.program("exact")
    got = jax.jit(lambda x: loops.run(program, x))({n: jnp.asarray(x, jnp.float32) for n, x in inputs.items()})
    for output, expected in example.expected(inputs).items():
        np.testing.assert_allclose(got[output], expected, rtol=2e-5, atol=1e-5)


def test_a_buffer_that_is_one_window_is_not_sliced():
    """A get or a set of all of a buffer is a value: only parts are copied out of it and into it."""
    inputs = {n: jnp.asarray(x, jnp.float32) for n, x in EXAMPLES["flat"].inputs().items()}
    sliced = {}
    for name in ("deep", "flat"):
        program = EXAMPLES[name].program("exact")
        sliced[name] = str(jax.make_jaxpr(lambda x, p=program: loops.run(p, x))(inputs)).count("f32[8,32]")
    assert sliced["deep"] == 0 < sliced["flat"]
