"""Loops that multiply what they hand on by matrices which were loaded before: threads keep these as a product takes them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse import device
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import const
from pallasfuse.ir.tile_program import Contract, Loop
from pallasfuse.price.block_work import examine
from pallasfuse.recurrences import kernel_of
from tests.price.test_block_products import attend, struct
from tests.price.test_block_products import kernel_of as kernel_of_function

H200 = device.find("NVIDIA H200", "gpu")


def forward(state, transitions, seen):
    """The forward algorithm: probabilities of hidden states [rows, states] from `seen` [trips, rows, states]."""

    def step(state, seen):
        state = (state @ transitions) * seen
        total = jnp.sum(state, -1, keepdims=True)
        return state / total, jnp.log(total[:, 0])

    return lax.scan(step, state, seen)


def kernel(rows, states, trips=96):
    shapes = (rows, states), (states, states), (trips, rows, states)
    jaxpr = jax.make_jaxpr(forward)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    (loop,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    return kernel_of(loop, H200)


@pytest.mark.parametrize(
    ("rows", "states", "measured_us", "row_by_row_us"),
    [(1024, 64, 51, 114), (1024, 128, 156, 600), (1024, 91, 180, 324)],
)
def test_rows_share_a_product_where_that_is_faster(rows, states, measured_us, row_by_row_us):
    """Microseconds of loops of 96 trips on an H200: of blocks of 16 rows, and of blocks of one."""
    found = kernel(rows, states)
    assert [tile for _, tile in found.layout.grid] == [16]
    assert measured_us / 1.6 < found.price.us < min(1.9 * measured_us, row_by_row_us)


def test_a_matrix_is_brought_to_the_products_of_all_trips_once():
    (product,) = examine(kernel(1024, 64).kernel).products
    assert product.kept == (False, True) and product.brought == (96.0, 1.0)


def test_beside_what_trips_load_a_side_counts_in_each():
    """Of attention, whose other side is loaded: what was measured of such kernels was fitted so."""
    phases = kernel_of_function(attend, *[struct(16, 2048, 64)] * 3).phases
    products = [p for x in phases for p in examine(x.program).products]
    assert products and all(p.brought == (p.times, p.times) for p in products)


def loop_products(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    (loop,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    return examine(kernel_of(loop, H200).kernel).products


def test_which_sides_are_kept():
    """The matrix, whichever side it is; not beside what is computed from this trip's load."""

    def from_the_left(state, w, x):
        return lax.scan(lambda h, x: (jnp.tanh(w @ h + x),) * 2, state, x)

    (product,) = loop_products(from_the_left, (64, 2048), (64, 64), (96, 64, 2048))
    assert sorted(product.kept) == [False, True]

    def with_inputs(state, w, u, x):
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + jnp.tanh(x) @ u),) * 2, state, x)

    products = loop_products(with_inputs, (2048, 64), (64, 64), (64, 64), (96, 2048, 64))
    assert sorted(sum(p.kept) for p in products) == [0, 1]


def test_what_a_loop_keeps_is_brought_when_it_begins():
    """The same loop in a loop of seven trips, and the product once more behind the inner one."""
    program = kernel(1024, 64).kernel
    (inner,) = (s for s in program.body if isinstance(s, Loop))
    (product,) = (s for s in inner.segments[0].body if isinstance(s, Contract))
    (segment,) = inner.segments
    behind = replace(product, name="behind")
    seven = replace(segment, start=const(0, "int32"), stop=const(7, "int32"), body=(inner, behind))
    around = replace(inner, axis=Axis("around", 7), segments=(seven,))
    body = tuple(around if s is inner else s for s in program.body)
    nested = replace(program, body=body, tiles=(*program.tiles, (around.axis, 1)))
    within, after = examine(nested).products
    assert (within.times, within.begun, within.brought) == (7 * 96.0, 7.0, (7 * 96.0, 7.0))
    assert (after.times, after.begun, after.brought) == (7.0, 1.0, (7.0, 1.0))
