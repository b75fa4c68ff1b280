"""Snapshots: a region from loops for each nest alone to as few loops as rules can make of it (Blockbuster, section 4).

Rules that compute nothing again are applied until none of them applies: a snapshot. Then one loop is extended over what it reads,
which that computes again in every trip, and the others are applied again: the next snapshot, until no loop can be extended.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod

import numpy as np

from pallasfuse.device import Device
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion.inline import inline_maps
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.region import Region, independent_axes, region_of_group, region_of_program
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import RangeLoop, TreeKernel, walk
from pallasfuse.schedule import tiles
from pallasfuse.schedule.block_program import BlockKernel, BlockProgram, Path, kernels, operators, recomputed, unfused
from pallasfuse.schedule.candidates import Candidate, ModelPrices, Space
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.placement import Broken, MayFold, Placed, Statement, no_folds, place
from pallasfuse.schedule.recompute import trips_of
from pallasfuse.schedule.rule import Legality
from pallasfuse.schedule.rules import EXTENSION, PRIORITY, RULES

_MOST_SIZES = 1 << 14
"""Tuples of tiles of a kernel that are priced."""


@dataclass(frozen=True, slots=True)
class Application:
    """One application of a rule."""

    rule: int
    around: tuple[str, ...]
    """The axes of the loops around the body in which it was applied."""
    again: tuple[str, ...] = ()
    """The axes in whose loops nests are computed again since then."""


@dataclass(frozen=True, slots=True)
class TiledKernel:
    """A kernel with the tiles that are the fastest by the model: its tree, and its time in microseconds."""

    tree: TreeKernel
    us: float


@dataclass(frozen=True)
class Snapshot:
    """A program between unfused and most fused, with the rule applications that made it."""

    program: BlockProgram
    applications: tuple[Application, ...]
    legality: Legality = field(compare=False, repr=False)

    @property
    def counts(self) -> dict[int, int]:
        """The number of applications of each rule, since the beginning."""
        found = Counter(a.rule for a in self.applications)
        return {n: found[n] for n in sorted(found)}

    @cached_property
    def kernels(self) -> tuple[BlockKernel, ...]:
        return kernels(self.program)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The text of all kernels: loops, loads, computations and stores, each a line."""
        fold = self.legality.may_fold(self.program.region)
        return tuple(line for kernel in self.kernels for line in lines(kernel, fold))

    @property
    def recomputed(self) -> dict[str, tuple[str, ...]]:
        """The nests that are computed again, with the axes in whose loops they are: once for each tile along these."""
        return dict(recomputed(self.program))

    def tiled(self, device: Device) -> tuple[TiledKernel, ...]:
        """Returns the kernels with the tiles that are the fastest on a device by the model; an infinite time: none fits."""
        fold = self.legality.may_fold(self.program.region)
        return tuple(_tiled(kernel, device, fold) for kernel in self.kernels)

    def us(self, device: Device) -> float:
        """Returns the price of all kernels, one after the other, in microseconds."""
        return sum(k.us for k in self.tiled(device))

    def recompute_factors(self, device: Device) -> dict[tuple[str, ...], int]:
        """Returns how often nests that are computed again are computed, by the axes along which, with the tiles of a device."""
        extents = {name: axis.extent for name, axis in self.program.region.axes.items()}
        loops = [n for k in self.tiled(device) for _, n in walk(k.tree.body) if isinstance(n, RangeLoop)]
        sizes = {n.axis: n.size for n in loops}  # an axis without a loop is whole
        every = set(self.recomputed.values())
        return {axes: prod(-(-extents[a] // sizes.get(a, extents[a])) for a in axes) for axes in every}

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of a region, from unfused on, and why rules that would have applied were refused."""

    unfused: Snapshot
    found: tuple[Snapshot, ...]
    refused: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self.found)

    @property
    def last(self) -> Snapshot:
        return self.found[-1]

    def show(self, device: Device) -> str:
        """Returns the text of all snapshots, with their prices on a device."""
        shown = [f"unfused: {len(self.unfused.kernels)} kernels, {_us(self.unfused.us(device))}"]
        for number, snapshot in enumerate(self.found, 1):
            shown += _summary(number, snapshot, device)
            shown += [f"    {line}" for line in snapshot.lines]
        shown += [f"condition: {text}" for text in self.last.program.conditions]
        return "\n".join([*shown, *(f"refused: {reason}" for reason in self.refused)])


def snapshots(region: Region, *, stable: bool = True) -> Snapshots:
    """Returns the snapshots of a region.

    Args:
      stable: rules are refused where sums may cancel that did not before; without it, as in the paper, numbers are exact.
    """
    return _Fusion(Legality(stable)).run(region)


def snapshots_of_program(program: LoopProgram, *, stable: bool = True) -> Snapshots:
    """Returns the snapshots of a whole program, with its maps in the bodies of what reads them. stable: as in `snapshots`.

    Raises:
      InvalidProgramError: XLA computes a part of the program, or a nest reads another at other positions than its own.
    """
    return snapshots(region_of_program(program, inline_maps(program)), stable=stable)


def snapshots_of_group(group: Group, tensors: Mapping[str, Tensor]) -> Snapshots | Refusal:
    """Returns the snapshots of what one kernel computes, or why it has none. tensors: by name, those of the program."""
    try:
        return snapshots(region_of_group(group, tensors))
    except InvalidProgramError as error:
        return Refusal(str(error))


@dataclass(slots=True)
class _Fusion:
    legality: Legality
    applications: list[Application] = field(default_factory=list)
    refused: dict[str, None] = field(default_factory=dict)

    def run(self, region: Region) -> Snapshots:
        start = Snapshot(unfused(region), (), self.legality)
        program = self._fused(operators(region))
        found = [self._snapshot(program)]
        while (extended := self._extended(program)) is not None:
            program = self._fused(extended)
            found.append(self._snapshot(program))
        return Snapshots(start, tuple(found), tuple(self.refused))

    def _snapshot(self, program: BlockProgram) -> Snapshot:
        return Snapshot(program, tuple(self.applications), self.legality)

    def _fused(self, program: BlockProgram) -> BlockProgram:
        """Applies the rules that compute nothing again to every body, the outer ones first."""
        waiting: list[Path] = [()]
        while waiting:
            path = waiting.pop(0)
            while (after := self._step(program, path)) is not None:
                program = after
            waiting += [(*path, n) for n, node in enumerate(program.at(path)) if isinstance(node, RangeLoop)]
        return program

    def _step(self, program: BlockProgram, path: Path) -> BlockProgram | None:
        for number in PRIORITY:
            after = self._first(number, program, path)
            if after is not None:
                self._note(number, program, path)
                return after
        return None

    def _extended(self, program: BlockProgram) -> BlockProgram | None:
        waiting: list[Path] = [()]
        while waiting:
            path = waiting.pop(0)
            after = self._first(EXTENSION, program, path)
            if after is not None:
                self._note(EXTENSION, program, path, trips_of(program, after))
                return after
            waiting += [(*path, n) for n, node in enumerate(program.at(path)) if isinstance(node, RangeLoop)]
        return None

    def _first(self, number: int, program: BlockProgram, path: Path) -> BlockProgram | None:
        rule = RULES[number]
        for site in rule.sites(program, path):
            after = rule.apply(program, site, self.legality)
            if not isinstance(after, Refusal):
                return after
            if number in _ALGEBRA:
                self.refused[f"{rule} ({rule.name}) at {site.nest}: {after}"] = None
        return None

    def _note(self, number: int, program: BlockProgram, path: Path, again: tuple[str, ...] = ()) -> None:
        self.applications.append(Application(number, tuple(x.axis for x in program.around(path)), again))


_ALGEBRA = (4, 5, 8)


def _tiled(kernel: BlockKernel, device: Device, fold: MayFold) -> TiledKernel:
    region = kernel.region
    whole = [a.name for a in independent_axes(region)]
    choices = {
        axis: tuple(filter(tiles.is_power_of_two, sizes)) or sizes
        for axis, sizes in tiles.choices(region.axes.values(), whole, little_padding=True).items()
    }
    while prod(map(len, choices.values())) > _MOST_SIZES:
        longest = max(choices, key=lambda axis: len(choices[axis]))
        choices[longest] = choices[longest][::2]
    space = Space(region, (kernel.tree,), choices, fold)
    sizes = space.all_sizes()
    us = ModelPrices(space, Model(region, device)).of_tree(0, sizes)
    best = int(np.argmin(us))
    candidate = Candidate(0, tuple(int(s) for s in sizes[best]))
    return TiledKernel(space.tree(candidate), float(us[best]) if us[best] < inf else inf)


def _us(us: float) -> str:
    return "no tiles fit" if us == inf else f"{us:.3g} us"


def _summary(number: int, snapshot: Snapshot, device: Device) -> list[str]:
    tiled = snapshot.tiled(device)
    rules = ", ".join(f"{RULES[n]} {count}" for n, count in snapshot.counts.items())
    head = f"snapshot {number}: {len(tiled)} kernel{'s' * (len(tiled) > 1)}, {_us(sum(k.us for k in tiled))}; "
    shown = [f"{head}{sum(snapshot.counts.values())} applications: {rules}"]
    factors = snapshot.recompute_factors(device)
    for axes in dict.fromkeys(snapshot.recomputed.values()):
        names = ", ".join(n for n, again in snapshot.recomputed.items() if again == axes)
        shown.append(f"  computed again for each of {factors[axes]} tiles along {', '.join(axes)}: {names}")
    return [*shown, *(f"  {k.tree}" for k in tiled)]


# --- block programs as text, line by line, as Blockbuster prints them


def lines(kernel: BlockKernel, may_fold: MayFold = no_folds) -> list[str]:
    """Returns the lines of one kernel, with the axes of tiles in brackets."""
    placement = place(kernel.region, kernel.tree, may_fold)
    assert not isinstance(placement, Broken), str(placement)
    return list(_lines(kernel.region, placement.body, ""))


def _lines(region: Region, body: tuple[Placed | Statement, ...], indent: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, Statement):
            yield indent + _statement(region, node)
            continue
        loop = node.loop
        part = (f" from {loop.begin}" if loop.begin else "") + (f" until {loop.end}" if loop.end else "")
        yield f"{indent}{'for' if _is_reduced_in(region, node) else 'forall'} {loop.axis}{part}:"
        yield from _lines(region, node.body, indent + "  ")


def _statement(region: Region, statement: Statement) -> str:
    name, axes = statement.name, ", ".join(a.name for a in statement.axes)
    if statement.kind != "compute":
        return f"{statement.kind} {name}[{axes}]"
    nest = region.by_name[name]
    kept = ", ".join(a.name for a in nest.axes)
    sign = {"sum": "+=", None: "="}.get(nest.reducer.name if nest.reducer else None, f"{nest.reducer}=")
    return f"{name}[{kept}] {sign} {nest.body}"


def _is_reduced_in(region: Region, node: Placed) -> bool:
    """Returns whether something in a loop is reduced by it, so that its trips are not independent."""

    def computes(of: Placed) -> Iterator[str]:
        for inner in of.body:
            if isinstance(inner, Placed):
                yield from computes(inner)
            elif inner.kind == "compute":
                yield inner.name

    return any(node.loop.axis in {a.name for a in region.by_name[n].reduced} for n in computes(node))
