"""Parts of an axis, and parts put together, as sums over the whole axis in which all terms but one are zero.

In a kernel that holds an axis in registers, no instruction takes a part of it, shifts it, or joins two: elements change places
between threads in reductions only. These are the operations that do so, written as reductions (`computed_places` has those whose
place a program computes). A sum of zeros and one number is that number, except that -0 becomes 0.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions import computed_places
from pallasfuse.decompositions.computed_places import element
from pallasfuse.decompositions.writing import Atom, Run, Writer
from pallasfuse.jaxpr_frontend import flatten

type Array = Any


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of positions of a view, and where its elements are from: from `start` on, one in every `stride`.

    start: None where all are the one element that the source is.
    """

    source: Atom
    length: int
    start: int | None
    stride: int = 1

    def part(self, start: int, length: int, stride: int) -> "Piece":
        """Returns the piece of `length` of these positions: from `start` on, one in every `stride`."""
        if self.start is None:
            return Piece(self.source, length, None)
        return Piece(self.source, length, self.start + start * self.stride, self.stride * stride)


@dataclass(frozen=True, slots=True)
class View:
    """An array that is not computed yet: pieces of others, one after the other along an axis."""

    axis: int
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(p.length for p in self.pieces)

    def part(self, start: int, length: int, stride: int) -> "View":
        """Returns the view of `length` of these positions: from `start` on, one in every `stride`, which is positive."""
        found, begun, taken = list[Piece](), 0, 0
        for piece in self.pieces:
            here = start + taken * stride - begun  # the first position that is still wanted
            count = min(length - taken, max(0, -(-(piece.length - here) // stride)))
            if count:
                found.append(piece.part(here, count, stride))
            taken, begun = taken + count, begun + piece.length
        return View(self.axis, tuple(found))

    def backwards(self) -> "View":
        """Returns the view of the same positions from the last one to the first one."""
        return View(self.axis, tuple(p.part(p.length - 1, p.length, -1) for p in reversed(self.pieces)))


def is_selection(eqn: JaxprEqn) -> bool:
    """Is an operation one that is written as a reduction, for most shapes and types?"""
    return eqn.primitive.name in _RULES or eqn.primitive.name in ("slice", "split", "concatenate", "rev")


def without_selections(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr, flat, with such operations written as reductions; what has no such form stays as it is.

    Several of them along one axis become one reduction: a shift, which takes a part of an axis and joins it to another, is one.
    """
    return _Selections(flatten(jaxpr)).written()


class _Selections:
    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr, self.writer = jaxpr, Writer(jaxpr)
        self.views: dict[Var, View] = {}

    def written(self) -> Jaxpr:
        for eqn in self.jaxpr.eqns:
            views = None if eqn.effects else self._views(eqn)
            if views is not None:
                self.views |= dict(zip(eqn.outvars, views, strict=True))
                continue
            for atom in eqn.invars:
                self._compute(atom, eqn)
            rule = _RULES.get(eqn.primitive.name)
            run = None if rule is None or eqn.effects else rule(eqn)
            if run is None:
                self.writer.keep(eqn)
            else:
                self.writer.instead(eqn, run)
        for atom in self.jaxpr.outvars:
            self._compute(atom, self.jaxpr.eqns[-1] if self.jaxpr.eqns else None)
        return self.writer.written()

    def _compute(self, atom: Atom, eqn: JaxprEqn | None) -> None:
        """Write the equations that compute a view, before the equation that needs it."""
        if isinstance(atom, Literal) or atom not in self.views or eqn is None:
            return
        self.writer.name(atom, self._written(self.views.pop(atom), _compat.shape_of(atom), eqn))

    def _written(self, view: View, shape: Sequence[int], eqn: JaxprEqn) -> Atom:
        """Write the equations that compute a view, and return what it is."""
        sources = [p.source for p in view.pieces]
        (found,) = self.writer.emit(eqn, lambda *values: [_assembled(view, shape, values)], sources)
        return found

    def _views(self, eqn: JaxprEqn) -> list[View] | None:
        """The views that an equation's results are; None where they are none."""
        params = eqn.params
        match eqn.primitive.name:
            case "slice":
                starts, limits = params["start_indices"], params["limit_indices"]
                strides = params["strides"] or (1,) * len(starts)
                shape = _compat.shape_of(eqn.invars[0])
                ends = [*zip(starts, limits, strides, shape, strict=True)]
                cut = [d for d, (start, limit, stride, n) in enumerate(ends) if (start, limit, stride) != (0, n, 1)]
                view, made = self._of(eqn, 0, cut[0] if cut else 0), tuple(shape)
                for number, d in enumerate(cut):
                    if number:  # a view is along one axis
                        atom = self._written(view, made, eqn)
                        view = View(d, (Piece(atom, shape[d], 0),))
                    start, limit, stride, _ = ends[d]
                    view = view.part(start, -(-(limit - start) // stride), stride)
                    made = (*made[:d], view.length, *made[d + 1 :])
                return [view]
            case "split":
                whole, begun, found = self._of(eqn, 0, params["axis"]), 0, []
                for size in params["sizes"]:
                    found.append(whole.part(begun, size, 1))
                    begun += size
                return found
            case "concatenate":
                axis = params["dimension"]
                parts = [self._of(eqn, n, axis) for n in range(len(eqn.invars))]
                return [View(axis, tuple(p for part in parts for p in part.pieces))]
            case "rev" if len(params["dimensions"]) == 1:
                return [self._of(eqn, 0, params["dimensions"][0]).backwards()]
            case "pad":
                widened = [d for d, ends in enumerate(params["padding_config"]) if ends != (0, 0, 0)]
                low, high, between = params["padding_config"][widened[0]] if len(widened) == 1 else (0, 0, 1)
                if between or min(low, high) < 0:
                    return None
                fill = self.writer.atom(eqn.invars[1])
                before, after = ([Piece(fill, n, None)] if n else [] for n in (low, high))
                return [View(widened[0], (*before, *self._of(eqn, 0, widened[0]).pieces, *after))]
        return None

    def _of(self, eqn: JaxprEqn, number: int, axis: int) -> View:
        """The view that an operand is along an axis: of itself, where it is none of others."""
        atom = eqn.invars[number]
        if isinstance(atom, Var) and atom in self.views:
            if self.views[atom].axis == axis:
                return self.views[atom]
            self._compute(atom, eqn)
        return View(axis, (Piece(self.writer.atom(atom), _compat.shape_of(atom)[axis], 0),))


def _assembled(view: View, shape: Sequence[int], values: Sequence[Array]) -> Array:
    """Computes the array that a view stands for: the sum of its pieces, each of which is zero outside of its own positions."""
    axis, begun = view.axis, 0
    total: Array = None
    for piece, value in zip(view.pieces, values, strict=True):
        found = _piece(piece, value, axis, shape, begun)
        total = found if total is None else jnp.logical_or(total, found) if found.dtype == jnp.bool_ else total + found
        begun += piece.length
    return total


def _piece(piece: Piece, value: Array, axis: int, shape: Sequence[int], begun: int) -> Array:
    """Computes an array that has a piece from position `begun` on, and zeros elsewhere."""
    whole = piece.length == shape[axis]
    if whole and piece.start == 0 and piece.stride == 1 and value.shape[axis] == shape[axis]:
        return value
    is_bool = value.dtype == jnp.bool_
    values = value.astype(jnp.int32) if is_bool else value
    zero = jnp.zeros((), values.dtype)
    if piece.start is not None and value.shape[axis] > 1 and piece.length > 1:
        both = (*shape[:axis], shape[axis], value.shape[axis], *shape[axis + 1 :])
        result, operand = (lax.broadcasted_iota(jnp.int32, both, d) for d in (axis, axis + 1))
        here = (result - begun) * piece.stride + piece.start == operand
        found = jnp.sum(jnp.where(here, jnp.expand_dims(values, axis), zero), axis + 1, values.dtype)
        ends = sorted((piece.start, piece.start + (piece.length - 1) * piece.stride))
        reached_by_others = ends[0] >= abs(piece.stride) or ends[1] + abs(piece.stride) < value.shape[axis]
    else:
        if piece.start is not None and value.shape[axis] > 1:  # one element
            values = jnp.expand_dims(element(values, axis, piece.start), axis)
        found, reached_by_others = jnp.broadcast_to(values, shape), True
    if reached_by_others and not whole:  # positions beyond the piece's own have an element of the source, too
        place = lax.broadcasted_iota(jnp.int32, tuple(shape), axis)
        if begun:
            found = jnp.where(place >= begun, found, zero)
        if begun + piece.length < shape[axis]:
            found = jnp.where(place < begun + piece.length, found, zero)
    return found != 0 if is_bool else found


def _unstack(eqn: JaxprEqn) -> Run:
    axis = eqn.params["axis"]
    return lambda x: [element(x, axis, n) for n in range(x.shape[axis])]


def _stack(eqn: JaxprEqn) -> Run:
    axis = eqn.params["axis"]

    def run(*parts: Array) -> list[Array]:
        shape = _compat.shape_of(eqn.outvars[0])
        place = lax.broadcasted_iota(jnp.int32, shape, axis)
        found = jnp.broadcast_to(jnp.expand_dims(parts[-1], axis), shape)
        for n, part in reversed([*enumerate(parts[:-1])]):
            found = jnp.where(place == n, jnp.expand_dims(part, axis), found)
        return [found]

    return run


def _running(eqn: JaxprEqn) -> Run:
    axis, backwards, name = eqn.params["axis"], eqn.params["reverse"], eqn.primitive.name

    def run(x: Array) -> list[Array]:
        shape = (*x.shape[: axis + 1], x.shape[axis], *x.shape[axis + 1 :])
        result, operand = (lax.broadcasted_iota(jnp.int32, shape, d) for d in (axis, axis + 1))
        counts = operand >= result if backwards else operand <= result
        if name == "cumsum":
            return [jnp.sum(jnp.where(counts, jnp.expand_dims(x, axis), jnp.zeros((), x.dtype)), axis + 1, x.dtype)]
        is_least = name == "cummin"
        if jnp.issubdtype(x.dtype, jnp.floating):
            none = math.inf if is_least else -math.inf
        else:
            none = jnp.iinfo(x.dtype).max if is_least else jnp.iinfo(x.dtype).min
        terms = jnp.where(counts, jnp.expand_dims(x, axis), jnp.asarray(none, x.dtype))
        return [jnp.min(terms, axis + 1) if is_least else jnp.max(terms, axis + 1)]

    return run


def _place_of_extreme(eqn: JaxprEqn) -> Run | None:
    axes, dtype, is_least = eqn.params["axes"], eqn.params["index_dtype"], eqn.primitive.name == "argmin"
    if len(axes) != 1 or _compat.dtype_of(eqn.invars[0]) == jnp.bool_:
        return None
    (axis,) = axes

    def run(x: Array) -> list[Array]:
        length = x.shape[axis]
        place = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        extreme = (jnp.min if is_least else jnp.max)(x, axis=axis, keepdims=True)
        found = jnp.min(jnp.where(x == extreme, place, length), axis=axis)
        if jnp.issubdtype(x.dtype, jnp.floating):  # the first that is no number comes before all numbers
            unknown = jnp.min(jnp.where(x != x, place, length), axis=axis)  # noqa: PLR0124
            found = jnp.where(unknown < length, unknown, found)
        return [found.astype(dtype)]

    return run


def _padded(eqn: JaxprEqn) -> Run:
    """Pads of several dimensions, with elements between those of the operand or with some cut off, one dimension at a time."""
    config = eqn.params["padding_config"]

    def run(x: Array, fill: Array) -> list[Array]:
        for axis, (low, high, between) in enumerate(config):
            own = x.shape[axis]
            length = low + high + own + max(0, own - 1) * between
            if (low, high, between) == (0, 0, 0):
                continue
            both = (*x.shape[:axis], length, own, *x.shape[axis + 1 :])
            result, operand = (lax.broadcasted_iota(jnp.int32, both, d) for d in (axis, axis + 1))
            here = operand * (between + 1) + low == result
            values = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
            found = jnp.sum(
                jnp.where(here, jnp.expand_dims(values, axis), jnp.zeros((), values.dtype)), axis + 1, values.dtype
            )
            covered = jnp.sum(jnp.where(here, 1, 0), axis + 1) > 0
            x = jnp.where(covered, found != 0 if x.dtype == jnp.bool_ else found, fill)
        return [x]

    return run


_LONGEST_PRODUCT = 8
"""The product of more elements along an axis stays what it is: each of its factors would be looked for among all of them."""


def _product(eqn: JaxprEqn) -> Run | None:
    """Multiplies the elements along short axes one after the other; None where an axis is longer."""
    axes, shape = sorted(eqn.params["axes"], reverse=True), _compat.shape_of(eqn.invars[0])
    if any(not 1 <= shape[d] <= _LONGEST_PRODUCT for d in axes):
        return None

    def run(x: Array) -> list[Array]:
        for axis in axes:
            x = functools.reduce(operator.mul, (element(x, axis, n) for n in range(x.shape[axis])))
        return [x]

    return run


_RULES: dict[str, Callable[[JaxprEqn], Run | None]] = {
    "pad": _padded,
    "reduce_prod": _product,
    "stack": _stack,
    "unstack": _unstack,
    **dict.fromkeys(("cumsum", "cummax", "cummin"), _running),
    **dict.fromkeys(("argmax", "argmin"), _place_of_extreme),
    **computed_places.RULES,
}
