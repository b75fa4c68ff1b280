"""`Lookup`: a tensor that a kernel reads from another one, by a table of indices, where XLA would store it first.

Pages of a cache are the case in mind: `pages[table]`, whose pages are then joined to one long axis.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Const
from pallasfuse.ir.tensors import Tensor

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Says that `result[..] = source[.., table[..], ..]`: along `rows` the source is read at the table's entry.

    The rows come in blocks of `block`: an entry is the number of a block, `along` counts the rows of all blocks that the table
    names, one block after the other, and `blocks` counts these blocks. Where `block` is one there is no such axis: the table
    varies along axes of the result. Entries that are out of range mean the first or the last block, or the number `fill` in all of
    the block, as in the gather that this stands for.
    """

    result: Tensor
    source: Tensor
    """Over axes of the result, and `rows` once."""
    table: Tensor
    """Integers over axes of the result; where there are blocks, over `blocks` once instead of `along`."""
    rows: Axis
    block: int = 1
    along: Axis | None = None
    blocks: Axis | None = None
    fill: Const | None = None

    @property
    def is_slice(self) -> bool:
        """Is the table one number, and the result a part of the source that lies in one piece?"""
        first = next((a for a in self.source.axes if a.extent != 1), self.rows)
        return not self.table.axes and first == self.rows

    @property
    def count(self) -> int:
        """The number of blocks that the source has."""
        return self.rows.extent // self.block

    def __str__(self) -> str:
        entry = f"{self.table.name}[{', '.join(a.name for a in self.table.axes)}]"
        if self.along is not None and self.blocks is not None:
            entry = entry.replace(self.blocks.name, f"{self.along} / {self.block}")
            entry += f" * {self.block} + {self.along} % {self.block}"
        inside = ", ".join(entry if a == self.rows else a.name for a in self.source.axes)
        otherwise = "" if self.fill is None else f", {self.fill} where out of range"
        return f"{self.result.name}[{', '.join(a.name for a in self.result.axes)}] = {self.source.name}[{inside}]{otherwise}"


def verify(lookup: Lookup) -> Lookup:
    """Checks that axes and extents fit; returns the lookup.

    Raises:
      InvalidProgramError: they do not.
    """
    over = lookup.result.axes
    outside = {lookup.rows} | ({lookup.blocks} if lookup.blocks is not None else set())
    known = set(over) | {lookup.rows}
    read = {a for a in (*lookup.source.axes, *lookup.table.axes) if a not in outside}
    in_blocks = lookup.along is not None and lookup.blocks is not None
    fits = (
        all(len(set(t.axes)) == len(t.axes) for t in (lookup.result, lookup.source, lookup.table))
        and set(lookup.source.axes) <= known
        and lookup.rows in lookup.source.axes
        and read | ({lookup.along} if lookup.along is not None else set()) == set(over)
        and outside.isdisjoint(over)
        and lookup.rows.extent % lookup.block == 0
        and lookup.source.dtype == lookup.result.dtype
        and (lookup.fill is None or lookup.fill.dtype == lookup.result.dtype)
        and (lookup.block == 1) == (lookup.along is None) == (lookup.blocks is None)
    )
    if in_blocks:
        assert lookup.along is not None and lookup.blocks is not None
        fits = (
            fits and lookup.blocks in lookup.table.axes and lookup.along.extent == lookup.blocks.extent * lookup.block
        )
        fits = fits and lookup.along not in (*lookup.source.axes, *lookup.table.axes)
    else:
        fits = fits and set(lookup.table.axes) <= set(over)
    if not fits:
        raise InvalidProgramError(f"{lookup} does not fit together")
    return lookup


def looked_up(lookup: Lookup, source: Array, table: Array) -> Array:
    """The tensor that a lookup stands for, with one dimension per axis; `source` and `table` have one for each of theirs."""
    over = lookup.result.axes

    def along(axis: Axis, positions: Array) -> Array:
        return positions.reshape([-1 if a == axis else 1 for a in over])

    def position(axis: Axis) -> Array:
        return along(axis, np.arange(axis.extent))

    if lookup.along is not None and lookup.blocks is not None:
        place = along(lookup.along, np.arange(lookup.along.extent) // lookup.block)
        inside = along(lookup.along, np.arange(lookup.along.extent) % lookup.block)
    else:
        place = inside = np.zeros([1] * len(over), np.int64)
    entry = table[tuple(place if a == lookup.blocks else position(a) for a in lookup.table.axes)]
    row = np.clip(entry, 0, lookup.count - 1).astype(np.int64) * lookup.block + inside
    found = source[tuple(row if a == lookup.rows else position(a) for a in lookup.source.axes)]
    if lookup.fill is not None:
        found = np.where((entry >= 0) & (entry < lookup.count), found, lookup.fill.value)
    return np.broadcast_to(found, [a.extent for a in over])
