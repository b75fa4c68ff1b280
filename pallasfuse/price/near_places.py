"""Gathers whose neighbours read neighbours: their positions count up along a dimension, whatever else is added to them.

So do those of an image that is moved, turned or bent: each result reads near its own place. Such pieces come as if in order.
(Four million numbers from tensors of 256 kB to 4 MB, each from some 30 places around its own, took 7 us on an H200, and places that
were drawn 19 to 30 us.) What floats add or multiply by is taken to be small, and about one. Integers that are given for each
position are places that somebody has chosen: what is added to those is near nothing.
"""

import math
from collections.abc import Collection, Mapping

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.loop_program import Nest

_FAR = 8.0
"""Positions that count up by more than so many are not near each other: a sector has as many words."""
_STRIDES = 2
"""A part of a tensor with so many times fewer positions may be every second one, or fewer."""
_SAME = frozenset({"convert", "floor", "ceil", "round_even", "round_away", "rem"})
"""Operations whose results count up as their first argument does."""
_LARGEST = frozenset({"min", "max", "select"})
"""Operations whose results are those of one argument or the other."""

Slope = float | None
"""The number by which values grow from one position to the next, as far as the program itself says it: what data add counts as
nothing. None stands for values that are not known to grow evenly."""


class Slopes:
    """This finds how the values of a program's maps grow along their axes, each map once for all gathers of the program."""

    def __init__(self, maps: Mapping[str, Nest], chosen: Collection[str]) -> None:
        """Takes the maps of a program, with those that stand for its moves, by name.

        chosen: the moves whose elements positions choose; what they find is data.
        """
        self._maps = {name: nest for name, nest in maps.items() if name not in chosen and not nest.is_reduction}
        self._known: dict[str, tuple[Slope, ...]] = {}

    def follow_each_other(self, positions: str) -> bool:
        """Says whether positions count up along one of their last two dimensions: the last one may be the coordinates of each."""
        slopes = self._of(positions)[-2:]
        return any(s is not None and 0 < abs(s) <= _FAR for s in slopes)

    def _of(self, tensor: str) -> tuple[Slope, ...]:
        """Returns the slope of a tensor along each of its axes; nothing where it is no map."""
        waiting = [tensor]
        while waiting:
            nest = self._maps.get(waiting[-1])
            missing = [] if nest is None else [t for t in nest.reads if t in self._maps and t not in self._known]
            if missing:
                waiting += missing
                continue
            if nest is not None and nest.name not in self._known:
                self._known[nest.name] = tuple([self._along(nest.body, axis) for axis in nest.axes])
            waiting.pop()
        return self._known.get(tensor, ())

    def _along(self, body: Expr, axis: Axis) -> Slope:
        """Returns the slope of the body of a map along one of its axes."""
        found: dict[Expr, Slope] = {}
        for node in postorder(body):
            match node:
                case Index(own):
                    found[node] = float(own == axis)
                case Read():
                    found[node] = self._of_read(node, axis)
                case Apply(op, args):
                    found[node] = self._of_operation(op, args, [found[a] for a in args])
                case _:
                    found[node] = 0.0
        return found[body]

    def _of_read(self, node: Read, axis: Axis) -> Slope:
        if axis not in node.indices:
            return 0.0
        nest, slopes = self._maps.get(node.tensor), self._known.get(node.tensor)
        if nest is None or slopes is None or len(slopes) != len(node.indices):
            return 0.0 if dtypes.is_float(node.dtype) else None
        at = node.indices.index(axis)
        is_part = nest.axes[at].extent >= _STRIDES * axis.extent
        return None if is_part and slopes[at] != 0 else slopes[at]

    def _of_operation(self, op: str, args: tuple[Expr, ...], slopes: list[Slope]) -> Slope:
        """Returns the slope of an operation's result by those of its arguments."""
        if op == "select":
            args, slopes = args[1:], slopes[1:]
        known = [s for s in slopes if s is not None]
        if len(known) < len(slopes):
            return None
        if not any(known):
            return 0.0
        if op in _SAME:
            return known[0]
        if op in _LARGEST:
            return max(known, key=abs)
        match op, known:
            case "add", [one, other]:
                return one + other
            case "sub", [one, other]:
                return one - other
            case "neg", [one]:
                return -one
            case "abs", [one]:
                return abs(one)
            case "mul", [one, other] if not (one and other):
                factor = self._number(args[1] if one else args[0])
                return None if factor is None else factor * (one or other)
            case "div", [one, other] if not other:
                divisor = self._number(args[1])
                return one / divisor if divisor else None
        return None

    def _number(self, node: Expr) -> float | None:
        """Returns a number that the program knows, one for data, and None for what is no finite number."""
        while isinstance(node, Read) and node.tensor in self._maps:
            node = self._maps[node.tensor].body
        if not isinstance(node, Const):
            return 1.0
        return float(node.value) if not isinstance(node.value, complex) and math.isfinite(node.value) else None
