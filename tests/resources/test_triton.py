"""What of a kernel's shared memory and registers comes from where. `tests/aot` compares the sums with the compiler."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from benchmarks import kernels
from pallasfuse.ir.tile_program import Load, Loop
from pallasfuse.resources import triton
from pallasfuse.resources.triton_registers import registers_needed
from pallasfuse.resources.triton_view import View
from pallasfuse.targets import find

TRITON = find("triton")
KIB = 1 << 10


def program_of(function, *arguments, rows=None, rolled=None, warps=None, stages=None):
    """The first kernel's program, with tiles of the longest grid axis and the rolled one."""
    options = pf.FuseOptions(target="triton", price=False, parts=1)
    schedule = pf.fuse(function, options=options).explain(*arguments).kernels[0].schedule
    row = max((axis for axis, _ in schedule.grid), key=lambda axis: axis.extent)
    asked = ((row.name, rows), (schedule.rolled.name, rolled))
    tiles = tuple((name, size) for name, size in asked if size is not None)
    options = replace(options, tiles=tiles, warps=warps, stages=stages)
    return pf.fuse(function, options=options).explain(*arguments).kernels[0].phases[0].program


def qkv(dtype, n=1024, d=64):
    return [kernels.array(n, 2, d, dtype=dtype)] * 3


def plain(q, k, v):
    return kernels.attention(q, k, v)


def buffers(program):
    return {b.name: b.bytes for b in triton.resources(program, TRITON).buffers}


def shared(program):
    return triton.resources(program, TRITON).shared_bytes


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_operands_of_warpgroups_take_a_slot_for_every_stage(stages):
    found = buffers(program_of(plain, *qkv("bfloat16"), rows=64, rolled=128, warps=4, stages=stages))
    assert found[f"{stages} of k"] == found[f"{stages} of v"] == stages * 128 * 64 * 2
    assert found["q"] == 64 * 64 * 2


def test_operands_that_go_on_to_registers_take_one_slot_less():
    few = buffers(program_of(plain, *qkv("bfloat16"), rows=16, rolled=128, warps=4, stages=3))
    assert few["2 of k"] == 2 * 128 * 64 * 2
    wide = buffers(program_of(plain, *qkv("float32"), rows=64, rolled=64, warps=4, stages=3))
    assert wide["2 of k"] == 2 * 64 * 64 * 4
    restaged = [size for name, size in wide.items() if name.startswith("right side")]
    assert restaged == [64 * 64 * 4] * 2


def test_one_stage_copies_nothing_ahead():
    found = buffers(program_of(plain, *qkv("bfloat16"), rows=64, rolled=128, warps=4, stages=1))
    assert found["k"] == found["v"] == 128 * 64 * 2


def test_what_is_read_for_every_pair_is_copied_ahead_too():
    """The crash of pair attention: its bias and its mask lie in shared memory as well."""
    bias, mask = kernels.array(2, 1024, 1024, dtype="bfloat16"), kernels.array(1024, 1024, dtype="bool")
    function = kernels.pair_bias_and_mask
    program = program_of(function, *qkv("bfloat16"), bias, mask, rows=64, rolled=128, warps=4, stages=3)
    found = buffers(program)
    assert found["2 of bias"] == 2 * 64 * 128 * 2
    assert found["2 of mask"] == 2 * 64 * 128


def test_what_is_not_contiguous_is_not_copied_ahead():
    """The crash of relative-position bias: two bytes at a time are no asynchronous copy, but the tile changes its layout, as it is
    or as float32."""
    table = kernels.array(255, 2, dtype="bfloat16")
    program = program_of(kernels.relative_bias, *qkv("bfloat16"), table, rows=64, rolled=128, warps=4, stages=3)
    (bias,) = (t.name for t in program.inputs if t.name not in "qkv")
    found = buffers(program)
    assert found[f"{bias}, laid out anew"] == 64 * 128 * 4
    assert not any(name.endswith(f"of {bias}") for name in found)


def test_a_loop_of_one_trip_is_no_loop():
    """Its tiles are staged once, one after the other."""
    program = program_of(plain, *qkv("bfloat16", n=192), rows=64, rolled=128, warps=4, stages=3)
    loops = [s for s in program.body if isinstance(s, Loop)]
    assert loops  # 128 keys, then 64
    tile = 128 * 64 * 2
    assert tile + 64 * 64 * 2 <= shared(program) < 2 * tile


def test_segments_do_not_share_values_by_their_names():
    program = program_of(plain, *qkv("bfloat16", n=192), rows=64, rolled=128, warps=4, stages=3)
    view = View(program, TRITON)
    for line in view.lines:
        if isinstance(line.statement, Load) and line.region.loop is not None:
            assert {r.region for r in view.readers(line)} == {line.region}


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("warps", [4, 8, 16])
def test_warps_exchange_parts_of_a_sum(warps):
    program = program_of(norm, kernels.array(64, 4096), warps=warps)
    assert shared(program) == 4 * warps


def test_a_result_of_another_width_is_laid_out_anew():
    same = program_of(norm, kernels.array(64, 4096))
    halved = program_of(lambda x: norm(x).astype(jnp.bfloat16), kernels.array(64, 4096))
    assert shared(same) < KIB <= shared(halved)


def needed(program):
    return registers_needed(View(program, TRITON))


def test_larger_tiles_need_more_registers():
    small, large = (program_of(plain, *qkv("bfloat16", d=128), rows=n, rolled=n, warps=4, stages=1) for n in (64, 128))
    assert needed(small) < needed(large)
    assert triton.resources(small, TRITON).spilled_bytes == 0
    assert triton.resources(large, TRITON).spilled_bytes > 0


def test_more_warps_share_a_tile():
    few, many = (program_of(plain, *qkv("bfloat16"), rows=128, rolled=64, warps=n, stages=2) for n in (4, 8))
    assert needed(many) < needed(few)
    assert triton.resources(program_of(norm, kernels.array(8, 50257), warps=16), TRITON).registers <= 128


def test_a_sum_of_products_is_accumulated_in_place():
    """What is carried, and the scaled sum on its way; not the product again."""
    program = program_of(kernels.norm_then_product, kernels.array(512, 1024, dtype="bfloat16"),
                         kernels.array(1024, 256, dtype="bfloat16"), rows=128, rolled=64, warps=8, stages=2)  # fmt: skip
    accumulator = 128 * 256 // (32 * 8)
    assert accumulator < needed(program) < 4 * accumulator


def test_results_of_a_sum_over_parts_are_laid_out_anew():
    """Of a split, the kernel that joins the parts stores tiles of fewer axes than it loads."""
    shapes = kernels.array(2048, 1024, dtype="float32"), kernels.array(1024, 256, dtype="float32")
    options = pf.FuseOptions(target="triton", price=False, parts=3)
    (kernel,) = pf.fuse(kernels.norm_then_product, options=options).explain(*shapes).kernels
    joins = kernel.phases[1].program
    (output,) = joins.outputs
    rows = max(t for _, t in joins.grid)
    assert buffers(joins)[f"{output.name}, laid out anew"] == rows * 256 * 4
