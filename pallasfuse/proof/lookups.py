"""Compares what a kernel looks up with the gather that it stands for: the same element, wherever the table points.

Both are maps from a place in the result to a place in the table and, with the entry there, to one in the source. They are compared
place by place, so nothing is said about values, which are any.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn, Var
from pallasfuse.decisions import lookups_of
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Const, const
from pallasfuse.ir.lookup import Lookup
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.jaxpr_frontend.lookups import turns
from pallasfuse.proof.result import Counterexample, PlannedKernel, Record

_MOST_PLACES = 1 << 18
"""The most places that are compared: of larger results so many are drawn."""

Integers = np.ndarray[Any, np.dtype[np.int64]]


def lookups(converted: Converted, part: PlannedKernel, seed: int, record: Record) -> None:
    """Compares what the kernel of a part looks up with the equations of the program."""
    random = np.random.default_rng(seed)
    makers = {v: e for e in converted.jaxpr.eqns for v in e.outvars}
    for lookup in lookups_of(part.phases).values():
        stage = f"lookups of {part.group.name}"
        record.stages[stage] = None
        eqn = makers[converted.variable[lookup.result.name]]
        if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is None:  # the elements keep their order
            (operand, *_) = eqn.invars
            eqn = makers[operand] if isinstance(operand, Var) else eqn
        source, table = (converted.variable[t.name] for t in (lookup.source, lookup.table))
        turnings = _turns(eqn.invars[0], source, makers) if eqn.primitive.name == "gather" else None
        if turnings is None or eqn.invars[1] != table:
            record.wrong = record.wrong or Counterexample(stage, lookup.result.name, (), "its own equation", "another")
            continue
        if lookup.fill is not _fill_of(eqn, lookup.result.dtype):
            record.wrong = record.wrong or Counterexample(
                stage, lookup.result.name, (), "what its mode says", str(lookup.fill)
            )
            continue
        volume = math.prod(_compat.shape_of(eqn.outvars[0]))
        places = np.arange(volume) if volume <= _MOST_PLACES else random.integers(0, volume, _MOST_PLACES)
        if math.prod(a.extent for a in lookup.result.axes) != volume:
            record.wrong = record.wrong or Counterexample(stage, lookup.result.name, (), str(volume), "another size")
            continue
        entries = random.integers(-2, lookup.count + 2, places.shape)
        expected, found = _of_gather(eqn, turnings, places, entries), _of_lookup(lookup, places, entries)
        for of, a, b in zip(("table", "source"), expected, found, strict=True):
            wrong = np.flatnonzero(a != b)
            if wrong.size and record.wrong is None:
                n = int(wrong[0])
                record.wrong = Counterexample(
                    stage, lookup.result.name, (int(places[n]),), f"element {a[n]} of the {of}", f"element {b[n]}"
                )


def over_stored(part: PlannedKernel) -> PlannedKernel:
    """The same part without lookups: its inputs are any arrays, also those that a gather would have stored."""
    phases = tuple(replace(p, program=replace(p.program, lookups=())) for p in part.phases)
    return replace(part, phases=phases) if lookups_of(part.phases) else part


def _fill_of(eqn: JaxprEqn, dtype: str) -> Const | None:
    """Returns the number that stands for an index out of range; None where that is the nearest row."""
    if not str(eqn.params["mode"]).endswith("FILL_OR_DROP"):
        return None
    fill = eqn.params["fill_value"]
    value = np.nan if fill is None else np.asarray(fill).astype(_compat.dtype_of(eqn.outvars[0]))
    return const(float(value), dtype)


def _turns(array: Any, source: Var, makers: Mapping[Var, JaxprEqn]) -> list[JaxprEqn] | None:
    """Returns the equations that make an array from another, the last one first, where they only give its elements another order.

    None where they compute anything, or where it is made of something else.
    """
    found: list[JaxprEqn] = []
    while array != source:
        eqn = makers.get(array) if isinstance(array, Var) else None
        if eqn is None or not turns(eqn):
            return None
        found.append(eqn)
        array = eqn.invars[0]
    return found


def _of_gather(
    eqn: JaxprEqn, turnings: Sequence[JaxprEqn], places: Integers, entries: Integers
) -> tuple[Integers, Integers]:
    """Finds the places in the indices and in the source that a gather by one index takes the elements of its result from.

    turnings: as of `_turns`, from the source to the array of the gather.
    """
    numbers, sizes = eqn.params["dimension_numbers"], [int(n) for n in eqn.params["slice_sizes"]]
    array, indices, out = (_compat.shape_of(v) for v in (*eqn.invars, *eqn.outvars))
    at = np.unravel_index(places, out)
    offsets = [int(d) for d in numbers.offset_dims]
    rows = [d for d in range(len(out)) if d not in offsets]
    batching = [int(d) for d in numbers.operand_batching_dims]
    (by_index,) = (int(d) for d in numbers.start_index_map)
    inside = [d for d in range(len(array)) if d not in batching and d not in numbers.collapsed_slice_dims]
    where = [np.zeros_like(places) for _ in array]
    for dim, offset in zip(inside, offsets, strict=True):
        where[dim] = where[dim] + at[offset]
    for dim, of in zip(batching, numbers.start_indices_batching_dims, strict=True):
        where[dim] = where[dim] + at[rows[int(of)]]
    where[by_index] = where[by_index] + np.clip(entries, 0, array[by_index] - sizes[by_index])
    in_table = _flat([*(at[d] for d in rows), np.zeros_like(places)], indices)
    in_source = _flat(where, array)
    for turn in turnings:
        if turn.primitive.name == "transpose":
            made, read = (_compat.shape_of(v) for v in (*turn.outvars, *turn.invars))
            here = dict(zip(turn.params["permutation"], np.unravel_index(in_source, made), strict=True))
            in_source = _flat([here[d] for d in range(len(read))], read)
    return in_table, in_source


def _of_lookup(lookup: Lookup, places: Integers, entries: Integers) -> tuple[Integers, Integers]:
    """Finds the places in the table and in the source that a lookup takes the elements of its result from."""
    over = lookup.result.axes
    at: dict[Axis, Integers] = dict(
        zip(over, np.unravel_index(places, tuple(a.extent for a in over)), strict=True)
    )  # fmt: skip
    row = np.clip(entries, 0, lookup.count - 1) * lookup.block
    if lookup.along is not None and lookup.blocks is not None:
        at[lookup.blocks] = at[lookup.along] // lookup.block
        row = row + at[lookup.along] % lookup.block
    at[lookup.rows] = row
    in_table, in_source = (_over(t.axes, at) for t in (lookup.table, lookup.source))
    return in_table + np.zeros_like(places), in_source + np.zeros_like(places)


def _over(axes: Sequence[Axis], at: Mapping[Axis, Integers]) -> Integers:
    return _flat([at[a] for a in axes], [a.extent for a in axes])


def _flat(at: Sequence[Integers], shape: Sequence[int]) -> Integers:
    """Returns the place in row-major order."""
    place = np.zeros((), np.int64)
    for here, length in zip(at, shape, strict=True):
        place = place * length + here
    return place
