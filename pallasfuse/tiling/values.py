"""Expressions over the tiles of one kernel: values are loaded, and inner reductions computed, where they are first read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, apply, const, convert, index, postorder, read, substitute
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.reducers import SUM, Reducer
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Contract, Let, Load, Reduce, Statement
from pallasfuse.targets import Tails, power_of_two
from pallasfuse.tiling.products import Product, contracts, narrow, split_product


@dataclass(slots=True)
class Scope:
    """Statements under construction, and the values that they define."""

    statements: list[Statement] = field(default_factory=list)
    known: dict[Expr, Expr] = field(default_factory=dict)
    parent: "Scope | None" = None
    edge: bool = False
    """The current tile of the rolled axis may reach past the axis' end."""
    along: Axis | None = None
    """The axis of the loop of which this is the body."""
    size: int = 0
    """The positions of one trip of that loop."""
    fixed: Mapping[Expr, Expr] = field(default_factory=dict)
    """What is known on the whole tile: predicates that hold everywhere, frames that come late."""

    def find(self, node: Expr) -> Expr | None:
        scope: Scope | None = self
        while scope is not None:
            if node in scope.known:
                return scope.known[node]
            scope = scope.parent
        return None


class Values:
    """A kernel under construction, as far as it is known: its axes and tiles, and the statements that it begins with (`top`)."""

    def __init__(
        self, group: Group, schedule: Schedule, tails: Tails, tensors: Mapping[str, Tensor], smallest_dot: int,
        multiple: int, *, own_part: bool = False, static_bounds: bool = False, together: bool = False,
    ) -> None:  # fmt: skip
        """own_part: every grid block has a part of the rolled axis to itself. static_bounds: as `Target.static_bounds`.
        together: as many states are combined as there are parts, not a tile of them."""
        self.group, self.schedule, self.tails, self.tensors = group, schedule, tails, tensors
        self.multiple, self.together = multiple, together
        self.bounding = frozenset() if static_bounds else frozenset(group.inputs)
        """Inputs that bounds of loops may read."""
        self.ranges: list[Range] = []
        """The ranges by which loops are bounded so far."""
        self.rolled = group.rolled
        self.part, self.parts = (Axis(f"{self.rolled.name}.{n}", schedule.parts) for n in ("part", "parts"))
        """Of a split rolled axis: the part of a grid block, and all parts, of which a block reads the states."""
        self.grid = ((self.part, 1), *schedule.grid) if own_part else schedule.grid
        self.folds = {f.name: f for f in group.folds}
        self.inner = {n.name: n for n in group.inner}
        self.top = Scope()
        self.order = self._axis_order()
        self.padded_axes: dict[Axis, int] = {}
        for nest in [*(f.nest for f in group.folds), *group.inner]:
            if nest.reducer == SUM and contracts(nest.body, frozenset(nest.reduced)):
                self._pad(nest, smallest_dot)
        self.single_trip = schedule.trips == 1

    # --- axes

    def _pad(self, nest: Nest, smallest_dot: int) -> None:
        """Tiles of a matrix product are at least `smallest_dot` long; those of the grid together, as they are its rows."""
        tiled = [a for a in (*nest.axes, *nest.reduced) if self.schedule.tile(a) > 1]
        rows = [a for a in tiled if any(a == g for g, _ in self.schedule.grid)]
        self.padded_axes |= {a: smallest_dot for a in tiled if a not in rows}
        if rows:
            others = math.prod(power_of_two(self.schedule.tile(a)) for a in rows[:-1])
            self.padded_axes[rows[-1]] = max(self.padded_axes.get(rows[-1], 1), -(-smallest_dot // others))

    def _axis_order(self) -> tuple[Axis, ...]:
        grid = [a for a, _ in self.grid]
        rest: dict[Axis, None] = {}
        for nest in [*(f.nest for f in self.group.folds), *self.group.inner, *self.group.outputs]:
            rest |= dict.fromkeys((*nest.axes, *nest.reduced))
        parts = (self.parts,) if self.schedule.parts > 1 else ()
        return (*grid, *parts, self.rolled, *(a for a in rest if a not in grid and a != self.rolled))

    def _tile(self, axis: Axis) -> int:
        size = 1 if axis == self.part else self.schedule.tile(axis)
        if self.tails == "exact" or (self.together and axis == self.parts):
            return size
        size = max(size, self.padded_axes.get(axis, 1))
        return -(-size // self.multiple) * self.multiple if self.multiple and size > 1 else power_of_two(size)

    def _ones(self) -> frozenset[Axis]:
        """The axes of which a tile has one position."""
        return frozenset(a for a in self.order if self._tile(a) == 1)

    def _side_by_side(self) -> int:
        """The schedule's `interleave`, as far as it divides the blocks of the other axes."""
        blocks = math.prod(-(-a.extent // self._tile(a)) for a, _ in self.schedule.grid[:-1])
        return math.gcd(self.schedule.interleave, blocks)

    def _sorted(self, axes: frozenset[Axis]) -> tuple[Axis, ...]:
        return tuple(a for a in self.order if a in axes)

    def _is_padded(self, axis: Axis, scope: Scope) -> bool:
        """May a tile along this axis hold positions outside it? (Only axes that are reduced inside a tile ask.)"""
        if self.tails == "exact":
            return False
        if axis == self.rolled and not self.single_trip:
            return scope.edge
        return self._tile(axis) != axis.extent

    # --- expressions

    def _expr(self, root: Expr, scope: Scope) -> Expr:
        """`root` over values of this kernel: loads and inner reductions are emitted on first use."""
        root = simplify(substitute(root, dict(scope.fixed)))
        replacements: dict[Expr, Expr] = {}
        for node in postorder(root):
            if isinstance(node, Read):
                known = self._find(node, scope)
                replacements[node] = known if known is not None else self._emit_read(node, scope)
        return substitute(root, replacements)

    def _find(self, node: Expr, scope: Scope) -> Expr | None:
        """Returns what is known of `node` where a scope stands."""
        return scope.find(node)

    def _emit_read(self, node: Read, scope: Scope) -> Expr:
        target = scope if self.rolled in node.axes else self.top
        if node.tensor in self.inner:
            nest = self.inner[node.tensor]
            assert nest.reducer is not None
            value = self._reduction(nest.name, nest.axes, nest.reducer, nest.body, nest.reduced, target, nest.precision)
            result = self._let(f"{nest.name}.value", nest.axes, convert(value, nest.dtype), target)
        elif node.tensor in self.tensors:
            axes = self._sorted(node.axes)
            name = f"{node.tensor}.{'_'.join(a.name for a in node.indices)}" if node.indices else f"{node.tensor}.value"
            target.statements.append(Load(name, node.tensor, node.indices, node.dtype))
            result = read(name, axes, node.dtype)
        else:
            raise AssertionError(f"{node} is neither an input nor computed yet")
        target.known[node] = result
        return result

    def _let(self, name: str, axes: tuple[Axis, ...], value: Expr, scope: Scope, *, pinned: bool = False) -> Expr:
        if isinstance(value, Read):
            return value
        axes = self._sorted(frozenset(axes))
        scope.statements.append(Let(name, axes, value, pinned))
        return read(name, axes, value.dtype)

    def _reduction(
        self, name: str, axes: tuple[Axis, ...], reducer: Reducer, body: Expr, over: tuple[Axis, ...], scope: Scope,
        precision: str | None = None,
    ) -> Expr:  # fmt: skip
        """Fold `body` over axes of the tile: as a matrix product when it is one."""
        accumulator = dtypes.accumulator(body.dtype)
        axes = self._sorted(frozenset(axes))
        padded = [a for a in over if self._is_padded(a, scope)]
        ones = self._ones()
        batched = self.tails == "exact"  # these are loops of XLA, whose products have batches
        product = split_product(body, frozenset(over), ones, batched=batched) if reducer == SUM else None
        if product is not None:
            shared = product.lhs.axes & product.rhs.axes
            if self._leads(product.rhs, product.lhs, frozenset(over) | ones | shared):
                product = Product(product.rhs, product.lhs)
            sides = [
                self._in_range(narrow(self._expr(s, scope)), padded, 0.0, scope) for s in (product.lhs, product.rhs)
            ]
            if sides[0].dtype != sides[1].dtype:
                sides = [convert(s, accumulator) for s in sides]
            scope.statements.append(Contract(name, axes, sides[0], sides[1], over, accumulator, precision))
        else:
            value = convert(self._expr(body, scope), accumulator)
            value = self._in_range(value, padded, reducer.identity(accumulator), scope)
            scope.statements.append(Reduce(name, axes, reducer, value, over))
        return read(name, axes, accumulator)

    def _leads(self, a: Expr, b: Expr, ignored: frozenset[Axis]) -> bool:
        """Returns whether the first axis that `a` keeps comes before the first that `b` keeps: `a` gives the rows."""
        first = [min((self.order.index(x) for x in e.axes - ignored), default=len(self.order)) for e in (a, b)]
        return first[0] < first[1]

    def _in_range(self, value: Expr, padded: list[Axis], identity: float | int | bool, scope: Scope) -> Expr:
        if identity == 0 and isinstance(value, Read) and self._is_load(value):
            padded = [a for a in padded if a not in value.axes]  # a load is zero outside its tensor
        if not padded:
            return value
        inside: Expr | None = None
        for axis in padded:
            here = apply("lt", index(axis), const(axis.extent, "int32"))
            inside = here if inside is None else apply("and", inside, here)
        assert inside is not None
        return apply("select", inside, value, const(identity, value.dtype))

    def _is_load(self, value: Read) -> bool:
        return any(value.tensor.startswith(f"{t}.") for t in self.group.inputs)

    def _preload(self, term: Expr) -> None:
        """Emit, before the loop, what a term reads that does not vary along the rolled axis."""
        for node in postorder(term):
            if not isinstance(node, Read) or self._find(node, self.top) is not None:
                continue
            if node.tensor in self.inner:
                self._preload(self.inner[node.tensor].body)
                if self.rolled not in node.axes:
                    self._emit_read(node, self.top)
            elif node.tensor in self.tensors and self.rolled not in node.axes:
                self._emit_read(node, self.top)

    def _expr_with(self, root: Expr, replacements: dict[Expr, Expr], scope: Scope) -> Expr:
        for node in postorder(root):
            if isinstance(node, Read) and node not in replacements:
                replacements[node] = self._expr(node, scope)
        return substitute(root, replacements)
