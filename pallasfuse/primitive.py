"""The JAX primitive of a fused call: one equation that holds the original jaxpr, planned when it is lowered.

Batching re-traces the batched original, so that the batched program is planned as a whole. Differentiation is that of the
original function, with one warning.
"""

import functools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import jax
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from pallasfuse import _compat
from pallasfuse.errors import TargetError, TraceError
from pallasfuse.execution import execute
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import Plan, make_plan
from pallasfuse.sharding import run_sharded
from pallasfuse.targets import Target, default_for, find

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Once:
    """True the first time it is asked. One per fused function, shared by all its traces."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._fired = False

    def first(self) -> bool:
        with self._lock:
            fired, self._fired = self._fired, True
        return not fired


@dataclass(frozen=True, eq=False)
class FusedCall:
    """The parameter of the primitive: what to compute, and how. Compared by identity; keeps its plans."""

    jaxpr: Jaxpr
    options: FuseOptions
    name: str
    warning: "Once"
    plans: dict[str, Plan] = field(default_factory=dict)
    lock: Any = field(default_factory=Lock)

    def plan(self, target: Target) -> Plan:
        """The plan for a target, made once."""
        with self.lock:
            if target.name not in self.plans:
                self.plans[target.name] = make_plan(self.jaxpr, target, self.options)
            return self.plans[target.name]

    def original(self, *args: Any) -> list[Any]:
        """The unfused function on flat arguments."""
        return _compat.eval_jaxpr(self.jaxpr, self.jaxpr.consts, *args)

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.jaxpr.eqns)} equations>"


fused_p = Primitive("pallasfuse")
fused_p.multiple_results = True
_compat.require_devices(fused_p)


def _apply(*args: Any, call: FusedCall) -> Any:
    return fused_p.bind(*args, call=call)


def _impl(*args: Any, call: FusedCall) -> Any:
    if jax.config.jax_disable_jit or jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return call.original(*args)  # JAX looks for the operation that made the NaN, one by one
    return jax.jit(functools.partial(_apply, call=call))(*args)


fused_p.def_impl(_impl)


def _abstract(*avals: Any, call: FusedCall) -> list[Any]:
    return [_compat.plain_aval(v.aval) for v in call.jaxpr.outvars]


fused_p.def_abstract_eval(_abstract)


def target_for(platform: str, options: FuseOptions) -> Target:
    """The target that `options` name for a platform, or its default.

    Raises:
      TargetError: the named target does not run on the platform.
    """
    if options.target is None:
        return default_for(platform, _capabilities() if platform == "cuda" else frozenset())
    target = find(options.target)
    runs_on = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}[target.platform]
    if platform not in runs_on and target.platform != "cpu":
        raise TargetError(f"target {target.name!r} runs on {' or '.join(runs_on)}, but the function is compiled for {platform}: "
                          "choose target=None for the best one")  # fmt: skip
    found = _capabilities() if target.capability and platform == "cuda" else frozenset()
    if found - {target.capability}:
        raise TargetError(f"target {target.name!r} is for GPUs of compute capability {target.capability}, but here are some of "
                          f"{', '.join(sorted(found))}: choose target=None for the best one")  # fmt: skip
    return target


def _capabilities() -> frozenset[str]:
    """Compute capabilities of the CUDA devices at hand."""
    try:
        return frozenset(str(getattr(d, "compute_capability", "")) for d in jax.devices("cuda"))
    except RuntimeError:
        return frozenset()


def _lower(ctx: Any, *nodes: Any, call: FusedCall, platform: str) -> Any:
    target = target_for(platform, call.options)
    plan = call.plan(target)
    try:
        return _lower_plan(plan, ctx, nodes)
    except Exception as error:
        if call.options.target is not None or not target.otherwise:
            raise
        other = find(target.otherwise)
        while other.capability and other.otherwise:  # what is written for one kind of device fails together
            other = find(other.otherwise)
        warnings.warn(f"{call.name}: no kernel of {target.name} could be built ({type(error).__name__}: {str(error)[:500]}): "
                      f"a bug in pallasfuse, please report it. {other.name} is used instead.", stacklevel=2)  # fmt: skip
        return _lower_plan(call.plan(other), ctx, nodes)


def _lower_plan(plan: Plan, ctx: Any, nodes: Sequence[Any]) -> Any:
    runner = run_sharded if _compat.is_partitioned(ctx) else None

    def run(*args: Any) -> list[Any]:
        return execute(plan, [*call_consts(plan), *args], runner)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Triton.*deprecated", category=DeprecationWarning)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *nodes)


def call_consts(plan: Plan) -> list[Any]:
    return list(plan.converted.jaxpr.consts)


for _platform in PLATFORMS:
    mlir.register_lowering(fused_p, functools.partial(_lower, platform=_platform), platform=_platform)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, call: FusedCall) -> tuple[list[Any], list[int]]:
    axes = [d if _compat.is_mapped(d) else None for d in dims]
    batched = jax.vmap(call.original, in_axes=axes, out_axes=0)
    jaxpr = jax.make_jaxpr(batched)(*args)
    results = fused_p.bind(*args, call=FusedCall(jaxpr, call.options, call.name, call.warning))
    return results, [0] * len(results)


batching.primitive_batchers[fused_p] = _batch


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: FusedCall) -> Any:
    if call.warning.first():
        warnings.warn(f"{call.name}: differentiating a fused function computes the gradient of the original, unfused function: "
                      "it is right, but it does not save memory", stacklevel=2)  # fmt: skip
    filled = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(call.original, tuple(primals), tuple(filled))


ad.primitive_jvps[fused_p] = _jvp


def refuse_explicit_axes(name: str, leaves: Iterable[Any]) -> None:
    """Kernels are partitioned over automatic mesh axes only.

    Raises:
      TraceError: an argument is typed by explicit ones.
    """
    explicit = dict.fromkeys(axis for x in leaves for axis in _compat.explicit_axes(x))
    if explicit:
        raise TraceError(f"{name}: its arguments are typed by the explicit mesh axes {', '.join(explicit)}, over which kernels are "
                         "not partitioned: make the mesh with axis_types=AxisType.Auto, or use jax.shard_map (and the merge of "
                         "pallasfuse.fold where a reduced axis is sharded)")  # fmt: skip


def call_fused(jaxpr: Jaxpr, options: FuseOptions, name: str, warning: Once, args: Sequence[Any]) -> list[Any]:
    """Bind the primitive. Constants that are still being traced become arguments."""
    closed, consts = _compat.hoist_traced_consts(jaxpr)
    return list(fused_p.bind(*consts, *args, call=FusedCall(closed, options, name, warning)))
