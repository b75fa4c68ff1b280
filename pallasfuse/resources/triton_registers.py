"""Registers of a Triton kernel: the values that are alive at once, shared among the threads of a block.

A tile lies in registers from the statement that computes it to the last one that reads it; what a loop carries stays there. A sum
that a product is only added to is accumulated in place.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.tile_program import Buffer, Contract, Let, Load, Reduce, Store, expressions
from pallasfuse.resources.block import REGISTER_BYTES, WARP
from pallasfuse.resources.triton_view import WARP_ROWS, Line, LoopScope, Product, View

ADDRESS_REGISTERS = 2
"""An address has 64 bits."""
OTHERS = 64
"""Registers of a thread beside tiles and addresses: positions, bounds, barriers, values on their way. The compiler takes up to 48
over the kernels of `scripts/resources_report.py`; some are left to kernels beside those."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Registers of a thread that are taken from the statement numbered `first` to the one numbered `last`."""

    registers: float
    first: int
    last: int


def registers_needed(view: View) -> int:
    """An upper bound of the registers that a thread would use if it had any number."""
    return max(registers_by_loop(view).values(), default=OTHERS)


def registers_by_loop(view: View) -> dict[LoopScope, int]:
    """The same bound for the statements of each loop, and for those outside of loops."""
    changes = [0.0] * (len(view.lines) + 1)
    for value in _values(view):
        changes[value.first] += value.registers
        changes[value.last + 1] -= value.registers
    beside = _operands(view) + max(addresses(view), default=0.0)
    widest: dict[LoopScope, int] = {}
    for n, line in zip(accumulate(changes), view.lines, strict=False):
        needed = int(n + on_the_way(view, line) + beside) + OTHERS
        widest[line.scope] = max(needed, widest.get(line.scope, 0))
    return widest


def registers_of(view: View, axes: Iterable[Axis], dtype: str) -> float:
    """Returns the registers of a thread for its share of a tile. A small tile is in every thread, and narrow types are packed."""
    return shares(view, view.elements(axes), dtype)


def shares(view: View, number: int, dtype: str) -> float:
    """Returns the registers of a thread for its share of so many elements."""
    elements = number / (WARP * view.program.warps)
    return max(1.0, elements * min(REGISTER_BYTES, dtypes.itemsize_bytes(dtype)) / REGISTER_BYTES)


def dtype_of(statement: Let | Reduce | Contract) -> str:
    """The type of what a statement computes."""
    return statement.dtype if isinstance(statement, Contract) else statement.value.dtype


def accumulated(view: View) -> dict[int, Line]:
    """Products that are only added to something, by number: the line with the sum."""
    found: dict[int, Line] = {}
    for number, product in view.products.items():
        readers = view.readers(product.line)
        match readers:
            case [Line(_, Let(_, _, Apply("add", (_, Read(name))))) as total] if name == product.line.name:
                found[number] = total
    return found


def _values(view: View) -> Iterator[Lifetime]:
    in_place = accumulated(view)
    begins = {total.number: number for number, total in in_place.items()}
    for line in view.lines:
        s = line.statement
        if isinstance(s, Buffer):
            yield Lifetime(shares(view, prod(s.sizes), s.dtype), line.number, line.scope.last)
        if line.number in in_place or not isinstance(s, Load | Let | Reduce | Contract):
            continue
        readers = view.readers(line)
        last = max((until(line.scope, r) for r in readers), default=line.number)
        if isinstance(s, Load):
            loop, ahead = line.scope.loop, view.program.prefetch_distance
            if ahead and loop is not None and loop.axis in s.indices:
                held = registers_of(view, s.indices, s.dtype) + ADDRESS_REGISTERS
                yield Lifetime(ahead * held, line.scope.first, line.scope.last)
            takers = [view.products.get(r.number) for r in readers]
            if not all(p is not None and p.takes(s.name) for p in takers):
                yield Lifetime(registers_of(view, s.indices, s.dtype), line.number, last)
            continue
        loop = line.scope.loop
        if loop is not None and any(c.next_name == s.name for c in loop.carries):
            last = line.scope.last
        size = registers_of(view, s.axes, dtype_of(s)) * copies(view, line)
        yield Lifetime(size, begins.get(line.number, line.number), last)
    yield from _carried(view, begins)
    yield from _shared(view)


def _shared(view: View) -> Iterator[Lifetime]:
    """Lists what several reductions of a loop are computed from and that is wider than all that is loaded: it is computed once, and
    kept from the first of them to the last."""
    loads = (line.statement for line in view.lines if isinstance(line.statement, Load))
    widest = max((view.elements(s.indices) for s in loads), default=0)
    reduced = [line for line in view.lines if view.is_reduced(line)]
    for scope in dict.fromkeys(line.scope for line in reduced):
        found: dict[Expr, list[int]] = {}
        for line in reduced:
            roots = expressions(line.statement) if line.scope is scope else ()
            for node in {n: None for root in roots for n in postorder(root)}:
                if isinstance(node, Apply) and view.elements(node.axes) > widest:
                    found.setdefault(node, []).append(line.number)
        several = [(n, at) for n, at in found.items() if len(at) > 1]
        for span in dict.fromkeys((at[0], at[-1]) for _, at in several):
            size = max(registers_of(view, n.axes, n.dtype) for n, at in several if (at[0], at[-1]) == span)
            yield Lifetime(size, *span)


def copies(view: View, line: Line) -> int:
    """Counts the threads that hold the same element of a value: warps have rows of their own where another product is computed from
    the result of one, and some of them the same where there are more warps than rows for them."""
    product = view.products.get(line.number)
    if product is None or not product.warpgroup or product.m >= WARP_ROWS * view.program.warps:
        return 1
    following = (p for p in view.products.values() if p.line.number > line.number and p.line.scope is line.scope)
    return view.program.warps * WARP_ROWS // product.m if any(line.name in view.needs(p.line) for p in following) else 1


def until(scope: LoopScope, reader: Line) -> int:
    """The last statement for which a value of a scope is kept, by one of its readers."""
    return scope.kept_until(reader.scope, reader.number)


def _carried(view: View, begins: dict[int, int]) -> Iterator[Lifetime]:
    """Lists the values that loops carry: in each segment, until they have been read for the last time."""
    for scope in view.scopes:
        if scope.loop is None:
            continue
        around = scope.around if scope.around is not None and scope.around.loop is not None else None
        for carry in scope.loop.carries:
            if around is not None:  # what an inner loop leaves is read behind it, in the trip that it stands in
                behind = [line for line in view.lines[scope.last + 1 : around.last + 1]
                          if any(carry.name in e.tensors for e in expressions(line.statement))]  # fmt: skip
                later = max((begins.get(r.number, until(around, r)) for r in behind), default=scope.last)
                yield Lifetime(registers_of(view, carry.axes, carry.dtype), scope.last, later)
            readers = [line.number for line in view.lines[scope.first : scope.last + 1]
                       if any(carry.name in e.tensors for e in expressions(line.statement))]  # fmt: skip
            last = max((begins.get(n, n) for n in readers), default=scope.last)
            yield Lifetime(registers_of(view, carry.axes, carry.dtype), scope.first, last)


def on_the_way(view: View, line: Line) -> float:
    """Returns the registers of a thread for the widest value inside a statement.

    A reduction needs those of its terms, and of the reductions that the compiler may interleave with it.
    """
    s = line.statement
    if view.is_reduced(line):
        return sum(_terms(view, x) for x in view.reduced[line.scope] if x is line or _interleaves(view, x, line))
    return max((registers_of(view, e.axes, "float32") for e in expressions(s) if isinstance(e, Apply)), default=0.0)


def _terms(view: View, line: Line) -> float:
    """Returns the registers of a thread for the terms that a reduction sums up."""
    s = line.statement
    assert isinstance(s, Reduce | Contract)
    return view.elements((*s.axes, *s.over)) / (WARP * view.program.warps)


def _interleaves(view: View, one: Line, other: Line) -> bool:
    """Does neither of two reductions of one scope need the other?"""
    return one.name not in view.needs(other) and other.name not in view.needs(one)


def _operands(view: View) -> float:
    """Sides of products that pass through registers: wide ones, to be rounded, and all of products of warps. Left sides that were
    loaded before a loop stay there; of the others, those of one product at a time."""
    kept, passing = 0.0, 0.0
    loaded = {line.name: line.scope for line in view.lines if isinstance(line.statement, Load)}
    for product in view.products.values():
        lhs = product.statement.lhs
        left, right = sides_of(view, product)
        if product.half and product.warpgroup:
            passing = max(passing, 0.0 if isinstance(lhs, Read) else left)
        elif isinstance(lhs, Read) and loaded.get(lhs.tensor, product.line.scope) is not product.line.scope:
            kept, passing = kept + left, max(passing, right)
        else:
            passing = max(passing, left + right)
    return kept + passing


def sides_of(view: View, product: Product) -> tuple[float, float]:
    """Registers of both sides. Warps that have the same rows have the same left side; what goes on from registers to shared memory
    is shared out among all."""
    warps, packed = view.program.warps, 2 if product.half else 1
    along_rows = min(warps, max(1, product.m // WARP_ROWS))
    along_columns = warps if product.warpgroup else warps // along_rows
    left = product.m * product.k / (WARP * along_rows) / packed
    return left, product.k * product.n / (WARP * along_columns) / packed


def addresses(view: View) -> list[float]:
    """Returns the registers of a thread for the addresses of each tile that is loaded or stored: one for each vector."""
    threads = WARP * view.program.warps
    found: list[float] = []
    for line in view.lines:
        s = line.statement
        if isinstance(s, Load | Store):
            dtype = s.dtype if isinstance(s, Load) else view.stored_type(s)
            vectors = view.elements(s.indices) / threads / view.vector(line, s.indices, dtype)
            found.append(ADDRESS_REGISTERS * max(1.0, vectors))
    return found
