"""Loads and stores of a block: the sectors that they touch, and how often."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import device
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.tensors import Tensor
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.price.block_accesses import access
from pallasfuse.targets import TRITON

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")


@pytest.mark.parametrize(("extent", "passes"), [(3, 3), (13, 8)])
def test_neighbours_that_leave_one_by_one_touch_a_sector_again(extent, passes):
    """As often as a sector has neighbours; one has room for eight numbers of four bytes."""
    rows, short = Axis("i", 4096), Axis("j", extent)
    tensor = Tensor("x", (rows, short), "float32")
    whole = access(tensor, tensor.axes, {rows: 512, short: extent}, 1.0, False, 0, is_store=True)
    assert whole.one_by_one(tensor, (short,)).sector_bytes() == passes * whole.sector_bytes()
    assert whole.one_by_one(tensor, (short,)).bytes == whole.bytes


def test_neighbours_along_another_axis_leave_together():
    rows, short = Axis("i", 4096), Axis("j", 3)
    tensor = Tensor("x", (short, rows), "float32")
    whole = access(tensor, tensor.axes, {rows: 512, short: 3}, 1.0, False, 0, is_store=True)
    assert whole.one_by_one(tensor, (short,)) == whole


def unit(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True))


def test_vectors_of_three_are_stored_in_three_parts():
    """Unit vectors (7.0 us measured on an H100, 3.1 foretold without): loads find their sectors in the multiprocessor's cache."""
    jaxpr = jax.make_jaxpr(unit)(jax.ShapeDtypeStruct((540, 960, 3), jnp.float32))
    (kernel,) = make_plan(jaxpr, TRITON.on(H100), FuseOptions(price=False)).kernels
    assert kernel.phases[0].program.unrolled
    sectors = next(t.amount for t in kernel.price.terms if t.name == "cache sectors")
    assert sectors == pytest.approx((1 + 3) * 540 * 960 * 3 * 4, rel=0.1)
