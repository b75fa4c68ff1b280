"""Loops whose state stays in one kernel: what a trip hands on lies in registers, and no trip is a kernel of its own.

The body of such a loop is a loop program. Axes that no trip mixes are the grid; along all others a block holds whole values. So
blocks need nothing from each other, and each runs all trips of its part.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pallasfuse.errors import Refusal
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Expr, Read, const, convert, postorder, read, reads_in
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.statements import ZERO, Carry, Let, Load, Loop, Segment, Store
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import TileProgram, verify
from pallasfuse.resources.block import WARP
from pallasfuse.resources.triton_view import WARP_ROWS, for_matrix_units
from pallasfuse.targets import Target, power_of_two
from pallasfuse.tiling.arithmetic import rewrite_for
from pallasfuse.tiling.products import narrow, split_product
from pallasfuse.tiling.values import Scope, Values


@dataclass(frozen=True)
class Recurrence:
    """A recurrence is a loop of known length in which a trip reads what the one before it has left."""

    name: str
    body: LoopProgram
    time: Axis
    carried: tuple[tuple[str, str], ...]
    """The tensors that a trip reads from the one before, each with the name of the value that takes its place in the next."""
    sliced: tuple[str, ...]
    """The tensors of which each trip reads its own slice."""
    stacked: tuple[str, ...]
    """The values of which each trip leaves a slice."""
    backwards: bool
    """The last slices come first."""

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """The tensors that every trip reads as they are."""
        changing = {name for name, _ in self.carried} | set(self.sliced)
        return tuple(t for t in self.body.inputs if t.name not in changing)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of all that a trip reads and computes."""
        of_nests = (a for n in _nests(self.body) for a in (*n.axes, *n.reduced))
        return tuple(dict.fromkeys((*of_nests, *(a for t in self.body.inputs for a in t.axes))))

    def largest(self, tile: Callable[[Axis], int], *, of_threads: bool = False) -> int:
        """The most elements that a value has in a block, whose size along an axis `tile` gives.

        A product of matrices that are large enough for matrix units has no value for each of its terms. of_threads: leave out what
        threads do not hold (`multiplied`).
        """
        nests, hidden = list(_nests(self.body)), self.multiplied(tile) if of_threads else frozenset[str]()
        read = {name for n in nests for name in n.reads} - hidden
        spaces = [t.axes for t in self.body.inputs if t.name in read]
        for n in nests:
            sides = _sides_of_units(n, tile)
            spaces += [tuple(s.axes) for s in sides if not s.tensors <= hidden] if sides else [(*n.axes, *n.reduced)]
            spaces.append(n.axes)
        return max((math.prod(map(tile, space)) for space in spaces), default=1)

    def multiplied(self, tile: Callable[[Axis], int]) -> frozenset[str]:
        """The constants that only matrix units read: they find them in shared memory, trip after trip."""
        found, others = set[str](), set[str]()
        for n in _nests(self.body):
            as_they_are = {x.tensor for s in _sides_of_units(n, tile) if isinstance(x := narrow(s), Read)}
            found |= as_they_are
            others |= n.reads - as_they_are
        return frozenset(found & {t.name for t in self.constants} - others)


def _sides_of_units(nest: Nest, tile: Callable[[Axis], int]) -> tuple[Expr, ...]:
    """Returns the sides of a product that is large enough for matrix units; nothing for anything else. tile: as `largest`."""
    over, single = frozenset(nest.reduced), frozenset(a for a in nest.axes if tile(a) == 1)
    sides = split_product(nest.body, over, single) if nest.reducer == SUM else None
    if sides is None:
        return ()
    left, right = sides.lhs, sides.rhs
    is_large = for_matrix_units(left.axes, right.axes, over, lambda axes: math.prod(map(tile, axes)))
    return (left, right) if is_large else ()


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout spreads a recurrence over a device: it gives the elements of a block along each grid axis, and its warps."""

    grid: tuple[tuple[Axis, int], ...]
    warps: int
    kept: frozenset[str] = frozenset()
    """The tensors that a block loads once, before its first trip, although every trip reads them."""


def last_of(tensor: str) -> str:
    """The name of what a carried tensor is after the last trip."""
    return f"last.{tensor}"


def each_of(tensor: str) -> str:
    """The name of the slices that all trips leave of a value."""
    return f"each.{tensor}"


def problem(recurrence: Recurrence, target: Target) -> Refusal | None:
    """Says why a loop cannot be one kernel of a target, whatever its layout; None where it can."""
    for node in recurrence.body.nests:
        if isinstance(node, External):
            return Refusal(node.reason)
        if node.is_reduction and str(node.reducer) in target.unsupported_reducers:
            return Refusal(f"{node.name} is a reduction that {target.name} lacks: {node.reducer}")
        missing = {n.op for n in postorder(node.body) if isinstance(n, Apply)} & target.unsupported_ops
        if missing:
            return Refusal(f"{node.name} has operations that {target.name} lacks: {', '.join(sorted(missing))}")
    return None


def _moves(recurrence: Recurrence) -> Iterator[tuple[tuple[Axis, ...], tuple[Axis, ...]]]:
    """Yields the axes of each value that a trip computes or carries, with those along which it is read, or carried on."""
    body = recurrence.body
    own = {d.name: d.axes for d in body.definitions()}
    fixed = {t.name for t in body.inputs} - {name for name, _ in recurrence.carried}
    for nest in _nests(body):
        yield from ((own[r.tensor], r.indices) for r in reads_in(nest.body) if r.tensor not in fixed)
    yield from ((own[after], own[before]) for before, after in recurrence.carried)


def parallel_axes(recurrence: Recurrence) -> tuple[Axis, ...]:
    """The axes along which blocks share a recurrence out: those of its largest state that no trip mixes.

    A value that has none of these axes is computed by every block. A loop without a state has those of its largest result.
    """
    body = recurrence.body
    own = {d.name: d.axes for d in body.definitions()}
    mixed = {a for nest in _nests(body) for a in nest.reduced}
    for axes, others in _moves(recurrence):
        mixed |= {x for pair in zip(axes, others, strict=True) if pair[0] is not pair[1] for x in pair}
    states = [own[name] for name, _ in recurrence.carried] or [own[name] for name in body.outputs]
    return tuple(a for a in max(states, key=volume) if a not in mixed)


def _nests(body: LoopProgram) -> Iterator[Nest]:
    return (n for n in body.nests if isinstance(n, Nest))


def lower_recurrence(recurrence: Recurrence, layout: Layout, target: Target) -> TileProgram:
    """The kernel of a recurrence that has no `problem`, with a layout."""
    return rewrite_for(target, verify(_Kernel(recurrence, layout, target).program()))


@dataclass(slots=True)
class _Known:
    """A record of a tensor of the body: its axes, whether it changes from trip to trip, and the tiles that hold it."""

    axes: tuple[Axis, ...]
    dtype: str
    changes: bool
    values: dict[tuple[Axis, ...], Expr] = field(default_factory=dict)
    """Its tile in the block, along its own axes or others of the same lengths."""


class _Kernel(Values):
    def __init__(self, recurrence: Recurrence, layout: Layout, target: Target) -> None:
        self.recurrence, self.layout, self.target = recurrence, layout, target
        self.tails, body = target.tails, recurrence.body
        self.nests = {n.name: n for n in _nests(body)}
        self.top, self.loads, self.counts = Scope(), set[str](), dict[str, int]()
        self.computed: dict[tuple[Any, ...], Expr] = {}  # the tiles of nests, by what they compute: equal ones are one
        self.inside = Scope(parent=self.top)
        changing = {name for name, _ in recurrence.carried} | set(recurrence.sliced)
        self.known = {t.name: _Known(t.axes, t.dtype, t.name in changing) for t in body.inputs}
        for nest in self.nests.values():
            changing |= {nest.name} if nest.reads & changing else set()
            self.known[nest.name] = _Known(nest.axes, nest.dtype, nest.name in changing)
        self.order = (recurrence.time, *_outer_first(recurrence.axes, [k.axes for k in self.known.values()]))
        blocks = dict(layout.grid)
        self.tiles = {a: blocks.get(a, target.padded(a.extent)) for a in self.order} | {recurrence.time: 1}

    # --- what `Values` asks

    def _tile(self, axis: Axis) -> int:
        return self.tiles[axis]

    def _ones(self) -> frozenset[Axis]:
        return frozenset(a for a, n in self.tiles.items() if n == 1)

    def _is_padded(self, axis: Axis, scope: Scope) -> bool:
        return axis.extent % self.tiles[axis] != 0

    def _find(self, node: Expr, scope: Scope) -> Expr | None:
        return self.known[node.tensor].values.get(node.indices) if isinstance(node, Read) else None

    def _is_load(self, value: Read) -> bool:
        return value.tensor in self.loads

    def _emit_read(self, node: Read, scope: Scope) -> Expr:
        known = self.known[node.tensor]
        if node.tensor in self.nests or any(node.tensor == name for name, _ in self.recurrence.carried):
            found = self._along(known.values[known.axes], known.axes, node.indices, self._place(node.tensor))
        else:
            found = self._loaded(node)
        known.values[node.indices] = found
        return found

    # --- values

    def _place(self, tensor: str) -> Scope:
        """The scope in which a tensor is computed or loaded: once, or in each trip."""
        known = self.known[tensor]
        is_input = tensor not in self.nests
        return self.inside if known.changes or (is_input and tensor not in self.layout.kept) else self.top

    def _unique(self, name: str) -> str:
        self.counts[name] = self.counts.get(name, 0) + 1
        return name if self.counts[name] == 1 else f"{name}.{self.counts[name]}"

    def _loaded(self, node: Read) -> Expr:
        scope, tensor = self._place(node.tensor), node.tensor
        indices = (self.recurrence.time, *node.indices) if tensor in self.recurrence.sliced else node.indices
        name = self._unique(tensor)
        scope.statements.append(Load(name, tensor, indices, node.dtype))
        self.loads.add(name)
        return read(name, indices, node.dtype)

    def _along(self, value: Expr, own: tuple[Axis, ...], wanted: tuple[Axis, ...], scope: Scope) -> Expr:
        """A value with some of its axes replaced by others of the same lengths."""
        pairs = tuple((a, b) for a, b in zip(own, wanted, strict=True) if a is not b)
        name, axes = self._unique("moved"), self._sorted(frozenset(wanted))
        assert isinstance(value, Read)
        scope.statements.append(Let(name, axes, value, renamed=pairs))
        return read(name, axes, value.dtype)

    def _compute(self, nest: Nest) -> None:
        known = self.known[nest.name]
        scope = self.inside if known.changes or self._reads_again(nest) else self.top
        known.changes = scope is self.inside
        value = self._expr(nest.body, scope)
        key = (known.changes, nest.axes, nest.reduced, nest.reducer, nest.dtype, nest.precision, value)
        if key not in self.computed:
            name = self._unique(nest.name)
            if nest.reducer is not None:
                raw = self._reduction(name, nest.axes, nest.reducer, nest.body, nest.reduced, scope, nest.precision)
                value, name = convert(raw, nest.dtype), self._unique(nest.name)
            self.computed[key] = self._let(name, nest.axes, value, scope)
        known.values[nest.axes] = self.computed[key]

    def _reads_again(self, nest: Nest) -> bool:
        return any(self._place(name) is self.inside for name in nest.reads)

    # --- the kernel

    def program(self) -> TileProgram:
        """All statements: what is loaded once, the loop, and what is stored after it."""
        own, body = self.recurrence, self.recurrence.body
        types = {d.name: d for d in body.definitions()}
        begun: dict[str, Expr] = {}
        for before, _ in own.carried:
            name = self._unique(before)
            self.top.statements.append(Load(name, before, types[before].axes, types[before].dtype))
            begun[before] = read(name, types[before].axes, types[before].dtype)
            self.known[before].values[types[before].axes] = read(
                self._unique(before), types[before].axes, types[before].dtype
            )
        for nest in self.nests.values():
            self._compute(nest)
        carries = []
        for before, after in own.carried:
            state = self.known[before].values[types[before].axes]
            value = self._expr(read(after, types[before].axes, types[after].dtype), self.inside)
            assert isinstance(state, Read) and isinstance(value, Read)
            carries.append(Carry(state.tensor, types[before].axes, state.dtype, begun[before], value.tensor))
        stores = [self._stored(name) for name in own.stacked]
        segment = Segment(ZERO, const(own.time.extent, "int32"), 0, 1, (*self.inside.statements, *stores))
        loop = Loop(
            own.time, tuple(carries), (segment,), const(own.time.extent, "int32"), ZERO, backwards=own.backwards
        )
        last = []
        for before, _ in own.carried:
            value = self.known[before].values[types[before].axes]
            last.append(Store(last_of(before), types[before].axes, value))
        stacked = tuple(
            Tensor(each_of(n), (own.time, *types[n].axes), types[n].dtype) for n in dict.fromkeys(own.stacked)
        )
        results = tuple(Tensor(last_of(b), types[b].axes, types[b].dtype) for b, _ in own.carried)
        read_tensors = {s.tensor for s in (*self.top.statements, *self.inside.statements) if isinstance(s, Load)}
        inputs = tuple(
            Tensor(t.name, (own.time, *t.axes) if t.name in own.sliced else t.axes, t.dtype)
            for t in body.inputs
            if t.name in read_tensors
        )
        tiles = tuple((a, self.tiles[a]) for a in self.order)
        statements = (*self.top.statements, loop, *last)
        return TileProgram(
            own.name, inputs, (*results, *stacked), self.layout.grid, tiles, statements, self.layout.warps, stages=1,
            prefetch_distance=1 if own.sliced else 0,
        )  # fmt: skip

    def _stored(self, name: str) -> Store:
        """The store of a trip's slice of a value."""
        known = self.known[name]
        if known.axes not in known.values:
            self._expr(read(name, known.axes, known.dtype), self.inside)
        return Store(each_of(name), (self.recurrence.time, *known.axes), known.values[known.axes])


def _outer_first(axes: Collection[Axis], used: Collection[tuple[Axis, ...]]) -> list[Axis]:
    """Returns the axes in an order in which one that lies before another in a large tensor comes first."""
    after: dict[Axis, set[Axis]] = {a: set() for a in axes}
    for own in sorted(used, key=len, reverse=True):
        for n, a in enumerate(own):
            for b in own[n + 1 :]:
                if a is not b and b not in _reached(a, after) and a not in _reached(b, after):
                    after[a].add(b)
    found: list[Axis] = []
    while len(found) < len(axes):
        waiting = {b for a, later in after.items() if a not in found for b in later}
        found.append(next(a for a in axes if a not in found and a not in waiting))
    return found


def _reached(axis: Axis, after: Mapping[Axis, set[Axis]]) -> set[Axis]:
    found, stack = set[Axis](), [axis]
    while stack:
        for b in after[stack.pop()]:
            if b not in found:
                found.add(b)
                stack.append(b)
    return found


_MOST_OF_A_THREAD = 32
"""The most elements of one value that a thread may have: a compiler takes long for more, and has no registers for them."""
_MOST_ELEMENTS = 1024
"""The most elements along the axes of the grid that are tried for a block."""


def layouts(recurrence: Recurrence, target: Target) -> Iterator[Layout]:
    """Ways to spread a recurrence: blocks of more and more elements along the last axes of the grid, with more and more warps."""
    parallel = parallel_axes(recurrence)
    seen: set[tuple[tuple[Axis, int], ...]] = set()
    for elements in (1, *(1 << n for n in range(WARP_ROWS.bit_length() - 1, _MOST_ELEMENTS.bit_length()))):
        left, grid = elements, dict.fromkeys(parallel, 1)
        for axis in reversed(parallel):
            grid[axis] = min(power_of_two(axis.extent), left)
            left //= grid[axis]
        key = tuple(grid.items())
        if key in seen:
            continue
        seen.add(key)
        sizes = {a: grid.get(a) or target.padded(a.extent) for a in recurrence.axes}
        size = recurrence.largest(sizes.__getitem__)
        of_threads = recurrence.largest(sizes.__getitem__, of_threads=True)
        for warps in (1, 2, 4, 8, 16):
            threads = WARP * warps
            if (warps == 1 or threads <= size) and of_threads <= _MOST_OF_A_THREAD * threads:
                yield Layout(key, warps)
