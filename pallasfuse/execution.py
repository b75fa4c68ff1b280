"""Plans on arrays: every kernel by the emitter of its target, what XLA keeps as it is."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax import numpy as jnp
from jax.interpreters import mlir

from pallasfuse import _compat, lowered_once
from pallasfuse._compat import Literal as JaxprLiteral
from pallasfuse._compat import Var
from pallasfuse.constraints import constrained_operands, constrained_result
from pallasfuse.decisions import Original, Phase
from pallasfuse.decompositions import fourier_turns
from pallasfuse.emission.ranges import range_ends
from pallasfuse.errors import FusionError, TargetError
from pallasfuse.first_time import Recent
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.jaxpr_frontend import fused_calls
from pallasfuse.plan import Kernel, Plan, Step
from pallasfuse.targets import Target
from pallasfuse.xla_backend import loops

Array = Any


def _interpret(program: TileProgram, inputs: Mapping[str, Array]) -> dict[str, Array]:
    from pallasfuse.pallas_backend import interpret

    return interpret.run(program, inputs)


def _triton(program: TileProgram, inputs: Mapping[str, Array]) -> dict[str, Array]:
    from pallasfuse.triton_gpu import kernel

    return kernel.run(program, inputs)


def _mosaic_gpu(program: TileProgram, inputs: Mapping[str, Array]) -> dict[str, Array]:
    from pallasfuse.pallas_backend import mosaic_gpu

    return mosaic_gpu.run(program, inputs)


def _mosaic_cluster(programs: Sequence[TileProgram], inputs: Mapping[str, Array]) -> dict[str, Array]:
    from pallasfuse.pallas_backend import cluster_gpu

    return cluster_gpu.run(programs, inputs)


_EMITTERS: dict[str, Callable[[TileProgram, Mapping[str, Array]], dict[str, Array]]] = {
    "xla": loops.run,
    "xla_gpu": loops.run,
    "interpret": _interpret,
    "triton": _triton,
    "mosaic_gpu": _mosaic_gpu,
}
_TOGETHER: dict[str, Callable[[Sequence[TileProgram], Mapping[str, Array]], dict[str, Array]]] = {
    "mosaic_cluster": _mosaic_cluster
}
"""Runs all phases as one kernel, for the targets that do so, by the name of the target."""

type RunKernel = Callable[[Plan, Kernel, Mapping[str, Array]], Mapping[str, Array]]


def emit(target: Target, program: TileProgram, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run one kernel on arrays with one dimension per axis; the ends of ranges that bound it are computed here.

    Raises:
      TargetError: the target has no emitter.
    """
    emitter = _EMITTERS.get(target.name)
    if emitter is None:
        raise TargetError(f"target {target.name!r} has no emitter yet")
    return emitter(program, {**inputs, **range_ends(program.ranges, inputs)})


def lower_on(
    target: Target, run: Callable[[Target], Callable[..., Any]], context: Any, nodes: Sequence[Any], *, name: str, asked: bool,
    mended: Callable[[], bool] = lambda: False,
) -> Any:  # fmt: skip
    """Lowers a primitive by `run(target)`.

    Should that fail for a target that nobody asked for by name, the target that stands in is taken, with a warning. mended: has
    what failed been found and left out, so that it is worth another try?
    """

    def lower(chosen: Target) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Triton.*deprecated", category=DeprecationWarning)
            return mlir.lower_fun(run(chosen), multiple_results=True)(context, *nodes)

    try:
        return lower(target)
    except Exception as first:
        error = first
        if not asked:
            try:
                if mended():
                    return lower(target)
            except FusionError:
                raise
            except Exception as again:
                error = again  # the newer one says what is wrong now
        other = target.fallback
        if asked or other is None:
            raise
        while other.capability and other.fallback:  # what is written for one kind of device fails together
            other = other.fallback
        warnings.warn(f"{name}: no kernel of {target.name} could be built ({type(error).__name__}: {str(error)[:500]}): "
                      f"a bug in pallasfuse, please report it. {other.name} is used instead.", stacklevel=2)  # fmt: skip
        return lower(other)


def execute(plan: Plan, arguments: Sequence[Array], run: RunKernel | None = None) -> list[Array]:
    """Run a plan on the values of the jaxpr's constants and inputs, in this order. run: what runs a kernel.

    Raises:
      TargetError: the plan's target has no emitter.
    """
    converted = plan.converted
    jaxpr = converted.jaxpr
    if not _changes(plan):  # the very program that `jax.jit` would compile
        original = _compat.without_unused(converted.original)
        return _compat.eval_jaxpr(original, original.consts, *arguments[len(jaxpr.constvars) :])
    values: dict[Var, Array] = dict(zip((*jaxpr.constvars, *jaxpr.invars), arguments, strict=True))
    for step in plan.steps:
        run_step(plan, step, values, run)
    return [jnp.asarray(_look_up(v, values), _compat.dtype_of(v)) for v in jaxpr.outvars]


def _changes(plan: Plan) -> bool:
    """Does a plan run anything else than the user's program?"""
    return bool(plan.kernels or plan.rewritings or any(fused_calls(plan.converted.original)))


def call_consts(plan: Plan) -> list[Any]:
    """The values of the program's constants, which come before its inputs."""
    return list(plan.converted.jaxpr.consts)


def _as_function(plan: Plan, exported: bool = False) -> Callable[..., list[Array]]:
    def fused(*arguments: Array) -> list[Array]:
        return execute(plan, [*call_consts(plan), *arguments], run_kernel_anew if exported else None)

    return jax.jit(fused) if _changes(plan) else fused


as_function = Recent(_as_function, most=64)
"""Returns what runs a plan on the values of the program's inputs.

Several calls of one plan in a program are calls of one function, so that its kernels are lowered and compiled once. What changes
nothing is no function of its own: XLA's passes depend on that. exported: the program is lowered for `jax.export`.
"""


def run_step(plan: Plan, step: Step, values: dict[Var, Array], run: RunKernel | None = None) -> None:
    """Add to `values` what a step defines. A kernel's operations are in the user's scopes around what it replaces, and in one more
    of its name."""
    variable = plan.converted.variable
    if isinstance(step, Kernel):
        given = {name: values[variable[name]] for name in step.reads}
        with _compat.in_scopes(plan.scopes_of(step), step.name):
            arrays = constrained_operands(plan.converted, step, given)
            found = (run or run_kernel)(plan, step, arrays)
            for name in step.stores:
                result = _of_shape(found[name], _compat.shape_of(variable[name]), step.target)
                values[variable[name]] = constrained_result(plan.converted, name, result)
    else:
        operands: Sequence[Any] = [_look_up(a, values) for a in step.invars]
        if plan.target.platform == "cpu":
            before = _transformed_before(plan).get(id(step))
            operands = fourier_turns.delayed(step, operands, None if before is None else values.get(before))
        results = _compat.bind(step, operands)
        values.update(zip(step.outvars, results, strict=True))
        for var in step.outvars if plan.stored_beside else ():
            if var in plan.variables_beside:
                values[var] = jax.lax.optimization_barrier(values[var])


def _results_before(plan: Plan) -> dict[int, Var]:
    """Returns the result that each step which computes Fourier transforms waits for, by the identity of the step."""
    found: dict[int, Var] = {}
    last: Var | None = None
    for step in plan.steps:
        if not isinstance(step, Kernel) and fourier_turns.transforms(step):
            if last is not None:
                found[id(step)] = last
            number = fourier_turns.result(step)
            last = last if number is None else step.outvars[number]
    return found


_transformed_before = Recent(_results_before)


def _of_shape(stored: Array, shape: tuple[int, ...], target: Target) -> Array:
    """Returns what a kernel has stored in the shape that the program says, which moves nothing.

    XLA would reduce rows of several axes where a reduction reads rows of which the kernel knows several parts. On a GPU it keeps
    only rows of one axis on the chip between a reduction and what reads its result: it is not to see through the reshape, nor
    through one that takes axes apart.
    """
    result = stored.reshape(shape)
    same = [n for n in stored.shape if n > 1] == [n for n in shape if n > 1]
    return result if same or target.platform == "cpu" else jax.lax.optimization_barrier(result)


def run_kernel(plan: Plan, kernel: Kernel, arrays: Mapping[str, Array], *, anew: bool = False) -> dict[str, Array]:
    """The outputs of a kernel by name, one dimension for each axis; of its inputs only the row-major order matters.

    Equal kernels of a plan are calls of one function, which is traced, lowered and optimised once. XLA for CPUs is asked to inline
    loops of its own late: it would compile every copy of them anew. Kernels for GPUs are calls already. anew: it is lowered for
    this program, and not for all that call it.
    """
    if kernel.original is None or kernel.original not in plan.repeated:
        return _runner(anew)(kernel.phases, arrays)
    results = _function(plan, kernel.original, anew)(*[arrays[name] for name in kernel.reads])
    return dict(zip(kernel.stores, results, strict=True))


def run_kernel_anew(plan: Plan, kernel: Kernel, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Runs a kernel as `run_kernel`, lowered for this program: what users export is to run with other versions of JAX, too."""
    return run_kernel(plan, kernel, arrays, anew=True)


_functions: WeakKeyDictionary[Original, dict[tuple[str, bool], Callable[..., list[Array]]]] = WeakKeyDictionary()


def _function(plan: Plan, original: Original, anew: bool) -> Callable[..., list[Array]]:
    """A kernel as a function of its inputs, in their order: the same one at every call. Where XLA does not inline it, its
    operations have no other scopes than the function's own: they are those that the kernel's places have in common."""
    phases, reads, outputs = original.placed.phases, original.reads, original.group.outputs
    inlined = any(phase.target.platform != "cpu" for phase in phases)
    scope = "" if inlined else plan.repeated[original]
    made, key = _functions.setdefault(original, {}), (scope, anew)
    if key not in made:

        def kernel(*inputs: Array) -> list[Array]:
            with _compat.in_scopes(*filter(None, scope.split("/"))):
                found = _runner(anew)(phases, dict(zip(reads, inputs, strict=True)))
            return [found[nest.name] for nest in outputs]

        made[key] = jax.jit(kernel, inline=jax.Inline.AUTO if inlined else jax.Inline.XLA_LATE)
    return made[key]


def _runner(anew: bool) -> Callable[[Sequence[Phase], Mapping[str, Array]], dict[str, Array]]:
    """Returns what runs the phases of a kernel: lowered for this program, or once for all that call it."""
    return run_phases if anew else lambda phases, arrays: lowered_once.run(phases, arrays, run_phases)


def run_phases(phases: Sequence[Phase], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Runs the phases of a kernel one after the other, and returns every array that they store, by name."""
    known: dict[str, Array] = dict(arrays)
    stored: dict[str, Array] = {}

    def of(program: TileProgram) -> dict[str, Array]:
        return {t.name: known[t.name].reshape([a.extent for a in t.axes]) for t in program.given if t.name in known}

    for name, own in groupby(phases, key=lambda p: p.target.name):
        if name in _TOGETHER:
            programs = [p.program for p in own]
            given = {n: x for p in programs for n, x in of(p).items()}
            stored |= _TOGETHER[name](programs, given)
            known |= stored
            continue
        for phase in own:
            stored |= emit(phase.target, phase.program, of(phase.program))
            known |= stored
    return stored


def _look_up(atom: Var | JaxprLiteral, values: Mapping[Var, Array]) -> Array:
    return atom.val if isinstance(atom, JaxprLiteral) else values[atom]
