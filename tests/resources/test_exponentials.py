"""Which exponentials of a kernel may be a GPU's own instruction, and what a plan says of it."""

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse.emission import pallas_kernel
from pallasfuse.resources.exponentials import SMALL_CONDITION, all_by_instruction
from pallasfuse.tiling.arithmetic import CONDITION

F32 = jnp.float32


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def least_first(x):
    """By a minimum: the largest argument is zero."""
    y = x.astype(F32)
    return jnp.exp(y.min(-1, keepdims=True) - y).astype(x.dtype)


def plain_log_sum(x):
    """All its terms may be smaller than 2^-126."""
    return jnp.log(jnp.exp(x.astype(F32)).sum(-1)).astype(x.dtype)


def times_the_largest(x):
    """A maximum is read, and not taken off."""
    y = x.astype(F32)
    return jnp.log(jnp.exp(y * y.max(-1, keepdims=True)).sum(-1)).astype(x.dtype)


def own_powers(x):
    return jnp.exp2(x.astype(F32) - x.astype(F32).max(-1, keepdims=True)).astype(x.dtype)


def two_types(x):
    y = softmax(x.astype(F32))
    return y, y.astype(x.dtype)


def planned(function, dtype, target="triton"):
    options = pf.FuseOptions(target=target, price=False, check=False)
    plan = pf.fuse(function, options=options).explain(jax.ShapeDtypeStruct((64, 4096), dtype))
    (kernel,) = plan.kernels
    return plan, kernel


def is_by_instruction(kernel):
    """Does the kernel for Triton have the instruction?"""
    (program,) = (p.program for p in kernel.phases)
    inputs = {t.name: jnp.zeros([a.extent for a in t.axes], t.dtype) for t in program.inputs}
    return "elementwise_inline_asm" in str(jax.make_jaxpr(lambda x: pallas_kernel.call(program, x))(inputs))


@pytest.mark.parametrize(
    ("function", "dtype", "fast", "other_base"),
    [
        (softmax, "bfloat16", True, True),
        (softmax, "float16", True, True),
        (softmax, "float32", False, False),
        (least_first, "bfloat16", True, True),
        (plain_log_sum, "bfloat16", False, True),
        (times_the_largest, "bfloat16", False, True),
        (own_powers, "bfloat16", True, False),
        (two_types, "bfloat16", False, False),
    ],
)
def test_exponentials_below_a_maximum_with_half_precision_results(function, dtype, fast, other_base):
    """other_base: is `exp` computed as a power of two?"""
    plan, kernel = planned(function, dtype)
    assert is_by_instruction(kernel) is fast
    assert (SMALL_CONDITION in plan.conditions) is fast
    assert (CONDITION in plan.conditions) is other_base


@pytest.mark.parametrize(("function", "fast"), [(softmax, True), (plain_log_sum, False)])
def test_clusters_ask_the_same(function, fast):
    plan, kernel = planned(function, "bfloat16", "mosaic_cluster")
    assert kernel.target.name == "mosaic_cluster", kernel.declined
    assert all_by_instruction([p.program for p in kernel.phases]) is fast
    assert (SMALL_CONDITION in plan.conditions) is fast
