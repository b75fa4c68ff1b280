"""Loops that change a part of each of their slices, as loops that change that part of the whole array.

A scan over layers whose caches get one more row takes each layer's cache out of an array, changes the row, and puts the cache into
an array of results: XLA moves every cache two or three times. A loop that carries the array writes the row alone.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse.decompositions.writing import Atom, Run, Writer, one_dimension_more
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.jaxpr_frontend.lookups import element_by_number
from pallasfuse.primitive_names import UPDATES

type Array = Any


@dataclass(frozen=True, slots=True)
class _Updated:
    """A slice that the body of a loop only updates: its number among the slices, that of the result, and the updates in order."""

    slice: int
    result: int
    updates: tuple[JaxprEqn, ...]


def updated_in_place(eqn: JaxprEqn, may: Callable[[JaxprEqn], bool] = lambda _: True) -> Run | None:
    """Returns what computes a scan that carries the arrays of which it updates slices; None where it has no such slices.

    Every element is computed as it was. may: says whether an update may be written in another way.
    """
    counts, length = _compat.scan_counts(eqn), eqn.params["length"]
    if counts is None or not isinstance(length, int) or length < 2:
        return None
    constants, carried = counts
    body = flatten(eqn.params["jaxpr"])
    found = [one for one in _updated_slices(body, constants + carried, carried) if all(map(may, one.updates))]
    if not found:
        return None
    taken, given = {one.slice for one in found}, {one.result for one in found}
    inside, backwards = _with_whole_arrays(body, eqn, found, constants + carried), eqn.params["reverse"]

    def run(*operands: Array) -> list[Array]:
        fixed, init, xs = _compat.scan_parts(operands, counts)

        def trip(state: Any, rows: Any) -> Any:
            at, states, arrays = state
            left = iter(rows)
            slices = [None if n in taken else next(left) for n in range(len(xs))]
            results = _compat.eval_jaxpr(inside, inside.consts, at, *arrays, *fixed, *states, *slices)
            arrays, results = results[: len(found)], results[len(found) :]
            stacked = [r for n, r in enumerate(results[carried:]) if n not in given]
            return (at - 1 if backwards else at + 1, results[:carried], arrays), stacked

        begin = jnp.int32(length - 1 if backwards else 0), list(init), [xs[one.slice] for one in found]
        rows = [x for n, x in enumerate(xs) if n not in taken]
        how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        (_, last, arrays), stacked = lax.scan(trip, begin, rows, **how)
        whole = {one.result: array for one, array in zip(found, arrays, strict=True)}
        others = iter(stacked)
        return [*last, *(whole[n] if n in whole else next(others) for n in range(len(whole) + len(stacked)))]

    return run


def _updated_slices(body: Jaxpr, before: int, carried: int) -> list[_Updated]:
    """Finds the slices of a flat body that nothing reads but updates, of which the last makes a stacked result.

    before: the number of arguments before the slices; carried: the number of results before the stacked ones.
    """
    uses = Counter(a for a in (*body.outvars, *(x for e in body.eqns for x in e.invars)) if isinstance(a, Var))
    makers = {v: e for e in body.eqns for v in e.outvars}
    slices = {v: n for n, v in enumerate(body.invars[before:])}
    found: dict[int, _Updated] = {}
    for number, result in enumerate(body.outvars[carried:]):
        updates, value = list[JaxprEqn](), result
        while isinstance(value, Var) and (maker := makers.get(value)) is not None and maker.primitive.name in UPDATES:
            updates.insert(0, maker)
            value = maker.invars[0]
            if not isinstance(value, Var) or uses[value] != 1:
                break
        at = slices.get(value) if isinstance(value, Var) and uses[value] == 1 else None
        if updates and at is not None:
            found[at] = _Updated(at, number, tuple(updates))
    return list(found.values())


def _with_whole_arrays(body: Jaxpr, eqn: JaxprEqn, found: list[_Updated], before: int) -> Jaxpr:
    """Returns a flat body that updates whole arrays: the number of the trip and these are its first arguments, these its first
    results. before: as of `_updated_slices`."""
    structs = [_compat.struct_of(eqn.invars[before + one.slice]) for one in found]
    number, *arrays = jax.make_jaxpr(lambda *values: values)(jax.ShapeDtypeStruct((), jnp.int32), *structs).invars
    steps = {id(update): one for one in found for update in one.updates}
    writer = Writer(body)
    newest: dict[int, Atom] = {one.slice: array for one, array in zip(found, arrays, strict=True)}
    for inner in body.eqns:
        if id(inner) not in steps:
            writer.keep(inner)
            continue
        one = steps[id(inner)]
        atoms = [number, newest[one.slice], *map(writer.atom, inner.invars[1:])]
        (whole,) = writer.emit(inner, _update(inner), atoms)
        newest[one.slice] = whole
        if inner is one.updates[-1]:  # nothing reads what others make
            (updated,) = writer.emit(inner, lambda at, array: [element_by_number(array, at)], [number, whole])
            writer.name(inner.outvars[0], updated)
    made = writer.written()
    results = [*newest.values(), *made.outvars]
    made = _compat.replace_jaxpr(made, made.constvars, made.consts, made.eqns, results)
    return flatten(_compat.with_arguments(made, [number, *arrays]))


def _update(eqn: JaxprEqn) -> Run:
    """Returns what updates one slice of an array as an equation updates that slice alone: from its number, the array, and the other
    operands of the equation."""

    def run(number: Array, array: Array, *others: Array) -> list[Array]:
        if eqn.primitive.name == "dynamic_update_slice":
            part, *starts = others
            starts = [_not_short(s) for s in starts]
            at = number.astype(starts[0].dtype) if starts else number
            (made,) = _compat.bind(eqn, [array, part[None], at, *starts])
        else:
            places, updates = others
            numbers = one_dimension_more(eqn.params["dimension_numbers"])
            places = _not_short(places)
            at = jnp.broadcast_to(number.astype(places.dtype), (*places.shape[:-1], 1))
            whole = _compat.with_params(eqn, {**eqn.params, "dimension_numbers": numbers})
            (made,) = _compat.bind(whole, [array, jnp.concatenate([at, places], axis=-1), updates])
        return [made]

    return run


def _not_short(places: Array) -> Array:
    """Returns places in a type that holds the numbers of all trips."""
    return places if places.dtype.itemsize >= 4 else places.astype(jnp.int32)
