"""The work of blocks of warpgroups: the copy engine brings the operands of a long sum in slices, in every trip again."""

import math
from collections.abc import Collection
from dataclasses import replace

from pallasfuse.ir.expr import Read
from pallasfuse.ir.tile_program import Contract, Load, Loop, TileProgram, every
from pallasfuse.price.block_work import BlockWork


def taken_in_slices(program: TileProgram, longest: int) -> frozenset[str]:
    """Returns the tensors that a kernel for warpgroups multiplies slice by slice: none of it stays until the next trip.

    longest: the most positions that a product sums over without.
    """
    loops = [s for s in program.body if isinstance(s, Loop)]
    products = [
        s for loop in loops for s in loop.segments[0].body if isinstance(s, Contract) and loop.axis not in s.over
    ]
    long = [s for s in products if math.prod(program.tile(a) for a in s.over) > longest]
    operands = {e.tensor for s in long for e in (s.lhs, s.rhs) if isinstance(e, Read)}
    return frozenset(s.tensor for s in every(program.body) if isinstance(s, Load) and s.name in operands)


def in_every_trip(work: BlockWork, tensors: Collection[str]) -> BlockWork:
    """Returns the work of a block that loads some tensors in every trip which are loaded before its loop otherwise."""
    accesses = [
        replace(a, times=a.times * max(1.0, work.trips), loop=1) if a.tensor in tensors and a.loop == 0 else a
        for a in work.accesses
    ]
    return replace(work, accesses=accesses)
