"""Every private JAX import, in one place: these move with each JAX release. Checked with JAX 0.11.2 and 0.12.0.1.

Functions import what belongs to kernels for GPUs only when they are called: it takes long, and `import pallasfuse` shall not. Parts
of Mosaic GPU that have no public name are used in `pallas_backend/mosaic_code`.
"""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import config, core, dispatch, sharding_impls, source_info_util
from jax._src import profiler as jax_profiler
from jax._src.interpreters import partial_eval
from jax._src.lax import parallel
from jax.sharding import NamedSharding, PartitionSpec

# as of `jax.extend.core`, with which Pallas is imported: that takes as long as all of `import pallasfuse`
Jaxpr = core.Jaxpr
JaxprEqn = core.JaxprEqn
Literal = core.Literal
Primitive = core.Primitive
Var = core.Var


def is_mapped(dimension: Any) -> bool:
    """Says whether a batch dimension is there: False for an operand that has none."""
    return dimension is not None and type(dimension).__name__ != "NotMapped"


def source_summary(eqn: JaxprEqn) -> str:
    """`file:line:column (function)` of the user's line that the equation comes from; empty when it is not known."""
    return source_info_util.summarize(eqn.source_info)


def scopes_of(eqn: JaxprEqn) -> str:
    """The names of `jax.named_scope` around an equation, from the outermost on, joined by slashes."""
    return "/".join(s.name for s in eqn.source_info.name_stack.stack if not isinstance(s, source_info_util.Transform))


class _OuterScope(NamedTuple):
    """A scope around the loop whose body an equation is in: `exclude` may name it, and the loop itself says it to XLA."""

    name: str

    def wrap(self, stack: list[str]) -> None:
        """Adds the scope to those that are printed: it is there already."""


def common_scopes(eqns: Iterable[JaxprEqn]) -> Any:
    """The innermost scope that is around all of these equations, with those around it, as a stack of names."""
    stacks = [eqn.source_info.name_stack for eqn in eqns]
    shared = 0
    for names in zip(*(s.stack for s in stacks), strict=False):
        if len(set(names)) > 1:
            break
        shared += 1
    return stacks[0][:shared] if stacks else source_info_util.NameStack()


def current_scopes() -> Any:
    """The names of `jax.named_scope` around what is traced at present, as a stack."""
    return source_info_util.current_name_stack()


def in_scopes(*scopes: Any) -> Any:
    """Returns a context in which operations are inside these scopes, besides the current ones: stacks of names, or names."""
    stack = source_info_util.current_name_stack()
    for scope in scopes:
        stack = stack.extend(scope) if isinstance(scope, str) else stack + scope
    return source_info_util.set_name_stack(stack)


def inside_scopes(source: Any, eqn: JaxprEqn, outer: Any) -> tuple[Any, Any]:
    """Returns the source of an equation with the scopes around the call that it comes from, and these scopes with its own.

    source: of its line or of the call. outer: the scopes of the call; None where it comes from none.
    """
    stack = eqn.source_info.name_stack if outer is None else outer + eqn.source_info.name_stack
    return source.replace(name_stack=stack), stack


def is_user_function(jaxpr: Jaxpr) -> bool:
    """Says whether `jaxpr` was traced from a function in the user's files, not in JAX's own."""
    filename = jaxpr.debug_info.func_filename
    return filename is not None and source_info_util.is_user_filename(filename)


def argument_names(jaxpr: Jaxpr) -> tuple[str, ...]:
    """The paths of the arguments, like `x` or `params['w']`; best effort, possibly empty or too short."""
    return tuple(jaxpr.debug_info.arg_names or ())


def tracks_array_reference(effect: Any) -> bool:
    """Says whether an effect reads or writes a mutable array. Such an effect names one of the jaxpr's variables."""
    return hasattr(effect, "input_index") or hasattr(effect, "input")


def replace_jaxpr(
    jaxpr: Jaxpr,
    constvars: Sequence[Var],
    consts: Sequence[Any],
    eqns: Sequence[JaxprEqn],
    outvars: Sequence[Var | Literal],
) -> Jaxpr:
    """`jaxpr` with the same arguments and another body."""
    result: Jaxpr = jaxpr.replace(  # type: ignore[no-untyped-call]
        constvars=constvars, consts=consts, eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info
    )
    return result


def with_params(eqn: JaxprEqn, params: dict[str, Any]) -> JaxprEqn:
    """The equation with other parameters."""
    return eqn.replace(params=params)  # type: ignore[no-untyped-call,no-any-return]


def within_scopes_of(jaxpr: Jaxpr, outer: JaxprEqn) -> Jaxpr:
    """`jaxpr`, whose equations know that they are inside the scopes around an equation, too: that of the loop whose body it is."""
    stack = source_info_util.NameStack(tuple(_OuterScope(name) for name in scopes_of(outer).split("/") if name))  # type: ignore[misc]
    eqns = [e.replace(source_info=inside_scopes(e.source_info, e, stack)[0]) for e in jaxpr.eqns]
    return replace_jaxpr(jaxpr, jaxpr.constvars, jaxpr.consts, eqns, jaxpr.outvars)


def bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Run one equation on values; always a list of results."""
    bind_params = eqn.primitive.get_bind_params(eqn.params)  # type: ignore[no-untyped-call]
    if isinstance(bind_params, tuple):
        subfuns, params = bind_params
    else:
        subfuns, params = (), bind_params
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        results = eqn.primitive.bind(*subfuns, *values, **params)  # type: ignore[no-untyped-call]
    return list(results) if eqn.primitive.multiple_results else [results]


def masked_load(ref: Any, mask: Any, eviction_policy: str | None = None) -> Any:
    """Load a (sub-)reference in a Pallas kernel; elements where `mask` is false are zero and not read."""
    from jax.experimental.pallas import triton as pallas_triton

    if mask is None:
        return pallas_triton.load(ref, eviction_policy=eviction_policy)
    return pallas_triton.load(ref, mask=mask, other=False if ref.dtype == bool else 0, eviction_policy=eviction_policy)


def masked_store(ref: Any, value: Any, mask: Any) -> None:
    """Store to a (sub-)reference in a Pallas kernel; elements where `mask` is false are not written."""
    from jax.experimental.pallas import triton as pallas_triton

    pallas_triton.store(ref, value, mask=mask)


def result_types(jaxpr: Jaxpr) -> list[Any]:
    """The abstract values of a jaxpr's results."""
    return [v.aval for v in jaxpr.outvars]


def without_mesh(context: Any) -> tuple[Any, Any]:
    """Returns a scope without a current mesh, and the lowering's context with types that name no mesh.

    Both serve to lower what a single device does: the partitioner calls back with the user's mesh, over which the program is not
    partitioned again.
    """
    empty = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(empty):
        ins, outs = (
            [core.ShapedArray(a.shape, a.dtype) for a in avals] for avals in (context.avals_in, context.avals_out)
        )
    return jax.sharding.use_abstract_mesh(empty), context.replace(avals_in=ins, avals_out=outs)


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """Names of the axes of type `Explicit` and more than one device."""
    if mesh is None or not mesh.axis_names:
        return ()
    explicit = jax.sharding.AxisType.Explicit
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == explicit and mesh.shape[name] > 1)


def mesh_of(atom: Any) -> Any:
    """The mesh that the type of a variable names, or None."""
    return getattr(getattr(atom.aval, "sharding", None), "mesh", None)


def explicit_mesh(values: Sequence[Any], *, current: bool = True) -> Any:
    """The abstract mesh with such axes that the type of a value carries, or the current one; None if there is none."""
    meshes = [*(jax.typeof(x).sharding.mesh for x in values), *([jax.sharding.get_abstract_mesh()] if current else [])]
    return next((m for m in meshes if explicit_axes(m)), None)


def eval_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Run a jaxpr equation by equation."""
    return list(core.eval_jaxpr(jaxpr, consts, *args))


def without_unused(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without what nobody reads, as `jax.jit` compiles it."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def plain_aval(aval: Any) -> Any:
    """Shape, type and weak type of an abstract value, without sharding; inside a `shard_map` also how it varies over the mesh."""
    weak, varies = getattr(aval, "weak_type", False), getattr(aval, "mat", None)
    if varies is None or varies.empty:
        return core.ShapedArray(aval.shape, aval.dtype, weak_type=weak)
    return core.ShapedArray(aval.shape, aval.dtype, weak_type=weak, sharding=aval.sharding, manual_axis_type=varies)


def struct_of(atom: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of a variable; inside a `shard_map` also how it varies over the mesh."""
    aval = atom.aval
    varies = getattr(aval, "mat", None)
    if varies is None or varies.empty:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=varies)


def _with_unnamed(count: int, jaxpr: Jaxpr) -> Any:
    """Returns the record of where a jaxpr comes from, for one with `count` more arguments in front, which have no names."""
    names = argument_names(jaxpr)
    if len(names) != len(jaxpr.invars):
        return jaxpr.debug_info.with_unknown_names()
    return jaxpr.debug_info._replace(arg_names=("",) * count + names)


def hoist_traced_consts(jaxpr: Jaxpr) -> tuple[Jaxpr, list[Any]]:
    """Turn constants that are tracers of an outer transformation into leading arguments."""
    traced = [n for n, c in enumerate(jaxpr.consts) if isinstance(c, core.Tracer)]
    if not traced:
        return jaxpr, []
    kept = [n for n in range(len(jaxpr.consts)) if n not in traced]
    result = jaxpr.replace(  # type: ignore[no-untyped-call]
        constvars=[jaxpr.constvars[n] for n in kept], consts=[jaxpr.consts[n] for n in kept],
        invars=[*(jaxpr.constvars[n] for n in traced), *jaxpr.invars], debug_info=_with_unnamed(len(traced), jaxpr),
    )  # fmt: skip
    return result, [jaxpr.consts[n] for n in traced]


def with_arguments(jaxpr: Jaxpr, first: Sequence[Var]) -> Jaxpr:
    """`jaxpr` with some of the variables that it reads as leading arguments."""
    debug_info = _with_unnamed(len(first), jaxpr)
    result: Jaxpr = jaxpr.replace(invars=[*first, *jaxpr.invars], debug_info=debug_info)  # type: ignore[no-untyped-call]
    return result


_LOOPS = frozenset(("fori_loop", "while_body", "scan"))


def scan_counts(eqn: JaxprEqn) -> tuple[int, int] | None:
    """How many operands of a scan are constants, and how many it carries; None where this version of JAX does not say."""
    try:
        constants, carried, rest = (len(part) for part in eqn.params["ft_in"].unpack())
    except (KeyError, AttributeError, TypeError, ValueError):
        return None
    return (constants, carried) if constants + carried + rest == len(eqn.invars) else None


def scan_parts[T](
    operands: tuple[T, ...], counts: tuple[int, int]
) -> tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]]:
    """Returns the operands of a scan in three parts: constants, what it carries, what it runs over. counts: of `scan_counts`."""
    constants, carried = counts
    return operands[:constants], operands[constants : constants + carried], operands[constants + carried :]


def enclosing_loop() -> Any:
    """The trace of the loop's body that is being traced now, directly or under a transformation; None if there is none."""
    trace = core.trace_ctx.trace
    while getattr(trace, "frame", None) is None and (outer := getattr(trace, "parent_trace", None)) is not None:
        trace = outer
    kind = getattr(getattr(getattr(trace, "frame", None), "debug_info", None), "traced_for", "")
    return trace if kind in _LOOPS else None


def changes_in(trace: Any, value: Any) -> bool:
    """Does a value depend on what is traced by a loop's trace, or is that not known?"""
    if not isinstance(value, core.Tracer):
        return False
    if value._trace is trace:
        return True
    if isinstance(value._trace, type(trace)):
        return False  # of a jaxpr around the loop
    inside = getattr(value, "val", getattr(value, "primal", None))
    if inside is None:
        return True
    return changes_in(trace, inside) or isinstance(getattr(value, "tangent", None), core.Tracer)


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal of a jaxpr."""
    return tuple(atom.aval.shape)


def has_symbolic_shapes(jaxpr: Jaxpr) -> bool:
    """Says whether the arguments of a jaxpr have lengths that are not known yet, as under `jax.export`."""
    return any(not isinstance(n, int) for v in (*jaxpr.invars, *jaxpr.outvars) for n in shape_of(v))


def is_rocm() -> bool:
    """Says whether this process computes on an AMD GPU."""
    return jax.default_backend() == "gpu" and "rocm" in jax.devices()[0].client.platform_version.lower()


def names_gpu() -> bool:
    """Says whether it is known for which kind of GPU a program is lowered: the default device, or the one that
    `jax.sharding.use_abstract_mesh` names."""
    default = jax.config.jax_default_device
    platform = jax.default_backend() if default is None else getattr(default, "platform", default)
    named = jax.sharding.get_abstract_mesh().abstract_device
    return (platform if named is None else named.platform) in ("gpu", "cuda", "rocm")


def on_abstract_gpu(kind: str, multiprocessors: int) -> Any:
    """Returns a scope in which programs are lowered for one kind of GPU that is not at hand."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=multiprocessors, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh().update(abstract_device=device))


def is_in_mesh(arrays: Iterable[Any]) -> bool:
    """Says whether a mesh is set, or a device named, or arrays are spread over one."""
    mesh = jax.sharding.get_abstract_mesh()
    several = list(arrays)
    return (
        not mesh.empty
        or mesh.abstract_device is not None
        or bool(_varies(*several))
        or explicit_mesh(several) is not None
    )


def for_this_version() -> Any:
    """Returns a scope in which `jax.export` lowers programs as they are lowered to be run: for no other version of JAX."""
    return config.export_ignore_forward_compatibility(True)


def dtype_of(atom: Any) -> Any:
    """The dtype of a variable or literal of a jaxpr."""
    return atom.aval.dtype


# public in this module until JAX 0.12
_all_gather_invariant: Any = getattr(parallel, "all_gather_invariant", getattr(parallel, "_all_gather_invariant", None))


def all_gather(x: Any, axis_name: Any) -> Any:
    """`x` of every device along a named axis, stacked in front: the same on each device, and typed so."""
    return _all_gather_invariant(x, axis_name, axis=0, tiled=False) if _varies(x) else jax.lax.all_gather(x, axis_name)


def _varies(*arrays: Any) -> frozenset[str]:
    """The mesh axes along which values differ, inside a `shard_map` that tracks them."""
    return frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))


def varying_alike(values: Sequence[Any], among: Sequence[Any]) -> list[Any]:
    """`values`, typed to vary along every mesh axis along which any of `among` does: what a loop carries has one type."""
    axes = _varies(*among)
    return [jax.lax.pcast(v, tuple(axes - _varies(v)), to="varying") if axes - _varies(v) else v for v in values]


def require_devices(primitive: Any) -> None:
    """Makes JAX tell the primitive's lowering for how many devices the program is."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_exported(context: Any) -> bool:
    """Says whether a lowering is for `jax.export`."""
    return bool(context.module_context.lowering_parameters.for_export)


def is_partitioned(context: Any) -> bool:
    """Says whether a lowering is for several devices, among which XLA partitions the program.

    It is not where the program is exported (what is called when the program is partitioned cannot be), nor without Shardy, whose
    rule says how.
    """
    if is_exported(context) or not jax.config.jax_use_shardy_partitioner:
        return False
    axis_context = context.module_context.axis_context
    if isinstance(axis_context, sharding_impls.ShardingContext):
        return bool(axis_context.num_devices > 1 and axis_context.device_assignment)
    return False


def device_of(context: Any) -> Any:
    """The device that a lowering is for, if it is one, at hand and of this process alone; None where a program is exported,
    compiled for another machine, or runs on several devices."""
    module = context.module_context
    axis_context = module.axis_context
    if is_exported(context) or not isinstance(axis_context, sharding_impls.ShardingContext):
        return None
    devices = axis_context.device_assignment or ()
    if len(devices) != 1 or axis_context.num_devices != 1 or jax.process_count() != 1:
        return None
    (device,) = devices
    try:
        at_hand = jax.local_devices(backend=device.platform)
    except RuntimeError:
        return None
    lowered_for = {"cuda": "gpu", "rocm": "gpu"}
    same = {lowered_for.get(p, p) for p in module.platforms} == {device.platform}
    return device if same and any(device is d for d in at_hand) else None


def partition_spec(sharding: Any, mesh: Any) -> tuple[Any, ...]:
    """Returns the sharding that the partitioner has found for an array, one entry a dimension.

    The result is empty where mesh axes cannot say it (a dimension has a part of one).
    """
    if sharding is None:
        return ()
    if hasattr(sharding, "spec"):
        return tuple(sharding.spec)
    try:
        (spec,) = sharding_impls.parse_flatten_op_sharding(sharding._hlo_sharding, mesh)
    except (ValueError, KeyError, AssertionError, NotImplementedError):
        return ()
    return tuple(spec)


def asks_for_sharding(sharding: Any) -> bool:
    """Does an equation's parameter say how its result is sharded? Over a mesh of automatic axes it is there, but says nothing."""
    if sharding is None:
        return False
    spec, mesh = getattr(sharding, "spec", None), getattr(sharding, "mesh", None)
    if spec is None or mesh is None or any(entry is not None for entry in spec):
        return True
    return any(t != jax.sharding.AxisType.Auto for t in mesh.axis_types)


def is_sharding_constraint(eqn: JaxprEqn) -> bool:
    """Is an equation an identity that says how its value is spread over devices, and nothing else (no layout, no other memory)?"""
    if eqn.primitive.name != "sharding_constraint":
        return False
    return eqn.params.get("layout") is None and eqn.params["sharding"].memory_kind in (None, "device")


def constrained(eqn: JaxprEqn, value: Any, spec: PartitionSpec) -> Any:
    """`value`, constrained as by the equation over the same mesh, but by a partition spec of its own, with all dimensions."""
    free = frozenset(d for d, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED)
    sharding = NamedSharding(eqn.params["sharding"].mesh, spec)
    return bind(eqn.replace(params={**eqn.params, "sharding": sharding, "unconstrained_dims": free}), [value])[0]


def in_bounds() -> Any:
    """Returns the mode of a copy that stays inside its array: one instruction, whatever its size."""
    from jax.experimental.mosaic.gpu.launch_context import OOBFillMode

    return OOBFillMode.PROMISE_IN_BOUNDS


def kernel_seconds(program: Any, arguments: Sequence[Any], calls: int) -> list[float]:
    """Returns the seconds that the kernels of a compiled program take together on a GPU, without gaps, in each of some calls.

    One call alone, where they start different kernels. None at all where CUPTI does not tell: it is not there, a profiler of the
    user's has it, or a kernel has no time, as some in branches have."""
    from jax.experimental.mosaic.gpu import profiler as cupti

    state = jax_profiler._profile_state  # `session` from JAX 0.12
    if getattr(state, "profile_session", None) or getattr(state, "session", None):
        return []
    for iterations in (calls, 1):
        with contextlib.suppress(Exception):  # what helps to decide must not fail
            _, found = cupti.measure(program, aggregate=False, iterations=iterations)(*arguments)
            launches: Any = [found] if iterations == 1 else found
            each = [[ms for _, ms in call] for call in launches or () if call]
            return [1e-3 * sum(call) for call in each] if all(ms > 0 for call in each for ms in call) else []
    return []


_TRITON_DIALECT = "jaxlib.mlir.dialects.tt"


def name_triton_dialect() -> None:
    """Gives the dialect of Triton a module, an empty one, where JAX has none of its name.

    MLIR's bindings import it whenever they look at a type of the dialect, hundreds of times for a kernel, and Python would search
    all its folders in vain each time: half of the time in which a kernel is lowered.
    """
    if _TRITON_DIALECT not in sys.modules and importlib.util.find_spec(_TRITON_DIALECT) is None:
        sys.modules[_TRITON_DIALECT] = types.ModuleType(_TRITON_DIALECT)
