"""Arrays whose last axis is short, as one array for each position along it.

XLA for CPUs makes the last axis of an array its innermost loop: with 3 coordinates or 2 channels there, it has nothing for its
vector units, and what is broadcast to such an array or reduced along the axis is stored as a whole first. Apart, positions are
arrays of long rows, which fuse. What reads an array as a whole gets its positions stacked.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions.writing import Atom, Writer
from pallasfuse.jaxpr_frontend.elementwise import RULES as MAPS

Array = Any

LONGEST = 4
"""The most positions of an axis that is written out, as in kernels for GPUs (`ir.unrolling`)."""
LEAST_ELEMENTS = 1 << 13
"""The fewest elements of an array that is worth it: of smaller ones, a call of a loop takes longer than its work."""
_REDUCED: dict[str, Callable[[Array, Array], Array]] = {
    "reduce_sum": lax.add,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_prod": lax.mul,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}


@dataclass(frozen=True, slots=True)
class Apart:
    """An array as one for each position along a dimension, which they do not have."""

    dim: int
    parts: tuple[Atom, ...]


def with_short_axes_apart(jaxpr: Jaxpr, may: Callable[[JaxprEqn], bool] = lambda eqn: True) -> Jaxpr:
    """Returns a flat jaxpr with short last axes written out where something is broadcast or reduced along them; itself if nowhere.

    may: can an equation be written in another way?
    """
    wanted = _wanted(jaxpr)
    if not wanted:
        return jaxpr
    writer = _Writer(jaxpr, wanted, may)
    for eqn in jaxpr.eqns:
        writer.equation(eqn)
    for atom in jaxpr.outvars:
        writer.whole(atom)
    return writer.written()


def is_short(atom: Any) -> bool:
    """Is the last axis of an array short, and the array large enough?"""
    shape = _compat.shape_of(atom)
    return len(shape) > 1 and 2 <= shape[-1] <= LONGEST and math.prod(shape) >= LEAST_ELEMENTS


def _wanted(jaxpr: Jaxpr) -> set[Var]:
    """The arrays that are to be apart: those which something is broadcast to or reduced from, and what is computed with them
    element by element."""
    found: set[Var] = set()
    maps: list[list[Var]] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _REDUCED:
            (operand,) = eqn.invars
            if (
                isinstance(operand, Var)
                and is_short(operand)
                and len(_compat.shape_of(operand)) - 1 in eqn.params["axes"]
            ):
                found.add(operand)
        elif name in MAPS or name == "broadcast_in_dim":
            (result,) = eqn.outvars
            if not is_short(result):
                continue
            size = math.prod(_compat.shape_of(result))
            arrays = [a for a in eqn.invars if isinstance(a, Var) and _compat.shape_of(a)]
            if any(math.prod(_compat.shape_of(a)) < size for a in arrays):
                found.add(result)
            if name != "broadcast_in_dim":
                maps.append([result, *(a for a in arrays if _compat.shape_of(a) == _compat.shape_of(result))])
    grown = True
    while grown:  # also against the order of the program
        grown = False
        for group in maps:
            if not found.isdisjoint(group) and not found.issuperset(group):
                found.update(group)
                grown = True
    return found


class _Writer(Writer):
    """Writes a jaxpr in which some arrays are apart."""

    def __init__(self, jaxpr: Jaxpr, wanted: set[Var], may: Callable[[JaxprEqn], bool]) -> None:
        super().__init__(jaxpr)
        self.wanted, self._may = wanted, may
        self._makers = {v: e for e in jaxpr.eqns for v in e.outvars}
        self._apart: dict[Var, Apart] = {}
        self._read: dict[tuple[Atom, int], tuple[Atom, ...]] = {}

    def equation(self, eqn: JaxprEqn) -> None:
        """Write an equation, on parts where an operand or the result is apart and that is known how."""
        rule = _RULES.get(eqn.primitive.name)
        touched = any(isinstance(a, Var) and a in self._apart for a in eqn.invars)
        touched = touched or any(v in self.wanted for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var))
        if rule is not None and touched and not eqn.effects and self._may(eqn) and rule(self, eqn):
            return
        for atom in eqn.invars:
            self.whole(atom)
        self.keep(eqn)

    def whole(self, atom: Atom) -> Atom:
        """The array as a whole: its parts stacked, once."""
        if isinstance(atom, Literal):
            return atom
        known = self.atom(atom)
        if known is atom and atom in self._apart:
            apart = self._apart[atom]
            (stacked,) = self.emit(self._makers[atom], lambda *parts: [jnp.stack(parts, apart.dim)], apart.parts)
            self.name(atom, stacked)
            return stacked
        return known

    def apart(self, eqn: JaxprEqn, atom: Atom, dim: int) -> tuple[Atom, ...]:
        """The parts of an array along a dimension, read from it once where it is there as a whole."""
        if isinstance(atom, Var) and atom in self._apart and self._apart[atom].dim == dim:
            return self._apart[atom].parts
        whole = self.whole(atom)
        if (whole, dim) not in self._read:
            positions = range(_compat.shape_of(atom)[dim])
            parts = self.emit(eqn, lambda x: [lax.index_in_dim(x, n, dim, keepdims=False) for n in positions], [whole])
            self._read[whole, dim] = tuple(parts)
        return self._read[whole, dim]

    def is_apart(self, atom: Atom) -> bool:
        """Is an array computed part by part?"""
        return isinstance(atom, Var) and atom in self._apart

    def dim_of(self, atom: Atom) -> int | None:
        """The dimension along which an array is apart; the last one where it is to be; None elsewhere."""
        if not isinstance(atom, Var):
            return None
        if atom in self._apart:
            return self._apart[atom].dim
        return len(_compat.shape_of(atom)) - 1 if atom in self.wanted else None

    def store(self, eqn: JaxprEqn, dim: int, parts: Sequence[Atom]) -> bool:
        """Keep the parts of an equation's result."""
        self._apart[eqn.outvars[0]] = Apart(dim, tuple(parts))
        return True


def _map(writer: _Writer, eqn: JaxprEqn) -> bool:
    """Element by element: part by part."""
    (result,) = eqn.outvars
    shape = _compat.shape_of(result)
    dim = next((d for a in (*eqn.invars, result) if (d := writer.dim_of(a)) is not None
                and (a is result or len(_compat.shape_of(a)) == len(shape))), None)  # fmt: skip
    if dim is None or shape[dim] > LONGEST:
        return False
    count = shape[dim]
    columns: list[tuple[Atom, ...]] = []
    for atom in eqn.invars:
        own = _compat.shape_of(atom)
        if not own or len(own) != len(shape):
            columns.append((atom if isinstance(atom, Literal) else writer.whole(atom),) * count)
        elif own[dim] == count:
            columns.append(writer.apart(eqn, atom, dim))
        else:
            columns.append(tuple(writer.apart(eqn, atom, dim)) * count)
    flat = [a for column in columns for a in column]

    def run(*arrays: Array) -> list[Array]:
        values = [arrays[n : n + count] for n in range(0, len(arrays), count)]
        return [_compat.bind(eqn, [v[n] for v in values])[0] for n in range(count)]

    return writer.store(eqn, dim, writer.emit(eqn, run, flat))


def _broadcast(writer: _Writer, eqn: JaxprEqn) -> bool:
    (operand, *others), (result,) = eqn.invars, eqn.outvars
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    own = _compat.shape_of(operand)
    if others or not own:
        return False
    of_operand = writer.dim_of(operand) if isinstance(operand, Var) else None
    dim = places[of_operand] if of_operand is not None and shape[places[of_operand]] == own[of_operand] else None
    if dim is None:
        dim = writer.dim_of(result)
    if dim is None:
        return False
    count = shape[dim]
    if dim in places:
        inner = places.index(dim)
        parts = writer.apart(eqn, operand, inner)
        kept = [p for p in places if p != dim]
    else:
        parts, kept = (writer.whole(operand),), list(places)
    smaller = tuple(n for d, n in enumerate(shape) if d != dim)
    moved = tuple(p - (p > dim) for p in kept)
    found = writer.emit(eqn, lambda *xs: [lax.broadcast_in_dim(x, smaller, moved) for x in xs], parts)
    return writer.store(eqn, dim, found if len(found) == count else found * count)


def _reduce(writer: _Writer, eqn: JaxprEqn) -> bool:
    (operand,), axes = eqn.invars, eqn.params["axes"]
    dim = writer.dim_of(operand)
    if dim is None:
        return False
    parts = writer.apart(eqn, operand, dim)
    combine, others = _REDUCED[eqn.primitive.name], tuple(a - (a > dim) for a in axes if a != dim)
    inner = _compat.with_params(eqn, {**eqn.params, "axes": others})

    def reduced(x: Array) -> Array:
        return _compat.bind(inner, [x])[0] if others else x

    if dim in axes:
        (found,) = writer.emit(eqn, lambda *xs: [reduced(reduce(combine, xs))], parts)
        writer.name(eqn.outvars[0], found)
        return True
    return writer.store(
        eqn, dim - sum(a < dim for a in axes), writer.emit(eqn, lambda *xs: list(map(reduced, xs)), parts)
    )


def _transpose(writer: _Writer, eqn: JaxprEqn) -> bool:
    (operand,), permutation = eqn.invars, eqn.params["permutation"]
    dim = writer.dim_of(operand)
    if dim is None:
        return False
    order = tuple(p - (p > dim) for p in permutation if p != dim)
    parts = writer.apart(eqn, operand, dim)
    return writer.store(
        eqn, permutation.index(dim), writer.emit(eqn, lambda *xs: [lax.transpose(x, order) for x in xs], parts)
    )


def _reshape(writer: _Writer, eqn: JaxprEqn) -> bool:
    """Another shape in which the axis is still one."""
    operand, (result,) = eqn.invars[0], eqn.outvars
    dim = writer.dim_of(operand)
    if (
        dim is None
        or len(eqn.invars) > 1
        or (eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape")
    ):
        return False
    own, shape = _compat.shape_of(operand), _compat.shape_of(result)
    before = math.prod(own[:dim])
    place = next((d for d, n in enumerate(shape) if n == own[dim] and math.prod(shape[:d]) == before), None)
    if place is None:
        return False
    smaller = tuple(n for d, n in enumerate(shape) if d != place)
    parts = writer.apart(eqn, operand, dim)
    return writer.store(eqn, place, writer.emit(eqn, lambda *xs: [lax.reshape(x, smaller) for x in xs], parts))


def _slice(writer: _Writer, eqn: JaxprEqn) -> bool:
    (operand,), params = eqn.invars, eqn.params
    dim = writer.dim_of(operand)
    if dim is None or not writer.is_apart(operand):
        return False
    start, limit = params["start_indices"], params["limit_indices"]
    steps = params["strides"] or (1,) * len(start)
    parts = writer.apart(eqn, operand, dim)[start[dim] : limit[dim] : steps[dim]]

    def without(of: Sequence[int]) -> list[int]:
        return [n for d, n in enumerate(of) if d != dim]

    sliced = partial(lax.slice, start_indices=without(start), limit_indices=without(limit), strides=without(steps))
    if len(parts) == 1:
        (found,) = writer.emit(eqn, lambda x: [lax.expand_dims(sliced(x), [dim])], parts)
        writer.name(eqn.outvars[0], found)
        return True
    return writer.store(eqn, dim, writer.emit(eqn, lambda *xs: list(map(sliced, xs)), parts))


def _stack(writer: _Writer, eqn: JaxprEqn) -> bool:
    """Arrays that are joined to an array that is to be apart are its parts."""
    (result,) = eqn.outvars
    dim = writer.dim_of(result)
    along = eqn.params["axis"] if eqn.primitive.name == "stack" else eqn.params["dimension"]
    if dim is None or along != dim:
        return False
    operands = [writer.whole(a) for a in eqn.invars]
    if eqn.primitive.name == "stack":
        return writer.store(eqn, dim, operands)
    if any(_compat.shape_of(a)[dim] != 1 for a in operands):
        return False
    return writer.store(eqn, dim, writer.emit(eqn, lambda *xs: [lax.squeeze(x, [dim]) for x in xs], operands))


def _product(writer: _Writer, eqn: JaxprEqn) -> bool:
    """A product part by part, along an axis that it sums or that is the result's own; where nothing but such axes is left beside
    those that operands share, as a sum of products element by element."""
    lhs, rhs = eqn.invars
    (summed, of_batch), params = eqn.params["dimension_numbers"], eqn.params
    sides = [(lhs, list(summed[0]), list(of_batch[0])), (rhs, list(summed[1]), list(of_batch[1]))]
    side = next((s for s in (0, 1) if writer.dim_of(sides[s][0]) is not None and writer.is_apart(sides[s][0])), None)
    if side is None or lhs is rhs:
        return False
    (mine, my_sum, my_batch), (other, its_sum, its_batch) = sides[side], sides[1 - side]
    dim = writer.dim_of(mine)
    assert dim is not None
    if dim in my_sum or dim in my_batch or writer.dim_of(other) is not None:
        return False
    shape, others = _compat.shape_of(mine), _compat.shape_of(other)
    free = [d for d in range(len(shape)) if d not in my_sum and d not in my_batch]
    its_free = [d for d in range(len(others)) if d not in its_sum and d not in its_batch]
    if free != [dim] or its_free or not my_batch:  # only where no library has anything to gain
        return False
    wide = params["preferred_element_type"] or _compat.dtype_of(eqn.outvars[0])

    def run(x: Array, *parts: Array) -> list[Array]:
        order = (*its_batch, *its_sum)
        y = lax.transpose(x, order).astype(wide)
        mine_order = tuple(d - (d > dim) for d in (*my_batch, *my_sum))
        axes = tuple(range(len(my_batch), y.ndim))
        return [jnp.sum(lax.transpose(p, mine_order).astype(wide) * y, axes, dtype=wide) for p in parts]

    parts = writer.emit(eqn, run, [writer.whole(other), *writer.apart(eqn, mine, dim)])
    return writer.store(eqn, len(my_batch), parts)


_RULES: dict[str, Callable[[_Writer, JaxprEqn], bool]] = {
    **dict.fromkeys(MAPS.keys() - {"sharding_constraint", "name"}, _map),
    **dict.fromkeys(_REDUCED, _reduce),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "slice": _slice,
    "stack": _stack,
    "concatenate": _stack,
    "dot_general": _product,
}
