"""Elements that are read from places that positions say, or changed there: in pieces, each of a run of neighbours.

A piece comes in whole sectors, from where its source is found: tensors of some 100 kB stay beside each multiprocessor, others in
the cache of all of them, and what is larger comes from memory, of which a piece takes two sectors. (Gathers and sums of segments
of 16 million elements in pieces of 1 to 256, from and to tensors of 1 kB to 64 MB, on an H100.) Where positions choose within a
row only, neighbours share its sectors. (40 gathers from rows of 48 bytes to 2 MB, `benchmarks/xla_alone.py gathers`.)
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pallasfuse.device import Device
from pallasfuse.first_time import Recent
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.price.moves import computed_from, moves_as_maps
from pallasfuse.price.near_places import Slopes
from pallasfuse.resources.block import THREADS

_SECTOR, _FROM_MEMORY = 32, 64
"""The bytes that come for a piece of fewer, from the cache and from memory."""
NEAR_BYTES, _NEVER_NEAR_BYTES = 1 << 17, 3 << 17
"""A tensor of so many bytes is found beside each multiprocessor, and one of the second number never; of those between, a part.
(A million to four million pieces of one, two and four numbers from tensors of nine sizes between 32 kB and 4 MB on an H200.)"""
_ANYWHERE = 0.55
"""Reads of pieces reach this share of the bandwidth that the cache has for reads in order. (40 gathers on an H100 are within
0.75 to 1.25 with it; of 27 on an H200 those from more than 384 kB would be nearer with 0.7.)"""
_OF_A_BLOCK = 4 * 128
"""The elements that XLA's blocks of threads compute each, of those that they have in order."""
_CHANGED = 0.35
"""Changes of sectors in the cache reach this share of its bandwidth."""
_WORD, _WORDS_CHANGED = 4, 0.7
"""The bytes that are added to in one step. Of smaller elements each is compared and exchanged by itself: so many, in the time of
one sector."""
_ALONE_CLOCKS = 13.0
"""A warp that adds to a sector of 32 bytes waits at least so many clocks until the warp before it has added there."""
_ALIKE_CLOCKS = 3.2
"""A warp waits so many clocks for each number of the warp before it that meets others at one place. (A million numbers added to 1,
20, 100, 512 and 4096 places on an H200, drawn evenly: 1840, 247, 232, 162, 32 us, of which the last 13 are no waiting.)"""
_ROW_CLOCKS, _ROW_BYTES = 8.0, 512
"""A warp waits the first number of clocks for each second number of bytes of a piece that is longer than a sector. (65,536 rows of
4 to 256 numbers.)"""
SKEW = 1.5
"""Nobody knows which places updates name. They are taken to be `places * u**SKEW`, for numbers u that are even between 0 and 1. (Of
seven updates in whole programs, most of which count what the program computes, six waited 0.3 to 2.2 times as long as predicted,
and one 4 times.)"""
_WARP_BYTES = 128
"""The threads of a warp add words that are neighbours in what is added: so many bytes at once."""
_TRIED_CLOCKS, _TRIED_AGAIN_CLOCKS = 0.016, 5.4e-5
"""An exchange of an element that is smaller than a word takes so many clocks for each thread that has the same word in mind, and
for each pair of them: all but one try again. (Rows of 768 and 128 bfloat16, added to 1 to 128 rows on an H100: 0.2 ms to 1.4 s.)"""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of elements that lie anywhere in a tensor."""

    number: float
    bytes: float
    """The size of each."""
    source_bytes: float
    """The size of the tensor that they are in."""
    words: float = 0.0
    """The elements of each piece that are changed one by one; 0: all of a sector at once."""
    combined: bool = False
    """Is each made one with what is there, rather than put in its place?"""
    parts: float = 1.0
    """The equal parts of the tensor, one after the other, within each of which as many pieces lie: neighbours in one of them."""
    elements: float = 1.0
    """The elements of each."""


def cached_read(pieces: Pieces, device: Device) -> float:
    """Returns the bytes that the cache could bring, in order, in the time in which it brings these pieces.

    A block takes a sector once, however many of its pieces lie in there.
    """
    if pieces.source_bytes <= NEAR_BYTES or pieces.source_bytes / pieces.parts > device.found_bytes:
        return 0.0
    of_block = max(1.0, _OF_A_BLOCK / pieces.elements)
    of_part = min(of_block, pieces.number / pieces.parts)
    met = _places_met(of_part * math.ceil(pieces.bytes / _SECTOR), pieces.source_bytes / pieces.parts / _SECTOR)
    far = min(1.0, (pieces.source_bytes - NEAR_BYTES) / (_NEVER_NEAR_BYTES - NEAR_BYTES))
    return far * pieces.number / of_part * met * _SECTOR / _ANYWHERE


def _places_met(drawn: float, places: float) -> float:
    """Returns the number of different places among some that are drawn, each from all of them: at most as many as are drawn."""
    return places * -math.expm1(-drawn / places) if places else 0.0


def read_from_memory(pieces: Pieces, device: Device) -> float:
    """Returns the bytes that come from memory beyond those of the tensor, or of its elements that are wanted.

    Those of a part that is found in the cache come once.
    """
    if pieces.source_bytes <= device.found_bytes:
        return 0.0
    moved = pieces.number * _rounded(pieces.bytes, _FROM_MEMORY)
    part = pieces.source_bytes / pieces.parts
    if part <= device.found_bytes:
        moved = pieces.parts * _places_met(moved / pieces.parts / _FROM_MEMORY, part / _FROM_MEMORY) * _FROM_MEMORY
    return max(0.0, moved - min(pieces.number * pieces.bytes, pieces.source_bytes))


def cached_change(pieces: Pieces) -> float:
    """Returns the bytes that the cache could bring in the time in which these pieces are changed in it."""
    sectors = pieces.words / _WORDS_CHANGED if pieces.words else _rounded(pieces.bytes, _SECTOR) / _SECTOR
    return pieces.number * sectors * _SECTOR / _CHANGED


def changed_in_memory(pieces: Pieces, device: Device) -> float:
    """Returns the bytes that come from memory to be changed, and go back."""
    if pieces.source_bytes <= device.found_bytes:
        return 0.0
    return 2.0 * pieces.number * _rounded(pieces.bytes, _FROM_MEMORY)


def contended_us(pieces: Pieces, device: Device, skew: float = SKEW) -> float:
    """Returns the microseconds in which updates of the same sectors wait for each other. skew: of their places, as in `SKEW`."""
    if not pieces.combined or not pieces.source_bytes:
        return 0.0
    clock_us = 1e-3 / device.clock_ghz
    if not pieces.words:
        return clock_us * _met_clocks(pieces, device, skew)
    updates = pieces.number * pieces.words
    together = min(updates, float(THREADS * device.multiprocessors)) * _WORD / pieces.source_bytes
    clocks = _TRIED_CLOCKS * together + _TRIED_AGAIN_CLOCKS * together**2 if together > 1.0 else 0.0
    return clock_us * updates * clocks


def _met_clocks(pieces: Pieces, device: Device, skew: float) -> float:
    """Returns the clocks that warps wait at the sector, or the longer piece, that gets the most updates.

    A warp adds to a sector once, whatever it has for it. Parts of a tensor that come one after the other are added to together as
    far as threads are there for them.
    """
    number, source_bytes = pieces.number / pieces.parts, pieces.source_bytes / pieces.parts
    of_warp = max(1.0, _WARP_BYTES / pieces.bytes)
    sectors, places = max(1.0, source_bytes / max(pieces.bytes, _SECTOR)), max(1.0, source_bytes / pieces.bytes)
    share, alike = math.pow(sectors, -1.0 / skew), of_warp * math.pow(places, -1.0 / skew)
    met = -math.expm1(of_warp * math.log1p(-share)) if share < 1.0 else 1.0
    least = _ALONE_CLOCKS if pieces.bytes <= _SECTOR else _ROW_CLOCKS * max(1.0, pieces.bytes / _ROW_BYTES)
    at_once = THREADS * device.multiprocessors / max(1.0, number * pieces.elements)
    one_after_another = pieces.parts / min(pieces.parts, max(1.0, at_once))
    return one_after_another * number / of_warp * met * max(least, _ALIKE_CLOCKS * alike)


def _rounded(moved: float, unit: int) -> float:
    return math.ceil(moved / unit) * unit


@dataclass(frozen=True, slots=True)
class Chosen:
    """Pieces that are read along some axes, and the tensors that they are taken from, or that these are computed from."""

    tensors: frozenset[str]
    pieces: Pieces
    number: int
    """The place in the program of the operation that takes them."""


def _gathers(program: LoopProgram) -> dict[int, Pieces]:
    known = {d.name: d for d in program.definitions()}
    moved = {n.name: n for n in moves_as_maps(program).nests if isinstance(n, Nest)}
    given = {t.name for t in program.inputs}
    slopes = Slopes(moved, {n.name for n in program.nests if isinstance(n, External) and n.run})
    found: dict[int, Pieces] = {}
    for at, node in enumerate(program.nests):
        if not given.isdisjoint(node.reads):
            given.add(node.name)
        if not isinstance(node, External) or node.form != "selection" or node.name not in moved:
            continue
        if _chooses(node, given) and not slopes.follow_each_other(_positions(node)):
            found[at] = _pieces(node, volume(node.axes), known[node.operands[0]])
    return found


gathers_in = Recent(_gathers)
"""Returns the pieces that are read where positions say which, by the places in the program of the operations that take them. Not
where positions are computed from nothing that the program is given, or count up: such ones follow each other."""


def _pieces_read(program: LoopProgram) -> dict[tuple[Axis, ...], tuple[Chosen, ...]]:
    maps = {n.name: n for n in moves_as_maps(program).nests if isinstance(n, Nest)}
    found: dict[tuple[Axis, ...], tuple[Chosen, ...]] = {}
    for at, pieces in gathers_in(program).items():
        node = program.nests[at]
        assert isinstance(node, External)
        source = node.operands[0]
        one = Chosen(computed_from(source, maps), pieces, at)
        for axes in {e.indices for e in postorder(maps[node.name].body) if isinstance(e, Read) and e.tensor == source}:
            found[axes] = (*found.get(axes, ()), one)
    return found


pieces_read = Recent(_pieces_read)
"""Returns the pieces of `gathers_in` by the axes along which a gather's result is read as it is."""


def _chooses(node: External, given: Collection[str]) -> bool:
    """Are there positions that choose pieces, and do they depend on what the program is given?"""
    return node.run > 0 and _positions(node) in given


def _positions(node: External) -> str:
    """Returns the operand that says which pieces are chosen."""
    return node.operands[min(1, len(node.operands) - 1)]


def pieces_changed(update: External, known: Mapping[str, Tensor | Nest | External]) -> Pieces | None:
    """Returns the pieces that an update changes, if positions say where each of them is."""
    if not update.run or len(update.operands) < 2:
        return None
    target, changed = known[update.operands[0]], known[update.operands[-1]]
    pieces = _pieces(update, volume(changed.axes), target)
    if not update.combines:
        return pieces
    size = dtypes.itemsize_bytes(target.dtype)
    return replace(pieces, words=pieces.bytes / size if size < _WORD else 0.0, combined=True)


def _pieces(node: External, elements: int, source: Tensor | Nest | External) -> Pieces:
    size, all_of_them = dtypes.itemsize_bytes(source.dtype), volume(source.axes)
    parts = all_of_them / node.within if node.within else 1.0
    return Pieces(
        elements / node.run, float(node.run * size), float(all_of_them * size), parts=parts, elements=float(node.run)
    )
