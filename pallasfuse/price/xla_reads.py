"""What XLA's kernels on a GPU read, where operations that only move elements are computed inside of them.

A kernel reads no more of a tensor from memory than there is of it. What it takes several times, it takes from a cache: pieces that
positions choose, and the windows around its results.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis, innermost, volume
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.plain_work import Windows
from pallasfuse.price.moves import (
    computed_from,
    moved_in,
    moves_as_maps,
    parts_taken,
    stored_joins,
    takers_of,
    threads_of_joins,
)
from pallasfuse.price.scattered import Chosen, Pieces, gathers_in, pieces_read
from pallasfuse.price.split_reductions import split_reductions
from pallasfuse.price.xla_forms import LoopFusion, Place
from pallasfuse.price.xla_habits import LOADED, windows_operations

_CHOSEN = 20.0
"""An element of a gather's result takes so many operations to find where that is padded or joined in the loop that reads it; as it
is, neighbours share these. (32 joins of arrays and gathers on an H100, `benchmarks/xla_alone.py`.)"""


@dataclass(frozen=True, slots=True)
class Moves:
    """A program as a platform computes it: maps for its moves, nests for steps of reductions, and what is known of the moves."""

    program: LoopProgram
    places_of_their_own: Mapping[str, float] = field(default_factory=dict)
    """The operations whose elements come from other places than those that have the same position, with how often they need each
    element of what they read: several times where they reduce windows."""
    stored: frozenset[str] = frozenset()
    """Large joins, and maps of one, that are in memory."""
    threads: Mapping[str, float] = field(default_factory=dict)
    """The number of threads of each kernel that writes a join, or a map of one, by the name of what it writes."""
    joined: Set[Place] = frozenset()
    """The tensors that are joined, with the axes along which they are read: the largest one stands for all others as well."""
    pieces: Mapping[tuple[Axis, ...], tuple[Chosen, ...]] = field(default_factory=dict)
    """Those that are read where positions say which, by the axes along which their tensors are read."""
    windows: Mapping[Place, float] = field(default_factory=dict)
    """The elements around each result that are read for it, by the tensors that these are taken from, or computed from."""
    reduced: Mapping[int, float] = field(default_factory=dict)
    """The operations that it takes to reduce windows, by the numbers in the program of those that do."""
    gathers: Mapping[int, Pieces] = field(default_factory=dict)
    """The pieces that gathers take, by the numbers of these in the program."""

    def read_once(self, fusion: LoopFusion, sizes: Mapping[str, float]) -> None:
        """Lets a kernel read from memory what there is of each tensor, and the rest from a cache."""
        parts = parts_taken(tuple(fusion.bodies))
        if self.reduced:
            fusion.window_operations += sum(self.reduced.get(n, 0.0) for n in moved_in(tuple(fusion.bodies)))
        for place, of_part in fusion.reads.items():
            tensor, axes = place
            several = parts.get(place, 1)
            moved = of_part * several
            takers = takers_of(tuple(fusion.bodies), place)
            gathered = (takers or frozenset[int]()) & self.gathers.keys()
            shifted = several - len(gathered)
            if shifted > 1:
                # parts begin anywhere in a row: a thread loads each of its neighbouring elements by itself (a sum of 25 shifted
                # images for 32 results takes 379 us on an H200; 237 are predicted without)
                fusion.window_operations += LOADED * shifted * _results_beside(fusion, axes)
            window = self.windows.get(place, 1.0)
            size = moved if place in self.joined else sizes.get(tensor, moved)
            fusion.reads[place] = min(moved * window, size)
            along = [c for c in self.pieces.get(axes, ()) if tensor in c.tensors]
            chosen = [c.pieces for c in along if takers is None or c.number in takers]
            further = [] if chosen else [self.gathers[n] for n in sorted(gathered)]
            if chosen:
                fusion.pieces = (*fusion.pieces, replace(chosen[0], source_bytes=size))
            elif further:
                # what gathers take is padded or joined here: each takes its own pieces, for elements of its own
                fusion.window_operations += _CHOSEN * volume(axes) * len(further)
                fusion.pieces = (*fusion.pieces, *(replace(pieces, source_bytes=size) for pieces in further))
            else:
                fusion.cached_bytes += max(0.0, moved - fusion.reads[place])


def _results_beside(fusion: LoopFusion, axes: tuple[Axis, ...]) -> int:
    """Counts the results of maps whose neighbours are computed from neighbours of a tensor that is read along these axes."""
    last = innermost(axes)
    of_maps = (n.axes for n in fusion.roots if not n.is_reduction)
    return max((volume(own) for own in of_maps if last is not None and innermost(own) == last), default=0)


def _find(program: LoopProgram) -> Moves:
    changed = split_reductions(moves_as_maps(program))
    maps = {n.name: n for n in changed.nests if isinstance(n, Nest)}
    sizes = {d.name: volume(d.axes) for d in program.definitions()}
    own: dict[str, float] = {}
    joined: set[Place] = set()
    windows: dict[Place, float] = {}
    reduced: dict[int, float] = {}
    for number, node in enumerate(program.nests):
        if not isinstance(node, External) or node.name not in maps:
            continue
        places = [(e.tensor, e.indices) for e in postorder(maps[node.name].body) if isinstance(e, Read)]
        if node.form in ("selection", "join") or sizes[node.name] != max(sizes[t] for t in node.operands):
            own[node.name] = 1.0
        if node.form == "join":
            joined.update(places)
        if isinstance(node.work, Windows):
            window = float(node.work.window)
            own[node.name] = max(1.0, window * sizes[node.name] / sizes[node.operands[0]])
            sources = computed_from(node.operands[0], maps)
            windows |= {(s, axes): window for t, axes in places if t == node.operands[0] for s in sources}
            reduced[number] = windows_operations(sizes[node.name], window)
    return Moves(
        changed, own, stored_joins(program), threads_of_joins(program), joined, pieces_read(program),
        windows, reduced, gathers_in(program),
    )  # fmt: skip


moves_of = Recent(_find)
"""Returns a program as a platform computes it that fuses its moves and reduces in steps."""
