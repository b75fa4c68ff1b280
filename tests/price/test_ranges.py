"""Kernels that masks over data bound are priced as if the masks hid nothing, and with the pass that finds what they leave."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse.ir.tile_program import verify
from pallasfuse.price.kernel import price_kernel, price_range
from pallasfuse.price.ranges import hiding_nothing
from pallasfuse.targets import TARGETS
from pallasfuse.tiling.lower import lower_for


def attention(q, k, v, m):
    return jax.nn.dot_product_attention(q, k, v, mask=m)


def arguments(length, heads, mask_heads=1):
    shape = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)
    return [shape] * 3 + [jax.ShapeDtypeStruct((1, mask_heads, length, length), jnp.bool_)]


def kernel_of(target, length=4096, heads=4, **options):
    plan = pf.fuse(attention, target=target, options=pf.FuseOptions(price=True, check=False, **options)).explain(
        *arguments(length, heads)
    )
    return plan, plan.kernels[0]


def unbounded(plan, kernel, target):
    tensors = {d.name: d for d in plan.program.definitions()}
    return lower_for(TARGETS[target], kernel.group, replace(kernel.schedule, ranges=False), tensors)


@pytest.mark.parametrize("target", ["xla", "triton"])
def test_the_kernel_is_that_of_no_mask_and_the_pass_comes_on_top(target):
    plan, kernel = kernel_of(target)
    (phase,) = kernel.phases
    assert kernel.schedule.ranges
    assert phase.program.ranges
    plain = verify(hiding_nothing(phase.program))
    assert not plain.ranges
    own = price_kernel([(plain, phase.target)]).us
    passes = sum(price_range(r, phase.target.device).us for r in phase.program.ranges)
    assert passes > 1
    assert price_kernel([(phase.program, phase.target)]).us == pytest.approx(own + passes)
    if target == "xla":  # nothing rewrites its programs
        (other,) = unbounded(plan, kernel, target)
        assert own == pytest.approx(price_kernel([(other, phase.target)]).us)
        assert [len(s.segments) for s in plain.body if hasattr(s, "segments")] == [1]
    assert kernel.visited_share == 1


def test_a_pass_that_would_take_as_long_as_the_kernel_is_not_made():
    """Every head has a mask of its own, and a row of the kernel is as wide as an element of the mask is long."""

    def narrow(x, m):
        return jnp.sum(jax.nn.softmax(jnp.where(m, x, -jnp.inf), -1) * x, -1)

    shapes = [jax.ShapeDtypeStruct((512, 65536), t) for t in (jnp.float32, jnp.bool_)]
    tiles = (("j", 4096),)
    priced, free = (
        pf.fuse(narrow, target="triton", options=pf.FuseOptions(price=p, check=False, tiles=tiles))
        .explain(*shapes)
        .kernels
        for p in (True, False)
    )
    assert all(not k.schedule.ranges for k in priced)
    assert any(k.schedule.ranges for k in free)
