"""Rows of which an element is known to stay visible, by positions alone."""

import numpy as np
import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64
from pallasfuse.ir.evaluate import evaluate_over
from pallasfuse.ir.expr import add, apply, const, convert, index, mul, read, sub
from pallasfuse.tiling.witness import every_row_keeps

ROWS, COLUMNS = Axis("i", 40), Axis("j", 56)
SQUARE = Axis("k", 40)


def number(n, dtype="int32"):
    return const(n, dtype)


def both(a, b):
    return apply("and", a, b)


i, j = index(ROWS), index(COLUMNS)
MASKS = {
    "causal": apply("le", j, i),
    "from the end": apply("ge", j, add(i, number(16))),
    "beyond the end": apply("ge", j, add(i, number(17))),
    "window": both(apply("le", j, i), apply("gt", j, sub(i, number(4)))),
    "shifted window": both(apply("ge", j, add(i, number(7))), apply("lt", j, add(i, number(9)))),
    "empty window": both(apply("ge", j, add(i, number(7))), apply("lt", j, add(i, number(7)))),
    "distance": apply("lt", apply("abs", sub(i, j)), number(2)),
    "twice as fast": apply("le", mul(j, number(2)), i),
    "other types": apply("le", convert(j, "float32"), convert(i, "float32")),
    "one row hidden": both(apply("ne", i, number(13)), apply("le", j, i)),
    "either": apply("or", apply("lt", j, sub(i, number(30))), apply("ge", j, number(50))),
    "anything": const(True, "bool"),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_is_said_holds_in_every_row(name):
    """And, for all of these, nothing is missed."""
    visible = np.broadcast_to(evaluate_over(MASKS[name], (ROWS, COLUMNS), {}, FLOAT64), (40, 56))
    assert every_row_keeps((MASKS[name],), COLUMNS) == bool(visible.any(1).all())


def test_several_masks_must_leave_the_same_element():
    low, high = apply("lt", j, number(9)), apply("ge", j, number(9))
    assert every_row_keeps((low,), COLUMNS) and every_row_keeps((high,), COLUMNS)
    assert not every_row_keeps((low, high), COLUMNS)


def test_masks_of_data():
    """Nothing is known of data, but that a thing is equal to itself."""
    lengths = apply("lt", j, read("n", (), "int32"))
    assert not every_row_keeps((lengths,), COLUMNS)
    same = apply("eq", read("part", (ROWS,), "int32"), read("part", (SQUARE,), "int32"))
    assert every_row_keeps((same, apply("le", index(SQUARE), i)), SQUARE)
    assert not every_row_keeps((same, apply("lt", index(SQUARE), i)), SQUARE)
    other = apply("eq", read("part", (ROWS,), "int32"), read("other", (SQUARE,), "int32"))
    assert not every_row_keeps((other,), SQUARE)


def test_more_rows_than_are_looked_at():
    rows = [Axis(f"r{n}", 2048) for n in range(3)]
    mask = apply("ge", add(add(index(rows[0]), index(rows[1])), index(rows[2])), j)
    assert not every_row_keeps((mask,), COLUMNS)


LONG, ACROSS = Axis("r", 300), Axis("c", 300)
r, c = index(LONG), index(ACROSS)
SAME = apply("eq", r, c)
ROUNDED = {
    "int32 wraps": (apply("ge", mul(r, number(100_000_000)), number(0)), False),
    "uint32 wraps": (apply("lt", sub(convert(r, "uint32"), number(1, "uint32")), number(1000, "uint32")), False),
    "uint8 wraps": (apply("lt", convert(c, "uint8"), convert(add(r, number(1)), "uint8")), False),
    "bfloat16 rounds": (apply("lt", convert(c, "bfloat16"), convert(add(r, number(1)), "bfloat16")), False),
    "arithmetic of floats": (
        apply("lt", convert(c, "float32"), add(convert(r, "float32"), number(1.0, "float32"))),
        False,
    ),
    "int32 is exact": (apply("ge", mul(r, number(1_000_000)), number(0)), True),
    "float32 is exact": (apply("lt", convert(c, "float32"), convert(add(r, number(1)), "float32")), True),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_positions_are_computed_in_the_types_of_the_program(name):
    """Where integers wrap around, a row may lose the element that is shown for it; where floats round, nothing is known."""
    predicate, kept = ROUNDED[name]
    assert every_row_keeps((SAME, predicate), ACROSS) == kept
