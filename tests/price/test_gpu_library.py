"""Products of a library on GPUs: how their operands lie in memory, and products of bytes and of integers."""

import json
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse import device
from pallasfuse.device import assumed
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.gpu_library import product_us
from pallasfuse.price.xla import kernels_on, price_xla
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, Opaque, Row

GPU = assumed("gpu")
SIZES = {"m": 2048, "k": 2048, "n": 4096}


def program(left, right, dtype, **sizes):
    """A product of operands whose axes are m, n and the summed k, in the given orders."""
    sizes = SIZES | sizes
    dims = (((left.index("k"),), (right.index("k"),)), ((), ()))
    wide = jnp.int32 if dtype.startswith("int") else jnp.float32

    def multiply(a, b):
        return lax.dot_general(a, b, dims, preferred_element_type=wide)

    shapes = [jax.ShapeDtypeStruct([sizes[a] for a in order], dtype) for order in (left, right)]
    return convert(jax.make_jaxpr(multiply)(*shapes)).program


def product(left, right, dtype="bfloat16", **sizes):
    (found,) = kernels_on(GPU, program(left, right, dtype, **sizes))
    assert isinstance(found, LibraryProduct)
    return found


def time_us(left, right, dtype="bfloat16", **sizes):
    return product_us(product(left, right, dtype, **sizes), GPU)


def test_rows_of_operands():
    assert product("mk", "kn").rows_of == (Row(2048, summed=True), Row(4096, summed=False))
    assert product("km", "nk").rows_of == (Row(2048, summed=False), Row(2048, summed=True))
    heads = convert(jax.make_jaxpr(lambda x, w: jnp.einsum("thd,hdo->to", x, w))(
        jax.ShapeDtypeStruct((512, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((8, 64, 96), jnp.bfloat16)
    )).program  # fmt: skip
    (found,) = kernels_on(GPU, heads)
    assert found.rows_of == (Row(8 * 64, summed=True), Row(96, summed=False))


@pytest.mark.parametrize(("left", "right", "shorter", "least", "most"), [
    ("mk", "kn", {"m": 2047}, 0.99, 1.01), ("mk", "nk", {"n": 4095}, 0.99, 1.01), ("km", "nk", {"n": 4095}, 0.99, 1.01),
    ("mk", "kn", {"n": 4095}, 2.0, 3.0), ("mk", "kn", {"k": 2047}, 2.0, 3.0), ("km", "kn", {"m": 2047}, 2.0, 3.0),
    ("mk", "nk", {"k": 2044}, 2.0, 3.0), ("mk", "kn", {"n": 4092}, 1.1, 1.4), ("km", "kn", {"k": 2047}, 1.2, 1.5),
])  # fmt: skip
def test_only_rows_that_begin_anywhere_make_a_product_slower(left, right, shorter, least, most):
    """The layouts of `benchmarks/xla_alone.py`, whose times on an H100 are of these shares to within a quarter."""
    assert least <= time_us(left, right, **shorter) / time_us(left, right) <= most


@pytest.mark.parametrize(
    ("dtype", "columns", "slower"),
    [("float32", 50257, True), ("float32", 50260, False), ("bfloat16", 50257, False), ("float32", 251, False)],
)
def test_rows_of_a_result_that_begin_anywhere(dtype, columns, slower):
    """Of float32, 2048 x 768 x 50257 takes 756 us on an H100, with 50264 columns 438; of bfloat16 it takes 290 and 243."""
    share = time_us("mk", "nk", dtype, n=columns) / time_us("mk", "nk", dtype, n=-(-columns // 4) * 4)
    assert (1.6 < share < 2.0) if slower else (0.95 < share < 1.05)


@pytest.mark.parametrize(
    ("made", "kernels"),
    [
        (lambda w: w, 1),
        (jnp.exp, 1),
        (lambda w: jnp.pad(w, ((0, 0), (0, 3))), 2),
        (lambda w: jnp.where(jnp.arange(2005) > jnp.arange(768)[:, None], w, 0), 2),
    ],
    ids=["given", "computed", "padded", "masked"],
)
def test_operands_that_a_product_of_few_rows_computes(made, kernels):
    """As XLA compiles them for an H100: what depends on a position is stored before."""
    shapes = jax.ShapeDtypeStruct((64, 768), jnp.bfloat16), jax.ShapeDtypeStruct((768, 2005), jnp.bfloat16)
    found = kernels_on(GPU, convert(jax.make_jaxpr(lambda x, w: x @ made(w))(*shapes)).program)
    assert len([k for k in found if not (isinstance(k, Opaque) and k.computed_with)]) == kernels


def test_bytes_are_multiplied_as_bytes():
    assert product("mk", "nk", "int8").operand_dtype == "int8"
    assert time_us("mk", "nk", "int8") < 0.7 * time_us("mk", "nk")
    assert time_us("mk", "nk", "int32") > time_us("mk", "nk", "bfloat16")


def of_types(left, right, summed, cast=None):
    """The product of a matrix by a transposed one, each cast to a type before, if one is given."""

    def multiply(a, b):
        if cast is not None:
            a, b = a.astype(cast), b.astype(cast)
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=summed)

    shapes = jax.ShapeDtypeStruct((256, 384), left), jax.ShapeDtypeStruct((512, 384), right)
    found = kernels_on(GPU, convert(jax.make_jaxpr(multiply)(*shapes)).program)
    (multiplied,) = [k for k in found if isinstance(k, LibraryProduct)]
    return multiplied


@pytest.mark.parametrize(("left", "right", "summed", "cast", "kind"), [
    ("int8", "int8", "int32", None, "int8"), ("int8", "int8", "int8", None, "int32"), ("int8", "int8", "int32", "int32", "int32"),
    ("int8", "int8", "int32", "int16", "int32"), ("int16", "int16", "int32", None, "int32"),
    ("int8", "int8", "bfloat16", "bfloat16", "bfloat16"), ("int8", "int8", "float32", "float32", "float32"),
])  # fmt: skip
def test_only_bytes_that_the_program_multiplies_are_multiplied_as_such(left, right, summed, cast, kind):
    """As XLA compiles them for an H100: it multiplies integers of other types one by one, whatever they were cast from."""
    found = of_types(left, right, summed, cast)
    assert found.operand_dtype == kind
    assert not found.copies


def test_a_copy_is_made_with_whole_rows():
    """The columns of an odd number begin anywhere; those of the copy are as long as the sum."""
    copied = product("mk", "kn", "int8", n=4095)
    assert copied.rows_of == (Row(2048, summed=True), Row(2048, summed=True))
    assert product_us(copied, GPU) < 1.1 * time_us("mk", "nk", "int8")


def test_operands_of_bytes_are_turned_where_their_rows_are_not_summed():
    def copies(left, right, dtype):
        return [c.tensor for c in product(left, right, dtype).copies]

    assert copies("mk", "nk", "int8") == []
    assert copies("mk", "kn", "int8") == ["b"]
    assert copies("km", "nk", "int8") == ["a"]
    assert copies("km", "kn", "bfloat16") == []


def test_for_few_rows_an_operand_of_bytes_is_turned_as_it_is_read():
    assert product("mk", "kn", "int8", m=16).copies == ()
    assert [c.tensor for c in product("mk", "kn", "int8", m=333).copies] == ["b"]


# --- reductions beside them


def loop(function, *shapes):
    (found,) = kernels_on(GPU, pairwise(function, *shapes))
    assert isinstance(found, LoopFusion)
    return found


def pairwise(function, *shapes):
    return convert(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))).program


def largest_sums(a, b):
    return jnp.max(a[:, None, :] + b[None], axis=2)


def test_operands_that_many_rows_are_reduced_with_come_again_from_the_cache():
    apart = loop(largest_sums, (512, 4096), (2048, 4096))
    of_a, of_b = 512 * 4096 * 4, 2048 * 4096 * 4
    assert apart.bytes_read_again == pytest.approx(of_a * (2048 / 16 - 1) + of_b * (512 - 1))
    assert loop(largest_sums, (512, 32), (512, 32)).bytes_read_again == 0  # found beside each multiprocessor
    assert loop(lambda a, b: jnp.max(a + b, axis=1), (512, 4096), (512, 4096)).bytes_read_again == 0


def test_results_that_lanes_combine_cost_more_than_those_of_threads():
    """One number of points each; of few points each thread reduces its own."""
    us = {n: price_xla(pairwise(largest_sums, (8192, n), (2**12 // n, n)), GPU).us for n in (31, 32, 64, 1024)}
    assert us[32] > us[64] > us[1024]
    assert us[31] < us[32]


TINY = {(65536, 2): 2.1, (32256, 3): 2.2}
"""Microseconds of products of float32 matrices, by their number and side, in loops of XLA (`wrapped_dot`) on an H100: kernels of
`jax.jit` in `snow-and-jelly-as-material-points-on-a-grid` and `molecule-tensors-of-three-by-three-energies-and-pulls`."""


@pytest.mark.parametrize(("many", "side"), TINY)
def test_tiny_products_of_float32_are_loops(many, side):
    def price(dtype):
        shape = jax.ShapeDtypeStruct((many, side, side), dtype)
        return price_xla(
            convert(jax.make_jaxpr(jnp.matmul)(shape, shape)).program, device.find("NVIDIA H100 80GB HBM3", "gpu")
        )

    assert price(jnp.float32).us == pytest.approx(TINY[many, side], rel=0.15)
    assert not any(t.name == "matrix units" for t in price(jnp.float32).terms)
    assert any(t.name == "matrix units" for t in price(jnp.bfloat16).terms)


@pytest.mark.parametrize(("dtype", "bias", "share"), [("float32", (0.85, 1.1), 0.95), ("bfloat16", (0.9, 1.15), 0.93)])
def test_small_products_take_about_what_was_measured(dtype, bias, share):
    """96 products of 64 to 4096 rows and 16 to 512 columns, on an H200 (`benchmarks/xla_alone.py`)."""
    kind = "small products"
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "xla_alone_h200.json"
    measured = {label: us for label, us, _ in json.loads(path.read_text())["rows"] if label.startswith(kind)}
    h200 = device.find("NVIDIA H200", "gpu")
    ratios = []
    for label, us in measured.items():
        *_, m, k, n, own = label.split()
        if own == dtype:
            sizes = {"m": int(m), "k": int(k), "n": int(n)}
            ratios.append(price_xla(program("mk", "kn", dtype, **sizes), h200).us / us)
    assert len(ratios) == 48
    assert bias[0] < statistics.geometric_mean(ratios) < bias[1]
    assert sum(0.6 < r < 1.6 for r in ratios) >= share * len(ratios)
