"""Products of warps whose rows are turned on their way to the matrix units."""

import pytest

from pallasfuse.price.block_products import Product
from pallasfuse.price.gpu_products import through_shared_memory


def clocks(rows: int, warps: int, *, turned: bool, dtype: str = "bfloat16") -> float:
    product = Product(rows, 16, 64, 1, dtype, False, 10.0, in_columns=turned)
    return through_shared_memory([(product, warps)], ahead=True)[0]


@pytest.mark.parametrize(
    ("rows", "warps", "dtype", "slower"),
    [
        (64, 2, "bfloat16", True),
        (128, 2, "bfloat16", True),
        (32, 2, "bfloat16", False),  # a line has 64 bytes
        (32, 2, "float32", True),
        (16, 2, "float32", False),
        (64, 4, "bfloat16", False),  # four warps together read shared memory as it lies
        (96, 4, "bfloat16", True),
    ],
)
def test_turned_rows_of_whole_lines_take_longer_by_warps(rows, warps, dtype, slower):
    as_it_lies, turned = (clocks(rows, warps, turned=t, dtype=dtype) for t in (False, True))
    assert (turned > 2 * as_it_lies) == slower
    assert slower or turned == as_it_lies
