"""The matrix products of a block of a tile program: their sizes, and how their operands lie in memory."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Expr, Read, postorder
from pallasfuse.ir.statements import through_casts
from pallasfuse.ir.tile_program import Contract
from pallasfuse.resources.thread_layouts import VECTOR_BYTES


@dataclass(frozen=True, slots=True)
class Loaded:
    """The values that a block has loaded before a product."""

    layouts: Mapping[str, tuple[Axis, ...]]
    """Their axes, in the order of memory."""
    in_trip: frozenset[str]
    """Those that each trip of the product's loop loads."""
    from_padded: Set[str] = frozenset()
    """Those of inputs whose rows are made longer before."""
    kept: tuple[bool, bool] = (False, False)
    """Says for each side of the product whether threads keep it (`Product.kept`)."""
    begun: float = 1.0
    """The number of times that a block begins the product's loop."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of tiles: rows x summed by summed x columns, `times` for each block."""

    rows: int
    columns: int
    summed: int
    batch: int
    lhs_dtype: str
    precise: bool
    """Float32 operands that keep all their bits."""
    times: float
    in_columns: bool = False
    """The left operand is loaded with the contracted axes before its own."""
    rhs_in_rows: bool = False
    """The right operand is loaded with the contracted axes before its own."""
    rhs_turned: bool = False
    """The right operand, or what it is computed from, is loaded with its own axes before the contracted ones."""
    computes_rhs: bool = False
    """The right operand is more than what was loaded."""
    by_threads: float = 0.0
    """Elements of operands that have several axes of their own and are loaded in each trip. For a product these axes are one:
    threads bring the elements into shared memory, where a copy would do for others."""
    split: float = 0.0
    """Elements of the result, for each side that has several axes of its own: the product has one."""
    row_bytes: int = VECTOR_BYTES
    """The rows of all operands begin at multiples of so many bytes in memory: of 16, or of fewer."""
    kept: tuple[bool, bool] = (False, False)
    """Says for each side whether threads keep it as a product takes it: it is known before the loop begins, and multiplied with
    what trips hand on. (Kernels whose other side is loaded in each trip were measured and fitted without that.)"""
    begun: float = 1.0
    """The number of times that a block begins the product's loop, and brings the sides that it keeps."""
    exchanged: bool = False
    """The result is reduced beside what was loaded, and no product is made of it: Triton reduces in the order of the load, to which
    threads bring the result through shared memory."""

    @property
    def brought(self) -> tuple[float, float]:
        """Returns how often threads bring the left side to the product, and how often the right one."""
        left, right = (self.begun if kept else self.times for kept in self.kept)
        return left, right

    @property
    def flops(self) -> float:
        """The multiplications and additions for each block."""
        return 2.0 * self.rows * self.columns * self.summed * self.batch * self.times


def is_precise(precision: str | None) -> bool:
    """Do products keep all bits of float32 operands? A sum that the user wrote as one does (None)."""
    return precision is None or precision.lower() in ("highest", "float32")


def product_of(s: Contract, tiles: Mapping[Axis, int], times: float, loaded: Loaded) -> Product:
    """Returns the product of a statement, which runs `times` for each block."""

    def extent(axes: frozenset[Axis]) -> int:
        return math.prod([tiles[a] for a in axes])

    layouts, over = loaded.layouts, frozenset(s.over)
    left, right = s.lhs.axes - over, s.rhs.axes - over
    sides = [(s.lhs, left - right), (s.rhs, right - left)]
    wide = [(operand, own) for operand, own in sides if sum(tiles[a] > 1 for a in own) > 1]
    return Product(
        extent(left - right), extent(right - left), extent(over), extent(left & right), s.rhs.dtype,
        is_precise(s.precision), times, _is_contracted_first(s.lhs, s.rhs, over, layouts),
        _is_contracted_first(s.rhs, s.lhs, over, layouts), _is_turned(s.rhs, s.lhs, over, layouts),
        not (isinstance(s.rhs, Read) and s.rhs.tensor in layouts),
        sum(extent(own | over) for operand, own in wide if isinstance(operand, Read) and operand.tensor in loaded.in_trip),
        len(wide) * extent(left | right),
        min(
            (
                _row_bytes(r, layouts)
                for side, kept in zip((s.lhs, s.rhs), loaded.kept, strict=True) if not kept
                for r in postorder(side)
                if isinstance(r, Read) and r.tensor not in loaded.from_padded
            ),
            default=VECTOR_BYTES,
        ),
        kept=loaded.kept, begun=loaded.begun,
    )  # fmt: skip


def _row_bytes(load: Read, layouts: Mapping[str, tuple[Axis, ...]]) -> int:
    """Returns the bytes, at most those that a thread moves at once, at multiples of which the rows of what is loaded begin."""
    axes = [a for a in layouts.get(load.tensor, ()) if a.extent > 1]
    return (
        math.gcd(axes[-1].extent * dtypes.itemsize_bytes(load.dtype), VECTOR_BYTES) if len(axes) > 1 else VECTOR_BYTES
    )


def _is_contracted_first(
    side: Expr, other: Expr, over: frozenset[Axis], layouts: Mapping[str, tuple[Axis, ...]]
) -> bool:
    """Does a side of a product lie in memory with the contracted axes before its own?"""
    for read in through_casts(side):
        own = [a not in over for a in layouts.get(read.tensor, ()) if a not in other.axes or a in over]
        if own and own[-1] and not own[0]:
            return True
    return False


def _is_turned(side: Expr, other: Expr, over: frozenset[Axis], layouts: Mapping[str, tuple[Axis, ...]]) -> bool:
    """Does a side of a product, or most of what it is computed from, lie in memory with its own axes before the contracted ones?"""
    reads = [n for n in postorder(side) if isinstance(n, Read) and n.tensor in layouts]
    largest = max(reads, key=lambda n: volume(n.indices), default=None)
    if largest is None:
        return False
    of = [a in over for a in layouts[largest.tensor] if a.extent > 1 and (a in over or a not in other.axes)]
    return bool(of) and of[-1] and not of[0]
