"""Loads and stores of a block: the sectors that they touch, and how often."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import device, phases
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.unrolling import unrollable
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.price.block_accesses import access
from pallasfuse.price.kernel import price_kernel
from pallasfuse.targets import TRITON

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")


@pytest.mark.parametrize(("extent", "passes"), [(3, 3), (13, 8)])
def test_neighbours_that_leave_one_by_one_touch_a_sector_again(extent, passes):
    """As often as a sector has neighbours; one has room for eight numbers of four bytes. Beside other arrays, twice as often."""
    rows, short = Axis("i", 4096), Axis("j", extent)
    tensor = Tensor("x", (rows, short), "float32")
    whole = access(tensor, tensor.axes, {rows: 512, short: extent}, 1.0, False, 0, is_store=True)
    assert whole.one_by_one(tensor, (short,)).sector_bytes() == passes * whole.sector_bytes()
    assert whole.one_by_one(tensor, (short,)).beside_others().sector_bytes() == 2 * passes * whole.sector_bytes()
    assert whole.beside_others() == whole
    assert whole.one_by_one(tensor, (short,)).bytes == whole.bytes


def test_neighbours_along_another_axis_leave_together():
    rows, short = Axis("i", 4096), Axis("j", 3)
    tensor = Tensor("x", (short, rows), "float32")
    whole = access(tensor, tensor.axes, {rows: 512, short: 3}, 1.0, False, 0, is_store=True)
    assert whole.one_by_one(tensor, (short,)) == whole


@pytest.mark.parametrize(("behind", "loads"), [((), 512 * 9), ((3,), 512 * 3)])
def test_parts_that_lie_far_apart_are_loaded_each_from_a_sector_of_its_own(behind, loads):
    """Rows of nine numbers of four bytes, with one axis written out or two: 36 bytes from one row to the next."""
    rows, others = (
        Axis("i", 4096),
        [Axis(f"k{n}", extent) for n, extent in enumerate((9,) if not behind else (3, *behind))],
    )
    tensor = Tensor("x", (rows, *others), "float32")
    tiles = {rows: 512, **{a: a.extent for a in others}}
    whole = access(tensor, tensor.axes, tiles, 1.0, False, 0)
    assert whole.scattered() == 0
    assert whole.one_by_one(tensor, others[:1]).scattered() == loads
    assert whole.one_by_one(tensor, others[:1]).sector_bytes() == whole.sector_bytes()


def test_parts_of_tiled_rows_are_no_longer_than_their_tiles():
    rows, short, columns = Axis("i", 4096), Axis("c", 4), Axis("j", 1024)
    tensor = Tensor("x", (rows, short, columns), "float32")
    whole = access(tensor, tensor.axes, {rows: 16, short: 4, columns: 4}, 1.0, False, 0)
    assert whole.scattered() == whole.one_by_one(tensor, (short,)).scattered() == 64


def test_parts_that_share_a_sector_are_loaded_from_it():
    rows, short = Axis("i", 4096), Axis("j", 4)
    tensor = Tensor("x", (rows, short), "float32")
    whole = access(tensor, tensor.axes, {rows: 512, short: 4}, 1.0, False, 0)
    assert whole.one_by_one(tensor, (short,)) == whole


def planned(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    (kernel,) = make_plan(jaxpr, TRITON.on(H100), FuseOptions(price=False)).kernels
    return kernel


def unit(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True))


def test_vectors_of_three_are_stored_whole():
    """Unit vectors, whose coordinates took 7.0 us on an H100 when they were stored one after the other: 3.8 are foretold."""
    kernel = planned(unit, (540, 960, 3))
    program = kernel.phases[0].program
    assert not program.unrolled and unrollable(program)
    in_parts = price_kernel([(replace(program, unrolled=unrollable(program)), kernel.phases[0].target)])
    assert in_parts.us > 1.2 * kernel.price.us
    sectors = next(t.amount for t in kernel.price.terms if t.name == "cache sectors")
    # three numbers begin anywhere in a sector, and a warp loads and stores them one by one
    assert sectors == pytest.approx(2 * 540 * 960 * 3 * 4 * (1 + 28 / 128), rel=0.1)


def test_short_axes_are_written_out_where_no_kernel_has_them_whole(monkeypatch):
    real = phases.problem_of
    monkeypatch.setattr(
        phases, "problem_of", lambda p: real(p) or (None if p.program.unrolled else "whole axes are refused")
    )
    assert planned(unit, (540, 960, 3)).phases[0].program.unrolled


def test_coordinates_that_are_only_summed_are_written_out():
    kernel = planned(lambda x, y: jnp.square(x[:, None] - y[None]).sum(-1).min(-1), (4096, 3), (4096, 3))
    assert kernel.phases[0].program.unrolled
