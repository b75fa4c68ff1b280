"""Sizes of the tiles of an axis, and the number of tuples of them."""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from math import prod

from pallasfuse.ir.axes import Axis

UNIT = 16
"""Positions of the smallest tile along an axis of a matrix product on tensor cores (MCFuser, section 3.1)."""
MOST_PADDING = 0.05
"""Share of an axis by which tiles may exceed it, where its extent is no power of two (MCFuser, section 3.3, rule 3)."""

Choices = Mapping[str, tuple[int, ...]]
"""The sizes of tiles that may be chosen, by the name of the axis."""


def multiples(extent: int) -> tuple[int, ...]:
    """Returns every multiple of the unit up to the padded extent."""
    return tuple(UNIT * n for n in range(1, -(-extent // UNIT) + 1))


def padding(extent: int, size: int) -> float:
    """Returns by which share of the extent the tiles exceed it."""
    return (-(-extent // size) * size - extent) / extent


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def pads_little(extent: int, size: int) -> bool:
    """Returns whether tiles of a size fit an axis: exactly where its extent is a power of two, else with little padding.

    An axis that is shorter than the unit has one size, which is padded anyhow.
    """
    if extent < UNIT:
        return size == UNIT
    return padding(extent, size) < (MOST_PADDING if not is_power_of_two(extent) else 1e-9)


def choices(axes: Iterable[Axis], whole: Collection[str] = (), *, little_padding: bool = False) -> Choices:
    """Returns the sizes to choose from. whole: axes with tiles of one position, as those of a batch."""
    sizes = _padding_little if little_padding else multiples
    return {a.name: (1,) if a.name in whole else sizes(a.extent) or (a.extent,) for a in axes}


@lru_cache(1 << 10)
def _padding_little(extent: int) -> tuple[int, ...]:
    """Returns the multiples of the unit that pad an extent by little. A long axis has many: they are found once, and at once where
    only powers of two are among them."""
    sizes = multiples(extent)
    if is_power_of_two(extent):
        sizes = tuple(UNIT << n for n in range((extent // UNIT).bit_length())) or sizes
    return tuple(s for s in sizes if pads_little(extent, s))


def count(found: Choices) -> int:
    """Returns the number of tuples of sizes."""
    return prod(len(sizes) for sizes in found.values())
