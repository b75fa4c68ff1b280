"""Loops inside loops and buffers as loops of XLA: hand-written programs against NumPy."""

import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.ir.expr import add
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tile_program import Buffer, Get, Load, Reduce, Set, Store
from pallasfuse.xla_backend import loops
from tests.ir.nested_programs import EXAMPLES, ZERO, F, I, J, X, Y, kernel, over, tile_of


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("name", EXAMPLES)
def test_nested_programs(name):
    example = EXAMPLES[name]
    inputs, program = example.inputs(), example.program("exact")
    got = jax.jit(lambda x: loops.run(program, x))({n: jnp.asarray(x, jnp.float32) for n, x in inputs.items()})
    for output, expected in example.expected(inputs).items():
        np.testing.assert_allclose(got[output], expected, rtol=2e-5, atol=1e-5)


def test_a_buffer_that_is_one_window_is_not_sliced():
    """A get or a set of all of a buffer is a value: only parts are copied out of it and into it."""
    inputs = {"x": jnp.ones((11, 45))}
    rows = Buffer("b", (I,), (4,), F, ZERO)

    def sliced(size):
        step = (
            Get("old", "b", (I,), F), Load("x.t", "x", (I, J), F), Reduce("r", (I,), SUM, tile_of("x.t", I, J), (J,)),
            Set("b", (I,), add(tile_of("old", I), tile_of("r", I))),
        )  # fmt: skip
        body = replace(rows, sizes=(size,)), over(J, 9, lambda _: step, "exact"), Get("y.t", "b", (I,), F)
        tiles = (I, 4), (J, 9)
        program = kernel("rows", (X,), (Y,), tiles[:1], tiles, *body, Store("y", (I,), tile_of("y.t", I)))
        np.testing.assert_allclose(loops.run(program, inputs)["y"], 45.0)
        text = str(jax.make_jaxpr(lambda x: loops.run(program, x))(inputs))
        return Counter(re.findall(r"\b(dynamic_slice|dynamic_update_slice)\b", text))

    assert sliced(4) == {"dynamic_slice": 1, "dynamic_update_slice": 1}  # of the input and the output
    assert sliced(8) == {"dynamic_slice": 3, "dynamic_update_slice": 2}
