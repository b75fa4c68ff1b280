"""The work of blocks of warpgroups: the copy engine brings the operands of a long sum in slices, in every trip again."""

from collections.abc import Collection
from dataclasses import replace

from pallasfuse.ir.expr import Read
from pallasfuse.ir.tile_program import Load, TileProgram, every
from pallasfuse.price.block_work import BlockWork


def taken_in_slices(program: TileProgram, longest: int) -> frozenset[str]:
    """Returns the tensors that a kernel for warpgroups multiplies slice by slice: nothing of them stays until the next trip.

    longest: the most positions that a product sums over in a trip without slices.
    """
    operands = {e.tensor for s in program.long_products(longest) for e in (s.lhs, s.rhs) if isinstance(e, Read)}
    return frozenset(s.tensor for s in every(program.body) if isinstance(s, Load) and s.name in operands)


def in_every_trip(work: BlockWork, tensors: Collection[str]) -> BlockWork:
    """Returns the work of a block that loads some tensors in every trip, instead of outside of its loop."""
    accesses = [
        replace(a, times=a.times * max(1.0, work.trips), loop=1)
        if a.tensor in tensors and a.loop == 0 and not a.is_store
        else a
        for a in work.accesses
    ]
    return replace(work, accesses=accesses)
