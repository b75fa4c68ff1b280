"""Prices of convolutions along three dimensions, and of others instead, beside what they took on an H200 and on two cores."""

import json
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks import film_convolutions
from pallasfuse import _compat, device
from pallasfuse.decompositions import window_axes
from pallasfuse.decompositions.writing import traced_as
from pallasfuse.ir.loop_program import as_xla_runs
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import price_xla
from pallasfuse.targets import XLA_CPU
from pallasfuse.written_out import surely_faster

H200 = device.find("NVIDIA H200", "gpu")
RESULTS = Path(film_convolutions.__file__).parent / "results" / "xla_alone_h200.json"
NUMBERS = ("NDHWC", "DHWIO", "NDHWC")


def price_us(jaxpr, on=H200):
    return price_xla(convert(flatten(jaxpr)).program, on).us


def convolved(images, window, results, strides, dtype="float32", kind=None):
    """Returns the one convolution of a layer of a film, or of a gradient of it (of "images", of "weights")."""

    def layer(x, w):
        return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=NUMBERS)

    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in (images, (*window, images[-1], results)))
    function, arrays = layer, (x, w)
    if kind is not None:
        at = int(kind == "weights")
        arrays = (x, w, jax.eval_shape(layer, x, w))

        def function(x, w, g):
            return jax.vjp(layer, x, w)[1](g)[at]

    equations = flatten(jax.make_jaxpr(function)(*arrays)).eqns
    return next(e for e in equations if e.primitive.name == "conv_general_dilated")


def prices_us(eqn, rule, on=H200):
    """Returns the price of a convolution as it is written, and as the rule writes it."""
    written = traced_as(eqn, lambda *operands: _compat.bind(eqn, operands), eqn.invars)
    return price_us(written, on), price_us(traced_as(eqn, rule(eqn), eqn.invars), on)


def test_prices_are_near_what_was_measured():
    measured = {label: us for label, us, _ in json.loads(RESULTS.read_text())["rows"] if label.startswith("films")}
    cases = {case.label: case for case in film_convolutions.films("gpu")}
    assert cases.keys() == measured.keys()
    found = {
        label: price_us(jax.make_jaxpr(case.function)(*case.structs)) / measured[label] for label, case in cases.items()
    }
    assert 0.85 < statistics.geometric_mean(found.values()) < 1.15
    assert sum(0.6 < r < 1.6 for r in found.values()) >= 0.8 * len(found)


@pytest.mark.parametrize(
    ("layer", "kind", "measured_us"),
    [
        (((8, 8, 56, 56, 64), (1, 3, 3), 64, (1, 1, 1), "bfloat16"), None, (121.8, 39.2)),
        (((8, 8, 56, 56, 64), (3, 1, 1), 64, (1, 1, 1), "float32"), None, (157.0, 37.5)),
        (((8, 8, 56, 56, 64), (3, 1, 1), 64, (1, 1, 1), "bfloat16"), "weights", (119.0, 33.1)),
        (((8, 8, 56, 56, 128), (1, 3, 3), 128, (1, 2, 2), "bfloat16"), "images", (257.9, 114.9)),
    ],
)
def test_what_is_written_instead_is_foretold(layer, kind, measured_us):
    """Before, shapes around a convolution were copies, and zeros between the elements of images cost nothing."""
    found = prices_us(convolved(*layer, kind=kind), window_axes.along_fewer)
    for us, measured in zip(found, measured_us, strict=True):
        assert 0.6 < us / measured < 1.6


@pytest.mark.parametrize(
    ("layer", "kind", "measured_ms", "rule"),
    [
        (((2, 8, 28, 28, 64), (3, 1, 1), 64, (1, 1, 1)), None, (5.37, 1.72), window_axes.along_fewer),
        (((2, 8, 28, 28, 64), (1, 3, 3), 64, (1, 2, 2)), "images", (62.4, 1.8), window_axes.along_fewer),
        (((2, 8, 28, 28, 32), (5, 1, 1), 32, (4, 1, 1)), "images", (13.2, 0.58), window_axes.along_fewer),
        (((2, 16, 56, 56, 3), (5, 7, 7), 8, (1, 2, 2)), "images", (1554.0, 7.3), window_axes.beside_each_other),
    ],
)
def test_on_two_cores(layer, kind, measured_ms, rule):
    """Zeros between the elements of images are looked at one by one: what is written instead is up to 200 times as fast."""
    written, instead = (
        us / 1e3 / ms
        for us, ms in zip(prices_us(convolved(*layer, kind=kind), rule, XLA_CPU.device), measured_ms, strict=True)
    )
    assert 0.5 < written < 2.0
    assert 0.3 < instead < 2.0


@pytest.mark.parametrize(
    ("images", "window", "step", "results", "measured_ms"),
    [
        ((4, 1000, 64), (16,), 8, 32, (75.0, 3.8)),
        ((4, 32, 32, 64), (4, 4), 2, 32, (73.0, 4.8)),
        ((4, 16, 16, 64), (5, 5), 2, 32, (26.3, 2.0)),
        ((2, 8, 8, 8, 64), (4, 4, 4), 2, 32, (66.0, 5.6)),
    ],
)
def test_gradients_of_weights_of_transposed_convolutions_on_two_cores(images, window, step, results, measured_ms):
    """Both gradients, as they are written and with a product for each position of a window: up to 20 times as fast."""
    spatial = "DHW"[3 - len(window) :]
    numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")

    def layer(x, w):
        return lax.conv_transpose(x, w, [step] * len(window), "SAME", dimension_numbers=numbers)

    def gradients(x, w, g):
        return jax.vjp(layer, x, w)[1](g)

    x, w = (jax.ShapeDtypeStruct(s, "float32") for s in (images, (*window, images[-1], results)))
    written = jax.make_jaxpr(gradients)(x, w, jax.eval_shape(layer, x, w))
    decomposed = surely_faster(flatten(written), XLA_CPU)
    assert decomposed is not written
    for jaxpr, ms in zip((written, decomposed), measured_ms, strict=True):
        assert 0.4 < price_us(jaxpr, XLA_CPU.device) / 1e3 / ms < 2.5


def flat(x, w):
    """Convolves pictures."""
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def on_h200_us(function, *shapes):
    return price_us(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes)))


PICTURES, FILMS, KERNEL = (64, 56, 56, 64), (8, 8, 56, 56, 64), (3, 3, 64, 64)


def test_shapes_around_convolutions_cost_nothing():
    alone = on_h200_us(flat, PICTURES, KERNEL)
    assert on_h200_us(lambda x, w: flat(x, w).reshape(FILMS), PICTURES, KERNEL) == alone
    assert on_h200_us(lambda x, w: flat(x.reshape(PICTURES), w), FILMS, KERNEL) == alone
    chained = on_h200_us(lambda x, w: jax.nn.relu(flat(x, w).reshape(FILMS).reshape(64, -1)), PICTURES, KERNEL)
    assert chained == pytest.approx(on_h200_us(lambda x, w: jax.nn.relu(flat(x, w)), PICTURES, KERNEL), rel=0.02)


def test_shapes_of_what_others_read_are_as_they_were():
    """Where XLA computes several things of a result in one kernel, none of them reads it by itself."""

    def both(shape):
        def run(x, w):
            made = flat(x, w)
            return jax.nn.relu(made.reshape(shape)), jnp.tanh(made)

        return run

    assert on_h200_us(both(FILMS), PICTURES, KERNEL) <= 1.01 * on_h200_us(both(PICTURES), PICTURES, KERNEL)


def test_shapes_are_found_at_once():
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in (FILMS, KERNEL)]
    program = convert(
        flatten(jax.make_jaxpr(lambda x, w: flat(x.reshape(PICTURES), w).reshape(FILMS))(*shapes))
    ).program
    once = as_xla_runs(program, one_by_one=False)
    assert once is not program and as_xla_runs(once, one_by_one=False) is once
    assert as_xla_runs(program, one_by_one=True) is program


def test_few_channels_of_films_fill_a_step():
    def matrix_us(channels):
        eqn = convolved((4, 16, 112, 112, channels), (3, 3, 3), 64, (1, 1, 1))
        written = traced_as(eqn, lambda *operands: _compat.bind(eqn, operands), eqn.invars)
        terms = price_xla(convert(flatten(written)).program, H200).terms
        return next(t.us for t in terms if t.name == "matrix units")

    assert matrix_us(3) == matrix_us(16) < matrix_us(17)
