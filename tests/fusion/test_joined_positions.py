"""Positions along two axes that are one: where a sum of positions counts both, and what it becomes."""

import numpy as np
import pytest

from pallasfuse.fusion.joined_positions import in_order, with_joined_positions
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.expr import add, apply, const, convert, index, mul, rebuild, with_args
from pallasfuse.ir.loop_program import LoopProgram, Nest

A, B, C = (Axis(name, extent) for name, extent in zip("abc", (3, 4, 5), strict=True))


def times(axis, factor):
    return mul(index(axis), const(factor, "int32"))


ROWS = add(times(A, 4), index(B))
DEEP = add(add(times(A, 20), times(B, 5)), index(C))
SHIFTED = add(add(const(7, "int32"), times(A, 4)), index(B))


@pytest.mark.parametrize(
    "body, pairs",
    [
        (ROWS, {(A, B)}),
        (convert(ROWS, "float32"), {(A, B)}),
        (SHIFTED, {(A, B)}),
        (DEEP, {(A, B), (B, C)}),
        (add(times(A, 5), index(B)), set()),
        (add(times(B, 4), index(A)), set()),
        (add(index(A), index(B)), set()),
        (add(ROWS, index(A)), set()),
        (apply("lt", ROWS, index(B)), set()),
        (mul(ROWS, index(A)), set()),
        (add(convert(times(A, 4), "int64"), convert(index(B), "int64")), set()),
    ],
)
def test_pairs_along_which_positions_are_asked_for_as_if_they_were_one_axis(body, pairs):
    assert in_order(body) == pairs


@pytest.mark.parametrize("body, pair", [(ROWS, (A, B)), (SHIFTED, (A, B)), (DEEP, (A, B)), (DEEP, (B, C))])
def test_a_position_along_both_axes_has_the_same_values(body, pair):
    one = Axis("one", pair[0].extent * pair[1].extent)
    joined = rebuild(body, lambda node, args: with_joined_positions(with_args(node, args), {pair: one}))
    before = [a for a in (A, B, C) if a in body.axes]
    after = [one if a == pair[0] else a for a in before if a != pair[1]]
    assert joined.axes == {*after}
    values = []
    for axes, expr in ((before, body), (after, joined)):
        program = LoopProgram((), (Nest("n", tuple(axes), expr, "int32"),), ("n",))
        values.append(np.broadcast_to(evaluate(program, {})["n"], [a.extent for a in axes]).ravel())
    np.testing.assert_array_equal(*values)
