"""One program of `benchmarks/workloads`: compiled with and without fusion, then measured, with every kernel of its plan.

Compiling comes first and needs no device memory (`prepare`); measuring is apart (`measure`), so that many programs can be compiled
at the same time and are measured one by one. On a GPU a time is the sum of kernel times (CUPTI), with the wall time of calls back
to back beside it; on a CPU it is the wall time.
"""

import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasfuse as pf
from benchmarks.workloads.registry import Built, Program, Random, Size, build, draw
from pallasfuse import _compat
from pallasfuse.execution import run_phases

ROUNDS, MOST_ROUND_S = 3, 0.4
"""Rounds in which the implementations take turns; about how long one implementation may take in a round."""
MOST_KERNELS = 12
"""Kernels of a plan that are measured alone; equal ones count once."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a program: compiled, or the reason why it is not."""

    label: str
    call: Any = None
    temporary_bytes: int | None = None
    compile_s: float = 0.0
    reason: str = ""
    entry: str = ""
    """The entry computation of the optimised HLO: what is launched, with shapes."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel of a plan, compiled alone, and what XLA makes of the same equations."""

    row: Row
    inputs: tuple[Random | int, ...]
    """Of each input: the position of the program's argument, or what to draw."""
    alone: Variant
    xla: Variant


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program whose variants are compiled."""

    built: Built
    row: Row
    variants: tuple[Variant, ...]
    kernels: tuple[KernelCase, ...] = field(default=())


def reason_of(failure: BaseException) -> str:
    """The kind of an error and the beginning of its message, in one line."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


def fuse_with(target: str | None, *, check: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`pf.fuse` for a target, with or without the check on the clock, also where this version has none."""
    fields: dict[str, Any] = {"check": check} if has_check() else {}
    return functools.partial(pf.fuse, options=pf.FuseOptions(target=target, **fields))


def has_check() -> bool:
    """This version checks plans on a clock."""
    return any(f.name == "check" for f in dataclasses.fields(pf.FuseOptions))


def compiled(label: str, make: Callable[[], Any]) -> Variant:
    """The variant that `make` lowers."""
    start = time.perf_counter()
    try:
        executable = make().compile()
    except Exception as failure:  # any program may fail in any way: the row says how
        return Variant(label, reason=reason_of(failure), compile_s=time.perf_counter() - start)
    try:
        temporary = int(executable.memory_analysis().temp_size_in_bytes)
    except Exception:
        temporary = None
    return Variant(label, executable, temporary, time.perf_counter() - start, entry=entry_text(executable))


def entry_text(executable: Any) -> str:
    """The entry computation of the optimised HLO, without metadata and the settings of backends."""
    try:
        _, _, text = str(executable.as_text()).partition("\nENTRY ")
    except Exception:
        return ""
    lines = [re.sub(r", (metadata|backend_config|frontend_attributes)=\{.*", "", x.strip()) for x in text.splitlines()]
    return "\n".join(x for x in lines if " = " in x)[:20_000]


def prepare(entry: Program, size: Size, target: str | None = None, *, kernels: bool = True) -> Prepared:
    """The program's variants, compiled for the device at hand.

    Raises:
      NotInstalledError: a package is missing.
    """
    built = build(entry, size)
    structs = built.structs
    row: Row = {"name": entry.name, "group": entry.group, "size": size, "device": jax.devices()[0].device_kind}
    fuse = fuse_with(target, check=False)
    variants = [compiled("jit", lambda: lowered(built.function, structs))]
    try:
        plan, lower = planned(built, fuse, row)
        variants.append(compiled("fused", lower))
        cases = kernel_cases(plan, from_arguments=built.step is None) if kernels else []
    except Exception as failure:
        variants.append(Variant("fused", reason=reason_of(failure)))
        cases = []
    return Prepared(built, row, tuple(variants), tuple(cases))


def lowered(function: Callable[..., Any], structs: tuple[Any, ...]) -> Any:
    """A function of the leaves of its arguments, lowered."""
    leaves, tree = jax.tree.flatten(structs)
    return jax.jit(lambda *flat: function(*jax.tree.unflatten(tree, flat))).lower(*leaves)


def planned(built: Built, fuse: Any, row: Row) -> tuple[pf.Plan, Callable[[], Any]]:
    """The plan, and what lowers the fused program. Adds to the row."""
    step, arguments = (built.function, built.structs) if built.step is None else (built.step[0], built.step_structs)
    start = time.perf_counter()
    tiled = fuse(step).trace(*arguments).fuse().tile()
    row["plan_s"] = round(time.perf_counter() - start, 4)
    row["fallbacks"] = [f"{f.operation}: {f.reason}"[:160] for f in tiled.plan.fallbacks][:20]
    row["equations"] = len(tiled.plan.converted.jaxpr.eqns)
    if built.fused is None:
        return tiled.plan, lambda: tiled.lower().lowered
    whole = built.fused(fuse)
    return tiled.plan, lambda: lowered(whole, built.structs)


def kernel_cases(plan: pf.Plan, *, from_arguments: bool) -> list[KernelCase]:
    """Every distinct kernel of a plan, compiled alone and as XLA compiles the same equations."""
    found: dict[Any, KernelCase] = {}
    for kernel in plan.kernels:
        key = signature(plan, kernel)
        if key in found:
            found[key].row["count"] += 1
        elif len(found) < MOST_KERNELS:
            found[key] = kernel_case(plan, kernel, from_arguments=from_arguments)
    return list(found.values())


def signature(plan: pf.Plan, kernel: pf.Kernel) -> Any:
    """Equal for kernels of equal layers."""
    variable = plan.converted.variable
    shapes = [str(variable[n].aval) for n in (*kernel.group.inputs, *(o.name for o in kernel.group.outputs))]
    return (*shapes, kernel.strategy, *kernel.axes.values(), *kernel.tiles.values(), round(kernel.predicted_ms, 9))


def kernel_case(plan: pf.Plan, kernel: pf.Kernel, *, from_arguments: bool) -> KernelCase:
    """A kernel compiled alone, on the program's own arguments where it reads them and on random values elsewhere."""
    converted = plan.converted
    variables = [converted.variable[n] for n in kernel.group.inputs]
    outputs = [converted.variable[o.name] for o in kernel.group.outputs]
    # a jaxpr without constants takes the program's leaves in order
    invars = list(converted.jaxpr.invars) if from_arguments else []
    inputs = [invars.index(v) if v in invars else described(v.aval) for v in variables]
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
    names = list(kernel.group.inputs)

    def alone(*arrays: Any) -> Any:
        return run_phases(kernel.phases, dict(zip(names, arrays, strict=True)))

    def reference(*arrays: Any) -> Any:
        return evaluate(converted.jaxpr, dict(zip(variables, arrays, strict=True)), outputs)

    row: Row = {
        "name": kernel.name, "count": 1, "strategy": kernel.strategy, "target": kernel.target.name,
        "axes": dict(kernel.axes), "tiles": dict(kernel.tiles), "schedule": str(kernel.schedule), "phases": len(kernel.phases),
        "inputs": [str(v.aval) for v in variables], "outputs": [str(v.aval) for v in outputs],
        "flops": kernel.flops, "bytes_read": kernel.bytes_read, "bytes_written": kernel.bytes_written,
        "predicted_us": 1e3 * kernel.predicted_ms, "predicted_xla_us": 1e3 * kernel.unfused_ms,
        "visited_share": kernel.visited_share, "declined": list(kernel.declined),
    }  # fmt: skip
    cases = [
        compiled(label, lambda f=f: jax.jit(f).lower(*structs)) for label, f in (("alone", alone), ("xla", reference))
    ]
    return KernelCase(row, tuple(inputs), *cases)


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


@dataclass(slots=True)
class Samples:
    """Times of one variant, in microseconds."""

    total: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    kernels: list[list[tuple[str, float]]] = field(default_factory=list)

    @property
    def row(self) -> Row:
        if not self.total:
            return {}
        found: Row = {
            "us": statistics.median(self.total),
            "least_us": min(self.total),
            "wall_us": statistics.median(self.wall),
        }
        if self.kernels:
            by_launch = zip(*self.kernels, strict=True)
            found["kernels"] = [
                [launch[0][0], round(statistics.median(t for _, t in launch), 3)] for launch in by_launch
            ]
            found["launches"] = len(found["kernels"])
        return found


def sample(call: Any, arguments: Sequence[Any], samples: Samples, least_s: float) -> None:
    """One round: several calls, as many as fit."""
    calls = max(1, min(10, int(MOST_ROUND_S / max(least_s, 1e-5))))
    if jax.default_backend() != "gpu":
        for _ in range(calls):
            start = time.perf_counter()
            jax.block_until_ready(call(*arguments))
            us = 1e6 * (time.perf_counter() - start)
            samples.total.append(us)
            samples.wall.append(us)
        return
    calls = min(calls, 4)
    for launches in kernel_times(call, arguments, calls):
        # a call whose launches differ from the first one's is not comparable launch by launch
        if not samples.kernels or [n for n, _ in launches] == [n for n, _ in samples.kernels[0]]:
            samples.kernels.append(launches)
        samples.total.append(sum(us for _, us in launches))
    start = time.perf_counter()
    jax.block_until_ready([call(*arguments) for _ in range(calls)])
    samples.wall.append(1e6 * (time.perf_counter() - start) / calls)


def kernel_times(call: Any, arguments: Sequence[Any], calls: int) -> list[list[tuple[str, float]]]:
    """Of each call, the kernels that it launched, with their microseconds."""
    from jax.experimental.mosaic.gpu import profiler

    try:
        _, measured = profiler.measure(call, aggregate=False, iterations=calls)(*arguments)
        found = [measured] if calls == 1 else measured
    except RuntimeError as failure:
        if "kernel" not in str(failure).lower() or calls == 1:
            raise
        found = [
            profiler.measure(call, aggregate=False)(*arguments)[1] for _ in range(2)
        ]  # the calls launch differently
    return [[(name, 1e3 * ms) for name, ms in launches or []] for launches in found or []]


def take_turns(
    variants: Sequence[Variant], arguments: Sequence[Any], rounds: int = ROUNDS
) -> tuple[list[Row], list[Any]]:
    """Times and results of the variants, which are called in turn."""
    samples, results, rows, least = [], [], [], []
    for variant in variants:
        samples.append(Samples())
        rows.append({"reason": variant.reason} if variant.call is None else {})
        results.append(None)
        least.append(math.inf)
        if variant.call is None:
            continue
        try:
            results[-1] = jax.block_until_ready(variant.call(*arguments))
            start = time.perf_counter()
            jax.block_until_ready(variant.call(*arguments))
            least[-1] = time.perf_counter() - start
        except Exception as failure:
            rows[-1] = {"reason": reason_of(failure)}
    for n in range(rounds):
        for at in range(len(variants)) if n % 2 == 0 else reversed(range(len(variants))):
            if not rows[at]:
                try:
                    sample(variants[at].call, arguments, samples[at], least[at])
                except Exception as failure:
                    rows[at] = {"reason": reason_of(failure)}
    return [r | s.row | described_variant(v) for r, s, v in zip(rows, samples, variants, strict=True)], results


def described_variant(variant: Variant) -> Row:
    """Its memory, the time to compile it, and on a GPU what XLA launches."""
    row: Row = {"temporary_bytes": variant.temporary_bytes, "compile_s": round(variant.compile_s, 3)}
    return row | ({"hlo": variant.entry} if variant.label in ("jit", "xla") and jax.default_backend() == "gpu" else {})


def difference(results: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest value, over all leaves of finite numbers. NaN matches NaN."""
    worst = 0.0
    for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(x).reshape(-1)[: 1 << 24].astype(np.float32) for x in (got, want))
        both = np.isfinite(b)
        if not np.array_equal(np.isfinite(a), both):
            return math.inf
        if both.any():
            worst = max(worst, float(np.abs(a[both] - b[both]).max() / max(np.abs(b[both]).max(), 1e-30)))
    return worst


def measure(prepared: Prepared) -> Row:
    """The row of a program: every variant, the difference from `jax.jit`, every kernel alone."""
    leaves = jax.tree.leaves(jax.block_until_ready(prepared.built.arrays()))
    rows, results = take_turns(prepared.variants, leaves)
    row = prepared.row | {v.label: found for v, found in zip(prepared.variants, rows, strict=True)}
    if all(r is not None for r in results):
        row["error"] = difference(results[1], results[0])
    del results
    row["kernels"] = [measure_kernel(case, leaves) for case in prepared.kernels]
    return row


def measure_kernel(case: KernelCase, leaves: Sequence[Any]) -> Row:
    """A kernel and XLA's code for the same equations, in turn."""
    arrays = [leaves[s] if isinstance(s, int) else draw(s, n) for n, s in enumerate(case.inputs)]
    (alone, xla), _ = take_turns((case.alone, case.xla), arrays, rounds=2)
    return case.row | {"alone": alone, "xla": xla}
