"""Folds that loops leave to their ends: the same results, with one reduction instead of one in each trip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.ir.late_folds import MOST_OF_ONE, fold_late
from pallasfuse.ir.statements import Loop, Reduce, every
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.ir.unrolling import switched

ROWS, COLUMNS = 8, 5000


def sums(x):
    return jnp.sum(x * x, -1), jnp.sum(jnp.abs(x), -1)


def extremes(x):
    return jnp.max(x * x, -1) - jnp.min(jnp.sin(x), -1)


def variance(x):
    """The second pass needs the mean, and the first one is finished before it."""
    mean = jnp.mean(x, -1, keepdims=True)
    return jnp.mean((x - mean) ** 2, -1)


def log_sum_exp(x):
    """The sum is carried over from one maximum to the next: it is no plain fold."""
    return jax.nn.logsumexp(x, -1)


def masked(x):
    return jnp.sum(jnp.where(jnp.arange(x.shape[-1]) % 3 == 0, x, 0.0) ** 2, -1), jnp.max(x, -1)


def places(x):
    """The places of the extremes, with elements in several places, and what is no number."""
    y = jnp.round(jnp.sin(x) * 20)
    return jnp.argmin(y * 2, -1), jnp.argmax(y[:, ::-1], -1), jnp.argmax(jnp.sqrt(x + 2.5), -1)


def counted(x):
    """How many elements are the largest, and the largest of others beside them."""
    y = jnp.round(jnp.cos(x) * 5)
    largest = jnp.max(y, -1, keepdims=True)
    return jnp.sum(jnp.where(y == largest, 1.0, 0.0), -1), jnp.max(jnp.where(y == largest, x, -jnp.inf), -1)


PROGRAMS = [sums, extremes, variance, log_sum_exp, masked, places, counted]


def programs(function, target="interpret", **options) -> list[TileProgram]:
    of = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    plan = pf.fuse(function, target=target, options=pf.FuseOptions(check=False, price=False, **options)).explain(of)
    return [phase.program for k in plan.kernels for phase in k.phases]


def in_loops(program) -> list[str]:
    return [
        s.name
        for loop in every(program.body)
        if isinstance(loop, Loop)
        for g in loop.segments
        for s in g.body
        if isinstance(s, Reduce)
    ]


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("function", PROGRAMS)
def test_the_results_are_the_same(function):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, COLUMNS)), jnp.float32)
    tiles = (("i", 2), ("j", 512))
    fused = pf.fuse(function, target="interpret", options=pf.FuseOptions(check=False, price=False, tiles=tiles))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), fused(x), function(x))


def in_loops_of(function) -> list[tuple[list[str], list[str]]]:
    found = [p for p in programs(function, tiles=(("i", 2), ("j", 512))) if any(isinstance(s, Loop) for s in p.body)]
    assert found
    return [(in_loops(p), in_loops(fold_late(p))) for p in found]


@pytest.mark.parametrize("function", [sums, extremes, masked, places, counted])
def test_plain_folds_are_left_to_the_end(function):
    assert all(before and not after for before, after in in_loops_of(function))


@pytest.mark.parametrize("function", [variance, log_sum_exp])
def test_what_is_repaired_in_every_trip_is_folded_there(function):
    assert all(before and before == after for before, after in in_loops_of(function))


def test_lanes_are_in_the_order_of_tiles():
    """The folded axis comes before one that the results have, too."""

    def repulsion(x):
        d = x[:, None] - x[None]
        weights = jnp.exp(-jnp.sum(d * d, -1))
        return jnp.sum(weights, 1), jnp.sum(weights[..., None] * d, 1)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((96, 6)), jnp.float32)
    options = pf.FuseOptions(check=False, price=False, tiles=(("i", 2), ("k", 16)))
    fused = pf.fuse(repulsion, target="interpret", options=options)
    programs = [p.program for k in fused.explain(x).kernels for p in k.phases]
    assert any(in_loops(p) and len(in_loops(fold_late(p))) < len(in_loops(p)) for p in programs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), fused(x), repulsion(x))


def test_large_tiles_are_folded_in_every_trip():
    (program,) = programs(sums, tiles=(("i", 8), ("j", 4096)))
    threads = 32 * program.warps
    assert MOST_OF_ONE * threads < 8 * 4096
    assert in_loops(fold_late(program)) == in_loops(program)


@pytest.mark.parametrize("target", ["xla", "triton", "mosaic_gpu", "interpret"])
def test_every_way_to_a_kernel_sets_the_switch_of_its_target(target):
    of = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    plan = pf.fuse(sums, target=target, options=pf.FuseOptions(check=False, price=False)).explain(of)
    phases = [phase for k in plan.kernels for phase in k.phases]
    assert phases
    assert all(phase.program.late == phase.target.spreads_tiles for phase in phases)


def test_a_program_without_late_folds_stays_the_same_object():
    """What is remembered of it is found again."""
    (program,) = programs(sums, tiles=(("i", 8), ("j", 4096)))
    assert fold_late(program) is program
    assert switched(program) is switched(program)
