"""Registers that a Triton kernel spills: an estimate of what has no register when it is needed, and lies in memory instead.

Some values have to be in registers whole: what products are accumulated in, what a loop carries, and a side that a product takes
from registers. Others are tiles that are loaded, or computed element by element. The compiler loads and computes those piece by
piece, and a piece at a time takes registers; but what was copied ahead to shared memory is loaded whole where that is fenced before
it is read. Where warps hold the same results of a product, they hold the same of what is read beside them. No load moves past a
store, as both may be of the same memory: what is loaded for several stores is whole in registers before the first of them, and
what they have in common stays there from one to the next.

The numbers below were fitted on what it reports of all of `benchmarks/workloads` and half of the other kernels of
`scripts/resources_report.py`, and hold for the other half.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, postorder
from pallasfuse.ir.tile_program import Buffer, Contract, Let, Load, Reduce, Store, expressions
from pallasfuse.resources.block import REGISTER_BYTES, WARP, Spill
from pallasfuse.resources.thread_layouts import shares as blocked
from pallasfuse.resources.triton_operands import stages_left_before
from pallasfuse.resources.triton_registers import (
    Lifetime,
    accumulated,
    addresses,
    copies,
    dtype_of,
    on_the_way,
    registers_of,
    shares,
    sides_of,
    until,
)
from pallasfuse.resources.triton_sums import Copies, held_by, of_product, order, wide
from pallasfuse.resources.triton_view import Line, LoopScope, Product, View

PIECES = 0.3
"""The part of a tile that is in registers at a time, where it is computed piece by piece; also of the addresses of all tiles."""
OTHERS = 16
"""Registers of a thread that are always taken: positions, bounds, barriers."""
PREDICATES = 7
"""Registers of one bit that a thread has."""
SPILLED_BYTES = 20
"""Bytes that are written and read, in one trip, for each register that is missing: once written, some are read many times."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The registers of a thread that a kernel cannot do without: an estimate."""

    values: tuple[Lifetime, ...]
    by_line: tuple[float, ...]
    """Those that are taken during each statement."""
    of_addresses: float
    """Those among them that hold addresses."""

    @property
    def most(self) -> int:
        """The registers that the compiler takes, about, if there are so many. Addresses are computed where they are needed."""
        return math.ceil(max(self.by_line, default=OTHERS) - self.of_addresses)


def demand_of(view: View) -> Demand:
    """Estimates the registers of a thread that a kernel cannot do without."""
    values = tuple(_values(view))
    taken = _taken(values, len(view.lines))
    of_addresses = PIECES * sum(addresses(view))
    needed = (_needed_at(view, line, taken[line.number]) + OTHERS + of_addresses for line in view.lines)
    return Demand(values, tuple(needed), of_addresses)


def spills(view: View, demand: Demand, most: int) -> Iterator[Spill]:
    """Lists what does not find one of `most` registers of a thread.

    A loop writes and reads in its trips what it uses itself. What only lives through it lies in memory before it begins: the loop
    around it, or the block, writes and reads that.
    """
    missing = _missing(view, demand, most)
    for scope in view.scopes:
        if missing.get(scope, 0.0) > 0:
            yield Spill(scope.path, int(SPILLED_BYTES * missing[scope]), int(REGISTER_BYTES * missing[scope]))


def _missing(view: View, demand: Demand, most: int) -> dict[LoopScope, float]:
    """Returns the registers of a thread that the statements of each loop, and those outside of loops, cannot do without and do not
    find."""
    found: dict[LoopScope, float] = {}
    for line in view.lines:
        missing, scope = demand.by_line[line.number] - most, line.scope
        while missing > 0 and scope.around is not None:
            idle = sum(v.registers for v in demand.values if v.first < scope.first and scope.last < v.last)
            own = max(0.0, missing - idle)
            found[scope] = max(found.get(scope, 0.0), own)
            missing, scope = missing - own, scope.around
        found[scope] = max(found.get(scope, 0.0), missing)
    return found


def _taken(values: Sequence[Lifetime], count: int) -> list[tuple[float, float, float]]:
    """Returns for each of so many statements the registers of the values that it makes, of those that are only kept during it, and
    of those that it is the last to read."""
    begun: list[list[Lifetime]] = [[] for _ in range(count)]
    for v in values:
        begun[v.first].append(v)
    alive: list[Lifetime] = []
    found = []
    for n in range(count):
        alive = [v for v in alive if v.last >= n]
        kept = sum(v.registers for v in alive if v.last > n)
        found.append((sum(v.registers for v in begun[n]), kept, sum(v.registers for v in alive if v.last == n)))
        alive += begun[n]
    return found


def _needed_at(view: View, line: Line, taken: tuple[float, float, float]) -> float:
    """Returns the registers that are taken during a statement. What it computes takes those of what is read for the last time."""
    n, (made, kept, ending) = line.number, taken
    product = view.products.get(n)
    if product is None:
        return kept + max(ending, made) + PIECES * on_the_way(view, line) + _of_predicates(view, line)
    left, right = _sides(view, product)
    return kept + made + max(ending, left) + PIECES * right


def _of_predicates(view: View, line: Line) -> float:
    """Returns the registers of a thread for the booleans of a store, beyond those of a piece. Where what they are computed from is
    whole in registers, as a store before needed it, all are compared before the first of them becomes a byte: a thread has few
    predicates, and each of the others takes a register."""
    s = line.statement
    if not isinstance(s, Store) or view.stored_type(s) != "bool":
        return 0.0
    if not any(isinstance(x.statement, Store) and x.scope is line.scope for x in view.lines[: line.number]):
        return 0.0
    compared = view.elements(s.indices) / (WARP * view.program.warps)
    return max(0.0, (1 - PIECES) * compared - PREDICATES)


def _sides(view: View, product: Product) -> tuple[float, float]:
    """Registers of the sides that a product takes from registers: a warpgroup reads its right side in shared memory, and its left
    side where that was loaded in half precision."""
    left, right = sides_of(view, product)
    if not product.warpgroup:
        return left, right
    return 0.0 if product.half and isinstance(product.statement.lhs, Read) else left, 0.0


def _values(view: View) -> Iterator[Lifetime]:
    in_place = accumulated(view)
    begins = {total.number: number for number, total in in_place.items()}
    held = held_by(view)
    for line in view.lines:
        s, at = line.statement, line.number
        if isinstance(s, Buffer):
            yield Lifetime(shares(view, math.prod(s.sizes), s.dtype), at, line.scope.last)
        if at in in_place or not isinstance(s, Load | Let | Reduce | Contract):
            continue
        readers = view.readers(line)
        last = max((until(line.scope, r) for r in readers), default=at)
        if isinstance(s, Load):
            takers = [view.products.get(r.number) for r in readers]
            if not all(p is not None and p.takes(s.name) for p in takers):
                size = registers_of(view, s.indices, s.dtype) * _copies_beside(view, line, readers)
                repeated = _repeated(view, s, readers)
                size = max(size, repeated)
                whole = repeated > 1 or (at in view.copied_ahead and _is_fenced(view, line, readers))
                yield Lifetime(size if whole else PIECES * size, at, last)
                if not whole:
                    yield from _before_stores(view, line, readers, (1 - PIECES) * size)
            continue
        loop = line.scope.loop
        if loop is not None and any(c.next_name == s.name for c in loop.carries):
            last = line.scope.last
        whole = at in begins or not isinstance(s, Let)
        size = registers_of(view, s.axes, dtype_of(s)) * copies(view, line)
        if not of_product(view, line):
            size = max(size, _of_sums(view, held, s.axes, dtype_of(s)))
        yield Lifetime(size if whole else PIECES * size, begins.get(at, at), last)
    for scope in view.scopes:
        yield from _between_stores(view, scope)
        if scope.loop is not None:
            yield from _carried(view, scope, begins, held)


def _before_stores(view: View, line: Line, readers: list[Line], rest: float) -> Iterator[Lifetime]:
    """Lists the rest of a tile that is loaded for a store, until there; or what is stored, if that is narrower: it is computed
    before the next piece is loaded. What is on the way takes the place of what it is computed from."""
    found = [(r, s) for r in readers if isinstance(s := r.statement, Store) and r.scope is line.scope]
    if found:
        first, store = found[0]
        stored = registers_of(view, store.indices, view.stored_type(store))
        yield Lifetime(max(0.0, min(rest, stored) - PIECES * on_the_way(view, first)), line.number, first.number)


def _between_stores(view: View, scope: LoopScope) -> Iterator[Lifetime]:
    """Lists what a scope's stores have in common: what is computed for one, or was loaded for it, is kept for the next that needs
    it."""
    stores = [x for x in view.lines if x.scope is scope and isinstance(x.statement, Store)]
    loaded = {x.name for x in view.lines if x.scope is scope and isinstance(x.statement, Load)}
    made: set[Expr] = set()
    for number, (one, following) in enumerate(pairwise(stores), 1):
        made |= {n for root in expressions(one.statement) for n in postorder(root)}
        kept: dict[Expr, None] = {}
        open_ends = [root for later in stores[number:] for root in expressions(later.statement)]
        seen: set[Expr] = set()
        while open_ends:
            node = open_ends.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in made and (not isinstance(node, Read) or node.tensor in loaded):
                kept[node] = None
            else:
                open_ends += node.args
        tiles = [n for n in kept if view.elements(n.axes) > WARP * view.program.warps]
        yield Lifetime(sum(registers_of(view, n.axes, n.dtype) for n in tiles), one.number, following.number)


def _copies_beside(view: View, line: Line, readers: list[Line]) -> int:
    """Counts the threads that hold the same element of a loaded tile: as many as hold one of a product's result, where both meet in
    an expression, for which the tile takes the layout of the result."""
    assert isinstance(line.statement, Load)
    elements = view.elements(line.statement.indices)
    found = 1
    for root in (e for reader in readers for e in expressions(reader.statement) if line.name in e.tensors):
        met = (p for p in view.products.values() if p.line.name in root.tensors and p.m * p.n == elements)
        found = max([found, *(copies(view, p.line) for p in met)])
    return found


def _repeated(view: View, load: Load, readers: list[Line]) -> float:
    """Returns the registers of a thread for a tile that is repeated along other axes where it is read: it is laid out anew, and a
    thread then has what its share of the wider tile meets. 0 where that is nothing new, and beside products on matrix units."""
    if view.products:
        return 0.0
    met = (e.axes for r in readers for e in expressions(r.statement) if load.name in e.tensors)
    wider = max(met, key=view.elements, default=frozenset[Axis]())
    own = wide(view, load.indices)
    if view.elements(wider) <= view.elements(own):
        return 0.0
    dims, vector = order(view, wide(view, wider), stores=True)
    each = blocked([view.program.tile(a) for a in dims], view.program.warps, vector)
    return float(math.prod(share.own for a, share in zip(dims, each, strict=True) if a in own))


def _is_fenced(view: View, line: Line, readers: list[Line]) -> bool:
    """Does a fence of shared memory come between a load from there and one who reads its tile in registers?

    Products have fences, and sides that are staged for them. No load moves past one, so the tile is loaded whole before.
    """
    name = line.name or ""
    for reader in readers:
        product = view.products.get(reader.number)
        if product is not None and product.takes(name):
            continue
        if any(line.number < n < reader.number for n in view.products):
            return True
        if product is not None and stages_left_before(view, product, name):
            return True
    return False


def _of_sums(view: View, held: Copies, axes: Iterable[Axis], dtype: str) -> float:
    """Returns the registers of a thread for a value over the axes of sums, of which several threads hold the same results."""
    return shares(view, int(view.elements(axes) * held.get(wide(view, axes), 1.0)), dtype)


def _carried(view: View, scope: LoopScope, begins: dict[int, int], held: Copies) -> Iterator[Lifetime]:
    """Lists the values that a segment of a loop carries: until they have been read for the last time, or a product is accumulated
    in their registers. The last segment leaves them to what is behind it."""
    assert scope.loop is not None
    around = scope.around if scope.around is not None and scope.around.loop is not None else None
    ends = scope.last == max(s.last for s in view.scopes if s.loop is scope.loop)
    for carry in scope.loop.carries:
        size = registers_of(view, carry.axes, carry.dtype)
        if not any(x.name == carry.next_name and of_product(view, x) for x in view.lines):
            size = max(size, _of_sums(view, held, carry.axes, carry.dtype))
        reading = [x for x in view.lines if any(carry.name in e.tensors for e in expressions(x.statement))]
        inside = [x.number for x in reading if scope.first <= x.number <= scope.last]
        yield Lifetime(
            size, scope.first, max((begins[n] - 1 if n in begins else n for n in inside), default=scope.last)
        )
        behind = [x for x in reading if x.number > scope.last and (around is None or x.number <= around.last)]
        if around is not None:
            yield Lifetime(
                size, scope.last, max((begins.get(x.number, until(around, x)) for x in behind), default=scope.last)
            )
        elif ends and behind:
            yield Lifetime(size, scope.last + 1, max(x.number for x in behind))
