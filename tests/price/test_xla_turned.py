"""Products that are only transposed cost XLA on a CPU what they cost without a transposition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse import device
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.expr import mul, read
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import XlaPrices, price_xla
from pallasfuse.price.xla_turned import with_products_turned

CPU = device.assumed("cpu")
ROW, COLUMN, SUMMED = Axis("i", 6), Axis("j", 4), Axis("k", 4)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def us(function, *shapes):
    return price_xla(convert(jax.make_jaxpr(function)(*(struct(*s) for s in shapes))).program, CPU).us


def product(x, g):
    """The sum of outer products, with the axis of the second operand first."""
    return lax.dot_general(g, x, (((0,), (0,)), ((), ())))


def straight(x, g):
    return lax.dot_general(x, g, (((0,), (0,)), ((), ())))


def added_up(step):
    def function(start, xs, gs):
        return lax.scan(lambda s, of: (s + step(*of), None), start, (xs, gs))[0]

    return function


def test_a_transposed_product_costs_no_more_than_the_other_one():
    shapes = (64, 256), (64, 1024)
    assert us(lambda x, g: product(x, g).T, *shapes) == us(straight, *shapes)
    assert us(lambda x, g: 1.0 - product(x, g).T, *shapes) == us(lambda x, g: 1.0 - straight(x, g), *shapes)


def test_gradients_that_a_loop_adds_up():
    shapes = (96, 384), (100, 4, 96), (100, 4, 384)
    turned = us(added_up(lambda x, g: product(x, g).T), *shapes)
    assert turned == us(added_up(straight), *shapes)
    assert turned < 0.5 * us(added_up(lambda x, g: jnp.maximum(product(x, g), 0.0).T), *shapes)  # stored, then turned


@pytest.mark.parametrize("also", ["read", "returned"])
def test_a_product_that_something_else_wants_stays_as_it_is(also):
    def function(x, g):
        p = product(x, g)
        return p.T, p if also == "returned" else jnp.exp(p)

    program = convert(jax.make_jaxpr(function)(struct(8, 6), struct(8, 4))).program
    assert with_products_turned(program) is program


def test_only_matrices_are_turned():
    """Of a batch XLA turns no product."""

    def function(x, g):
        return jnp.einsum("bki,bkj->bji", x, g).swapaxes(1, 2)

    program = convert(jax.make_jaxpr(function)(struct(3, 8, 6), struct(3, 8, 4))).program
    assert with_products_turned(program) is program


def test_a_product_that_is_sorted_too_stays_as_it_is():
    def function(x, g):
        p = product(x, g)
        return p.T, jnp.sort(p, 1)

    program = convert(jax.make_jaxpr(function)(struct(8, 6), struct(8, 4))).program
    assert with_products_turned(program) is program


def test_a_kernel_of_ours_has_the_product_as_it_is():
    """It reads the product, or makes it: XLA computes it for the kernel, or has only its transposition left to do."""
    program = convert(jax.make_jaxpr(lambda x, g: jnp.tanh(product(x, g).T))(struct(64, 256), struct(64, 1024))).program
    first, transposed, last = (n.name for n in program.nests)
    prices = XlaPrices(program, CPU)
    alone = prices.us()
    assert prices.us(frozenset({transposed, last}), frozenset({first})) == us(product, (64, 256), (64, 1024))
    inputs = frozenset(t.name for t in program.inputs)
    assert prices.us(frozenset({first}), inputs) == us(lambda p: jnp.tanh(p.T), (1024, 256))
    assert prices.us() == alone == us(lambda x, g: jnp.tanh(straight(x, g)), (64, 256), (64, 1024))


@pytest.mark.parametrize("axes", [(COLUMN, ROW), (SUMMED, ROW)])
def test_the_values_are_the_same(axes):
    """Also where the transposed matrix has the axis that the product sums."""
    a, b = Tensor("a", (ROW, SUMMED), "float32"), Tensor("b", (SUMMED, COLUMN), "float32")
    of = mul(read("a", (ROW, SUMMED), "float32"), read("b", (SUMMED, COLUMN), "float32"))
    first, second = axes
    nests = (
        Nest("p", (ROW, COLUMN), of, "float32", (SUMMED,), SUM),
        Nest("t", axes, read("p", (second, first), "float32"), "float32"),
    )
    program = LoopProgram((a, b), nests, ("t",))
    turned = with_products_turned(program)
    assert [n.name for n in turned.nests] == ["t"]
    draw = np.random.default_rng(0)
    arrays = {t.name: draw.normal(size=[x.extent for x in t.axes]) for t in (a, b)}
    one, other = (evaluate(p, arrays)["t"] for p in (program, turned))
    np.testing.assert_allclose(one, other, rtol=1e-5)
    np.testing.assert_allclose(one, (arrays["a"] @ arrays["b"]).T, rtol=1e-5, atol=1e-6)
