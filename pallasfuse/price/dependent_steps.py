"""The time of a loop's trips that no throughput explains: their operations wait for each other.

The kernel of a loop runs few warps on a multiprocessor, and each trip begins with what the one before has computed. The longest
chain of operations in a trip is then what it takes at least, however few they are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.statements import Contract, Let, Load, Loop, Reduce, Statement, expressions, tile_name
from pallasfuse.ir.tile_program import Carry, TileProgram
from pallasfuse.price.operations import of_node
from pallasfuse.resources.thread_layouts import LANES, shares
from pallasfuse.resources.triton_view import WARP_ROWS, for_matrix_units

_SIMPLE, _SPECIAL, _SHUFFLE, _BARRIER, _MULTIPLY = 4.0, 20.0, 24.0, 40.0, 32.0
"""Clocks from an instruction to one that needs its result: of a vector unit, of the special-function unit, a value of another lane,
values of other warps by shared memory, and 16 terms of a sum of products in a matrix unit.

They are of the order that microbenchmarks of such devices report, and hardly fitted: 1013 layouts of 91 loops' kernels were timed
on an H200. 84% took half to twice their price, and those that it chooses 1.10 times as long as the fastest of their kernel
(geometric mean; `docs/results.md`).
"""
_BARRIER_OF_WARP = 4.0
"""More clocks for the values of other warps, for each warp that a block has: all of them pass its barrier."""
_SPECIAL_AGAIN = 8.0
"""Clocks between two instructions of a warp for the special-function unit: four lanes at a time have one."""


def clocks_of_trip(program: TileProgram, load_clocks: float) -> float:
    """Returns the clocks of the longest trip of a recurrent program, from its begin until all that it computes is there.

    load_clocks: from the begin of a trip until what it loads has arrived.
    """
    order = {axis: n for n, (axis, _) in enumerate(program.tiles)}
    chains = (
        _Chain({**dict(program.tiles), loop.axis: segment.tile}, order, program.warps, load_clocks).of(
            segment.body, loop.carries
        )
        for loop in program.body
        if isinstance(loop, Loop)
        for segment in loop.segments
    )
    return max(chains, default=0.0)


type _Spread = frozenset[Axis] | None
"""The axes of the tile by whose elements a value is spread over the threads: for a reduction's result, those of what it reduces.
None: as whatever reads it is spread, since it is loaded or computed from what is."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that a trip computes: the clock at which it is there, and how it is spread."""

    clock: float = 0.0
    spread: _Spread = None


@dataclass(frozen=True, slots=True)
class _Chain:
    """Follows values through the statements of a trip, to the clock at which each is there."""

    tiles: Mapping[Axis, int]
    order: Mapping[Axis, int]
    warps: int
    load_clocks: float

    def of(self, body: Sequence[Statement], carries: Sequence[Carry]) -> float:
        """Returns the clock at which the last value is there."""
        known = {c.name: _Value(0.0, self._wide(c.axes)) for c in carries}
        for s in body:
            found = [self._value(e, known) for e in expressions(s)]
            name = tile_name(s)
            if name is not None:
                begun = max((value.clock for value in found), default=0.0)
                known[name] = _Value(begun + self._own_clocks(s), self._spread_of(s, found))
        return max((value.clock for value in known.values()), default=0.0)

    def _spread_of(self, s: Statement, found: Sequence[_Value]) -> _Spread:
        """Returns how the result of a statement is spread. found: its expressions."""
        match s:
            case Reduce(value=value):
                return self._wide(value.axes)
            case Contract(lhs=left, rhs=right, axes=axes):
                return self._wide(axes if self._by_matrix_units(s) else left.axes | right.axes)
            case Let(renamed=()):
                return found[0].spread
        return None

    def _own_clocks(self, s: Statement) -> float:
        """Returns the clocks of a statement beside those of its expressions."""
        match s:
            case Load():
                return self.load_clocks
            case Let(renamed=renamed) if renamed:  # threads find the elements of others in shared memory
                return self._exchange_clocks()
            case Reduce(value=value, over=over):
                return self._reduced(value.axes, frozenset(over))
            case Contract():
                return self._multiplied(s)
        return 0.0

    def _exchange_clocks(self) -> float:
        """Returns the clocks until threads have values of others, in the same warp or in any."""
        return _BARRIER + _BARRIER_OF_WARP * self.warps if self.warps > 1 else _SHUFFLE

    def _wide(self, axes: Iterable[Axis]) -> frozenset[Axis]:
        return frozenset(a for a in axes if self.tiles.get(a, 1) > 1)

    def _elements(self, axes: Iterable[Axis]) -> float:
        """Returns the elements of a tile that a thread has."""
        return max(1.0, self._size(axes) / (LANES * self.warps))

    def _size(self, axes: Iterable[Axis]) -> int:
        return math.prod(self.tiles.get(a, 1) for a in axes)

    def _value(self, root: Expr, known: Mapping[str, _Value]) -> _Value:
        """Returns the clock at which an expression is computed, and how it is spread. Elements of one thread do not wait for each
        other. Operands that are spread in another way are exchanged between the threads first."""
        values: dict[Expr, _Value] = {}
        for node in postorder(root):
            values[node] = _Value()
            if isinstance(node, Read):
                values[node] = known.get(node.tensor, values[node])
            elif isinstance(node, Apply):
                operands = {a: values[a] for a in node.args}
                spread = self._joined_spread(node, operands)
                own, each = self._elements(node.axes), of_node(node)
                begun = max((v.clock + self._moved(a, v.spread, spread) for a, v in operands.items()), default=0.0)
                special = (each.special + each.converted) * max(_SPECIAL, _SPECIAL_AGAIN * own)
                values[node] = _Value(begun + each.in_full * max(_SIMPLE, own) + special, spread)
        return values[root]

    def _joined_spread(self, node: Expr, operands: Mapping[Expr, _Value]) -> _Spread:
        """Returns how the result of an operation is spread: as the operands of its shape are, if all of these are spread alike."""
        wide = self._wide(node.axes)
        spreads = {a: v.spread for a, v in operands.items() if v.spread is not None and self._wide(a.axes)}
        alike = {spread for a, spread in spreads.items() if self._wide(a.axes) == wide}
        if len(alike) == 1:
            return alike.pop()
        return wide if spreads else None

    def _moved(self, value: Expr, before: _Spread, now: _Spread) -> float:
        """Returns the clocks until a value is spread in another way. Every thread has what is only one number."""
        if before in (None, now) or not self._wide(value.axes):
            return 0.0
        return self._exchange_clocks() + _SIMPLE * self._elements(value.axes)

    def _reduced(self, axes: frozenset[Axis], over: frozenset[Axis]) -> float:
        """Returns the clocks of a reduction: of a thread's own elements, then of lanes, then of warps, an axis after the other."""
        dims = sorted(axes | over, key=self.order.__getitem__)
        left, clocks = [self.tiles.get(a, 1) for a in dims], 0.0
        for number in sorted((n for n, a in enumerate(dims) if a in over), reverse=True):
            each = shares(left, self.warps)
            own, results = each[number], math.prod(s.own for n, s in enumerate(each) if n != number)
            clocks += (own.own - 1) * max(_SIMPLE, results)
            clocks += math.log2(own.lanes) * max(_SHUFFLE + _SIMPLE, _SIMPLE * results)
            clocks += self._exchange_clocks() + math.log2(own.warps) * (_SHUFFLE + _SIMPLE) if own.warps > 1 else 0.0
            del left[number]
        return clocks

    def _by_matrix_units(self, product: Contract) -> bool:
        return for_matrix_units(product.lhs.axes, product.rhs.axes, frozenset(product.over), self._size)

    def _multiplied(self, product: Contract) -> float:
        """Returns the clocks of a product: of small ones by vector units, terms being added up like those of a reduction."""
        left, right, over = product.lhs.axes, product.rhs.axes, frozenset(product.over)
        if not self._by_matrix_units(product):
            return self._reduced(left | right, over) + _SIMPLE * self._elements(left | right)
        of_warp = max(1.0, self._size(left - right) * self._size(right - left) / (WARP_ROWS * LANES * self.warps))
        return 2 * self._exchange_clocks() + self._size(over) / WARP_ROWS * _MULTIPLY * of_warp
