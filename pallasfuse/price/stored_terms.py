"""Values that XLA stores on a GPU before it reduces them, as few blocks would take longer to compute them.

A reduction of few results has few blocks, and what is computed inside of it has no more. XLA compares what a kernel of its own
for the values and one that reduces them take with what the reduction takes that computes them (its pass of priority fusion, as
in `xla_stored`). A block reads from memory, or from a cache, no more than a sector in each clock: so not only costly
operations are stored, but also cheap ones of several operands, of which each constant is one.
"""

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder
from pallasfuse.ir.loop_program import Nest
from pallasfuse.price.xla_habits import LONGEST_COLUMN, Habits
from pallasfuse.price.xla_products import as_read, without_casts
from pallasfuse.price.xla_reductions import is_short
from pallasfuse.price.xla_stored import CHEAP, LAUNCH_BYTES, bytes_in_time_of, cycles_of
from pallasfuse.price.xla_vectors import is_large
from pallasfuse.resources.block import WARP

_MULTIPROCESSORS, _LANES = 132, 128
"""XLA's H100: this many multiprocessors compute for so many threads each at once."""
_FEW_BLOCKS = 52.8
"""So many blocks read with the bandwidth of the memory: each a sector in a clock (1.98 GHz and 3.35 TB/s)."""
_CACHED = 20.0
"""The bandwidth of what is found beside the multiprocessors, of that of the memory."""
_COLUMN_THREADS, _ROW_THREADS, _MOST_THREADS, _OF_A_THREAD = 1024, 256, 1024, 16
"""Threads of a block that reduces columns, and of one that reduces rows: at most, where one row has more than the first number;
and the elements of a row that each takes."""


@dataclass(frozen=True, slots=True)
class _Each:
    """The cost of one of the values that are reduced."""

    cycles: float
    moved: float
    """The bytes of elements that are read for this value alone."""
    cached: float
    """Those that are found in a cache: of what is repeated along the values, of constants, too, but for whole exponents."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """The blocks of a kernel, and the threads of each."""

    blocks: float
    threads: float

    @property
    def computes(self) -> float:
        """The share of the device's operations that it can compute in a time."""
        return min(1.0, self.blocks / _MULTIPROCESSORS) * min(1.0, self.threads / _LANES)

    def bytes_in_time(self, each: _Each) -> float:
        """The bytes that come from memory in the time in which these blocks compute a value, and reduce it."""
        share = self.blocks / _FEW_BLOCKS
        moved = each.moved / min(1.0, share) + each.cached / min(_CACHED, share)
        return bytes_in_time_of(each.cycles / self.computes, moved)


_WHOLE = _Launch(math.inf, _MOST_THREADS)
"""A kernel of maps, of which there are threads for all elements."""


def stored_before(node: Nest, body: Expr, products: Set[str], habits: Habits) -> dict[Expr, Nest]:
    """Returns the nests of what XLA stores before a reduction, by the parts of its body that read them instead.

    They are all of the values that are reduced, or parts that are repeated along them. products: the tensors that a library makes:
    what is computed from these is part of the library's call.
    """
    if not habits.fuses_moves or not node.is_reduction or node.picks or is_short(node) or is_large(node, body, habits):
        return {}
    space = frozenset((*node.axes, *node.reduced))
    if isinstance(without_casts(body), Read) or body.axes != space or not products.isdisjoint(body.tensors):
        return {}
    return _stored(node, body, habits)


@lru_cache(1 << 12)
def _stored(node: Nest, body: Expr, habits: Habits) -> dict[Expr, Nest]:
    """The nests of `stored_before` for a reduction of computed values, none of which a library makes."""
    space, order = body.axes, as_read(body)
    stored = dtypes.itemsize_bytes(node.dtype)
    computing = _launch_of(node, order, _longest_element(body, space), habits)
    reducing = _launch_of(node, order, stored, habits)
    if computing is None or reducing is None:
        return {}
    one_launch = LAUNCH_BYTES / volume(order)
    own = _each(body, space)
    apart = _WHOLE.bytes_in_time(_Each(own.cycles - CHEAP, own.moved + stored, own.cached)) + one_launch
    apart += reducing.bytes_in_time(_Each(CHEAP, stored, 0.0))
    inside = computing.bytes_in_time(own)
    parts: list[Expr] = []
    for part in _repeated_parts(body, space):
        of_part = _each(part, part.axes)
        cached = own.cached - of_part.moved - of_part.cached + dtypes.itemsize_bytes(part.dtype)
        fewer = _Each(max(CHEAP, own.cycles - of_part.cycles + CHEAP), own.moved, max(0.0, cached))
        if (found := computing.bytes_in_time(fewer) + one_launch * (len(parts) + 1)) < inside:
            parts.append(part)
            own, inside = fewer, found
    if apart < inside:
        return {body: Nest(f"{node.name}.terms", order, body, node.dtype)}
    return {p: Nest(f"{node.name}.repeated{n}", as_read(p), p, p.dtype) for n, p in enumerate(parts)}


@lru_cache(1 << 12)
def _each(body: Expr, space: frozenset[Axis]) -> _Each:
    """Returns the costs of a value at each point of a space: all that it is computed from is computed at each, too."""
    cycles, moved, cached = CHEAP, 0.0, 0.0  # reducing it is an operation, too
    repeated: set[tuple[Expr, frozenset[Axis]]] = set()
    for node in _computed(body, space):
        if isinstance(node, Read) and node.axes == space:
            moved += dtypes.itemsize_bytes(node.dtype)
        elif isinstance(node, Apply):
            cycles += cycles_of(node)
            repeated |= {
                (a, node.axes) for a in _operands(node, space) if isinstance(a, Const | Read) and a.axes != space
            }
    for operand, _ in repeated:
        cached += dtypes.itemsize_bytes(operand.dtype)
    return _Each(cycles, moved, cached)


def _computed(body: Expr, space: frozenset[Axis]) -> Iterator[Expr]:
    """Yields the parts of a value, each once."""
    waiting, seen = [body], {body}
    while waiting:
        node = waiting.pop()
        yield node
        new = [a for a in _operands(node, space) if a not in seen] if isinstance(node, Apply) else []
        seen.update(new)
        waiting += dict.fromkeys(new)


def _operands(node: Apply, space: frozenset[Axis]) -> tuple[Expr, ...]:
    """The operands for XLA: whole exponents are part of a power, and what says where a
    slice, a join or a gather ends is none. A mask of fewer dimensions is taken for one of these."""
    if node.op == "integer_pow":
        return node.args[:1]
    return node.args[1:] if node.op == "select" and node.args[0].axes != space else node.args


def _repeated_parts(body: Expr, space: frozenset[Axis]) -> list[Expr]:
    """Lists the largest parts that are computed, of tensors, along some of the axes only."""
    found: dict[Expr, None] = {}
    for node in _computed(body, space):
        if isinstance(node, Apply) and node.axes == space:
            parts = [a for a in _operands(node, space) if isinstance(a, Apply) and a.axes != space and a.tensors]
            found |= dict.fromkeys(parts)
    return list(found)


def _longest_element(body: Expr, space: frozenset[Axis]) -> int:
    sizes = [
        dtypes.itemsize_bytes(x.dtype) for x in postorder(body) if isinstance(x, Read) and frozenset(x.indices) == space
    ]
    return max(sizes, default=dtypes.itemsize_bytes(body.dtype))


def _launch_of(node: Nest, order: Sequence[Axis], size: int, habits: Habits) -> _Launch | None:
    """Returns the blocks and threads of a reduction of elements that lie in an order; None where they are many in any case."""
    reduced = frozenset(node.reduced)
    long = [a for a in order if a.extent > 1]
    number, results = volume(reduced), volume(node.axes)
    inner = volume(tuple(takewhile(lambda a: a not in reduced, reversed(long))))
    if inner > 1:
        parts = 1 if number <= LONGEST_COLUMN else math.ceil(math.sqrt(number))
        columns = math.ceil(inner / (WARP * neighbours_of_a_thread(inner, size)))
        return _Launch(parts * (results // inner) * columns, _COLUMN_THREADS)
    if number > habits.longest_row:
        return None
    along = min(_MOST_THREADS, WARP * math.ceil(number / (_OF_A_THREAD * WARP)))
    rows = max(1, min(results, _ROW_THREADS // along))
    return _Launch(math.ceil(results / rows), rows * along)


def neighbours_of_a_thread(columns: int, size: int) -> int:
    """Counts the neighbouring columns that a thread reduces, of elements of at most `size` bytes (`GetVectorSizeForMlir`).

    That longer elements beside short ones make it two agrees with one measured update by sums; XLA's own rule was not read.
    """
    return next((n for n in (4 if size <= 2 else 2, 2) if columns % n == 0 and columns >= n * WARP), 1)


def is_shorter_inside(short: Nest, body: Expr, readers: Sequence[Sequence[tuple[Nest, Expr]]], habits: Habits) -> bool:
    """Do kernels that reduce a few elements for each of their points take less time than one that stores the results for them?

    readers: the nests of each such kernel, with their bodies.
    """
    space = frozenset((*short.axes, *short.reduced))
    results, number = volume(short.axes), volume(short.reduced)
    one = _each(body, space)

    def taken(points: int, launch: _Launch) -> float:
        moved = min(points, results) * one.moved
        again = points * (one.moved + one.cached) - moved
        return number * launch.bytes_in_time(_Each(points * one.cycles, moved, again))

    stored = (1 + len(readers)) * results * dtypes.itemsize_bytes(short.dtype)
    inside = 0.0
    for nests in readers:
        points = max(volume((*n.axes, *n.reduced)) for n, _ in nests)
        launches = [_launch_of_reader(n, b, habits) for n, b in nests]
        inside += taken(points, min(launches, key=lambda launch: launch.blocks))
    return inside <= taken(results, _WHOLE) + LAUNCH_BYTES + stored


def _launch_of_reader(nest: Nest, body: Expr, habits: Habits) -> _Launch:
    if not nest.is_reduction or is_short(nest) or not body.tensors:
        return _WHOLE
    return _launch_of(nest, as_read(body), _longest_element(body, body.axes), habits) or _WHOLE
