"""The instructions that a thread runs without a branch are counted; schedules with too many of them are not made."""

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from benchmarks import kernels
from pallasfuse.phases import impossible, problem_of
from pallasfuse.price import straight_code
from pallasfuse.targets import find
from tests.resources.test_triton import program_of

TRITON = find("triton")


def busy(x):
    """Many instructions for each element of a row, which is read again for each of them."""
    row = x.sum(-1, keepdims=True)
    y = x / row
    for n in range(1, 12):
        y = jax.nn.sigmoid(y) * jnp.log1p(jnp.exp(-n * y * row)) + jnp.tanh(x / (n * row))
    return y


def programs_of(function, *arguments, **asked):
    options = pf.FuseOptions(target="triton", price=False, parts=1, **asked)
    (kernel,) = pf.fuse(function, options=options).explain(*arguments).kernels
    return [p.program for p in kernel.phases]


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (64, 128), (32, 256)])
def test_in_proportion_to_the_elements_of_a_thread(rows, columns):
    def score(q, k, v):
        return kernels.attention(q, k, v)

    arrays = [kernels.array(1024, 2, 64, dtype="float32")] * 3
    one, half = (
        straight_code.instructions(program_of(score, *arrays, rows=rows, rolled=columns, warps=w, stages=1), TRITON)
        for w in (4, 8)
    )
    # at least the scale, the difference from the maximum, and the power of each score
    assert rows * columns / 128 * 3 < one
    assert half == pytest.approx(one / 2, rel=0.1)


def test_what_is_read_twice_is_computed_once():
    (program,) = programs_of(lambda x: jnp.exp(x).sum(-1) + jnp.square(jnp.exp(x)).sum(-1), kernels.array(512, 1024))
    (once,) = programs_of(lambda x: jnp.exp(x).sum(-1) + jnp.square(x).sum(-1), kernels.array(512, 1024))
    assert straight_code.instructions(program, TRITON) == straight_code.instructions(once, TRITON) > 0


def test_no_schedule_has_longer_code_than_its_compiler_orders(monkeypatch):
    def longest():
        return max(straight_code.instructions(p, TRITON) for p in programs_of(busy, kernels.array(4096, 8192)))

    before = straight_code.LONGEST
    assert before == 4096  # as measured, see there
    assert longest() <= before
    monkeypatch.setattr(straight_code, "LONGEST", float("inf"))
    assert longest() > 3 * before


def test_it_is_a_reason_of_ours_and_not_of_the_compiler(monkeypatch):
    """Who writes a schedule gets it."""
    options = pf.FuseOptions(target="triton", price=False, parts=1)
    (kernel,) = pf.fuse(busy, options=options).explain(kernels.array(64, 256)).kernels
    phase = kernel.phases[0]
    assert problem_of(phase) is None
    monkeypatch.setattr(straight_code, "LONGEST", 100)
    assert "instructions without a branch, of 100" in problem_of(phase)
    assert impossible(phase) is None
