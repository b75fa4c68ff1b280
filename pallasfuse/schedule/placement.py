"""The place of every load, computation and store of a tree, or the rule that it breaks (MCFuser, section 3.2; one kernel).

A load stands in the innermost loop around its reader over one of the tensor's axes, though not outside of the loops that make
blocks; a reduction's values live around its outermost reduced loop and are stored there when that is closed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.part import Part
from pallasfuse.ir.tree import LEVELS, Do, Keep, Merge, Node, RangeLoop, TreeKernel

MayFold = Callable[[str, frozenset[str]], bool]
"""Returns whether a fold of a nest can be derived that reads these reductions before they are finished."""


def no_folds(nest: str, unfinished: frozenset[str]) -> bool:
    """Derives no fold: every nest waits until what it reads is finished."""
    return False


@dataclass(frozen=True, slots=True)
class TreeRule:
    """A rule that a legal tree keeps."""

    number: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"rule {self.number} ({self.name})"


WINDOWS = TreeRule(1, "windows", "a tile divides the tile of the loop around it over the same axis")
LEVEL_ORDER = TreeRule(2, "levels", "time stands outside of mesh, mesh outside of grid, grid outside of the rest")
READS = TreeRule(
    3, "do", "a nest reads what is computed before it in an open scope, and maps have every axis in a loop or whole"
)
STATE = TreeRule(4, "state", "between a nest and its outermost reduced loop there are loops over its own axes only")
UNFINISHED = TreeRule(6, "unfinished reads", "a fold can be derived that reads a reduction before it is finished")
MERGES = TreeRule(
    7, "merge", "partial states of a spatial loop over a reduced axis are merged; this space has no such loops"
)
KEEPS = TreeRule(8, "memory", "what is kept is an input of the part")
COVER = TreeRule(13, "cover", "every output is stored")


@dataclass(frozen=True, slots=True)
class Broken:
    """The rule that a tree breaks, and where."""

    rule: TreeRule
    reason: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.reason}"


Window = tuple[tuple[Axis, RangeLoop | None], ...]
"""For each axis the innermost loop that cuts it; None: the axis is whole."""
Kind = Literal["load", "compute", "store"]


@dataclass(frozen=True, slots=True)
class Statement:
    """A load of a tensor's tile, the computation of a nest, or the store of an output."""

    kind: Kind
    name: str
    window: Window
    around: tuple[RangeLoop, ...]
    numbers: tuple[int, ...]
    """Of the loops around it, in `Placement.loops`."""


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
    window: Window
    around: tuple[RangeLoop, ...]
    first: int
    last: int
    indexed_by: tuple[RangeLoop, ...] = ()
    """Serial loops that compute it piece by piece."""
    slots: int = 1

    @property
    def depth(self) -> int:
        return len(self.around)


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


def place(part: Part, kernel: TreeKernel, may_fold: MayFold = no_folds) -> Placement | Broken:
    """Places the loads, computations and stores of one kernel, or says which rule it breaks."""
    walk = _Walk(part, may_fold)
    broken = walk.run(kernel.body)
    if broken is None:
        missing = [name for name in part.outputs if name not in walk.stored]
        if missing:
            broken = Broken(COVER, f"{', '.join(missing)} is never stored")
    if broken is not None:
        return broken
    return Placement(
        tuple(walk.bodies[0]), tuple(walk.statements), tuple(walk.buffers), tuple(walk.loops), walk.unread()
    )


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
    """Loops around its values; they are dropped when the last of these ends."""
    buffer: Buffer
    open_reduced: frozenset[str]
    """The reduced axes whose loops are open around its computation."""
    finished: bool
    used: bool = False


@dataclass(slots=True)
class _Walk:
    part: Part
    may_fold: MayFold
    path: list[RangeLoop] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    bodies: list[list[Placed | Statement]] = field(default_factory=lambda: [[]])
    entered: list[int] = field(default_factory=list)
    clock: int = 0
    values: dict[str, _Value] = field(default_factory=dict)
    loaded: list[dict[tuple[str, Window], Buffer]] = field(default_factory=lambda: [{}])
    kept: dict[str, tuple[int, Buffer | None]] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    loops: list[tuple[RangeLoop, ...]] = field(default_factory=list)
    stored: set[str] = field(default_factory=set)
    ended: list[tuple[str, _Value]] = field(default_factory=list)

    def unread(self) -> tuple[str, ...]:
        return tuple(sorted({name for name, value in (*self.ended, *self.values.items()) if not value.used}))

    def run(self, body: tuple[Node, ...]) -> Broken | None:
        for node in body:
            match node:
                case RangeLoop():
                    broken = self._loop(node)
                case Do(name):
                    nest = self.part.by_name.get(name)
                    broken = Broken(READS, f"the part has no nest {name}") if nest is None else self._do(nest)
                case Merge(name):
                    broken = Broken(MERGES, f"+{name} merges what no loop of this space leaves apart")
                case Keep(tensor, _):
                    broken = None
                    if tensor not in {t.name for t in self.part.inputs}:
                        broken = Broken(KEEPS, f"{tensor} is no input")
                    self.kept[tensor] = (len(self.path), None)
            if broken is not None:
                return broken
        return None

    def _loop(self, loop: RangeLoop) -> Broken | None:
        if loop.axis not in self.part.axes:
            return Broken(WINDOWS, f"the part has no axis {loop.axis}")
        outer = next((x for x in reversed(self.path) if x.axis == loop.axis), None)
        if outer is not None and not outer.shares and not loop.shares and outer.size % loop.size:
            return Broken(WINDOWS, f"{loop.axis}:{loop.size} does not divide {loop.axis}:{outer.size}")
        rank = min(LEVELS.index(loop.level), LEVELS.index("cluster"))
        deeper = next((x for x in self.path if min(LEVELS.index(x.level), LEVELS.index("cluster")) > rank), None)
        if deeper is not None:
            return Broken(
                LEVEL_ORDER, f"{loop.axis} at level {loop.level} stands inside of {deeper.axis} at level {deeper.level}"
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
        for name, value in list(self.values.items()):
            if value.depth > depth:
                self.ended.append((name, self.values.pop(name)))
            elif value.depth == depth and not value.finished and loop.axis in value.open_reduced:
                value.finished = True
                self._store(self.part.by_name[name], value)

    def _window(self, axes: tuple[Axis, ...], depth: int) -> Window:
        inner = {x.axis: x for x in self.path[:depth]}
        return tuple((a, inner.get(a.name)) for a in axes)

    def _do(self, nest: Nest) -> Broken | None:
        own, reduced = {a.name for a in (*nest.axes, *nest.reduced)}, {a.name for a in nest.reduced}
        around = [n for n, x in enumerate(self.path) if x.axis in reduced]
        depth = around[0] if around else len(self.path)
        for loop in self.path[depth:]:
            if loop.axis not in own:
                return Broken(
                    STATE, f"{nest.name} would add its terms again in every trip of the loop over {loop.axis}"
                )
        apart = next((x for x in self.path if x.axis in reduced and x.level != "serial"), None)
        if apart is not None:
            return Broken(MERGES, f"{nest.name} is reduced by blocks over {apart.axis} and never merged")
        broken = self._read(nest, reduced)
        if broken is not None:
            return broken
        value = self.values.get(nest.name)
        if value is None or value.depth != depth or value.finished:
            began = self.entered[depth] if around else self.clock
            inner = tuple(x for x in self.path[depth:] if x.axis not in reduced)
            buffer = Buffer(
                nest.name, False, self._window(nest.axes, depth), tuple(self.path[:depth]), began, self.clock, inner
            )
            self.buffers.append(buffer)
            if value is not None:
                self.ended.append((nest.name, value))
            value = _Value(depth, buffer, frozenset(self.path[n].axis for n in around), not around)
            self.values[nest.name] = value
        value.buffer.last = self.clock
        window = self._window((*nest.axes, *nest.reduced), len(self.path))
        self._add("compute", nest.name, window, len(self.path))
        if value.finished:
            self._store(nest, value)
        return None

    def _read(self, nest: Nest, reduced: set[str]) -> Broken | None:
        unfinished: set[str] = set()
        for name in sorted(nest.reads & frozenset(self.part.by_name)):
            value = self.values.get(name)
            if value is None:
                return Broken(READS, f"{nest.name} reads {name}, which is not computed before it in an open loop")
            value.buffer.last, value.used = self.clock, True
            if not value.finished:
                unfinished.add(name)
                if not value.open_reduced <= reduced:
                    over = ", ".join(sorted(value.open_reduced - reduced))
                    return Broken(
                        UNFINISHED, f"{nest.name} reads {name} inside of the loop over {over} that reduces it"
                    )
        if unfinished and not self.may_fold(nest.name, frozenset(unfinished)):
            return Broken(
                UNFINISHED, f"{nest.name} reads {', '.join(sorted(unfinished))} before the loop that reduces it ends"
            )
        for tensor in self.part.inputs:
            if tensor.name in nest.reads:
                self._load(tensor.name, tensor.axes)
        return None

    def _load(self, name: str, axes: tuple[Axis, ...]) -> None:
        own = {a.name for a in axes}
        depth = 0
        for n, loop in enumerate(self.path):
            # a block loads what it reads itself; warpgroups share what their block loads
            if (loop.axis in own and loop.level != "group") or loop.level in ("time", "mesh", "grid", "cluster"):
                depth = n + 1
        window = self._window(axes, depth)
        held = self.loaded[depth].get((name, window))
        keep, filled = self.kept.get(name, (0, None))
        if held is None and filled is not None:
            held = filled
        if held is None:
            slots = self.path[depth - 1].slots if depth else 1
            place_depth = keep if name in self.kept else depth
            began = self.clock
            held = Buffer(
                name, True, self._window(axes, place_depth), tuple(self.path[:place_depth]), began, began, (), slots
            )
            self.buffers.append(held)
            self.loaded[depth][name, window] = held
            if name in self.kept:
                self.kept[name] = (keep, held)
            self._add("load", name, window, depth)
        held.last = self.clock

    def _store(self, nest: Nest, value: _Value) -> None:
        if nest.name in self.part.outputs:
            self.stored.add(nest.name)
            self._add("store", nest.name, value.buffer.window, value.depth)
            value.buffer.last, value.used = self.clock, True

    def _add(self, kind: Kind, name: str, window: Window, depth: int) -> None:
        statement = Statement(kind, name, window, tuple(self.path[:depth]), tuple(self.numbers[:depth]))
        self.clock += 1
        self.statements.append(statement)
        self.bodies[depth].append(statement)
