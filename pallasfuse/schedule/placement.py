"""The place of every load, computation and store of a tree, or the rule that it breaks (MCFuser, section 3.2; one kernel).

A load stands in the innermost loop around its reader over one of the tensor's axes, though not outside of the loops that make
blocks; a reduction's values live around its outermost reduced loop and are stored there when that is closed. A nest that is kept
in global memory is stored there, too, and loaded where it is read in other loops than those that it was computed in. A map that
reads reductions before they are finished hands that on to the reductions that read it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.region import Region
from pallasfuse.ir.tree import LEVELS, Do, Keep, Merge, Node, RangeLoop, TreeKernel
from pallasfuse.tiling.rules import RULES

MayFold = Callable[[str, frozenset[str]], bool]
"""Returns whether a fold of a nest can be derived that reads these reductions before they are finished."""


def no_folds(nest: str, unfinished: frozenset[str]) -> bool:
    """Derives no fold: every nest waits until what it reads is finished."""
    return False


@dataclass(frozen=True, slots=True)
class Broken:
    """The rule of legal trees that a tree breaks (`tiling.rules`), and where."""

    rule: int
    reason: str

    @property
    def name(self) -> str:
        return RULES[self.rule]

    def __str__(self) -> str:
        return f"rule {self.rule} ({self.name}): {self.reason}"


_BLOCKS = ("time", "mesh", "grid")
"""Levels of loops over blocks, which stand outermost, one in the other."""
Kind = Literal["load", "compute", "store"]


@dataclass(frozen=True, slots=True)
class Statement:
    """A load of a tensor's tile, the computation of a nest, or the store of an output."""

    kind: Kind
    name: str
    axes: tuple[Axis, ...]
    """The axes of its tile: one without a loop around the statement is whole."""
    around: tuple[RangeLoop, ...]
    numbers: tuple[int, ...]
    """The numbers of the loops around it in `Placement.loops`."""
    unfinished: tuple[str, ...] = ()
    """The reductions that a nest reads before they are finished."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A loop with the statements and loops inside of it, in order."""

    loop: RangeLoop
    body: tuple["Placed | Statement", ...]


@dataclass(slots=True)
class Buffer:
    """A tile that is in memory from the statement numbered `first` to the one numbered `last`."""

    name: str
    is_input: bool
    axes: tuple[Axis, ...]
    around: tuple[RangeLoop, ...]
    depth: int
    """The number of loops around it, those over warpgroups included."""
    first: int
    last: int
    indexed_by: tuple[RangeLoop, ...] = ()
    """Serial loops that compute it piece by piece."""
    slots: int = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """All statements of a tree at their places, and the buffers that they need."""

    body: tuple[Placed | Statement, ...]
    statements: tuple[Statement, ...]
    buffers: tuple[Buffer, ...]
    loops: tuple[tuple[RangeLoop, ...], ...]
    """Every loop, after the loops around it."""
    unread: tuple[str, ...]
    """Nests that are computed somewhere, but neither read from there nor stored."""


def place(region: Region, kernel: TreeKernel, may_fold: MayFold = no_folds) -> Placement | Broken:
    """Places the loads, computations and stores of one kernel, or says which rule it breaks."""
    return _place(region, kernel, may_fold)


def _walked(region: Region, kernel: TreeKernel, may_fold: MayFold) -> Placement | Broken:
    walk = _Walk(region, may_fold, _reads(region))
    broken = walk.run(kernel.body)
    if broken is None:
        missing = [name for name in region.outputs if name not in walk.stored]
        if missing:
            broken = Broken(13, f"{', '.join(missing)} is never stored")
    if broken is not None:
        return broken
    return Placement(
        tuple(walk.bodies[0]), tuple(walk.statements), tuple(walk.buffers), tuple(walk.loops), walk.unread()
    )


_place = Recent(_walked)


def show(placement: Placement) -> str:
    """Returns the tiling expression with its statements: `mh(n(k(LA,LB,CC),LD,CE),SE)`."""
    return _show(placement.body)


def _show(body: tuple[Placed | Statement, ...]) -> str:
    shown = []
    for node in body:
        if isinstance(node, Statement):
            shown.append({"load": "L", "compute": "C", "store": "S"}[node.kind] + node.name)
        elif len(node.body) == 1 and isinstance(node.body[0], Placed):
            shown.append(node.loop.axis + _show(node.body))
        else:
            shown.append(f"{node.loop.axis}({_show(node.body)})")
    return ",".join(shown)


@dataclass(slots=True)
class _Value:
    """A nest that was computed, where it can be read."""

    depth: int
    """The number of loops around its values; they are dropped when the last of these ends."""
    buffer: Buffer
    numbers: tuple[int, ...]
    """The numbers of the loops around its computation."""
    open_reduced: frozenset[str]
    """The reduced axes that these loops are over."""
    finished: bool
    used: bool = False
    frames: frozenset[str] = frozenset()
    """The unfinished reductions that a map is computed from."""


@dataclass(frozen=True, slots=True)
class _Reads:
    """Tensors and reductions that the nests of a region read."""

    nests: Mapping[str, Nest]
    of_nests: dict[str, tuple[str, ...]]
    of_inputs: dict[str, tuple[tuple[str, tuple[Axis, ...]], ...]]
    """The inputs, in the region's order, each with the axes that run over its dimensions."""
    axes: frozenset[str]


def _reads_in(region: Region) -> _Reads:
    nests, order = region.by_name, {t.name: n for n, t in enumerate(region.inputs)}
    of_inputs = {}
    for nest in region.nests:
        reads = [node for node in postorder(nest.body) if isinstance(node, Read)]
        found = {(node.tensor, node.indices) for node in reads if node.tensor in order}
        of_inputs[nest.name] = tuple(sorted(found, key=lambda read: (order[read[0]], read[1])))
    of_nests = {n.name: tuple(sorted(n.reads & frozenset(nests))) for n in region.nests}
    return _Reads(nests, of_nests, of_inputs, frozenset(region.axes))


_reads = Recent(_reads_in)


@dataclass(slots=True)
class _Walk:
    region: Region
    may_fold: MayFold
    reads: _Reads
    path: list[RangeLoop] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    bodies: list[list[Placed | Statement]] = field(default_factory=lambda: [[]])
    entered: list[int] = field(default_factory=list)
    clock: int = 0
    values: dict[str, _Value] = field(default_factory=dict)
    loaded: list[dict[tuple[str, tuple[Axis, ...]], Buffer]] = field(default_factory=lambda: [{}])
    kept: dict[str, tuple[int, Buffer | None]] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    """The nests that are kept in global memory, with the number of loops around their buffers."""
    in_memory: set[str] = field(default_factory=set)
    """Those of them that are stored there already."""
    statements: list[Statement] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    loops: list[tuple[RangeLoop, ...]] = field(default_factory=list)
    stored: set[str] = field(default_factory=set)
    ended: list[tuple[str, _Value]] = field(default_factory=list)

    def unread(self) -> tuple[str, ...]:
        return tuple(sorted({name for name, value in (*self.ended, *self.values.items()) if not value.used}))

    def run(self, body: tuple[Node, ...]) -> Broken | None:
        blocks = next((n for n in body if isinstance(n, RangeLoop) and n.level in _BLOCKS), None)
        if blocks is not None and len(body) > 1:
            return Broken(2, f"the loop over the blocks of {blocks.axis} is not alone in its body")
        for node in body:
            match node:
                case RangeLoop():
                    broken = self._loop(node)
                case Do(name):
                    nest = self.reads.nests.get(name)
                    broken = Broken(3, f"the region has no nest {name}") if nest is None else self._do(nest)
                case Merge(name):
                    broken = Broken(7, f"+{name} merges what no loop of this space leaves apart")
                case Keep():
                    broken = self._keep(node)
            if broken is not None:
                return broken
        return None

    def _keep(self, node: Keep) -> Broken | None:
        if node.tensor in self.reads.nests:
            self.written[node.tensor] = len(self.path)
            return None if node.memory == "global" else Broken(8, f"{node.tensor} is no input")
        if node.tensor not in {t.name for t in self.region.inputs}:
            return Broken(8, f"{node.tensor} is no input")
        self.kept[node.tensor] = (len(self.path), None)
        return None

    def _loop(self, loop: RangeLoop) -> Broken | None:
        if loop.axis not in self.reads.axes:
            return Broken(1, f"the region has no axis {loop.axis}")
        outer = next((x for x in reversed(self.path) if x.axis == loop.axis), None)
        if outer is not None and not outer.shares and not loop.shares and outer.size % loop.size:
            return Broken(1, f"{loop.axis}:{loop.size} does not divide {loop.axis}:{outer.size}")
        rank = min(LEVELS.index(loop.level), LEVELS.index("cluster"))
        deeper = next((x for x in self.path if min(LEVELS.index(x.level), LEVELS.index("cluster")) > rank), None)
        if deeper is not None:
            return Broken(
                2, f"{loop.axis} at level {loop.level} stands inside of {deeper.axis} at level {deeper.level}"
            )
        self.path.append(loop)
        self.numbers.append(len(self.loops))
        self.loops.append(tuple(self.path))
        self.bodies.append([])
        self.loaded.append({})
        self.entered.append(self.clock)
        broken = self.run(loop.body)
        if broken is not None:
            return broken
        self._leave(loop)
        return None

    def _leave(self, loop: RangeLoop) -> None:
        entered = self.entered.pop()
        self.path.pop()
        self.numbers.pop()
        self.loaded.pop()
        inside, depth = tuple(self.bodies.pop()), len(self.path)
        self.bodies[-1].append(Placed(loop, inside))
        for buffer in self.buffers:
            if buffer.depth <= depth and buffer.last >= entered:
                buffer.last = self.clock  # what one trip needs, the next one needs, too
        self.kept = {t: (d, b) for t, (d, b) in self.kept.items() if d <= depth}
        self.written = {t: d for t, d in self.written.items() if d <= depth}
        self.in_memory &= self.written.keys()
        for name, value in list(self.values.items()):
            if value.depth > depth:
                self.ended.append((name, self.values.pop(name)))
            elif value.depth == depth and not value.finished:
                value.finished = True
                self._store(self.reads.nests[name], value)

    def _do(self, nest: Nest) -> Broken | None:
        own, reduced = {a.name for a in (*nest.axes, *nest.reduced)}, {a.name for a in nest.reduced}
        around = [n for n, x in enumerate(self.path) if x.axis in reduced]
        depth = around[0] if around else len(self.path)
        for loop in self.path[depth:]:
            if loop.axis not in own:
                return Broken(4, f"{nest.name} would add its terms again in every trip of the loop over {loop.axis}")
        apart = next((x for x in self.path if x.axis in reduced and x.level != "serial"), None)
        if apart is not None:
            return Broken(7, f"{nest.name} is reduced by blocks over {apart.axis} and never merged")
        unfinished = self._read(nest, reduced)
        if isinstance(unfinished, Broken):
            return unfinished
        value = self.values.get(nest.name)
        if value is not None and value.depth == depth and not value.finished:
            return Broken(4, f"{nest.name} stands twice in the loops that reduce it, and would add its terms twice")
        if value is not None:
            self.ended.append((nest.name, value))
        began = self.entered[depth] if around else self.clock
        inner = tuple(x for x in self.path[depth:] if x.axis not in reduced)
        buffer = Buffer(nest.name, False, nest.axes, tuple(self.path[:depth]), depth, began, self.clock, inner)
        self.buffers.append(buffer)
        over = frozenset(self.path[n].axis for n in around)
        frames = frozenset() if nest.is_reduction else frozenset(unfinished)
        value = _Value(depth, buffer, tuple(self.numbers), over, not around, frames=frames)
        if frames and (nest.name in self.region.outputs or nest.name in self.written):
            return Broken(6, f"{nest.name} is stored, and reads {', '.join(unfinished)} before the loop over it ends")
        self.values[nest.name] = value
        self._add("compute", nest.name, (*nest.axes, *nest.reduced), len(self.path), unfinished)
        if value.finished:
            self._store(nest, value)
        return None

    def _read(self, nest: Nest, reduced: set[str]) -> tuple[str, ...] | Broken:
        """Finds and loads what a nest reads; returns what of it is not finished."""
        unfinished: dict[str, None] = {}
        for name in self.reads.of_nests[nest.name]:
            value = self.values.get(name)
            if value is None and name in self.in_memory:
                self._load(name, self.reads.nests[name].axes)
                continue
            if value is None:
                return Broken(3, f"{nest.name} reads {name}, which is not computed before it in an open loop")
            value.buffer.last, value.used = self.clock, True
            unfinished |= dict.fromkeys(sorted(value.frames) if value.finished else (name,))
        broken = self._unfinished(nest, reduced, tuple(unfinished))
        if broken is not None:
            return broken
        for tensor, axes in self.reads.of_inputs[nest.name]:
            self._load(tensor, axes)
        return tuple(unfinished)

    def _unfinished(self, nest: Nest, reduced: set[str], names: tuple[str, ...]) -> Broken | None:
        """Checks that a nest may read these reductions before they are finished; the readers of a map are checked for it."""
        for name in names:
            value = self.values.get(name)
            if value is None or value.finished:
                return Broken(6, f"{nest.name} reads what was computed from {name} before the loop over it ended")
            if not value.open_reduced <= reduced and (nest.is_reduction or nest.name in self.region.outputs):
                others = ", ".join(sorted(value.open_reduced - reduced))
                return Broken(6, f"{nest.name} reads {name} inside of the loop over {others} that reduces it")
            if value.numbers != tuple(self.numbers[: len(value.numbers)]):
                return Broken(6, f"{nest.name} reads {name}, whose unfinished state only an inner loop has")
        if names and nest.is_reduction and not self.may_fold(nest.name, frozenset(names)):
            return Broken(6, f"{nest.name} reads {', '.join(names)} before the loop that reduces it ends")
        return None

    def _load(self, name: str, axes: tuple[Axis, ...]) -> None:
        own = {a.name for a in axes}
        depth = 0
        for n, loop in enumerate(self.path):
            # a block loads what it reads itself; warpgroups share what their block loads
            if (loop.axis in own and loop.level != "group") or loop.level in (*_BLOCKS, "cluster"):
                depth = n + 1
        keep, held = self.kept.get(name, (depth, None))
        held = self.loaded[depth].get((name, axes), held)
        if held is None:
            slots = self.path[depth - 1].slots if depth else 1
            held = Buffer(name, True, axes, self._shared(keep), keep, self.clock, self.clock, (), slots)
            self.buffers.append(held)
            self.loaded[depth][name, axes] = held
            if name in self.kept:
                self.kept[name] = (keep, held)
            self._add("load", name, axes, depth)
        held.last = self.clock

    def _shared(self, depth: int) -> tuple[RangeLoop, ...]:
        return tuple(loop for loop in self.path[:depth] if loop.level != "group")

    def _store(self, nest: Nest, value: _Value) -> None:
        kept = self.written.get(nest.name, value.depth + 1) <= value.depth
        if kept:
            self.in_memory.add(nest.name)
        if nest.name in self.region.outputs:
            self.stored.add(nest.name)
        if kept or nest.name in self.region.outputs:
            self._add("store", nest.name, nest.axes, value.depth)
            value.buffer.last, value.used = self.clock, True

    def _add(self, kind: Kind, name: str, axes: tuple[Axis, ...], depth: int, unfinished: tuple[str, ...] = ()) -> None:
        around = [
            (x, n)
            for x, n in zip(self.path[:depth], self.numbers, strict=False)
            if kind != "load" or x.level != "group"
        ]
        statement = Statement(kind, name, axes, tuple(x for x, _ in around), tuple(n for _, n in around), unfinished)
        self.clock += 1
        self.statements.append(statement)
        self.bodies[depth].append(statement)
