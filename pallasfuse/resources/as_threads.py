"""Tile programs as threads run them: with short axes written out, late folds, and the stages that their copies are worth.

Triton copies what later trips multiply ahead, a word or more at a time. Float32 that a product reads as it is, in pieces shorter
than a thread moves at once, is better loaded by threads, with one stage. (On an H200, with two or three stages and with one, in
microseconds: attention of heads of 33 elements 839 and 163, of 34 160 and 123; products of rows of 1081 111 and 9, of 4097 154
and 52, of 1001 30 and 6; products of 32 rows took up to 1.3 times as long with one. Half types gain from copies of a word, and
what is added to scores must come ahead: with float32 of 1543 columns 119 and 520.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.dtypes import itemsize_bytes
from pallasfuse.ir.expr import Read
from pallasfuse.ir.statements import Statement, expressions, sources_of
from pallasfuse.ir.tile_program import Contract, Load, TileProgram
from pallasfuse.ir.unrolling import Unrolled, switched
from pallasfuse.resources.padded_rows import bodies_with_products, padded_rows, row_of
from pallasfuse.resources.thread_layouts import VECTOR_BYTES, run_of

_LEAST_BYTES = 4
"""The bytes of the smallest elements that should not be copied in short pieces."""


def as_threads_run_it(program: TileProgram) -> Unrolled:
    """Returns the program with its short axes written out and its late folds, as its switches say, and no stages too many."""
    return _as_threads_run_it(program)


def _with_its_stages(program: TileProgram) -> Unrolled:
    own = switched(program)
    if own.program.stages > 1 and _copies_short_pieces(own.program):
        return replace(own, program=replace(own.program, stages=1))
    return own


_as_threads_run_it = Recent(_with_its_stages)


def _copies_short_pieces(program: TileProgram) -> bool:
    """Would trips copy operands of later products ahead in pieces shorter than a thread moves at once, and nothing else?"""
    padded, looked_up = padded_rows(program), {x.result.name for x in program.lookups}
    found = False
    for body, tiles in bodies_with_products(program.body, dict(program.tiles)):
        operands, sources = _operands(body), sources_of(body, Contract)
        for load in (s for s in body if isinstance(s, Load) and sum(tiles[a] > 1 for a in s.indices) > 1):
            if load.name in sources and (load.name not in operands or load.tensor in looked_up):
                return False
            found |= load.name in operands and _is_short(load, tiles, is_padded=load.tensor in padded)
    return found


def _operands(body: Sequence[Statement]) -> frozenset[str]:
    """Names what products read as it is, in its own type, and nothing else reads."""
    multiplied: set[str] = set()
    others: set[str] = set()
    for s in body:
        for root in expressions(s):
            as_it_is = isinstance(s, Contract) and isinstance(root, Read)
            (multiplied if as_it_is else others).update(root.tensors)
    return frozenset(multiplied - others)


def _is_short(load: Load, tiles: Mapping[Axis, int], *, is_padded: bool) -> bool:
    """Are the pieces of a tile short whose rows lie in memory one after the other?"""
    row, size = row_of(load.indices), itemsize_bytes(load.dtype)
    if row is None or tiles[load.indices[row]] == 1 or size < _LEAST_BYTES:
        return False
    return size * run_of(load.indices, tiles.__getitem__, is_padded=is_padded) < VECTOR_BYTES
