"""Reshapes that are left to XLA, so that an axis is whole on one side of them and in parts on the other."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.first_time import known
from pallasfuse.fusion.joined_axes import joined, joins_of, with_joined_axes
from pallasfuse.fusion.shapes_left import as_left, with_own_axes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import add, apply, const, index, mul, read, select
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.loop_program import SHAPE, External, LoopProgram, Nest, is_reshape, verify
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.proof.result import Record
from pallasfuse.proof.stages import joining
from pallasfuse.verification.shrink import shrinking

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


@pytest.mark.sampled(2, cover=())
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


def test_axes_along_which_places_are_found_keep_their_names():
    pages, table, found = Tensor("p", (K, I, J), "float32"), Tensor("t", (I,), "int32"), Tensor("w", (I, J), "float32")
    made = External("w", found.axes, "float32", ("p", "t"), "a gather", lookup=Lookup(found, pages, table, K))
    shape = Nest("r", (I, J), read("w", (I, J), "float32"), "float32")
    total = Nest("s", (I,), read("r", (I, J), "float32"), "float32", (J,), SUM)
    left = LoopProgram((pages, table), (made, as_left(shape, SHAPE), total), ("s",))
    renamed = verify(with_own_axes(left, {"i", "j"}))
    assert renamed.nests[0] == made
    assert [a.name for a in renamed.nests[-1].axes] == ["i1"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_joins_are_those_of_the_program_over_short_axes(function):
    program = program_of(function)
    joins = joins_of(program, leaves_reshapes=True)
    short = shrinking(program, {}).of(program)
    changed = verify(joined(short, joins))
    whole = verify(joined(program, joins))
    assert [n.name for n in left_in(changed)] == [n.name for n in left_in(whole)]
    names = [[a.name for a in d.axes] for d in whole.definitions()]
    assert [[a.name for a in d.axes] for d in changed.definitions()] == names


def test_what_is_found_does_not_depend_on_where_axes_lie_in_memory():
    found = set()
    for number in range(24):
        axes = [Axis(f"{name}v{number}", e) for name, e in zip("ijkl", (4, 6, 5, 7), strict=True)]
        i, j, k, l = axes  # noqa: E741
        x = Tensor("x", tuple(axes), "float32")
        places = add(add(times(i, 6), times(k, 7)), add(index(j), index(l)))
        kept = select(apply("lt", places, const(11, "int32")), read("x", axes, "float32"), const(0.0, "float32"))
        nests = [
            Nest("s", (k, l), kept, "float32", (i, j), SUM),
            Nest("t", (), read("s", (k, l), "float32"), "float32", (k, l), SUM),
        ]
        program = with_joined_axes(verify(LoopProgram((x,), tuple(nests), ("t",))))
        found.add(str(program).replace(f"v{number}", ""))
    assert len(found) == 1 and "i_j" in next(iter(found))


def test_joined_axes_have_names_that_are_free():
    a, bc, ab, c = (Axis(name, e) for name, e in (("a", 4), ("b_c", 6), ("a_b", 4), ("c", 6)))
    x, y = Tensor("x", (I, a, bc), "float32"), Tensor("y", (I, ab, c), "float32")
    nests = [
        Nest(n, (I,), read(t.name, t.axes, "float32"), "float32", t.axes[1:], SUM) for n, t in (("s", x), ("u", y))
    ]
    joined_program = with_joined_axes(verify(LoopProgram((x, y), tuple(nests), ("s", "u"))))
    assert len({n.reduced[0].name for n in joined_program.nests}) == 2


def test_the_proof_says_so_where_axes_are_not_one_over_short_axes():
    """A factor that is not the length of an axis stays as it is over short ones."""
    x = Tensor("x", (Axis("n", 3), Axis("i", 40), Axis("j", 50)), "float32")
    n, i, j = x.axes
    few = apply("lt", add(times(i, 350), times(j, 7)), const(77, "int32"))
    kept = select(few, read("x", x.axes, "float32"), const(0.0, "float32"))
    program = verify(LoopProgram((x,), (Nest("s", (n,), kept, "float32", (i, j), SUM),), ("s",)))
    written = replace(convert(jax.make_jaxpr(lambda x: x.sum())(np.zeros(3))), made=known(program))
    record = Record()
    joining(written.joined(known(with_joined_axes(program))), record)
    assert record.counterexample() is None and any("short axes" in why for why in record.uncovered)


def times(axis, factor):
    return mul(index(axis), const(factor, "int32"))
