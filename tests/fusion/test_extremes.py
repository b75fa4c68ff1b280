"""Reductions of what is where a maximum or minimum is, beside the maximum itself."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.fusion import extremes, folding
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.expr import const, read
from pallasfuse.ir.tile_program import Let, every
from tests.fusion.group_interpreter import GroupRun
from tests.programs_by_name import FREE, close, group, program_of

OPTIONS = pf.FuseOptions(check=False, price=False)


def first_largest(x):
    return jnp.argmax(x, -1), jnp.max(x, -1)


def first_smallest(x):
    return jnp.argmin(x, -1), jnp.sum(x, -1)


def ties(x):
    return jnp.sum(x == jnp.max(x, -1, keepdims=True), -1)


def sum_at_the_smallest(x):
    return jnp.sum(jnp.where(x == jnp.min(x, -1, keepdims=True), jnp.abs(x) + 1, 0), -1)


def largest_position(x):
    at = jnp.arange(x.shape[-1])
    return jnp.max(jnp.where(jnp.max(x, -1, keepdims=True) == x, at, jnp.iinfo(at.dtype).min), -1)


FUNCTIONS = [first_largest, first_smallest, ties, sum_at_the_smallest, largest_position]


def rows(length: int, *, special: bool) -> np.ndarray:
    """Small whole numbers, of which many are equal; then rows of what are no numbers, and of infinities."""
    x = np.random.default_rng(3).integers(-3, 4, (9, length)).astype("float32")
    if special:
        x[0, length // 2] = x[0, length - 1] = np.nan
        x[1], x[2] = np.inf, -np.inf
        x[3, 5], x[4, 6] = np.inf, -np.inf
    return x


@pytest.mark.parametrize("split", [False, True], ids=["rolling", "split"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_parts_in_any_order_lead_to_the_same(function, split):
    x = rows(11, special=False)
    loops = program_of(function, x.shape)
    want = evaluate(loops, {"x": x})
    (chosen,) = group(loops, FREE).groups
    assert any(frame.compared for fold in chosen.folds for frame in fold.frames)
    for seed in range(6):
        got = GroupRun(chosen, {"x": x}, np.random.default_rng(seed)).run(split=split)
        for name, value in got.items():
            close(value, want[name])


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_kernels_of_several_trips_and_parts_agree_with_xla(function, target):
    x = rows(130, special=function in (first_largest, first_smallest))
    want = jax.jit(function)(x)
    for options in (replace(OPTIONS, tiles=(("j", 16),)), replace(OPTIONS, tiles=(("j", 16),), parts=3)):
        fused = pf.fuse(function, target=target, options=options)
        plan = fused.explain(x)
        assert plan.kernels
        for got, expected in zip(jax.tree.leaves(fused(x)), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_integers_and_other_types_of_positions():
    x = np.random.default_rng(0).integers(-4, 4, (7, 90)).astype("int32")

    def places(x):
        return jax.lax.argmax(x, 1, jnp.int8), jax.lax.argmin(x, 0, jnp.uint32)

    fused = pf.fuse(places, target="xla", options=OPTIONS)
    assert fused.explain(x).kernels
    for got, want in zip(fused(x), places(x), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


# --- elements that are computed


def nearest(x, centres):
    distances = jnp.sum(x * x, -1)[:, None] - 2 * x @ centres.T + jnp.sum(centres * centres, -1)
    return jnp.argmin(distances, -1), jnp.min(distances, -1)


POINTS = tuple(np.random.default_rng(rows).normal(size=(rows, 4)).astype("float32") for rows in (24, 300))


@pytest.mark.parametrize("target", ["triton", "mosaic_gpu", "interpret"])
def test_what_is_compared_is_rounded_once(target):
    points = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in POINTS]
    kernel = pf.fuse(nearest, target=target, options=OPTIONS).explain(*points).kernels[0]
    elements = [s for s in every(kernel.phases[0].program.body) if isinstance(s, Let) and s.name.endswith(".element")]
    assert elements
    assert all(s.pinned for s in elements)


@pytest.mark.parametrize("target", ["xla", "interpret"])
def test_the_nearest_of_several_tiles(target):
    fused = pf.fuse(nearest, target=target, options=replace(OPTIONS, tiles=(("k", 32),)))
    for got, want in zip(fused(*POINTS), nearest(*POINTS), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    plan = fused.explain(*POINTS)
    assert extremes.CONDITION in plan.conditions


def test_elements_that_are_read_have_no_condition():
    plan = pf.fuse(first_largest, target="xla", options=OPTIONS).explain(rows(130, special=False))
    assert plan.kernels
    assert extremes.CONDITION not in plan.conditions


def test_nearest_is_proved():
    report = pf.verify(pf.fuse(nearest, target="interpret", options=OPTIONS), *POINTS)
    assert report.equivalent, str(report)


def keeps(fold):
    (a,) = fold.accumulators
    return replace(a, update=read(a.name, fold.nest.axes, a.dtype))


def forgets(fold):
    (a,) = fold.accumulators
    return replace(a, update=const(fold.nest.reducer.identity(a.dtype), a.dtype))


def is_of_the_last_tile(fold):
    (a,) = fold.accumulators
    return replace(a, update=None)


@pytest.fixture(params=[keeps, forgets, is_of_the_last_tile])
def mistake(monkeypatch, request):
    right = extremes.fold_at_extremes

    def wrong(*args):
        made = right(*args)
        return made and (replace(made[0], accumulators=(request.param(made[0]),)), made[1])

    monkeypatch.setattr(folding, "fold_at_extremes", wrong)


@pytest.mark.usefixtures("mistake")
def test_mistakes_that_a_single_tile_does_not_show_are_not_proved():
    report = pf.verify(pf.fuse(first_largest, target="interpret", options=OPTIONS), rows(67, special=False))
    assert not report.equivalent
    assert "not covered" in str(report)


@pytest.mark.usefixtures("mistake")
def test_mistakes_are_found():
    report = pf.verify(pf.fuse(nearest, target="interpret", options=OPTIONS), *POINTS)
    assert not report.equivalent
    assert "folds" in str(report)


# --- what is no such reduction


def of_another_tensor(x, y):
    return jnp.sum(jnp.where(y == jnp.max(x, -1, keepdims=True), 1.0, 0.0), -1)


def not_empty_elsewhere(x):
    return jnp.sum(jnp.where(x == jnp.max(x, -1, keepdims=True), 2.0, 1.0), -1)


def of_an_unfinished_sum(x):
    return jnp.sum(jnp.where(x == jnp.sum(x, -1, keepdims=True), 1.0, 0.0), -1)


def divided_by(x):
    """A maximum of 0.0 equals elements of -0.0, whose inverse is another."""
    m = jnp.max(x, -1, keepdims=True)
    return jnp.sum(jnp.where(x == m, 1 / m, 0.0), -1)


def below(x):
    return jnp.sum(x < jnp.max(x, -1, keepdims=True), -1)


@pytest.mark.parametrize(("function", "inputs"), [
    (of_another_tensor, 2), (not_empty_elsewhere, 1), (of_an_unfinished_sum, 1), (below, 1), (divided_by, 1),
])  # fmt: skip
def test_others_wait_for_the_finished_extremum(function, inputs):
    groups = group(program_of(function, *[(5, 11)] * inputs), FREE).groups
    assert not any(frame.compared for g in groups for fold in g.folds for frame in fold.frames)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=["in order", "last first"])
def test_chunks_may_come_in_any_order(order):
    x, chunks = rows(64, special=True), [(0, 20), (20, 21), (21, 64)]
    streamed = pf.fold(first_largest, axis=-1)
    state = streamed.init(x)
    for start, stop in (chunks[n] for n in order):
        state = streamed.update(state, x[:, start:stop], start=start)
    for got, want in zip(streamed.finish(state), first_largest(x), strict=True):
        np.testing.assert_array_equal(got, want)
