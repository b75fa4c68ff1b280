"""Schedules by which kernels once computed something else: each is right now, or refused by a rule, on every machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.errors import ScheduleError


def sums_both_ways(x):
    return jnp.sum(x, 0), jnp.sum(x * x, 1)


def of_all_squares(x):
    return jnp.exp(0.01 * jnp.sum(x * x, (1, 2)))


def exponentials_and_squares(x):
    return jnp.sum(jnp.exp(x), 1), jnp.max(x * x, 1)


def beside_masked_columns(q, k, v):
    """No output is the product itself: nothing stores what a loop bounded by the mask of its neighbour would leave out."""
    o = jax.nn.softmax(q @ k.T, -1) @ v
    j, d = jnp.arange(v.shape[0])[:, None], jnp.arange(v.shape[1])[None]
    return jnp.sin(o) + jnp.where(d >= j, v, 0).sum(0)


def sum_of_the_first(x):
    t = jnp.sum(x * x, 1)
    return t, jnp.sum(jnp.where(jnp.arange(x.shape[0]) < 4, t, 0))


def largest_above_the_diagonal(a, b):
    s = a @ b
    j, d = jnp.arange(s.shape[0])[:, None], jnp.arange(s.shape[1])[None]
    return jnp.max(jnp.where(d > j + 4, s, -1e9), 0)


def masked_twice(q, k, v):
    """The first row keeps nothing: all of its weights are equal."""
    s = q @ k.T
    i, j = jnp.arange(s.shape[0])[:, None], jnp.arange(s.shape[1])[None]
    u = jnp.where(j >= 1, s, -1e9)
    return jax.nn.softmax(jnp.where(j <= i, u, -1e9), -1) @ v


def largest_masked_first(x, v):
    """The same, where the first mask stands inside of a reduction that a tile computes."""
    i, j = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])[None]
    u = jnp.max(jnp.where((j >= 1)[..., None], x, -1e9), -1)
    return jax.nn.softmax(jnp.where(j <= i, u, -1e9), -1) @ v


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


REFUSED = {
    "a state with a part of its own axis": (
        7, sums_both_ways, [(8, 12)], "p { x.1/2@grid x.0:4 ( t0 x.1:3 ( t2 ) ) } q { x.0:4 ( +t2 ) }"),
    "a loop over the parts inside of another reduced axis": (
        7, of_all_squares, [(3, 8, 12)], "p { x.1/2@grid x.2:4 x.1:4 ( t1 ) } q { out }"),
    "the same with a merge": (
        7, of_all_squares, [(3, 8, 12)], "p { x.1/2@grid x.2:4 x.1:4 ( t1 ) } q { +t1 out }"),
    "a kept tensor in parts of other tiles": (
        8, exponentials_and_squares, [(8, 12)],
        "p { x.1/2@grid ( x!shared x.1:12 ( t1 ) x.1:4 ( out.1 ) ) } q { +t1 +out.1 }"),
    "the same in smaller ones": (
        8, exponentials_and_squares, [(8, 12)],
        "p { x.1/2@grid ( x!shared x.1:8 ( t1 ) x.1:2 ( out.1 ) ) } q { +t1 +out.1 }"),
}  # fmt: skip

RIGHT = {
    "both reduced axes in parts": (of_all_squares, [(3, 8, 12)], "p { x.1/2@grid x.1:4 x.2:4 ( t1 ) } q { +t1 out }"),
    "a kept tensor in parts of equal tiles": (
        exponentials_and_squares, [(8, 12)],
        "p { x.1/2@grid ( x!shared x.1:4 ( t1 ) x.1:4 x.1:2 ( out.1 ) ) } q { +t1 +out.1 }"),
    "a mask beside a state that is moved": (
        beside_masked_columns, [(6, 5), (16, 5), (16, 12)], "k { i:4@grid ( l:4 ( t1 t2 t8 m:4 ( t11 t21 ) ) out ) }"),
    "a merge in a loop with a mask": (
        sum_of_the_first, [(16, 12)], "p { x.1/2@grid x.1:4 ( t1 ) } q { x.0:4 ( +t1 out.1 ) }"),
    "a mask along the other axis": (
        largest_above_the_diagonal, [(12, 5), (5, 20)], "k { i:4 ( k:4 ( t0 out ) ) }"),
    "a mask over a map with a mask": (
        masked_twice, [(16, 5), (16, 5), (16, 6)], "k { q.0:4@grid l:4 ( t1 t10 t15 t21 out ) }"),
    "the same in one expression": (
        masked_twice, [(16, 5), (16, 5), (16, 6)], "k { q.0:4@grid l:4 ( t1 t15 t21 out ) }"),
}  # fmt: skip


def largest_and_sum_of_products(x, s):
    return jnp.max(x * s, -1), jnp.sum(jnp.exp(x) * s, -1)


def of_one_document(q, k, v, document):
    s = jnp.where(document[:, None] == document[None], q @ k.T, -jnp.inf)
    return jax.nn.softmax(s, -1) @ v


def chain(a, b, c):
    return (a @ b) @ c


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize(
    "text",
    ["k { s!shared x.0:4 ( x.1:4 ( out.0 ) out.1 ) }", "k { x.0:4@grid ( s!shared x.0:2 ( x.1:4 ( out.0 ) out.1 ) ) }"],
)
def test_a_read_before_the_loop_that_fills_a_buffer(text, target):
    given = arrays((12, 20), (20,))
    fused = pf.fuse(largest_and_sum_of_products, target=target, options=pf.FuseOptions(schedule=text))
    for have, want in zip(fused(*given), largest_and_sum_of_products(*given), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
    assert pf.verify(fused, *given, delta=1e-4).proof.holds


@pytest.mark.sampled(4, cover=("target",))
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("rows", ["a.0:8", "a.0:10", "a.0:20"])
def test_bounds_by_data_are_those_of_a_block(rows, target):
    given = [*arrays((20, 8), (20, 8), (20, 8)), jnp.asarray(np.repeat(np.arange(4, dtype=np.int32), 5))]

    def run(loop):
        text = f"k {{ {loop} k.0:4 ( t4 t8 t14 out ) }} [data_bounds]".replace("a.0", "q.0")
        return pf.fuse(of_one_document, target=target, options=pf.FuseOptions(schedule=text))(*given)

    with pytest.raises(ScheduleError, match=r"breaks rule 14 .*data_bounds"):
        run(rows)
    np.testing.assert_allclose(run(f"{rows}@grid"), of_one_document(*given), rtol=1e-5, atol=1e-5)


def test_what_triton_cannot_run_is_refused():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (64, 128), (128, 64))]
    options = pf.FuseOptions(schedule="k { a.0:16@grid ( t0 b.1:16 ( out ) ) }")
    with pytest.raises(ScheduleError, match=r"breaks rule 14 .*registers"):
        pf.fuse(chain, target="triton", options=options).explain(*shapes)


def test_a_loop_without_a_mask_visits_all_of_its_tiles():
    """Also where it is over another axis than the one of the group's plan."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (64, 128), (128, 64))]
    for text in ("k { a.0:16@grid ( a.1:16 ( t0 ) b.1:32 ( out ) ) }", "k { a.0:16@grid b.1:32 ( t0 out ) }"):
        plan = pf.fuse(chain, target="interpret", options=pf.FuseOptions(schedule=text)).explain(*shapes)
        assert plan.kernels[0].visited_share == 1


@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, target):
    rule, function, shapes, text = REFUSED[name]
    with pytest.raises(ScheduleError, match=f"breaks rule {rule} "):
        pf.fuse(function, target=target, options=pf.FuseOptions(schedule=text))(*arrays(*shapes))


@pytest.mark.sampled(16, cover=("target",))
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("name", RIGHT)
def test_right(name, target):
    function, shapes, text = RIGHT[name]
    given = arrays(*shapes)
    fused = pf.fuse(function, target=target, options=pf.FuseOptions(schedule=text))
    for have, want in zip(jax.tree.leaves(fused(*given)), jax.tree.leaves(jax.jit(function)(*given)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
    proof = pf.verify(fused, *given, delta=1e-4).proof
    assert proof.holds, (proof.uncovered, proof.counterexample)


def test_masks_in_reductions_of_the_tile_without_a_schedule():
    given = arrays((16, 16, 3), (16, 6))
    options = pf.FuseOptions(tiles=(("i", 4), ("j", 4)), price=False, check=False)
    fused = pf.fuse(largest_masked_first, target="xla", options=options)
    np.testing.assert_allclose(fused(*given), jax.jit(largest_masked_first)(*given), rtol=1e-5, atol=1e-5)
    plan = fused.explain(*given)
    assert plan.kernels
    assert plan.kernels[0].visited_share == 1
