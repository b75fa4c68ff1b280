"""Prices of convolutions on a GPU beside what they took on an H200: of groups, of one channel, and what is written instead."""

import json
from pathlib import Path

import jax
import pytest

from benchmarks.xla_alone import convolutions
from pallasfuse import device
from pallasfuse.decompositions import windows
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import price_xla

H200 = device.find("NVIDIA H200", "gpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "xla_alone_h200.json"
MEASURED = {label: us for label, us, _ in json.loads(RESULTS.read_text())["rows"]}
CASES = {c.label: c for c in convolutions("gpu")}


def price_us(function, structs):
    return price_xla(convert(flatten(jax.make_jaxpr(function)(*structs))).program, H200).us


@pytest.mark.parametrize("label", CASES)
def test_what_was_measured_is_foretold(label):
    """All but one within a factor of 1.8: 5 x 5 weights of 384 examples in float32 take 2.6 times their price."""
    least = 0.35 if label == "convolutions apart 5 x 5 1x28x28x384 float32" else 0.55
    assert least < price_us(CASES[label].function, CASES[label].structs) / MEASURED[label] < 1.8


@pytest.mark.parametrize("label", [label for label in CASES if " apart " in label])
def test_products_instead_of_gradients_of_each_example_are_much_cheaper(label):
    """They took a seventh of the time, or less."""
    case = CASES[label]
    (eqn,) = [
        e for e in jax.make_jaxpr(case.function)(*case.structs).eqns if e.primitive.name == "conv_general_dilated"
    ]
    written = windows.of_examples(eqn)
    assert written is not None
    assert 3 * price_us(written, case.structs) < price_us(case.function, case.structs)
