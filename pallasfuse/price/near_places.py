"""Gathers whose neighbours read neighbours: their positions count up along a dimension, whatever else is added to them.

So do those of an image that is moved, turned or bent: each result reads near its own place. Such pieces come as if in order.
(Four million numbers from tensors of 256 kB to 4 MB, each from some 30 places around its own: 7 us on an H200, where places that
are drawn take 19 to 30 us.)
"""

from collections.abc import Mapping

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read
from pallasfuse.ir.loop_program import Nest

_FAR = 8.0
"""Positions that count up by more than so many are not near each other: a sector has as many words."""
_AS_THEY_ARE = frozenset({"convert", "floor", "ceil", "round_even", "round_away", "neg", "abs"})
_OF_SEVERAL = frozenset({"add", "sub"})
_ONE_OF = frozenset({"min", "max"})
_BY_FIRST = frozenset({"rem", "div"})


def follow_each_other(positions: str, maps: Mapping[str, Nest]) -> bool:
    """Says whether positions count up along one of their last two dimensions: the last one may be the coordinates of each."""
    found = maps.get(positions)
    if found is None:
        return False
    slopes = (_of_tensor(found, axis, maps, {}) for axis in found.axes[-2:])
    return any(s is not None and 0 < s <= _FAR for s in slopes)


def _of_tensor(
    nest: Nest, axis: Axis, maps: Mapping[str, Nest], known: dict[tuple[str, Axis], float | None]
) -> float | None:
    """Returns by how much the elements of a map change from one position to the next along an axis, at most; 0 where that is only
    known to data, and None where it is any number."""
    key = nest.name, axis
    if key not in known:
        known[key] = None if nest.is_reduction else _slope(nest.body, axis, maps, known, {})
    return known[key]


def _slope(
    node: Expr,
    axis: Axis,
    maps: Mapping[str, Nest],
    known: dict[tuple[str, Axis], float | None],
    memo: dict[Expr, float | None],
) -> float | None:
    """Returns the same for an expression over the axes of a map."""
    if node in memo:
        return memo[node]
    found: float | None = None
    match node:
        case Index(own):
            found = float(own == axis)
        case Const():
            found = 0.0
        case Read(tensor, indices):
            source = maps.get(tensor)
            along = [] if source is None else [d for d, a in enumerate(indices) if a == axis]
            if source is None or not along or len(source.axes) != len(indices):
                found = 0.0
            else:
                found = _of_tensor(source, source.axes[along[0]], maps, known)
        case Apply(op, args):
            of = [_slope(a, axis, maps, known, memo) for a in args]
            found = _of_operation(op, args, of)
    memo[node] = found
    return found


def _of_operation(op: str, args: tuple[Expr, ...], slopes: list[float | None]) -> float | None:
    """Returns the slope of an operation by those of its arguments."""
    if op == "select":
        slopes = slopes[1:]
    if all(s == 0 for s in slopes):
        return 0.0
    if None in slopes:
        return None
    numbers = [s for s in slopes if s is not None]
    if op in _AS_THEY_ARE or op in _BY_FIRST:
        divisor = args[1] if op == "div" else None
        return numbers[0] / max(1.0, abs(float(divisor.value))) if isinstance(divisor, Const) else numbers[0]
    if op in _OF_SEVERAL:
        return sum(numbers)
    if op in _ONE_OF or op == "select":
        return max(numbers)
    if op == "mul":  # by data: the size of a turn is taken to be one
        constants = [abs(float(a.value)) for a in args if isinstance(a, Const)]
        return max(numbers) * (constants[0] if constants else 1.0)
    return None
