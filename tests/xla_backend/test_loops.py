"""Loops of XLA are compiled at every call, so they have few operations besides those of the kernel."""

import re
from collections import Counter

import jax
import jax.numpy as jnp

import pallasfuse as pf


def causal(q, k, v):
    visible = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    scores = jnp.where(visible, jnp.einsum("hid,hjd->hij", q, k), -jnp.inf)
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(scores, -1), v)


def test_positions_and_bounds_take_few_operations():
    """None wraps a negative position around, and no end of an axis is compared with what is always before it."""
    fused = pf.fuse(causal, options=pf.FuseOptions(target="xla", price=False, tiles=(("i", 128), ("j", 128), ("k", 1))))
    shapes = [jax.ShapeDtypeStruct((4, 1024, 32), jnp.float32)] * 3
    (kernel,) = fused.explain(*shapes).kernels
    assert len(kernel.group.folds) == 3
    lines = fused.lower(*shapes).as_text().splitlines()
    scalars = [line for line in lines if re.search(r"-> tensor<i1>$|[:>] tensor<u?i32>$", line)]
    found = Counter(re.search(r"stablehlo\.(\w+)", line)[1] for line in scalars if "stablehlo." in line)
    del found["constant"]
    assert not found["select"] and not found["maximum"]
    assert found.total() <= 45, found


def test_inner_loops_carry_what_they_store():
    fused = pf.fuse(causal, options=pf.FuseOptions(target="xla", price=False))
    shapes = [jax.ShapeDtypeStruct((4, 2048, 24), jnp.float32)] * 3
    (kernel,) = fused.explain(*shapes).kernels
    assert kernel.schedule.trips > 1
    text = fused.lower(*shapes).as_text()
    carried = [line for line in text.splitlines() if "stablehlo.while(" in line]
    assert len(carried) >= 2
    blocks, *inside = carried
    whole = "tensor<4x2048x24xf32>"
    assert blocks.count(whole) == 4  # the operands and the result
    assert all(line.count(whole) == 2 for line in inside)  # keys and values
