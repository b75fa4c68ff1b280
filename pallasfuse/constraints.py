"""Constraints on the sharding of values that a kernel computes.

A constraint never changes a value, and inside a kernel there is no array to shard: the loop program has an identity instead. So
that the partitioner still hears of it, what a constraint says of a dimension is asked of the operands along the same axis, and a
result that has a constraint of its own keeps it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn, Var
from pallasfuse.ir.axes import Axis
from pallasfuse.jaxpr_frontend import Converted, axes_of
from pallasfuse.plan import Kernel

Array = Any
_FREE = PartitionSpec.UNCONSTRAINED


def constrained_operands(converted: Converted, kernel: Kernel, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The kernel's operands by name, sharded along each axis as the constraints inside the kernel say, where these agree."""
    found = dict(arrays)
    inside = [e for e in _inside(converted, kernel) if isinstance(e.params["sharding"], NamedSharding)]
    if not inside:
        return found
    axes = {d.name: d.axes for d in converted.program.definitions()}
    mesh = inside[0].params["sharding"].mesh
    wanted = _by_axis(converted, [e for e in inside if e.params["sharding"].mesh == mesh], axes)
    for name, array in arrays.items():
        entries: list[Any] = []
        for size, (_, over) in zip(array.shape, axes_of(array.shape, axes[name]), strict=True):
            entry = wanted.get(over[0], _FREE) if over else _FREE
            names = _names(entry)
            taken = {n for e in entries for n in _names(e)}
            fits = taken.isdisjoint(names) and size % math.prod(mesh.shape[n] for n in names) == 0
            entries.append(entry if fits else _FREE)
        if any(e is not _FREE for e in entries):
            found[name] = _compat.constrained(inside[0], array, PartitionSpec(*entries))
    return found


def constrained_result(converted: Converted, name: str, array: Array) -> Array:
    """A kernel's result, with the constraint that the program has on it, if any."""
    var = converted.variable[name]
    eqn = next((e for e in _constraints(converted) if var in e.outvars), None)
    return array if eqn is None else _compat.bind(eqn, [array])[0]


def _constraints(converted: Converted) -> Iterator[JaxprEqn]:
    """The equations that constrain how a value is spread over several devices."""
    for eqn in converted.jaxpr.eqns:
        if _compat.is_sharding_constraint(eqn) and eqn.params["sharding"].num_devices > 1:
            yield eqn


def _inside(converted: Converted, kernel: Kernel) -> list[JaxprEqn]:
    """The constraints between the operands of a kernel and its results, in the program's order."""
    constraints = list(_constraints(converted))
    if not constraints:
        return []
    maker = {v: e for e in converted.jaxpr.eqns for v in e.outvars}
    given = {converted.variable[n] for n in kernel.reads}
    seen = set[Var]()
    stack = [converted.variable[n] for n in kernel.stores]
    while stack:
        var = stack.pop()
        if var not in seen and var not in given and var in maker:
            seen.add(var)
            stack.extend(a for a in maker[var].invars if isinstance(a, Var))
    return [e for e in constraints if not seen.isdisjoint(e.outvars)]


def _by_axis(
    converted: Converted, constraints: list[JaxprEqn], axes: Mapping[str, tuple[Axis, ...]]
) -> dict[Axis, Any]:
    """What constraints say of every axis, as an entry of a partition spec. Where they disagree, the partitioner decides."""
    name_of = {v: n for n, v in converted.variable.items()}
    found: dict[Axis, Any] = {}
    for eqn in constraints:
        (var,) = eqn.outvars
        spec = tuple(eqn.params["sharding"].spec)
        entries = (*spec, *(None for _ in range(len(_compat.shape_of(var)) - len(spec))))
        for entry, (_, over) in zip(entries, axes_of(_compat.shape_of(var), axes[name_of[var]]), strict=True):
            if over and entry is not _FREE:
                found[over[0]] = entry if _names(found.get(over[0], entry)) == _names(entry) else _FREE
    return found


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a partition spec."""
    return (entry,) if isinstance(entry, str) else () if entry is _FREE else tuple(entry or ())
