"""Which kernels are foretold to spill registers, and which are not. The figures are those of the compiler, for an H100."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from benchmarks import kernels
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import add, apply, const, mul, read, sub
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Carry, Let, Load, Loop, Reduce, Segment, Store, TileProgram
from pallasfuse.options import FuseOptions
from pallasfuse.resources import triton, triton_spills
from pallasfuse.targets import find
from tests.resources.test_triton import needed, plain, program_of, qkv

TRITON = find("triton")


def spilled(program):
    return triton.resources(program, TRITON).spilled_bytes


@pytest.mark.parametrize(("rows", "rolled"), [(64, 64), (64, 128), (128, 64)])
def test_scores_in_float32_are_no_reason_to_spill(rows, rolled):
    """The side of the second product takes the registers of the scores that it is computed from. The compiler: 32 bytes at most."""
    program = program_of(kernels.causal, *qkv("float32"), rows=rows, rolled=rolled, warps=4, stages=1)
    assert spilled(program) <= 32


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_sums_of_products_that_fill_the_registers_spill(dtype):
    program = program_of(plain, *qkv(dtype, d=128), rows=128, rolled=128, warps=4, stages=2)
    assert spilled(program) > 1000


def test_more_warps_than_rows_hold_the_same_scores():
    """Eight warps have rows for four of them: each pair has the same registers, as many as with four warps."""
    few, many = (program_of(plain, *qkv("bfloat16"), rows=64, rolled=256, warps=n, stages=1) for n in (4, 8))
    scores, sums = 64 * 256 // (32 * 4), 64 * 64 // (32 * 4)
    assert needed(many) >= needed(few) - scores // 2 - 2 * sums


@pytest.mark.parametrize(("rows", "taken"), [(8, 104), (16, 168)])
def test_registers_that_are_likely_are_about_what_the_compiler_takes(rows, taken):
    """Rows of 1024 of two matrices, of which two are computed, by four warps; `taken`: by the compiler."""
    arrays = kernels.array(4096, 1024), kernels.array(4096, 1024)
    program = program_of(scaled, *arrays, rows=rows, rolled=1024, warps=4)
    found = triton.resources(program, TRITON)
    assert taken / 1.6 <= found.likely_registers <= 1.6 * taken
    assert found.likely_registers <= found.registers


def scaled(x, y):
    return x * y / jnp.sum(jnp.exp(x), -1, keepdims=True), x - y


def late(x, w, a, b):
    return jnp.where(a > 0, x @ w + a + b, 0.0)


def test_what_is_read_beside_a_full_sum_spills():
    """Two arrays and a sum, each of half of the registers."""
    arrays = kernels.array(4096, 512), kernels.array(512, 128), kernels.array(4096, 128), kernels.array(4096, 128)
    wide, narrow = (program_of(late, *arrays, rows=n, warps=8, stages=2) for n in (256, 64))
    assert spilled(wide) > 256
    assert spilled(narrow) == 0


def test_a_sum_that_fills_the_registers_is_written_and_read_in_every_trip():
    """Though the block needs as many registers behind the loop, for what is read there. The compiler: 7528 bytes in all."""
    arrays = kernels.array(4096, 512), kernels.array(512, 128), kernels.array(4096, 128), kernels.array(4096, 128)
    program = program_of(late, *arrays, rows=256, warps=4, stages=2)
    assert {bool(s.path) for s in triton.resources(program, TRITON).spills if s.bytes > 1000} == {True, False}


def decayed(x, step, b, c, decay, bias=None):
    """Products of b and c, each times a decay that is read, as sides of products with x times its steps."""
    scores = jnp.einsum("kn,on->ko", b, c, preferred_element_type=jnp.float32)
    at = jnp.arange(256)
    kept = scores * jnp.where(at >= at[:, None], jnp.exp(decay).transpose(0, 2, 1), 0)
    step = step.astype(jnp.float32) if bias is None else step.astype(jnp.float32) + bias
    y = x.astype(jnp.float32) * jax.nn.softplus(step).astype(x.dtype).astype(jnp.float32)[:, :, None]
    return jnp.einsum("khm,hko->hmo", y.astype(x.dtype), kept.astype(x.dtype), preferred_element_type=jnp.float32)


def of_decayed(stages, *, with_bias):
    half = [(256, 24, 512), (256, 24), (256, 128), (256, 128)]
    arrays = [kernels.array(*shape, dtype="bfloat16") for shape in half] + [kernels.array(24, 256, 256)]
    arrays += [kernels.array(24)] if with_bias else []
    return program_of(decayed, *arrays, rows=64, rolled=64, warps=8, stages=stages)


def test_what_was_copied_ahead_is_loaded_whole_before_a_side_is_staged():
    """The bias comes from outside of the loop: the left side passes through shared memory, and the decay, which is read beside
    scores that eight warps hold twice, is loaded before that. The compiler: 2132 bytes, and 416 without a bias."""
    assert spilled(of_decayed(2, with_bias=True)) > 1500
    assert 256 < spilled(of_decayed(2, with_bias=False)) < 1000


def test_a_tile_is_held_as_often_as_the_product_that_it_is_read_with():
    """Eight warps have 64 rows of scores twice, and of the decay the same."""
    view = triton.view_of(of_decayed(1, with_bias=True), TRITON)
    load = next(x for x in view.lines if isinstance(x.statement, Load) and x.statement.tensor == "decay")
    (lifetime,) = (v for v in triton_spills._values(view) if v.first == load.number)
    assert lifetime.registers == triton_spills.PIECES * 2 * 64 * 256 / (8 * 32)


def test_wide_rows_without_products_do_not_spill():
    """They are computed piece by piece."""
    images = kernels.array(8, 1024, 32, 16, dtype="bfloat16")
    program = program_of(kernels.group_norm, images, kernels.array(32, 16), kernels.array(32, 16))
    assert spilled(program) == 0


def pulls(number):
    """Rows that are pulled towards others, and their distances; one sum or two over the differences of all pairs."""
    i, k, j = Axis("i", 4096), Axis("k", 4096), Axis("j", 64)
    x, y = Tensor("x", (i, j), "float32"), Tensor("y", (i, j), "float32")
    here, there = read("x.i", (i, j), "float32"), read("x.k", (k, j), "float32")
    apart = sub(here, there)
    step = (
        Load("x.k", "x", (k, j), "float32"),
        Reduce("d", (i, k), SUM, mul(apart, apart), (j,)),
        Reduce("p", (i, j), SUM, mul(read("d", (i, k), "float32"), (apart, there)[number == 1]), (k,)),
        Let("s.next", (i, j), add(read("s", (i, j), "float32"), read("p", (i, j), "float32"))),
    )
    segment = Segment(const(0, "int32"), const(128, "int32"), 0, 32, step)
    carry = Carry("s", (i, j), "float32", const(0.0, "float32"), "s.next")
    loop = Loop(k, (carry,), (segment,), const(4096, "int32"), const(0, "int32"))
    body = (Load("x.i", "x", (i, j), "float32"), loop, Store("y", (i, j), read("s", (i, j), "float32")))
    return TileProgram("pulls", (x,), (y,), ((i, 4),), ((i, 4), (k, 32), (j, 64)), body)


def test_what_several_sums_are_computed_from_is_kept():
    """The differences of all pairs are computed once, and wider than what is loaded."""
    assert needed(pulls(2)) == needed(pulls(1)) + 4 * 32 * 64 // 128


def normalised(results, dtype):
    """The last kernel of a normalisation over rows of channels, by tiles of `positions` of 64 channels."""

    def run(x, scale, bias):
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(1, keepdims=True)
        y = (centred * jax.lax.rsqrt((wide * wide).mean(1, keepdims=True) + 1e-5) * scale + bias).astype(x.dtype)
        return [{"result": jax.nn.relu(y), "centred": centred, "sign": y > 0}[r] for r in results.split()]

    return run, (
        kernels.array(8, 4096, 64, dtype=dtype),
        kernels.array(64, dtype=dtype),
        kernels.array(64, dtype=dtype),
    )


@pytest.mark.parametrize(("results", "dtype", "positions", "spills"), [
    ("result", "bfloat16", 512, False), ("result", "float32", 256, False), ("result", "float32", 512, True),
    ("sign", "float32", 512, False), ("result centred", "float32", 512, True),
    ("result centred sign", "bfloat16", 512, True), ("result centred sign", "float32", 256, True),
])  # fmt: skip
def test_what_several_stores_need_is_kept_from_one_to_the_next(results, dtype, positions, spills):
    """The compiler spills 16, 0, 13716, 0, 12992, 20720 and 9012 bytes of a thread."""
    run, arguments = normalised(results, dtype)
    options = FuseOptions(check=False, price=False, tiles=(("i", 1), ("k", 64), ("j", positions)), warps=4, stages=1)
    (kernel,) = pf.fuse(run, options=options).explain(*arguments, target="triton").kernels
    assert (spilled(kernel.phases[-1].program) > 500) == spills


def repeated(rows, *, warps=8):
    """Sums of a vector's products with columns, repeated along the rows of a state that a loop carries."""
    i, k, j = Axis("i", 4096), Axis("k", 16), Axis("j", 4096)
    w, y = Tensor("w", (k, j), "float32"), Tensor("y", (i, k), "float32")
    state = (i, k)
    step = (
        Load("w.k", "w", (k, j), "float32"),
        Reduce("d", state, SUM, read("w.k", (k, j), "float32"), (j,)),
        Let("s.next", state, add(read("s", state, "float32"), read("d", state, "float32"))),
    )
    segment = Segment(const(0, "int32"), const(64, "int32"), 0, 64, step)
    carry = Carry("s", state, "float32", const(0.0, "float32"), "s.next")
    loop = Loop(j, (carry,), (segment,), const(4096, "int32"), const(0, "int32"))
    body = (loop, Store("y", state, read("s", state, "float32")))
    return TileProgram("repeated", (w,), (y,), ((i, rows),), ((i, rows), (k, 16), (j, 64)), body, warps)


def test_a_sum_is_repeated_where_it_is_used():
    """A state of 2048 numbers has 8 in each of 256 threads. As a sum that was repeated before it was summed it had 512 of them in
    each: the compiler spilled 7416 bytes of a thread, and spills none now."""
    assert spilled(repeated(128)) == spilled(repeated(4)) == 0


def tiles_of_signs(stores, positions, rows):
    """A kernel that stores the values or the signs of an array, or both, by tiles of so many rows."""
    i, j = Axis("i", 4096), Axis("j", positions)
    x = Tensor("x", (i, j), "float32")
    value = read("x.i", (i, j), "float32")
    results = {"result": add(value, value), "sign": apply("gt", value, const(0.0, "float32"))}
    outputs = tuple(Tensor(name, (i, j), results[name].dtype) for name in stores.split())
    body = (Load("x.i", "x", (i, j), "float32"), *(Store(t.name, (i, j), results[t.name]) for t in outputs))
    return TileProgram("signs", (x,), outputs, ((i, rows),), ((i, rows), (j, positions)), body, 4)


def test_booleans_behind_another_store_take_a_register_each():
    """All are compared before the first one becomes a byte. The compiler spills 744 bytes of a thread with 128 numbers and their
    signs, and nothing where signs alone are stored, which are computed piece by piece."""
    both, alone = (spilled(tiles_of_signs(stores, 128, 256)) for stores in ("result sign", "sign"))
    assert both > 500 and alone < both / 4


def test_what_is_spilled_has_a_place_in_memory():
    held = triton.resources(tiles_of_signs("result sign", 128, 256), TRITON)
    assert 0 < held.kept_bytes < held.spilled_bytes


def products_of_coordinates(number, *, warps):
    """Sums of a few products of a row's values and a column's, none of them on matrix units."""
    i, k = Axis("i", 4096), Axis("k", 4096)
    rows, columns = (
        [Tensor(f"{side}{n}", (axis,), "float32") for n in range(number)] for side, axis in (("a", i), ("b", k))
    )
    y = Tensor("y", (i, k), "float32")
    terms = [mul(read(f"{a.name}.t", a.axes, "float32"), read(f"{b.name}.t", b.axes, "float32"))
             for a, b in zip(rows, columns, strict=True)]  # fmt: skip
    loads = [Load(f"{t.name}.t", t.name, t.axes, "float32") for t in (*rows, *columns)]
    body = (*loads, Store("y", (i, k), functools.reduce(add, terms)))
    tiles = ((i, 256), (k, 128))
    return TileProgram("products", (*rows, *columns), (y,), tiles, tiles, body, warps)


def test_values_of_rows_are_held_by_every_thread_that_computes_with_them():
    """Each thread of four warps has 64 of 256 rows. The compiler spills 2540 bytes of a thread with three values of each row, and
    none with eight warps."""
    assert spilled(products_of_coordinates(3, warps=4)) > 1000
    assert spilled(products_of_coordinates(3, warps=8)) == spilled(products_of_coordinates(1, warps=4)) == 0
