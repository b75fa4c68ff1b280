"""Rows of inputs that are made longer for kernels by threads: which, and that results are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.emission import pallas_kernel
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.resources.as_threads import as_threads_run_it
from pallasfuse.resources.padded_rows import padded_rows
from pallasfuse.targets import TRITON

HEADS, ROWS, FEATURES = 2, 48, 16


def scored(q, k, array):
    scores = jnp.einsum("hid,hjd->hij", q, k, preferred_element_type=jnp.float32)
    return jnp.where(array, scores, -1e9) if array.dtype == bool else scores + array.astype(jnp.float32)


def attend(q, k, array):
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(scored(q, k, array), -1).astype(k.dtype), k)


def reduce(q, k, array):
    scores = scored(q, k, array)
    most = jnp.max(scores, -1)
    return most, jnp.sum(jnp.exp(scores - most[..., None]), -1)


def turned(q, k, array):
    """The array has its rows along the other axis."""
    return attend(q, k, jnp.swapaxes(array, 1, 2))


def structs(columns, dtype):
    array = jax.ShapeDtypeStruct((HEADS, ROWS, columns), dtype)
    return *(jax.ShapeDtypeStruct((HEADS, n, FEATURES), jnp.bfloat16) for n in (ROWS, columns)), array


def kernels(function, arguments):
    options = FuseOptions(price=False, target=TRITON.name, tiles=(("j", 16),))
    return make_plan(jax.make_jaxpr(function)(*arguments), TRITON, options).kernels


def padded(function, arguments):
    """The extents of rows that are made longer, of all programs of all kernels."""
    programs = [as_threads_run_it(p.program).program for k in kernels(function, arguments) for p in k.phases]
    assert programs
    return sorted({row for p in programs for row in padded_rows(p).values()})


@pytest.mark.parametrize(
    ("function", "columns", "dtype", "rows"),
    [
        (attend, 161, "bfloat16", [168]),
        (attend, 162, "bfloat16", []),  # a word at a time is copied ahead
        (attend, 161, "float32", []),
        (attend, 161, "bool", []),
        (attend, 160, "bfloat16", []),
        (reduce, 161, "float32", [164]),  # no product is made of it: all is computed in the order of its load
        (reduce, 161, "bfloat16", [168]),
        (reduce, 162, "float32", []),
        (reduce, 161, "bool", []),
        (reduce, 161, "int8", []),
    ],
)
def test_rows_of_odd_elements_beside_products_are_made_longer(function, columns, dtype, rows):
    assert padded(function, structs(columns, jnp.dtype(dtype))) == rows


def test_rows_lie_along_the_last_dimension_in_memory():
    q, k, _ = structs(161, jnp.bfloat16)
    array = jax.ShapeDtypeStruct((HEADS, 161, ROWS), jnp.bfloat16)
    assert padded(turned, (q, k, array)) == []  # 48 elements


def test_what_a_product_reads_as_it_is_keeps_its_rows():
    def product(x, w):
        return jnp.tanh(x @ w)

    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 1001), (1001, 1001))]
    assert padded(product, arguments) == []


def test_vectors_keep_their_lengths():
    q, k, _ = structs(161, jnp.float32)
    assert padded(reduce, (q, k, jax.ShapeDtypeStruct((161,), jnp.float32))) == []


def test_without_a_product_nothing_is_made_longer():
    def summed(x):
        return jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1)

    assert padded(summed, [jax.ShapeDtypeStruct((64, 1001), jnp.bfloat16)]) == []


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("columns", [161, 163, 257])
@pytest.mark.parametrize(("function", "dtype"), [(attend, "bfloat16"), (reduce, "bfloat16"), (reduce, "float32")])
def test_results_are_those_of_float64(function, dtype, columns, monkeypatch):
    random = np.random.default_rng(columns)
    q, k = (jnp.asarray(random.standard_normal((HEADS, n, FEATURES)), jnp.bfloat16) for n in (ROWS, columns))
    array = jnp.asarray(2 * random.standard_normal((HEADS, ROWS, columns)), dtype)
    lengths = []
    longer = pallas_kernel._with_rows
    monkeypatch.setattr(pallas_kernel, "_with_rows", lambda x, row: lengths.append(row) or longer(x, row))
    (kernel,) = kernels(function, structs(columns, jnp.dtype(dtype)))
    (phase,) = kernel.phases
    by_shape = {x.shape: x for x in (q, k, array)}
    inputs = {t.name: by_shape[tuple(a.extent for a in t.axes)] for t in phase.program.inputs}
    found = pallas_kernel.call(phase.program, inputs, interpret=True)
    assert lengths and all(n > columns for n in lengths)
    exact = jax.tree.leaves(wanted(function, *(np.asarray(x, np.float64) for x in (q, k, array))))
    for own, value in zip(found.values(), exact, strict=True):
        np.testing.assert_allclose(np.asarray(own, np.float64), value, rtol=2e-2, atol=2e-2)


def wanted(function, q, k, array):
    scores = np.einsum("hid,hjd->hij", q, k) + array
    most = scores.max(-1)
    chances = np.exp(scores - most[..., None])
    if function is reduce:
        return most, chances.sum(-1)
    return np.einsum("hij,hjd->hid", chances / chances.sum(-1, keepdims=True), k)
