"""Finds positions along two neighbouring axes that are one axis: `i * J + j`, where the inner one, j, has the extent J."""

from collections.abc import Iterator, Mapping

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, add, const, index, mul, postorder, rebuild, with_args

Pair = tuple[Axis, Axis]
"""Two neighbouring axes, the outer one first."""


def with_joined_positions(total: Expr, joins: Mapping[Pair, Axis]) -> Expr:
    """Returns a sum with the position along one axis for those along two that become it; whatever else it is given, as it is."""
    for pair, one in joins.items() if _is_sum(total) else ():
        total = _joined(total, pair, one)
    return total


def in_order(body: Expr) -> frozenset[Pair]:
    """Returns the pairs of axes along which an expression asks for positions only as if they were one axis."""
    found = {p for node in postorder(body) if _is_sum(node) for p in _pairs(_terms(node))}
    return frozenset(p for p in found if not _asks_apart(body, p))


def _asks_apart(body: Expr, pair: Pair) -> bool:
    """Does an expression ask for a position along one axis of a pair other than as a part of that along both?"""
    a, b = pair
    joins = {pair: Axis(f"{a.name}_{b.name}", a.extent * b.extent)}
    left = rebuild(body, lambda node, args: with_joined_positions(with_args(node, args), joins))
    return any(isinstance(x, Index) and x.axis in pair for x in postorder(left))


def _is_sum(node: Expr) -> bool:
    return isinstance(node, Apply) and node.op == "add" and node.dtype == "int32"


def _terms(node: Expr) -> list[tuple[Expr, int]]:
    """Returns the terms of a sum of positions, each with its factor."""
    if _is_sum(node):
        assert isinstance(node, Apply)
        return [t for arg in node.args for t in _terms(arg)]
    if (
        isinstance(node, Apply)
        and node.op == "mul"
        and isinstance(node.args[0], Index)
        and isinstance(node.args[1], Const)
    ):
        return [(node.args[0], int(node.args[1].value))]
    return [(node, 1)]


def _pairs(terms: list[tuple[Expr, int]]) -> Iterator[Pair]:
    """Yields the axes of which one counts how often the other has been passed."""
    positions = [(x.axis, factor) for x, factor in terms if isinstance(x, Index)]
    for a, outer in positions:
        yield from ((a, b) for b, inner in positions if a != b and outer == inner * b.extent)


def _joined(total: Expr, pair: Pair, one: Axis) -> Expr:
    terms = _terms(total)
    once = sum(isinstance(x, Index) and x.axis in pair for x, _ in terms) == len(pair)
    if not once or pair not in _pairs(terms):
        return total
    inner = next(factor for x, factor in terms if isinstance(x, Index) and x.axis == pair[1])
    kept = [(x, f) for x, f in terms if not (isinstance(x, Index) and x.axis in pair)]
    parts = [x if f == 1 else mul(x, const(f, "int32")) for x, f in [*kept, (index(one), inner)]]
    found = parts[0]
    for part in parts[1:]:
        found = add(found, part)
    return found
