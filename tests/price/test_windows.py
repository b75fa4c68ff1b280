"""Prices of windows around each element, with maps before and after them: kernels as counted in what XLA compiles for an H100."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.xla_alone import windows
from pallasfuse import device
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import kernels_on, price_xla

H200 = device.find("NVIDIA H200", "gpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "xla_alone_h200.json"
MEASURED = {label: us for label, us, _ in json.loads(RESULTS.read_text())["rows"]}
CASES = {c.label: c for c in windows("gpu")}
SPACE = jax.ShapeDtypeStruct((2, 96, 160, 160), jnp.float32)


def program(function, *structs):
    return convert(flatten(jax.make_jaxpr(function)(*structs))).program


def largest(x, width=3):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, width, width, width), (1, 1, 1, 1), "SAME")


@pytest.mark.parametrize("label", CASES)
def test_what_was_measured_is_foretold(label):
    case = CASES[label]
    assert 0.8 < price_xla(program(case.function, *case.structs), H200).us / MEASURED[label] < 1.35


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda x: largest(jax.nn.relu(x)) - x, 1),
        (lambda x: largest(x * 2 + 1) - x, 1),
        (lambda x: largest(jnp.exp(x)) - x, 2),
        (lambda x: largest(jnp.sqrt(x)), 2),
        (lambda x: largest(jax.nn.gelu(x)), 2),
        (lambda x: largest(((x * 2 + 1) * x + 3) * x * x - x), 2),
        (lambda x: ((y := jnp.exp(x)), largest(y) - y)[1], 2),
        (lambda x: ((y := largest(x)), (y - x, y * 2))[1], 1),
        (lambda x: ((y := largest(x)), (y, y - x))[1], 1),
        (lambda x: largest(x).sum(-1), 1),
    ],
    ids=["relu", "scale", "exp", "sqrt", "gelu", "long", "exp read twice", "two after", "stored too", "sum after"],
)
def test_cheap_maps_are_computed_inside(function, number):
    assert len(kernels_on(H200, program(function, SPACE))) == number


def test_a_window_is_reduced_once_whatever_else_its_kernel_reads():
    alone, beside = (price_xla(program(f, SPACE), H200).us for f in (largest, lambda x: largest(jax.nn.relu(x)) - x))
    assert beside < 1.1 * alone


def test_windows_along_single_axes_take_little():
    """The least of three windows of three took 16.4 us on an H200, in a program of its own kind (skeletons of volumes)."""

    def least(x):
        shapes = (1, 3, 1, 1), (1, 1, 3, 1), (1, 1, 1, 3)
        return functools.reduce(
            jnp.minimum, (lax.reduce_window(x, jnp.inf, lax.min, s, (1,) * 4, "SAME") for s in shapes)
        )

    assert 0.6 < price_xla(program(least, SPACE), H200).us / 16.4 < 1.6
