"""The kernels that XLA makes of products that share an operand, compiled for an H100 without one."""

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


@pytest.mark.parametrize(("products", "copies"), [(4, 0), (12, 1)])
def test_more_than_four_joined_operands_are_copied_and_groups_of_four_are_not(products, copies):
    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in [(24, 1536), *[(1536, 1024)] * products]]
    on = device.find("NVIDIA H100 80GB HBM3", "gpu")
    groups = Decomposer(on, (), on.price_error).of(jax.make_jaxpr(every)(*structs))
    as_written = h100.compile_for_h100(every, structs).text
    in_fours = h100.compile_for_h100(lambda *values: jax.core.eval_jaxpr(groups, groups.consts, *values), structs).text
    assert as_written.count("calls=%wrapped_concatenate") == copies
    assert in_fours.count("calls=%wrapped_concatenate") == 0
