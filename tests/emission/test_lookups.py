"""Which tiles are whole blocks of the rows that a table names."""

import pytest

from pallasfuse.emission.lookups import in_whole_blocks
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Load, Store
from tests.ir.nested_programs import F, kernel, over, start, tile_of

Q, ROWS, BLOCKS = Axis("q", 48), Axis("rows", 96), Axis("blocks", 12)
X, Y = Tensor("x", (Q,), F), Tensor("y", (Q,), F)


def pieces(block, piece):
    """Blocks of the grid, cut into pieces."""
    step = Load("x.t", "x", (Q,), F), Store("y", (Q,), tile_of("x.t", Q))
    loop = over(Q, piece, lambda _: step, "exact", window=block, inside=True, first=start(Q))
    return kernel("pieces", (X,), (Y,), ((Q, block),), ((Q, block),), loop)


@pytest.mark.parametrize(
    ("block", "piece", "whole"), [(16, 8, True), (24, 8, True), (16, 4, False), (12, 8, False), (12, 12, False)]
)
def test_pieces_of_grid_blocks(block, piece, whole):
    """A piece begins where its block does: both have to be whole."""
    lookup = Lookup(X, Tensor("s", (ROWS,), F), Tensor("t", (BLOCKS,), "int32"), ROWS, 8, Q, BLOCKS)
    assert in_whole_blocks(pieces(block, piece), lookup) == ({Q} if whole else frozenset())
