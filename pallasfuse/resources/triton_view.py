"""A tile program as Triton's compiler sees it: statements in a row, products on matrix units, and what a loop copies ahead."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder
from pallasfuse.ir.ops import OPS
from pallasfuse.ir.own_axes import with_own_axes
from pallasfuse.ir.tile_program import (
    Contract,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Statement,
    Store,
    TileProgram,
    block_start,
    expressions,
    tile_name,
)
from pallasfuse.resources.padded_rows import padded_rows, row_of
from pallasfuse.targets import Target

WARPGROUP_WARPS = 4
WARPGROUP_ROWS = 64
"""Rows of the smallest product that a warpgroup computes (wgmma); smaller ones are products of warps."""
WARP_ROWS = 16
"""Rows of a product that belong to one warp."""
COPY_BYTES = 16
"""The most that a thread loads, stores or copies at once."""
LEAST_COPY_BITS = 32
"""An asynchronous copy moves at least so many neighbouring bits."""


def for_matrix_units(
    left: frozenset[Axis], right: frozenset[Axis], over: frozenset[Axis], size: Callable[[frozenset[Axis]], float]
) -> bool:
    """Is a product large enough for matrix units: the rows and columns of its sides alone, and the terms that it sums `over`?

    size: of a tile along axes. A smaller product is multiplied and summed by vector units.
    """
    return min(map(size, (left - right, right - left, over))) >= WARP_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class LoopScope:
    """Statements that run together: those of one loop segment, or those outside of loops (`loop` is None)."""

    loop: Loop | None
    segment: Segment | None
    repeats: bool
    """More than one trip is possible: Triton keeps it as a loop."""
    first: int
    last: int
    """Numbers of its first and last statement, those of loops inside counted."""
    around: "LoopScope | None" = None
    path: tuple[int, ...] = ()
    """The place of its loop among the statements around it, and of the segment in the loop, from the outside in."""

    @property
    def kept(self) -> "LoopScope":
        """The innermost loop around these statements that Triton keeps as one: loops of one trip dissolve in it."""
        return self if self.repeats or self.around is None else self.around.kept

    def is_in(self, other: "LoopScope") -> bool:
        """Is this scope the other one, or inside it?"""
        return self is other or (self.around is not None and self.around.is_in(other))

    def kept_until(self, other: "LoopScope", at: int) -> int:
        """The last statement for which a value of this scope is kept that statement `at` of the other one reads: loops between
        both read it in every trip."""
        last, scope = at, other
        while scope is not self and scope.around is not None:
            last, scope = scope.last if scope.repeats else last, scope.around
        return last

    def masks(self, program: TileProgram, axis: Axis) -> bool:
        """May a tile reach past the end of an axis here?"""
        if self.loop is not None and self.segment is not None and axis == self.loop.axis:
            return self.segment.edge
        if self.around is not None:
            return self.around.masks(program, axis)
        return axis.extent % program.tile(axis) != 0


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A statement, its number in the order of execution, and its scope."""

    number: int
    statement: Statement
    scope: LoopScope
    name: str | None
    """The tile that it defines; None for a store, and for a buffer and what is set in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A contraction on matrix units: `m` rows and `n` columns, summed over `k`."""

    line: Line
    statement: Contract
    m: int
    n: int
    k: int
    warpgroup: bool
    """A warpgroup computes it: its right side lies in shared memory, and its left side there or in registers."""
    half: bool
    """Its operands have two bytes; wider ones pass through registers, where they are rounded, and are staged again."""

    def takes(self, name: str) -> bool:
        """Is a value one of its sides as it is?"""
        return any(isinstance(e, Read) and e.tensor == name for e in (self.statement.lhs, self.statement.rhs))


class View:
    """The statements of a program, and what the compiler will make of them."""

    def __init__(self, program: TileProgram, target: Target) -> None:
        self.padded = padded_rows(program)
        """The inputs whose rows are made longer for the kernel, and the lengths that they then have."""
        program = with_own_axes(program)
        self.program = program
        self._tiles = dict(program.tiles)
        self.lines = _lines(program)
        self._readers = _readers(self.lines)
        self._needs: dict[int, frozenset[str]] = {}
        self._behind: dict[frozenset[str], frozenset[str]] = {}
        self.sums: dict[int, tuple[Line, Expr] | None] = {}
        """Where products are added to something, by the numbers of their lines, as far as that is known."""
        found = (_product(program, self._tiles, target, line) for line in self.lines)
        self.products: Mapping[int, Product] = {p.line.number: p for p in found if p is not None}
        self.copied_ahead = self._copied_ahead()
        """Numbers of the loads that a loop copies to shared memory trips before they are needed: those by which its products
        are reached (if contiguous enough for the copy engine)."""

    @cached_property
    def scopes(self) -> list[LoopScope]:
        """All scopes, and those that have no statements but loops."""
        found: dict[LoopScope, None] = {}
        for line in self.lines:
            scope: LoopScope | None = line.scope
            while scope is not None:
                found[scope] = None
                scope = scope.around
        return list(found)

    @cached_property
    def reduced(self) -> Mapping[LoopScope, list[Line]]:
        """The reductions of each scope, but for products of matrix units."""
        found: dict[LoopScope, list[Line]] = {}
        for line in filter(self.is_reduced, self.lines):
            found.setdefault(line.scope, []).append(line)
        return found

    def is_reduced(self, line: Line) -> bool:
        """Is a statement a reduction, but for products of matrix units?"""
        return isinstance(line.statement, Reduce | Contract) and line.number not in self.products

    @cached_property
    def _made_from(self) -> dict[str, frozenset[str]]:
        """The names that carried values, and those that are computed element by element, are made from."""
        carried = {c.name: frozenset((c.next_name,)) for s in self.scopes if s.loop is not None for c in s.loop.carries}
        lets = {x.name: x.statement.value for x in self.lines if x.name is not None and isinstance(x.statement, Let)}
        return {name: frozenset(value.tensors) for name, value in lets.items()} | carried

    def behind(self, root: Expr) -> frozenset[str]:
        """Names all that a value is computed from element by element, through what is named before it and what loops carry."""
        begun = frozenset(root.tensors)
        if begun not in self._behind:
            found, wanted = set[str](), set(begun)
            while wanted:
                name = wanted.pop()
                found.add(name)
                wanted |= self._made_from.get(name, frozenset()) - found
            self._behind[begun] = frozenset(found)
        return self._behind[begun]

    def readers(self, line: Line) -> list[Line]:
        """Returns the lines that read the value that a statement defines. Segments give the same names to values of their own."""
        readers = self._readers.get(line.name or "", [])
        return readers if line.scope.segment is None else [r for r in readers if r.scope.is_in(line.scope)]

    def needs(self, line: Line) -> frozenset[str]:
        """Names of the values of its scope that a statement is computed from."""
        if line.number not in self._needs:
            wanted = set(_read(line.statement))
            for other in reversed(self.lines[line.scope.first : line.number]):
                if other.scope is line.scope and other.name in wanted:
                    wanted |= _read(other.statement)
            self._needs[line.number] = frozenset(wanted)
        return self._needs[line.number]

    def elements(self, axes: Iterable[Axis]) -> int:
        """Counts the elements of a tile over these axes."""
        return prod(self._tiles[a] for a in frozenset(axes))

    def bytes(self, axes: Iterable[Axis], dtype: str) -> int:
        """Returns the bytes that a tile takes in memory."""
        return self.elements(axes) * dtypes.itemsize_bytes(dtype)

    def run(self, line: Line, indices: tuple[Axis, ...]) -> int:
        """Counts the elements of a tile that are known to lie together in memory, at a multiple of their number."""
        row = row_of(indices)
        if row is None:
            return 1
        minor = indices[row]
        run = self.program.tile(minor)
        if isinstance(line.statement, Load) and line.statement.tensor in self.padded:
            return run
        if run > 1 and (len(indices) > 1 or line.scope.masks(self.program, minor)):
            run = min(run, minor.extent & -minor.extent)
        return run

    def vector(self, line: Line, indices: tuple[Axis, ...], dtype: str) -> int:
        """Elements that a thread loads or stores at once."""
        return min(COPY_BYTES // dtypes.itemsize_bytes(dtype), self.run(line, indices))

    def stored_type(self, store: Store) -> str:
        return next(t.dtype for t in self.program.outputs if t.name == store.tensor)

    def _copied_ahead(self) -> frozenset[int]:
        if self.program.stages < 2:
            return frozenset()
        found: set[int] = set()
        for scope in dict.fromkeys(line.scope.kept for line in self.lines if line.scope.kept.repeats):
            wanted: set[str] = set()
            for line in reversed(self.lines[scope.first : scope.last + 1]):
                if line.scope.kept is not scope or (line.number not in self.products and line.name not in wanted):
                    continue
                wanted |= _read(line.statement)
                if isinstance(line.statement, Load) and self._can_be_copied(line, line.statement):
                    found.add(line.number)
        return frozenset(found)

    def _can_be_copied(self, line: Line, load: Load) -> bool:
        bits = 8 * dtypes.itemsize_bytes(load.dtype) * self.run(line, load.indices)
        return bits >= LEAST_COPY_BITS and self.elements(load.indices) > 1


def _read(statement: Statement) -> frozenset[str]:
    return frozenset(t for e in expressions(statement) for t in e.tensors)


def _lines(program: TileProgram) -> list[Line]:
    """Every statement that computes; loops dissolve into those of their segments that run."""
    found: list[Line] = []

    def size(body: tuple[Statement, ...]) -> int:
        loops = [s for s in body if isinstance(s, Loop)]
        inside = sum(size(g.body) for s in loops for g in s.segments if _trips(program, g) != 0)
        return len(body) - len(loops) + inside

    def visit(
        body: tuple[Statement, ...],
        loop: Loop | None,
        segment: Segment | None,
        around: LoopScope | None,
        path: tuple[int, ...],
        *,
        repeats: bool,
    ) -> None:
        at = len(found)
        scope = LoopScope(loop, segment, repeats, at, at + size(body) - 1, around, path)
        for place, s in enumerate(body):
            if not isinstance(s, Loop):
                found.append(Line(len(found), s, scope, tile_name(s)))
                continue
            for n, g in enumerate(s.segments):
                trips = _trips(program, g)
                if trips != 0:
                    visit(g.body, s, g, scope, (*path, place, n), repeats=trips != 1)

    visit(program.body, None, None, None, (), repeats=False)
    return found


def _trips(program: TileProgram, segment: Segment) -> int | None:
    """Counts the trips of a segment, where their number is the same in every block; else None."""
    known = {block_start(a): 0 for a, t in program.grid if t >= a.extent}
    start, stop = (_number(e, known) for e in (segment.start, segment.stop))
    return None if start is None or stop is None else max(0, stop - start)


def _number(root: Expr, known: Mapping[str, int]) -> int | None:
    """The value of a loop bound; None where it reads what is not known."""
    if not root.tensors <= known.keys() or root.axes:
        return None
    values: dict[Expr, int] = {}
    for node in postorder(root):
        match node:
            case Const(value):
                values[node] = int(value)
            case Read(name):
                values[node] = known[name]
            case Apply(op, args):
                values[node] = int(OPS[op].evaluate(*(values[a] for a in args)))
    return values[root]


def _readers(lines: list[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        for name in _read(line.statement):
            found.setdefault(name, []).append(line)
    return found


def _sides(tiles: Mapping[Axis, int], s: Contract) -> tuple[frozenset[Axis], frozenset[Axis], frozenset[Axis]] | None:
    """The axes of the rows, the columns and the sum of a contraction of two matrices; None where it is something else."""
    over = frozenset(a for a in s.over if tiles[a] > 1)
    rows, columns = (frozenset(a for a in e.axes if tiles[a] > 1) - over for e in (s.lhs, s.rhs))
    return (rows, columns, over) if len(over) == 1 and rows and columns and rows.isdisjoint(columns) else None


def _product(program: TileProgram, tiles: Mapping[Axis, int], target: Target, line: Line) -> Product | None:
    s = line.statement
    sides = _sides(tiles, s) if isinstance(s, Contract) else None
    if not isinstance(s, Contract) or sides is None:
        return None
    m, n, k = (prod(tiles[a] for a in axes) for axes in sides)
    if min(m, n, k) < target.smallest_dot:
        return None
    half = dtypes.itemsize_bytes(s.lhs.dtype) == 2
    exact = s.precision is None or "HIGHEST" in s.precision.upper()
    warpgroup = program.warps % WARPGROUP_WARPS == 0 and m % WARPGROUP_ROWS == 0 and (half or not exact)
    return Product(line, s, m, n, k, warpgroup, half)


def computed(side: Expr, loads: frozenset[str]) -> bool:
    """Is the side of a product more than what was loaded?"""
    return not (isinstance(side, Read) and side.tensor in loads)
