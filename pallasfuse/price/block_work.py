"""The work of one block of a tile program: bytes by tensor, matrix products, instructions, trips. Averages over all blocks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.statements import cut_axes, operands_of_products, sources_of, through_casts
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import (
    Buffer,
    Contract,
    Get,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Set,
    Statement,
    Store,
    TileProgram,
    every,
    expressions,
)
from pallasfuse.price.block_accesses import Access, access, looked_up
from pallasfuse.price.block_products import Loaded, Product, product_of
from pallasfuse.price.operations import Instructions, Operations, executed, new_instructions
from pallasfuse.price.visited_tiles import IterationDomain, domain_of, mean_and_most_trips
from pallasfuse.price.xla_library import FEWEST, takes_all
from pallasfuse.resources.padded_rows import padded_rows
from pallasfuse.resources.thread_layouts import LANES, VECTOR_BYTES, exchange, run_of, vector_of
from pallasfuse.resources.triton_view import LEAST_COPY_BITS, for_matrix_units

_LOOKED_UP = 2.0
"""Statements that compute which rows of a tensor a tile is, and that gather them."""


@dataclass(slots=True)
class BlockWork:
    """The work of an average block, and how many blocks there are."""

    blocks: int
    warps: int
    stages: int
    accesses: list[Access] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    operations: Operations = field(default_factory=Operations)
    reductions: float = 0.0
    """Reductions for which warps wait for each other; all of them, where tiles are not spread over threads."""
    executions: dict[tuple[int, ...], float] = field(default_factory=dict)
    """How often the body of each segment of a loop runs, by its path: places of statements and of segments, from the outside in."""
    trips: float = 0.0
    most_trips: float = 0.0
    """The trips of the longest block."""
    loads_in_a_trip: float = 0.0
    """Bytes."""
    loops: int = 0
    started: float = 0.0
    """How often a block begins a loop: one in another loop begins in every trip of that."""
    beside: float = 0.0
    """Trips with a product in which a tile is loaded that no product of the trip is made of: Triton begins no such load ahead."""
    waits: bool = False
    """Trips of a loop wait for an operand of a product: its rows begin anywhere, so that no trip before can begin its load."""
    statements: float = 0.0
    """That compute something; a statement of a loop counts in every trip."""
    sums: float = 0.0
    """Results of reductions, whose lanes are added up at the end."""
    calls: float = 0.0
    """Reductions that are large enough for a library, on a CPU."""
    tile_bytes: float = 0.0
    """Bytes of the tiles that statements read and make, where each statement is a loop of its own, with four bytes an element."""
    strided: float = 0.0
    """Elements that statements read in strides, as neighbours in memory are no neighbours in the order of the program's axes."""
    shuffles: float = 0.0
    """Instructions by which lanes exchange results of reductions, of all warps, where tiles are spread over threads."""
    kept_bytes: float = 0.0
    """Bytes of the tiles that products make or that are computed for them: they lie in memory, where a library multiplies."""
    computed_bytes: float = 0.0
    """Those of the tiles that are computed for products, each time."""


def examine(program: TileProgram, other: Mapping[Axis, int] | None = None, *, spreads: bool = False) -> BlockWork:
    """Returns the work of the blocks of `program`; about that with other tiles along some axes, without another lowering.

    spreads: tiles are spread over threads, as Triton does it.
    """
    return Examiner(program, spreads=spreads).work(other)


class Examiner:
    """Examines the blocks of one program, for several tiles: what no tile changes is found once."""

    def __init__(self, program: TileProgram, *, spreads: bool = False) -> None:
        self._program = program
        self._spreads = spreads
        self._tensors = {t.name: t for t in (*program.inputs, *program.outputs)}
        self._padded = frozenset(padded_rows(program)) if spreads else frozenset()
        self._order = {a: n for n, a in enumerate(program.order)}
        self._body = _read_block(program.body, program, set(), {})
        self._cut = cut_axes(program.body, frozenset(a for a, _ in program.grid))
        self._buffers = {
            s.name: dict(zip(s.axes, s.sizes, strict=True)) for s in every(program.body) if isinstance(s, Buffer)
        }
        self._accesses: dict[_Place, Access] = {}

    def work(self, other: Mapping[Axis, int] | None = None) -> BlockWork:
        """Returns the work with the program's own tiles, but for the `other` ones."""
        program, other = self._program, other or {}
        if not self._cut.isdisjoint(other):
            raise InvalidProgramError(
                f"tile program {program.name}: loops inside loops over one axis have one tile each"
            )
        blocks = math.prod(-(-a.extent // other.get(a, t)) for a, t in program.grid)
        work = BlockWork(blocks, program.warps, program.stages)
        sizes = _Sizes({**dict(program.tiles), **other})
        lookups = {x.result.name: x for x in program.lookups}
        walk = _Walk(
            self._tensors, lookups, self._order, self._buffers, work, other, self._accesses, self._spreads, self._padded
        )
        walk.block(self._body, 1.0, sizes, pipelined=False)
        return work


class _Sizes:
    """The tiles along axes, and how many elements a tile along several axes has."""

    def __init__(self, tiles: Mapping[Axis, int]) -> None:
        self.tiles = tiles
        self._known: dict[frozenset[Axis], int] = {}

    def volume(self, axes: frozenset[Axis]) -> int:
        found = self._known.get(axes)
        if found is None:
            found = self._known[axes] = math.prod([self.tiles[a] for a in axes])
        return found

    def wide(self, axes: frozenset[Axis]) -> frozenset[Axis]:
        """The axes along which a tile has more than one element."""
        return frozenset(a for a in axes if self.tiles[a] > 1)


@dataclass(frozen=True, slots=True)
class _Step:
    """A statement, what it reads, and the instructions that nothing before it has executed, by the axes that they run over."""

    statement: Load | Let | Reduce | Contract | Store | Buffer | Get | Set
    reads: tuple[Read, ...]
    instructions: Instructions
    stores: bool = False
    """It reduces what XLA stores before on a CPU."""


@dataclass(frozen=True, slots=True)
class _Trips:
    """A segment of a loop that is visited: how many trips it has in an average block and in the longest."""

    segment: Segment
    mean: float
    longest: float
    block: "_Block"


@dataclass(frozen=True, slots=True)
class _Rolled:
    """A loop, as the segments that are visited."""

    axis: Axis
    segments: tuple[_Trips, ...]
    carried: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Block:
    """Statements one after the other, and the loads that products among them read as they are (`operands`)."""

    steps: tuple[_Step | _Rolled, ...]
    operands: frozenset[str]
    of_products: frozenset[str]
    """All that the block's products are made of. Empty where it has no product."""
    of_reductions: frozenset[str]
    """All that its reductions are made of."""
    beside: tuple[tuple[Axis, ...], ...]
    """The axes of what it loads beside products, and no product is made of."""


@lru_cache(1 << 10)
def _nodes_of(roots: tuple[Expr, ...]) -> tuple[tuple[Read, ...], tuple[Apply, ...]]:
    """The reads of some expressions, and the operations: those of a program are the same with other tiles."""
    nodes = tuple(postorder(*roots))
    return tuple([n for n in nodes if isinstance(n, Read)]), tuple([n for n in nodes if isinstance(n, Apply)])


def _read_block(
    body: Sequence[Statement], program: TileProgram, seen: set[Expr], windows: Mapping[Axis, IterationDomain]
) -> _Block:
    """Returns the part of a block that no tile changes. seen: expressions that are computed already; grows. windows: those of the
    loops around."""
    steps: list[_Step | _Rolled] = []
    for s in body:
        if not isinstance(s, Loop):
            reads, nodes = _nodes_of(expressions(s))
            stores = isinstance(s, Reduce) and not takes_all(s.value, frozenset(s.over))
            steps.append(_Step(s, reads, new_instructions(nodes, seen), stores))
            continue
        trips = [(g, *mean_and_most_trips(g, s, program, windows)) for g in s.segments]
        visited = tuple(
            _Trips(
                g,
                mean,
                longest,
                _read_block(g.body if mean else (), program, set(seen), {**windows, s.axis: domain_of(g, s)}),
            )
            for g, mean, longest in trips
        )
        steps.append(_Rolled(s.axis, visited, frozenset(c.name for c in s.carries)))
    of_products = sources_of(body, Contract)
    beside = [s.indices for s in body if isinstance(s, Load) and s.name not in of_products]
    return _Block(
        tuple(steps), operands_of_products(body), of_products, sources_of(body, Reduce),
        tuple(beside) if of_products else (),
    )  # fmt: skip


_Place = tuple[str, tuple[Axis, ...], tuple[int, ...], float, bool, int, bool]
"""An access depends on this alone: the tensor, its axes, their tiles, how often it runs, whether it runs ahead, its loop, and
whether it stores."""


@dataclass(slots=True)
class _Walk:
    tensors: Mapping[str, Tensor]
    lookups: Mapping[str, Lookup]
    """By the names of their results."""
    order: Mapping[Axis, int]
    """The place of each axis in the program's order."""
    buffers: Mapping[str, Mapping[Axis, int]]
    """The positions that each has along its axes."""
    work: BlockWork
    other: Mapping[Axis, int]
    """Tiles that differ from the program's."""
    accesses: "dict[_Place, Access]"
    """The accesses that were found so far, for any tiles of the program: most loads vary with few of its axes. The walk adds to
    it."""
    spreads: bool = False
    """Tiles are spread over the threads of a block."""
    padded: frozenset[str] = frozenset()
    """The inputs whose rows are made longer before."""
    of_products: frozenset[str] = frozenset()
    """Results of matrix products, and what is computed from them: they lie as matrix units leave them."""
    copies: dict[frozenset[Axis], float] = field(default_factory=dict)
    """The number of threads that hold each value, by the axes that values run along."""
    within: int = 0
    """The number of the loop that is walked."""
    begun: float = 1.0
    """The number of times that a block begins this loop."""
    names: set[str] = field(default_factory=set)
    """The names of all that was loaded or computed so far."""
    before: frozenset[str] = frozenset()
    """The names of what was there when this loop began."""
    handed_on: frozenset[str] = frozenset()
    """The names of what its trips hand on, and of what is computed from that."""
    longest: float = 1.0
    """How often that is run, in the longest block."""
    strided: set[str] = field(default_factory=set)
    """Loads whose last dimension is not the last of the tile."""
    layouts: dict[str, tuple[Axis, ...]] = field(default_factory=dict)
    """The axes of what is loaded, in the order of memory."""
    itemsizes: dict[str, int] = field(default_factory=dict)
    """The bytes of an element of what is loaded."""
    loaded_by: dict[str, int] = field(default_factory=dict)
    """The number of the loop that loads it."""
    from_padded: set[str] = field(default_factory=set)
    """Loads of inputs whose rows are made longer."""
    as_loaded: set[str] = field(default_factory=set)
    """Loads of a trip that no trip before can begin, and values that are computed from them point by point: they lie as they were
    loaded, and so does what is computed from them and from products."""

    def block(self, block: _Block, times: float, sizes: _Sizes, path: tuple[int, ...] = (), *, pipelined: bool) -> None:
        tiles = sizes.tiles
        self.work.executions[path] = times
        waits_beside = pipelined and self.spreads and any(len(sizes.wide(frozenset(axes))) > 1 for axes in block.beside)
        for place, step in enumerate(block.steps):
            if isinstance(step, _Rolled):
                self.loop(step, times, sizes, (*path, place))
                continue
            if self.of_products or isinstance(step.statement, Contract):
                self.of_products |= _made_of(step.statement, self.of_products, sizes)
            if isinstance(step.statement, Load | Let | Reduce | Contract | Get):
                self.define(step.statement.name, step.reads)
            if isinstance(step.statement, Let) and not step.statement.value.tensors.isdisjoint(self.as_loaded):
                self.as_loaded.add(step.statement.name)
            match step.statement:
                case Load(name, tensor, indices):
                    self.layouts[name] = indices
                    self.loaded_by[name] = self.within
                    self.itemsizes[name] = dtypes.itemsize_bytes(step.statement.dtype)
                    staged = pipelined and name in block.operands
                    if tensor in self.padded:
                        self.from_padded.add(name)
                    if staged and not self.is_copied(tensor, indices, tiles, step.statement.dtype):
                        staged, self.work.waits = False, True
                    elif pipelined and not self.is_copied(tensor, indices, tiles, step.statement.dtype):
                        self.as_loaded.add(name)
                    if self.is_strided(indices, tiles):
                        self.strided.add(name)
                    if tensor in self.lookups:
                        self.work.statements += _LOOKED_UP * times
                        self.work.accesses += looked_up(
                            self.lookups[tensor], indices, tiles, times, staged, self.within
                        )
                        continue
                    self.access(tensor, indices, tiles, times, staged)
                case Store(tensor, indices):
                    self.work.statements += times
                    self.pass_over(frozenset(indices), step, times, sizes)
                    self.stride(step, times, sizes)
                    if self.is_strided(indices, tiles):
                        self.work.strided += times * math.prod(tiles[a] for a in indices)
                    self.operate(step, times, sizes)
                    self.access(tensor, indices, tiles, times, False, is_store=True)
                case Let():
                    self.operate(step, times, sizes)
                case Buffer(name, _, own):
                    self.work.statements += times
                    self.work.kept_bytes += 4.0 * math.prod(own)
                case Get(_, buffer, axes):
                    self.part_of(buffer, axes, step, times, sizes)
                case Set(buffer, axes):
                    self.operate(step, times, sizes)
                    self.part_of(buffer, axes, step, times, sizes)
                case Reduce(_, _, _, value, over):
                    self.work.statements += times
                    self.operate(step, times, sizes)
                    elements = sizes.volume(value.axes | frozenset(over))
                    self.work.operations += Operations(elements * times)
                    as_multiplied = value.tensors & self.of_products and value.tensors.isdisjoint(self.as_loaded)
                    if waits_beside and value.tensors.isdisjoint(block.of_products):
                        as_multiplied = False
                    if self.spreads and not as_multiplied:
                        self.exchange(value.axes, frozenset(over), times, sizes)
                    else:
                        self.work.reductions += times
                    self.pass_over(value.axes - frozenset(over), step, times, sizes)
                    self.stride(step, times, sizes)
                    self.work.calls += times * (elements >= FEWEST)
                    if step.stores:
                        self.work.kept_bytes += 4.0 * elements
                    self.work.sums += times * elements / max(sizes.volume(frozenset(over)), 1)
                case Contract() as product:
                    self.work.statements += times
                    self.operate(step, times, sizes)
                    exchanged = waits_beside and product.name in block.of_reductions - block.of_products
                    self.work.products.append(replace(self.product(product, sizes, times), exchanged=exchanged))
                    self.keep(product, sizes, times)
                    self.pass_over(frozenset(product.axes), step, times, sizes)

        self.work.beside += times * waits_beside

    def define(self, name: str, reads: Sequence[Read]) -> None:
        """Note that a value is there from now on."""
        self.names.add(name)
        if any(r.tensor in self.handed_on for r in reads):
            self.handed_on |= {name}

    def product(self, s: Contract, sizes: _Sizes, times: float) -> Product:
        """Return the product of a statement, which runs `times` for each block."""
        in_trip = frozenset(n for n, loop in self.loaded_by.items() if loop == self.within > 0)
        left, right = s.lhs.tensors, s.rhs.tensors
        kept = self.is_kept(left, beside=right), self.is_kept(right, beside=left)
        return product_of(s, sizes.tiles, times, Loaded(self.layouts, in_trip, self.from_padded, kept, self.begun))

    def is_kept(self, side: frozenset[str], *, beside: frozenset[str]) -> bool:
        """Is a side of a product known before its loop begins, and is the other one computed from what trips hand on?"""
        return bool(side) and side <= self.before and not self.handed_on.isdisjoint(beside)

    def access(
        self, tensor: str, indices: tuple[Axis, ...], tiles: Mapping[Axis, int], times: float, staged: bool, *,
        is_store: bool = False,
    ) -> None:  # fmt: skip
        """Note a load or a store of a tile."""
        place = tensor, indices, tuple([tiles[a] for a in indices]), times, staged, self.within, is_store
        found = self.accesses.get(place)
        if found is None:
            own = self.tensors[tensor]
            found = self.accesses[place] = access(
                own, indices, tiles, times, staged, self.within, is_store=is_store,
                vector_bytes=self.together(tensor, indices, tiles, own.dtype) if self.spreads else VECTOR_BYTES,
            )  # fmt: skip
        self.work.accesses.append(found)

    def together(self, tensor: str, indices: tuple[Axis, ...], tiles: Mapping[Axis, int], dtype: str) -> int:
        """The bytes that a thread moves at once."""
        run = run_of(indices, tiles.__getitem__, is_padded=tensor in self.padded)
        return min(VECTOR_BYTES, dtypes.itemsize_bytes(dtype) * run)

    def is_copied(self, tensor: str, indices: tuple[Axis, ...], tiles: Mapping[Axis, int], dtype: str) -> bool:
        """May a trip begin the load of a later one? Triton copies no less than a word ahead; the rest goes through registers."""
        return not self.spreads or 8 * self.together(tensor, indices, tiles, dtype) >= LEAST_COPY_BITS

    def part_of(self, buffer: str, axes: Sequence[Axis], step: _Step, times: float, sizes: _Sizes) -> None:
        """Note what is copied out of a buffer or into it; all of it is a value like any other."""
        if any(sizes.tiles[a] != n for a, n in self.buffers[buffer].items()):
            self.work.statements += times
            self.pass_over(frozenset(axes), step, times, sizes)

    def keep(self, s: Contract, sizes: _Sizes, times: float) -> None:
        """Note what lies in memory for a product, beside what it loads."""
        computed = sum(4.0 * sizes.volume(e.axes) for e in (s.lhs, s.rhs) if not any(True for _ in through_casts(e)))
        self.work.kept_bytes += 4.0 * sizes.volume(frozenset(s.axes)) + computed
        self.work.computed_bytes += times * computed

    def pass_over(self, made: frozenset[Axis], step: _Step, times: float, sizes: _Sizes) -> None:
        """Note what a statement reads and makes."""
        elements = sum([sizes.volume(n.axes) for n in step.reads]) + sizes.volume(made)
        self.work.tile_bytes += 4.0 * elements * times

    def stride(self, step: _Step, times: float, sizes: _Sizes) -> None:
        """Note the elements that a loop reads in strides; a library brings operands into its own order."""
        self.work.strided += times * sum([sizes.volume(n.axes) for n in step.reads if n.tensor in self.strided])

    def is_strided(self, indices: Sequence[Axis], tiles: Mapping[Axis, int]) -> bool:
        """Is the last dimension of a tile in memory another one than in the order of the program?"""
        present = [self.order[a] for a in indices if tiles[a] > 1]
        return bool(present) and present[-1] != max(present)

    def operate(self, step: _Step, times: float, sizes: _Sizes) -> None:
        if not step.instructions:
            return
        least = LANES * self.work.warps if self.spreads else 1

        def held(axes: frozenset[Axis]) -> float:
            return max(least, sizes.volume(axes) * self.copies.get(sizes.wide(axes), 1.0))

        self.work.operations += executed(step.instructions, held).times(times)

    def exchange(self, axes: frozenset[Axis], over: frozenset[Axis], times: float, sizes: _Sizes) -> None:
        """Note what threads exchange for a reduction. Its tile lies as it was loaded, or in the order of the program's axes."""
        tile = sizes.wide(axes | over)
        loaded = [n for n, indices in self.layouts.items() if sizes.wide(frozenset(indices)) == tile]
        dims = sorted(tile, key=self.order.__getitem__)
        vector = 1
        if loaded:
            dims = [a for a in self.layouts[loaded[0]] if a in tile]
            itemsize = max(self.itemsizes[n] for n in loaded)
            is_padded = loaded[0] in self.from_padded
            run = run_of(self.layouts[loaded[0]], sizes.tiles.__getitem__, is_padded=is_padded)
            vector = vector_of(itemsize, sizes.volume(tile), self.work.warps, run)
        along = [n for n, a in enumerate(dims) if a in over]
        found = exchange([sizes.tiles[a] for a in dims], along, self.work.warps, vector)
        self.work.shuffles += found.shuffles * times
        self.work.reductions += times * found.between_warps
        self.copies[tile - over] = max(found.copies, self.copies.get(tile - over, 1.0))

    def loop(self, loop: _Rolled, times: float, sizes: _Sizes, path: tuple[int, ...]) -> None:
        self.work.loops += 1
        self.work.started += times
        outside = self.within, self.begun, self.before, self.handed_on
        self.within, self.begun, self.before, self.handed_on = (
            self.work.loops,
            times,
            frozenset(self.names),
            loop.carried,
        )
        most = 0.0
        for number, trips in enumerate(loop.segments):
            mean, longest, tile = trips.mean, trips.longest, trips.segment.tile
            if loop.axis in self.other:
                tile = max(1, min(self.other[loop.axis], math.ceil(longest * tile)))
                mean, longest = (n * trips.segment.tile / tile for n in (mean, longest))
            most += longest * self.longest
            if mean == 0:
                continue
            inner = _Sizes({**sizes.tiles, loop.axis: tile})
            own, around = self.within, self.longest
            before = self.loaded_in(own)
            self.longest = around * longest
            self.block(trips.block, times * mean, inner, (*path, number), pipelined=True)
            self.longest = around
            after = self.loaded_in(own)
            self.work.loads_in_a_trip = max(self.work.loads_in_a_trip, (after - before) / (times * mean))
            self.work.trips += times * mean
        self.work.most_trips += most
        self.within, self.begun, self.before, self.handed_on = outside

    def loaded_in(self, loop: int) -> float:
        """Returns the bytes that a loop loads itself, not one inside it."""
        return sum(a.bytes for a in self.work.accesses if a.loop == loop and not a.is_store)


def _made_of(s: Statement, of_products: frozenset[str], sizes: _Sizes) -> frozenset[str]:
    """The name of a statement's value, if it is a product of matrix units or computed from one."""
    if isinstance(s, Contract):
        return frozenset((s.name,) if for_matrix_units(s.lhs.axes, s.rhs.axes, frozenset(s.over), sizes.volume) else ())
    return frozenset((s.name,) if isinstance(s, Let | Reduce) and not s.value.tensors.isdisjoint(of_products) else ())
