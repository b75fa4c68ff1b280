"""What XLA stores before it reduces it in few blocks: compared with what it compiles for an H100, and with measured times."""

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.xla_alone import columns_of_maps
from pallasfuse import device
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import kernels_on, price_xla

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "xla_alone_h100.json"


def kernels(function, *shapes, dtype="float32"):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return kernels_on(H100, convert(flatten(jax.make_jaxpr(function)(*arguments))).program)


LAST_STORED = {
    "exp": (jnp.exp, 38, 40),
    "exp of exp": (lambda x: jnp.exp(jnp.exp(x)), 80, 88),
    "tanh": (jnp.tanh, 104, 112),
    "log": (jnp.log, 80, 88),
    "sqrt": (jnp.sqrt, 34, 36),
    "one over": (lambda x: 1 / x, 20, 22),
    "a constant": (lambda x: x + 1, 19, 20),
    "two constants": (lambda x: x * 2 + 1, 44, 48),
    "choice of two": (lambda x: jnp.where(x > 0, x, 2.0), 44, 48),
    "three constants": (lambda x: ((x * x + 1) * x + 2) * x + 3, 68, 72),
    "seven constants": (lambda x: (((x + 1) * 1.1 + 1) * 1.2 + 3) * 1.3 + 4, 136, 144),
}
"""Sums of these over the middle axis of [n, 1024, 64]: XLA stores what is summed for n up to the first number, and no longer at
the second one (compiled for an H100)."""


@pytest.mark.parametrize("case", LAST_STORED)
def test_values_are_stored_where_few_blocks_reduce_them(case):
    function, stored, inside = LAST_STORED[case]

    def number(images):
        return len(kernels(lambda x: function(x).sum(1), (round(images), 1024, 64)))

    assert number(0.9 * stored) == 2 and number(1.1 * inside) == 1


@pytest.mark.parametrize("function", [jnp.abs, lambda x: x * x, lambda x: (x * x) * (x * x), lambda x: x**3])
def test_cheap_values_of_one_tensor_are_never_stored(function):
    assert all(len(kernels(lambda x: function(x).sum(1), (n, 1024, 64))) == 1 for n in (1, 8, 64))


@pytest.mark.parametrize(
    ("shape", "dtype", "number"),
    [
        ((1, 4096, 1024), "float32", 2), ((1, 4096, 1024), "bfloat16", 2), ((1, 2048, 4096), "float32", 1),
        ((1, 2048, 4096), "bfloat16", 1), ((8, 1024, 64), "float32", 2), ((8, 1024, 64), "bfloat16", 1),
        ((64, 300, 96), "float32", 1), ((64, 300, 96), "bfloat16", 1),
    ],
)  # fmt: skip
def test_products_of_two_tensors_are_stored_where_few_blocks_would_read_both(shape, dtype, number):
    def product(x, y):
        return (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(1)

    assert len(kernels(product, shape, shape, dtype=dtype)) == number


@pytest.mark.parametrize(("rows", "length", "number"), [(40, 8192, 2), (80, 8192, 1), (256, 512, 2)])
def test_rows_are_stored_as_columns_are(rows, length, number):
    function = jnp.tanh if length == 512 else lambda x: jnp.exp(jnp.exp(x))
    assert len(kernels(lambda x: function(x).sum(1), (rows, length))) == number


def test_a_mean_that_is_taken_from_all_is_stored_and_the_others_are_not():
    """Its quotient would be computed for each element, by few blocks."""

    def spread(x):
        return ((x - x.mean(1, keepdims=True)) ** 2).sum(1)

    found = kernels(spread, (8, 256, 256))
    assert [k.makes for k in found if any(".repeated" in name for name in k.makes)]
    assert not [k for k in found if any(".terms" in name for name in k.makes)]


def test_what_is_stored_for_one_reduction_is_read_by_what_follows():
    def norm(x):
        x = x - x.mean((1, 3), keepdims=True)
        return x * lax.rsqrt((x * x).mean((1, 3), keepdims=True) + 1e-6)

    found = kernels(norm, (8, 1024, 32, 10))
    mean = next(name for k in found for name in k.makes if ".repeated" in name)
    assert any(mean in k.sources for k in found if k.makes[0] == found[-1].makes[0])


def test_few_elements_are_reduced_inside_of_what_reads_them_unless_that_is_large():
    def centred(x):
        return x - x.mean((1, 3), keepdims=True)

    small, large = (kernels(centred, (8, positions, 4, 10)) for positions in (256, 1 << 16))
    assert (len(small), len(large)) == (2, 3)


def test_a_kernel_of_rows_ends_with_one_number_of_each():
    shape = (2048, 4096)
    assert len(kernels(lambda x: x.var(-1), shape)) == 1
    assert len(kernels(lambda x: jnp.sqrt(x.var(-1) + 1) * 3, shape)) == 1
    assert len(kernels(lambda x: (s := ((x - x.mean(-1, keepdims=True)) ** 2).sum(-1), s * 2), shape)) == 2


def test_a_kernel_of_rows_ends_with_nothing_turned_nor_a_single_number():
    assert len(kernels(lambda x: jnp.sqrt(x.var(-1) + 1).T, (32, 64, 512))) > 1
    assert len(kernels(lambda x: jnp.sqrt(x.var()), (4096,))) > 1


def test_many_layers_of_repeated_parts_are_priced_in_time():
    """One walk for each body: a walk for each part took 4 s for these, where 0.4 s are enough."""

    def layers(x, w):
        for _ in range(60):
            x = x + jnp.exp(x * 1.1 + jnp.sin(w)).sum(0) * jnp.tanh(x).sum(1, keepdims=True)
        return x

    begun = time.process_time()
    kernels(layers, (256, 256), (256,))
    assert time.process_time() - begun < 3.0


def test_cosines_of_rows_are_one_kernel():
    def cosine(x, y):
        def length(v):
            return jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(v), -1, keepdims=True), 1e-6))

        return jnp.sum((x / length(x)) * (y / length(y)), -1)

    assert len(kernels(cosine, (65536, 768), (65536, 768))) == 1


def test_columns_of_maps_take_what_is_foretold():
    """All 48 that were measured on an H100 are within 0.6 and 1.6."""
    measured = {label: us for label, us, _ in json.loads(RESULTS.read_text())["rows"]}
    ratios = [
        price_xla(convert(flatten(jax.make_jaxpr(c.function)(*c.structs))).program, H100).us / measured[c.label]
        for c in columns_of_maps("gpu")
    ]
    assert len(ratios) == 48 and all(0.6 <= r <= 1.6 for r in ratios)
