"""The JAX primitive of a fused call: one equation that holds the original jaxpr, planned when it is lowered.

Batching re-traces the batched original, so that the batched program is planned as a whole. Differentiation is that of the
original function, with one warning.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Lock
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, auto_axes

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, Primitive
from pallasfuse.at_hand import target_for
from pallasfuse.bodies import BodyForm, UsedForm, best_form, read_inside, with_fused_bodies
from pallasfuse.check import find_failures, settled, wanted
from pallasfuse.decompositions import WithKernels
from pallasfuse.errors import FusionError, TargetError, TraceError
from pallasfuse.execution import as_function, call_consts, execute, lower_on
from pallasfuse.first_time import IMPORTS, Once, one_task
from pallasfuse.ir.boundary import NO_LOOP, Boundary
from pallasfuse.isolation import is_inside
from pallasfuse.jaxpr_frontend import bodies, fused_calls
from pallasfuse.kept_plans import plan_of
from pallasfuse.loop_check import faster_as_planned, timed_boundary, why_untimed, with_bodies_that_pay
from pallasfuse.options import FuseOptions
from pallasfuse.parts import untimed
from pallasfuse.plan import Body, Kernel, Plan
from pallasfuse.primitive_names import FUSED_CALL, PLATFORMS
from pallasfuse.targets import Target
from pallasfuse.verdicts import BODIES, WRITTEN_OUT, Verdict
from pallasfuse.written_out import (
    cannot_win_as_it_is,
    chosen_form,
    is_faster_as_it_is,
    may_lose_kernels,
    predicted_us,
    sure_forms,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class FusedCall:
    """The parameter of the primitive: what to compute, and how. Compared by identity; keeps its plans."""

    jaxpr: Jaxpr
    options: FuseOptions
    name: str
    warning: Once
    plans: "dict[tuple[str, bool, bool, frozenset[int]], Plan]" = field(default_factory=dict)
    bodies: "dict[tuple[int, bool, bool], FusedCall]" = field(default_factory=dict)
    """The bodies of loops and branches that were planned, by their numbers, whether the program is written out, and whether they
    take slices by number: each once, for all plans."""
    lock: Any = field(default_factory=Lock)
    checked: dict[tuple[str, Any], Plan] = field(default_factory=dict)
    check_lock: Any = field(default_factory=Lock)
    programs: dict[tuple[str, bool, bool], Jaxpr] = field(default_factory=dict)
    """What is planned, written out or not, for each target, with a clock or without, on one device or more."""
    written: "list[FusedCall]" = field(default_factory=list)
    """The same with sums and products in the order of the program, once that was asked for."""
    unchecked: "list[FusedCall]" = field(default_factory=list)
    """The same without checks, once that was asked for."""
    forms: "dict[str, FusedCall]" = field(default_factory=dict)
    """The same with loops or operations written out, by words that say which, once a clock has preferred that."""
    boundary: Boundary = NO_LOOP
    """The boundary of the program, where it is the body of a loop."""
    is_body: bool = False
    """It is the body of a loop or a branch: the call around it decides how its own loops run."""
    is_seen: bool = True
    """The calls around such a body can be timed as a whole, by what they consist of; always true of a call that is no body."""

    def as_written(self) -> "FusedCall":
        """The call without other forms: over several devices, another order may move more between them."""
        if not self.options.rewrite:
            return self
        with self.lock:
            if not self.written:
                options = replace(self.options, rewrite=False)
                self.written.append(FusedCall(self.jaxpr, options, self.name, self.warning, boundary=self.boundary))
            return self.written[0]

    @one_task()
    def plan(self, target: Target, left: frozenset[int] = frozenset()) -> Plan:
        """The plan for a target, made once. left: the bodies of loops, by their numbers, that stay with XLA."""
        if self.boundary != NO_LOOP:
            target = target.on(target.device.inside_loops())
        with self.lock:
            key = target.name, target.timed, target.one_device, left
            found = self.plans.get(key)  # `mend` may empty what is kept at any time
            if found is None:
                jaxpr, bodies = self.with_bodies(target, left)
                found = replace(plan_of(jaxpr, target, self.options, self.boundary), bodies=bodies)
                found = found if self.program(target) is self.jaxpr else found.of_written_out()
                self.plans[key] = found
            return found

    def program(self, target: Target) -> Jaxpr:
        """The jaxpr that is planned for a target: written out where that needs no clock, and there is none."""
        key = target.name, target.timed, target.one_device
        program = self.programs.get(key)
        if program is None:
            own = self.options
            asked = own.strict or own.shapes_kernels
            sure = target.one_device and own.price and not (target.timed or asked or self.is_body)
            forms = sure_forms(self.jaxpr, target, own.exclude, self.planned_alone(target)) if sure else iter(())
            fit = (form for form in forms if not self._may_lose_kernels(form, target))
            program = self.programs[key] = next(fit, self.jaxpr)
        return program

    def planned_alone(self, target: Target) -> WithKernels | None:
        """Returns what plans an operation alone, unchecked: what it is a part of is checked. None: the target has no kernels."""
        if not target.writes_kernels:
            return None

        def planned(jaxpr: Jaxpr) -> tuple[Callable[..., list[Any]], float]:
            call = FusedCall(jaxpr, replace(self.options, check=False), self.name, self.warning)
            return functools.partial(bind, call), predicted_us(call.plan(target))

        return planned

    def _may_lose_kernels(self, form: Jaxpr, target: Target) -> bool:
        return may_lose_kernels(self.jaxpr, form, lambda one: plan_of(one, target, self.options, self.boundary))

    def with_bodies(self, target: Target, left: frozenset[int] = frozenset()) -> tuple[Jaxpr, tuple[Body, ...]]:
        """Plans the bodies of loops and branches for a target, and returns the jaxpr with those of which something is fused."""
        program = self.program(target)
        written_out = program is not self.jaxpr
        numbers, found = count(), dict[int, Body]()
        # tiles are asked for by names of axes outside, and who asks gets what was asked for, unchecked
        own = replace(
            self.options, tiles=(), parts=None, warps=None, stages=None, schedule=None, check=wanted(self.options)
        )

        def fused(forms: Sequence[BodyForm], what: str) -> UsedForm | None:
            number = next(numbers)
            if number in left:
                return None

            def planned(form: BodyForm) -> tuple[FusedCall, Plan]:
                bound = timed_boundary(form.boundary, program, self.boundary if self.is_body else None)
                made = FusedCall(form.jaxpr, own, f"{self.name}, {what}", self.warning, boundary=bound, is_body=True,
                                 is_seen=self.can_be_timed)  # fmt: skip
                call = self.bodies.setdefault((number, written_out, form.by_number), made)
                return call, call.plan(target)

            best = best_form(forms if target.stores_slices else forms[-1:], planned)
            if best is None:
                return None
            form, (call, plan) = best
            found[id(call)] = Body(number, what, plan, None if form.hoists else form.trips)
            return UsedForm(form, functools.partial(bind, call), read_inside(plan))

        if self.options.strict:  # nothing may be left to XLA, and a loop is
            return program, ()
        jaxpr = with_fused_bodies(program, fused, self.options.exclude)
        inside = {id(call) for eqn in jaxpr.eqns for body in bodies(eqn) for call in fused_calls(body)}
        return jaxpr, tuple(body for call, body in found.items() if call in inside)

    @functools.cached_property
    def can_be_timed(self) -> bool:
        """A clock may see the whole call; that around it, if it is a body."""
        return self.is_seen and not untimed(self.jaxpr)

    def judged(self, target: Target, device: Any) -> Target:
        """Returns the target for a call on a device: timed if a check is wanted, and a clock can see the whole call.

        device: None where it is not at hand, or where there are several.
        """
        is_timed = device is not None and wanted(self.options) and self.can_be_timed
        return target.judged(timed=is_timed, one_device=device is not None)

    def plan_on(self, target: Target, device: Any) -> Plan:
        """The plan for a target, with its kernels checked on a device, once; None: the device is not at hand."""
        if device is None:
            return self.plan(self.judged(target, device))
        if not self.check_lock.acquire(blocking=not is_inside()):
            # who holds it may wait for the one that measures, and that is this thread
            return self.settled(target, device)
        try:
            found = self.checked.get((target.name, device))
            if found is None:
                found = self.checked[target.name, device] = self.settled(target, device)
            return found
        finally:
            self.check_lock.release()

    def mend(self, target: Target, device: Any) -> bool:
        """Find the kernels that cannot be lowered or compiled, and leave them out from now on. False where there are none."""
        calls = [] if device is None else [self, *self.forms.values(), *self.unchecked]
        failures = [f for c in calls for f in find_failures(c.plan(c.judged(target, device)), device)]
        if failures:
            warnings.warn(f"pallasfuse: {self.name}: {'; '.join(failures)}", stacklevel=2)
            # without the locks: who holds them may wait for the thread that is here
            for made in (self.checked, self.plans, self.programs, self.forms, self.unchecked):
                made.clear()
        return bool(failures)

    @one_task()
    def settled(self, target: Target, device: Any, *, measure: bool = True) -> Plan:
        """The plan as a device uses it. Bodies that have no kernel there are what they were, and all are if the call loses by them.

        measure: False looks up what is known, and measures nothing.
        """
        other, verdict = self.in_faster_form(target, device, measure=measure)
        if other is None:
            plan = self._settled_as_it_is(target, device, measure=measure)
        else:
            plan = other._settled_as_it_is(target, device, measure=measure).of_written_out()
            judged = self.judged(target, device)
            loses = self._may_lose_kernels(other.jaxpr, judged)
            may_win = loses or any(fused_calls(other.jaxpr)) or self.with_bodies(judged)[1]
            if may_win and not cannot_win_as_it_is(self.plan(judged), plan, verdict):
                own = self._settled_as_it_is(target, device, measure=measure)
                if is_faster_as_it_is(own, plan, verdict, loses=loses):
                    plan, verdict = own, verdict and verdict.overruled("its kernels gain more as it is")
        plan = plan if verdict is None else replace(plan, verdicts=(verdict, *plan.verdicts))
        return self._guarded(lambda: self._or_unchecked(plan, target, device, measure=measure), plan)

    def _or_unchecked(self, plan: Plan, target: Target, device: Any, *, measure: bool) -> Plan:
        """Returns the plan that was checked, or one that is as prices have made it, where that is faster as a whole.

        Forms are chosen as XLA runs them, and bodies of loops are checked as programs of their own: what kernels gain in another
        form, or in a loop, only a clock for the whole has seen.
        """
        if self.is_body or not wanted(self.options):
            return plan
        kept = {b.number for b in plan.bodies if b.plan.kernels}
        is_timed = any(v.subject == BODIES for v in plan.verdicts)  # with bodies that have won alone
        lost = set() if is_timed else {b.number for b in self.plan(self.judged(target, device)).bodies} - kept
        has_form = any(v.subject == WRITTEN_OUT for v in plan.verdicts)
        if not (lost or has_form) or why_untimed(plan):
            return plan
        other = self._without_clock()
        judged = other.judged(target, device)
        if other.program(judged) is other.jaxpr and not lost:
            return plan
        planned = other._settled_as_it_is(target, device, measure=False)  # without what is known to fail
        has_kernels = planned.kernels or planned.bodies
        return faster_as_planned(plan, planned, device, measure=measure) if has_kernels else plan

    def _without_clock(self) -> "FusedCall":
        """Returns the call as it is where nothing is checked, the bodies of its loops neither."""
        with self.lock:
            if not self.unchecked:
                options = replace(self.options, check=False)
                self.unchecked.append(FusedCall(self.jaxpr, options, self.name, self.warning, boundary=self.boundary))
            return self.unchecked[0]

    @one_task()
    def in_faster_form(
        self, target: Target, device: Any, *, measure: bool
    ) -> "tuple[FusedCall | None, Verdict | None]":
        """The call with loops and operations written out, if a clock says that XLA runs it faster, and what it said."""
        if self.is_body or self.options.strict or not wanted(self.options):
            return None, None
        try:
            best, form, verdict = chosen_form(
                self.jaxpr, target, device, self.options.exclude, self.planned_alone(target), measure=measure
            )
        except Exception as error:
            warnings.warn(f"{self.name}: its forms could not be checked ({type(error).__name__}: {str(error)[:500]}): a bug in "
                          "pallasfuse, please report it. It is as it was written.", stacklevel=2)  # fmt: skip
            return None, None
        if best is None:
            return None, verdict
        with self.lock:
            call = FusedCall(form, self.options, self.name, self.warning)
            return self.forms.setdefault(best, call), verdict

    def _settled_as_it_is(self, target: Target, device: Any, *, measure: bool) -> Plan:
        """Returns a plan as `settled` does, with loops as they stand, or as prices say where no clock sees the call."""
        judged = self.judged(target, device)

        def settle(left: frozenset[int]) -> Plan:
            plan = self.plan(judged, left)
            return self._guarded(lambda: settled(plan, device, measure=measure), plan)

        every = frozenset(b.number for b in self.plan(judged).bodies)
        plan = settle(frozenset())
        lost = every - {b.number for b in plan.bodies}
        if lost:
            plan = settle(lost)
        if not plan.bodies or not wanted(self.options):
            return plan
        found = plan
        return self._guarded(lambda: with_bodies_that_pay(found, lambda: settle(every), device, measure=measure), found)

    def plan_here(self) -> Plan:
        """The plan for the devices at hand: as it has run, if it has."""
        found = [p for call in (self, *self.written) for p in (*call.checked.values(), *call.plans.values())]
        platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
        return found[0] if found else self.plan(target_for(platform, self.options))

    def _guarded(self, check: Callable[[], Plan], plan: Plan) -> Plan:
        """The plan that a check leaves; should the check fail, the one before."""
        try:
            return check()
        except FusionError:  # strict, and something would be left to XLA
            raise
        except Exception as error:
            warnings.warn(f"{self.name}: its kernels could not be checked ({type(error).__name__}: {str(error)[:500]}): a bug in "
                          "pallasfuse, please report it. They are used unchecked.", stacklevel=2)  # fmt: skip
            return plan

    def original(self, *args: Any) -> list[Any]:
        """The unfused function on flat arguments."""
        return _compat.eval_jaxpr(self.jaxpr, self.jaxpr.consts, *args)

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.jaxpr.eqns)} equations>"


fused_p = Primitive(FUSED_CALL)
fused_p.multiple_results = True
_compat.require_devices(fused_p)


def bind(call: FusedCall, *args: Any) -> list[Any]:
    """Makes a fused call. JAX looks for the meshes of a program in the jaxprs that its equations have as parameters."""
    return list(fused_p.bind(*args, call=call, jaxpr=call.jaxpr))


def _impl(*args: Any, call: FusedCall, jaxpr: Jaxpr) -> Any:
    if jax.config.jax_disable_jit or jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return call.original(*args)  # JAX looks for the operation that made the NaN, one by one
    return jax.jit(functools.partial(bind, call))(*args)


fused_p.def_impl(_impl)


def _abstract(*avals: Any, call: FusedCall, jaxpr: Jaxpr) -> list[Any]:
    return [_compat.plain_aval(v.aval) for v in call.jaxpr.outvars]


fused_p.def_abstract_eval(_abstract)


def _lower(ctx: Any, *nodes: Any, call: FusedCall, jaxpr: Jaxpr, platform: str) -> Any:
    partitioned = _compat.is_partitioned(ctx)
    runner, call = (_run_sharded, call.as_written()) if partitioned else (None, call)
    at_hand = _compat.device_of(ctx)
    if _compat.has_symbolic_shapes(call.jaxpr) and call.warning.first("shapes"):
        warnings.warn(f"{call.name} is not fused for symbolic shapes: XLA compiles it as it is. Static shapes are fused.",
                      stacklevel=2)  # fmt: skip

    def run_on(target: Target) -> Callable[..., list[Any]]:
        plan = call.plan_on(target, at_hand)
        if runner is None:
            return as_function(plan, _compat.is_exported(ctx))
        return lambda *args: execute(plan, [*call_consts(plan), *args], runner)

    target, scope = _lowerable(target_for(platform, call.options), platform, ctx, call)
    mended = functools.partial(call.mend, target, at_hand)
    with scope:
        return lower_on(
            target, run_on, ctx, nodes, name=call.name, asked=call.options.target is not None, mended=mended
        )


def _run_sharded(plan: Plan, kernel: Kernel, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """As `sharding.run_sharded`, which is imported only where arrays are sharded: it makes plans for pieces."""
    with IMPORTS:
        from pallasfuse.sharding import run_sharded
    return run_sharded(plan, kernel, arrays)


_NOT_EXPORTED = frozenset({"triton"})
"""Targets whose kernels are custom calls that `jax.export` refuses, unless its `disabled_checks` allow them."""


def _lowerable(target: Target, platform: str, ctx: Any, call: FusedCall) -> tuple[Target, AbstractContextManager[Any]]:
    """Returns the target to lower for, and the scope to lower in, also where no GPU is at hand and where a program is exported.

    Kernels are written for one kind of GPU, and are custom calls. Where this is not known, or these are not allowed, a target that
    nobody asked for by name gives way to the one that XLA compiles. One that was asked for is lowered for the device that its plans
    assume.

    Raises:
      TargetError: the target was asked for, and its plans assume a device of another platform.
    """
    known = _compat.names_gpu()
    if not target.writes_kernels or (known and not _compat.is_exported(ctx)):
        return target, nullcontext()
    if call.options.target is None:
        emitters = frozenset().union(*(p.emitters for p in call.plan(call.judged(target, None)).all()))
        if known and _NOT_EXPORTED.isdisjoint(emitters):
            return target, nullcontext()
        if emitters and call.warning.first("device"):
            reason = (
                "jax.export gives no guarantee for kernels of Triton" if known
                else "no GPU is at hand, and kernels are written for one kind"
            )  # fmt: skip
            warnings.warn(f"{call.name} is lowered for {platform} without kernels, and left to XLA: {reason}. Name a target for a "
                          "plan with kernels, as in fuse(..., target='mosaic_gpu').", stacklevel=2)  # fmt: skip
        while target.writes_kernels and target.fallback is not None:
            target = target.fallback
        return target, nullcontext()
    if known:
        return target, nullcontext()
    if platform != "cuda":
        raise TargetError(f"target {target.name!r} writes kernels for one kind of GPU, and none of {platform} is at hand: name one "
                          "by jax.sharding.use_abstract_mesh, with a mesh that has an abstract_device")  # fmt: skip
    return target, _compat.on_abstract_gpu(target.device.kind, target.multiprocessors)


for _platform in PLATFORMS:
    mlir.register_lowering(fused_p, functools.partial(_lower, platform=_platform), platform=_platform)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, call: FusedCall, jaxpr: Jaxpr) -> tuple[list[Any], list[int]]:
    axes = [d if _compat.is_mapped(d) else None for d in dims]
    batched = jax.vmap(call.original, in_axes=axes, out_axes=0)
    traced = jax.make_jaxpr(batched)(*args)
    results = bind(FusedCall(traced, call.options, call.name, call.warning), *args)
    return results, [0] * len(results)


batching.primitive_batchers[fused_p] = _batch


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: FusedCall, jaxpr: Jaxpr) -> Any:
    if call.warning.first("gradient"):
        warnings.warn(f"{call.name}: differentiating a fused function computes the gradient of the original, unfused function: "
                      "it is right, but it does not save memory", stacklevel=2)  # fmt: skip
    filled = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(call.original, tuple(primals), tuple(filled))


ad.primitive_jvps[fused_p] = _jvp


def _transpose(cotangents: Sequence[Any], *args: Any, call: FusedCall, jaxpr: Jaxpr) -> list[Any]:
    """The transpose of the original function, in the arguments that it is linear in and for the results that have cotangents."""
    linear = [ad.is_undefined_primal(a) for a in args]
    given = [n for n, c in enumerate(cotangents) if not isinstance(c, ad.Zero)]

    def original(*unknown: Any) -> list[Any]:
        own = iter(unknown)
        results = call.original(*(next(own) if is_linear else a for a, is_linear in zip(args, linear, strict=True)))
        return [results[n] for n in given]

    structs = [_compat.struct_of(a) for a, is_linear in zip(args, linear, strict=True) if is_linear]
    transposed = iter(jax.linear_transpose(original, *structs)([cotangents[n] for n in given]))
    return [next(transposed) if is_linear else None for is_linear in linear]


ad.primitive_transposes[fused_p] = _transpose


def automatic(mesh: Any) -> Any:
    """An abstract mesh whose explicit axes are automatic."""
    return mesh.update_axis_types(dict.fromkeys(_compat.explicit_axes(mesh), AxisType.Auto))


def call_typed(
    mesh: Any, jaxpr: Jaxpr, types: Sequence[Any] | None, options: FuseOptions, name: str, warning: Once, args: Sequence[Any]
) -> list[Any]:  # fmt: skip
    """Makes a fused call like `call_fused`, for arguments whose types name explicit axes of `mesh`: inside, these are automatic.

    types: of the results, as JAX finds them; None where it finds none (it is not told how to sum over a sharded axis): results are
    then sharded along the axes that they share with the arguments.

    Raises:
      TraceError: a type says that something is not reduced yet, or some mesh axes are manual.
    """
    with IMPORTS:
        from pallasfuse.sharding import result_specs
    given = [jax.typeof(x).sharding.spec for x in args]
    if AxisType.Manual in mesh.axis_types or any(s.unreduced or s.reduced for s in given):
        what = (
            "some axes of their mesh are manual" if AxisType.Manual in mesh.axis_types else "some are not reduced yet"
        )
        raise TraceError(f"{name}: its arguments are typed by the explicit mesh axes {', '.join(_compat.explicit_axes(mesh))}, and "
                         f"{what}: make all axes manual in jax.shard_map, and reduce before the call")  # fmt: skip
    specs = result_specs(jaxpr, given, mesh.shape) if types is None else [t.sharding.spec for t in types]
    if not specs:
        return []

    def run(*inside: Any) -> tuple[Any, ...]:
        return tuple(call_fused(jaxpr, options, name, warning, inside))

    shardings = tuple(NamedSharding(mesh, s) for s in specs)
    return list(auto_axes(run, axes=_compat.explicit_axes(mesh), out_sharding=shardings)(*args))


def call_fused(jaxpr: Jaxpr, options: FuseOptions, name: str, warning: Once, args: Sequence[Any]) -> list[Any]:
    """Bind the primitive. Constants that are still being traced become arguments."""
    closed, consts = _compat.hoist_traced_consts(jaxpr)
    return bind(FusedCall(closed, options, name, warning), *consts, *args)
