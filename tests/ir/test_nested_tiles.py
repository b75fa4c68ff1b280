"""Tile programs with loops inside loops and with buffers: what they mean, and which ones there cannot be."""

import numpy as np
import pytest

from pallasfuse.ir.evaluate import evaluate_program
from pallasfuse.ir.evaluate_tiles import evaluate_tiles, evaluate_tiles_over
from tests.ir.nested_programs import EXAMPLES
from tests.verification.values import agree, finite_fields


@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_nested_programs_in_float64(name, tails):
    example = EXAMPLES[name]
    inputs = example.inputs()
    for back in (True, False) if tails == "masked" else (True,):
        got = evaluate_tiles(example.program(tails), inputs, move_last_block_back=back)
        for output, expected in example.expected(inputs).items():
            np.testing.assert_allclose(got[output], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tails", ["exact", "masked"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_nested_programs_over_finite_fields(name, tails):
    """They compute what their nests do, of numbers that no rounding makes equal."""
    example = EXAMPLES[name]
    fields = finite_fields(trials=4)
    inputs = {t.name: fields.random([a.extent for a in t.axes], t.dtype) for t in example.nests.inputs}
    expected = evaluate_program(example.nests, inputs, fields, lambda *_: None)
    found = evaluate_tiles_over(example.program(tails), inputs, fields, move_last_block_back=tails == "exact")
    for output, value in found.items():
        assert agree(expected[output], value, 4)
