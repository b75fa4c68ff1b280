"""Loops of XLA: they are compiled at every call, so they have few operations of their own, and write no operand twice."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.targets import XLA_CPU
from pallasfuse.xla_backend import loops

SHAPE = (8, 48, 80)


def causal(q, k, v):
    visible = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    scores = jnp.where(visible, jnp.einsum("hid,hjd->hij", q, k), -jnp.inf)
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(scores, -1), v)


def test_positions_and_bounds_take_few_operations():
    """None wraps a negative position around, and no end of an axis is compared with what is always before it."""
    fused = pf.fuse(causal, options=pf.FuseOptions(target="xla", price=False, tiles=(("i", 128), ("j", 128), ("k", 1))))
    shapes = [jax.ShapeDtypeStruct((4, 1024, 32), jnp.float32)] * 3
    (kernel,) = fused.explain(*shapes).kernels
    assert len(kernel.group.folds) == 3
    lines = fused.lower(*shapes).as_text().splitlines()
    scalars = [line for line in lines if re.search(r"-> tensor<i1>$|[:>] tensor<u?i32>$", line)]
    found = Counter(re.search(r"stablehlo\.(\w+)", line)[1] for line in scalars if "stablehlo." in line)
    del found["constant"]
    assert not found["select"] and not found["maximum"]
    assert found.total() <= 45, found


def test_inner_loops_carry_what_they_store():
    fused = pf.fuse(causal, options=pf.FuseOptions(target="xla", price=False))
    shapes = [jax.ShapeDtypeStruct((4, 2048, 24), jnp.float32)] * 3
    (kernel,) = fused.explain(*shapes).kernels
    assert kernel.schedule.trips > 1
    text = fused.lower(*shapes).as_text()
    carried = [line for line in text.splitlines() if "stablehlo.while(" in line]
    assert len(carried) >= 2
    blocks, *inside = carried
    whole = "tensor<4x2048x24xf32>"
    assert blocks.count(whole) == 4  # the operands and the result
    assert all(line.count(whole) == 2 for line in inside)  # keys and values


def softmax_program():
    jaxpr = jax.make_jaxpr(lambda x: jax.nn.softmax(x, -1))(jax.ShapeDtypeStruct(SHAPE, jnp.float32))
    (kernel,) = make_plan(jaxpr, XLA_CPU, FuseOptions(price=False, tiles=(("i", 2), ("j", 16)))).kernels
    (phase,) = kernel.phases
    return phase.program


def softmax_of(array):
    """The softmax of a tensor in another order than the kernel's."""
    program = softmax_program()
    (given,), (stored,) = program.inputs, program.outputs
    return loops.run(program, {given.name: array.transpose(2, 0, 1)})[stored.name]


def test_an_operand_in_another_order_is_written_once():
    compiled = jax.jit(softmax_of).lower(jax.ShapeDtypeStruct((48, 80, 8), jnp.float32)).compile()
    _, _, entry = compiled.as_text().partition("\nENTRY ")
    made = re.findall(r"%[\w.\-]+ = f32\[([\d,]+)\]\S* (?:fusion|copy|transpose|custom-call)\(%array", entry)
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in made]
    assert sizes == [np.prod(SHAPE)]  # from the argument: in the order of the loops
    again = re.findall(r"%[\w.\-]+ = f32\[[\d,]+\]\S* (?:fusion|copy|transpose)\(%(?!array|constant)", entry)
    assert not again  # and nothing is written from that


def test_the_order_of_an_operand_changes_no_number():
    array = jnp.asarray(np.random.default_rng(0).normal(size=(48, 80, 8)), jnp.float32)
    np.testing.assert_allclose(jax.jit(softmax_of)(array), jax.nn.softmax(array.transpose(2, 0, 1), -1), rtol=1e-5)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("kind", ["int8", "int16", "uint32"])
def test_quotients_of_positions_that_wrap(kind):
    """A division may be a shift only where no position is negative."""

    def function(x):
        p = jnp.arange(300)
        if kind == "int8":
            few = lax.div(p.astype(jnp.int8), jnp.int8(16)) < 2
        elif kind == "int16":
            few = lax.div((p * 200).astype(jnp.int16), jnp.int16(1024)) < 2
        else:
            after = jnp.maximum(p.astype(jnp.uint32) - jnp.uint32(100), jnp.uint32(0)).astype(jnp.int32)
            few = lax.div(after, 16) < 2
        return jax.nn.softmax(jnp.where(few, x, -jnp.inf), -1)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 300)), jnp.float32)
    fused = pf.fuse(function, options=pf.FuseOptions(target="xla", price=False, check=False, tiles=(("j", 32),)))
    assert fused.explain(x).kernels
    np.testing.assert_allclose(fused(x), function(x), rtol=2e-6)
