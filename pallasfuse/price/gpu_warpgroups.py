"""The work of blocks of warpgroups: the copy engine brings the operands of a long sum in slices, in every trip again."""

import math
from dataclasses import replace

from pallasfuse.ir.expr import Read
from pallasfuse.ir.tile_program import Contract, Load, Loop, TileProgram
from pallasfuse.price.block_work import BlockWork


def in_slices(program: TileProgram, work: BlockWork, longest: int) -> BlockWork:
    """Returns the work of a block in which no operand stays that is summed over more than `longest` positions in a trip.

    What stands before the loop is then loaded in each trip, with the other operand.
    """
    loops = [s for s in program.body if isinstance(s, Loop)]
    products = [s for loop in loops for s in loop.segments[0].body if isinstance(s, Contract)]
    long = [s for s in products if math.prod(program.tile(a) for a in s.over) > longest]
    sliced = {e.tensor for s in long for e in (s.lhs, s.rhs) if isinstance(e, Read)}
    again = {s.tensor for s in program.body if isinstance(s, Load) and s.name in sliced}
    if not again:
        return work
    accesses = [
        replace(a, times=a.times * max(1.0, work.trips), loop=1) if a.tensor in again and a.loop == 0 else a
        for a in work.accesses
    ]
    return replace(work, accesses=accesses)
