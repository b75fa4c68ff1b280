"""Tile programs as threads run them: with short axes written out, late folds, and the stages that their copies are worth.

Triton copies what later trips multiply ahead, a word or more at a time. Float32 that a product reads as it is, in pieces shorter
than a thread moves at once, is better loaded by threads, with one stage. (On an H200, with two or three stages and with one, in
microseconds: attention of heads of 33 elements 839 and 163, of 34 160 and 123; products of rows of 1081 111 and 9, of 4097 154
and 52, of 1001 30 and 6; products of 32 rows took up to 1.3 times as long with one. Half types gain from copies of a word, and
what is added to scores must come ahead: with float32 of 1543 columns 119 and 520.)
"""

from collections.abc import Mapping
from dataclasses import replace

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.dtypes import itemsize_bytes
from pallasfuse.ir.tile_program import Load, TileProgram
from pallasfuse.ir.unrolling import Unrolled, written_out
from pallasfuse.resources.padded_rows import loads_beside_products, padded_rows
from pallasfuse.resources.thread_layouts import VECTOR_BYTES, run_of

_LEAST_BYTES = 4
"""The bytes of the smallest elements that should not be copied in short pieces."""


def as_threads_run_it(program: TileProgram) -> Unrolled:
    """Returns the program with its short axes written out and its late folds, as its switches say, and no stages too many."""
    return _as_threads_run_it(program)


def _found(program: TileProgram) -> Unrolled:
    own = written_out(program)
    if own.program.stages > 1 and _has_short_copies(own.program):
        return replace(own, program=replace(own.program, stages=1))
    return own


_as_threads_run_it = Recent(_found)


def _has_short_copies(program: TileProgram) -> bool:
    """Would a trip copy an operand of a later product in pieces shorter than a thread moves at once?"""
    padded = padded_rows(program)
    operands = (
        b for b in loads_beside_products(program.body, dict(program.tiles)) if b.as_it_is and not b.is_computed_with
    )
    return any(_is_short(b.load, b.tiles, is_padded=b.load.tensor in padded) for b in operands)


def _is_short(load: Load, tiles: Mapping[Axis, int], *, is_padded: bool) -> bool:
    size = itemsize_bytes(load.dtype)
    if size < _LEAST_BYTES or sum(tiles[a] > 1 for a in load.indices) < 2:
        return False
    return size * run_of(load.indices, tiles.__getitem__, is_padded=is_padded) < VECTOR_BYTES
