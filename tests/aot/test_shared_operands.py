"""The kernels that XLA makes of products that share an operand, compiled for an H100 without one."""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import h100
from pallasfuse import device
from pallasfuse.decompositions import Decomposer

pytestmark = [pytest.mark.aot, pytest.mark.skipif(not h100.can_compile(), reason="needs the CUDA plugin and ptxas")]


def every(x, *weights):
    y = jnp.tanh(x)
    return [jax.nn.relu(y @ w) for w in weights]


def of_bytes(x, *weights):
    return [x @ (w.astype(x.dtype) * 0.5) for w in weights]


def of_one_array(x, weights):
    return [jnp.tanh(x @ w) for w in weights]


def in_fours(function, structs):
    on = device.find("NVIDIA H100 80GB HBM3", "gpu")
    groups = Decomposer(on, (), on.price_error).of(jax.make_jaxpr(function)(*structs))
    return h100.compile_for_h100(lambda *values: jax.core.eval_jaxpr(groups, groups.consts, *values), structs).text


def structs(dtype, *shapes):
    return [jax.ShapeDtypeStruct((24, 1536), jnp.bfloat16), *(jax.ShapeDtypeStruct(s, dtype) for s in shapes)]


@pytest.mark.parametrize(("products", "copies"), [(4, 0), (12, 1)])
def test_more_than_four_joined_operands_are_copied_and_groups_of_four_are_not(products, copies):
    arguments = structs(jnp.bfloat16, *[(1536, 1024)] * products)
    assert h100.compile_for_h100(every, arguments).text.count("calls=%wrapped_concatenate") == copies
    assert in_fours(every, arguments).count("calls=%wrapped_concatenate") == 0


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (of_bytes, structs(jnp.int8, *[(1536, 1024)] * 12)),
        (of_bytes, structs(jnp.int8, *[(1536, 1024)] * 3)),
        (of_one_array, structs(jnp.bfloat16, (12, 1536, 1024))),
    ],
    ids=["many of bytes", "few of bytes", "parts of one array"],
)
def test_operands_that_are_computed_are_not_stored_for_a_group(function, arguments):
    """Nothing of the size of a matrix of weights is written: products compute their elements, or read them where they lie."""
    text = in_fours(function, arguments)
    assert "optimization_barrier" in text or text.count("gemm_fusion") > 2
    stored = re.findall(r"= \(?(?:bf16|s8)\[(?:\d+,)?1536,1024\]\S* (?:fusion|copy)\(", text)
    assert stored == []
