"""Schedule tree + nests -> tile programs: one walk gives legality, states, buffers, loads and stores.

A value is known in the body of the loop where its nest stands, for the pieces of axes that the loops around it have open. A
reduction whose axis is open has a *state*: accumulators and frames, carried by the outermost open loop over its reduced axes; where
deeper loops take it piece by piece, they are a buffer. A load stands in the innermost loop over one of its axes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import assert_never

from pallasfuse.errors import Refusal
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, const, convert, read
from pallasfuse.ir.fold import OLD, Fold
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.region import Region
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import (
    Buffer,
    Carry,
    Let,
    Load,
    Loop,
    Segment,
    Set,
    Statement,
    Store,
    TileProgram,
    block_start,
    verify,
)
from pallasfuse.ir.tree import Do, Keep, Merge, Node, RangeLoop, Tree, TreeKernel, walk
from pallasfuse.tiling.bounds import known_where
from pallasfuse.tiling.finished import loaded, tiles_of_loops, with_reuse
from pallasfuse.tiling.levels import blocks_and_loops, each_in_a_loop, grid_of, splits
from pallasfuse.tiling.rules import BrokenRuleError, broken
from pallasfuse.tiling.tree_loops import TreeLoops, shared_loops
from pallasfuse.tiling.tree_rules import check, side_by_side
from pallasfuse.tiling.tree_values import Bounded, Derive, Kept, Kernels, OpenPass, Tiles
from pallasfuse.tiling.values import Scope


def lower_tree(
    region: Region, tree: Tree, derive: Derive, tiles: Tiles, *, strict: bool = False, uneven: bool = False,
    static_bounds: bool = False, together: bool = False, bounded: list[Bounded] | None = None,
) -> tuple[TileProgram, ...] | Refusal:  # fmt: skip
    """The kernels of a schedule tree, each reading what those before have stored; or the rule that the tree breaks.

    Levels that are not blocks or loops (`levels.blocks_and_loops`) run as those.

    Args:
      strict: as in `fuse`.
      uneven: as in `tree_rules.check`.
      static_bounds: as `Target.static_bounds`.
      together: the blocks of all parts run all kernels, and hold the states of as many parts as there are (`Target.cluster`).
      bounded: gets the loops that masks may bound.
    """
    known = Kernels(region, derive, tiles, strict, {t.name: t for t in region.inputs}, [], static_bounds, together)
    programs = []
    try:
        check(tree, region, uneven=uneven)
        plain = blocks_and_loops(tree, region)
        if isinstance(plain, Refusal):
            return plain
        for number, kernel in enumerate(plain):
            wanted = _read_later(region, plain[number:])
            programs.append(TreeLowering(kernel, known, wanted, _joined_last(region, plain[number + 1 :])).run())
        missing = [n for n in region.outputs if n not in known.stored]
        if missing:
            broken(13, f"nothing stores {', '.join(missing)}")
    except BrokenRuleError as error:
        return Refusal(str(error))
    if bounded is not None:
        bounded += known.bounded
    return tuple(programs)


def _done_in(kernel: TreeKernel) -> set[str]:
    return {n.nest for _, n in walk(kernel.body) if isinstance(n, Do | Merge)}


def _read_later(region: Region, kernels: Sequence[TreeKernel]) -> frozenset[str]:
    """Returns the nests of the first kernel that later ones read, and do not compute again."""
    nests = region.by_name
    found: set[str] = set()
    for kernel in kernels[1:]:
        own = _done_in(kernel)
        for name in {n.nest for _, n in walk(kernel.body) if isinstance(n, Do)} & nests.keys():
            found |= {t for t in nests[name].reads if t in nests and t not in own}
    return frozenset(found) & _done_in(kernels[0])


def _joined_last(region: Region, kernels: Sequence[TreeKernel]) -> tuple[Nest, ...]:
    """The nests of one last kernel that merges states and computes maps of them, and nothing else; else none."""
    nodes = [n for k in kernels for _, n in walk(k.body)]
    plain = all(isinstance(n, Merge) or (isinstance(n, RangeLoop) and n.level == "grid")
                or (isinstance(n, Do) and not region.by_name[n.nest].is_reduction) for n in nodes)  # fmt: skip
    return (
        tuple(region.by_name[n.nest] for n in nodes if isinstance(n, Do | Merge)) if len(kernels) == 1 and plain else ()
    )


class TreeLowering(TreeLoops):
    """One kernel of a tree under construction."""

    def __init__(self, kernel: TreeKernel, known: Kernels, wanted: frozenset[str], last: Sequence[Nest] = ()) -> None:
        """wanted: the nests that later kernels read; last: those of the next kernel, if it only joins the states of this one."""
        super().__init__(known)
        self.last = last
        self.kernel, self.stores = kernel, wanted | frozenset(known.region.outputs)
        self.outputs: list[Tensor] = []
        self.steps = Counter(n.nest for _, n in walk(kernel.body) if isinstance(n, Do | Merge))
        self.later: tuple[Statement, ...] = ()
        self.buffers: dict[str, str] = {}
        """The names of the buffers of accumulators that inner loops take piece by piece."""
        self._grid()

    # --- axes and windows

    def _grid(self) -> None:
        """The blocks of the kernel, and the parts that they have of an axis that they reduce."""
        loops, body = grid_of(self.kernel.body)
        self.block_body = body
        blocks: dict[Axis, int] = {}
        parts = 1
        for loop in loops:
            axis = self.axes[loop.axis]
            if loop.shares or splits(loop, self.known.region):
                if self.split not in (None, axis):
                    broken(14, f"{self.kernel.name}: blocks have parts of {self.split} and of {axis}")
                self.split = axis
                parts *= loop.size if loop.shares else -(-axis.extent // loop.size)
                self.sizes |= {} if loop.shares else {axis: loop.size}
            else:
                blocks[axis] = self._piece(loop, blocks.get(axis, axis.extent))
                self.sizes[axis] = blocks[axis] if loop.shares else loop.size
        if self.split in blocks:
            broken(1, f"{self.kernel.name}: blocks have pieces and parts of {self.split}")
        if self.split is not None:
            tile = self.sizes.get(self.split, -(-self.split.extent // parts))
            self.block_body = each_in_a_loop(body, self.split, tile, self.nests)
        self.padded_axes = self._products(blocks)
        merged = [self.known.partial[n] for n in _done_in(self.kernel) if n in self.known.partial]
        self.blocks = {a: self._rounded(a, t) for a, t in blocks.items()}
        self.part = Axis(f"{self.split}.part", parts)
        self.parts = Axis("", 1)
        self.grid = (*(((self.part, 1),) if self.split else ()), *self.blocks.items())
        self.every_part = [Axis(p.part.name + "s", p.part.extent) for p in merged if p.part is not None]
        self.order = tuple(dict.fromkeys((*(a for a, _ in self.grid), *self.every_part, *self._inner_axes())))

    def _inner_axes(self) -> Iterator[Axis]:
        """The axes inside of a block: those of its loops, then those of what is reduced in these, then all others."""
        looped = [self.axes[n.axis] for _, n in walk(self.block_body) if isinstance(n, RangeLoop)]
        yield from looped
        done = [self.nests[n.nest] for _, n in walk(self.block_body) if isinstance(n, Do | Merge)]
        for nest in sorted(done, key=lambda n: (not n.is_reduction, set(looped).isdisjoint(n.reduced))):
            yield from (*nest.axes, *nest.reduced)
        yield from self.axes.values()

    # --- the kernel

    def run(self) -> TileProgram:
        """The kernel's tile program."""
        self._nodes(self.block_body, self.root)
        launch, body = self.kernel.launch, with_reuse(self.root.statements)
        side_by_side(self.kernel, [-(-a.extent // t) for a, t in self.grid])
        slots = max((n.slots for _, n in walk(self.block_body) if isinstance(n, RangeLoop)), default=1)
        for tensor in self.outputs:
            self.known.tensors[tensor.name] = tensor
        ends = frozenset().union(*(g.stop.tensors for s in body if isinstance(s, Loop) for g in s.segments))
        return verify(TileProgram(
            self.kernel.name, self._inputs(body), tuple(self.outputs), self.grid, self._tiles(body), body, launch.warps or 4,
            slots, launch.ping_pong, tuple(a for a in self.blocks if block_start(a) in ends), launch.software_pipelined,
            launch.persistent, launch.grid_swizzle, launch.prefetch_wait, ranges=tuple(self.ranges), later=self.later,
        ))  # fmt: skip

    def _inputs(self, body: tuple[Statement, ...]) -> tuple[Tensor, ...]:
        """What the kernel reads: inputs of the region in their order, then what earlier kernels and passes over masks have left."""
        read_here = dict.fromkeys(loaded(body))
        names = dict.fromkeys(t.name for t in self.known.region.inputs if t.name in read_here) | read_here
        for r in self.ranges:
            names |= dict.fromkeys((*sorted(r.predicate.tensors), *(t.name for t in r.found)))
        return tuple(self.tensors[t] for t in names)

    def _tiles(self, body: tuple[Statement, ...]) -> tuple[tuple[Axis, int], ...]:
        """The tile of each axis outside of loops; where nothing there has the axis, that of the loops over it, if they agree."""
        found = {**tiles_of_loops(body), **self.blocks}
        return tuple((a, found.get(a) or self._window(a, self.root)) for a in self.order)

    def _nodes(self, body: tuple[Node, ...], scope: Scope) -> None:
        for node in body:
            match node:
                case Do(name):
                    self._do(self.nests[name], scope)
                case Merge(name):
                    self._settle(scope)
                    self._merge(self.nests[name], scope)
                case Keep(tensor, memory):
                    if tensor not in self.tensors:
                        broken(8, f"{tensor} is kept, which is neither an input nor stored by an earlier kernel")
                    self.kept[tensor] = Kept(scope, memory)
                case RangeLoop():
                    self._settle(scope)
                    for nest in self._under(node):
                        of = self.active.get(nest.name)
                        if (
                            of is not None
                            and of.body is scope
                            and nest.name in of.deeper
                            and all(x is not node for x in of.chain)
                        ):
                            self._move(nest, of, scope)
                    self._loop(node, scope)
                case _:
                    assert_never(node)
        self._settle(scope)

    def _settle(self, scope: Scope) -> None:
        """Computes what stands in a body and nothing in it has read so far."""
        for name in [n for n, (_, at) in self.pending.items() if at is scope]:
            if name in self.pending:  # the one before may have read it
                self._compute(*self.pending.pop(name))

    # --- nests

    def _do(self, nest: Nest, scope: Scope) -> None:
        if nest.name in self.active:
            self._step_state(nest, self.active[nest.name], scope)
        elif nest.is_reduction and nest.name not in self.stores:
            self.pending[nest.name] = nest, scope
        else:
            self._compute(nest, scope)

    def _compute(self, nest: Nest, scope: Scope) -> Expr:
        """The value of a nest whose reduced axes are whole in a tile."""
        if nest.reducer is None:
            value = convert(self._expr(nest.body, scope), nest.dtype)
            if nest.name not in self.stores or self._read_here(nest):
                value = self._let(f"{nest.name}.value", nest.axes, value, scope)
        else:
            fold = self._refined_fold(nest)
            if fold is None:
                total = self._reduction(
                    nest.name, nest.axes, nest.reducer, nest.body, nest.reduced, scope, nest.precision
                )
            else:
                total = self._refined_at_once(fold, scope)
            value = self._let(f"{nest.name}.value", nest.axes, convert(total, nest.dtype), scope)
        scope.known[read(nest.name, nest.axes, nest.dtype)] = value
        self._store(nest, value, scope)
        return value

    def _refined_fold(self, nest: Nest) -> Fold | None:
        """The fold of a reduction that is computed at once, if it has a correction for the rounding of those that it reads."""
        waiting = (n for n, _ in self.pending.values())
        finished = [n for n in (*self.at_once, *waiting) if self._depends(nest, n.name)]
        self.at_once.append(nest)
        for axis in nest.reduced:
            over = [n for n in finished if axis in n.reduced]
            fold = self.known.derive.refined(nest, axis, over) if over else None
            if fold is not None:
                return fold
        return None

    def _refined_at_once(self, fold: Fold, scope: Scope) -> Expr:
        """The value of such a reduction, with the companions that correct the rounding of the frames."""
        assert fold.refined is not None
        nest = fold.nest
        for frame in fold.frames:
            key = read(frame.name, frame.axes, frame.value.dtype)
            scope.known[key] = self._let(frame.name, frame.axes, self._expr(frame.value, scope), scope, pinned=True)
        replacements: dict[Expr, Expr] = {}
        for a in fold.accumulators:
            total = self._reduction(f"{a.name}.all", a.axes, a.reducer, a.term, nest.reduced, scope, nest.precision)
            replacements[read(a.name, a.axes, a.dtype)] = total
        main = fold.accumulators[0]
        result = self._let(f"{main.name}.refined", main.axes, self._expr_with(fold.refined, replacements, scope), scope)
        return self._expr_with(fold.finish, {read(main.name, main.axes, main.dtype): result}, scope)

    def _read_here(self, nest: Nest) -> bool:
        return any(nest.name in self.nests[n].reads for n in _done_in(self.kernel) if n in self.nests)

    def _store(self, nest: Nest, value: Expr, scope: Scope) -> None:
        """A nest that is finished, where somebody else reads it."""
        if nest.name not in self.stores:
            return
        scope.statements.append(Store(nest.name, nest.axes, value))
        self.known.stored.add(nest.name)
        if all(t.name != nest.name for t in self.outputs):
            self.outputs.append(Tensor(nest.name, nest.axes, nest.dtype))

    def _finished(self, fold: Fold, folds: list[Fold], scope: Scope) -> None:
        self._finish(fold, folds)
        nest = fold.nest
        node = read(nest.name, nest.axes, nest.dtype)
        value = scope.known[node]
        if isinstance(value, Read) and self.steps[nest.name] > 1:  # another loop has accumulators of the same name
            name, axes = f"{nest.name}.value", self._sorted(frozenset(nest.axes))
            scope.statements.append(Let(name, axes, value))
            value = scope.known[node] = read(name, axes, nest.dtype)
        self._store(nest, value, scope)

    def _step_state(self, nest: Nest, of: OpenPass, scope: Scope) -> None:
        """One step of a reduction that is open: its accumulators, and, where no loop stands between, its frames."""
        fold = of.by_name[nest.name]
        if nest.name not in of.deeper:
            self._frames(fold, of.by_name, scope)
            self._accumulate(fold, scope)
            return
        if nest.name in of.moved:
            fold = replace(fold, accumulators=tuple(replace(a, update=None) for a in fold.accumulators))
        self._get_accumulators(fold, scope)
        self._accumulate(fold, scope)
        after = [read(f"{a.name}.next", self._sorted(frozenset(a.axes)), a.dtype) for a in fold.accumulators]
        self._set_accumulators(fold, after, scope)

    def _move(self, nest: Nest, of: OpenPass, scope: Scope) -> None:
        """Before the loops in which a reduction goes on: its frames, and what it has so far at them if a piece has more trips."""
        fold = of.by_name[nest.name]
        self._frames(fold, of.by_name, scope)
        if nest.name in of.moved:
            self._get_accumulators(fold, scope)
            own = {a.name: read(a.name, self._sorted(frozenset(a.axes)), a.dtype) for a in fold.accumulators}
            moved = [own[a.name] if a.update is None else self._bind(a.update, fold, scope) for a in fold.accumulators]
            self._set_accumulators(fold, moved, scope)

    def _get_accumulators(self, fold: Fold, scope: Scope) -> None:
        for a in fold.accumulators:
            self._get(a.name, self.buffers[a.name], self._sorted(frozenset(a.axes)), a.dtype, scope)

    def _set_accumulators(self, fold: Fold, values: Sequence[Expr], scope: Scope) -> None:
        for a, value in zip(fold.accumulators, values, strict=True):
            axes = self._sorted(frozenset(a.axes))
            scope.statements.append(Set(self.buffers[a.name], axes, value))

    # --- loops

    def _pass(self, loop: RangeLoop, axis: Axis, scope: Scope) -> OpenPass:
        """The folds whose states a loop carries: it is the outermost open one over an axis that they reduce."""
        found: dict[str, Nest] = {}
        paths: dict[str, tuple[RangeLoop, ...]] = {}
        for path, node in walk(loop.body):
            if not isinstance(node, Do):
                continue
            nest = self.nests[node.nest]
            outside = any(self._loop_over(a, scope) is not None for a in nest.reduced)
            if axis not in nest.reduced or outside:
                continue
            lacking = next((x.axis for x in path if self.axes[x.axis] not in (*nest.axes, *nest.reduced)), None)
            if lacking is not None:
                broken(4, f"{nest.name} would be added to in every trip of the loop over {lacking}, which it lacks")
            if nest.name in found:
                broken(4, f"{nest.name} stands twice in the loop over {axis} that carries its state")
            found[nest.name] = nest
            paths[nest.name] = path
        chain = shared_loops(list(paths.values()), axis.name)
        deeper = {n for n, p in paths.items() if len(p) > len(chain)}
        folds: dict[str, Fold] = {}
        for nest in found.values():
            unfinished = {n: f for n, f in folds.items() if self._depends(nest, n)}
            late = next((t for t in nest.reads if t in found and t not in folds), None)
            if late is not None:
                broken(6, f"{nest.name} reads {late}, whose step comes after its own in the loop over {axis}")
            for name in unfinished:
                if name in deeper:
                    broken(
                        6,
                        f"{nest.name} reads {name}, which is unfinished in the loop over {axis} and known in an inner loop only",
                    )
            fold = self.known.derive(nest, axis, unfinished)
            if isinstance(fold, Refusal):
                broken(
                    6,
                    f"{nest.name} reads {', '.join(sorted(set(nest.reads) & unfinished.keys()))} unfinished: {fold.reason}",
                )
            folds[nest.name] = fold
        again = {n for n in deeper if any(self.axes[x.axis] in found[n].reduced for x in paths[n][len(chain) :])}
        moved = {n for n in again if any(a.update is not None for a in folds[n].accumulators)}
        return OpenPass(axis, list(folds.values()), frozenset(deeper), frozenset(moved), chain)

    def _depends(self, nest: Nest, name: str) -> bool:
        return name in nest.reads or any(self._depends(self.nests[t], name) for t in nest.reads if t in self.nests)

    def _loop(self, loop: RangeLoop, scope: Scope) -> None:
        axis = self.axes[loop.axis]
        handed = next((p for p in self.active.values() if any(x is loop for x in p.chain)), None)
        own = handed or self._pass(loop, axis, scope)
        split = axis == self.split and self._loop_over(axis, scope) is None
        inside = axis in self.blocks or self._loop_over(axis, scope) is not None
        window = self._window(axis, scope)
        tile = self._piece(loop, window if inside else axis.extent)
        tile = min(self._rounded(axis, tile), window) if inside else self._rounded(axis, tile)
        saved = self._place()
        self.rolled, self.top, sizes, part_tile = axis, scope, self.sizes, self.part_tile
        self.part_tile = tile if split else part_tile
        self.sizes = {**sizes, axis: loop.size if not loop.shares else tile}
        self._enter(own.folds)
        for fold in () if handed else own.folds:
            if fold.name in own.deeper:
                self._make_buffers(fold, scope)
        carries = self._carries(own, begun=handed is not None, last=loop is (loop, *own.chain)[-1])
        if inside:
            made = self._inner_loop(axis, tile, window, scope, None if handed is None else handed.visits)
        else:
            made = self._outer_loop(loop, own, axis, tile, scope, split=split)
        own.visits = made.to_visit, made.first
        segments = []
        for trip in made.trips:
            body = Scope(parent=scope, edge=trip.edge, along=axis, size=trip.tile)
            body.fixed = {**scope.fixed, **known_where(trip.true), **self._at_safe_frames(own.folds)}
            own.body, self.here, before = body, body, self.active
            self.active = {**before, **{f.name: own for f in own.folds}}
            self.opened.append((body, loop))
            self._nodes(loop.body, body)
            self.opened.pop()
            self.active = before
            segments.append(
                Segment(trip.start, trip.stop, trip.offset, trip.tile, tuple(body.statements), trip.label, trip.edge)
            )
        self.here = scope
        # what is read last before a loop that stores along the axis may still be in a cache
        backwards = not carries and not inside
        backwards &= all(isinstance(s, Load | Let | Store) for g in segments for s in g.body)
        made_loop = Loop(
            axis, tuple(carries), tuple(segments), made.to_visit, made.first, made.split, backwards, made.origin
        )
        scope.statements.append(made_loop)
        if not inside:
            self.known.bounded.append(Bounded(made_loop, made.guards, made.numbers, made.folds))
        if handed is None:
            self._closed(own, scope, split=split)
        self.sizes, self.part_tile = sizes, part_tile
        self._return_to(saved)

    def _carries(self, own: OpenPass, *, begun: bool, last: bool) -> list[Carry]:
        """The carried values of a loop. begun: a loop around it over the same axis carries them, too; last: no loop in it does."""
        found = []
        for a in (a for f in own.folds if f.name not in own.deeper for a in f.accumulators):
            axes = self._sorted(frozenset(a.axes))
            init = read(a.name, axes, a.dtype) if begun else const(a.reducer.identity(a.dtype), a.dtype)
            found.append(Carry(a.name, axes, a.dtype, init, f"{a.name}.next" if last else a.name))
        for frame in dict.fromkeys(self._carried_frames.values()):
            axes, dtype, name = self._sorted(frozenset(frame.axes)), frame.value.dtype, frame.name + OLD
            init = read(name, axes, dtype) if begun else const(frame.safe, dtype)
            found.append(Carry(name, axes, dtype, init, frame.name if last else name))
        return found

    def _closed(self, own: OpenPass, scope: Scope, *, split: bool) -> None:
        """After the loop that carries states: what it reduces is finished, or the states of a part are stored."""
        self.joined = [(at, name) for at, name in self.joined if name not in own.by_name]
        for fold in own.folds:
            if not split and self._has_a_part_of(fold.nest, scope):
                inside = f"the loop over {self.split}, of which a block has a part only, stands inside of it"
                broken(7, f"{fold.name} is finished after the loop over {own.axis}: {inside}")
            if fold.name in own.deeper:
                self._get_accumulators(fold, scope)
        if split and own.folds:
            self.later = self._results(own, scope)
            own.part, own.kernel = self.part, self.kernel.name
            for tensor, value in self._states(own.folds):
                scope.statements.append(Store(tensor.name, tensor.axes, value))
                self.outputs.append(tensor)
            self.known.partial |= {f.name: own for f in own.folds}
        else:
            for fold in own.folds:
                self._finished(fold, own.folds, scope)

    def _results(self, own: OpenPass, scope: Scope) -> tuple[Statement, ...]:
        """What turns the state of a part into results once it is that of all parts; empty where more follows."""
        joined = {n.name for n in self.last if n.is_reduction}
        if joined != own.by_name.keys() or own.deeper or scope is not self.root:
            return ()
        beginning, known = len(scope.statements), dict(scope.known)
        for fold in own.folds:
            self._finish(fold, own.folds)
        for nest in (n for n in self.last if not n.is_reduction):
            scope.statements.append(Store(nest.name, nest.axes, convert(self._expr(nest.body, scope), nest.dtype)))
        later = tuple(scope.statements[beginning:])
        del scope.statements[beginning:]
        scope.known = known
        return later

    def _make_buffers(self, fold: Fold, scope: Scope) -> None:
        for a in fold.accumulators:
            axes = self._sorted(frozenset(a.axes))
            sizes = tuple(self._room(x, scope) for x in axes)
            identity = const(a.reducer.identity(a.dtype), a.dtype)
            self.buffers[a.name] = self._unique(f"{a.name}.buffer")
            scope.statements.append(Buffer(self.buffers[a.name], axes, sizes, a.dtype, identity))
