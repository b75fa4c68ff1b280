"""Kernels over sharded arrays: every device runs its piece, and states are merged where the reduced axis is sharded.

A kernel's axes are the factors of its sharding rule: XLA's partitioner propagates them, and asks for one device's program. Axes
that every fold keeps need no communication. The rolled axis needs as little as its states: each device makes that of its piece,
and what is exchanged has no rolled axis. Where the states are large, each device merges a share of the rows, and the results are
gathered. Everything else that a kernel reads is replicated.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, Primitive
from pallasfuse.emission.lookups import stored
from pallasfuse.execution import emit, lower_on, run_phases
from pallasfuse.indirect import with_lookups
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.dtypes import itemsize_bytes
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.jaxpr_frontend import axes_of, convert
from pallasfuse.options import FuseOptions
from pallasfuse.partial import is_part, piece_inputs
from pallasfuse.placement import phase_of_state, place
from pallasfuse.plan import Kernel, Plan
from pallasfuse.targets import XLA_CPU, Target
from pallasfuse.tiling import states

Array = Any
MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class _Shardable:
    """Says which axes of a kernel may be sharded, and along which dimensions its inputs are then pieces."""

    group: Group
    tensors: Mapping[str, Tensor]
    axes: tuple[Axis, ...]
    along: Mapping[str, Mapping[int, Axis]]
    """The dimensions of every input that are read along one such axis, always the same."""

    @classmethod
    def of(cls, group: Group, tensors: Mapping[str, Tensor]) -> "_Shardable":
        kept = [a for a in group.parallel if all(a in n.axes for n in group.outputs)]
        merges = group.passes == 1 and not any(group.rolled in n.axes for n in group.outputs)
        axes = (*kept, group.rolled) if merges else tuple(kept)
        reads = [n for n in postorder(*group.expressions()) if isinstance(n, Read) and n.tensor in group.inputs]
        along: dict[str, dict[int, Axis]] = {name: {} for name in group.inputs}
        for name in group.inputs:
            for d in range(len(tensors[name].axes)):
                over = {n.indices[d] for n in reads if n.tensor == name}
                if len(over) == 1 and over <= set(axes):
                    along[name][d] = over.pop()
        return cls(group, tensors, axes, along)

    def rule(self) -> tuple[str, tuple[str, ...]]:
        """The sharding rule, one factor for each axis, and the factors that must be replicated, in order of appearance."""
        factor = {axis: f"f{n}" for n, axis in enumerate(self.axes)}
        fixed: list[str] = []

        def dims(axes: Sequence[Axis | None]) -> str:
            found = []
            for axis in axes:
                if axis is None:
                    fixed.append(f"r{len(fixed)}")
                found.append(fixed[-1] if axis is None else factor[axis])
            return " ".join(found)

        inputs = [dims([self.along[n].get(d) for d in range(len(self.tensors[n].axes))]) for n in self.group.inputs]
        outputs = [dims([a if a in self.axes else None for a in n.axes]) for n in self.group.outputs]
        return f"{', '.join(inputs)} -> {', '.join(outputs)}", tuple(fixed)

    def specs(self, mesh_axes: Mapping[Axis, MeshAxes]) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """Returns the partition specs of the kernel's inputs and of its outputs."""
        inputs = [PartitionSpec(*(mesh_axes.get(self.along[n][d]) if d in self.along[n] else None
                                  for d in range(len(self.tensors[n].axes)))) for n in self.group.inputs]  # fmt: skip
        outputs = [PartitionSpec(*(mesh_axes.get(a) for a in n.axes)) for n in self.group.outputs]
        return inputs, outputs


@dataclass(frozen=True, eq=False)
class _Program:
    """The program of one device: `run(target, *arrays)`. It is lowered as a fused call is, with another target as a last resort."""

    name: str
    plan: Plan
    run: Callable[..., list[Array]]
    results: list[ShapedArray]
    scopes: Any
    """The names of scopes around the kernel: the partitioner asks for the program outside of them."""

    def __call__(self, *given: Array) -> list[Array]:
        with _compat.in_scopes(self.scopes):
            return list(_program_p.bind(*given, program=self))


_program_p = Primitive("pallasfuse_piece")
_program_p.multiple_results = True
_program_p.def_abstract_eval(lambda *_, program: program.results)


def _lower(context: Any, *nodes: Any, program: _Program) -> Any:
    def run_on(target: Target) -> Callable[..., list[Array]]:
        return functools.partial(program.run, target)

    asked = program.plan.options.target is not None
    no_mesh, own = _compat.without_mesh(context)
    with no_mesh:
        return lower_on(program.plan.target, run_on, own, nodes, name=program.name, asked=asked)


mlir.register_lowering(_program_p, _lower)


def run_sharded(plan: Plan, kernel: Kernel, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """Runs a kernel like `execution.run_kernel`, over all devices of the program that is being lowered."""
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in plan.program.definitions()}
    group = kernel.group
    names = [n.name for n in group.outputs]
    scopes = _compat.current_scopes()

    def program(run: Callable[..., list[Array]], sizes: Mapping[Axis, int]) -> _Program:
        results = [
            ShapedArray([sizes.get(a, a.extent) for a in tensors[n].axes], jnp.dtype(tensors[n].dtype)) for n in names
        ]
        return _Program(kernel.name, plan, run, results, scopes)

    def whole(target: Target, *given: Array) -> list[Array]:
        phases = kernel.phases if target is plan.target else place(group, target, tensors, plan.options)
        found = run_phases(phases, dict(zip(group.inputs, given, strict=True)))
        return [found[n].reshape([a.extent for a in tensors[n].axes]) for n in names]

    shardable = _Shardable.of(group, tensors)
    if not shardable.axes:
        return run_phases(kernel.phases, arrays)
    arrays = {**arrays, **stored([*kernel.lookups.values()], arrays)}  # which rows lie on which device is not known
    kernel = replace(kernel, phases=with_lookups(kernel.phases, ()))

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        mesh_axes = _chosen(shardable, mesh, arguments, results)
        inputs, outputs = shardable.specs(mesh_axes)
        sizes = {a: a.extent // math.prod(mesh.shape[n] for n in found) for a, found in mesh_axes.items()}
        local = functools.partial(_on_device, shardable, plan.options, sizes, mesh_axes)
        return (mesh, program(local if mesh_axes else whole, sizes), [NamedSharding(mesh, s) for s in outputs],
                tuple(NamedSharding(mesh, s) for s in inputs))  # fmt: skip

    call = custom_partitioning(program(whole, {}))
    rule, replicated = shardable.rule()
    call.def_partition(
        partition=partition, sharding_rule=rule, need_replication_factors=replicated, decode_shardings=False
    )
    shaped = [arrays[n].reshape([a.extent for a in tensors[n].axes]) for n in group.inputs]
    return dict(zip(names, call(*shaped), strict=True))


def _chosen(shardable: _Shardable, mesh: Any, arguments: Any, results: Any) -> dict[Axis, MeshAxes]:
    """The mesh axes of every sharded axis, from what the partitioner has found.

    What results are sharded along comes first. An axis whose shards would be unequal is replicated.
    """
    found: dict[Axis, MeshAxes] = {}

    def consider(axis: Axis, shape: Any, d: int) -> None:
        spec = _compat.partition_spec(shape.sharding, mesh)
        names = _names(spec[d] if d < len(spec) else None)
        taken = {n for used in found.values() for n in used}
        size = math.prod(mesh.shape[n] for n in names)
        if axis not in found and names and taken.isdisjoint(names) and axis.extent % size == 0 and size > 1:
            found[axis] = names

    for nest, shape in zip(shardable.group.outputs, results, strict=True):
        for d, axis in enumerate(nest.axes):
            if axis in shardable.axes:
                consider(axis, shape, d)
    for name, shape in zip(shardable.group.inputs, arguments, strict=True):
        for d, axis in shardable.along[name].items():
            consider(axis, shape, d)
    return found


def _names(entry: Any) -> MeshAxes:
    """The mesh axes of one dimension."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def result_specs(jaxpr: Jaxpr, given: Sequence[PartitionSpec], mesh_sizes: Mapping[str, int]) -> list[PartitionSpec]:
    """Returns how results are sharded where arguments are sharded as `given`: along the axes that they share.

    An axis that arguments shard differently is replicated. Of two axes of a result on one mesh axis, the first has it.
    """
    converted = convert(jaxpr)
    tensors = {d.name: d.axes for d in converted.program.definitions()}
    name_of = {v: n for n, v in converted.variable.items()}
    found: dict[Axis, MeshAxes] = {}
    for var, spec in zip(converted.jaxpr.invars, given, strict=True):
        dims = axes_of(_compat.shape_of(var), tensors[name_of[var]]) if var in name_of else ()
        for (_, axes), entry in zip(dims, spec, strict=False):
            names = _names(entry)
            if axes and names:
                divides = axes[0].extent % math.prod(mesh_sizes[n] for n in names) == 0
                agreed = divides and found.get(axes[0], names) == names
                found[axes[0]] = names if agreed else ()
    specs = []
    for result, atom in zip(converted.results, converted.jaxpr.outvars, strict=True):
        entries: list[MeshAxes | None] = []
        taken: set[str] = set()
        known = isinstance(result, str) and result in tensors
        for _, axes in axes_of(_compat.shape_of(atom), tensors[str(result)]) if known else ():
            names = found.get(axes[0], ()) if axes else ()
            entries.append(names if names and taken.isdisjoint(names) else None)
            taken.update(entries[-1] or ())
        specs.append(PartitionSpec(*entries))
    return specs


def _on_device(
    shardable: _Shardable, options: FuseOptions, sizes: Mapping[Axis, int], mesh_axes: Mapping[Axis, MeshAxes],
    target: Target, *given: Array,
) -> list[Array]:  # fmt: skip
    """The program of one device: its piece of every result, from its pieces of the inputs."""
    group = shardable.group
    arrays = dict(zip(group.inputs, given, strict=True))
    starts = {states.start_of(a): lax.axis_index(mesh_axes[a]).astype(jnp.int32) * sizes[a] for a in sizes}
    rows = {a: size for a, size in sizes.items() if a != group.rolled}
    pieces = {n: {d: a for d, a in along.items() if a in rows} for n, along in shardable.along.items()}
    own = states.localize(group, shardable.tensors, rows, pieces)
    outputs = [n.name for n in group.outputs]
    if group.rolled not in sizes:
        phases = place(own.group, target, own.tensors, options)
        left = {t.name for p in phases[:-1] for t in p.program.outputs}
        wanted = {t.name: t for p in phases for t in p.program.given if t.name not in left}
        inputs = piece_inputs([*wanted.values()], own, arrays.__getitem__, starts)
        found = run_phases(phases, inputs)
        return [found[n] for n in outputs]
    streamed = {n: {d: a for d, a in along.items() if a == group.rolled} for n, along in shardable.along.items()}
    here = {name: {d: a for d, a in streamed.get(name, {}).items()} for name in own.group.inputs}
    piece = states.localize(own.group, own.tensors, {group.rolled: sizes[group.rolled]}, here)
    phase = phase_of_state(own.group, piece, target, options)

    def look_up(name: str) -> Array:
        return starts[name] if name in starts else cut(name) if name in own.sliced else arrays[name]

    def cut(name: str) -> Array:
        return piece_inputs([own.tensors[name]], own, arrays.__getitem__, starts)[name]

    state = emit(phase.target, phase.program, piece_inputs(phase.program.inputs, piece, look_up, starts))
    devices, names = group.rolled.extent // sizes[group.rolled], mesh_axes[group.rolled]
    shared = _shared_rows(own.group, phase.program.outputs, frozenset(a.name for a in sizes), devices)
    final, outer = own, arrays.__getitem__
    if shared is not None:
        final, outer = states.localize(own.group, own.tensors, {shared: shared.extent // devices}, {}), look_up
        starts[states.start_of(shared)] = lax.axis_index(names).astype(jnp.int32) * (shared.extent // devices)
    exchanged: dict[str, Array] = {}
    parts = 0
    for tensor in phase.program.outputs:
        at = next(d for d, a in enumerate(tensor.axes) if is_part(a, group.rolled))
        if shared in tensor.axes:
            stacked = lax.all_to_all(state[tensor.name], names, tensor.axes.index(shared), at, tiled=True)
        else:
            stacked = lax.all_gather(state[tensor.name], names, axis=at, tiled=True)
        exchanged[tensor.name], parts = stacked, stacked.shape[at]
    merged, finished = states.merge(final.group, final.tensors, parts), states.finish(final.group, final.tensors)

    def from_states(program: TileProgram, known: Mapping[str, Array]) -> dict[str, Array]:
        others = piece_inputs([t for t in program.inputs if t.name not in known], final, outer, starts)
        inputs = {
            t.name: jnp.reshape(known[t.name], [a.extent for a in t.axes]) for t in program.inputs if t.name in known
        }
        return emit(XLA_CPU, program, others | inputs)

    together = from_states(merged, exchanged)
    found = from_states(finished, {n: together[states.merged_name(n)] for n in state})
    if shared is None:
        return [found[n] for n in outputs]
    return [lax.all_gather(found[n.name], names, axis=n.axes.index(shared), tiled=True) for n in own.group.outputs]


_SMALL_STATES = 1 << 20
"""Bytes that all devices may have of all states: to gather them takes one exchange instead of two."""


def _shared_rows(group: Group, state: Sequence[Tensor], sharded: frozenset[str], devices: int) -> Axis | None:
    """An axis along which every device merges and finishes an equal share, so that it gets that share of the states only, and
    what it gathers are results.

    sharded: the names of axes of which a device has a piece already.
    """
    sizes = {t: volume(t.axes) * itemsize_bytes(t.dtype) for t in state}

    def covered(axis: Axis) -> int:
        return sum(size for t, size in sizes.items() if axis in t.axes)

    able = [
        a for a in group.parallel
        if a.extent % devices == 0 and a.name not in sharded and all(a in n.axes for n in group.outputs)
    ]  # fmt: skip
    best = max(able, key=covered, default=None)
    return best if best is not None and devices * covered(best) > _SMALL_STATES else None
