"""Products without the transpositions of their operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.decompositions import Decomposer
from pallasfuse.device import assumed
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.options import FuseOptions
from pallasfuse.price.xla import price_xla
from tests.decompositions.test_decomposer import decomposed


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


ROW, ROWS, WEIGHTS = drawn(1, 512), drawn(5, 512, seed=1), drawn(2048, 512, seed=2)
BATCHES, OTHERS, DEEP = drawn(8, 128, 96), drawn(8, 64, 128, seed=3), drawn(128, 64, 96, seed=4)


def both_ways(function, *args):
    """Is a program written otherwise where the clock likes everything, and where it likes nothing?"""
    return [decomposed(function, *args, clock=clock)[1] for clock in (lambda *_: True, lambda *_: False)]


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x, w: x @ w.T, (ROW, WEIGHTS)),
        (lambda x, w: x[0] @ w.T, (ROW, WEIGHTS)),
        (lambda x, w: x @ w.T, (ROWS, WEIGHTS)),
        (lambda x, w: w.T.T @ x.T, (ROWS, WEIGHTS)),
        (lambda x, w: jnp.swapaxes(x, 1, 2) @ jnp.swapaxes(w, 1, 2), (BATCHES, OTHERS)),
        (lambda x, w: jnp.tensordot(jnp.transpose(x, (1, 2, 0)), w, 1), (DEEP, BATCHES[0])),
    ],
)  # fmt: skip
def test_the_product_reads_what_is_transposed(function, args):
    assert both_ways(function, *args) == [True, False]
    made, _ = decomposed(function, *args, clock=lambda *_: True)
    used = {v for e in flatten(made).eqns if e.primitive.name == "dot_general" for v in e.invars}
    turned = {v for e in flatten(made).eqns if e.primitive.name == "transpose" for v in e.outvars}
    assert used and not used & turned


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x, w: x @ w, (ROWS, WEIGHTS.T)),
        (lambda x, w: jnp.tensordot(jnp.transpose(x, (2, 1, 0)), w, 1), (DEEP, BATCHES[0])),
        (lambda x, w: x @ (w.T + 1), (ROWS, WEIGHTS)),
        (lambda x, w: x @ w.T, (ROWS[:, :16], WEIGHTS[:16, :16])),
    ],
    ids=["nothing is transposed", "the result had another order", "something is between", "nobody would see it"],
)  # fmt: skip
def test_what_stays(function, args):
    assert both_ways(function, *args) == [False, False]


def test_on_a_gpu_the_library_reads_both_orders():
    assert not decomposed(lambda x, w: x @ w.T, ROW, WEIGHTS, device="gpu", clock=lambda *_: True)[1]


def both_inside(x, w):
    with jax.named_scope("mine"):
        return x @ w.T


def transposed_inside(x, w):
    with jax.named_scope("mine"):
        turned = w.T
    return x @ turned


@pytest.mark.parametrize("function", [both_inside, transposed_inside])
def test_what_the_user_leaves_to_xla_stays(function):
    jaxpr = jax.make_jaxpr(function)(ROWS, WEIGHTS)
    assert Decomposer(assumed("cpu"), ("mine",), 1.25, lambda *_: True).of(jaxpr) is jaxpr


def test_a_transposition_outside_of_a_call_is_found():
    assert both_ways(lambda x, w: jax.jit(lambda x, turned: x @ turned)(x, w.T), ROWS, WEIGHTS) == [True, False]


@pytest.mark.parametrize(
    ("rows", "dtype", "written_out"), [(1, "float32", True), (1, "bfloat16", False), (8, "float32", False)]
)
def test_without_a_clock_one_row_is_enough(rows, dtype, written_out):
    """A vector and a transposed matrix of float32 are a loop of XLA's, one element after the other."""
    arguments = jax.ShapeDtypeStruct((rows, 512), dtype), jax.ShapeDtypeStruct((4096, 512), dtype)
    plan = pf.fuse(lambda x, w: x @ w.T, options=FuseOptions(check=False, price=True)).explain(*arguments, target="xla")
    assert plan.written_out == written_out


def test_the_price_sees_the_transposition():
    def us(function):
        arguments = jax.ShapeDtypeStruct((1, 512), "float32"), jax.ShapeDtypeStruct((4096, 512), "float32")
        return price_xla(convert(jax.make_jaxpr(function)(*arguments)).program, assumed("cpu")).us

    contracted = (((1,), (1,)), ((), ()))
    assert us(lambda x, w: x @ w.T) > 2 * us(lambda x, w: jax.lax.dot_general(x, w, contracted))
    assert us(lambda x, w: x @ w.T.T.T) > 2 * us(lambda x, w: jax.lax.dot_general(x, w, contracted))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x, w: x @ w.T, "int32"),
        (lambda x, w: x @ w.T, "bfloat16"),
        (lambda x, w: w @ x[0], "float32"),
        (lambda x, w: jax.lax.dot_general(x, w.T.T, (((1,), (1,)), ((), ()))), "float32"),
        (lambda x, w: x @ jnp.broadcast_to(w[0][:, None], (512, 4096)), "float32"),
    ],
    ids=["integers", "a half type", "nothing", "there and back", "repeated elements"],
)  # fmt: skip
def test_what_is_as_fast_as_the_direct_product_is_not_priced_higher(function, dtype):
    arguments = jax.ShapeDtypeStruct((1, 512), dtype), jax.ShapeDtypeStruct((4096, 512), dtype)
    price = price_xla(convert(jax.make_jaxpr(function)(*arguments)).program, assumed("cpu"))
    assert not any(t.name == "transposed elements" and t.us for t in price.terms)


def test_a_fused_function_computes_the_same():
    def head(x, w):
        return jax.nn.log_softmax((x * 2) @ w.T, -1)

    for x in (ROW, ROWS):
        fused = pf.fuse(head, options=FuseOptions(check=False, price=True, target="xla"))
        np.testing.assert_allclose(fused(x, WEIGHTS), head(x, WEIGHTS), rtol=1e-5, atol=1e-5)
        assert fused.explain(x, WEIGHTS).written_out == (x is ROW)
