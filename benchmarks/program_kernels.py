"""The kernels of a plan, one by one: compiled alone, and what XLA makes of the same equations, beside what was predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import pallasfuse as pf
from benchmarks.program_timing import ratio, take_turns
from benchmarks.program_variants import Variant, compiled
from benchmarks.workloads.registry import Random, draw
from pallasfuse import _compat, device
from pallasfuse.execution import run_phases
from pallasfuse.loop_calls import KernelOfLoop
from pallasfuse.price.kernel import price_kernel
from pallasfuse.price.terms import Price
from pallasfuse.targets import TRITON

Row = dict[str, Any]

MOST_KERNELS = 12
"""Kernels of a plan that are measured alone; equal ones count once."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel of a plan, compiled alone, and what XLA makes of the same equations."""

    row: Row
    inputs: tuple[Random | int, ...]
    """For each input the position of the program's argument, or the array to draw."""
    alone: Variant
    xla: Variant


def device_at_hand() -> device.Device:
    """The numbers of the device that programs are measured on."""
    return device.find(jax.devices()[0].device_kind, "gpu" if jax.default_backend() == "gpu" else "cpu")


def kernel_cases(plan: pf.Plan, *, from_arguments: bool, known: Sequence[KernelCase], entry: bool) -> list[KernelCase]:
    """Every distinct kernel of a plan, loops that are one kernel among them, compiled alone and as XLA compiles the same equations.

    known: cases of another plan of the same program, which are left out. entry: keep the HLO of XLA's.
    """
    seen = {case.row["signature"] for case in known}
    found: dict[str, KernelCase] = {}
    for kernel in plan.kernels:
        key = signature(plan, kernel)
        if key in found:
            found[key].row["count"] += 1
        elif key not in seen and len(found) < MOST_KERNELS:
            found[key] = kernel_case(plan, kernel, key, from_arguments=from_arguments, entry=entry)
    for equation in plan.converted.jaxpr.eqns:
        loop = equation.params.get("of")
        if isinstance(loop, KernelOfLoop) and repr(loop) in found:
            found[repr(loop)].row["count"] += 1
        elif isinstance(loop, KernelOfLoop) and repr(loop) not in seen:
            found[repr(loop)] = loop_case(plan, equation, from_arguments=from_arguments, entry=entry)
    return list(found.values())


def signature(plan: pf.Plan, kernel: pf.Kernel) -> str:
    """Returns a key that is equal for kernels of equal layers."""
    variable = plan.converted.variable
    shapes = [str(variable[n].aval) for n in (*kernel.group.inputs, *(o.name for o in kernel.group.outputs))]
    numbers = (*kernel.axes.values(), *kernel.tiles.values(), kernel.flops)
    return repr((*shapes, kernel.strategy, str(kernel.schedule), kernel.target.name, numbers))


def predicted(kernel: pf.Kernel) -> Price:
    """The kernel's price on the device at hand, also where it was planned for another one of the kind."""
    here = device_at_hand()
    if kernel.target.device == here or kernel.target.platform != here.platform:
        return kernel.price
    return price_kernel([(phase.program, phase.target.on(here)) for phase in kernel.phases])


def kernel_case(plan: pf.Plan, kernel: pf.Kernel, key: str, *, from_arguments: bool, entry: bool) -> KernelCase:
    """A kernel compiled alone, on the program's own arguments where it reads them and on random values elsewhere."""
    converted = plan.converted
    names = list(dict.fromkeys(kernel.reads))
    variables = [converted.variable[n] for n in names]
    outputs = [converted.variable[o.name] for o in kernel.group.outputs]
    # a jaxpr without constants takes the program's leaves in order
    invars = list(converted.jaxpr.invars) if from_arguments else []
    inputs = [invars.index(v) if v in invars else described(v.aval) for v in variables]
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]

    def alone(*arrays: Any) -> Any:
        return run_phases(kernel.phases, dict(zip(names, arrays, strict=True)))

    def reference(*arrays: Any) -> Any:
        return evaluate(converted.jaxpr, dict(zip(variables, arrays, strict=True)), outputs)

    price = predicted(kernel)
    row: Row = {
        "name": kernel.name, "count": 1, "strategy": kernel.strategy, "target": kernel.target.name, "signature": key,
        "axes": dict(kernel.axes), "schedule": str(kernel.schedule), "phases": len(kernel.phases),
        "inputs": [str(v.aval) for v in variables], "outputs": [str(v.aval) for v in outputs],
        "flops": kernel.flops, "bytes_read": kernel.bytes_read, "bytes_written": kernel.bytes_written,
        "predicted_us": price.us, "limit": price.limit, "terms": {t.name: t.us for t in price.terms if t.us > 0},
        "predicted_xla_us": kernel.replaced.us, "visited_share": kernel.visited_share, "declined": list(kernel.declined),
    }  # fmt: skip
    return KernelCase(
        row,
        tuple(inputs),
        compiled("alone", lambda: jax.jit(alone).lower(*structs)),
        compiled("xla", lambda: jax.jit(reference).lower(*structs), entry=entry),
    )


def loop_case(plan: pf.Plan, equation: Any, *, from_arguments: bool, entry: bool) -> KernelCase:
    """A loop that is one kernel, compiled alone, and the loop as XLA runs it, on arguments as those of `kernel_case`."""
    loop, here = equation.params["of"], device_at_hand()
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
    price = price_kernel([(loop.kernel, TRITON.on(here))]) if here.platform == "gpu" else loop.price
    row: Row = {
        "name": loop.kernel.name, "count": 1, "strategy": "recurrence", "target": "triton", "signature": repr(loop),
        "trips": loop.trips, "schedule": str(loop.kernel.grid), "phases": 1,
        "inputs": [str(v.aval) for v in equation.invars], "outputs": [str(v.aval) for v in equation.outvars],
        "predicted_us": price.us, "limit": price.limit, "terms": {t.name: t.us for t in price.terms if t.us > 0},
        "predicted_xla_us": loop.price_of_xla(here).us, "declined": [],
    }  # fmt: skip
    invars = list(plan.converted.jaxpr.invars) if from_arguments else []
    return KernelCase(
        row,
        tuple(invars.index(v) if v in invars else described(v.aval) for v in equation.invars),
        compiled("alone", lambda: jax.jit(loop.by_kernel).lower(*structs)),
        compiled("xla", lambda: jax.jit(loop.by_xla).lower(*structs), entry=entry),
    )


def described(aval: Any) -> Random:
    """Values for an intermediate: of a type and shape."""
    return Random(tuple(aval.shape), jnp.dtype(aval.dtype), 0.5)


def evaluate(jaxpr: Any, known: Mapping[Any, Any], wanted: Sequence[Any]) -> list[Any]:
    """The values of some variables of a jaxpr, from those of others that they depend on."""
    values, maker = dict(known), {v: e for e in jaxpr.eqns for v in e.outvars}
    needed: set[int] = set()
    stack = [v for v in wanted if v not in values]
    while stack:
        equation = maker.get(stack.pop())
        if equation is None or id(equation) in needed:
            continue
        needed.add(id(equation))
        stack += [v for v in equation.invars if not hasattr(v, "val") and v not in values]
    for equation in jaxpr.eqns:
        if id(equation) in needed:
            results = _compat.bind(equation, [a.val if hasattr(a, "val") else values[a] for a in equation.invars])
            values |= {v: x for v, x in zip(equation.outvars, results, strict=True) if v not in known}
    return [values[v] for v in wanted]


def measure_kernel(case: KernelCase, leaves: Sequence[Any], *, names: bool) -> Row:
    """A kernel and XLA's code for the same equations, in turn."""
    arrays = [leaves[s] if isinstance(s, int) else draw(s, n) for n, s in enumerate(case.inputs)]
    contenders = [case.xla.contender, case.alone.contender]
    take_turns(contenders, arrays, rounds=2, patient=False)
    left_out = ("signature",) if names else ("signature", "terms", "declined")
    row = {k: v for k, v in case.row.items() if k not in left_out}
    for variant, contender in zip((case.xla, case.alone), contenders, strict=True):
        row[variant.label] = contender.samples.row(names=names) | variant.row
        row[variant.label] |= {"reason": contender.reason} if contender.reason else {}
        row[variant.label] |= {"hlo": variant.entry} if variant.entry else {}
    found = ratio(contenders[0].samples, contenders[1].samples)
    return row | ({} if found is None else {"speedup": found})
