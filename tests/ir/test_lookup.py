"""Lookups by their definition, and the invariants of their axes."""

from dataclasses import replace

import numpy as np
import pytest

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import const
from pallasfuse.ir.lookup import Lookup, looked_up, verify
from pallasfuse.ir.tensors import Tensor

B, J, D = Axis("i", 2), Axis("j", 6), Axis("d", 5)
ROWS, BLOCKS = Axis("pages.rows", 12), Axis("j.blocks", 2)
PAGES = Lookup(
    Tensor("k", (B, J, D), "float32"), Tensor("pages", (ROWS, D), "float32"), Tensor("table", (B, BLOCKS), "int32"),
    ROWS, 3, J, BLOCKS,
)  # fmt: skip
SINGLE = Lookup(
    Tensor("k", (D, B, J), "float32"), Tensor("rows", (B, D, ROWS), "float32"), Tensor("table", (J, B), "int32"), ROWS
)
SOURCE = np.arange(60.0).reshape(12, 5)
TABLE = np.array([[3, 0], [-4, 9]])


def test_blocks_stand_one_after_the_other():
    want = SOURCE.reshape(4, 3, 5)[[[3, 0], [0, 3]]].reshape(2, 6, 5)
    assert np.array_equal(looked_up(verify(PAGES), SOURCE, TABLE), want)


def test_what_is_out_of_range_may_be_filled():
    filled = verify(replace(PAGES, fill=const(7.0, "float32")))
    got = looked_up(filled, SOURCE, TABLE)
    assert (got[1] == 7).all()
    assert np.array_equal(got[0], looked_up(PAGES, SOURCE, TABLE)[0])


def test_rows_by_a_table_that_shares_an_axis_with_the_source():
    source, table = np.arange(120.0).reshape(2, 5, 12), np.random.default_rng(0).integers(0, 12, (6, 2))
    got = looked_up(verify(SINGLE), source, table)
    assert all(got[d, i, j] == source[i, d, table[j, i]] for d in range(5) for i in range(2) for j in range(6))


def test_text():
    assert str(PAGES) == "k[i, j, d] = pages[table[i, j / 3] * 3 + j % 3, d]"
    assert (
        str(replace(SINGLE, fill=const(0, "float32"))) == "k[d, i, j] = rows[i, d, table[j, i]], 0 where out of range"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        replace(PAGES, block=4),
        replace(PAGES, block=1),
        replace(PAGES, along=None, blocks=None),
        replace(PAGES, blocks=Axis("j.blocks", 3)),
        replace(PAGES, source=Tensor("pages", (ROWS, D), "float16")),
        replace(PAGES, source=Tensor("pages", (ROWS, J), "float32")),
        replace(PAGES, source=Tensor("pages", (D,), "float32")),
        replace(PAGES, table=Tensor("table", (BLOCKS,), "int32")),
        replace(PAGES, fill=const(0, "int32")),
        replace(SINGLE, result=Tensor("k", (D, B, J, Axis("more", 2)), "float32")),
    ],
)
def test_what_does_not_fit_is_an_error(wrong):
    with pytest.raises(InvalidProgramError, match="does not fit"):
        verify(wrong)
