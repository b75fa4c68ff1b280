"""Prices of the kernels that XLA writes itself on a GPU, beside what was measured."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse import device
from pallasfuse.ir.plain_work import Drawn
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.price import moves
from pallasfuse.price.xla import kernels_on, price_xla
from pallasfuse.price.xla_forms import LoopFusion
from pallasfuse.targets import TRITON

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
f32 = jnp.float32


def struct(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def program(function, *arguments):
    return convert(flatten(jax.make_jaxpr(function)(*arguments))).program


def price(function, *arguments):
    return price_xla(program(function, *arguments), H100)


def us(function, *arguments):
    return price(function, *arguments).us


@pytest.mark.parametrize(
    ("power", "dtype", "measured"),
    [
        (8, "float32", 1.1), (14, "float32", 1.2), (16, "bfloat16", 1.3), (18, "float32", 2.2), (18, "bfloat16", 2.2),
        (20, "bfloat16", 2.3), (20, "float32", 2.4), (22, "bfloat16", 6.0), (24, "bfloat16", 24.0), (24, "float32", 45.5),
    ],
)  # fmt: skip
def test_threads_need_time_to_begin(power, dtype, measured):
    """Where there are no more elements than threads that run at once, each has one: 2^18 take as long as 2^20."""
    assert us(lambda x: x + 1, struct(1 << power, dtype=dtype)) == pytest.approx(measured, rel=0.15)


def repeated(step, times):
    def function(x):
        for i in range(times):
            x = step(x, i)
        return x

    return function


@pytest.mark.parametrize(
    ("step", "dtype", "small", "large"),
    [
        (lambda x, i: x * 1.0001 + (0.5 + i), "float32", 1.4, 19.4),
        (lambda x, i: (x ^ (x >> (3 + i % 5))) + jnp.uint32(7 + i), "uint32", 1.6, 34.5),
        (lambda x, i: (x ^ (x >> 3)) * jnp.uint32(2654435 + i), "uint32", 1.6, 34.6),
    ],
    ids=["multiply and add", "shift and add", "shift and multiply"],
)
def test_operations_take_the_rate_of_the_vector_units_or_wait_for_each_other(step, dtype, small, large):
    assert us(repeated(step, 64), struct(1 << 14, dtype=dtype)) == pytest.approx(small, rel=0.3)
    assert us(repeated(step, 64), struct(1 << 22, dtype=dtype)) == pytest.approx(large, rel=0.3)


@pytest.mark.parametrize(
    ("function", "measured"),
    [(jnp.log, 24.9), (jnp.tanh, 21.9), (jnp.sin, 23.7), (jax.nn.sigmoid, 17.7), (lax.erf, 23.4), (jnp.expm1, 27.4)],
    ids=["log", "tanh", "sin", "logistic", "erf", "expm1"],
)
def test_functions_are_those_of_the_compilers_library(function, measured):
    six = repeated(lambda x, i: function(x + i * 0.01) * 0.9, 6)
    assert us(six, struct(1 << 22)) == pytest.approx(measured, rel=0.25)


def masked(x):
    n = x.shape[-1]
    seen = jnp.arange(n)[:, None] >= jnp.arange(n)[None]
    return jax.nn.softmax(jnp.where(seen, x.astype(f32) * 0.125, -1e30), -1).astype(x.dtype)


def softmax(x):
    return jax.nn.softmax(x.astype(f32), -1).astype(x.dtype)


@pytest.mark.parametrize(
    ("function", "shape", "dtype", "measured"),
    [
        (softmax, (4096, 4096), "float32", 47.0), (softmax, (4096, 4096), "bfloat16", 26.8),
        (softmax, (32768, 1024), "bfloat16", 46.4), (softmax, (32768, 257), "bfloat16", 34.3),
        (softmax, (8192, 16384), "float32", 510.8), (masked, (32, 1024, 1024), "float32", 148.1),
        (masked, (16, 4096, 4096), "float32", 1133.2),
    ],
)  # fmt: skip
def test_rows_that_leave_too_few_registers_take_longer(function, shape, dtype, measured):
    assert us(function, struct(*shape, dtype=dtype)) == pytest.approx(measured, rel=0.4)


def test_odd_rows_and_masks_leave_too_few_registers():
    assert us(softmax, struct(32768, 257, dtype="bfloat16")) > 1.3 * us(softmax, struct(32768, 256, dtype="bfloat16"))
    assert us(masked, struct(32, 1024, 1024, dtype="bfloat16")) > 1.15 * us(
        softmax, struct(32768, 1024, dtype="bfloat16")
    )


def test_a_softmax_of_rows_on_the_chip_is_left_to_xla():
    """Its kernel streams its rows as one of ours would."""
    for dtype in ("float32", "bfloat16"):
        jaxpr = jax.make_jaxpr(softmax)(struct(4096, 4096, dtype=dtype))
        assert not make_plan(jaxpr, TRITON.on(H100), FuseOptions(price=True)).kernels


def read_bytes(function, *arguments):
    (one,) = kernels_on(H100, program(function, *arguments))
    return one.read_bytes


def test_different_parts_of_a_tensor_are_read_apart():
    x, y = struct(4096, 4096), struct(4096, 2048)
    half = 4 * 4096 * 2048
    assert read_bytes(lambda x: jax.nn.silu(x[:, :2048]) * x[:, 2048:], x) == 2 * half
    assert read_bytes(lambda x: jax.nn.silu(x[:, :2048]) * x[:, :2048], x) == half
    assert read_bytes(lambda x, y: (x[:, :2048] * y, x[:, 2048:] * y), x, y) == 3 * half


def test_parts_of_a_part_are_read_apart():
    def halves(q):
        part = q[:, :, :64]
        return part[:, :, :32] * jnp.sin(part[:, :, 32:])

    assert read_bytes(halves, struct(512, 64, 192)) == 4 * 512 * 64 * 64


def test_a_users_condition_takes_no_part():
    def chosen(x, i, j):
        return jnp.where(i > -1, x, 0) + jnp.where(j > -1, jnp.exp(x), 2.0)

    whole = struct(4096, 4096)
    ints = struct(4096, 4096, dtype=jnp.int32)
    (one,) = kernels_on(H100, program(chosen, whole, ints, ints))
    assert one.cached_bytes == 0


def test_parts_of_parts_are_found_in_bounded_time():
    def shifted(x, steps):
        for i in range(steps):
            x = x + x[::-1] * jnp.roll(x, i, 0)
        return x

    few, many = (program(lambda x, n=n: shifted(x, n), struct(4096)) for n in (2, 60))
    assert any(moves.parts_taken(tuple(k.bodies)) for k in kernels_on(H100, few) if isinstance(k, LoopFusion))
    assert not any(moves.parts_taken(tuple(k.bodies)) for k in kernels_on(H100, many) if isinstance(k, LoopFusion))


def test_random_numbers_are_computed_where_one_loop_reads_them():
    def drawn(key):
        return jax.random.uniform(jax.random.wrap_key_data(key), (1 << 20,))

    key = struct(2, dtype=jnp.uint32)
    assert us(drawn, key) == pytest.approx(4.3, rel=0.3)

    def sums(key):
        numbers = jax.random.uniform(jax.random.wrap_key_data(key), (1024, 16384))
        return numbers.sum(0), numbers.sum(1)

    for function, stored in ((drawn, False), (sums, True)):
        found = [k for k in kernels_on(H100, program(function, key)) if isinstance(getattr(k, "work", None), Drawn)]
        assert [k.stored for k in found] == [stored] * len(found) != []


@pytest.mark.parametrize(
    ("function", "shape", "dtype", "measured"),
    [
        (jnp.sort, (16, 65536), "float32", 174.0), (jnp.sort, (16, 65536), "int32", 166.2),
        (jnp.argsort, (16, 65536), "float32", 174.3), (jnp.sort, (1, 1 << 20), "float32", 75.0),
        (jnp.sort, (1, 1 << 20), "int32", 56.0), (jnp.sort, (64, 50257), "int32", 159.8),
        (jnp.sort, (4096, 128), "float32", 15.7), (jnp.sort, (256, 4096), "float32", 69.6),
        (lambda x: lax.sort(x, dimension=1, is_stable=False), (16, 65536), "float32", 107.0),
    ],
)  # fmt: skip
def test_positions_are_sorted_with_keys_that_keep_their_order(function, shape, dtype, measured):
    """A library that sorts by digits needs no positions."""
    assert us(function, struct(*shape, dtype=dtype)) == pytest.approx(measured, rel=0.35)


@pytest.mark.parametrize(
    ("function", "shape", "dtype", "measured"),
    [
        (jnp.sort, (64, 50257), "float32", 321.8), (jnp.sort, (112, 20000), "float32", 134.8),
        (jnp.sort, (112, 40000), "int32", 120.0), (jnp.sort, (300, 20000), "int32", 166.8),
        (jnp.sort, (1000, 24000), "bfloat16", 488.2), (jnp.argsort, (112, 40000), "float32", 489.6),
        (jnp.argsort, (1000, 24000), "float32", 1747.0), (jnp.sort, (16, 1 << 18), "int32", 820.1),
    ],
)  # fmt: skip
def test_one_block_sorts_each_of_several_rows(function, shape, dtype, measured):
    found = price_xla(program(function, struct(*shape, dtype=dtype)), device.find("NVIDIA H200", "gpu")).us
    assert found == pytest.approx(measured, rel=0.36)


@pytest.mark.parametrize(
    ("left", "right", "m", "k", "n", "measured"),
    [
        ("mk", "kn", 1000, 5504, 2048, 137.3), ("mk", "nk", 1000, 5504, 2048, 26.6),
        ("mk", "kn", 2048, 2048, 2048, 97.0), ("mk", "nk", 2048, 2048, 2048, 18.4),
    ],
)  # fmt: skip
def test_threads_turn_bytes_for_the_matrix_units(left, right, m, k, n, measured):
    """The product of a kernel of ours wants both sides in the order of what is summed."""
    sizes = {"m": m, "k": k, "n": n}
    numbers = (((left.index("k"),), (right.index("k"),)), ((), ()))

    def scaled(a, b, s):
        made = lax.dot_general(a, b, numbers, preferred_element_type=jnp.int32).astype(f32) * s
        return jnp.maximum(made, 0.0).astype(jnp.bfloat16)

    structs = [struct(*(sizes[a] for a in order), dtype=jnp.int8) for order in (left, right)]
    schedule = "kernel { i:128@grid k:128@grid ( j:128~3 ( t0 ) t5 ) } [warps=8]"
    plan = make_plan(jax.make_jaxpr(scaled)(*structs, struct(n)), TRITON.on(H100), FuseOptions(schedule=schedule))
    assert plan.kernels[0].price.us == pytest.approx(measured, rel=0.25)


def test_a_thread_computes_all_that_its_elements_come_from():
    """What is computed along fewer axes is computed for each element that comes from it, but once for neighbours of a thread."""

    def operations(function, *arguments):
        terms = {t.name: t.amount for t in price(function, *arguments).terms}
        return terms["vector units"]

    row, column, both = struct(512), struct(512, 1), struct(512, 512)

    def along_rows(x, y):
        return jnp.log1p(x) + y

    whole = operations(along_rows, both, both)
    assert operations(along_rows, row, both) == pytest.approx(whole, rel=0.1)
    few = operations(along_rows, column, both)
    assert operations(jnp.add, both, both) < few < 0.5 * whole

    def sums(x, y):
        return jnp.sum((x * x + 1) * (x * x - 2) * y, 1)

    each = operations(sums, both, both)
    assert operations(sums, row, both) > 0.85 * each  # a row is loaded once less
    assert operations(sums, column, both) < 0.8 * each
