"""Parts of a plan along one streamed axis: what makes the state of a chunk, merges states and finishes one, on arrays.

`derive` decides whether a traced function can be run so: one kernel in one pass reads what is streamed, and nothing else does.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Var
from pallasfuse._compat import Literal as JaxprLiteral
from pallasfuse.errors import FusionError
from pallasfuse.execution import emit, run_step
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.jaxpr_frontend import BATCHED_AS_BODY, Converted, axes_of, convert
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import plan_converted
from pallasfuse.plan import Kernel, Plan, Step
from pallasfuse.targets import XLA_CPU, Target
from pallasfuse.tiling import states
from pallasfuse.tiling.choose import choose

Array = Any
Values = Mapping[str, Array]
"""The arrays of a state by name."""

"""A device on which one kernel less is worth any arithmetic: where the cost model would leave a part to XLA, it is asked again."""


@dataclass(frozen=True, eq=False)
class Partial:
    """A plan whose kernel is run chunk by chunk of its rolled axis. Compared by identity; keeps its tile programs.

    `streamed` is, for every input of the jaxpr, the dimension that lies along the axis, or None.
    """

    plan: Plan
    kernel: Kernel
    streamed: tuple[int | None, ...]
    programs: dict[Any, Any] = field(default_factory=dict)
    lock: Any = field(default_factory=Lock)

    @property
    def axis(self) -> Axis:
        """The whole streamed axis."""
        return self.kernel.group.rolled

    # --- tile programs

    def _made[T](self, key: Any, make: Callable[[], T]) -> T:
        with self.lock:
            if key not in self.programs:
                self.programs[key] = make()
            made: T = self.programs[key]
            return made

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return self._made("tensors", self._all_tensors)

    def _all_tensors(self) -> dict[str, Tensor]:
        return {d.name: Tensor(d.name, d.axes, d.dtype) for d in self.plan.program.definitions()}

    def _given(self) -> dict[str, dict[int, Axis]]:
        """Finds the dimension of every streamed tensor that lies along the axis."""
        found: dict[str, dict[int, Axis]] = {}
        for var, d in zip(self.plan.converted.jaxpr.invars, self.streamed, strict=True):
            name = next((n for n, v in self.plan.converted.variable.items() if v is var), "")
            if d is not None and name in self.kernel.group.inputs:
                found[name] = {axes_of(_compat.shape_of(var), self._tensors[name].axes)[d][0]: self.axis}
        return found

    def _local(self, size: int, target: Target, *, inside: bool) -> tuple[states.Piece, TileProgram]:
        def make() -> tuple[states.Piece, TileProgram]:
            group = self.kernel.group
            piece = states.localize(group, tensors, {self.axis: size}, given)
            return piece, states.local(group, piece, choose(piece.group, target)[0], target, inside=inside)

        tensors, given = self._tensors, self._given()
        return self._made(("local", size, target.name, inside), make)

    def _merge(self, parts: int) -> TileProgram:
        tensors = self._tensors
        return self._made(("merge", parts), lambda: states.merge(self.kernel.group, tensors, parts))

    def _finish(self) -> TileProgram:
        tensors = self._tensors
        return self._made("finish", lambda: states.finish(self.kernel.group, tensors))

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors of a state by name."""
        program = self._local(1, XLA_CPU, inside=False)[1]
        return {t.name: replace(t, axes=tuple(a for a in t.axes if not is_part(a, self.axis))) for t in program.outputs}

    # --- on arrays

    def identity(self) -> dict[str, Array]:
        """The state of no positions."""
        tensors = self.state
        found = states.identities(self.kernel.group, tensors)
        return {n: jnp.full([a.extent for a in t.axes], found[n], jnp.dtype(t.dtype)) for n, t in tensors.items()}

    def local(
        self, arguments: Sequence[Array], size: int, start: Array | int, target: Target = XLA_CPU
    ) -> dict[str, Array]:
        """The state of `size` positions from `start`. arguments: the jaxpr's inputs; of streamed ones the chunk."""
        inside = isinstance(start, int) and 0 <= start <= self.axis.extent - size
        piece, program = self._local(size, target, inside=inside)
        known = self._environment(arguments)
        arrays = piece_inputs(program.inputs, piece, known.tensor, {states.start_of(self.axis): start})
        found = self._emit(target, program, arrays)
        return {n: found[n].reshape([a.extent for a in t.axes]) for n, t in self.state.items()}

    def merge(self, stacked: Values, parts: int, arguments: Sequence[Array | None]) -> dict[str, Array]:
        """One state from `parts`, stacked along a leading dimension. arguments: None where a value is not at hand."""
        arrays = {}
        program = self._merge(parts)
        known = self._environment(arguments)
        for tensor in program.inputs:
            if tensor.name in stacked:
                at = next(d for d, a in enumerate(tensor.axes) if is_part(a, self.axis))
                arrays[tensor.name] = jnp.moveaxis(stacked[tensor.name], 0, at)
            else:
                arrays[tensor.name] = known.tensor(tensor.name).reshape([a.extent for a in tensor.axes])
        found = self._emit(XLA_CPU, program, arrays)
        return {n: found[states.merged_name(n)] for n in self.state}

    def finish(self, state: Values, arguments: Sequence[Array | None]) -> list[Array]:
        """The function's results, flat."""
        known = self._environment(arguments)
        program = self._finish()
        arrays = {}
        for tensor in program.inputs:
            array = state[tensor.name] if tensor.name in state else known.tensor(tensor.name)
            arrays[tensor.name] = jnp.reshape(array, [a.extent for a in tensor.axes])
        found = self._emit(XLA_CPU, program, arrays)
        for nest in self.kernel.group.outputs:
            var = self.plan.converted.variable[nest.name]
            known.values[var] = found[nest.name].reshape(_compat.shape_of(var))
        return [jnp.asarray(known.atom(v), _compat.dtype_of(v)) for v in self.plan.converted.jaxpr.outvars]

    def _emit(self, target: Target, program: TileProgram, arrays: Values) -> dict[str, Array]:
        run = self._made(("run", id(program)), lambda: jax.jit(functools.partial(emit, target, program)))
        found: dict[str, Array] = run(arrays)
        return found

    def _environment(self, arguments: Sequence[Array | None]) -> "_Environment":
        return _Environment(self.plan, self.kernel, arguments)


def piece_inputs(
    wanted: Sequence[Tensor], piece: states.Piece, look_up: Callable[[str], Array], starts: Mapping[str, Array | int]
) -> dict[str, Array]:
    """Inputs of a program over a piece. look_up: arrays of the group's inputs. starts: where the pieces begin, by input."""
    arrays: dict[str, Array] = {}
    for tensor in wanted:
        name = tensor.name
        if name in starts:
            array = jnp.asarray(starts[name], jnp.int32)
        elif name in piece.sliced:
            whole, cuts = piece.sliced[name]
            dims = dict(cuts)
            array = look_up(whole)
            array = array.reshape([dims[d].extent if d in dims else a.extent for d, a in enumerate(tensor.axes)])
            for d, axis in cuts:
                at = jnp.asarray(starts[states.start_of(axis)], jnp.int32)
                positions = at + jnp.arange(tensor.axes[d].extent, dtype=jnp.int32)
                array = jnp.take(array, positions, axis=d, mode="clip")
        else:
            array = look_up(name)
        arrays[name] = jnp.reshape(array, [a.extent for a in tensor.axes])
    return arrays


class MissingArgument(Exception):
    """An argument whose value is needed was not given; `number` counts the jaxpr's inputs."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Environment:
    """The jaxpr's variables, computed when they are asked for: steps that nothing needs do not run."""

    def __init__(self, plan: Plan, kernel: Kernel, arguments: Sequence[Array | None]) -> None:
        self.plan = plan
        jaxpr = plan.converted.jaxpr
        self.missing = {v: n for n, (v, a) in enumerate(zip(jaxpr.invars, arguments, strict=True)) if a is None}
        self.values: dict[Var, Array] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        self.values |= {v: a for v, a in zip(jaxpr.invars, arguments, strict=True) if a is not None}
        self.maker: dict[Var, Step] = {}
        for step in plan.steps:
            if step is not kernel:
                self.maker |= dict.fromkeys(made_by(plan, step), step)

    def tensor(self, name: str) -> Array:
        return self.atom(self.plan.converted.variable[name])

    def atom(self, atom: Var | JaxprLiteral) -> Array:
        if isinstance(atom, JaxprLiteral):
            return atom.val
        stack = [atom]
        while stack:
            var = stack[-1]
            if var in self.values:
                stack.pop()
                continue
            if var in self.missing:
                raise MissingArgument(self.missing[var])
            step = self.maker[var]
            wanted = [v for v in read_by(self.plan, step) if v not in self.values]
            stack += wanted
            if not wanted:
                run_step(self.plan, step, self.values)
        return self.values[atom]


def made_by(plan: Plan, step: Step) -> list[Var]:
    """The variables that a step defines."""
    if isinstance(step, Kernel):
        return [plan.converted.variable[n.name] for n in step.group.outputs]
    return list(step.outvars)


def read_by(plan: Plan, step: Step) -> list[Var]:
    """The variables that a step reads."""
    if isinstance(step, Kernel):
        return [plan.converted.variable[n] for n in step.group.inputs]
    return [v for v in step.invars if isinstance(v, Var)]


def is_part(axis: Axis, rolled: Axis) -> bool:
    """Does a tensor's axis number the parts of the rolled axis?"""
    return axis.name in (f"{rolled.name}.part", f"{rolled.name}.parts")


# --- which functions can be run in parts


def derive(
    jaxpr: Jaxpr, streamed: Sequence[int | None], names: Sequence[str], options: FuseOptions, what: str
) -> Partial:
    """`jaxpr`, run chunk by chunk along the dimensions in `streamed`.

    names: of the inputs, for messages. what: the function's name.

    Raises:
      FusionError: it cannot be run so; says which part of it needs the whole axis, and why.
    """
    converted = convert(jaxpr, BATCHED_AS_BODY)  # states may be batched
    refused: FusionError | None = None
    for along in (frozenset[Axis](), _axes_along(converted, streamed)):
        plan = plan_converted(converted, XLA_CPU, replace(options, price=False), along=along)
        try:
            return Partial(plan, _kernel(plan, streamed, names, what), tuple(streamed))
        except FusionError as error:
            refused = error
    assert refused is not None
    raise refused


def _axes_along(converted: Converted, streamed: Sequence[int | None]) -> frozenset[Axis]:
    tensors = {t.name: t for t in converted.program.inputs}
    found: set[Axis] = set()
    for name, var in converted.variable.items():
        dimension = streamed[converted.jaxpr.invars.index(var)] if var in converted.jaxpr.invars else None
        if dimension is not None:
            found |= set(axes_of(_compat.shape_of(var), tensors[name].axes)[dimension][1])
    return frozenset(found)


def _kernel(plan: Plan, streamed: Sequence[int | None], names: Sequence[str], what: str) -> Kernel:
    """The one kernel that reads what is streamed."""
    invars = plan.converted.jaxpr.invars
    along = {v: n for n, (v, d) in enumerate(zip(invars, streamed, strict=True)) if d is not None}
    found: Kernel | None = None
    for step in plan.steps:
        read = [names[along[v]] for v in read_by(plan, step) if v in along]
        if not read:
            continue
        if isinstance(step, JaxprEqn):
            raise FusionError(_outside(plan, step, read, what))
        if found is not None:
            raise FusionError(f"{what} cannot be run in chunks: two kernels read {', '.join(read)}: {found.name}, which reduces "
                              f"{found.group.rolled}, and {step.name}, which reduces {step.group.rolled}. The second would need "
                              "the stream again: make one fold of each part of the function.")  # fmt: skip
        found = step
    direct = [names[along[v]] for v in plan.converted.jaxpr.outvars if isinstance(v, Var) and v in along]
    if direct:
        raise FusionError(f"{what} cannot be run in chunks: it returns the streamed argument {direct[0]} itself")
    if found is None:
        raise FusionError(f"{what} cannot be run in chunks: it does not read what is streamed "
                          f"({', '.join(names[n] for n in along.values()) or 'no argument'}): name the dimensions that it "
                          "reduces in `axis`")  # fmt: skip
    _check_axis(plan, found, along, streamed, names, what)
    _check_group(found, what)
    return found


def _outside(plan: Plan, step: JaxprEqn, read: Sequence[str], what: str) -> str:
    reasons = [f for f in plan.fallbacks if f.operation == step.primitive.name
               and f.source == (_compat.source_summary(step) or "<unknown line>")]  # fmt: skip
    why = reasons[0].reason if reasons else "it is outside every kernel"
    where = _compat.source_summary(step) or "<unknown line>"
    return (f"{what} cannot be run in chunks: {step.primitive.name} at {where} reads all of the streamed "
            f"{', '.join(read)} ({why}): compute it before, and stream its result")  # fmt: skip


def _check_axis(
    plan: Plan,
    kernel: Kernel,
    along: Mapping[Var, int],
    streamed: Sequence[int | None],
    names: Sequence[str],
    what: str,
) -> None:
    """Every streamed dimension is the rolled axis, wherever the kernel reads it."""
    group, rolled = kernel.group, kernel.group.rolled
    tensors = {t.name: t for t in plan.program.inputs}
    reads = [n for n in postorder(*group.expressions()) if isinstance(n, Read)]
    for var, number in along.items():
        name = next((n for n, v in plan.converted.variable.items() if v is var), "")
        if name not in group.inputs:
            continue
        dimension = streamed[number]
        assert dimension is not None
        shape = _compat.shape_of(var)
        first, axes = axes_of(shape, tensors[name].axes)[dimension]
        if len(axes) != 1:
            raise FusionError(f"{what} cannot be run in chunks: dimension {dimension} of {names[number]} "
                              f"({shape[dimension]} elements) is reshaped into "
                              f"{' x '.join(str(a.extent) for a in axes) or 'nothing'}: stream an argument that has its own "
                              "dimension for what is reduced")  # fmt: skip
        for node in reads:
            if node.tensor == name and node.indices[first] != rolled:
                raise FusionError(f"{what} cannot be run in chunks: {node} reads dimension {dimension} of {names[number]} along "
                                  f"{node.indices[first]}, but the kernel reduces {rolled} (of {rolled.extent} elements): "
                                  "a streamed dimension is reduced, and nothing else. Pass what is read in another way as "
                                  "an argument of its own, which is not streamed")  # fmt: skip


def _check_group(kernel: Kernel, what: str) -> None:
    group = kernel.group
    if group.passes > 1:
        late = [f for f in group.folds if f.pass_index > 0]
        why = "; ".join(
            f"{f.name} at {f.nest.source}: {', '.join(f.refusals) or 'it reads a finished reduction'}" for f in late
        )
        raise FusionError(f"{what} cannot be run in chunks: it needs {group.passes} passes over the streamed axis, because {why}. "
                          "Make a fold of each pass, and give the results of the first one to the second")  # fmt: skip
    along = [n for n in group.outputs if group.rolled in n.axes]
    if along:
        raise FusionError(f"{what} cannot be run in chunks: a result that {along[0].source} computes varies along the streamed "
                          "axis, and needs the finished reductions: return what is reduced, and apply it to each chunk "
                          "in a second loop")  # fmt: skip
