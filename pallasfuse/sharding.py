"""Kernels over sharded arrays: every device runs its piece, and states are merged where the reduced axis is sharded.

A kernel's axes are the factors of its sharding rule: XLA's partitioner propagates them, and asks for one device's program. Axes
that every fold keeps need no communication. The rolled axis needs as little as its states: each device makes that of its piece,
and what is gathered has no rolled axis. Everything else that a kernel reads is replicated.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from pallasfuse import _compat
from pallasfuse.execution import emit, run_phases
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import Tensor
from pallasfuse.partial import is_part, piece_inputs
from pallasfuse.pipeline import Kernel, Plan, phase_of_state, place
from pallasfuse.targets import XLA_CPU, Target
from pallasfuse.tiling import states

Array = Any
MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class _Shardable:
    """Which axes of a kernel may be sharded, and along which dimensions its inputs are then pieces."""

    group: Group
    tensors: Mapping[str, Tensor]
    axes: tuple[Axis, ...]
    along: Mapping[str, Mapping[int, Axis]]
    """Of every input: the dimensions that it is read along with one such axis, always the same."""

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
        """Of inputs and outputs."""
        inputs = [PartitionSpec(*(mesh_axes.get(self.along[n][d]) if d in self.along[n] else None
                                  for d in range(len(self.tensors[n].axes)))) for n in self.group.inputs]  # fmt: skip
        outputs = [PartitionSpec(*(mesh_axes.get(a) for a in n.axes)) for n in self.group.outputs]
        return inputs, outputs


def run_sharded(plan: Plan, kernel: Kernel, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """As `pipeline.run_kernel`, over all devices of the program that is being lowered."""
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in plan.program.definitions()}
    group = kernel.group
    names = [n.name for n in group.outputs]

    def whole(*given: Array) -> list[Array]:
        found = run_phases(kernel.phases, dict(zip(group.inputs, given, strict=True)))
        return [found[n].reshape([a.extent for a in tensors[n].axes]) for n in names]

    shardable = _Shardable.of(group, tensors)
    if not shardable.axes:
        return run_phases(kernel.phases, arrays)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        mesh_axes = _chosen(shardable, mesh, arguments, results)
        inputs, outputs = shardable.specs(mesh_axes)
        local = functools.partial(_on_device, shardable, plan.target, mesh, mesh_axes)
        return (mesh, whole if not mesh_axes else local, [NamedSharding(mesh, s) for s in outputs],
                tuple(NamedSharding(mesh, s) for s in inputs))  # fmt: skip

    call = custom_partitioning(whole)
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
        entry = spec[d] if d < len(spec) else None
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
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


def _on_device(
    shardable: _Shardable, target: Target, mesh: Any, mesh_axes: Mapping[Axis, MeshAxes], *given: Array
) -> list[Array]:
    """The program of one device: its piece of every result, from its pieces of the inputs."""
    group = shardable.group
    arrays = dict(zip(group.inputs, given, strict=True))
    sizes = {a: a.extent // math.prod(mesh.shape[n] for n in names) for a, names in mesh_axes.items()}
    starts = {states.start_of(a): lax.axis_index(mesh_axes[a]).astype(jnp.int32) * sizes[a] for a in sizes}
    rows = {a: size for a, size in sizes.items() if a != group.rolled}
    pieces = {n: {d: a for d, a in along.items() if a in rows} for n, along in shardable.along.items()}
    own = states.localize(group, shardable.tensors, rows, pieces)
    outputs = [n.name for n in group.outputs]
    if group.rolled not in sizes:
        phases = place(own.group, target, own.tensors)
        left = {t.name for p in phases[:-1] for t in p.program.outputs}
        wanted = {t.name: t for p in phases for t in p.program.inputs if t.name not in left}
        inputs = piece_inputs([*wanted.values()], own, arrays.__getitem__, starts)
        found = run_phases(phases, inputs)
        return [found[n] for n in outputs]
    streamed = {n: {d: a for d, a in along.items() if a == group.rolled} for n, along in shardable.along.items()}
    here = {name: {d: a for d, a in streamed.get(name, {}).items()} for name in own.group.inputs}
    piece = states.localize(own.group, own.tensors, {group.rolled: sizes[group.rolled]}, here)
    phase = phase_of_state(own.group, piece, target)

    def look_up(name: str) -> Array:
        return starts[name] if name in starts else cut(name) if name in own.sliced else arrays[name]

    def cut(name: str) -> Array:
        return piece_inputs([own.tensors[name]], own, arrays.__getitem__, starts)[name]

    state = emit(phase.target, phase.program, piece_inputs(phase.program.inputs, piece, look_up, starts))
    stacked: dict[str, Array] = {}
    parts = 0
    for tensor in phase.program.outputs:
        at = next(d for d, a in enumerate(tensor.axes) if is_part(a, group.rolled))
        stacked[tensor.name] = lax.all_gather(state[tensor.name], mesh_axes[group.rolled], axis=at, tiled=True)
        parts = stacked[tensor.name].shape[at]
    merged, finished = states.merge(own.group, own.tensors, parts), states.finish(own.group, own.tensors)

    def from_states(program: Any, known: Mapping[str, Array]) -> dict[str, Array]:
        inputs = {t.name: known[t.name] if t.name in known else look_up(t.name) for t in program.inputs}
        return emit(
            XLA_CPU, program, {t.name: inputs[t.name].reshape([a.extent for a in t.axes]) for t in program.inputs}
        )

    together = from_states(merged, stacked)
    found = from_states(finished, {n: together[states.merged_name(n)] for n in state})
    return [found[n] for n in outputs]
