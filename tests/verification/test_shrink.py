"""Small instances of programs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.errors import Refusal
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Index, postorder
from pallasfuse.ir.loop_program import Nest, verify
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.verification.shrink import Shrinking, dims_of, shrinking, small_integers
from tests.programs_by_name import PROGRAMS, attention, masked_attention, program, program_of, softmax, variance

pytestmark = pytest.mark.any_jax

BIG = 8192


def shrunk(loops, longest=5):
    """The program with its reduced axes at `longest` and all others at 2."""
    wanted = {a: longest for n in loops.nests if isinstance(n, Nest) for a in n.reduced}
    small = shrinking(loops, wanted)
    assert isinstance(small, Shrinking), small
    return small, verify(small.of(loops))


def constants(loops, prefix="float"):
    return {n.value for nest in loops.nests for n in postorder(nest.body)
            if isinstance(n, Const) and n.dtype.startswith(prefix)}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_shrunk_program_is_the_same_nests_over_short_axes(name):
    loops = program(name)
    small, short = shrunk(loops)
    for before, after in zip(loops.nests, short.nests, strict=True):
        assert before.name == after.name
        assert before.reducer == after.reducer
        assert [a.name for a in (*before.axes, *before.reduced)] == [a.name for a in (*after.axes, *after.reduced)]
        ops = [[n.op for n in postorder(nest.body) if isinstance(n, Apply)] for nest in (before, after)]
        assert sorted(ops[0]) == sorted(ops[1])
    for nest in short.nests:
        assert all(a.extent <= 13 for a in (*nest.axes, *nest.reduced))
    assert all(s <= e for e, s in small.extents.items())


def test_huge_axes_become_short():
    _, short = shrunk(program_of(attention, (BIG, 128), (BIG, 128), (BIG, 128)))
    assert max(volume((*n.axes, *n.reduced)) for n in short.nests) <= 5**3


def test_axes_of_one_extent_keep_one_extent():
    loops = program_of(attention, (BIG, 128), (BIG, 128), (BIG, 128))
    small, _ = shrunk(loops)
    assert set(small.extents) == {BIG, 128}
    rows = [a for d in loops.definitions() for a in d.axes if a.extent == BIG]
    assert {small.axis(a).extent for a in rows} == {small.extents[BIG]}


@pytest.mark.parametrize("function", [variance, lambda x: jnp.mean(x, -1), lambda x: jnp.mean(jnp.exp(x), -1)])
def test_counts_shrink_with_the_axis_that_they_count(function):
    small, short = shrunk(program_of(function, (64, BIG)))
    counts = constants(short)
    assert small.extents[BIG] == 5
    assert counts & {5.0, 0.2}
    assert not counts & {float(BIG), 1 / BIG}


@pytest.mark.parametrize("times", [2, 3, 4])
def test_a_count_is_not_taken_for_a_multiple_of_another_one(times):
    """A mean over 64 rows of sums of 32 products divides by 64, and not by twice 32."""
    loops = program_of(lambda x, w: jnp.mean(x @ w, 0), (32 * times, 32), (32, 8))
    small = shrinking(loops, {a: 5 if a.extent == 32 else 3 for n in loops.nests for a in getattr(n, "reduced", ())})
    assert (small.number(32.0 * times, "float32"), small.number(32.0, "float32")) == (3.0, 5.0)


def test_counts_of_two_axes_shrink_to_the_product():
    loops = program_of(lambda x: jnp.mean(x, (1, 2)), (64, 40, 56))
    small, short = shrunk(loops)
    expected = small.extents[40] * small.extents[56]
    assert any(math.isclose(c, expected) or math.isclose(c, 1 / expected) for c in constants(short))


def test_other_numbers_stay():
    _, short = shrunk(program_of(lambda x: softmax(0.125 * x + 1e-5) * 3.0, (64, BIG)))
    assert {0.125, 3.0} <= constants(short)
    assert any(math.isclose(c, 1e-5, rel_tol=1e-6) for c in constants(short))


def test_small_counts_that_may_be_coefficients_keep_their_axis():
    """A mean over 4 elements divides by 4, and so may a repair: neither shrinks."""
    small, short = shrunk(program_of(lambda x: jnp.mean(x, -1), (64, 4)), longest=3)
    assert small.extents[4] == 4
    assert constants(short) & {4.0, 0.25}


def compared_with(short):
    return {int(n.value) for nest in short.nests for n in postorder(nest.body)
            if isinstance(n, Const) and n.dtype == "int32"}  # fmt: skip


@pytest.mark.parametrize("window", [256, 1024, 4000])
def test_masks_shrink_with_the_axes(window):
    mask = masked_attention(lambda i, j: (j <= i) & (j > i - window))
    loops = program_of(mask, (BIG, 64), (BIG, 64), (BIG, 64))
    small, short = shrunk(loops, longest=6)
    (inside,) = [n for n in compared_with(short) if n > 1]
    assert 1 < inside < small.extents[BIG]  # still hides some keys, and not all


def test_the_difference_of_two_extents_stays_the_difference():
    """Causal attention with more keys than queries is shifted by the difference."""
    mask = masked_attention(lambda i, j: j <= i + (BIG - 1000))
    loops = program_of(mask, (1000, 64), (BIG, 64), (BIG, 64))
    small, short = shrunk(loops, longest=6)
    assert small.extents[BIG] - small.extents[1000] in {*compared_with(short), 0}
    assert small.extents[BIG] > small.extents[1000]


def test_strides_shrink_to_the_product_of_the_short_extents():
    loops = program_of(lambda x: x * jnp.arange(64 * BIG, dtype=jnp.int32).reshape(64, BIG), (64, BIG))
    small, short = shrunk(loops)
    positions = [n for nest in short.nests for n in postorder(nest.body) if isinstance(n, Index)]
    assert positions
    assert BIG not in compared_with(short)
    assert small.extents[BIG] in compared_with(short)


@pytest.mark.parametrize("shape", [(5, 6, 7, 9, 11), (3, 4, 5, 6, 7, 9), (2, 3, 5, 7, 2, 3, 11)], ids=str)
def test_strides_of_many_dimensions_shrink_as_well(shape):
    """A false alarm, once: an outer step passes four dimensions or more."""
    program = program_of(lambda x: jnp.where(jnp.arange(math.prod(shape)).reshape(shape) < 99, x, 0.0), shape)
    small = shrinking(program, {})
    short = small.of(program)
    whole, found = (
        next(n for n in p.nests if any(isinstance(x, Index) for x in postorder(n.body))) for p in (program, short)
    )
    factors = [[x.value for x in postorder(n.body) if isinstance(x, Const)] for n in (whole, found)]
    lengths = [[a.extent for a in n.axes] for n in (whole, found)]
    for strides, dims in zip(factors, lengths, strict=True):
        assert {*strides} == {math.prod(dims[at:]) for at in range(1, len(dims))}


def test_a_stride_that_cannot_be_told_from_another_is_refused():
    """8 x 8 and 4 x 16 are both 64, and shrink to different numbers."""
    shape = (8, 8, 4, 16)
    loops = program_of(lambda x: jnp.sum(x * jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape), -1), shape)
    axes = {a for n in loops.nests for a in (*n.axes, *n.reduced)}
    found = shrinking(loops, {a: {8: 3, 4: 2, 16: 5}[a.extent] for a in axes})
    assert isinstance(found, Refusal)
    assert "64" in str(found)


def test_nothing_shrinks_when_every_axis_is_wanted_whole():
    loops = program("causal")
    axes = {a for d in loops.definitions() for a in d.axes} | {a for n in loops.nests for a in n.reduced}
    small = shrinking(loops, {a: a.extent for a in axes})
    assert small.of(loops) == loops


def test_small_integers_of_masks_are_known():
    assert small_integers(program("empty_rows")) == 3
    assert small_integers(program("softmax")) == 0


def test_dimensions_of_an_array():
    axes = [Axis("a", 2), Axis("b", 3), Axis("c", 4)]
    assert dims_of((6, 1, 4), axes) == [(axes[0], axes[1]), (), (axes[2],)]
    assert dims_of((2, 12), axes) == [(axes[0],), (axes[1], axes[2])]
    assert dims_of((), []) == []


# --- numbers that are computed of extents


def shrinking_of(function, *shapes):
    program = convert(jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(s, "float32") for s in shapes])).program
    return program, shrinking(program, {})


def computing(count):
    def function(x):
        return jnp.sum(x, -1) / jnp.sqrt(jnp.float32(count)), jnp.sum(x * x, -1) / (jnp.float32(count) - 1)

    return function


def test_numbers_that_are_computed_of_a_count_shrink_with_it():
    _, small = shrinking_of(computing(4096), (8, 4096))
    (short,) = {e for n, e in small.extents.items() if n == 4096}
    for actual, expected in ((np.sqrt(4096), np.sqrt(short)), (4095, short - 1), (4096, short)):
        assert small.number(float(np.float32(actual)), "float32") == pytest.approx(expected)
    assert small.number(63.0, "float32") == 63.0


def test_a_number_that_is_also_computed_of_an_extent_keeps_the_extent():
    """64 is the root of 4096; 8 that of 64."""
    _, small = shrinking_of(lambda x: computing(64)(8.0 * x), (5, 64))
    assert isinstance(small, Shrinking)
    assert small.extents[64] == 64
    assert small.number(8.0, "float32") == 8.0
    assert small.extents[5] == 2


def test_a_number_that_is_also_computed_of_a_long_extent_is_refused():
    _, small = shrinking_of(lambda x: computing(4096)(64.0 * x), (5, 4096))
    assert isinstance(small, Refusal)
    assert "64" in str(small)


def test_numbers_that_a_remainder_is_compared_with_stay_apart():
    def masked(x, p):
        return jnp.sum(jnp.where((jnp.arange(512) + p) % 8 > 6, x, 0.0))

    loops = convert(jax.make_jaxpr(masked)(jnp.zeros(512), 0)).program
    small, _ = shrunk(loops, 4)
    assert small.number(8, "int32") - small.number(6, "int32") >= 2
    assert small.number(-8, "int32") == -small.number(8, "int32")
