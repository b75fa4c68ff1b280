"""The values of a kernel that a schedule tree describes: the windows of axes, and where values are known, loaded and kept."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pallasfuse.errors import Refusal
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, const, convert, read, substitute
from pallasfuse.ir.fold import Fold
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.region import Region
from pallasfuse.ir.statements import Buffer, Get, Let, Load, Loop, Set, tile_name
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import MemorySpace, RangeLoop, TreeKernel, walk
from pallasfuse.targets import Tails, power_of_two
from pallasfuse.tiling.bounds import Guards
from pallasfuse.tiling.passes import Passes
from pallasfuse.tiling.products import own_axes
from pallasfuse.tiling.rules import broken
from pallasfuse.tiling.values import Scope


@dataclass(frozen=True, slots=True)
class Tiles:
    """The shapes of tiles that a target can have: see `Target.tails`, `smallest_dot` and `tile_multiple`."""

    tails: Tails
    smallest_dot: int = 1
    multiple: int = 0

    def rounded(self, size: int) -> int:
        """The size of the tile that holds so many positions."""
        if self.tails == "exact" or size == 1:
            return size
        return -(-size // self.multiple) * self.multiple if self.multiple else power_of_two(size)


@dataclass(slots=True)
class OpenPass:
    """The folds whose states one loop carries."""

    axis: Axis
    folds: list[Fold]
    deeper: frozenset[str]
    """The folds that stand in loops inside of it: their accumulators are buffers."""
    moved: frozenset[str] = frozenset()
    """The folds of `deeper` whose pieces have several trips, before which they are moved to the frames once."""
    chain: tuple[RangeLoop, ...] = ()
    """The loops inside of it, over the same axis, in which all of them stand: each goes on with the states of the one around it."""
    body: Scope | None = None
    part: Axis | None = None
    """The axis of the parts, where the blocks of a grid have parts of the axis; else None."""
    kernel: str = ""
    """The kernel whose blocks have them."""
    visits: tuple[Expr, Expr] | None = None
    """The number of positions that the loop visits, and the first one."""

    @property
    def by_name(self) -> dict[str, Fold]:
        return {f.name: f for f in self.folds}


@dataclass(slots=True)
class Kept:
    """A tensor of which a body keeps a buffer."""

    scope: Scope
    memory: MemorySpace
    filled: dict[Read, tuple[str, RangeLoop | None, int]] = field(default_factory=dict)
    """The buffer for each read of it, the loop in that body that fills it (the first one that reads it), and the tile in which that
    loop divides a block's part of an axis."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """A loop that masks may bound: outside of where all predicates hold nothing counts."""

    loop: Loop
    guards: Guards
    numbers: frozenset[float]
    """The numbers that masks fill in, where such masks bound it."""
    folds: tuple[Fold, ...] = ()
    """The folds that are added to in it, and are the same where some predicate is false."""


class Derive(Protocol):
    """Derives the fold of a nest over an axis, where it reads reductions over that axis that are not finished."""

    def __call__(self, nest: Nest, axis: Axis, unfinished: Mapping[str, Fold]) -> Fold | Refusal: ...

    def refined(self, nest: Nest, axis: Axis, finished: Sequence[Nest]) -> Fold | None:
        """Returns the fold of a nest if it has a correction for what the rounding of `finished` reductions loses; else None."""


@dataclass(slots=True)
class Kernels:
    """The tensors and the partial states that the kernels of a tree hand to each other."""

    region: Region
    derive: Derive
    tiles: Tiles
    strict: bool
    tensors: dict[str, Tensor]
    """The tensors in global memory: inputs, and what earlier kernels have stored."""
    bounded: list[Bounded] = field(default_factory=list)
    static_bounds: bool = False
    """As `Target.static_bounds`."""
    together: bool = False
    """The blocks of all parts run all kernels."""
    partial: dict[str, OpenPass] = field(default_factory=dict)
    """Reductions whose states earlier kernels have stored part by part."""
    stored: set[str] = field(default_factory=set)


class TreeValues(Passes):
    """A kernel under construction, whose axes are in pieces that depend on where a statement stands."""

    kernel: TreeKernel
    every_part: list[Axis]
    """The axes of the parts whose states are merged."""
    blocks: Mapping[Axis, int]
    """The grid: the positions of one block along an axis."""
    padded_axes: Mapping[Axis, int]
    """The axes of products, and how long their tiles are at least."""

    def __init__(self, known: Kernels) -> None:
        """Begins a kernel of which nothing is done yet."""
        self.known, self.tiles, self.tails, self.strict = known, known.tiles, known.tiles.tails, known.strict
        self.ranges: list[Range] = []
        self.bounding = frozenset(() if known.static_bounds else (t.name for t in known.region.inputs))
        self.tensors, self.nests, self.axes = known.tensors, known.region.by_name, known.region.axes
        self.top = self.root = self.here = Scope()
        self.rolled = Axis("", 1)
        self.active: dict[str, OpenPass] = {}
        """Reductions whose states are open, by name."""
        self.opened: list[tuple[Scope, RangeLoop]] = []
        """The bodies of the open loops, the outermost first."""
        self.sizes: dict[Axis, int] = {}
        """The size of the pieces that the innermost open loop over an axis has, but for the last one."""
        self.spilled: list[tuple[Scope, Expr, str]] = []
        """Values that an inner loop reads piece by piece, each with the body that knows it and the name of its buffer."""
        self.kept: dict[str, Kept] = {}
        self.split: Axis | None = None
        """The axis of which every block has a part only."""
        self.part_tile = 0
        """The tile of the outermost open loop over that axis, in which the parts are cut; 0: none is open."""
        self.used: set[str] = set()
        """The names that `_unique` has given."""
        self.at_once: list[Nest] = []
        """Reductions that were computed at once: their axes are whole in a tile."""
        self.pending: dict[str, tuple[Nest, Scope]] = {}
        """Reductions inside of a tile that stand in a body and are computed where they are first read, in that body."""
        self.loads: set[str] = set()
        """The names of tiles that are zero outside of their tensors."""

    # --- places

    def _place(self) -> tuple[Any, ...]:
        """Returns the state of the construction of statements, for `_return_to` to set again."""
        passed = (getattr(self, name, None) for name in ("_late_frames", "_carried_frames"))
        return self.rolled, self.top, self.here, self.part, *passed

    def _return_to(self, place: tuple[Any, ...]) -> None:
        self.rolled, self.top, self.here, self.part, late, carried = place
        if carried is not None:
            self._late_frames, self._carried_frames = late, carried

    # --- windows

    def _piece(self, loop: RangeLoop, window: int) -> int:
        """The positions of one trip of a loop, in a window of so many; shares are of whole tiles of the next loop over the axis."""
        if not loop.shares:
            return min(loop.size, window)
        inner = next(
            (n for _, n in walk(loop.body) if isinstance(n, RangeLoop) and n.axis == loop.axis and not n.shares), None
        )
        tile = 1 if inner is None else inner.size
        return min(-(-window // (loop.size * tile)) * tile, window)

    def _products(self, blocks: Mapping[Axis, int]) -> dict[Axis, int]:
        """The axes of matrix products, which some targets want to be so long; those of the grid together that are of one side."""
        least, found = self.tiles.smallest_dot, dict[Axis, int]()
        for nest in self.nests.values():
            for own in own_axes(nest.body, frozenset(nest.reduced)) if nest.reducer == SUM else ():
                found |= {a: least for a in (*nest.axes, *nest.reduced) if a not in blocks}
                side = [a for a in nest.axes if a in own and blocks.get(a, 1) > 1]
                if side:
                    others = math.prod(power_of_two(blocks[a]) for a in side[:-1])
                    found[side[-1]] = max(found.get(side[-1], 1), -(-least // others))
        return found

    def _rounded(self, axis: Axis, size: int) -> int:
        return self.tiles.rounded(
            max(size, self.padded_axes.get(axis, 1)) if size > 1 and self.tails != "exact" else size
        )

    def _ones(self) -> frozenset[Axis]:
        return frozenset(a for a in self.order if min(self.sizes.get(a, self._tile(a)), a.extent) == 1)

    def _tile(self, axis: Axis) -> int:
        return self._window(axis, self.here)

    def _window(self, axis: Axis, scope: Scope) -> int:
        """The size of the current piece of an axis where a scope stands."""
        at = self._loop_over(axis, scope)
        if at is not None:
            return at.size
        if axis in self.blocks:
            return self.blocks[axis]
        if axis == self.part:
            return 1
        if axis in self.every_part and self.known.together:
            return axis.extent
        return self._rounded(axis, axis.extent)

    def _room(self, axis: Axis, scope: Scope) -> int:
        """The positions that a buffer has along an axis: where none of its loops is open, as many as the tiles of any reach."""
        window = self._window(axis, scope)
        if self.tails == "exact" or axis in self.blocks or self._loop_over(axis, scope) is not None:
            return window
        loops = [n for _, n in walk(self.kernel.body) if isinstance(n, RangeLoop) and n.axis == axis.name]
        tiles = [self._rounded(axis, self._piece(n, axis.extent)) for n in loops]
        return max([window, *(-(-axis.extent // t) * t for t in tiles)])

    def _loop_over(self, axis: Axis, scope: Scope | None) -> Scope | None:
        """The body of the innermost open loop over an axis."""
        while scope is not None and scope.along != axis:
            scope = scope.parent
        return scope

    def _is_padded(self, axis: Axis, scope: Scope) -> bool:
        if self.tails == "exact":
            return False
        at = self._loop_over(axis, scope)
        return at.edge if at is not None else axis.extent % self._window(axis, scope) != 0

    def _has_a_part_of(self, nest: Nest, scope: Scope) -> bool:
        """Says whether a nest has the axis of which a block has a part only, whose loop does not stand around a body."""
        return self.split in (*nest.axes, *nest.reduced) and self._loop_over(self.split, scope) is None

    # --- values

    def _with_maps(self, fold: Fold, axis: Axis, nests: Sequence[Nest]) -> Fold:
        """The fold as masks are judged by, with the maps of the tree inlined: what these hide, and what they read, is seen.

        nests: those in the loop over `axis`; other reductions that a map reads are finished.
        """
        maps: dict[Expr, Expr] = {}
        for nest in self.nests.values():
            if nest.reducer is None:
                maps[read(nest.name, nest.axes, nest.dtype)] = convert(substitute(nest.body, maps), nest.dtype)
        accumulators = tuple(replace(a, term=substitute(a.term, maps)) for a in fold.accumulators)
        before, after = (frozenset().union(*(a.term.tensors for a in of)) for of in (fold.accumulators, accumulators))
        inside = {n.name for n in nests if axis in n.axes}
        finished = (after - before - inside) & self.nests.keys()
        return replace(fold, accumulators=accumulators, finished_reads=fold.finished_reads | finished)

    def _find(self, node: Expr, scope: Scope) -> Expr | None:
        crossed: set[Axis] = set()
        at: Scope | None = scope
        while at is not None:
            if node in at.known:
                pieces = crossed & node.axes
                return self._piece_of(node, at.known[node], at, scope) if pieces else at.known[node]
            if at.along is not None:
                crossed.add(at.along)
            at = at.parent
        return None

    def _piece_of(self, node: Expr, value: Expr, owner: Scope, scope: Scope) -> Expr:
        """The current piece of a value that an outer body has for a larger one: it goes through a buffer there."""
        axes = self._sorted(node.axes)
        name = next((n for at, of, n in self.spilled if at is owner and of == node), None)
        if name is None:
            name = f"pieces{len(self.spilled)}"
            self.spilled.append((owner, node, name))
            sizes = tuple(self._room(a, owner) for a in axes)
            owner.statements.append(Buffer(name, axes, sizes, node.dtype, const(_zero(node.dtype), node.dtype)))
            owner.statements.append(Set(name, axes, value))
        home = self._home(node.axes, scope)
        here = self._unique(f"{name}.here")
        home.statements.append(Get(here, name, axes, node.dtype))
        home.known[node] = read(here, axes, node.dtype)
        return home.known[node]

    def _unique(self, name: str) -> str:
        """A name like this one that no other buffer of the kernel has."""
        found, number = name, 1
        while found in self.used:
            found, number = f"{name}{number}", number + 1
        self.used.add(found)
        return found

    def _get(self, name: str, buffer: str, axes: tuple[Axis, ...], dtype: str, scope: Scope) -> None:
        """`name` = the current part of a buffer, also where another value had that name before."""
        at: Scope | None = scope
        taken = False
        while at is not None and not taken:
            taken = any(tile_name(s) == name or (isinstance(s, Loop) and any(c.name == name for c in s.carries))
                        for s in at.statements)  # fmt: skip
            at = at.parent
        if not taken:
            scope.statements.append(Get(name, buffer, axes, dtype))
            return
        other = self._unique(f"{name}.again")
        scope.statements.append(Get(other, buffer, axes, dtype))
        scope.statements.append(Let(name, axes, read(other, axes, dtype)))

    def _home(self, axes: frozenset[Axis], scope: Scope) -> Scope:
        """The body of the innermost loop over one of these axes, else that of the block."""
        while scope.parent is not None and scope.along not in axes:
            scope = scope.parent
        return scope

    def _compute(self, nest: Nest, scope: Scope) -> Expr:
        """The value of a nest that is computed in a body at once."""
        raise NotImplementedError

    def _emit_read(self, node: Read, scope: Scope) -> Expr:
        if node.tensor in self.pending:
            self._compute(*self.pending.pop(node.tensor))
            found = self._find(node, scope)
            assert found is not None
            return found
        if node.tensor not in self.tensors:
            if node.tensor in self.active:
                broken(6, f"{node.tensor} is read before the loop over {self.active[node.tensor].axis} has finished it")
            if node.tensor in self.known.partial:
                broken(7, f"{node.tensor} is read before its partial states are merged")
            broken(3, f"{node.tensor} is read where no open loop has computed it")
        home = self._home(node.axes, scope)
        axes = self._sorted(node.axes)
        name = f"{node.tensor}.{'_'.join(a.name for a in node.indices)}" if node.indices else f"{node.tensor}.value"
        home.known[node] = read(name, axes, node.dtype)
        self.loads.add(name)
        kept = self.kept.get(node.tensor)
        if kept is None or not _stands_in(home, kept.scope):
            home.statements.append(Load(name, node.tensor, node.indices, node.dtype))
            return home.known[node]
        loop = next((x for s, x in self.opened if s.parent is kept.scope and _stands_in(home, s)), None)
        if node not in kept.filled:
            buffer = self._unique(f"{name}.kept")
            kept.filled[node] = buffer, loop, self.part_tile
            sizes = tuple(self._room(a, kept.scope) for a in axes)
            zero = const(_zero(node.dtype), node.dtype)
            kept.scope.statements.append(Buffer(buffer, axes, sizes, node.dtype, zero, kept.memory))
        buffer, filled_by, part_tile = kept.filled[node]
        if self.split in node.axes and part_tile != self.part_tile:
            broken(
                8,
                f"{node.tensor} is kept in tiles of {part_tile} along {self.split}, and read in tiles of {self.part_tile}, whose "
                "parts begin elsewhere",
            )
        if filled_by is loop:
            home.statements.append(Load(name, node.tensor, node.indices, node.dtype))
            home.statements.append(Set(buffer, axes, home.known[node]))
        elif any(
            filled_by is x for _, x in self.opened
        ):  # a read before the loop that fills the buffer, which is still open
            home.statements.append(Load(name, node.tensor, node.indices, node.dtype))
        else:
            here = self._unique(f"{name}.here")
            home.statements.append(Get(here, buffer, axes, node.dtype))
            home.known[node] = read(here, axes, node.dtype)
            self.loads.add(here)
        return home.known[node]

    def _is_load(self, value: Read) -> bool:
        return value.tensor in self.loads


def _stands_in(scope: Scope | None, around: Scope) -> bool:
    """Says whether a body is another one or stands inside of it."""
    while scope is not None and scope is not around:
        scope = scope.parent
    return scope is not None


def _zero(dtype: str) -> float | int | bool:
    return False if dtype == "bool" else 0.0 if "float" in dtype else 0
