"""Small systems of linear equations, as loops over their columns.

Libraries factorise many small matrices by several kernels, each of which mostly starts and waits: a matrix of four rows is as long
under way as one of forty. As a loop whose state is the matrix, elimination is one kernel, which keeps the matrix in registers
(`recurrences`). Sums have another order than a library's; which rows come first is chosen as LAPACK does. Of matrices with
infinities or NaN, and of those without a Cholesky factor, other elements may be NaN.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn
from pallasfuse.decompositions.writing import Run, with_some_instead
from pallasfuse.jaxpr_frontend import flatten

type Array = Any
type Trip = Callable[[Any, Any, Any], tuple[Any, Any]]
"""Computes a state from the one before, the number of a column and a row, and what the column leaves behind."""
type Loop = Callable[..., tuple[Any, Any]]
"""Runs a trip for each column."""

FEWEST_ROWS, MOST_ROWS = 2, 64
"""The fewest and the most rows of a matrix that is kept in the registers of a block: 64 x 64 numbers are 32 in each of 128
threads."""
_FEW_ROWS = 8
"""Matrices of fewer rows have their columns written out in bodies of loops: a factorisation has thirty operations for each column,
and a kernel of all of them is to be compiled."""
_TYPES = ("float32", "float64")


def in_columns(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr, flat where it changes, in which systems of few rows are written out, one column after the other."""
    flat = flatten(jaxpr)
    if not any(eqn.primitive.name in RULES for eqn in flat.eqns):
        return jaxpr

    def in_turn(eqn: JaxprEqn) -> Run | None:
        rule = RULES.get(eqn.primitive.name)
        return None if rule is None or (_rows_of(eqn) or _FEW_ROWS) >= _FEW_ROWS else rule(eqn, _in_turn)

    written = with_some_instead(flat, in_turn)
    return jaxpr if written is None else flatten(written)


def _scanned(trip: Trip, state: Any, size: int, rows: Array = None, *, reverse: bool = False) -> tuple[Any, Any]:
    """Runs a trip for each of so many columns, by `lax.scan`."""
    return lax.scan(lambda state, x: trip(state, *x), state, (lax.iota(jnp.int32, size), rows), reverse=reverse)


def _in_turn(trip: Trip, state: Any, size: int, rows: Array = None, *, reverse: bool = False) -> tuple[Any, Any]:
    """Runs a trip for each of so many columns, written out one after the other."""
    found: list[Any] = [None] * size
    for n in reversed(range(size)) if reverse else range(size):
        state, found[n] = trip(state, np.int32(n), None if rows is None else rows[n])
    return state, jax.tree.map(lambda *ys: jnp.stack(ys), *found)


def factored(eqn: JaxprEqn, loop: Loop = _scanned) -> Run | None:
    """Returns what factorises as Cholesky did: each column of the matrix, over its root, is one of the factor, and is taken off the
    others."""
    size = _rows_of(eqn)
    if size is None:
        return None

    def run(a: Array) -> list[Array]:
        at = lax.iota(jnp.int32, size)

        def trip(state: tuple[Array, Array], k: Array, _: None) -> tuple[tuple[Array, Array], Array]:
            rest, positive = state
            column = jnp.sum(jnp.where(at == k, rest, 0), -1)
            pivot = jnp.sum(jnp.where(at == k, column, 0), -1)
            column = jnp.where(at >= k, column / jnp.sqrt(pivot)[..., None], 0)
            rest = rest - column[..., :, None] * column[..., None, :]
            return (rest, positive & (pivot > 0)), column

        start = a, jnp.ones(a.shape[:-2], bool)
        (_, positive), columns = loop(trip, start, size)
        return [jnp.where(positive[..., None, None], jnp.moveaxis(columns, 0, -1), jnp.nan)]

    return run


def pivoted(eqn: JaxprEqn, loop: Loop = _scanned) -> Run | None:
    """Returns what factorises into triangles with a choice of rows: these stay, and know their places in the order."""
    size = _rows_of(eqn)
    if size is None:
        return None

    def run(a: Array) -> list[Array]:
        at = lax.iota(jnp.int32, size)

        def trip(
            state: tuple[Array, Array], k: Array, _: None
        ) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
            rest, place = state
            column = jnp.sum(jnp.where(at == k, rest, 0), -1)
            length = jnp.where(place >= k, jnp.abs(column), -1)
            longest = jnp.max(length, -1)[..., None]
            first = jnp.min(jnp.where((place >= k) & ~(length < longest), place, size), -1)  # NaN: all of them
            here = place == first[..., None]
            row = jnp.sum(jnp.where(here[..., None], rest, 0), -2)
            pivot = jnp.sum(jnp.where(here, column, 0), -1)
            chosen = jnp.sum(jnp.where(here, at, 0), -1, dtype=jnp.int32)
            place = jnp.where(here, k, jnp.where(place == k, first[..., None], place))
            factor = column / jnp.where(pivot == 0, 1, pivot)[..., None]
            left = rest - factor[..., :, None] * row[..., None, :]
            rest = jnp.where(at > k, left, jnp.where(at == k, factor[..., None], rest))
            return (rest, place), (row, first, chosen)

        start = a, jnp.broadcast_to(at, a.shape[:-1])
        _, (rows, pivots, order) = loop(trip, start, size)
        return [jnp.moveaxis(rows, 0, -2), jnp.moveaxis(pivots, 0, -1), jnp.moveaxis(order, 0, -1)]

    return run


def solved(eqn: JaxprEqn, loop: Loop = _scanned) -> Run | None:
    """Returns what solves triangular systems: each unknown is what is left of its right side, over the diagonal."""
    size = _rows_of(eqn)
    params = eqn.params
    if size is None:
        return None
    transposed = bool(params["transpose_a"]) == bool(params["left_side"])
    downwards = bool(params["lower"]) != transposed

    def run(a: Array, b: Array) -> list[Array]:
        at = lax.iota(jnp.int32, size)

        def trip(state: Array, k: Array, row: Array) -> tuple[Array, None]:
            known = at < k if downwards else at > k
            own = (at == k)[:, None]
            terms = jnp.where(known[:, None], -row[..., None] * state, 0)
            found = jnp.sum(jnp.where(own, state, terms), -2)
            if not params["unit_diagonal"]:
                found = found / jnp.sum(jnp.where(at == k, row, 0), -1)[..., None]
            return jnp.where(own, found[..., None, :], state), None

        rows = jnp.moveaxis(a, -1 if transposed else -2, 0)
        right = b if params["left_side"] else jnp.swapaxes(b, -1, -2)
        result, _ = loop(trip, right, size, rows, reverse=not downwards)
        return [result if params["left_side"] else jnp.swapaxes(result, -1, -2)]

    return run


def _rows_of(eqn: JaxprEqn) -> int | None:
    """Counts the rows of square matrices of real numbers; None for others, and for large ones."""
    shape, dtype = _compat.shape_of(eqn.invars[0]), str(_compat.dtype_of(eqn.invars[0]))
    fits = len(shape) > 1 and shape[-1] == shape[-2] and FEWEST_ROWS <= shape[-1] <= MOST_ROWS
    return shape[-1] if fits and min(shape) > 0 and dtype in _TYPES else None


RULES: Mapping[str, Callable[..., Run | None]] = {"cholesky": factored, "lu": pivoted, "triangular_solve": solved}
"""The functions that say how an operation is computed by loops, by its name."""
