"""Reshapes that are left to XLA, so that an axis is whole on one side of them and in parts on the other."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.fusion.joined_axes import joins_of, with_joined_axes
from pallasfuse.fusion.shapes_left import SHAPE, as_left, is_reshape, with_own_axes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import mul, read
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, verify
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend import convert

WORDS = jax.ShapeDtypeStruct((2, 24, 8), jnp.float32)


def attention(x, y, mask=0.0):
    scores = jnp.einsum("btd,bsd->bts", x, y) + mask
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores, -1), x)


def scored_in_chunks(x):
    """Words attend to all words; at the end they are scored in chunks of six."""
    return jax.nn.logsumexp(attention(x, jnp.sin(x)).reshape(2, 4, 6, 8), (2, 3))


def causal_and_in_chunks(x):
    order = jnp.arange(24)
    mask = jnp.where(order[:, None] >= order, 0.0, -1e9)
    return attention(x, jnp.sin(x), mask).reshape(2, 4, 6, 8).max(2)


def pooled_before(x):
    """Chunks have their own means taken away, and then all words attend to all words: it is reshaped there and back."""
    chunks = x.reshape(2, 4, 6, 8)
    return attention(x, (chunks - chunks.mean(2, keepdims=True)).reshape(x.shape))


FUNCTIONS = [scored_in_chunks, causal_and_in_chunks, pooled_before]


def program_of(function):
    return convert(jax.make_jaxpr(function)(WORDS)).program


def left_in(program):
    return [n for n in program.nests if isinstance(n, External) and n.reason == SHAPE]


def softmax_lengths(program):
    return {tuple(a.extent for a in n.reduced) for n in program.nests if isinstance(n, Nest) and n.reducer is not None}


@pytest.mark.parametrize("function, left", [*zip(FUNCTIONS, (1, 1, 2), strict=True)])
def test_a_softmax_is_over_whole_rows_beside_reshapes(function, left):
    program = program_of(function)
    before = with_joined_axes(program) or program
    assert (4, 6) in softmax_lengths(before) and (24,) not in softmax_lengths(before)
    after = with_joined_axes(program, leaves_reshapes=True)
    assert (24,) in softmax_lengths(after) and (4, 6) not in softmax_lengths(after)
    assert len(left_in(after)) == left
    assert not left_in(before)


def test_reshapes_that_keep_nothing_apart_are_not_left():
    """Both sides of the second reshape have whole rows."""

    def function(x):
        return scored_in_chunks(x.reshape(2, 1, 24, 8).reshape(2, 24, 8))

    assert len(left_in(with_joined_axes(program_of(function), leaves_reshapes=True))) == 1
    assert with_joined_axes(program_of(lambda x: attention(x, x)), leaves_reshapes=True) is None


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_proof_and_record_of_a_plan_that_leaves_reshapes(function, monkeypatch, tmp_path):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PALLASFUSE_KEEP_PLANS", "1")
    monkeypatch.setattr(
        "pallasfuse.form_choice.predicted_us",
        lambda placements, groups: -float(placements.converted.leaves_reshapes and len(groups) > 0),
    )
    x = jax.random.normal(jax.random.key(0), WORDS.shape, WORDS.dtype)
    options = pf.FuseOptions(check=False, price=False, target="interpret")
    fused = pf.fuse(function, options=options)
    plan = fused.explain(x)
    assert plan.converted.leaves_reshapes and any(len(k.group.folds) > 1 for k in plan.kernels)
    np.testing.assert_allclose(fused(x), function(x), rtol=2e-5, atol=2e-5)
    report = pf.verify(fused, x, delta=1e-4)
    assert report.proof.counterexample is None and not report.proof.uncovered, report
    monkeypatch.setattr("pallasfuse.pipeline.make_plan", lambda *args: pytest.fail("it is planned again"))
    again = pf.fuse(function, options=options)
    np.testing.assert_array_equal(again(x), fused(x))
    kept = again.explain(x)
    assert kept.converted.leaves_reshapes and str(kept.program) == str(plan.program)


I, J, K = (Axis(name, extent) for name, extent in zip("ijk", (4, 6, 8), strict=True))  # noqa: E741
X = Tensor("x", (I, J, K), "float32")


def test_an_axis_is_several_where_only_xla_leads_from_one_part_to_the_other():
    whole = read("x", (I, J, K), "float32")
    square = Nest("s", (I, J, K), mul(whole, whole), "float32")
    shape = Nest("r", (I, J, K), read("s", (I, J, K), "float32"), "float32")
    total = Nest("t", (I,), read("r", (I, J, K), "float32"), "float32", (J, K), SUM)
    assert is_reshape(shape) and not is_reshape(square) and not is_reshape(total)
    program = verify(LoopProgram((X,), (square, shape, total), ("t",)))
    assert with_own_axes(program, {"i", "j"}) == program
    left = replace(program, nests=(square, as_left(shape, SHAPE), total))
    found = verify(with_own_axes(left, {"i", "j"}))
    assert [[a.name for a in d.axes] for d in found.definitions()] == [["i", "j", "k"]] * 2 + [
        ["i1", "j1", "k"],
        ["i1"],
    ]
    assert [a.name for a in found.nests[-1].reduced] == ["j1", "k"]


def test_joins_that_leave_reshapes_are_found_again_over_other_lengths():
    program = program_of(causal_and_in_chunks)
    (join,) = joins_of(program, leaves_reshapes=True)
    assert len(join.left) == 1 and join.own
    assert joins_of(program, leaves_reshapes=True) == [join]
