"""Tile programs as loops of XLA: what the compiler makes of their operands."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.targets import XLA_CPU
from pallasfuse.xla_backend import loops

SHAPE = (8, 48, 80)


def softmax_program():
    jaxpr = jax.make_jaxpr(lambda x: jax.nn.softmax(x, -1))(jax.ShapeDtypeStruct(SHAPE, jnp.float32))
    (kernel,) = make_plan(jaxpr, XLA_CPU, FuseOptions(price=False, tiles=(("i", 2), ("j", 16)))).kernels
    (phase,) = kernel.phases
    return phase.program


def run(array):
    """The softmax of a tensor in another order than the kernel's."""
    program = softmax_program()
    (given,), (stored,) = program.inputs, program.outputs
    return loops.run(program, {given.name: array.transpose(2, 0, 1)})[stored.name]


def test_an_operand_in_another_order_is_written_once():
    compiled = jax.jit(run).lower(jax.ShapeDtypeStruct((48, 80, 8), jnp.float32)).compile()
    _, _, entry = compiled.as_text().partition("\nENTRY ")
    made = re.findall(r"%[\w.\-]+ = f32\[([\d,]+)\]\S* (?:fusion|copy|transpose|custom-call)\(%array", entry)
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in made]
    assert sizes == [np.prod(SHAPE)]  # from the argument: in the order of the loops
    again = re.findall(r"%[\w.\-]+ = f32\[[\d,]+\]\S* (?:fusion|copy|transpose)\(%(?!array|constant)", entry)
    assert not again  # and nothing is written from that


def test_the_order_of_an_operand_changes_no_number():
    array = jnp.asarray(np.random.default_rng(0).normal(size=(48, 80, 8)), jnp.float32)
    np.testing.assert_allclose(jax.jit(run)(array), jax.nn.softmax(array.transpose(2, 0, 1), -1), rtol=1e-5)
