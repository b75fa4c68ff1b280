"""Bounds of loops at their actual extents."""

import tracemalloc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import add, apply, const, index, read
from pallasfuse.ir.tile_program import Loop, block_start
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.targets import TRITON, XLA_CPU
from pallasfuse.tiling.bounds import guards
from pallasfuse.verification.visits import is_constant, wrong_visits
from tests.programs_by_name import masked_attention

pytestmark = pytest.mark.any_jax

BIG = 8192
MASKS = {
    "causal": lambda i, j: j <= i,
    "window": lambda i, j: (j <= i) & (j > i - 1000),
    "from the middle": lambda i, j: j >= 4000,
    "prefix": lambda i, j: (j <= i) | (j < 600),
}


def kernel(mask, target=XLA_CPU, length=BIG):
    shapes = [jax.ShapeDtypeStruct((length, 64), jnp.float32)] * 3
    jaxpr = jax.make_jaxpr(masked_attention(mask))(*shapes)
    (only,) = make_plan(jaxpr, target, FuseOptions(parts=1)).kernels
    return only


def checked(only, change=None):
    """What is wrong with the (changed) loop of a kernel."""
    (loop,) = [s for s in only.program.body if isinstance(s, Loop) and s.carries]
    predicates = guards(only.group.folds, only.group.rolled).predicates
    changed = loop if change is None else change(loop)
    return wrong_visits(only.program, changed, predicates, np.random.default_rng(0))


def segment(loop, at, **changes):
    segments = list(loop.segments)
    segments[at] = replace(segments[at], **changes)
    return replace(loop, segments=tuple(segments))


def plus(expr, n):
    return add(expr, const(n, "int32"))


@pytest.fixture(scope="module", params=["xla", "triton"])
def causal(request):
    return kernel(MASKS["causal"], XLA_CPU if request.param == "xla" else TRITON)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("target", "length"), [(XLA_CPU, BIG), (XLA_CPU, BIG - 3), (TRITON, BIG - 3)],
                         ids=["xla", "xla with a tail", "triton with an edge"])  # fmt: skip
@pytest.mark.parametrize("mask", MASKS)
def test_the_bounds_of_a_plan_are_right(mask, length, target):
    assert checked(kernel(MASKS[mask], target, length)) is None


def test_a_loop_that_ends_one_tile_early_is_noticed(causal):
    wrong = checked(causal, lambda loop: segment(loop, -1, stop=plus(loop.segments[-1].stop, -1)))
    assert "counts, but is not visited" in wrong


def test_a_loop_that_starts_one_tile_late_is_noticed(causal):
    wrong = checked(causal, lambda loop: segment(loop, 0, start=plus(loop.segments[0].start, 1)))
    assert "counts, but is not visited" in wrong


def test_a_gap_or_an_overlap_between_segments_is_noticed(causal):
    for n in (-1, 1):
        wrong = checked(causal, lambda loop, n=n: segment(loop, 1, start=plus(loop.segments[1].start, n)))
        assert wrong is not None


def test_a_mask_that_is_dropped_where_it_is_false_is_noticed(causal):
    """The unmasked segment reaches one tile into the masked one, which gives it up."""

    def change(loop):
        labels = [s.label for s in loop.segments]
        at = labels.index("unmasked")
        moved = segment(loop, at, stop=plus(loop.segments[at].stop, 1))
        return segment(moved, at + 1, start=plus(loop.segments[at + 1].start, 1))

    assert "is masked, but the mask was dropped" in checked(causal, change)


def test_a_loop_without_its_last_segment_is_noticed(causal):
    wrong = checked(causal, lambda loop: replace(loop, segments=loop.segments[:-1]))
    assert "counts, but is not visited" in wrong


def test_a_lost_tail_is_noticed():
    only = kernel(MASKS["from the middle"], XLA_CPU, BIG - 3)
    (loop,) = [s for s in only.program.body if isinstance(s, Loop) and s.carries]
    assert loop.segments[-1].label == "tail"
    assert "not visited" in checked(only, lambda x: replace(x, segments=x.segments[:-1]))


def test_a_tile_beyond_the_end_is_noticed():
    only = kernel(MASKS["from the middle"])
    wrong = checked(only, lambda loop: segment(loop, -1, stop=plus(loop.segments[-1].stop, 1)))
    assert "leave" in wrong


def test_an_error_in_one_block_out_of_many_is_found(causal):
    """Only the very last block of rows loses a tile."""
    rows = next(a for a, t in causal.program.grid if a.extent == BIG)

    def change(loop):
        is_last = apply("ge", read(block_start(rows), (), "int32"), const(BIG - causal.program.tile(rows), "int32"))
        stop = loop.segments[-1].stop
        return segment(loop, -1, stop=apply("select", is_last, plus(stop, -1), stop))

    assert "not visited" in checked(causal, change)


def test_nothing_of_the_size_of_the_arrays_is_allocated(causal):
    tracemalloc.start()
    checked(causal)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6  # a mask of 8192 x 8192 alone has 67 MB


@pytest.mark.parametrize("predicate_and_answer", [
    (apply("ge", index(Axis("j", BIG)), const(0, "int32")), True),
    (apply("lt", index(Axis("j", BIG)), const(0, "int32")), True),
    (apply("lt", index(Axis("j", BIG)), const(1, "int32")), False),
    (apply("lt", index(Axis("j", BIG)), const(BIG - 1, "int32")), False),
    (apply("le", index(Axis("j", BIG)), index(Axis("i", BIG))), False),
    (apply("le", index(Axis("j", 5)), const(4, "int32")), True),
], ids=lambda p: str(p[0]))  # fmt: skip
def test_constant_predicates(predicate_and_answer):
    predicate, answer = predicate_and_answer
    assert is_constant(predicate, np.random.default_rng(0)) == answer
