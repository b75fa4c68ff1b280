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
from pallasfuse.ir.expr import Apply, Read
from pallasfuse.ir.tile_program import Buffer, Contract, Let, Load, Reduce, Store, expressions
from pallasfuse.resources.block import REGISTER_BYTES, WARP
from pallasfuse.resources.triton_view import WARP_ROWS, Line, LoopScope, Product, View

ADDRESS_REGISTERS = 2
"""An address has 64 bits."""
OTHERS = 64
"""Registers of a thread beside tiles and addresses: positions, bounds, barriers, values on their way. The compiler takes up to 48
over the kernels of `scripts/resources_report.py`; some are left to kernels beside those."""


@dataclass(frozen=True, slots=True)
class _Value:
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
    beside = _operands(view) + _addresses(view)
    widest: dict[LoopScope, int] = {}
    for n, line in zip(accumulate(changes), view.lines, strict=False):
        needed = int(n + _on_the_way(view, line) + beside) + OTHERS
        widest[line.scope] = max(needed, widest.get(line.scope, 0))
    return widest


def _registers(view: View, axes: Iterable[Axis], dtype: str) -> float:
    """Returns the registers of a thread for its share of a tile. A small tile is in every thread, and narrow types are packed."""
    return _shares(view, view.elements(axes), dtype)


def _shares(view: View, number: int, dtype: str) -> float:
    elements = number / (WARP * view.program.warps)
    return max(1.0, elements * min(REGISTER_BYTES, dtypes.itemsize_bytes(dtype)) / REGISTER_BYTES)


def _dtype(statement: Let | Reduce | Contract) -> str:
    return statement.dtype if isinstance(statement, Contract) else statement.value.dtype


def _accumulated(view: View) -> dict[int, Line]:
    """Products that are only added to something, by number: the line with the sum."""
    found: dict[int, Line] = {}
    for number, product in view.products.items():
        readers = view.readers(product.line)
        match readers:
            case [Line(_, Let(_, _, Apply("add", (_, Read(name))))) as total] if name == product.line.name:
                found[number] = total
    return found


def _values(view: View) -> Iterator[_Value]:
    in_place = _accumulated(view)
    begins = {total.number: number for number, total in in_place.items()}
    for line in view.lines:
        s = line.statement
        if isinstance(s, Buffer):
            yield _Value(_shares(view, prod(s.sizes), s.dtype), line.number, line.scope.last)
        if line.number in in_place or not isinstance(s, Load | Let | Reduce | Contract):
            continue
        readers = view.readers(line)
        last = max((_until(line.scope, r) for r in readers), default=line.number)
        if isinstance(s, Load):
            takers = [view.products.get(r.number) for r in readers]
            if not all(p is not None and p.takes(s.name) for p in takers):
                yield _Value(_registers(view, s.indices, s.dtype), line.number, last)
            continue
        loop = line.scope.loop
        if loop is not None and any(c.next_name == s.name for c in loop.carries):
            last = line.scope.last
        yield _Value(_registers(view, s.axes, _dtype(s)), begins.get(line.number, line.number), last)
    yield from _carried(view, begins)


def _until(scope: LoopScope, reader: Line) -> int:
    """The last statement for which a value of a scope is kept, by one of its readers."""
    return scope.kept_until(reader.scope, reader.number)


def _carried(view: View, begins: dict[int, int]) -> Iterator[_Value]:
    """Lists the values that loops carry: in each segment, until they have been read for the last time."""
    for scope in view.scopes:
        if scope.loop is None:
            continue
        around = scope.around if scope.around is not None and scope.around.loop is not None else None
        for carry in scope.loop.carries:
            if around is not None:  # what an inner loop leaves is read behind it, in the trip that it stands in
                behind = [line for line in view.lines[scope.last + 1 : around.last + 1]
                          if any(carry.name in e.tensors for e in expressions(line.statement))]  # fmt: skip
                later = max((begins.get(r.number, _until(around, r)) for r in behind), default=scope.last)
                yield _Value(_registers(view, carry.axes, carry.dtype), scope.last, later)
            readers = [line.number for line in view.lines[scope.first : scope.last + 1]
                       if any(carry.name in e.tensors for e in expressions(line.statement))]  # fmt: skip
            last = max((begins.get(n, n) for n in readers), default=scope.last)
            yield _Value(_registers(view, carry.axes, carry.dtype), scope.first, last)


def _on_the_way(view: View, line: Line) -> float:
    """Returns the registers of a thread for the widest value inside a statement.

    A reduction needs those of its terms, and of the reductions that the compiler may interleave with it.
    """
    s = line.statement
    if _is_reduced(view, line):
        return sum(_terms(view, x) for x in view.lines if x is line or _interleaves(view, x, line))
    return max((_registers(view, e.axes, "float32") for e in expressions(s) if isinstance(e, Apply)), default=0.0)


def _is_reduced(view: View, line: Line) -> bool:
    return isinstance(line.statement, Reduce | Contract) and line.number not in view.products


def _terms(view: View, line: Line) -> float:
    """Returns the registers of a thread for the terms that a reduction sums up."""
    s = line.statement
    assert isinstance(s, Reduce | Contract)
    return view.elements((*s.axes, *s.over)) / (WARP * view.program.warps)


def _interleaves(view: View, one: Line, other: Line) -> bool:
    """Are both reductions of one scope, and neither needs the other?"""
    return (
        one.scope is other.scope
        and _is_reduced(view, one)
        and one.name not in view.needs(other)
        and other.name not in view.needs(one)
    )


def _operands(view: View) -> float:
    """Sides of products that pass through registers: wide ones, to be rounded, and all of products of warps. Left sides that were
    loaded before a loop stay there; of the others, those of one product at a time."""
    kept, passing = 0.0, 0.0
    loaded = {line.name: line.scope for line in view.lines if isinstance(line.statement, Load)}
    for product in view.products.values():
        lhs = product.statement.lhs
        left, right = _sides(view, product)
        if product.half and product.warpgroup:
            passing = max(passing, 0.0 if isinstance(lhs, Read) else left)
        elif isinstance(lhs, Read) and loaded.get(lhs.tensor, product.line.scope) is not product.line.scope:
            kept, passing = kept + left, max(passing, right)
        else:
            passing = max(passing, left + right)
    return kept + passing


def _sides(view: View, product: Product) -> tuple[float, float]:
    """Registers of both sides. Warps that have the same rows have the same left side; what goes on from registers to shared memory
    is shared out among all."""
    warps, packed = view.program.warps, 2 if product.half else 1
    along_rows = min(warps, max(1, product.m // WARP_ROWS))
    along_columns = warps if product.warpgroup else warps // along_rows
    left = product.m * product.k / (WARP * along_rows) / packed
    return left, product.k * product.n / (WARP * along_columns) / packed


def _addresses(view: View) -> float:
    """One address for each vector that a thread loads or stores, of the tile that needs most."""
    threads = WARP * view.program.warps
    found = 0.0
    for line in view.lines:
        s = line.statement
        if isinstance(s, Load | Store):
            dtype = s.dtype if isinstance(s, Load) else view.stored_type(s)
            vectors = view.elements(s.indices) / threads / view.vector(line, s.indices, dtype)
            found = max(found, ADDRESS_REGISTERS * max(1.0, vectors))
    return found
