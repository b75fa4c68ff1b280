"""Expressions over the tiles of one kernel, and reductions inside of a tile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, apply, const, convert, index, postorder, read, reads_in, substitute
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.ranges import Range
from pallasfuse.ir.reducers import SUM, Reducer
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Contract, Let, Reduce, Statement
from pallasfuse.targets import Tails
from pallasfuse.tiling.products import Product, narrow, narrow_sides, split_product


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
    """A kernel under construction, as far as it is known: its axes, and the body around the current loop (`top`)."""

    tails: Tails
    tensors: dict[str, Tensor]
    """The tensors in global memory that the kernel may read."""
    nests: Mapping[str, Nest]
    order: tuple[Axis, ...]
    """The canonical order of axes in tiles."""
    rolled: Axis
    """The axis of the innermost loop that carries a pass."""
    top: Scope
    """The body around that loop."""
    part: Axis
    """The part of that axis that a block has."""
    parts: Axis
    """All parts, whose states are joined."""
    ranges: list[Range]
    """The ranges by which loops are bounded so far."""
    _elements: Mapping[Expr, str] = MappingProxyType({})
    """Elements that are compared with their extremum in the current pass, and names for their values, which are rounded once."""

    def _tile(self, axis: Axis) -> int:
        """The positions of the current piece of an axis."""
        raise NotImplementedError

    def _ones(self) -> frozenset[Axis]:
        """The axes of which a tile has one position."""
        raise NotImplementedError

    def _is_padded(self, axis: Axis, scope: Scope) -> bool:
        """May a tile along this axis hold positions outside it? (Only axes that are reduced inside a tile ask.)"""
        raise NotImplementedError

    def _find(self, node: Expr, scope: Scope) -> Expr | None:
        """Returns what is known of `node` where a scope stands."""
        raise NotImplementedError

    def _emit_read(self, node: Read, scope: Scope) -> Expr:
        """Loads or computes what is not known yet, where it is first read."""
        raise NotImplementedError

    def _is_load(self, value: Read) -> bool:
        """Is a value a tile as it was loaded, zero outside of its tensor?"""
        raise NotImplementedError

    def _sorted(self, axes: frozenset[Axis]) -> tuple[Axis, ...]:
        return tuple(a for a in self.order if a in axes)

    # --- expressions

    def _expr(self, root: Expr, scope: Scope) -> Expr:
        """`root` over values of this kernel: loads and inner reductions are emitted on first use."""
        root = simplify(substitute(root, dict(scope.fixed)))
        replacements: dict[Expr, Expr] = {}
        for element, name in self._elements.items():
            here = simplify(substitute(element, dict(scope.fixed)))
            if not isinstance(here, Read) and here in set(postorder(root)):
                replacements[here] = self._element(here, name, scope)
        root = substitute(root, replacements)
        for node in reads_in(root):
            if node not in replacements.values():
                known = self._find(node, scope)
                replacements[node] = known if known is not None else self._emit_read(node, scope)
        return substitute(root, replacements)

    def _element(self, element: Expr, name: str, scope: Scope) -> Expr:
        """Returns the value of what is compared with its extremum, which is computed once."""
        known = scope.find(element)
        if known is None:
            value = self._expr_with(element, {}, scope)
            known = scope.known[element] = self._let(name, tuple(value.axes), value, scope, pinned=True)
        return known

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
            both = self._expr(product.lhs, scope), self._expr(product.rhs, scope)
            # what XLA's own loops multiply is left as it is: a CPU multiplies half types no faster
            both = (narrow(both[0]), narrow(both[1])) if batched else narrow_sides(*both)
            sides = [self._in_range(s, padded, 0.0, scope) for s in both]
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

    def _expr_with(self, root: Expr, replacements: dict[Expr, Expr], scope: Scope) -> Expr:
        for node in reads_in(root):
            if node not in replacements:
                replacements[node] = self._expr(node, scope)
        return substitute(root, replacements)
