"""Equal parts of a program are planned once: the groups of a segment, and where they run, in the names of each that is equal.

Parts are equal up to the names of axes and tensors and their source lines. Their plans are made in canonical names
(`ir/renaming.py`), so what a plan depends on is what all of them have.
"""

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pallasfuse.decisions import Grouping, Left, Original, Placed, reads_of
from pallasfuse.errors import InvalidProgramError
from pallasfuse.first_time import Later, known
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.grouping import Choice, group_segment, joined
from pallasfuse.fusion.inline import deduplicate
from pallasfuse.fusion.judging import Judge, losing_together
from pallasfuse.fusion.segments import segments
from pallasfuse.indirect import lookups_in
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.renaming import Canonical, UnknownNameError, canonical, ranked, restored
from pallasfuse.ir.tensors import Tensor
from pallasfuse.options import FuseOptions
from pallasfuse.placement import looking_up, placed_on
from pallasfuse.price.kernel import price_kernel
from pallasfuse.price.terms import Price
from pallasfuse.price.xla import ONE_KERNEL
from pallasfuse.searched import Patience, with_rivals
from pallasfuse.targets import Target


@dataclass(frozen=True, slots=True)
class Planned:
    """Plans of parts so far, for one target and the same options: forms of a program have most of their parts in common."""

    segments: "dict[_Key, _Segment]" = field(default_factory=dict)
    """The plans of segments, in canonical names."""
    begun: "dict[_Key, _Begun]" = field(default_factory=dict)
    """Segments whose candidates are known, and which may yet be planned."""
    groups: "dict[object, list[tuple[Patience, _Ranked]]]" = field(default_factory=dict)
    """The places of groups, in canonical names, each with what it may take, where that has decided something."""

    def place_of(self, form: object, most_us: float) -> "tuple[Patience, _Ranked] | None":
        """Returns where a group in canonical names runs, with what was decided, if a search for it would decide as one before."""
        return next((found for found in self.groups.get(form, ()) if found[0].decides_as(most_us)), None)


class Places:
    """Finds where the groups of one program run. Each group is lowered once, whoever asks."""

    def __init__(
        self, program: LoopProgram, target: Target, options: FuseOptions, *, looks_up: bool = True,
        planned: Planned | None = None,
    ) -> None:  # fmt: skip
        """looks_up: may kernels look up what XLA would gather?

        planned: for other programs, with the same target and options; grows."""
        self.program, self.target, self.options, self.looks_up = program, target, options, looks_up
        self.planned = Planned() if planned is None else planned
        self._lookups = lookups_in(program) if looks_up else {}
        self._readers = Counter(name for nest in program.nests for name in nest.reads)
        self._tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in program.definitions()}
        self._found: dict[int, _Found] = {}
        self._of_equal: dict[object, _Ranked] = {}
        self._originals: dict[int, tuple[Original, Mapping[str, str]]] = {}

    @cached_property
    def judge(self) -> Judge:
        """What XLA would take for parts of the whole program."""
        price = self.price if self.options.price else None
        graph = Graph(deduplicate(self.program))
        return Judge(graph, self.target, price, None if price is None else self.reads)

    def placed(self, group: Group, most_us: float = math.inf) -> Placed | str:
        """The group's kernel on the first target that has one, or why there is none. most_us: as in `Patience`."""
        return self._find(group, most_us).placed.value

    def _find(self, group: Group, most_us: float = math.inf) -> "_Found":
        if id(group) not in self._found:
            self._found[id(group)] = self._place(group, most_us)
        return self._found[id(group)]

    def settled(self, group: Group) -> Placed | str:
        """Returns what `placed` does for a group that was chosen, with its rivals, where there are some."""
        placed = self.placed(group)
        if isinstance(placed, str):
            return placed
        try:
            return with_rivals(group, placed, self.target, self._tensors, self.options)
        except Exception as error:  # never a crash: the kernel stands without them
            warnings.warn(f"other ways to run a kernel were not looked for ({type(error).__name__}: {error}): a bug in "
                          "pallasfuse, please report it", stacklevel=2)  # fmt: skip
            return placed

    def price(self, group: Group, most_us: float = math.inf) -> Price | str:
        """The price of the group's kernel, or why there is none. most_us: as in `Patience`."""
        return self._find(group, most_us).price.value

    def kernels_us(self, groups: Sequence[Group]) -> float:
        """The time that the kernels of some groups take, with the margin for the error of their prices."""
        kernels = [self.price(g) if self.options.price else ONE_KERNEL for g in groups]
        return sum(math.inf if isinstance(k, str) else k.us * self.judge.margin for k in kernels)

    def price_of(self, group: Group, placed: Placed | str) -> "Later[Price | str]":
        """The price of the group in some place, for later: what is known of it already is not found again."""
        found = self._find(group)
        return found.price if placed is found.placed.value else Later(lambda: _price(placed))

    def reads(self, group: Group) -> tuple[str, ...]:
        """The names of what the group's kernel reads; before it is placed, as if it looked up whatever may be."""
        if not self._lookups or id(group) not in self._found:
            return reads_of(group.inputs, self._lookups)
        placed = self.placed(group)
        return reads_of(group.inputs, placed.lookups if isinstance(placed, Placed) else self._lookups)

    def adopt(
        self, group: Group, placed: Placed | str, original: Original | None, names: Mapping[str, str],
        price: "Later[Price | str] | None" = None,
    ) -> None:  # fmt: skip
        """Take it that a group runs there. original: what it was renamed from, by `names`. price: of that."""
        if price is None or isinstance(placed, str):
            price = Later(lambda: _price(placed))
        self._found[id(group)] = _Found(group, known(placed), price)
        if original is not None:
            self._originals[id(group)] = original, names

    def original(self, group: Group) -> tuple[Original | None, Mapping[str, str]]:
        """Returns what a group and its place were renamed from, and the names; None where it was planned in its own names."""
        return self._originals.get(id(group), (None, {}))

    def _place(self, group: Group, most_us: float) -> "_Found":
        found = self._searched(group, most_us)
        if not any(name in self._lookups for name in group.inputs):
            return found
        placed = Later(lambda: self._looking_up(group, found.placed.value))
        return _Found(group, placed, Later(lambda: _price(placed.value)))

    def _looking_up(self, group: Group, placed: Placed | str) -> Placed | str:
        if isinstance(placed, str):
            return placed
        try:
            return looking_up(placed, group.inputs, self._lookups, self._readers, price=self.options.price)
        except (InvalidProgramError, AssertionError) as error:
            return _not_built(error)

    def _searched(self, group: Group, most_us: float) -> "_Found":
        """As `placed_on`, once for groups of the program that are equal up to canonical names, and their price."""
        try:
            form, tokens = ranked(
                (group, tuple(self._tensors[t] for t in (*group.inputs, *(n.name for n in group.outputs))))
            )
        except (UnknownNameError, KeyError):  # a text about it names something else
            placed = self._placed_on(group, Patience(most_us))
            return _Found(group, known(placed), Later(lambda: _price(placed)))
        found = self._of_equal.get(form)
        if found is None:
            decided = self.planned.place_of(form, most_us)
            if decided is None:
                patience = Patience(most_us)
                placed = self._placed_on(group, patience)
                decided = patience, _Ranked(placed, tokens, Later(lambda: _price(placed)))
                self.planned.groups.setdefault(form, []).append(decided)
            patience, found = decided
            if not patience.gave_up:  # else it says nothing to who would wait longer
                self._of_equal[form] = found
        if isinstance(found.placed, str) or found.tokens == tokens:
            text = self._renamed(group, found, tokens, most_us)
            return _Found(group, known(text), found.price if isinstance(text, Placed) else known(text))
        equal = found
        return _Found(group, Later(lambda: self._renamed(group, equal, tokens, most_us)), equal.price)

    def _renamed(self, group: Group, found: "_Ranked", tokens: tuple[str, ...], most_us: float) -> Placed | str:
        """Where an equal group runs, in the names of this one."""
        if found.tokens == tokens:
            return found.placed
        try:
            return restored(found.placed, dict(zip(found.tokens, tokens, strict=True)))
        except (UnknownNameError, KeyError):
            return self._placed_on(group, Patience(most_us))
        except (InvalidProgramError, AssertionError) as error:
            return _not_built(error)

    def _placed_on(self, group: Group, patience: Patience) -> Placed | str:
        try:
            return placed_on(group, self.target, self._tensors, self.options, patience)
        except (InvalidProgramError, AssertionError) as error:
            # never wrong: a kernel that breaks an invariant is a bug of ours, and its part stays with XLA
            return _not_built(error)


def _not_built(error: Exception) -> str:
    return f"a kernel was derived but could not be built ({error}): a bug in pallasfuse, please report it"


def _price(placed: Placed | str) -> Price | str:
    """The price of a kernel, or why there is none."""
    if isinstance(placed, str):
        return placed
    try:
        return price_kernel([(p.program, p.target) for p in placed.phases])
    except Exception as error:
        return (
            f"its kernel could not be priced ({type(error).__name__}: {error}): a bug in pallasfuse, please report it"
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """A group, where it runs, and the price of that or why there is none: each is found when it is asked for."""

    group: Group
    placed: Later[Placed | str]
    price: Later[Price | str]


@dataclass(frozen=True, slots=True)
class _Ranked:
    """Where a group runs, and the canonical names that this has, in order.

    The price is that of all groups which are equal up to names: it depends on none, as names that sort alike stand for each other.
    """

    placed: Placed | str
    tokens: tuple[str, ...]
    price: Later[Price | str]


@dataclass(frozen=True, slots=True)
class _Segment:
    """The groups of a segment in canonical names, and where they run."""

    grouping: Grouping
    placed: tuple[Placed | str, ...]
    originals: tuple[Original | None, ...]
    prices: tuple[Later[Price | str], ...]
    """The prices of the kernels in all parts that are equal up to names, as of `_Ranked`."""
    saved_us: float
    """The microseconds that the kernels save, as of `Choice.saved_us`."""


def grouped(
    program: LoopProgram,
    places: Places,
    *,
    along: frozenset[Axis] = frozenset(),
    to_save_us: Later[float] | None = None,
) -> Grouping:
    """The groups of a program; equal segments are planned once. along: as in `fusion.grouping.group`.

    `places` knows from then on where the groups of repeated segments run.

    to_save_us: there are no groups where kernels cannot save so many microseconds; most of them are then not priced. And they are
    not judged together: that waits until it is known that they are wanted (`paying_together`).
    """
    parts = list(segments(program))
    if places.options.tiles:  # they are asked for by the names of axes
        return joined([group_segment(_choice(part, places, along)) for part in parts])
    own = [_Part(part, places, along) for part in parts]
    if to_save_us is not None and places.options.price and not _may_save(own, to_save_us):
        return Grouping((), ())
    found = joined([part.grouping() for part in own])
    if along or len(parts) == 1 or to_save_us is not None:
        return found
    return paying_together(found, places)


_MOST_PRICED = 200_000
"""So many nests are priced at most to find kernels that cost more elsewhere than they save: a limit on time, of some seconds."""


def paying_together(found: Grouping, places: Places) -> Grouping:
    """Returns the groups without those that save nothing in the whole program; all of them where kernels are asked for.

    They are looked for where all groups save less there than in its parts: what one saves more may hide what another loses, but
    most programs are spared the time.
    """
    groups, options = found.groups, places.options
    if options.strict or options.shapes_kernels or not options.price:
        return found
    most_asked = _MOST_PRICED // max(1, len(places.program.nests))
    if not groups or len(groups) > most_asked:
        return found
    judge = places.judge
    if judge.apart_us([]) - judge.apart_us(groups) >= sum(price.us for price in found.replaced):
        return found
    lost = {id(group): why for group, why in losing_together(judge, groups, most_asked)}
    kept = [g for g in groups if id(g) not in lost]
    if predicted_us(places, kept) >= judge.apart_us([]):
        kept = _one_by_one(places, kept, most_asked)
        in_vain = {id(g) for g in groups} - {id(g) for g in kept}
        lost = dict.fromkeys(in_vain, "its kernel costs the whole program more than it saves") | lost
    covered = {n.name for g in kept for n in g.nests}.union(entry.name for entry in found.left)
    left = dict.fromkeys(
        Left(n.name, lost[id(g)], n.source)
        for g in groups if id(g) in lost for n in g.nests if n.is_reduction and n.name not in covered
    )  # fmt: skip
    replaced = tuple(judge.replaced(g, [other for other in kept if other is not g]) for g in kept)
    return Grouping(tuple(kept), (*found.left, *left), replaced)


def _one_by_one(places: Places, groups: Sequence[Group], most_asked: int) -> list[Group]:
    """Returns groups with each of which a program takes less time than with those before it, the one that saves most first.

    Beside a kernel, XLA stores other values than without it: that is no part of what the kernel replaces.
    """
    kept: list[Group] = []
    least_us, asked = places.judge.apart_us([]), 0
    while len(kept) < len(groups) and asked <= most_asked:
        others = [[*kept, g] for g in groups if not any(g is k for k in kept)]
        us, more = min(((predicted_us(places, o), o) for o in others), key=lambda found: found[0])
        if us >= least_us:
            break
        least_us, kept = us, more
        asked += len(others)
    return [g for g in groups if any(g is k for k in kept)]


_INTERACTION = 1.5
"""So many times what candidates save each by itself they may save together: a value that XLA computes for several of them."""


_NESTS_OF_A_CANDIDATE = 64
"""XLA's part of a program of so many nests is priced in the time in which a candidate is: with fewer candidates, all are."""


def _may_save(parts: "Sequence[_Part]", wanted_us: Later[float]) -> bool:
    """May kernels save so many microseconds? Parts are planned, those that could save most first, until that is certain."""
    most = [part.most_saved_us() for part in parts]
    if not any(most):
        return wanted_us.value <= 0.0  # then the form has won without kernels, and says why it has none
    if _NESTS_OF_A_CANDIDATE * sum(part.candidates for part in parts) < sum(part.nests for part in parts):
        return True
    for n in sorted(range(len(parts)), key=lambda n: -most[n]):
        if wanted_us.value <= 0.0:
            return True
        if _INTERACTION * sum(most) < wanted_us.value:
            return False
        most[n] = parts[n].most_saved_us(closely=True)
        if _INTERACTION * sum(most) < wanted_us.value:
            return False
        most[n] = max(0.0, parts[n].saved_us())
    return _INTERACTION * sum(most) >= wanted_us.value


_Key = tuple[LoopProgram, frozenset[Axis], bool]
"""A segment, the axes along which kernels are wanted, and whether they look up what XLA would gather."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A segment in canonical names that may be planned, and who finds the places of its groups."""

    places: Places
    choice: Choice


class _Part:
    """A segment of a program, which is planned when its groups are asked for, unless an equal one was."""

    def __init__(self, program: LoopProgram, places: Places, along: frozenset[Axis]) -> None:
        self._program, self._places, self._along = program, places, along
        self._form: Canonical | None
        try:
            self._form = canonical(program)
            self._key = (
                self._form.program,
                frozenset(self._form.axes[a] for a in along if a in self._form.axes),
                places.looks_up,
            )
        except UnknownNameError:
            self._form = None

    @property
    def nests(self) -> int:
        return len(self._program.nests)

    @property
    def candidates(self) -> int:
        """The number of candidates that may have to be priced."""
        is_open = self._form is not None and self._key not in self._places.planned.segments
        return self._begin().choice.candidates if is_open else 0

    def most_saved_us(self, *, closely: bool = False) -> float:
        """The microseconds that kernels could save here at most, each by itself; what they do save, where that is known.

        closely: as of `Choice.most_saved_us`.
        """
        if self._form is None:
            return math.inf
        known = self._places.planned.segments.get(self._key)
        return self._begin().choice.most_saved_us(closely=closely) if known is None else known.saved_us

    def saved_us(self) -> float:
        """The microseconds that the kernels save which are chosen."""
        try:
            return math.inf if self._form is None else self._segment().saved_us
        except UnknownNameError:
            return math.inf

    def grouping(self) -> Grouping:
        """The groups of the segment, renamed from those of an equal one where there is one."""
        if self._form is None:
            return group_segment(_choice(self._program, self._places, self._along))
        try:
            segment = self._segment()
            grouping, placed = restored((segment.grouping, segment.placed), self._form.names)
        except UnknownNameError:
            return group_segment(_choice(self._program, self._places, self._along))
        kernels = zip(grouping.groups, placed, segment.originals, segment.prices, strict=True)
        for group, place, original, price in kernels:
            self._places.adopt(group, place, original, self._form.names, price)
        return grouping

    def _begin(self) -> _Begun:
        """The segment in canonical names, with its candidates."""
        places = self._places
        begun = places.planned.begun
        if self._key not in begun:
            program, along, looks_up = self._key
            own = Places(program, places.target, places.options, looks_up=looks_up, planned=places.planned)
            begun[self._key] = _Begun(own, _choice(program, own, along))
        return begun[self._key]

    def _segment(self) -> "_Segment":
        """The plan of the segment in canonical names."""
        known = self._places.planned.segments
        if self._key not in known:
            begun = self._begin()
            own, choice = begun.places, begun.choice
            groups = group_segment(choice)
            placed = tuple(own.settled(g) for g in groups.groups)
            pairs = zip(groups.groups, placed, strict=True)
            originals = tuple(None if isinstance(p, str) else Original(g, p) for g, p in pairs)
            prices = tuple(map(own.price_of, groups.groups, placed))
            priced = groups.groups and own.options.price
            saved_us = choice.saved_us(groups.groups, [p.value for p in prices]) if priced else 0.0
            known[self._key] = _Segment(groups, placed, originals, prices, saved_us)
            del self._places.planned.begun[self._key]
        return known[self._key]


def _choice(program: LoopProgram, places: Places, along: frozenset[Axis]) -> Choice:
    price, reads = (places.price, places.reads) if places.options.price else (None, None)
    compares = places.target.timed and places.options.tries_trees
    return Choice(
        program, places.target, price, reads, strict=places.options.strict, along=along, compares_trees=compares
    )


def predicted_us(places: Places, groups: Sequence[Group]) -> float:
    """The time that a program takes with these groups as kernels, and XLA for the rest."""
    return places.judge.apart_us(groups) + places.kernels_us(groups)
