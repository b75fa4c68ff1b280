"""Tile programs: every invariant that `verify` checks, and their evaluation in float64."""

from dataclasses import replace

import numpy as np
import pytest

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64
from pallasfuse.ir.evaluate import evaluate_expr, evaluate_nest
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.expr import add, apply, const, convert, index, mul, read, select, sub
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import (
    Carry,
    Contract,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Store,
    TileProgram,
    before,
    block_start,
    most,
    to_visit,
    verify,
    visited,
)

I, J, K = Axis("i", 5), Axis("j", 7), Axis("k", 3)  # noqa: E741
X, W, Y = Tensor("x", (I, J), "float32"), Tensor("w", (J, K), "float32"), Tensor("y", (I,), "float32")
XT, SUMMED = read("x.t", (I, J), "float32"), read("s", (I,), "float32")
LOAD = Load("x.t", "x", (I, J), "float32")


def whole(n):
    return const(n, "int32")


def carried(body, *, start=0, stop=3, tile=3, offset=0, edge=True, visit=7, first=0):
    """A sum over j in tiles of three, whose body yields s.next."""
    carry = Carry("s", (I,), "float32", const(0.0, "float32"), "s.next")
    segment = Segment(whole(start), whole(stop), offset, tile, tuple(body), edge=edge)
    return Loop(J, (carry,), (segment,), whole(visit), whole(first))


STEP = (LOAD, Reduce("r", (I,), SUM, XT, (J,)), Let("s.next", (I,), add(SUMMED, read("r", (I,), "float32"))))
STORE = Store("y", (I,), SUMMED)


def kernel(*body, tiles=((I, 2), (J, 3)), inputs=(X,), outputs=(Y,), descending=()):
    return TileProgram("k", inputs, outputs, tiles[:1], tiles, tuple(body), descending=descending)


ROW_SUM = kernel(carried(STEP), STORE)
VALUE = np.random.default_rng(0).normal(size=(5, 7))
WEIGHT = np.random.default_rng(1).normal(size=(7, 3))

# --- verify and text


def test_a_good_program_and_its_text():
    assert verify(ROW_SUM) is ROW_SUM
    assert str(ROW_SUM) == (
        "kernel k grid(i:5/2)\n"
        "  s[i]: float32 = 0\n"
        "  for j in [0, 3) by 3:\n"
        "    x.t = load x[i, j]\n"
        "    r[i] = sum(x.t[i, j]; j)\n"
        "    s.next[i] = s[i] + r[i]\n"
        "    yield s <- s.next\n"
        "  store y[i] = s[i]"
    )
    assert ROW_SUM.order == (I, J)
    assert ROW_SUM.tile(J) == 3


UNKNOWN = read("nothing", (I,), "float32")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ((replace(LOAD, tensor="z"),), "load of unknown tensor 'z'"),
        ((Let("a", (I,), UNKNOWN),), r"a reads \['nothing'\], not in scope"),
        ((Reduce("a", (), SUM, UNKNOWN, (I,)),), "a reads"),
        ((LOAD, Contract("a", (I,), UNKNOWN, XT, (J,), "float32")), "a reads"),
        ((LOAD, Contract("a", (I,), XT, UNKNOWN, (J,), "float32")), "a reads"),
        ((Store("y", (I,), UNKNOWN),), "store y reads"),
        ((Store("z", (I,), const(0.0, "float32")),), "store to unknown tensor 'z'"),
        ((carried(STEP[:2]), STORE), r"loop j does not yield \['s.next'\]"),
        ((replace(carried(STEP), carries=(Carry("s", (I,), "float32", UNKNOWN, "s.next"),)), STORE), "s reads"),
        ((carried(STEP), Store("y", (I,), read("r", (I,), "float32"))), "store y reads"),  # defined inside the loop
        ((Let("t", (), read(visited(J), (), "int32")), STORE), "t reads"),  # only loops have visited positions
        ((carried(STEP),), r"\['y'\] is never stored"),
    ],
)
def test_each_invariant(body, message):
    with pytest.raises(InvalidProgramError, match=message):
        verify(kernel(*body))


@pytest.mark.parametrize("field", ["start", "stop"])
def test_bounds_read_only_what_is_in_scope(field):
    loop = carried(STEP)
    bad = replace(loop, segments=(replace(loop.segments[0], **{field: read("nothing", (), "int32")}),))
    with pytest.raises(InvalidProgramError, match="nothing"):
        verify(kernel(bad, STORE))


@pytest.mark.parametrize("field", ["to_visit", "first"])
def test_counts_read_only_what_is_in_scope(field):
    bad = replace(carried(STEP), **{field: read("nothing", (), "int32")})
    with pytest.raises(InvalidProgramError, match="nothing"):
        verify(kernel(bad, STORE))


# --- evaluation


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("descending", [(), (I,)])
def test_rows_in_blocks_that_do_not_divide_the_grid(back, descending):
    got = evaluate_tiles(replace(ROW_SUM, descending=descending), {"x": VALUE}, move_last_block_back=back)
    np.testing.assert_allclose(got["y"], VALUE.sum(1), rtol=1e-14)
    assert got["y"].dtype == np.float64


@pytest.mark.parametrize("tile", [1, 2, 4, 5, 8])
def test_any_grid_tile(tile):
    got = evaluate_tiles(kernel(carried(STEP), STORE, tiles=((I, tile), (J, 3))), {"x": VALUE})
    np.testing.assert_allclose(got["y"], VALUE.sum(1), rtol=1e-14)


def test_a_tail_of_another_size():
    loop = carried(STEP, stop=2, edge=False)
    tail = replace(loop.segments[0], start=whole(0), stop=whole(1), offset=6, tile=1)
    got = evaluate_tiles(kernel(replace(loop, segments=(*loop.segments, tail)), STORE), {"x": VALUE})
    np.testing.assert_allclose(got["y"], VALUE.sum(1), rtol=1e-14)


def test_what_lies_outside_a_tensor_is_zero_and_masks_see_its_position():
    inside = apply("lt", index(J), const(J.extent, "int32"))
    maximum = Reduce("m", (I,), MAX, XT, (J,))
    right = Reduce("m", (I,), MAX, select(inside, XT, const(-np.inf, "float32")), (J,))
    negative = -1 - np.abs(VALUE)
    for step, want in ((maximum, np.zeros(5)), (right, negative.max(1))):
        program = kernel(LOAD, step, Store("y", (I,), read("m", (I,), "float32")), tiles=((I, 2), (J, 8)))
        np.testing.assert_array_equal(evaluate_tiles(program, {"x": negative})["y"], want)


def test_contraction_and_scalars():
    out = Tensor("z", (I, K), "float32")
    scale = Tensor("c", (), "float32")
    body = (
        LOAD, Load("w.t", "w", (J, K), "float32"), Load("c.t", "c", (), "float32"),
        Contract("d", (I, K), XT, read("w.t", (J, K), "float32"), (J,), "float32"),
        Store("z", (I, K), mul(read("d", (I, K), "float32"), read("c.t", (), "float32"))),
    )  # fmt: skip
    program = kernel(*body, tiles=((I, 2), (J, 8), (K, 4)), inputs=(X, W, scale), outputs=(out,))
    got = evaluate_tiles(program, {"x": VALUE, "w": WEIGHT, "c": np.array(2.0)})
    np.testing.assert_allclose(got["z"], 2 * VALUE @ WEIGHT, rtol=1e-13)


def test_outputs_keep_their_kind():
    count = Tensor("n", (I,), "int32")
    flag = Tensor("b", (I,), "bool")
    below = apply("lt", index(I), whole(2))
    program = kernel(Store("n", (I,), index(I)), Store("b", (I,), below), inputs=(), outputs=(count, flag))
    got = evaluate_tiles(program, {})
    np.testing.assert_array_equal(got["n"], np.arange(5))
    np.testing.assert_array_equal(got["b"], np.arange(5) < 2)
    assert (got["n"].dtype, got["b"].dtype) == (np.int64, np.bool_)


def test_loops_know_how_far_they_are():
    """A running mean that is extrapolated by the visited positions."""
    ratio = apply(
        "div", convert(read(to_visit(J), (), "int32"), "float32"), convert(read(visited(J), (), "int32"), "float32")
    )
    seen = sub(read(visited(J), (), "int32"), read(before(J), (), "int32"))
    body = (*STEP[:2], Let("s.next", (I,), mul(convert(seen, "float32"), ratio)))
    got = evaluate_tiles(kernel(carried(body), STORE), {"x": VALUE})
    np.testing.assert_array_equal(got["y"], np.ones(5))  # the last tile holds one position


def test_blocks_know_where_they_start():
    starts = evaluate_tiles(
        kernel(Store("y", (I,), convert(read(block_start(I), (), "int32"), "float32"))), {"x": VALUE}
    )
    np.testing.assert_array_equal(starts["y"], [0, 0, 2, 2, 4])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (kernel(carried(STEP, stop=3, edge=False), STORE), r"positions \[6, 9\) leave j of 7"),
        (kernel(carried(STEP, stop=2), STORE), "visits 6 positions, but says 7"),
        (kernel(carried(STEP, start=1), STORE), "the tile at 3 of j comes after 0 positions"),
        (
            kernel(LOAD, Reduce("r", (I,), SUM, XT, (J,)), Store("y", (I,), read("r", (I,), "float32"))),
            "a part of j is used",
        ),
        (kernel(LOAD, Let("a", (I,), XT), tiles=((I, 2), (J, 8))), "a varies along j, which it does not declare"),
        (kernel(LOAD, Store("y", (I,), XT), tiles=((I, 2), (J, 8))), "store y varies along j"),
        (kernel(Let("a", (I,), const(0.0, "float32"))), r"y\[0\] and 4 other elements are never written"),
        (kernel(replace(LOAD, indices=(J, I)), tiles=((I, 2), (J, 8))), r"load of x\[j, i\], whose shape is \(5, 7\)"),
    ],
)
def test_what_a_device_would_do_silently_is_an_error(program, message):
    with pytest.raises(InvalidProgramError, match=message):
        evaluate_tiles(program, {"x": VALUE})


def test_elements_that_are_never_written_are_named():
    short = replace(
        ROW_SUM, body=(carried(STEP), Store("z", (I, J), SUMMED)), outputs=(Tensor("z", (I, J), "float32"),)
    )
    with pytest.raises(InvalidProgramError, match="a part of j"):
        evaluate_tiles(short, {"x": VALUE})
    copy = (LOAD, Store("z", (I, J), XT))
    loop = carried(copy, stop=2, visit=6)
    with pytest.raises(InvalidProgramError, match=r"z\[0, 6\] and 4 other elements are never written"):
        evaluate_tiles(replace(short, body=(replace(loop, carries=()),)), {"x": VALUE})


# --- ranges

MASK = Tensor("m", (I, J), "bool")
LEFT, RIGHT, COUNT = (Tensor(f"j.{n}", (I,), "int32") for n in ("left", "right", "count"))
SEEN = read("m", (I, J), "bool")


def ends(side):
    loaded = read(f"{side.name}.t", (I,), "int32")
    return Load(loaded.tensor, side.name, (I,), "int32"), Reduce(most(side.name), (), MAX, loaded, (I,))


def bounded(range_=None, inputs=(X, MASK, LEFT, RIGHT, COUNT)):
    """The sum of what a mask leaves, by a loop from the first to the last element of it in the rows of a block."""
    left, right = (read(most(t.name), (), "int32") for t in (LEFT, RIGHT))
    first, stop = sub(whole(7), left), right
    mask = Load("m.t", "m", (I, J), "bool")
    kept = select(read("m.t", (I, J), "bool"), XT, const(0.0, "float32"))
    step = (
        LOAD,
        mask,
        Reduce("r", (I,), SUM, kept, (J,)),
        Let("s.next", (I,), add(SUMMED, read("r", (I,), "float32"))),
    )
    carry = Carry("s", (I,), "float32", const(0.0, "float32"), "s.next")
    visit = apply("max", sub(stop, first), whole(0))
    loop = Loop(J, (carry,), (Segment(first, stop, 0, 1, step, "masked"),), visit, first)
    program = kernel(*ends(LEFT), *ends(RIGHT), loop, STORE, tiles=((I, 1), (J, 1)), inputs=inputs)
    return replace(program, ranges=(range_ or Range(J, SEEN, LEFT, RIGHT, COUNT),))


@pytest.mark.parametrize("density", [0.0, 0.2, 0.6])
def test_ends_of_ranges_are_computed_before_the_kernel(density):
    mask = np.random.default_rng(2).random((5, 7)) < density
    program = verify(bounded())
    assert [t.name for t in program.given] == ["x", "m"]
    found = evaluate_tiles(program, {"x": VALUE, "m": mask})
    np.testing.assert_allclose(found["y"], np.where(mask, VALUE, 0).sum(1))
    assert "j.left, j.right, j.count[i] = range of j where m[i, j]" in str(program)


@pytest.mark.parametrize(
    ("range_", "inputs"),
    [
        (Range(J, read("n", (I, J), "bool"), LEFT, RIGHT, COUNT), (X, MASK, LEFT, RIGHT, COUNT)),
        (Range(J, read("j.left", (I,), "bool"), LEFT, RIGHT, COUNT), (X, MASK, LEFT, RIGHT, COUNT)),
        (Range(J, SEEN, LEFT, Tensor("j.right", (), "int32"), COUNT), (X, MASK, LEFT, RIGHT, COUNT)),
        (Range(J, SEEN, LEFT, RIGHT, Tensor("j.count", (), "int32")), (X, MASK, LEFT, RIGHT, COUNT)),
        (Range(J, SEEN, LEFT, RIGHT, COUNT), (X, MASK, LEFT, RIGHT)),
        (Range(J, read("m", (J, J), "bool"), LEFT, RIGHT, COUNT), (X, MASK, LEFT, RIGHT, COUNT)),
    ],
)
def test_a_range_is_of_inputs_and_of_rows(range_, inputs):
    with pytest.raises(InvalidProgramError, match="is not what its inputs give"):
        verify(bounded(range_, inputs))


def test_a_range_covers_what_lies_between_its_ends():
    for all_if_none in (False, True):
        covers = Range(J, SEEN, LEFT, RIGHT, COUNT, all_if_none).covers()
        for first, last in ((2, 5), (0, 7), (6, 7)):
            at = {"j.left": np.full(5, 7 - first), "j.right": np.full(5, last)}
            j = np.arange(7)
            np.testing.assert_array_equal(evaluate_expr(covers, (I, J), at)[0], (j >= first) & (j < last))
        nothing = {"j.left": np.zeros(5, int), "j.right": np.zeros(5, int)}
        assert (evaluate_expr(covers, (I, J), nothing) == all_if_none).all()


def test_a_range_fills_the_rows_that_are_solid():
    mask = np.array([[0, 1, 1, 0, 0, 0, 0], [1] * 7, [0] * 7, [0, 1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1]], bool)
    found = Range(J, SEEN, LEFT, RIGHT, COUNT, all_if_none=True)
    at = {n.name: evaluate_nest(n, {"m": mask}, FLOAT64) for n in found.nests}
    np.testing.assert_array_equal(at["j.count"], mask.sum(1))
    want = np.where(np.arange(5)[:, None] == 3, False, mask)
    np.testing.assert_array_equal(evaluate_expr(found.fills(), (I, J), at), want)
