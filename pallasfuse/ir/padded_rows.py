"""Inputs whose rows are made longer for a kernel by threads: beside a product, rows that begin anywhere cannot be read ahead.

Triton copies the tiles of later trips ahead, a word or more at a time. Where rows of half types or bytes have an odd number
of elements, it loads their elements one by one, waits for them in every trip, and computes all that it makes of them in the order
of these loads: attention with a bias of 1501 columns took 842 us on an H200, and with 1500 columns 83 us. Whoever runs such a
kernel makes the rows of these inputs longer first, by zeros: what lies past an end is read as zero anyway.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.dtypes import itemsize_bytes
from pallasfuse.ir.statements import Statement, sources_of
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Contract, Load, Loop, TileProgram

LEAST_COPY_BYTES = 4
"""Triton copies no less than a word ahead; the rest goes through registers."""
_LEAST_BESIDE_BYTES = 8
"""What no product is made of is not copied ahead, and all of the trip is computed in the order in which it is loaded. Where that is
one element at a time, of fewer bytes than these, threads exchange more sums: reductions of scores beside float32 of 1501 columns
took 486 us on an H200, and take 173 with the copy. Beside booleans of 1500 columns, four at a time, they take 42, not 84."""
_MULTIPLE_BYTES = 16
"""The bytes of which a longer row is a multiple: the most that a thread loads at once."""


def row_of(axes: tuple[Axis, ...]) -> int | None:
    """Returns the number of the dimension along which rows lie, the last one with several positions; None where there is none."""
    return max((n for n, a in enumerate(axes) if a.extent > 1), default=None)


def padded_extent(tensor: Tensor) -> int:
    """Returns the length of the rows of a tensor whose rows are made longer."""
    row = row_of(tensor.axes)
    assert row is not None
    multiple = max(1, _MULTIPLE_BYTES // itemsize_bytes(tensor.dtype))
    return -(-tensor.axes[row].extent // multiple) * multiple


def padded_rows(program: TileProgram) -> Mapping[str, int]:
    """Returns the inputs whose rows are made longer for a kernel, each with the length that they then have.

    program: as threads run it (`ir.unrolling`).
    """
    return _padded_rows(program)


def _found_rows(program: TileProgram) -> Mapping[str, int]:
    made = {t.name for r in program.ranges for t in r.found} | {x.result.name for x in program.lookups}
    own = {t.name: t for t in program.inputs if t.name not in made}
    sizes = dict(program.tiles)
    found: dict[str, int] = {}
    for load, tiles, feeds in _beside_products(program.body, sizes):
        tensor = own.get(load.tensor)
        row = row_of(load.indices)
        if tensor is None or row is None or load.tensor in found:
            continue
        axis, item = load.indices[row], itemsize_bytes(tensor.dtype)
        together = axis.extent & -axis.extent
        is_slow = together * item < LEAST_COPY_BYTES if feeds else together == 1 and item < _LEAST_BESIDE_BYTES
        if is_slow and tiles[axis] > 1 and (_has_rows(load.indices) or axis.extent % tiles[axis]):
            found[load.tensor] = padded_extent(tensor)
    return MappingProxyType(found)


_padded_rows = Recent(_found_rows)


def _has_rows(axes: tuple[Axis, ...]) -> bool:
    return sum(a.extent > 1 for a in axes) > 1


def _is_matrix_product(s: Contract, tiles: Mapping[Axis, int]) -> bool:
    """Does each side of a product have several rows of its own?"""
    over = frozenset(s.over)
    sides = s.lhs.axes - s.rhs.axes - over, s.rhs.axes - s.lhs.axes - over
    return all(any(tiles[a] > 1 for a in side) for side in sides)


def _beside_products(
    body: tuple[Statement, ...], tiles: Mapping[Axis, int]
) -> Iterator[tuple[Load, Mapping[Axis, int], bool]]:
    """Yields the loads of loops in whose trips there is a product: each with the tiles that it has there, and whether a product is
    made of it."""
    for s in body:
        if not isinstance(s, Loop):
            continue
        for segment in s.segments:
            own = {**tiles, s.axis: segment.tile}
            if any(isinstance(t, Contract) and _is_matrix_product(t, own) for t in segment.body):
                sources = sources_of(segment.body, Contract)
                yield from ((t, own, t.name in sources) for t in segment.body if isinstance(t, Load))
            yield from _beside_products(segment.body, own)
