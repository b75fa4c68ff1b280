"""Stages of kernels by threads: one, where what a product reads would be copied ahead in short pieces."""

import re

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from benchmarks import h100
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


def attended(q, k, array):
    scores = q @ k.T + array
    return jax.nn.softmax(scores, -1) @ k


def operands(summed, dtype):
    return jax.ShapeDtypeStruct((ROWS, summed), dtype), jax.ShapeDtypeStruct((summed, COLUMNS), dtype)


def beside(columns, dtype):
    q, k = jax.ShapeDtypeStruct((ROWS, 32), dtype), jax.ShapeDtypeStruct((columns, 32), dtype)
    return q, k, jax.ShapeDtypeStruct((ROWS, columns), dtype)


def stages(function, arguments):
    """The stages of all programs with a loop, as planned and as threads run them."""
    options = FuseOptions(price=False, target=TRITON.name, stages=STAGES)
    plan = make_plan(jax.make_jaxpr(function)(*arguments), TRITON, options)
    (kernel,) = plan.kernels
    first = kernel.phases[0].program
    assert first.stages == STAGES
    return as_threads_run_it(first).program.stages


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (multiplied, operands(1025, "float32"), 1),
        (multiplied, operands(1026, "float32"), 1),  # eight bytes at a time
        (multiplied, operands(1028, "float32"), STAGES),
        (multiplied, operands(1026, "bfloat16"), STAGES),  # words of half types
        (multiplied, operands(1025, "bfloat16"), STAGES),  # nothing is copied ahead
        (scaled, operands(1025, "float32"), STAGES),
        (attended, beside(1025, "float32"), STAGES),  # what is added to scores comes ahead
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
