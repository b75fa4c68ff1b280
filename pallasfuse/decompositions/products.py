"""Products of few rows, of few terms or of tiny matrices as products element by element and their sums, those of uneven rows with
even ones, and those of transposed operands without the transpositions.

A library copies the operands of a product to an order that it likes, and starts anew for each matrix of a batch. Where a matrix has
few elements, or meets few rows, that takes longer than the product. Sums of products element by element read both as they are.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions.writing import Instead, Writer, wide
from pallasfuse.jaxpr_frontend import flatten

Array = Any

MOST_ROWS = 4
"""The most rows of the smaller operand, each of which is a sum over the larger one."""
MOST_TINY = 8
"""The longest side of a tiny matrix: each position of the sum is an operation of its own."""
MOST_TERMS = 4
"""The most terms of a sum that are computed where the result is read: coordinates, not features."""
_ROW_BYTES = 16
"""A library's best kernels load operands whose rows begin at multiples of so many bytes."""
_FEWEST = 16
"""The fewest tiny matrices of a batch."""


@dataclass(frozen=True, slots=True)
class _Side:
    """An operand of a product: which of its dimensions are shared, summed, and its own."""

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    summed: tuple[int, ...]

    @property
    def own(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape)) if d not in self.batch and d not in self.summed)

    @property
    def rows(self) -> int:
        return self.sizes(self.own)

    def sizes(self, dims: Sequence[int]) -> int:
        return math.prod(self.shape[d] for d in dims)


def _sides_of(eqn: JaxprEqn) -> tuple[list[_Side], Any] | None:
    """Returns the sides of a product, and the type in which it is summed; None where not all are floats of at least 16 bits."""
    (summed, batch), atoms = eqn.params["dimension_numbers"], (*eqn.invars, eqn.outvars[0])
    types = [_compat.dtype_of(a) for a in atoms]
    if any(not jnp.issubdtype(t, jnp.floating) or wide(t) is None for t in types):
        return None
    shapes = map(_compat.shape_of, eqn.invars)
    return [_Side(shape, tuple(b), tuple(s)) for shape, b, s in zip(shapes, batch, summed, strict=True)], wide(
        types[-1]
    )


def product(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A product as sums of products element by element; None where it has many rows, or no floats of at least 16 bits."""
    known, result = _sides_of(eqn), _compat.dtype_of(eqn.outvars[0])
    if known is None:
        return None
    sides, dtype = known
    if min((*sides[0].shape, *sides[1].shape), default=0) < 1:
        return None
    many, terms = sides[0].sizes(sides[0].batch), sides[0].sizes(sides[0].summed)
    if many >= _FEWEST and max(sides[0].rows, sides[1].rows, terms) <= MOST_TINY:
        return lambda x, y: [_by_terms(x.astype(dtype), y.astype(dtype), sides).astype(result)]
    small = 0 if sides[0].rows <= sides[1].rows else 1
    if sides[small].rows > MOST_ROWS:
        return None

    def run(*operands: Array) -> list[Array]:
        found = _by_rows(operands[small], operands[1 - small], sides[small], sides[1 - small], dtype)
        if small == 1:  # the rows of the first operand come first
            shared, rows = len(sides[1].batch), len(sides[1].own)
            first = tuple(range(shared + rows, found.ndim))
            found = lax.transpose(found, (*range(shared), *first, *range(shared, shared + rows)))
        return [found.astype(result)]

    return run


def untransposed(eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn]) -> Instead | None:
    """A product without the transpositions of its operands; None where there are none, where the result had another order, or where
    somebody asks for its sharding.

    XLA has no library on a CPU for the product of one row and a matrix that is transposed before, and converts one of half types
    element by element. The direct product sums the same terms. makers: the equations that make the variables of the program.
    """
    orders: list[tuple[int, ...]] = []
    operands: list[Var | Literal] = []
    for atom in eqn.invars:
        order, source = tuple(range(len(_compat.shape_of(atom)))), atom
        while isinstance(source, Var) and source in makers and makers[source].primitive.name == "transpose":
            order = tuple(makers[source].params["permutation"][d] for d in order)
            (source,) = makers[source].invars
        orders.append(order)
        operands.append(source)
    summed, batch = eqn.params["dimension_numbers"]
    sides = [_Side(_compat.shape_of(a), tuple(batch[n]), tuple(summed[n])) for n, a in enumerate(eqn.invars)]
    own = [[order[d] for d in side.own] for order, side in zip(orders, sides, strict=True)]
    same_order = all(dims == sorted(dims) for dims in own)
    if operands == [*eqn.invars] or not same_order or eqn.params.get("out_sharding") is not None:
        return None
    numbers = tuple(tuple(tuple(orders[n][d] for d in dims[n]) for n in (0, 1)) for dims in (summed, batch))

    def written(*values: Array) -> list[Array]:
        return _compat.bind(eqn, [lax.transpose(x, order) for x, order in zip(values, orders, strict=True)])

    direct = eqn.replace(invars=operands, params={**eqn.params, "dimension_numbers": numbers})
    return Instead(direct, written, lambda *values: _compat.bind(direct, values), tuple(operands))


def aligned(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Returns a product with zeros behind the rows of its operands, where these rows, or those of a float32 result, are not whole
    16 bytes; None for others, and for batches.

    The units that move tiles do not load such rows, nor store them, and the library's best kernels do without them. A batch of
    small products gains nothing: copies of its operands take longer.
    """
    params = eqn.params
    (summed, batch), result = params["dimension_numbers"], _compat.shape_of(eqn.outvars[0])
    types = {jnp.dtype(_compat.dtype_of(a)) for a in eqn.invars}
    shapes = [_compat.shape_of(a) for a in eqn.invars]
    if not all(shapes) or params.get("out_sharding") is not None:
        return None
    if batch[0] or len(types) > 1 or not all(jnp.issubdtype(t, jnp.floating) and t.itemsize >= 2 for t in types):
        return None
    size = types.pop().itemsize
    wanted, of_row = [list(shape) for shape in shapes], _ROW_BYTES // size
    for n, shape in enumerate(shapes):
        last = len(shape) - 1
        of_sum = [d in summed[n] for d in range(len(shape))]
        row = [d for d in range(len(shape)) if len(set(of_sum[d:])) == 1]
        if math.prod(shape[d] for d in row) % of_row == 0:
            continue
        if math.prod(shape[d] for d in row[:-1]) > 1:  # of several dimensions, none of which can be longer
            return None
        wanted[n][last] = math.ceil(shape[last] / of_row) * of_row
        if last in summed[n]:
            wanted[1 - n][summed[1 - n][summed[n].index(last)]] = wanted[n][last]
    own = [[d for d in range(len(shape)) if d not in summed[n]] for n, shape in enumerate(shapes)]
    side = 1 if own[1] else 0
    if size == jnp.dtype(jnp.float32).itemsize and len(own[side]) == 1:  # the result's rows lie along it
        (d,) = own[side]
        wanted[side][d] = math.ceil(wanted[side][d] / of_row) * of_row
    if min((*shapes[0], *shapes[1]), default=0) < 1 or wanted == [list(shape) for shape in shapes]:
        return None

    def run(*operands: Array) -> list[Array]:
        x, y = [
            lax.pad(x, jnp.zeros((), x.dtype), [(0, to - n, 0) for n, to in zip(x.shape, sizes, strict=True)])
            for x, sizes in zip(operands, wanted, strict=True)
        ]
        found = lax.dot_general(x, y, (summed, batch), precision=params["precision"],
                                preferred_element_type=params["preferred_element_type"])  # fmt: skip
        return [found if found.shape == result else lax.slice(found, [0] * len(result), result)]

    return run


def of_few_terms(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Returns a product of many rows with many, each element a sum of few terms, element by element; None for others, and where
    the user asks for an algorithm.

    The result of a library is stored, and matrix units are hardly filled. These sums are computed where they are read: distances of
    points are compared, or summed, and never stored.
    """
    known, params = _sides_of(eqn), eqn.params
    if known is None or isinstance(params["precision"], lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return None
    (sides, dtype), result = known, _compat.dtype_of(eqn.outvars[0])
    if params.get("out_sharding") is not None:
        return None
    if not 1 <= sides[0].sizes(sides[0].summed) <= MOST_TERMS or min(s.rows for s in sides) <= MOST_ROWS:
        return None
    return lambda x, y: [_by_terms(x.astype(dtype), y.astype(dtype), sides).astype(result)]


def _by_terms(x: Array, y: Array, sides: Sequence[_Side]) -> Array:
    """A product, one position of the sum after the other."""
    one, other = sides
    shared = tuple(one.shape[d] for d in one.batch)
    terms = one.sizes(one.summed)
    x = lax.transpose(x, (*one.batch, *one.own, *one.summed)).reshape(*shared, one.rows, 1, terms)
    y = lax.transpose(y, (*other.batch, *other.own, *other.summed)).reshape(*shared, 1, other.rows, terms)
    found = x[..., 0] * y[..., 0]
    for n in range(1, terms):
        found = found + x[..., n] * y[..., n]
    return found.reshape(*shared, *(one.shape[d] for d in one.own), *(other.shape[d] for d in other.own))


def _by_rows(few: Array, many: Array, small: _Side, large: _Side, dtype: Any) -> Array:
    """Each row of the smaller operand times the larger one, whose dimensions stay in their order, and summed.

    The larger one stands first: where the operand that is repeated does, a CPU's library takes 5 to 8 times as long (4096 x 1024
    numbers of float32 and a row on two cores: 168 and 1366 us).
    """
    shared, positions = tuple(small.shape[d] for d in small.batch), tuple(small.shape[d] for d in small.summed)
    rows = lax.transpose(few, (*small.own, *small.batch, *small.summed)).reshape(small.rows, *shared, *positions)
    places = (*large.batch, *large.summed)
    order = sorted(range(len(places)), key=places.__getitem__)
    kept = [d for d in range(len(large.shape)) if d not in large.summed]
    arranged = (*(kept.index(d) for d in large.batch), *(kept.index(d) for d in large.own))

    def one(row: Array) -> Array:
        spread = lax.broadcast_in_dim(lax.transpose(row, order), large.shape, sorted(places))
        summed = jnp.sum(many.astype(dtype) * spread.astype(dtype), large.summed)
        return lax.transpose(summed, arranged)

    found = jnp.stack([one(rows[n]) for n in range(small.rows)], len(shared))
    own = tuple(small.shape[d] for d in small.own)
    return found.reshape(*shared, *own, *(large.shape[d] for d in large.own))


def with_parts_of_products(jaxpr: Jaxpr, constant: Collection[Var]) -> Jaxpr:
    """Returns a flat jaxpr in which products of constants, of which only parts are needed, are products of parts of the constants.

    Gates of a recurrent unit are often the parts of one product. constant: arguments whose parts cost nothing.
    """
    uses = Counter(a for a in (*jaxpr.outvars, *(x for e in jaxpr.eqns for x in e.invars)) if isinstance(a, Var))
    parts = Counter(e.invars[0] for e in jaxpr.eqns if e.primitive.name in _PARTS and isinstance(e.invars[0], Var))
    whole = {v: e for e in jaxpr.eqns if e.primitive.name == "dot_general" for v in e.outvars if parts[v] == uses[v]}
    writer, changed = Writer(jaxpr), False
    for eqn in jaxpr.eqns:
        made = whole.get(eqn.invars[0]) if eqn.primitive.name in _PARTS and isinstance(eqn.invars[0], Var) else None
        run = None if made is None else _of_parts(made, eqn, constant)
        if made is None or run is None:
            writer.keep(eqn)
            continue
        changed = True
        writer.instead(eqn, run, made.invars)
    return flatten(writer.written()) if changed else jaxpr


_PARTS = frozenset({"slice", "split"})


def _of_parts(made: JaxprEqn, part: JaxprEqn, constant: Collection[Var]) -> Callable[..., list[Array]] | None:
    """A product of a part of an operand for each part of a product that an equation takes; None where that is no constant."""
    shape, params = _compat.shape_of(made.outvars[0]), part.params
    if part.primitive.name == "split":
        axis = params["axis"]
        starts = [sum(params["sizes"][:n]) for n in range(len(params["sizes"]))]
        ranges = [(start, start + size) for start, size in zip(starts, params["sizes"], strict=True)]
    else:
        ends = list(zip(params["start_indices"], params["limit_indices"], shape, strict=True))
        cut = [d for d, (start, limit, n) in enumerate(ends) if (start, limit) != (0, n)]
        if len(cut) != 1 or any(n != 1 for n in params["strides"] or ()):
            return None
        axis, ranges = cut[0], [ends[cut[0]][:2]]
    (summed, batch), sides = made.params["dimension_numbers"], made.invars
    own = [
        [d for d in range(len(_compat.shape_of(a))) if d not in s and d not in b]
        for a, s, b in zip(sides, summed, batch, strict=True)
    ]
    place = axis - len(batch[0])
    side = 0 if place < len(own[0]) else 1
    if place < 0 or sides[side] not in constant:
        return None
    dimension = own[side][place - (len(own[0]) if side else 0)]

    def run(*operands: Array) -> list[Array]:
        found = []
        for start, limit in ranges:
            given = list(operands)
            given[side] = lax.slice_in_dim(given[side], start, limit, axis=dimension)
            found += _compat.bind(made, given)
        return found

    return run
