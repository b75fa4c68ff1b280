"""Finds the ranges of integer inputs from what a program does with them: indices of an axis, lengths along one, positions.

A program that is timed on drawn numbers should do what it does for a user: read rows all over a table, mask some of the keys.
Numbers that are too large would read the last row again and again, and mask nothing.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.parts import inside

type Bound = int | tuple[int, ...]
"""The number that all integers of an array stay below, or one such number for each column of its last axis."""

_KEEP = frozenset({
    "add", "sub", "max", "min", "clamp", "select_n", "concatenate", "pad", "broadcast_in_dim", "reshape", "squeeze",
    "expand_dims", "transpose", "convert_element_type", "slice", "dynamic_slice", "rev", "copy", "gather", "sort",
    "optimization_barrier", "reduce_max", "reduce_min",
})  # fmt: skip
"""Operations whose results are about as large as what they are given."""
_MOVE_COLUMNS = frozenset({"gather", "pad", "rev", "sort", "transpose"})
"""Those of them that may bring columns elsewhere, though the shape is the same."""
_SAME_SHAPE = frozenset({"convert_element_type", "copy", "optimization_barrier"})
_COMPARE = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


@dataclass(frozen=True, slots=True)
class _Known:
    """Says which inputs an integer comes from, by their numbers, and of how many positions it may be one.

    `columns`: what stands in each column of the last axis, where single ones were put together. `whole`: the input that has the
    same columns, where there is one.
    """

    sources: frozenset[int] = frozenset()
    positions: float = math.inf
    columns: "tuple[_Known, ...]" = ()
    whole: int | None = None


_NOTHING = _Known()


@dataclass(slots=True)
class _Ranges:
    """Collects what integers of inputs stay below, by their numbers: where they are indices, and where they are compared."""

    indices: dict[int, Bound] = field(default_factory=dict)
    compared: dict[int, Bound] = field(default_factory=dict)

    def learn(self, found: dict[int, Bound], of: _Known, extent: float | tuple[int, ...]) -> None:
        """Every input that a value comes from is below an extent, or the columns of the only one are below several."""
        if isinstance(extent, tuple):
            if of.whole is not None and min(extent) > 0:
                found[of.whole] = _least(extent, found.get(of.whole, extent))
            return
        for source in of.sources if 0 < extent < math.inf else ():
            found[source] = _least(int(extent), found.get(source, int(extent)))

    def walk(self, equations: Iterable[JaxprEqn], known: dict[Var, _Known]) -> None:
        for eqn in equations:
            given = [_NOTHING if isinstance(a, Literal) else known.get(a, _NOTHING) for a in eqn.invars]
            found_here = self.compared if eqn.primitive.name in _COMPARE else self.indices
            for of, extent in _uses(eqn, given):
                self.learn(found_here, of, extent)
            for inner in _bodies(eqn):
                own = given[len(given) - len(inner.invars) :]
                within = dict(zip(inner.invars, own, strict=True))
                self.walk(inner.eqns, within)
                same = len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars)
                if same and eqn.primitive.name != "scan":  # a call, which gives what its body does
                    results = [_NOTHING if isinstance(a, Literal) else within.get(a, _NOTHING) for a in inner.outvars]
                    known.update((v, found) for v, found in zip(eqn.outvars, results, strict=True) if _is_integer(v))
            known.update((v, found) for v in eqn.outvars if (found := _result(eqn, given, v)) != _NOTHING)


def _least(one: Bound, other: Bound) -> Bound:
    """Returns what integers stay below that stay below both."""
    if isinstance(one, int) and isinstance(other, int):
        return min(one, other)
    columns = max(len(b) for b in (one, other) if isinstance(b, tuple))
    left, right = (b if isinstance(b, tuple) else (b,) * columns for b in (one, other))
    return tuple(map(min, left, right))


def index_ranges(equations: Iterable[JaxprEqn], inputs: Sequence[Var]) -> list[Bound | None]:
    """Returns for each input what its integers should stay below to mean something; None where nothing says so.

    An integer that is an index of an axis is below its extent, whatever else it is compared with.
    """
    found = _Ranges()
    integers = {v: _Known(frozenset({n}), whole=n) for n, v in enumerate(inputs) if _is_integer(v)}
    found.walk(equations, integers)
    below = found.compared | found.indices
    return [below.get(n) for n in range(len(inputs))]


def _uses(eqn: JaxprEqn, given: Sequence[_Known]) -> Iterator[tuple[_Known, float | tuple[int, ...]]]:
    """Yields what an equation takes for an index, a length or a position, with the extent that this is of."""
    name = eqn.primitive.name
    if name in _COMPARE:
        left, right = given
        yield left, right.positions
        yield right, left.positions
    elif name == "gather":
        shape, sizes = _compat.shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
        dims = eqn.params["dimension_numbers"].start_index_map
        yield from _of_columns(given[1], [shape[d] - sizes[d] + 1 for d in dims])
    elif name.startswith("scatter"):
        shape, dims = _compat.shape_of(eqn.invars[0]), eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        yield from _of_columns(given[1], [shape[d] for d in dims])
    elif name == "ragged_dot_general":  # about as many rows as there are, in all groups together
        (rows, *_), (groups,) = _compat.shape_of(eqn.invars[0]), _compat.shape_of(eqn.invars[2])[-1:]
        yield given[2], 2 * rows // max(1, groups) + 1
    elif name in ("dynamic_slice", "dynamic_update_slice"):
        first = 1 if name == "dynamic_slice" else 2
        sizes = eqn.params["slice_sizes"] if first == 1 else _compat.shape_of(eqn.invars[1])
        for of, extent, size in zip(given[first:], _compat.shape_of(eqn.invars[0]), sizes, strict=True):
            yield of, extent - size + 1


def _of_columns(indices: _Known, extents: Sequence[int]) -> Iterator[tuple[_Known, float | tuple[int, ...]]]:
    """Yields the columns of an array of indices, each with the extent that it is an index of."""
    if len(indices.columns) == len(extents):
        yield from zip(indices.columns, extents, strict=True)
    elif indices.whole is not None and len(set(extents)) > 1:
        yield indices, tuple(extents)
    else:  # nobody knows which one is whose
        yield indices, max(extents, default=math.inf)


def _result(eqn: JaxprEqn, given: Sequence[_Known], result: Var) -> _Known:
    """Says where the integers of a result come from."""
    name = eqn.primitive.name
    if name == "iota":
        return _Known(positions=eqn.params["shape"][eqn.params["dimension"]])
    if name not in _KEEP or not _is_integer(result):
        return _NOTHING
    own = given[:1] if name in ("gather", "dynamic_slice") else given
    columns: tuple[_Known, ...] = ()
    if name == "concatenate" and eqn.params["dimension"] == len(_compat.shape_of(result)) - 1:
        columns = tuple(given) if all(_compat.shape_of(a)[-1] == 1 for a in eqn.invars) else ()
    elif name in _SAME_SHAPE and len(given) == 1:
        columns = given[0].columns
    sources = frozenset[int]().union(*(k.sources for k in own))
    shapes = {_compat.shape_of(a) for a, k in zip(eqn.invars, given, strict=True) if k.sources}
    wholes = {k.whole for k in own if k.sources}
    is_whole = name not in _MOVE_COLUMNS and shapes == {_compat.shape_of(result)} and len(wholes) == 1
    return _Known(
        sources, min((k.positions for k in own), default=math.inf), columns, next(iter(wholes)) if is_whole else None
    )


def _bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs of an equation that are given its last operands one by one, as loops, branches and calls have them."""
    if eqn.primitive.name != "while":  # whose two take different operands
        yield from (inner for inner in inside(eqn) if len(inner.invars) <= len(eqn.invars))


def _is_integer(of: Var) -> bool:
    return hasattr(of.aval, "dtype") and bool(jnp.issubdtype(of.aval.dtype, jnp.integer))
