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
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.price.operations import of_node
from pallasfuse.resources.thread_layouts import LANES, shares

_SIMPLE, _SPECIAL, _SHUFFLE, _BARRIER, _MULTIPLY = 4.0, 20.0, 24.0, 60.0, 32.0
"""Clocks from an instruction to one that needs its result: of a vector unit, of the special-function unit, a value of another lane,
values of other warps by shared memory, and 16 terms of a sum of products in a matrix unit.

They are of the order that microbenchmarks of such devices report, and not fitted. Of 97 kernels of loops in 56 programs (H100 and
H200) 74% took half to twice their price, and 89% do since chains count; with any of these half or twice as long, 87% to 91% do.
"""
_SPECIAL_AGAIN = 8.0
"""Clocks between two instructions of a warp for the special-function unit: four lanes at a time have one."""
_LEAST_MULTIPLIED = 16
"""The rows, columns and terms from which a product is one of matrix units: the sides of their smallest tiles in Triton."""


def is_recurrent(program: TileProgram) -> bool:
    """Is each trip of a loop one step, that begins with what the step before has left?"""
    loops = [s for s in program.body if isinstance(s, Loop)]
    steps = [g for loop in loops for g in loop.segments]
    return (
        any(loop.carries for loop in loops)
        and all(g.tile == 1 for g in steps)
        and not any(isinstance(s, Loop) for g in steps for s in g.body)
    )


def clocks_of_trip(program: TileProgram, load_clocks: float) -> float:
    """Returns the clocks of the longest trip of a recurrent program, from its begin until all that it computes is there.

    load_clocks: from the begin of a trip until what it loads has arrived.
    """
    order = {axis: n for n, (axis, _) in enumerate(program.tiles)}
    chains = (
        _Chain({**dict(program.tiles), loop.axis: segment.tile}, order, program.warps, load_clocks).of(segment.body)
        for loop in program.body
        if isinstance(loop, Loop)
        for segment in loop.segments
    )
    return max(chains, default=0.0)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Follows values through the statements of a trip, to the clock at which each is there."""

    tiles: Mapping[Axis, int]
    order: Mapping[Axis, int]
    warps: int
    load_clocks: float

    def of(self, body: Sequence[Statement]) -> float:
        """Returns the clock at which the last value is there."""
        ready: dict[str, float] = {}
        for s in body:
            at = max((self._value(e, ready) for e in expressions(s)), default=0.0) + self._own_clocks(s)
            name = tile_name(s)
            if name is not None:
                ready[name] = at
        return max(ready.values(), default=0.0)

    def _own_clocks(self, s: Statement) -> float:
        """Returns the clocks of a statement beside those of its expressions."""
        match s:
            case Load():
                return self.load_clocks
            case Let(renamed=renamed) if renamed:  # threads find the elements of others in shared memory
                return _BARRIER
            case Reduce(value=value, over=over):
                return self._reduced(value.axes, frozenset(over))
            case Contract():
                return self._multiplied(s)
        return 0.0

    def _elements(self, axes: Iterable[Axis]) -> float:
        """Returns the elements of a tile that a thread has."""
        return max(1.0, self._size(axes) / (LANES * self.warps))

    def _size(self, axes: Iterable[Axis]) -> int:
        return math.prod(self.tiles.get(a, 1) for a in axes)

    def _value(self, root: Expr, ready: Mapping[str, float]) -> float:
        """Returns the clock at which an expression is computed. Elements of one thread do not wait for each other."""
        at: dict[Expr, float] = {}
        for node in postorder(root):
            at[node] = ready.get(node.tensor, 0.0) if isinstance(node, Read) else 0.0
            if isinstance(node, Apply):
                own, each = self._elements(node.axes), of_node(node)
                begun = max((at[a] for a in node.args), default=0.0)
                special = (each.special + each.converted) * max(_SPECIAL, _SPECIAL_AGAIN * own)
                at[node] = begun + each.in_full * max(_SIMPLE, own) + special
        return at[root]

    def _reduced(self, axes: frozenset[Axis], over: frozenset[Axis]) -> float:
        """Returns the clocks of a reduction: of a thread's own elements, then of lanes, then of warps, an axis after the other."""
        dims = sorted(axes | over, key=self.order.__getitem__)
        left, clocks = [self.tiles.get(a, 1) for a in dims], 0.0
        for number in sorted((n for n, a in enumerate(dims) if a in over), reverse=True):
            each = shares(left, self.warps)
            own, results = each[number], math.prod(s.own for n, s in enumerate(each) if n != number)
            clocks += (own.own - 1) * max(_SIMPLE, results)
            clocks += math.log2(own.lanes) * max(_SHUFFLE + _SIMPLE, _SIMPLE * results)
            clocks += _BARRIER + math.log2(own.warps) * (_SHUFFLE + _SIMPLE) if own.warps > 1 else 0.0
            del left[number]
        return clocks

    def _multiplied(self, product: Contract) -> float:
        """Returns the clocks of a product: of small ones by vector units, terms being added up like those of a reduction."""
        left, right, over = product.lhs.axes, product.rhs.axes, frozenset(product.over)
        rows, columns, terms = map(self._size, (left - right, right - left, over))
        if min(rows, columns, terms) < _LEAST_MULTIPLIED:
            return self._reduced(left | right, over) + _SIMPLE * self._elements(left | right)
        of_warp = max(1.0, rows * columns / (_LEAST_MULTIPLIED * LANES * self.warps))
        return 2 * _BARRIER + terms / _LEAST_MULTIPLIED * _MULTIPLY * of_warp
