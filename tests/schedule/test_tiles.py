"""Sizes of tiles that pad an axis by little."""

import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.schedule import tiles


@pytest.mark.parametrize("extent", [1, 8, 15, 16, 17, 48, 100, 512, 577, 1000, 4096, 50257, 1 << 17])
def test_choices_with_little_padding_are_all_multiples_that_pad_little(extent):
    (found,) = tiles.choices([Axis("i", extent)], little_padding=True).values()
    assert found == (tuple(s for s in tiles.multiples(extent) if tiles.pads_little(extent, s)) or (extent,))
