"""Blocks that live on a multiprocessor at a time, and what threads share out there."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

import pallasfuse as pf
from benchmarks import kernels
from pallasfuse import device
from pallasfuse.ir.statements import Contract, every
from pallasfuse.price import gpu
from pallasfuse.price.block_work import examine
from pallasfuse.resources import triton
from pallasfuse.resources.as_threads import as_threads_run_it
from pallasfuse.targets import TRITON
from tests.resources.test_triton import program_of
from tests.resources.test_triton_spills import scaled

H200 = TRITON.on(device.find("NVIDIA H200", "gpu"))
BY_WARPS = gpu.Emission()


def test_registers_that_are_likely_decide_how_many_blocks_overlap():
    arrays = kernels.array(4096, 4096), kernels.array(4096, 4096)
    program = as_threads_run_it(program_of(scaled, *arrays, rows=4, rolled=1024, warps=8)).program
    held = triton.resources(program, H200)
    few, many = (
        gpu.price([program], H200.device, BY_WARPS, [replace(held, registers=255, likely_registers=n)]).us
        for n in (240, 40)
    )
    assert few > 1.1 * many


def test_reductions_of_a_small_product_are_no_reductions_of_matrix_units_results():
    def step(s, w):
        return lax.scan(lambda s, _: (jnp.exp(s @ w - jnp.max(s @ w, -1, keepdims=True)), None), s, length=8)[0]

    def work_of(rows, width):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, width), (width, width))]
        options = pf.FuseOptions(target="triton", price=True)
        (loop,) = pf.fuse(step, options=options).explain(*shapes).loops
        assert any(isinstance(s, Contract) for s in every(loop.kernel.body))
        return examine(replace(loop.kernel, warps=1), spreads=True)

    assert work_of(4096, 64).reductions > 0
    assert work_of(4096, 8).reductions == 0


def test_what_has_fewer_elements_than_a_block_has_threads_is_computed_by_all_of_them():
    def step(x):
        return lax.scan(lambda s, _: (jnp.tanh(s) * 0.5 + 1.0, None), x, length=64)[0]

    shape = jax.ShapeDtypeStruct((16,), jnp.float32)
    (loop,) = pf.fuse(step, options=pf.FuseOptions(target="triton", price=True)).explain(shape).loops
    one, four = (examine(replace(loop.kernel, warps=n), spreads=True).operations.special for n in (1, 4))
    assert four == 4 * one
    assert examine(loop.kernel).operations.special == one * 16 / 32
