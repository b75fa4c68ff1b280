"""Inputs whose rows are made longer for a kernel by threads: beside a product, rows that begin anywhere cannot be read ahead.

Triton copies the tiles of later trips ahead, a word or more at a time. Where rows of half types have an odd number of elements, it
loads their elements one by one, waits for them in every trip, and computes all that it makes of them in the order of these loads:
scores beside an array of 1501 columns and their product with values took 842 us on an H200, and with 1500 columns 83 us. Whoever
runs such a kernel makes the rows of these inputs longer first, by zeros: what lies past an end is read as zero anyway.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.dtypes import itemsize_bytes
from pallasfuse.ir.statements import Statement, operands_of_products, sources_of
from pallasfuse.ir.tile_program import Contract, Load, Loop, TileProgram
from pallasfuse.resources.thread_layouts import VECTOR_BYTES

_PADDED_BYTES, _PADDED_BYTES_BESIDE = (2,), (2, 4)
"""The bytes of the elements of rows that are made longer, where a product is made of what is loaded, and where none is.

The latter is never copied ahead, and all of the trip is computed in the order of the load: one element at a time, threads
exchange more sums (reductions of scores beside float32 of 1501 columns took 486 us on an H200, and take 173 with the copy). Bytes
are not made longer: masks of 197 columns took 11 us on an H100, and 17 on an H200 with the copy."""


def row_of(axes: tuple[Axis, ...]) -> int | None:
    """Returns the number of the dimension along which rows lie, the last one with several positions; None where there is none."""
    return max((n for n, a in enumerate(axes) if a.extent > 1), default=None)


def padded_rows(program: TileProgram) -> Mapping[str, int]:
    """Returns the inputs whose rows are made longer for a kernel, each with the length that they then have.

    program: as threads run it (`ir.unrolling`).
    """
    return _padded_rows(program)


def _found_rows(program: TileProgram) -> Mapping[str, int]:
    made = {t.name for r in program.ranges for t in r.found} | {x.result.name for x in program.lookups}
    given = {t.name: t for t in program.inputs if t.name not in made}
    found: dict[str, int] = {}
    for load, tiles, feeds in _beside_products(program.body, dict(program.tiles)):
        tensor = given.get(load.tensor)
        row = row_of(load.indices)
        if tensor is None or row is None or sum(tiles[a] > 1 for a in load.indices) < 2:
            continue
        axis, size = load.indices[row], itemsize_bytes(tensor.dtype)
        one_by_one = tiles[axis] > 1 and axis.extent % 2 == 1
        if one_by_one and size in (_PADDED_BYTES if feeds else _PADDED_BYTES_BESIDE):
            multiple = VECTOR_BYTES // size
            found[load.tensor] = -(-axis.extent // multiple) * multiple
    return MappingProxyType(found)


_padded_rows = Recent(_found_rows)


def bodies_with_products(
    body: tuple[Statement, ...], tiles: Mapping[Axis, int]
) -> Iterator[tuple[tuple[Statement, ...], Mapping[Axis, int]]]:
    """Yields the bodies of loops in which there is a product, with the tiles that they have there."""
    for s in body:
        if not isinstance(s, Loop):
            continue
        for segment in s.segments:
            own = {**tiles, s.axis: segment.tile}
            if any(isinstance(t, Contract) and _has_two_sides(t, own) for t in segment.body):
                yield segment.body, own
            yield from bodies_with_products(segment.body, own)


def _beside_products(
    body: tuple[Statement, ...], tiles: Mapping[Axis, int]
) -> Iterator[tuple[Load, Mapping[Axis, int], bool]]:
    """Yields the loads of loops in whose trips there is a product, but for what a product reads as it is.

    Each with the tiles that it has there, and whether a product is made of it. A product that reads rows of odd elements takes less
    than its copies (64 x 1001 by 1001 x 1001: 5.5 us on an H100, and 7.9 on an H200 with them).
    """
    for inside, own in bodies_with_products(body, tiles):
        sources, as_they_are = sources_of(inside, Contract), operands_of_products(inside)
        loads = (t for t in inside if isinstance(t, Load) and t.name not in as_they_are)
        yield from ((t, own, t.name in sources) for t in loads)


def _has_two_sides(s: Contract, tiles: Mapping[Axis, int]) -> bool:
    """Does each side of a product have several rows of its own in a tile, as matrix units want it?"""
    over = frozenset(s.over)
    sides = s.lhs.axes - s.rhs.axes - over, s.rhs.axes - s.lhs.axes - over
    return all(any(tiles[a] > 1 for a in side) for side in sides)
