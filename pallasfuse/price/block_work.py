"""The work of one block of a tile program: bytes by tensor, matrix products, instructions, trips. Averages over all blocks."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.loop_program import Tensor
from pallasfuse.ir.tile_program import Contract, Let, Load, Loop, Reduce, Statement, Store, TileProgram
from pallasfuse.price.operations import Operations, count
from pallasfuse.price.visited_tiles import mean_and_most_trips


@dataclass(frozen=True, slots=True)
class Access:
    """A load or a store of tiles of one tensor."""

    tensor: str
    tile_bytes: float
    run_bytes: float
    """Contiguous in memory."""
    unique_bytes: float
    """Of all blocks together, each counted once."""
    times: float
    """How often a block does it."""
    pipelined: bool
    """Several trips ahead, where the kernel has stages."""
    is_store: bool = False
    loop: int = 0
    """The number of the loop that it is in; 0: outside."""

    @property
    def bytes(self) -> float:
        return self.tile_bytes * self.times

    def sector_bytes(self, sector: int = 32) -> float:
        """The bytes of all sectors that a block touches."""
        return self.bytes * sector * math.ceil(self.run_bytes / sector) / self.run_bytes


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of tiles: rows x summed by summed x columns, `times` for each block."""

    rows: int
    columns: int
    summed: int
    batch: int
    lhs_dtype: str
    precise: bool
    """Float32 operands that keep all their bits."""
    times: float

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.summed * self.batch * self.times


_LANES = 16


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
    """Reductions that all threads of a block take part in."""
    trips: float = 0.0
    most_trips: float = 0.0
    """Of the longest block."""
    loads_in_a_trip: float = 0.0
    """Bytes."""
    loops: int = 0
    statements: float = 0.0
    """That compute something; a statement of a loop counts in every trip."""
    sums: float = 0.0
    """Results of reductions, each of at least so many elements as a vector has."""
    tile_bytes: float = 0.0
    """Bytes of the tiles that statements read and make, where each statement is a loop of its own, with four bytes an element."""
    strided: float = 0.0
    """Elements that statements read in strides, as neighbours in memory are no neighbours in the order of the program's axes."""
    kept_bytes: float = 0.0
    """Bytes of the tiles that products make or that are computed for them: they lie in memory, where a library multiplies."""


def examine(program: TileProgram, other: Mapping[Axis, int] | None = None) -> BlockWork:
    """Returns the work of the blocks of `program`; about that with other tiles along some axes, without another lowering."""
    other = other or {}
    blocks = math.prod(-(-a.extent // other.get(a, t)) for a, t in program.grid)
    work = BlockWork(blocks, program.warps, program.stages)
    _Walk(program, work, other).block(program.body, 1.0, {**dict(program.tiles), **other}, set(), pipelined=False)
    return work


@dataclass(slots=True)
class _Walk:
    program: TileProgram
    work: BlockWork
    other: Mapping[Axis, int] = field(default_factory=dict)
    """Tiles that differ from the program's."""
    within: int = 0
    """The number of the loop that is walked."""
    strided: set[str] = field(default_factory=set)
    """Loads whose last dimension is not the last of the tile."""

    def block(
        self, body: Iterable[Statement], times: float, tiles: Mapping[Axis, int], seen: set[Expr], *, pipelined: bool
    ) -> None:
        statements = tuple(body)
        operands = _operands_of_products(statements)
        tensors = {t.name: t for t in (*self.program.inputs, *self.program.outputs)}
        for s in statements:
            match s:
                case Load(name, tensor, indices):
                    whole = tensors[tensor]
                    staged = pipelined and (name in operands)
                    if self.is_strided(indices, tiles):
                        self.strided.add(name)
                    self.work.accesses.append(_access(whole, indices, tiles, times, staged, self.within))
                case Store(tensor, indices, value):
                    self.work.statements += times
                    self.pass_over(indices, [value], times, tiles)
                    self.stride([value], times, tiles)
                    if self.is_strided(indices, tiles):
                        self.work.strided += times * math.prod(tiles[a] for a in indices)
                    self.operate([value], times, tiles, seen)
                    self.work.accesses.append(
                        _access(tensors[tensor], indices, tiles, times, False, self.within, is_store=True)
                    )
                case Let(_, _, value):
                    self.operate([value], times, tiles, seen)
                case Reduce(_, _, _, value, over):
                    self.work.statements += times
                    self.operate([value], times, tiles, seen)
                    elements = math.prod(tiles[a] for a in value.axes | frozenset(over))
                    self.work.operations += Operations(elements * times)
                    self.work.reductions += times
                    self.pass_over(value.axes - frozenset(over), [value], times, tiles)
                    self.stride([value], times, tiles)
                    summed = math.prod(tiles[a] for a in over)
                    self.work.sums += times * elements / max(summed, _LANES)
                case Contract():
                    self.work.statements += times
                    self.operate([s.lhs, s.rhs], times, tiles, seen)
                    self.work.products.append(_product(s, tiles, times))
                    self.keep(s, tiles)
                    self.pass_over(s.axes, [s.lhs, s.rhs], times, tiles)
                case Loop():
                    self.loop(s, times, tiles, seen)

    def keep(self, s: Contract, tiles: Mapping[Axis, int]) -> None:
        """Note what lies in memory for a product, beside what it loads."""
        made = [s.axes, *(frozenset(e.axes) for e in (s.lhs, s.rhs) if not any(True for _ in _through_casts(e)))]
        self.work.kept_bytes += sum(4.0 * math.prod(tiles[a] for a in axes) for axes in made)

    def pass_over(self, made: Iterable[Axis], roots: Iterable[Expr], times: float, tiles: Mapping[Axis, int]) -> None:
        """Note what a statement reads and makes."""
        reads = {n for n in postorder(*roots) if isinstance(n, Read)}
        elements = sum(math.prod(tiles[a] for a in n.axes) for n in reads) + math.prod(tiles[a] for a in made)
        self.work.tile_bytes += 4.0 * elements * times

    def stride(self, roots: Iterable[Expr], times: float, tiles: Mapping[Axis, int]) -> None:
        """Note the elements that a loop reads in strides; a library brings operands into its own order."""
        reads = {n for n in postorder(*roots) if isinstance(n, Read) and n.tensor in self.strided}
        self.work.strided += times * sum(math.prod(tiles[a] for a in n.axes) for n in reads)

    def is_strided(self, indices: Sequence[Axis], tiles: Mapping[Axis, int]) -> bool:
        """Is the last dimension of a tile in memory another one than in the order of the program?"""
        present = [a for a in indices if tiles[a] > 1]
        order = {a: n for n, a in enumerate(self.program.order)}
        return bool(present) and present[-1] != max(present, key=order.__getitem__)

    def operate(self, roots: list[Expr], times: float, tiles: Mapping[Axis, int], seen: set[Expr]) -> None:
        self.work.operations += count(roots, lambda axes: math.prod(tiles[a] for a in axes), seen).times(times)

    def loop(self, loop: Loop, times: float, tiles: Mapping[Axis, int], seen: set[Expr]) -> None:
        self.work.loops += 1
        outside, self.within = self.within, self.work.loops
        most = 0.0
        for segment in loop.segments:
            mean, longest = mean_and_most_trips(segment, loop, self.program)
            tile = segment.tile
            if loop.axis in self.other:
                tile = max(1, min(self.other[loop.axis], math.ceil(longest * tile)))
                mean, longest = (n * segment.tile / tile for n in (mean, longest))
            most += longest
            if mean == 0:
                continue
            inner = {**tiles, loop.axis: tile}
            before = sum(a.bytes for a in self.work.accesses if not a.is_store)
            self.block(segment.body, times * mean, inner, set(seen), pipelined=True)
            after = sum(a.bytes for a in self.work.accesses if not a.is_store)
            self.work.loads_in_a_trip = max(self.work.loads_in_a_trip, (after - before) / (times * mean))
            self.work.trips += times * mean
        self.work.most_trips += most
        self.within = outside


def _operands_of_products(body: Iterable[Statement]) -> frozenset[str]:
    """Loads that a matrix product reads as they are: those a compiler copies to shared memory ahead of time."""
    roots = [e for s in body if isinstance(s, Contract) for e in (s.lhs, s.rhs)]
    return frozenset(n.tensor for r in roots for n in _through_casts(r))


def _through_casts(root: Expr) -> Iterator[Read]:
    while isinstance(root, Apply) and root.op == "convert":
        root = root.args[0]
    if isinstance(root, Read):
        yield root


def _access(
    tensor: Tensor, indices: tuple[Axis, ...], tiles: Mapping[Axis, int], times: float, pipelined: bool, loop: int, *,
    is_store: bool = False,
) -> Access:  # fmt: skip
    size = dtypes.itemsize_bytes(tensor.dtype)
    run = 1
    for axis in reversed(indices):
        run *= min(tiles[axis], axis.extent)
        if tiles[axis] < axis.extent:
            break
    tile = math.prod(min(tiles[a], a.extent) for a in indices)
    unique = math.prod(a.extent for a in frozenset(indices))
    return Access(tensor.name, tile * size, run * size, unique * size, times, pipelined, is_store, loop)


def is_precise(precision: str | None) -> bool:
    """Do products keep all bits of float32 operands? A sum that the user wrote as one does (None)."""
    return precision is None or precision.lower() in ("highest", "float32")


def _product(s: Contract, tiles: Mapping[Axis, int], times: float) -> Product:
    over = frozenset(s.over)
    left, right = s.lhs.axes - over, s.rhs.axes - over
    extent = lambda axes: math.prod(tiles[a] for a in axes)  # noqa: E731
    return Product(
        extent(left - right), extent(right - left), extent(over), extent(left & right), s.rhs.dtype,
        is_precise(s.precision), times,
    )  # fmt: skip
