"""Rows that XLA keeps on the chip: which reductions are inside of a normalisation, and which normalisations are stored.

What XLA really makes of these functions is compiled for an H100 by `tests/aot/test_xla_kernels.py`.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse import device
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import kernels_on, price_xla
from pallasfuse.price.xla_forms import LoopFusion
from pallasfuse.price.xla_habits import habits_on
from pallasfuse.price.xla_kernels import xla_kernels

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
ROWS, WIDTH = 512, 1024
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
PLACES = jax.ShapeDtypeStruct((9000,), jnp.int32)


def program(function, *arguments):
    return convert(jax.make_jaxpr(function)(*arguments)).program


def kernels(function, *arguments):
    return kernels_on(H100, program(function, *arguments))


def rows(function, *arguments):
    return [k for k in kernels(function, *arguments) if isinstance(k, LoopFusion) and k.is_row]


def softmax(x):
    return jax.nn.softmax(x, -1)


def normed(x):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize(
    "function", [softmax, normed, lambda x: softmax(x).max(-1)], ids=["softmax", "norm", "reduced"]
)
def test_a_normalisation_is_one_kernel_that_stores_no_statistics(function):
    (row,) = kernels(function, X)
    result = jax.eval_shape(function, X)
    assert row.is_row and row.read_bytes == X.size * 4 and row.written_bytes == result.size * 4


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x: softmax(x).sum(0), [X]),
        (lambda x: softmax(x).sum(), [X]),
        (lambda x, i: softmax(x)[i], [X, PLACES]),
    ],
    ids=["columns", "all", "taken"],
)
def test_it_is_stored_where_something_else_than_its_row_is_made_of_it(function, arguments):
    found = kernels(function, *arguments)
    (row,) = (k for k in found if isinstance(k, LoopFusion) and k.is_row)
    assert row.written_bytes == X.size * 4
    others = [k for k in found if k is not row]
    assert others and all("x" not in k.sources for k in others)


def test_a_map_of_it_is_stored_in_its_place():
    (row,) = rows(lambda x, y: (softmax(x) * y).sum(), X, X)
    assert row.written_bytes == X.size * 4 and row.read_bytes == 2 * X.size * 4


def with_its_root(x):
    root = lax.rsqrt((x * x).mean(-1, keepdims=True))
    return x * root, root


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.nn.logsumexp(x, -1),
        lambda x: (x.mean(-1), x.var(-1)),
        with_its_root,
        lambda x: x[:, 0][:, None] - (x * 2).max(0).max(),
    ],
    ids=["largest", "mean", "root", "no row"],
)
def test_a_reduction_that_is_wanted_itself_is_no_part_of_a_row(function):
    assert not rows(function, X)


def test_each_result_has_a_kernel_that_reduces_the_rows_again():
    found = rows(lambda x, y: (softmax(x) * 2, softmax(x) + y), X, X)
    assert [k.read_bytes for k in found] == [X.size * 4, 2 * X.size * 4]


def test_rows_that_are_too_long_are_read_for_each_reduction():
    long = jax.ShapeDtypeStruct((16, 2 * habits_on(H100).longest_row), jnp.float32)
    assert not rows(softmax, long) and len(kernels(softmax, long)) == 3


def test_what_a_kernel_of_ours_makes_is_no_part_of_a_row():
    """Nor does the price of the rest count a normalisation twice."""
    whole = program(softmax, X)
    largest = next(n.name for n in whole.nests if getattr(n, "reducer", None) is not None)
    made = frozenset({largest})
    found = xla_kernels(whole, habits_on(H100), made, frozenset({"x"}))
    assert all(largest not in k.makes for k in found)
    assert price_xla(whole, H100, made).us > 0


def test_what_a_row_computes_inside_has_no_second_maker_there():
    """A short reduction that a kernel takes in brings no more than it needs."""

    def function(x, w):
        e = jnp.exp(x - x.max(-1, keepdims=True))
        return ((e * w).sum(-1) * 3).sum(), e * 2

    short = jax.ShapeDtypeStruct((1 << 18, 7), jnp.float32)
    for kernel in kernels(function, short, short):
        assert len(set(kernel.makes)) == len(kernel.makes)


@pytest.mark.parametrize(
    ("function", "of_one_row", "of_two"),
    [
        (softmax, 1, 1),  # results of reductions are repeated as they are
        (lambda x: x / jnp.sum(x, -1, keepdims=True), 1, 1),
        (lambda x: x / jnp.sum(x, -1, keepdims=True).astype(jnp.float16).astype(x.dtype), 1, 1),
        (lambda x: x - jnp.mean(x, -1, keepdims=True), 2, 1),
        (lambda x: x / (jnp.sum(x, -1, keepdims=True) + 1), 2, 1),
        (lambda x: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5), 2, 1),
    ],
)
def test_the_number_of_the_only_row_is_not_computed_on_inside(function, of_one_row, of_two):
    """The numbers of kernels are those that XLA compiles for an H100."""
    found = [len(kernels(function, jax.ShapeDtypeStruct((n, 4096), jnp.float32))) for n in (1, 2)]
    assert found == [of_one_row, of_two]
