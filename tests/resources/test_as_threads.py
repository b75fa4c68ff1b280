"""Stages of kernels by threads: one, where what a product reads would be copied ahead in short pieces."""

import re

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from benchmarks import h100
from pallasfuse.ir.tile_program import Contract, every
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.resources.as_threads import as_threads_run_it
from pallasfuse.targets import TRITON

ROWS, COLUMNS, STAGES = 64, 128, 3


def multiplied(x, w):
    return jax.nn.relu(x @ w)


def scaled(x, w):
    """What is multiplied is computed from what is loaded, too."""
    return jax.nn.relu(jnp.sin(x) @ w)


def beside_itself(x, w):
    """The product reads what is loaded as it is, and so does a sum."""
    return x @ w + jnp.sum(x, axis=1, keepdims=True)


def rounded(x, w):
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def attended(q, k, array):
    scores = q @ k.T + array
    return jax.nn.softmax(scores, -1) @ k


def attended_alone(q, k):
    return jax.nn.softmax(q @ k.T, -1) @ k


def of_heads(x, w):
    """Heads lie last, and each block has one of them: no rows are multiplied."""
    return jax.nn.relu(jnp.einsum("mkh,knh->hmn", x, w))


def with_row(x, w, row):
    """A vector along the sum comes ahead, too."""
    return jax.nn.relu((x * row) @ w)


def operands(summed, dtype):
    return jax.ShapeDtypeStruct((ROWS, summed), dtype), jax.ShapeDtypeStruct((summed, COLUMNS), dtype)


def heads(columns, width, dtype="float32"):
    return jax.ShapeDtypeStruct((ROWS, width), dtype), jax.ShapeDtypeStruct((columns, width), dtype)


def beside(columns, width=32, dtype="float32"):
    return *heads(columns, width, dtype), jax.ShapeDtypeStruct((ROWS, columns), dtype)


def in_heads():
    return jax.ShapeDtypeStruct((ROWS, 1024, 8), "float32"), jax.ShapeDtypeStruct((1024, COLUMNS, 8), "float32")


def stages(function, arguments):
    """The stages of the programs of products, as threads run them."""
    options = FuseOptions(price=False, target=TRITON.name, stages=STAGES)
    plan = make_plan(jax.make_jaxpr(function)(*arguments), TRITON, options)
    programs = [p.program for k in plan.kernels for p in k.phases]
    found = {
        as_threads_run_it(p).program.stages for p in programs if any(isinstance(s, Contract) for s in every(p.body))
    }
    assert {p.stages for p in programs} >= {STAGES}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (multiplied, operands(1025, "float32"), 1),
        (multiplied, operands(1026, "float32"), 1),  # eight bytes at a time
        (multiplied, operands(1028, "float32"), STAGES),
        (multiplied, operands(1026, "bfloat16"), STAGES),  # words of half types
        (multiplied, operands(1025, "bfloat16"), STAGES),  # nothing is copied ahead
        (scaled, operands(1025, "float32"), STAGES),
        (attended, beside(1025), STAGES),  # what is added to scores comes ahead
        (attended, beside(1025, 33), STAGES),
        (attended_alone, heads(1024, 33), 1),
        (attended, (*heads(1024, 33), jax.ShapeDtypeStruct((1024,), "float32")), 1),  # a vector is little
        (attended_alone, heads(1024, 36), STAGES),
        (beside_itself, operands(1025, "float32"), STAGES),
        (rounded, operands(1025, "float32"), STAGES),
        (of_heads, in_heads(), STAGES),
        (with_row, (*operands(1024, "float32"), jax.ShapeDtypeStruct((1024,), "float32")), STAGES),
    ],
)
def test_stages(function, arguments, expected):
    assert stages(function, arguments) == expected


def test_the_compiler_is_told_of_the_stages():
    fused = pf.fuse(multiplied, options=FuseOptions(target=TRITON.name, price=False, check=False, stages=STAGES))
    found = [
        re.findall(r"num_stages = (\d)", h100.lower(fused, operands(summed, "float32")).as_text())
        for summed in (1025, 1028)
    ]
    assert found[0][0] == "1"
    assert found[1][0] == str(STAGES)
