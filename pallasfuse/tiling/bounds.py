"""Bounds of the rolled loop: tightened to the tiles that masks leave, and split into masked and unmasked segments."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Read, add, apply, const, postorder, read, sub, substitute
from pallasfuse.ir.fold import Accumulator, Fold, Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.neutrality import VANISHES, Far, evaluate_under, fills_of, hides, is_neutral
from pallasfuse.ir.reducers import MAX, MIN
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tile_program import Split, block_start
from pallasfuse.targets import Tails
from pallasfuse.tiling.masks import (
    EVERYWHERE,
    Extent,
    Interval,
    both_hold,
    extent,
    integer,
    maximum,
    minimum,
    narrows,
)
from pallasfuse.tiling.ranges import conjunction, is_exact
from pallasfuse.tiling.witness import every_row_keeps


@dataclass(frozen=True, slots=True)
class Trip:
    """One segment of the loop: trips `[start, stop)` of `tile` positions from `offset`.

    On its tiles the predicates in `true` hold everywhere; `edge`: a tile may reach past the end of the axis.
    """

    start: Expr
    stop: Expr
    offset: int
    tile: int
    edge: bool
    true: frozenset[Expr]
    label: str


@dataclass(frozen=True, slots=True)
class Guards:
    """Predicates outside of which every term of a pass is neutral, and what that assumes.

    `assumes_finite_factor`: values that are masked are finite. `fills`: of predicates, the numbers that stand for what is masked;
    they are far from what is not, and every row has something that is not masked.
    """

    predicates: tuple[Expr, ...] = ()
    assumes_finite_factor: bool = False
    fills: Mapping[Expr, frozenset[float]] = field(default_factory=dict)
    ranged: tuple[Expr, ...] = ()
    """Predicates, some of them over data: where one is false, every term is neutral. Empty where no range is asked for or known."""
    all_if_none: bool = False
    """Where they leave nothing of a row together, the terms count all the same: what is filled in is finite."""

    @property
    def visible(self) -> Expr | None:
        """The predicate that has a range: outside of it every term is neutral."""
        return conjunction(self.ranged) if self.ranged else None


@dataclass(frozen=True, slots=True)
class Plan:
    """The segments of a loop, what they visit together, and the masks that shaped them."""

    trips: tuple[Trip, ...]
    to_visit: Expr
    first: Expr
    guards: Guards
    tile: int
    whole: tuple[Expr, Expr]
    """Of the segments in tiles of that size: the first tile, and the one after the last."""
    split: Split | None = None

    def map(self, change: Callable[[Expr], Expr]) -> "Plan":
        """The plan with every bound changed."""
        trips = tuple(replace(t, start=change(t.start), stop=change(t.stop)) for t in self.trips)
        whole = change(self.whole[0]), change(self.whole[1])
        return replace(self, trips=trips, to_visit=change(self.to_visit), first=change(self.first), whole=whole)

    def part(self, part: Axis) -> "Plan":
        """The same loop over one of equal parts of what it visits: the one whose number is the block's position along `part`."""
        number, last = read(block_start(part), (), "int32"), integer(part.extent - 1)
        begin, end = self.whole[0], maximum(*self.whole)
        share = _tiles_covering(sub(end, begin), part.extent)
        low = minimum(add(begin, apply("mul", number, share)), end)
        high = minimum(add(low, share), end)
        is_last = apply("ge", number, last)

        def within(tile: Expr) -> Expr:
            return minimum(maximum(tile, low), high)

        trips = []
        for t in self.trips:
            if t.offset:  # what no whole tile covers is the last part's
                trips.append(replace(t, stop=simplify(apply("select", is_last, t.stop, t.start))))
            else:
                trips.append(replace(t, start=within(t.start), stop=within(t.stop)))
        tile = integer(self.tile)
        first = simplify(apply("mul", low, tile))
        stop = add(self.first, self.to_visit)
        reached = apply("select", is_last, stop, minimum(apply("mul", high, tile), stop))
        split = Split(part, maximum(simplify(sub(reached, first)), integer(0)))
        return replace(self, trips=tuple(trips), first=first, split=split)


def _tiles_below(position: Expr, tile: int) -> Expr:
    """floor(position / tile) for position >= 0."""
    return simplify(apply("div", position, integer(tile)))


def _tiles_covering(position: Expr, tile: int) -> Expr:
    """ceil(position / tile) for position >= 0."""
    return simplify(apply("div", add(position, integer(tile - 1)), integer(tile)))


def guards(
    folds: Sequence[Fold], rolled: Axis, *, inputs: AbstractSet[str] = frozenset(), inner: AbstractSet[str] = frozenset(),
    strict: bool = False, far: bool = True, ranged: bool = False,
) -> Guards:  # fmt: skip
    """Finds the predicates outside of which every term of a pass is neutral.

    They bound the rolled axis by positions, and by what they read of `inputs`. `inner`: reductions that are computed in the tile,
    and which no mask has touched (`unmasked`). `strict`: only predicates that assume nothing. `far`: those that fill in numbers,
    too, which needs folds that all reduce the rolled axis. Frames are finite: the tile program guards them. Reductions that an
    earlier pass has finished may be anything: a row that they make NaN must become NaN here too. `ranged`: find what is visible by
    masks over data, too.
    """
    accumulators = [a for f in folds for a in f.accumulators]
    frames = {frame.name for f in folds for frame in f.frames}
    finished = {r for f in folds for r in f.finished_reads}
    found: dict[Expr, list[Expr]] = {}
    hidden: dict[Expr, Mapping[Expr, float]] = {}
    for node in postorder(*(a.term for a in accumulators)) if accumulators else ():
        if not isinstance(node, Apply) or node.op != "select" or not node.args[0].tensors <= inputs:
            continue
        predicate, shown, other = node.args
        if narrows(predicate, rolled) or (ranged and is_exact(predicate)):
            found.setdefault(predicate, []).append(other)
            hidden[predicate] = {predicate: 0.0}
        if ranged and predicate.tensors and is_exact(predicate) and hides(shown):
            found.setdefault(apply("not", predicate), []).append(shown)
            hidden[apply("not", predicate)] = {predicate: 1.0}
    neutral: dict[Expr, tuple[frozenset[float], bool]] = {}
    for predicate, otherwise in found.items():
        filled = [evaluate_under(o, {}, far=True).value for o in otherwise]
        numbers = frozenset(f.value for f in filled if isinstance(f, Far)) if far and not strict else frozenset()
        proofs = [
            is_neutral(a.term, a.reducer, hidden[predicate], frames, finished, far=bool(numbers)) for a in accumulators
        ]
        assumes = any(p is not None and p.assumes_finite_factor for p in proofs)
        if all(proofs) and not (strict and assumes):
            neutral[predicate] = numbers, assumes
    bounding = [
        p for p, (numbers, _) in neutral.items()
        if narrows(p, rolled) and (not numbers or _shows_some(accumulators, rolled, inner))
    ]  # fmt: skip
    joined = _joined(neutral, accumulators, rolled, inner) if ranged else []
    used = [p for p in neutral if p in bounding or p in joined]
    return Guards(
        tuple(bounding), any(neutral[p][1] for p in used), {p: neutral[p][0] for p in used if neutral[p][0]},
        tuple(joined), any(neutral[p][0] for p in joined),
    )  # fmt: skip


def _joined(
    neutral: Mapping[Expr, tuple[frozenset[float], bool]], accumulators: Sequence[Accumulator], rolled: Axis,
    inner: AbstractSet[str],
) -> list[Expr]:  # fmt: skip
    """The predicates whose conjunction has a range, some over data.

    Those that fill in finite numbers are among them only if no other mask hides the element that a row keeps by the conjunction.
    """
    exact = [p for p in neutral if is_exact(p)]
    for joined in (exact, [p for p in exact if not neutral[p][0]]):
        filled = any(neutral[p][0] for p in joined)
        if any(p.tensors and rolled in p.axes for p in joined) and (
            not filled or _shows_some(accumulators, rolled, inner, where=frozenset(joined))
        ):
            return joined
    return []


def _shows_some(
    accumulators: Sequence[Accumulator], rolled: Axis, inner: AbstractSet[str], where: AbstractSet[Expr] | None = None
) -> bool:
    """Returns whether numbers that are far stand for nothing but what is masked, and each row has an element that no mask hides.

    Extremes must have one, by which they become the frames of other terms. Data that they read along the axis might be masked, too,
    before it is handed over; what is computed in the tile is not. where: only rows count that have an element at which all of these
    predicates are true.
    """
    for a in accumulators:
        masks = fills_of(a.term)
        if masks is None:
            return False
        if a.reducer in (MAX, MIN):
            term = a.term if where is None else _without(a.term, where)
            along = (n.tensor for n in postorder(term) if isinstance(n, Read) and rolled in n.indices)
            keeps = every_row_keeps(masks.shown, rolled) if where is None else where >= set(masks.shown)
            if not frozenset(along) <= inner or not keeps:
                return False
    return True


def unmasked(nests: Iterable[Nest]) -> frozenset[str]:
    """Names the reductions in which no mask fills anything in, nor in any of these nests that they read.

    What a mask has hidden before may be all that the next one leaves of a row, however much it leaves.
    """
    known = {n.name: n for n in nests}
    touched = {n for n, nest in known.items() if (fills := fills_of(nest.body)) is None or fills.shown}
    while more := {n for n, nest in known.items() if n not in touched and not nest.reads.isdisjoint(touched)}:
        touched |= more
    return frozenset(n for n, nest in known.items() if nest.is_reduction and n not in touched)


def unmasked_in(group: Group) -> frozenset[str]:
    """Names the reductions inside of a group's tiles that no mask has touched."""
    names = unmasked((*group.inner, *(f.nest for f in group.folds)))
    return frozenset(n.name for n in group.inner if n.name in names)


def _without(term: Expr, true: AbstractSet[Expr]) -> Expr:
    """A term where these predicates are true."""
    return simplify(substitute(term, known_where(true)))


def known_where(true: AbstractSet[Expr]) -> dict[Expr, Expr]:
    """The values of predicates where these are true, some of which are negations of others."""
    known: dict[Expr, Expr] = {p: const(True, "bool") for p in true}
    return known | {p.args[0]: const(False, "bool") for p in true if isinstance(p, Apply) and p.op == "not"}


def guards_of(group: Group, pass_index: int, *, ranged: bool = False) -> Guards:
    """The guards of one pass of a group. ranged: as in `guards`."""
    folds = [f for f in group.folds if f.pass_index == pass_index]
    inputs, inner = frozenset(group.inputs), unmasked_in(group)
    return guards(folds, group.rolled, inputs=inputs, inner=inner, strict=group.strict, ranged=ranged)


def bounding_axes(group: Group) -> frozenset[Axis]:
    """Axes along which bounds of the rolled axis differ, as they read inputs: a block should have one position of each."""
    found: set[Axis] = set()
    for pass_index in range(group.passes):
        for predicate in guards_of(group, pass_index).predicates:
            reads = [n for n in postorder(predicate) if isinstance(n, Read) and group.rolled not in n.indices]
            found.update(a for r in reads if dtypes.is_integer(r.dtype) for a in r.indices)
    return frozenset(found)


def exceptions(group: Group, *, ranged: bool = False) -> tuple[str, ...]:
    """What skipping masked tiles assumes. ranged: as in `guards`."""
    found = (assumed_by(guards_of(group, n, ranged=ranged)) for n in range(group.passes))
    return tuple(dict.fromkeys(text for texts in found for text in texts))


def assumed_by(skipped: Guards) -> Iterator[str]:
    """What it assumes to skip tiles outside of these predicates."""
    for predicate, numbers in skipped.fills.items():
        shown = " and ".join(f"{n:.4g}" for n in sorted(numbers))
        side = "above" if max(numbers) < 0 else "below" if min(numbers) > 0 else "away from"
        yield (f"where {predicate} is false stands {shown}: in every row the extreme of what is not masked is at least "
               f"{VANISHES:g} {side} it, and what is added to it is small beside it")  # fmt: skip
    if skipped.assumes_finite_factor:
        over_data = () if skipped.visible is None else (skipped.visible,)
        where = " and ".join(map(str, dict.fromkeys((*skipped.predicates, *over_data))))
        yield (f"where {where} is false the other values are finite and no divisor is zero: "
               "a masked 0 * inf, 0 / 0 or -inf + inf is skipped, and adds nothing instead of NaN")  # fmt: skip


def plan_loop(
    opened: AbstractSet[Axis], rolled: Axis, tile_of: Callable[[Axis], int], tails: Tails, folds: Sequence[Fold], *,
    inputs: AbstractSet[str] = frozenset(), inner: AbstractSet[str] = frozenset(), strict: bool = False,
    far: bool = True, range_ends: Callable[[Expr, bool], Extent] | None = None,
) -> Plan:  # fmt: skip
    """Segments that together visit every tile on which some term is not neutral (`inputs` to `far`: as in `guards`).

    opened: the axes of which a block, or a loop around this one, has a piece.
    range_ends: makes the extent of a range known in the rows of a block, from what is visible and whether rows without anything
    visible are visited. It is asked where a mask does not bound the loop by itself.
    """
    tile, total = tile_of(rolled), rolled.extent

    def block(axis: Axis) -> tuple[Expr, int]:
        if axis in opened:
            return read(block_start(axis), (), "int32"), tile_of(axis)
        return integer(0), axis.extent

    found = guards(folds, rolled, inputs=inputs, inner=inner, strict=strict, far=far, ranged=range_ends is not None)
    predicates = found.predicates
    both = Extent(EVERYWHERE, EVERYWHERE)
    unbounded = any(p not in predicates or extent(p, rolled, block).certain is None for p in found.ranged)
    by_range: frozenset[Expr] = frozenset()
    if found.visible is not None and range_ends is not None and unbounded:
        both = range_ends(found.visible, found.all_if_none)
        by_range = frozenset(found.ranged)
    for predicate in predicates:
        here = extent(predicate, rolled, block)
        # what is solid has all of the predicates of the range, whatever is known of each
        both = both_hold(both, replace(here, certain=EVERYWHERE) if predicate in by_range else here)
    masks = by_range.union(predicates)
    whole_tiles = total // tile
    all_tiles = -(-total // tile)
    loop_tiles = whole_tiles if tails == "exact" else all_tiles
    low, high = _clip(both.possible, total)
    start = minimum(_tiles_below(low, tile), integer(all_tiles))
    stop = minimum(_tiles_covering(high, tile), integer(all_tiles))
    body_stop = minimum(stop, integer(loop_tiles))
    trips: list[Trip] = []
    begin = simplify(apply("mul", start, integer(tile)))

    def add_trip(first: Expr, last: Expr, edge: bool, true: frozenset[Expr], label: str) -> None:
        if not (first is last or _is_empty(first, last)):
            trips.append(Trip(first, last, 0, tile, edge, true, label))

    has_edge = tails == "masked" and total % tile != 0
    if both.certain is None or (not masks and not has_edge):
        label = "masked" if masks or has_edge or both.certain is None else ""
        add_trip(start, body_stop, has_edge, frozenset(), label)
    else:
        sure_low, sure_high = _clip(both.certain, whole_tiles * tile)
        from_start = low is sure_low and isinstance(low, Const) and low.value == 0
        middle = start if from_start else minimum(maximum(_tiles_covering(sure_low, tile), start), body_stop)
        after = minimum(maximum(_tiles_below(sure_high, tile), middle), body_stop)
        if not from_start:
            add_trip(start, middle, has_edge, frozenset(), "masked")
        add_trip(middle, after, False, masks, "unmasked" if masks else "")
        add_trip(after, body_stop, has_edge, frozenset(), "masked" if masks else "edge")
    if tails == "exact" and total % tile:
        begun = body_stop if isinstance(start, Const) and start.value == 0 else maximum(body_stop, start)
        reached = (
            maximum(simplify(sub(stop, begun)), integer(0))
            if begun is not body_stop
            else simplify(sub(stop, body_stop))
        )
        if not _is_empty(integer(0), reached):
            trips.append(Trip(integer(0), reached, whole_tiles * tile, total % tile, False, frozenset(), "tail"))
    end = minimum(simplify(apply("mul", stop, integer(tile))), integer(total))
    to_visit = maximum(simplify(sub(end, begin)), integer(0))
    return Plan(tuple(trips), to_visit, begin, found, tile, (start, body_stop))


def _is_empty(first: Expr, last: Expr) -> bool:
    return isinstance(first, Const) and isinstance(last, Const) and first.value >= last.value


def _clip(interval: Interval, total: int) -> tuple[Expr, Expr]:
    low = integer(0) if interval.low is None else maximum(interval.low, integer(0))
    high = integer(total) if interval.high is None else maximum(minimum(interval.high, integer(total)), integer(0))
    return low, high
