"""What of a kernel's shared memory and registers comes from where. `tests/aot` compares the sums with the compiler."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from benchmarks import kernels
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import add, const, read
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import (
    Carry,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Store,
    TileProgram,
    block_start,
    verify,
)
from pallasfuse.resources import triton
from pallasfuse.resources.triton_registers import registers_needed
from pallasfuse.resources.triton_view import View
from pallasfuse.targets import find
from tests.ir.nested_programs import EXAMPLES

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


def test_what_two_products_take_stays_in_its_slot_for_the_second():
    """A side in float32, of 128 x 64; the compiler takes 139264 bytes for such a kernel, three slots of it among them."""
    arrays = kernels.array(4096, 1024), kernels.array(1024, 32), kernels.array(1024, 32)
    both = program_of(lambda x, a, b: jnp.tanh(x @ a) * (x @ b), *arrays, rows=128, rolled=64, warps=8, stages=3)
    assert buffers(both)["3 of x"] == 3 * 128 * 64 * 4


@pytest.mark.parametrize(("warps", "rolled", "copies"), [(8, 128, 6), (8, 64, 6), (4, 64, 6), (4, 128, 2), (8, 256, 2)])
def test_a_row_of_fewer_elements_than_threads_may_be_loaded_in_several_layouts(warps, rolled, copies):
    """The crash of a matrix memory with decays: its gates are read before the first product and behind it. Compiled for an H100,
    they took two or three times their bytes for each stage but one, with such tiles and warps."""

    def gated(q, k, v, decay, gate):
        scores = decay[:, :, None] - decay[:, None] + gate[:, None]
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        return jnp.einsum("hqk,khd->qhd", (jnp.einsum("qhd,khd->hqk", q, k) * weights).astype(q.dtype), v)

    numbers = [kernels.array(2, 1024, dtype="float32")] * 2
    found = buffers(program_of(gated, *qkv("bfloat16"), *numbers, rows=64, rolled=rolled, warps=warps, stages=3))
    assert found[f"{copies} of decay"] == found[f"{copies} of gate"] == copies * rolled * 4


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
        if isinstance(line.statement, Load) and line.scope.loop is not None:
            assert {r.scope for r in view.readers(line)} == {line.scope}


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


# --- loops inside loops


def two_levels(window, tile, rows=64):
    """The sum of rows of 4096 elements, in windows and in tiles of them."""
    i, j = Axis("i", 1024), Axis("j", 4096)
    x, y = Tensor("x", (i, j), "float32"), Tensor("y", (i,), "float32")

    def body(carried, inside):
        total = add(read(carried, (i,), "float32"), read("r", (i,), "float32"))
        step = (
            Load("x.t", "x", (i, j), "float32"),
            Reduce("r", (i,), SUM, read("x.t", (i, j), "float32"), (j,)),
            Let(f"{carried}.next", (i,), total),
        )
        init = read("s", (i,), "float32") if inside else const(0.0, "float32")
        origin = read(block_start(j), (), "int32") if inside else const(0, "int32")
        length = window if inside else j.extent
        segment = Segment(const(0, "int32"), const(length // tile, "int32"), 0, tile, step)
        carry = Carry(carried, (i,), "float32", init, f"{carried}.next")
        return Loop(j, (carry,), (segment,), const(j.extent, "int32"), const(0, "int32"), origin=origin)

    if window == tile:
        loop = body("s", False)
    else:
        inner = body("s.in", True)
        segment = Segment(const(0, "int32"), const(j.extent // window, "int32"), 0, window, (inner,))
        carry = Carry("s", (i,), "float32", const(0.0, "float32"), "s.in")
        loop = Loop(j, (carry,), (segment,), const(j.extent, "int32"), const(0, "int32"))
    store = Store("y", (i,), read("s", (i,), "float32"))
    return verify(TileProgram("rows", (x,), (y,), ((i, rows),), ((i, rows), (j, window)), (loop, store)))


def test_an_inner_loop_holds_tiles_of_its_own_size():
    """What it takes is what one loop over such tiles takes, and the sums that the outer loop carries."""
    inner, flat, wide = (
        registers_needed(View(p, TRITON)) for p in (two_levels(1024, 64), two_levels(64, 64), two_levels(1024, 1024))
    )
    assert flat <= inner <= flat + 4
    assert inner < wide / 4
    assert (
        triton.resources(two_levels(1024, 64), TRITON).shared_bytes
        <= triton.resources(two_levels(64, 64), TRITON).shared_bytes
    )


def test_what_an_inner_loop_reads_is_kept_until_it_ends():
    """A value of the outer loop, by the last trip of the inner one; of the block, by that of the outer one."""
    view = View(EXAMPLES["deep"].program("masked"), TRITON)
    names = [line.name for line in view.lines]
    assert names == ["a.t", "b.t", "c.t", "c.next", "d.t", "e.t", "e.next", None]
    inner, outer = view.lines[0].scope, view.lines[4].scope
    block = view.lines[7].scope
    assert (inner.first, inner.last, outer.first, outer.last) == (0, 3, 0, 6)
    assert inner.is_in(outer)
    assert inner.is_in(block)
    assert not outer.is_in(inner)
    assert (outer.kept_until(inner, 1), block.kept_until(inner, 1), outer.kept_until(outer, 5)) == (3, 6, 5)
    assert [r.loop and r.loop.axis.name for r in view.scopes] == ["k", "n", None]


def test_every_nested_program_has_an_estimate():
    for name, example in EXAMPLES.items():
        found = triton.resources(example.program("masked"), TRITON)
        assert 0 < found.registers <= 255, name


def test_buffers_take_registers():
    flat, kept = (registers_needed(View(EXAMPLES[n].program("masked"), TRITON)) for n in ("flat", "kept"))
    fewer = EXAMPLES["kept"].program("masked")
    larger = replace(fewer, body=(replace(fewer.body[0], sizes=(4, 4096)), *fewer.body[1:]))
    assert registers_needed(View(larger, TRITON)) >= kept + 4 * (4096 - 48) // (32 * fewer.warps)
    assert flat > 0


def test_bytes_beside_numbers_are_laid_out_anew_also_where_a_mask_ends_the_tile():
    """A gradient of a masked mean over 6001 elements: the compiler reports 4096 bytes for its kernel on an H100."""

    def gradient(x, y, event):
        e = event.astype(jnp.float32)
        return ((x - y) * e).sum(), -e / jnp.maximum(e.sum(), 1)

    shapes = [jax.ShapeDtypeStruct((6001,), t) for t in (jnp.float32, jnp.float32, jnp.bool_)]
    (kernel,) = pf.fuse(gradient, options=pf.FuseOptions(target="triton", price=False)).explain(*shapes).kernels
    assert triton.resources(kernel.phases[0].program, kernel.phases[0].target).shared_bytes >= 4096


def test_what_a_step_of_a_loop_sums_may_be_laid_out_anew():
    """Three axes in a kernel that moves matrices: a filter of an H100 took 4096 bytes for such a sum."""

    def step(s, _):
        return (s[:, :, None] + jnp.cos(s)[None, :, :]).max(1), None

    def of_matrices(s, _):
        return s - s.max(), None

    def of_cubes(s, _):
        return s - s.max(), None

    def anew(step, *shape):
        options = pf.FuseOptions(target="triton", price=True)
        plan = pf.fuse(lambda x: jax.lax.scan(step, x, length=64)[0], options=options).explain(
            kernels.array(*shape, dtype="float32")
        )
        (program,) = (x.kernel for x in plan.loops)
        assert program.is_recurrent
        return [b.bytes for b in triton.resources(program, TRITON).buffers if "sums, laid out anew" in b.name]

    assert anew(step, 16, 16) == [16 * 16 * 16 * 4]
    assert anew(of_matrices, 16, 16) == []
    assert anew(of_cubes, 4, 8, 8) == []  # it loads as many axes as it sums


def test_sums_outside_of_steps_are_laid_out_as_they_are_computed():
    """Distances between points, summed over a third axis, took no shared memory for that: it would be more than there is."""

    def distances(x, y):
        return jnp.abs(x[:, None, :] - y[None, :, :]).sum(-1)

    x = kernels.array(512, 16, dtype="float32")
    options = pf.FuseOptions(target="triton", price=False)
    (kernel, *_) = pf.fuse(lambda x, y: jax.nn.softmax(-distances(x, y), -1), options=options).explain(x, x).kernels
    program = kernel.phases[0].program
    assert not program.is_recurrent
    assert not any("sums, laid out anew" in b.name for b in triton.resources(program, TRITON).buffers)
