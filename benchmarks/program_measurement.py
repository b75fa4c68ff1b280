"""One program of `benchmarks/workloads`: compiled in every way, then measured, with every kernel of its plan.

Compiling comes first and needs no device memory (`prepare`); measuring is apart (`measure`), so that many programs can be compiled
at the same time and are measured one by one. What asks the clock itself, the check and tuning, belongs to measuring.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pallasfuse as pf
from benchmarks.program_kernels import KernelCase, device_at_hand, kernel_cases, measure_kernel
from benchmarks.program_report import SUSPECT
from benchmarks.program_timing import Contender, ratio, reason_of, take_turns
from benchmarks.program_variants import (
    TUNE_S,
    Fuse,
    Variant,
    checked,
    compiled,
    fuse_with,
    has_check,
    has_tune,
    lowered,
    prime,
    step,
    tuned,
    whole,
)
from benchmarks.workloads.registry import Built, Program, Size, build
from pallasfuse.ir.loop_program import unknown_in
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import price_xla
from pallasfuse.verification.reference import float64_results, largest_bytes

FOLDER = Path(__file__).resolve().parent.parent
"""Source lines are named as seen from here: results are read on other machines."""

Row = dict[str, Any]

EXACT_BYTES, EXACT_FLOPS = 1 << 27, 5e9
"""Programs up to this size (their largest value in float64; products) are compared with float64 too: a sample, of all kinds."""
EXACT_BYTES_OF_DEVICE, EXACT_FLOPS_OF_DEVICE = 1 << 33, 5e13
"""The same for programs whose results differ from those of `jax.jit`: these are computed on the device, as large as they are."""
PRIME_UNTIL_S = 40.0
"""A program that took longer to compile is not compiled for its check beforehand: it would be given up."""
CONTROL_FLOW = frozenset({"while", "scan", "cond"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings for measuring programs: the ways to run them, and the kernels that are measured alone.

    full: also checked and tuned, where this version can; without, `jax.jit` and fused without check, with the HLO of XLA's.
    kernels: each one alone. all_kernels: those, too, that are not predicted to be faster than XLA's. folder: for what is found
    out on a clock. primed: checks are compiled beforehand, for the compiler's cache.
    """

    size: Size
    folder: str
    target: str | None = None
    full: bool = True
    tune: bool = True
    tune_s: float = TUNE_S
    kernels: bool = True
    all_kernels: bool = False
    primed: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program that is compiled: by `jax.jit`, and fused without check."""

    built: Built
    row: Row
    variants: tuple[Variant, ...]
    kernels: tuple[KernelCase, ...] = field(default=())


def prepare(entry: Program, settings: Settings) -> Prepared:
    """The program's variants that need no clock, compiled for the device at hand.

    Raises:
      NotInstalledError: a package is missing.
    """
    start = time.perf_counter()
    built = build(entry, settings.size)
    row: Row = {"name": entry.name, "group": entry.group, "device": jax.devices()[0].device_kind}
    fuse = fuse_with(settings.target, check=False)
    hlo = not settings.full
    jit = compiled("jit", lambda: lowered(built.function, built.structs), entry=hlo)
    cases: list[KernelCase] = []
    try:
        plan = planned(built, fuse, row)
        cases = measurable(built, plan, settings)
    except Exception as failure:
        return Prepared(built, row, (jit, Variant("fused", reason=reason_of(failure))))
    fused = compiled("fused", lambda: lowered(whole(built, fuse), built.structs), [jit])
    if settings.primed and time.perf_counter() - start < PRIME_UNTIL_S:
        prime(built, settings.target, f"{settings.folder}/primed")
    return Prepared(built, row, (jit, fused), tuple(cases))


def planned(built: Built, fuse: Fuse, row: Row) -> pf.Plan:
    """The plan. Adds to the row what it says, and how long it took."""
    function, arguments = step(built)
    start = time.perf_counter()
    traced = fuse(function).trace(*arguments)
    row["trace_s"] = round(time.perf_counter() - start, 4)
    plan = traced.fuse().tile().plan
    row["plan_s"] = round(time.perf_counter() - start, 4)
    row["planned_for"] = plan.target.device.kind
    row["kernels_planned"] = len(plan.kernels)
    row["fallbacks"] = list(dict.fromkeys(f"{f.operation}: {f.reason}"[:160] for f in plan.fallbacks))[:10]
    row["equations"] = len(plan.converted.jaxpr.eqns)
    row["control_flow"] = sorted({e.primitive.name for e in plan.converted.jaxpr.eqns} & CONTROL_FLOW)
    if built.step is None:  # the plan is that of the whole program
        written = convert(traced.call.jaxpr).program  # XLA gets that, and no other form of it
        row["predicted_xla_us"] = price_xla(written, device_at_hand()).us
        row["priced"] = not unknown_in(written)
        row["rewritings"] = [str(r).replace(f"{FOLDER}/", "")[:400] for r in plan.rewritings]
    return plan


def measurable(built: Built, plan: pf.Plan, settings: Settings) -> list[KernelCase]:
    """The kernels that are measured alone."""
    if not settings.kernels:
        return []
    from_arguments, hlo = built.step is None, not settings.full
    cases = kernel_cases(plan, from_arguments=from_arguments, known=(), entry=hlo)
    if settings.all_kernels:
        function, arguments = step(built)
        every = fuse_with(settings.target, check=False, price=False)(function).trace(*arguments).fuse().tile().plan
        more = kernel_cases(every, from_arguments=from_arguments, known=cases, entry=hlo)
        for case in more:
            case.row["not_chosen"] = True
        cases += more
    return cases


def measure(prepared: Prepared, settings: Settings) -> Row:
    """The row of a program: every variant, the difference from `jax.jit`, every kernel alone."""
    built, variants, row = prepared.built, list(prepared.variants), dict(prepared.row)
    notes: dict[str, Row] = {}
    if settings.full:
        if has_check():
            variant, notes["checked"] = checked(built, settings.target, f"{settings.folder}/checked", variants)
            variants.append(variant)
        if has_tune() and settings.tune:
            folder = f"{settings.folder}/tuned"
            variant, notes["tuned"] = tuned(built, settings.target, folder, variants, settings.tune_s)
            variants.append(variant)
    leaves = jax.tree.leaves(jax.block_until_ready(built.arrays()))
    row |= measured_variants(variants, notes, leaves, settings)
    differs = any(v.get("error", 0.0) > SUSPECT for v in row.values() if isinstance(v, dict))
    row["error64"] = exact_errors(built, leaves, row.pop("results"), differs=differs)
    row["kernels"] = [measure_kernel(case, leaves, names=not settings.full) for case in prepared.kernels]
    return row


def measured_variants(
    variants: Sequence[Variant], notes: dict[str, Row], leaves: Sequence[Any], settings: Settings
) -> Row:
    """The part of a row that is measured of whole programs, and the results. Equal programs are measured once."""
    contenders = {v.label: v.contender for v in variants if not v.same_as}
    take_turns(list(contenders.values()), leaves)
    found: Row = {"speedup": {}, "results": {}}
    jit = contenders["jit"]
    for variant in variants:
        contender: Contender = contenders[variant.same_as or variant.label]
        own = contender.samples.row(names=not settings.full) | variant.row | notes.get(variant.label, {})
        own |= {"reason": contender.reason} if contender.reason else {}
        own |= {"hlo": variant.entry} if variant.entry else {}
        if variant.label != "jit":
            speedup = ratio(jit.samples, contender.samples)
            found["speedup"] |= {} if speedup is None else {variant.label: speedup}
            if jit.result is not None and contender.result is not None:
                own["error"] = difference(contender.result, jit.result)
        if contender.result is not None and not variant.same_as:
            found["results"][variant.label] = contender.result
        found[variant.label] = own
    if "error" in found.get("fused", {}):
        found["error"] = found["fused"]["error"]
    lower_s = {v.label: v.lower_s for v in variants}
    if lower_s.get("checked") and lower_s.get("fused"):
        found["checked"]["check_s"] = round(max(0.0, lower_s["checked"] - lower_s["fused"]), 3)
    return found


def exact_errors(built: Built, leaves: Sequence[Any], results: Row, *, differs: bool) -> Row | None:
    """The difference of each variant from the program in float64; None: too large, or not possible.

    Small programs are computed on the host; larger ones on the device, where their variants differ (`differs`).
    """
    if not results:
        return None
    try:
        jaxpr = pf.fuse(built.function).trace(*built.structs).converted.jaxpr
        largest, flops = largest_bytes(jaxpr), flops_of_products(jaxpr)
        values = [np.asarray(x) for x in (*jaxpr.consts, *leaves)]
        if largest <= EXACT_BYTES and flops <= EXACT_FLOPS:
            with jax.default_device(jax.devices("cpu")[0]):
                truth = float64_results(jaxpr, values)
        elif differs and largest <= EXACT_BYTES_OF_DEVICE and flops <= EXACT_FLOPS_OF_DEVICE:
            truth = float64_results(jaxpr, values)
        else:
            return None
    except Exception:  # random bits and other things that have no float64 counterpart
        return None
    return {label: difference(result, truth) for label, result in results.items()}


def flops_of_products(jaxpr: Any) -> float:
    """The operations of the matrix products at the top of a jaxpr; those of loops do not count."""
    found = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            found += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[d] for d in summed)
    return found


def difference(results: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest value, over all leaves of finite numbers. NaN matches NaN."""
    worst = 0.0
    for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(x).reshape(-1)[: 1 << 24].astype(np.float64) for x in (got, want))
        both = np.isfinite(b)
        if not np.array_equal(np.isfinite(a), both):
            return math.inf
        if both.any():
            worst = max(worst, float(np.abs(a[both] - b[both]).max() / max(np.abs(b[both]).max(), 1e-30)))
    return worst
