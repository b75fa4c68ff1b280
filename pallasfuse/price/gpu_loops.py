"""Prices on a GPU of the kernels that XLA writes itself: maps and reductions over one space of points.

Found on an H100 with some 500 small programs of one or a few kernels each: chains and sums of elementwise operations, functions,
reductions, rows that are kept, windows (`benchmarks/xla_alone.py`). Two constants say that whole programs decided between them.
"""

import math
from collections.abc import Sequence
from itertools import pairwise, takewhile

from pallasfuse.device import Device
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Expr, Read, postorder
from pallasfuse.ir.loop_program import Nest
from pallasfuse.price.gpu_library import CACHED_SHARE, KEPT_OPERANDS, OVERLAP, STREAMED, launch, memory_us
from pallasfuse.price.operations import Operations, count, executed, new_instructions
from pallasfuse.price.scattered import cached_read, read_from_memory
from pallasfuse.price.stored_terms import neighbours_of_a_thread
from pallasfuse.price.terms import Price, Term
from pallasfuse.price.xla_forms import LoopFusion, Place
from pallasfuse.price.xla_habits import LOADED, LONGEST_COLUMN
from pallasfuse.price.xla_reductions import is_short
from pallasfuse.resources.block import WARP

_COLUMNS = 0.85
"""A kernel that reduces along an axis whose elements are apart reaches this share of the memory's bandwidth."""
_STORES_AND_REDUCES, _TURNS = 0.8, 0.7
"""Kernels that store maps beside what they reduce reach the first share of the memory's bandwidth, those that bring dimensions in
another order the second one. (120 kernels of 40 programs on an H100.)"""
_AT_ONCE = 2048
"""A multiprocessor runs so many threads at once."""
_VECTOR, _TURNED_VECTOR = 4, 8
"""A thread of a map computes so many elements where there are more elements than threads that run at once: in order, and of a tile
that is turned."""
_WAIT_CLOCKS = 4.0
"""An operation of a thread waits so many clocks for the result of the one before."""
_QUOTIENT, _SHIFT = 10.0, 2.0
"""Splitting the number of an element into two takes so many operations: by a division, and by a shift where the inner length is a
power of two. (Three small programs take about 20 for a division; whole programs are predicted best with this.)"""
_LONG_ROW, _CROWDED = 1 << 13, 1.6
"""A kernel has enough registers for rows up to this length; one that has too few computes so many times as long. (102 kernels of
softmax and of two norms on an H100 take 1 to 2.8 times; whole programs are predicted best with this.)"""
_POINT, _LANE = 5.0, 8.0
"""Lanes of a warp take so many operations for each element that they reduce, and for each step of the tree in which they combine
their parts. (180 pairwise reductions on an H100, `benchmarks/xla_alone.py`.)"""
_COLUMN_BYTES, _MANY_COLUMNS = 128, 1 << 11
"""A block that reduces columns reads so many bytes of each row; twice as many from so many columns on."""
_COLUMN_RATE = 1.7
"""A block that reduces columns reads so many times its multiprocessor's share of the cache's bandwidth, while others idle.

50 to 100 GB/s were measured on an H200, over 46 shapes."""


_COLUMN_ELEMENT, _FILLS = 7.0, 0.5
"""A block that reduces columns waits as long as so many operations take for each element of a row, and for this share of those that
compute the element: the others run meanwhile."""
_FAR_BYTES, _NEARER = 1 << 24, 0.4
"""A kernel that reads fewer bytes waits less for each of them, by a power of their share. (120 means and moments of images of 256
to 4,096 positions with 8 to 2,048 columns, `benchmarks/xla_alone.py pieces`, and 20 kernels of six programs, on an H100.)"""
_ROWS_AT_ONCE = 4 * WARP
"""A block that reduces columns of a product asks for so many rows of its matrix, and elements of its vector, at once: its 32 warps
for four each, as XLA writes out four trips of their loops (two kernels, compiled for an H100)."""
_ADJACENT, _APART = 0.75, 2.0
"""It waits so many times as long as memory takes: for rows that follow one another, and for rows with those of more than one other
block between them. (30 products of 34 and 68 MB, and three decoders, on an H200; `benchmarks/xla_alone.py vectors "one query"`.)"""


def operations_of(bodies: Sequence[Expr]) -> Operations:
    """Returns the operations of computing some bodies, each part once."""
    return count(bodies, lambda axes: float(math.prod(a.extent for a in axes)), set())


def _at_each_point(fusion: LoopFusion) -> Operations:
    """Returns the operations of a kernel without rows that are kept.

    A thread computes all that its elements come from, also what others compute too, as their elements come from it as well: it does
    so once for neighbours along the last axis that it has at once. What depends on no tensor costs as little as it may.
    """
    found, seen = Operations(), set[Expr]()
    for root, body in zip(fusion.roots, fusion.bodies, strict=True):
        space = frozenset((*root.axes, *root.reduced))
        last = frozenset((root.axes if fusion.reduces_columns or not root.reduced else root.reduced)[-1:])
        at_once = math.gcd(volume(last), _VECTOR)

        def points(axes: frozenset[Axis], space: frozenset[Axis] = space, last: frozenset[Axis] = last,
                   at_once: int = at_once) -> float:  # fmt: skip
            return volume(space | axes) / (1 if last <= axes else at_once)

        nodes = list(postorder(body))
        found += executed(new_instructions((n for n in nodes if n.tensors), seen), points)
        found += executed(new_instructions(nodes, seen), lambda axes: float(volume(axes)))
    return found


def computed(work: Operations, device: Device) -> tuple[Term, Term]:
    """Returns the terms of operations in a loop."""
    vector = Term("vector units", work.in_full, "op", 1e-3 * work.in_full / device.vector_gop_s)
    on_special = work.special + work.converted
    return vector, Term("special functions", on_special, "op", 1e-3 * on_special / device.special_gop_s)


def read_again(moved: float, device: Device) -> Term:
    """Returns the term of bytes that are read from the cache, not from memory."""
    return Term("cache sectors", moved, "B", 1e-3 * moved / device.cache_gb_s)


def loop_on_gpu(fusion: LoopFusion, device: Device) -> Price:
    """Returns the price of a kernel of maps and reductions."""
    own_work = operations_of(fusion.bodies) if fusion.is_row else _at_each_point(fusion)
    work = own_work + Operations(
        sum(map(_reducing, fusion.roots)) + fusion.window_operations + _loads(fusion) + _divided(fusion)
    )
    moved = fusion.read_bytes + fusion.written_bytes + sum(read_from_memory(p, device) for p in fusion.pieces)
    kept = KEPT_OPERANDS if fusion.is_product else CACHED_SHARE
    memory = Term("device memory", moved, "B", memory_us(moved, device, _efficiency(fusion), kept))
    if fusion.is_row and _crowded(fusion):
        work = work.times(_CROWDED)
    vector, special = computed(work, device)
    idle = Term("too few rows", _rows(fusion), "rows", _idle_us(fusion, device))
    column = Term("the longest column", _longest_column(fusion), "rows", _column_us(fusion, own_work, device))
    own = _threads(fusion, device)
    threads = max(fusion.threads, own)
    started_us = threads / (1e3 * device.multiprocessors * device.clock_ghz)  # one in each clock
    started = Term("threads that begin", threads, "", started_us)
    one = launch(device)
    terms = [memory, vector, special, idle, column]
    if own:
        each = work.in_full * math.ceil(threads / (_AT_ONCE * device.multiprocessors)) / threads
        terms.append(Term("operations of one thread", each, "op", 1e-3 * _WAIT_CLOCKS * each / device.clock_ghz))
    cached = fusion.cached_bytes + sum(cached_read(p, device) for p in fusion.pieces) + fusion.bytes_read_again
    if cached:
        terms.append(read_again(cached, device))
    busy = max(sum(t.us**OVERLAP for t in terms) ** (1 / OVERLAP), started_us)
    terms += [started, one]
    wait_us = device.latency_us if fusion.is_row else device.cache_latency_us if _shares_elements(fusion) else 0.0
    if wait_us:
        terms.append(Term("threads that wait for each other", 1, "kernel", wait_us))
    return Price(busy + one.us + wait_us, tuple(terms))


def _threads(fusion: LoopFusion, device: Device) -> float:
    """Counts the threads of a kernel of maps: one for each element, where these are no more than run at once, or for a few.

    0 where threads share the elements of what they reduce: these have loops.
    """
    if fusion.is_row or _shares_elements(fusion):
        return 0.0
    elements = max((volume(n.axes) for n in fusion.roots), default=0)
    if elements < _AT_ONCE * device.multiprocessors:
        return float(elements)
    return elements / (_TURNED_VECTOR if fusion.turns else math.gcd(elements, _VECTOR))


def _shares_elements(fusion: LoopFusion) -> bool:
    """Do several threads share the elements of what is reduced?"""
    return any(n.is_reduction and not is_short(n) for n in fusion.roots)


def _crowded(fusion: LoopFusion) -> bool:
    """Has a kernel that keeps rows more values in each thread than it has registers for?

    XLA gives a block one row that is long, and several rows of which the first elements are at odd places, or that have a part in
    common which is no row: a mask, a bias.
    """
    outer = frozenset(a for n in fusion.roots for a in n.axes if a.extent > 1).difference(fusion.reduced)
    length = math.prod(a.extent for a in fusion.reduced)
    if length > _LONG_ROW or any(
        length * dtypes.itemsize_bytes(n.dtype) % 16 for n in fusion.roots if not n.is_reduction
    ):
        return True
    parts = (n.axes for n in postorder(*fusion.bodies) if not n.axes.isdisjoint(fusion.reduced))
    return any(not outer <= axes and not outer.isdisjoint(axes) for axes in parts)


def _divided(fusion: LoopFusion) -> float:
    """Counts the operations that find the position of an element of a map along each axis.

    XLA counts elements through, and divides that number between any two axes that an operand does not have together.
    """
    maps = [n for n in fusion.roots if not n.is_reduction]
    read = {frozenset(axes) for _, axes in _loaded(fusion)} if maps else set()
    found: dict[tuple[Axis, ...], float] = {}
    for axes in {n.axes for n in maps}:
        long = [a for a in axes if a.extent > 1]
        for at, (outer, inner) in enumerate(pairwise(long), 1):
            if any((outer in r) != (inner in r) for r in read):
                within = volume(long[at:])
                found[axes] = found.get(axes, 0.0) + volume(axes) * (
                    _SHIFT if within & (within - 1) == 0 else _QUOTIENT
                )
    return sum(found.get(n.axes, 0.0) for n in maps)


def _loaded(fusion: LoopFusion) -> list[Place]:
    """Lists what a kernel loads, and along which axes."""
    made = fusion.inside.union(fusion.makes)
    return [place for place in fusion.reads if place[0] not in made]


def _loads(fusion: LoopFusion) -> float:
    """Counts the operations of finding and loading elements: for each of a tensor, at each of its places."""
    return LOADED * sum(float(volume(axes)) for _, axes in _loaded(fusion))


def _reducing(nest: Nest) -> float:
    """Counts the operations of reducing what a nest has computed: for its points, and for the results that lanes share."""
    if not nest.is_reduction:
        return 0.0
    points, lanes = float(volume((*nest.axes, *nest.reduced))), min(WARP, volume(nest.reduced))
    if is_short(nest):
        return points
    return _POINT * points + _LANE * volume(nest.axes) * lanes * math.log2(max(2, lanes))


def _efficiency(fusion: LoopFusion) -> float:
    """Returns the share of the memory's bandwidth that a loop reaches."""
    if fusion.is_row:
        return STREAMED
    if fusion.reduced and any(not n.is_reduction for n in fusion.roots if n.name not in fusion.inside):
        return _STORES_AND_REDUCES
    if fusion.reduces_columns and not fusion.is_product:
        return _COLUMNS
    return _TURNS if fusion.turns else STREAMED


def _rows(fusion: LoopFusion) -> float:
    reductions = [n for n in fusion.roots if n.is_reduction]
    return float(min((math.prod(a.extent for a in n.axes) for n in reductions), default=0))


def _idle_us(fusion: LoopFusion, device: Device) -> float:
    """Returns the time of the longest row, where one block reduces it: a multiprocessor's share of the bandwidth, ten times over.

    A longer row than a block takes is reduced in parts, by one more kernel, unless it is kept to be read again. (26 shapes on an
    H200, from 1 x 4096 to 64 x 1048576 and of all elements: bandwidth-bound, and 0.9 us for the second kernel.)
    """
    reductions = [n for n in fusion.roots if n.is_reduction]
    if not reductions:
        return 0.0
    rows = _rows(fusion)
    if rows >= device.multiprocessors:
        return 0.0
    shortest = min(math.prod(a.extent for a in n.reduced) for n in reductions)
    if shortest > device.longest_row and not fusion.is_row:
        return device.kernel_us
    per_row = fusion.read_bytes / max(rows, 1.0)
    return 1e-3 * per_row / (10 * device.memory_gb_s / device.multiprocessors)


def _longest_column(fusion: LoopFusion) -> float:
    """Counts the rows, which lie apart in memory, that one block reduces."""
    if not fusion.reduces_columns or fusion.is_library_product:
        return 0.0
    rows = math.prod(a.extent for a in fusion.reduced)
    return float(rows if rows <= LONGEST_COLUMN else math.ceil(math.sqrt(rows)))


def _column_us(fusion: LoopFusion, work: Operations, device: Device) -> float:
    """Returns the time of a block that reduces columns: it reads a run of every row, at the rate of one multiprocessor. One that
    multiplies each row with a number waits for both.

    work: of the whole kernel.
    """
    rows = _longest_column(fusion)
    sizes = {x.tensor: dtypes.itemsize_bytes(x.dtype) for x in postorder(*fusion.bodies) if isinstance(x, Read)}
    most = max((place for place in fusion.reads if place[0] in sizes), key=lambda p: fusion.reads[p], default=None)
    if most is None or not rows:
        return 0.0
    tensor, axes = most
    columns = math.prod(a.extent for a in takewhile(lambda a: a not in fusion.reduced, reversed(axes)))
    size = sizes[tensor]
    longest = max((sizes[t] for t, along in fusion.reads if t in sizes and fusion.reduced & {*along}), default=size)
    elements = min(columns, WARP * neighbours_of_a_thread(columns, longest))
    if fusion.is_product:
        return math.ceil(rows / _ROWS_AT_ONCE) * device.latency_us * (_APART if columns > 2 * elements else _ADJACENT)
    run = min(_COLUMN_BYTES if columns < _MANY_COLUMNS else 2 * _COLUMN_BYTES, columns * size)
    rate = _COLUMN_RATE * device.cache_gb_s / device.multiprocessors
    points = volume(frozenset(a for n in fusion.roots for a in (*n.axes, *n.reduced)))
    again = sum(not fusion.reduced.isdisjoint(axes) for _, axes in _loaded(fusion)) - 1
    each = work.in_full / max(1, points) + LOADED * max(0, again) + len(fusion.roots) - 1
    waiting = _COLUMN_ELEMENT * float(min(1.0, fusion.read_bytes / _FAR_BYTES) ** _NEARER)
    vector = (waiting + _FILLS * each) * elements * device.multiprocessors / device.vector_gop_s
    return 1e-3 * rows * max(run / rate, vector)
