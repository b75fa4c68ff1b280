"""Schedules of a group that a search over trees finds, for the targets that run every tree.

The search prices trees by the model of `schedule`; its best ones are lowered and priced again as the kernels that they become, and
the best of these change a tile, a launch or their shares of a reduced axis as long as that is cheaper. Only small spaces are
searched. The least of many prices is more often too low than that of a few listed schedules (`benchmarks/tree_prices.py`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from operator import is_, le

import numpy as np

from pallasfuse.decisions import Phase, Placed
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion.cost import product_operands
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.ir.expr import Read
from pallasfuse.ir.fold import Group
from pallasfuse.ir.region import Region, independent_axes, region_of_group, spatial_axes
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Contract, TileProgram, every
from pallasfuse.ir.tree import Launch, Node, RangeLoop, Tree, TreeKernel, walk
from pallasfuse.lowering import assumptions, lower_on
from pallasfuse.options import FuseOptions
from pallasfuse.phases import is_misformed, problem_of, too_large, us_of
from pallasfuse.price.visited_tiles import visited_shares
from pallasfuse.price.xla_products import without_casts
from pallasfuse.resources.triton import view_of
from pallasfuse.resources.triton_view import WARP_ROWS
from pallasfuse.schedule import tiles
from pallasfuse.schedule.candidates import Candidate, ModelPrices, Space, without_equal_trees, without_padding
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.space import TooManyTrees, all_trees
from pallasfuse.schedule.splits import most_shares, split
from pallasfuse.targets import Target
from pallasfuse.tiling import arithmetic, bounds
from pallasfuse.tiling.choose import examine
from pallasfuse.tiling.levels import grid_of, in_grid
from pallasfuse.tiling.products import own_axes
from pallasfuse.tiling.tree_values import Bounded

WARPS, SLOTS = (4, 8), (1, 3, 4, 6)
"""Warps of a block, and slots of what its innermost loops load."""
_FIRST_SLOTS = 3
"""The slots that a search begins with."""
_STARTS, _OF_A_TREE, _DESCENTS = 6, 2, 2
"""The best candidates by the model that the search starts from, those of one tree among them, and the best of these, which are
changed."""
_TRIED, _RANKED = 24, 64
"""The candidates that are lowered to find these, and those of each tree that are looked at, by the model."""
_WORSE, _NEAR = 1.5, 1.15
"""What takes longer by these factors does not become fast enough by small changes, or better than what they made of another."""
_SIMILAR = 1.15
"""What is predicted to take so many times as long as the best tree may yet be faster."""
_SMALL = (1, 4)
"""Tiles along an axis that another one makes up for."""
_SHARES = 4
"""What runs well on so small a share of a device may run well on all of it when it is split."""
_MOST_NESTS, _MOST_TREES, _MOST_BODIES = 4, 256, 2048
"""The largest spaces that are searched: there is no bound by which the number of trees grows with that of nests."""
_CLOSE, _FASTER = 1.05, 0.8
"""The shares of a listed schedule's price at which a tree is tried as well, and at which it is what is planned."""
_RIVALS = 2


@dataclass(slots=True)
class Patience:
    """The microseconds near which a kernel has to be found for a long search to go on, and what they have decided so far."""

    most_us: float = math.inf
    decided: list[tuple[float, float, bool]] = field(default_factory=list)
    """Times, the factors of the patience that they were compared with, and whether they were within."""

    def allows(self, us: float, factor: float = 1.0) -> bool:
        """Is a time within the patience, so many times over? The answer is noted, for `decides_as`."""
        self.decided.append((us, factor, us <= factor * self.most_us))
        return self.decided[-1][2]

    @property
    def gave_up(self) -> bool:
        """Was something beyond the patience?"""
        return not all(within for *_, within in self.decided)

    def decides_as(self, most_us: float) -> bool:
        """Would another patience have decided alike?"""
        return all((us <= factor * most_us) == within for us, factor, within in self.decided)


def searched(
    group: Group, target: Target, tensors: Mapping[str, Tensor], patience: Patience | None = None
) -> list[tuple[float, Placed]]:
    """The kernels of the best trees of a group that a target can run, with their prices in microseconds, the lowest first.

    Empty where the target runs no trees, where the model is not of its kind of device, where the space is too large, and where
    the group has no product: what only reads rows has few schedules, all of which are listed (`tiling/choose.py`).

    patience: where the first kernels take much longer than that, they are all.
    """
    patience = Patience() if patience is None else patience
    if not target.runs_trees or target.platform != "gpu" or not examine(group).has_products:
        return []
    region = region_of_group(group, tensors)
    model = Model(region, target.device)
    choices = _choices(region)
    most = math.prod(-(-a.extent // min(choices[a.name])) for a in spatial_axes(region))
    bounds_us = model.bound_us(most), model.on(target.device.share(_SHARES)).bound_us(most) / _SHARES
    if not patience.allows(min(bounds_us)):  # what the best candidates are compared with below is not less
        return []
    space = _space(region, choices, strict=group.strict)
    if space is None:
        return []
    tried = _Tried(group, target, space, FoldsOnDemand(region, strict=group.strict))
    prices = ModelPrices(space, model)
    whole_us, starts = _leaders(prices)
    share_us, shared = _leaders(prices.on(target.device.share(_SHARES)), shares=_SHARES)
    if not patience.allows(min(whole_us, share_us / _SHARES)):
        return []
    starts = [tried.with_best_warps(p) for p in (*tried.running(starts), *tried.running(shared))]
    starts.sort(key=tried.us)
    best_us: float | None = None
    for point in starts[:_DESCENTS]:
        us = tried.us(point)
        if patience.allows(us, _WORSE) if best_us is None else us <= best_us:
            best_us = _NEAR * tried.descend(point)
    return tried.best()


def with_others(found: Sequence[tuple[float, Placed]], most_us: float = math.inf) -> Placed | None:
    """The best of some trees, with those beside it that a clock may prefer. None where none is as fast as `most_us`.

    The prices of the best trees differ by less than their error: one with other blocks is worth a try, and one with the same blocks
    and other steps in them. found: with their prices in microseconds, the lowest first.
    """
    if not found or found[0][0] > most_us:
        return None
    (us, best), *others = found
    near = [placed for other_us, placed in others if other_us <= min(most_us, _SIMILAR * us)]
    (blocks, steps), rivals = _shape(best), []
    rivals += [p for p in near if _shape(p)[0] != blocks][:1]
    rivals += [p for p in near if _shape(p)[0] == blocks and _shape(p)[1] != steps][:1]
    return replace(best, rivals=tuple(rivals))


def with_rivals(
    group: Group, placed: Placed, target: Target, tensors: Mapping[str, Tensor], options: FuseOptions
) -> Placed:
    """The way to run a group by a listed schedule, and with it trees that are about as fast.

    A kernel that looks something up has one way.
    """
    if not options.tries_trees:
        return placed
    if not group.folds or placed.refused is not None or placed.lookups:
        return placed
    if visited_shares([p.program for p in placed.phases])[0] < 1.0:  # trees of the space visit what masks hide
        return placed
    own_us = us_of(placed.phases)
    found: Sequence[tuple[float, Placed]] = ()
    runner: Target | None = target
    while runner is not None and not found:
        found = searched(group, runner, tensors, Patience(_CLOSE * own_us))
        runner = runner.fallback
    trees = with_others(found, _CLOSE * own_us)
    if trees is None:
        return placed
    if found[0][0] > _FASTER * own_us:
        return replace(placed, rivals=(replace(trees, rivals=()), *trees.rivals)[:_RIVALS])
    why = f"{placed.phases[0].target.name}: a tree is predicted to be faster than {placed.schedule}"
    return replace(trees, declined=(*placed.declined, why), rivals=(placed, *trees.rivals)[:_RIVALS])


_Sizes = frozenset[tuple[str, int, bool]]


def _shape(placed: Placed) -> tuple[_Sizes, _Sizes]:
    """The sizes of the loops of the grid, and of the others, of a tree's first kernel, without their order."""
    tree: TreeKernel = placed.schedule.tree[0]
    loops = [n for _, n in walk(tree.body) if isinstance(n, RangeLoop)]
    blocks, steps = ([x for x in loops if (x.level == "grid") == grid] for grid in (True, False))
    of_blocks, of_steps = (frozenset((x.axis, x.size, x.shares) for x in xs) for xs in (blocks, steps))
    return of_blocks, of_steps


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate of a space, and how it is launched."""

    candidate: Candidate
    slots: int = _FIRST_SLOTS
    warps: int = WARPS[0]
    shares: int = 1
    """The shares of the grid in which its outermost loop runs."""


@dataclass
class _Tried:
    """The points of a search that were lowered, with their prices."""

    group: Group
    target: Target
    space: Space
    folds: FoldsOnDemand
    kernels: dict[Tree, tuple[float, Placed] | None] = field(default_factory=dict)
    prices: dict[Point, float] = field(default_factory=dict)
    phases: dict[Tree, tuple[Phase, ...] | None] = field(default_factory=dict)
    tiled: dict[Candidate, TreeKernel] = field(default_factory=dict)
    lowered: "Lowered" = field(default_factory=dict)
    misformed: set[object] = field(default_factory=set)
    """The loops, without the sizes of their tiles, of trees that the target runs with no tiles."""

    def best(self) -> list[tuple[float, Placed]]:
        return sorted((k for k in self.kernels.values() if k is not None), key=lambda priced: priced[0])

    def us(self, point: Point) -> float:
        """The price of a point, in the better order of its axes; infinity where the target cannot run it."""
        if point not in self.prices:
            self.prices[point] = min(map(self._us_of, self._trees(point)), default=float("inf"))
        return self.prices[point]

    def _us_of(self, tree: Tree) -> float:
        if tree not in self.kernels:
            phases = None if _loops(tree) in self.misformed else self._phases(tree)
            if phases is not None and is_misformed(phases):
                self.misformed.add(_loops(tree))
            placed = _placed(self.group, tree, phases)
            runs = placed is not None and not any(map(_is_slow, placed.phases))
            self.kernels[tree] = (us_of(placed.phases), placed) if placed is not None and runs else None
        found = self.kernels[tree]
        return float("inf") if found is None else found[0]

    def _phases(self, tree: Tree) -> tuple[Phase, ...] | None:
        """As `phases_of_tree`: the same objects each time, of which resources are remembered."""
        if tree not in self.phases:
            self.phases[tree] = phases_of_tree(self.group, tree, self.target, self.folds, self.lowered)
        return self.phases[tree]

    def running(self, points: Iterable[Point]) -> list[Point]:
        """The first few of these points that the target can run, not many of one tree.

        Where a tree's tiles are too large for a block, it is not tried with larger ones: they do not fit either.
        """
        found: list[Point] = []
        oversized: list[Candidate] = []
        tried = 0
        for point in points:
            tree, sizes = point.candidate.tree, point.candidate.sizes
            larger = any(c.tree == tree and all(map(le, c.sizes, sizes)) for c in oversized)
            if larger or sum(p.candidate.tree == tree for p in found) == _OF_A_TREE:
                continue
            tried += 1
            if self.us(point) < math.inf:
                found.append(point)
            elif self._is_too_large(point):
                oversized.append(point.candidate)
            if len(found) == _STARTS or tried == _TRIED:
                break
        return found

    def with_best_warps(self, point: Point) -> Point:
        """A point with as many warps as suit its tiles: the model of a space knows no registers, and few warps may lack some."""
        return min((replace(point, warps=n) for n in WARPS), key=self.us)

    def _is_too_large(self, point: Point) -> bool:
        """Says of a point that does not run whether its tiles are too large for a block, in any order of its axes."""
        trees = self._trees(point)
        if any(_loops(tree) in self.misformed for tree in trees):
            return False  # what is larger has no other loops, and is not lowered
        made = [self._phases(tree) for tree in trees]
        return bool(made) and all(phases is not None and any(map(too_large, phases)) for phases in made)

    def descend(self, point: Point) -> float:
        """Changes one thing of a point after the other, as long as its price falls. Returns the price."""
        still, changes = 0, self._changes(point)
        while still < len(changes):
            for n in range(len(changes)):
                better = next((p for p in changes[n] if self.us(p) < self.us(point)), None)
                if better is None:
                    still += 1
                else:
                    still, point, changes = 0, better, self._changes(better)
        return self.us(point)

    def _changes(self, point: Point) -> list[list[Point]]:
        """The points beside one, in lists by what they change. Larger tiles of fewer blocks may be shared by more."""
        tree = self._tree(point.candidate)
        blocks, _ = grid_of(tree.body)
        most = most_shares(self.space.region, tree, self.target.device.multiprocessors)
        useful = [1 << n for n in range(most.bit_length())]
        found = []
        for n, (axis, sizes) in enumerate(self.space.choices.items()):
            at = sizes.index(point.candidate.sizes[n])
            beside = []
            for i in (at - 1, at + 1):
                resized = _resized(point.candidate, n, sizes[i]) if 0 <= i < len(sizes) else None
                # larger blocks can be shared by more, and smaller pieces of what is shared
                shared = 1 if (i > at) == any(x.axis == axis for x in blocks) else -1
                for shares in dict.fromkeys(
                    (point.shares, point.shares * 2 if shared > 0 else max(1, point.shares // 2))
                ):
                    if resized is not None and shares in useful:
                        beside.append(replace(point, candidate=resized, shares=shares))
            found.append(beside)
        found.append([replace(point, shares=n) for n in useful if n in (point.shares * 2, point.shares // 2)])
        found.append([replace(point, slots=n) for n in SLOTS if n != point.slots])
        found.append([replace(point, warps=n) for n in WARPS if n != point.warps])
        return found

    def _tree(self, candidate: Candidate) -> TreeKernel:
        """The tree of a candidate, built once for all ways to launch and to share it."""
        if candidate not in self.tiled:
            self.tiled[candidate] = self.space.tree(candidate)
        return self.tiled[candidate]

    def _trees(self, point: Point) -> list[Tree]:
        """The trees of a point: with the largest tile of the grid first, and as the space has them where a side of a product is
        computed. Values in a block have their axes in this order, and the first one is that of the rows of products: the matrix
        unit of a warpgroup takes 64 of these, and as few columns as there are; a computed side is better the left one."""
        region = self.space.region
        whole = launched(replace(self._tree(point.candidate), name=self.group.name), point.warps, point.slots)
        orders = [_widest_first(whole, region), *([whole] if self.computes else [])]
        if point.shares == 1:
            return [(tree,) for tree in dict.fromkeys(orders)]
        processors = self.target.device.multiprocessors
        found = (split(region, tree, point.shares, processors, WARPS[0]) for tree in dict.fromkeys(orders))
        return [tree for tree in found if tree is not None]

    @cached_property
    def computes(self) -> bool:
        """Is a side of a product computed in the kernel?"""
        sides = [side for n in self.space.region.nests for side in product_operands(n) or ()]
        return not all(isinstance(without_casts(side), Read) for side in sides)


def _loops(tree: Tree) -> object:
    """The loops of a tree, whatever the sizes of their tiles: those that would run once are no loops."""

    def form(node: Node) -> object:
        if not isinstance(node, RangeLoop):
            return node
        return node.axis, node.level, node.shares, tuple(map(form, node.body))

    return tuple(tuple(map(form, kernel.body)) for kernel in tree)


def _resized(candidate: Candidate, axis: int, size: int) -> Candidate:
    return candidate._replace(sizes=(*candidate.sizes[:axis], size, *candidate.sizes[axis + 1 :]))


def _leaders(prices: ModelPrices, shares: int = 1) -> tuple[float, list[Point]]:
    """The candidates of each tree that are best by the model on its device, in so many shares; and the time of the best one."""
    space, sizes = prices.space, prices.every_size
    found: list[tuple[float, Candidate]] = []
    for tree, form in enumerate(space.trees):
        if shares > 1 and split(space.region, form, shares) is None:
            continue
        us = prices.of_every(tree)
        best = np.argsort(us, kind="stable")[:_RANKED]
        found += [(float(us[row]), Candidate(tree, tuple(map(int, sizes[row])))) for row in best]
    able = sorted(f for f in found if f[0] < math.inf)
    return able[0][0] if able else math.inf, [Point(c, shares=shares) for _, c in able]


Lowered = dict[Tree, tuple[TileProgram, ...] | None]
"""The programs of trees as a target has them, but for warps and slots, which change nothing else; None where there are none."""


def placed_by_tree(
    group: Group, tree: Tree, target: Target, folds: FoldsOnDemand, lowered: Lowered | None = None
) -> Placed | None:
    """A group run as a tree says; None where the target cannot, or results would differ in ways that the group does not say.

    folds: of the group's region, for many trees. lowered: of the same group and target; grows.
    """
    return _placed(group, tree, phases_of_tree(group, tree, target, folds, {} if lowered is None else lowered))


def _placed(group: Group, tree: Tree, phases: tuple[Phase, ...] | None) -> Placed | None:
    """A group in the phases of a tree; None where there are none, or the target cannot run them."""
    if phases is None or any(problem_of(p) is not None for p in phases):
        return None
    return Placed(Schedule((), group.rolled, group.rolled.extent, tree=tree), phases, ())


def phases_of_tree(
    group: Group, tree: Tree, target: Target, folds: FoldsOnDemand, lowered: Lowered
) -> tuple[Phase, ...] | None:
    """The kernels of a tree, whether the target runs them or not; None where it is not lowered. Otherwise as `placed_by_tree`."""
    plain = tuple(replace(k, body=tuple(map(_one_slot, k.body)), launch=replace(k.launch, warps=0)) for k in tree)
    if plain not in lowered:
        lowered[plain] = _programs(group, plain, target, folds)
    programs = lowered[plain]
    if programs is None:
        return None
    own = (replace(p, warps=k.launch.warps or p.warps, stages=_slots(k)) for p, k in zip(programs, tree, strict=True))
    return tuple(Phase(p, target) for p in own)


def _slots(kernel: TreeKernel) -> int:
    return max((n.slots for _, n in walk(kernel.body) if isinstance(n, RangeLoop)), default=1)


def _one_slot(node: Node) -> Node:
    if not isinstance(node, RangeLoop):
        return node
    body = tuple(map(_one_slot, node.body))
    same = node.slots == 1 and all(map(is_, body, node.body))
    return node if same else replace(node, body=body, slots=1)


def _programs(group: Group, tree: Tree, target: Target, folds: FoldsOnDemand) -> tuple[TileProgram, ...] | None:
    """One program for each kernel of a tree."""
    folds.forget()
    schedule = Schedule((), group.rolled, group.rolled.extent, tree=tree)
    bounded: list[Bounded] = []
    try:
        programs = lower_on(target, schedule, folds, bounded=bounded)
    except (InvalidProgramError, AssertionError):
        return None
    if isinstance(programs, Refusal) or any(b.guards.fills for b in bounded):
        return None
    if not set(assumptions(bounded)) <= {*group.exceptions, *bounds.exceptions(group)}:
        return None  # it skips what masks hide, and a plan would not say what that assumes
    if not (folds.conditions.keys() <= set(group.conditions) and folds.exceptions.keys() <= set(group.exceptions)):
        return None
    return tuple(arithmetic.rewrite_for(target, p) for p in programs)


def _is_slow(phase: Phase) -> bool:
    """Is a product computed without matrix units, or do warps compute rows of one that others have, too?

    Products that read each other share a layout in which warps own rows; the fewest warps make up for few rows by columns.
    """
    products = view_of(phase.program, phase.target).products.values()
    alone = len(products) < sum(isinstance(s, Contract) for s in every(phase.program.body))
    return alone or (phase.program.warps > WARPS[0] and any(p.m < WARP_ROWS * phase.program.warps for p in products))


def _choices(region: Region) -> tiles.Choices:
    """The sizes of tiles along each axis."""
    whole = [a.name for a in independent_axes(region)]
    beside = _beside_others(region)
    return {
        axis: (*(_SMALL if axis in beside else ()), *(tuple(filter(tiles.is_power_of_two, sizes)) or sizes))
        for axis, sizes in tiles.choices(region.axes.values(), whole, little_padding=True).items()
    }


def _space(region: Region, choices: tiles.Choices, *, strict: bool) -> Space | None:
    """The trees and tiles of a region; None where they are too many."""
    if len(region.nests) > _MOST_NESTS:
        return None
    may_fold = derivable(region, strict=strict)
    try:
        trees = tuple(islice(all_trees(region, may_fold, most_bodies=_MOST_BODIES), _MOST_TREES + 1))
    except TooManyTrees:
        return None
    if len(trees) > _MOST_TREES:
        return None
    space = without_padding(without_equal_trees(Space(region, trees, choices, may_fold)))
    every_tree = dict.fromkeys(launched(t, 0, _FIRST_SLOTS) for t in space.trees)
    return replace(space, trees=tuple(every_tree)) if space.count else None


def _beside_others(region: Region) -> set[str]:
    """The axes that are rows or columns of products together with others: few positions of one are enough."""
    sides = [s for n in region.nests if n.is_reduction for s in own_axes(n.body, frozenset(n.reduced))]
    longer = {a.name for s in sides for a in s if any(b != a and b.extent >= tiles.UNIT for b in s)}
    alone = {a.name for s in sides if len(s) == 1 for a in s}
    return longer - alone - {a.name for n in region.nests for a in n.reduced}


def _widest_first(tree: TreeKernel, region: Region) -> TreeKernel:
    around, body = grid_of(tree.body)
    sizes = {x.axis: min(x.size, region.axes[x.axis].extent) for x in around}
    loops = sorted(around, key=lambda x: (sizes[x.axis] > 1, -sizes[x.axis]))  # no value has an axis of one position
    return replace(tree, body=in_grid(loops, body))


def launched(tree: TreeKernel, warps: int, slots: int) -> TreeKernel:
    """The tree with so many warps, and slots in the loops that run one after the other and have none inside."""

    def with_slots(node: Node) -> Node:
        if not isinstance(node, RangeLoop):
            return node
        innermost = node.level == "serial" and not any(isinstance(n, RangeLoop) for _, n in walk(node.body))
        body, own = tuple(map(with_slots, node.body)), slots if innermost else 1
        same = node.slots == own and all(map(is_, body, node.body))
        return node if same else replace(node, body=body, slots=own)

    return replace(tree, body=tuple(map(with_slots, tree.body)), launch=Launch(warps=warps))
