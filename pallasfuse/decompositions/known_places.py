"""Updates of places that a program names as numbers, such as the first row of an array, as choices by position, and diagonals.

An update has no nest, as its places may depend on data. Where they do not, it is a choice between what stands there and what comes,
by position: a kernel has that. A diagonal is taken by its places, too, and is a sum of rows in which all terms but one are zero.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions.computed_places import COMBINED
from pallasfuse.decompositions.writing import Atom, Run, with_some_instead
from pallasfuse.jaxpr_frontend import flatten

type Array = Any

_OF_PLACES: dict[str, Callable[[Mapping[str, Any], Sequence[np.ndarray]], np.ndarray]] = {
    "broadcast_in_dim": lambda p, v: np.broadcast_to(np.expand_dims(v[0], _new_dimensions(p)), p["shape"]),
    "concatenate": lambda p, v: np.concatenate(v, p["dimension"]),
    "convert_element_type": lambda p, v: v[0].astype(p["new_dtype"]),
    "reshape": lambda p, v: v[0].reshape(p["new_sizes"]),
    "squeeze": lambda p, v: np.squeeze(v[0], tuple(p["dimensions"])),
    "iota": lambda p, _: _positions(p),
    "lt": lambda _, v: v[0] < v[1],
    "add": lambda _, v: v[0] + v[1],
    "select_n": lambda _, v: _selected(*v),
}
"""Operations that programs compute places from numbers with, by their parameters and operands."""
_MOST_NUMBERS = 16
"""Places are no more numbers than these: one for each dimension."""


def with_choices_at_known_places(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr, flat where it changes, in which updates of one known place or window are choices by position, and diagonals
    are sums."""
    flat = flatten(jaxpr)
    if not any(eqn.primitive.name in COMBINED or eqn.primitive.name == "gather" for eqn in flat.eqns):
        return jaxpr
    known = dict[Var, np.ndarray]()

    def rule(eqn: JaxprEqn) -> Run | None:
        _evaluate(eqn, known)
        found = _diagonal if eqn.primitive.name == "gather" else _choice
        return None if eqn.effects else found(eqn, known)

    written = with_some_instead(flat, rule)
    return jaxpr if written is None else flatten(written)


def _value(atom: Atom, known: dict[Var, np.ndarray]) -> np.ndarray | None:
    return np.asarray(atom.val) if isinstance(atom, Literal) else known.get(atom)


def _evaluate(eqn: JaxprEqn, known: dict[Var, np.ndarray]) -> None:
    """Add the result of an operation to what is known, if it is a few whole numbers or conditions that depend on nothing else."""
    dtype = _compat.dtype_of(eqn.outvars[0])
    if eqn.primitive.name not in _OF_PLACES or not (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
        return
    shape = _compat.shape_of(eqn.outvars[0])
    values = [_value(a, known) for a in eqn.invars]
    if any(v is None for v in values) or any(not isinstance(n, int) or n > _MOST_NUMBERS for n in shape):
        return
    known[eqn.outvars[0]] = _OF_PLACES[eqn.primitive.name](eqn.params, [v for v in values if v is not None])


def _new_dimensions(params: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the dimensions of a broadcast that its operand has not."""
    return tuple(d for d in range(len(params["shape"])) if d not in params["broadcast_dimensions"])


def _selected(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    """Takes each number from the case that is asked for, by its number or by a condition."""
    stacked = np.stack(np.broadcast_arrays(*cases))
    at = np.broadcast_to(which.astype(int), stacked.shape[1:])
    found: np.ndarray = np.take_along_axis(stacked, at[None], 0)[0]
    return found


def _positions(params: Mapping[str, Any]) -> np.ndarray:
    """Returns the positions along one dimension of a shape."""
    own = [n if d == params["dimension"] else 1 for d, n in enumerate(params["shape"])]
    return np.broadcast_to(np.arange(math.prod(own), dtype=params["dtype"]).reshape(own), params["shape"])


def _diagonal(eqn: JaxprEqn, known: dict[Var, np.ndarray]) -> Run | None:
    """Returns what computes the diagonal of all of some dimensions as a sum; None for gathers of other places."""
    numbers, shape, places = (
        eqn.params["dimension_numbers"],
        _compat.shape_of(eqn.invars[0]),
        _value(eqn.invars[1], known),
    )
    dims = [int(d) for d in numbers.start_index_map]
    if (
        places is None
        or len(dims) < 2
        or numbers.operand_batching_dims
        or sorted(numbers.collapsed_slice_dims) != sorted(dims)
    ):
        return None
    count, dtype = shape[dims[0]], _compat.dtype_of(eqn.invars[0])
    if not np.array_equal(places, np.tile(np.arange(count)[:, None], len(dims))) or any(
        shape[d] != count for d in dims
    ):
        return None
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    offsets = [int(d) for d in numbers.offset_dims]
    (at,) = (d for d in range(len(offsets) + 1) if d not in offsets)

    def run(x: Array, _: Array) -> list[Array]:
        first, *others = (lax.broadcasted_iota(jnp.int32, shape, d) for d in dims)
        here = functools.reduce(operator.and_, [first == other for other in others])
        found = jnp.sum(jnp.where(here, x, jnp.zeros((), dtype)), dims[1:], dtype=dtype)
        return [jnp.moveaxis(found, dims[0] - sum(d < dims[0] for d in dims[1:]), at)]

    return run


def _choice(eqn: JaxprEqn, known: dict[Var, np.ndarray]) -> Run | None:
    """Returns what computes an update by a choice at each position; None where its place is not known, or there are several."""
    name = eqn.primitive.name
    combined = COMBINED.get(name)
    if combined is None or (name == "scatter" and eqn.params["update_jaxpr"] is not None):
        return None  # what comes may also be a function of what stands there
    if (
        jnp.issubdtype(_compat.dtype_of(eqn.invars[0]), jax.dtypes.extended)
        or math.prod(_compat.shape_of(eqn.invars[1])[:-1]) != 1
    ):
        return None
    numbers, shape = eqn.params["dimension_numbers"], _compat.shape_of(eqn.invars[0])
    place = _value(eqn.invars[1], known) if numbers.scatter_dims_to_operand_dims else np.zeros(0, int)
    if place is None:
        return None
    if numbers.operand_batching_dims or not all(isinstance(n, int) for n in shape):
        return None
    changed = _compat.shape_of(eqn.invars[2])
    sizes = iter(changed[d] for d in sorted(numbers.update_window_dims))
    window = [1 if d in numbers.inserted_window_dims else next(sizes) for d in range(len(shape))]
    starts = [0] * len(shape)
    for d, start in zip(numbers.scatter_dims_to_operand_dims, place.reshape(-1), strict=True):
        starts[d] = int(start)
    last = [n - size for n, size in zip(shape, window, strict=True)]
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        starts = [min(max(start, 0), end) for start, end in zip(starts, last, strict=True)]
    if any(not 0 <= start <= end for start, end in zip(starts, last, strict=True)):
        return lambda x, *_: [x]  # an update that is partly outside is none
    return lambda x, _, new: [_chosen(x, new.reshape(window), starts, combined)]


def _chosen(x: Array, new: Array, starts: Sequence[int], combined: Callable[[Array, Array], Array]) -> Array:
    """Chooses between an array and its combination with a window of its rank that begins at `starts`."""
    here: Array = None
    padding = []
    for d, (whole, size, start) in enumerate(zip(x.shape, new.shape, starts, strict=True)):
        behind = whole - size - start
        padding.append((0, 0, 0) if size == 1 else (start, behind, 0))
        if size < whole:
            position = lax.broadcasted_iota(jnp.int32, x.shape, d)
            inside = position == start if size == 1 else (position >= start) & (position < start + size)
            here = inside if here is None else here & inside
    padded = lax.pad(new, jnp.zeros((), new.dtype), padding) if any(p != (0, 0, 0) for p in padding) else new
    found = combined(x, jnp.broadcast_to(padded, x.shape))
    return found if here is None else jnp.where(here, found, x)
