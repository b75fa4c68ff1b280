"""`verify`: is a fused function the function that it replaces? Tested over finite fields, and measured in floating point."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasfuse.accuracy import last_place, special_differences
from pallasfuse.api import FusedFunction
from pallasfuse.errors import PallasfuseError
from pallasfuse.execution import emit
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.pipeline import parts_of, prove_plan
from pallasfuse.plan import Plan
from pallasfuse.proof import Counterexample, Proof, short_kernels
from pallasfuse.stages import Tiled
from pallasfuse.verification.reference import float64_results, largest_bytes, noise, sensitivity

_MOST_BYTES = 1 << 31
_MOST_BYTES_OF_LOOPS = 1 << 27
"""The bytes of the largest value of a program whose loops are run twice, without the device that they are planned for."""
_NEAR, _SMALL = 1e-6, 1e-12
"""Results of such programs that differ by less, relative to the largest one, differ by the order of sums; and the least size that
this is relative to."""
_TIMES_PLAIN, _PLUS_ULPS, _PLUS_SHARE = 32.0, 256.0, 0.02
"""A fused result that is further off than so many times the plain error, and so many ulps or this share of the largest value, is
wrong, not inaccurate: a lost tile or a wrong row is off by its own size."""
_TIMES_MOVED = 8.0
"""Nor is it wrong for being off by so many times what rounding the arguments changes."""
_NOWHERE = np.zeros(())
_FEW = 0.01
"""The share of integers and booleans that rounding may change, where they are made from floats."""


@dataclass(frozen=True, slots=True)
class OutputError:
    """Errors of one output against float64, in units in the last place of the output's largest magnitude."""

    output: str
    dtype: str
    fused_max_ulp: float
    fused_rms_ulp: float
    plain_max_ulp: float
    plain_rms_ulp: float

    def __str__(self) -> str:
        return (f"{self.output} ({self.dtype}): fused max {self.fused_max_ulp:.3g} rms {self.fused_rms_ulp:.3g} ulp, "
                f"unfused max {self.plain_max_ulp:.3g} rms {self.plain_rms_ulp:.3g} ulp")  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The result of `verify`. `str(report)` is meant to be read.

    `equivalent`: every stage of the derivation passed, and the compiled function agrees with float64 where it was run. It is
    False both when a counterexample was found and when something could not be tested (`proof.uncovered`).
    """

    name: str
    equivalent: bool
    plan: Plan
    proof: Proof
    errors: tuple[OutputError, ...]
    not_measured: str
    counterexample: Counterexample | None

    @property
    def bound(self) -> float:
        """The probability that a plan which is not equivalent would have passed, at most."""
        return self.proof.bound

    def __str__(self) -> str:
        proof = self.proof
        verdict = "equivalent" if self.equivalent else "NOT equivalent" if self.counterexample else "not established"
        lines = [f"{self.name} on target {self.plan.target.name}: {verdict}"]
        if self.counterexample is not None:
            lines.append(f"  counterexample: {self.counterexample}")
        else:
            lines.append(
                f"  wrong with probability at most {proof.bound:.1e} ({proof.trials} tests over finite fields)"
            )
        extents = ", ".join(f"{a} = {n}" for a, n in proof.extents.items())
        lines.append(f"  tested with {extents}" if extents else "  nothing to test: no axes")
        lines += [f"  stage: {s}" for s in proof.stages]
        lines += [f"  opaque (any function would do): {', '.join(proof.opaque)}"] if proof.opaque else []
        lines += [f"  given: {', '.join(proof.assumed)}"] if proof.assumed else []
        lines += [f"  not covered: {u}" for u in proof.uncovered]
        lines += [f"  error of {e}" for e in self.errors]
        lines += [f"  floating point not measured: {self.not_measured}"] if self.not_measured else []
        lines += [f"  left to XLA: {f}" for f in self.plan.fallbacks]
        lines += [f"  condition: {c}" for c in self.plan.conditions]
        return "\n".join(lines)


def verify(
    fused: FusedFunction[..., Any],
    *args: Any,
    target: str | None = None,
    delta: float = 1e-9,
    seed: int = 0,
    **kwargs: Any,
) -> Report:
    """Test that `fused` computes what its original function does, for arguments of these shapes and types.

    Args:
      fused: a function from `pallasfuse.fuse`.
      *args, **kwargs: as for a call: arrays, whose values are used to measure the error, or `jax.ShapeDtypeStruct`s, for
        which values are drawn.
      target: plan for another target than the function's own. It is run only where its device is present.
      delta: the probability with which a wrong plan may pass (Mirage, theorem 3).
      seed: of the tests and of drawn values.

    Raises:
      TypeError: `fused` is not a fused function.
      TraceError: it cannot be traced with these arguments.
    """
    if not isinstance(fused, FusedFunction):
        raise TypeError(f"pallasfuse.verify takes a function from pallasfuse.fuse, got {type(fused).__name__}")
    if not 0 < delta < 1:
        raise ValueError(f"verify: delta is a probability between 0 and 1, got {delta!r}")
    tiled = fused.trace(*args, **kwargs).fuse(target).tile()
    plan = tiled.plan
    proof = _proved(plan, delta, seed)
    leaves = fused.leaves(args, kwargs)
    measured = _measure(tiled, leaves, seed)
    if measured.excepted or measured.unseen:
        proof = replace(proof, holds=False, uncovered=(*proof.uncovered, *measured.excepted, *measured.unseen))
    counterexample = proof.counterexample or measured.counterexample
    equivalent = proof.holds and counterexample is None
    return Report(
        tiled.traced.call.name, equivalent, plan, proof, measured.errors, measured.not_measured, counterexample
    )


def _proved(plan: Plan, delta: float, seed: int) -> Proof:
    """The proof of a plan, and of the bodies of its loops."""
    proof = prove_plan(plan, delta=delta, seed=seed)
    for body in plan.bodies:
        proof = proof.and_of(body.what, _proved(body.plan, delta, seed))
    return proof


@dataclass(frozen=True, slots=True)
class _Measured:
    """The results of running a plan and its original.

    excepted: differences that the exceptions of the plan allow. unseen: what no run has shown, and no proof covers.
    """

    errors: tuple[OutputError, ...] = ()
    not_measured: str = ""
    counterexample: Counterexample | None = None
    excepted: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def _measure(tiled: Tiled, leaves: Sequence[Any], seed: int) -> _Measured:
    """Run the plan and the original, and compare both with float64; where that cannot be, what loops have become of."""
    found = _measure_calls(tiled, leaves, seed)
    if not tiled.plan.loops or not found.not_measured or found.counterexample is not None:
        return found
    apart = _compare_loops(tiled, leaves, seed)
    if isinstance(apart, str):
        return replace(found, unseen=(f"what is computed before and after loops that are kernels: {apart}",))
    return replace(found, counterexample=apart)


def _measure_calls(tiled: Tiled, leaves: Sequence[Any], seed: int) -> _Measured:
    """Run the plan and the original on the device, and compare both with float64."""
    plan, call = tiled.plan, tiled.traced.call
    jaxpr = tiled.traced.converted.jaxpr
    if jaxpr.effects:
        return _Measured(not_measured="the function has side effects")
    platform = {"gpu": ("gpu", "cuda", "rocm"), "tpu": ("tpu",), "cpu": ("cpu", "gpu", "cuda", "rocm", "tpu")}
    if jax.default_backend() not in platform[plan.target.platform]:
        return _Measured(not_measured=f"no device for target {plan.target.name}")
    needed = largest_bytes(jaxpr)
    if needed > _MOST_BYTES:
        reason = f"the unfused program needs {needed / 2**30:.1f} GiB for one value in float64; the kernels ran over short axes"
        return _Measured(not_measured=reason, counterexample=_short_run(plan, seed))
    arrays = [drawn(x, np.random.default_rng((seed, n))) for n, x in enumerate(leaves)]
    try:
        have = jax.tree.leaves(tiled.lower().compile().flat(*arrays))
    except PallasfuseError as error:
        return _Measured(not_measured=f"the kernel could not be compiled: {error}")
    try:
        own = [np.asarray(x) for x in jax.jit(call.original)(*arrays)]
        truth = float64_results(jaxpr, [*jaxpr.consts, *arrays])
    except Exception as error:  # keys of random numbers and other things that have no float64 counterpart
        return _Measured(not_measured=f"the program has no float64 evaluation ({type(error).__name__})")
    errors: list[OutputError] = []
    excepted: list[str] = []
    moved: Sequence[np.ndarray] | None = None
    for n, (ours, theirs, exact) in enumerate(zip(map(np.asarray, have), own, truth, strict=True)):
        name = f"result {n}" if len(have) > 1 else "result"
        wrong = _compare(name, ours, theirs, exact, errors, _NOWHERE)
        if wrong is not None:
            if moved is None:
                given = [*jaxpr.consts, *arrays]
                by_any = zip(sensitivity(jaxpr, given, truth, seed), noise(jaxpr, given, truth, seed), strict=True)
                moved = [np.maximum(*both) for both in by_any]
            wrong = _compare(name, ours, theirs, exact, [], moved[n])
        if wrong is not None and plan.exceptions and not np.isfinite([ours[wrong.index], theirs[wrong.index]]).all():
            excepted.append(f"{wrong}, which the exceptions of the plan allow (Plan.exceptions)")
        elif wrong is not None:
            return _Measured(tuple(errors), counterexample=wrong, excepted=tuple(excepted))
    return _Measured(tuple(errors), excepted=tuple(excepted))


def _compare_loops(tiled: Tiled, leaves: Sequence[Any], seed: int) -> Counterexample | str | None:
    """Compares the program in which loops are kernels with the program as it is written, both as loops in float64.

    The first computes before and after its loops whatever need not be inside of them. The result is None where nothing differs, or
    says why they are not compared.
    """
    plan, jaxpr = tiled.plan, tiled.traced.converted.jaxpr
    if jaxpr.effects:
        return "the function has side effects"
    if largest_bytes(jaxpr) > _MOST_BYTES_OF_LOOPS:
        return f"a value has more than {_MOST_BYTES_OF_LOOPS >> 20} MiB in float64: verify it with smaller arguments"
    form = plan.converted.original
    arrays = [drawn(x, np.random.default_rng((seed, n))) for n, x in enumerate(leaves)]
    given = [*jaxpr.consts, *arrays]
    try:
        exact, have = float64_results(jaxpr, given), float64_results(form, [*form.consts, *arrays])
    except Exception as error:  # as in `_measure_calls`
        return f"the program has no float64 evaluation ({type(error).__name__})"
    for n, (ours, theirs) in enumerate(zip(have, exact, strict=True)):
        name = f"result {n} of the program with its loops apart"
        if theirs.size and not np.isfinite(theirs).any():
            return f"result {n} has no finite value for the arguments that were drawn"
        size = np.abs(theirs, where=np.isfinite(theirs), out=np.zeros(theirs.shape)).max(initial=_SMALL)
        if np.allclose(ours, theirs, rtol=_NEAR, atol=_NEAR * size, equal_nan=True):
            continue
        wrong = _compare(name, ours, theirs, theirs, [], sensitivity(jaxpr, given, exact, seed)[n])
        if wrong is not None:
            return wrong
    return None


def _short_run(plan: Plan, seed: int) -> Counterexample | None:
    """The emitted kernels over short axes, against the float64 evaluation of their tile programs."""
    random = np.random.default_rng(seed)
    for target, program in short_kernels(plan.converted, parts_of(plan)):
        inputs = {}
        for t in program.given:
            given = jax.ShapeDtypeStruct([a.extent for a in t.axes], jnp.dtype(t.dtype))
            values = drawn(given, random)
            inputs[t.name] = jnp.abs(values) + 0.5 if jnp.issubdtype(given.dtype, jnp.floating) else values
        back = target.tails == "exact"
        exact = evaluate_tiles(program, {k: np.asarray(x) for k, x in inputs.items()}, move_last_block_back=back)
        ours = jax.jit(functools.partial(emit, target, program))(inputs)
        for name, array in ours.items():
            wrong = _compare(
                f"{name} of {program.name}", np.asarray(array), np.asarray(exact[name]), exact[name], [], _NOWHERE
            )
            if wrong is not None:
                return wrong
    return None


def drawn(leaf: Any, random: np.random.Generator) -> Any:
    """The leaf of an argument, with drawn values where it is a shape only."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        count = int(np.prod(leaf.shape, dtype=int))
        return jax.random.split(jax.random.key(int(random.integers(1 << 31))), count).reshape(leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.asarray(random.standard_normal(leaf.shape), leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        real, imag = random.standard_normal((2, *leaf.shape))
        return jnp.asarray(real + 1j * imag, leaf.dtype)
    if leaf.dtype == bool:
        return jnp.asarray(random.random(leaf.shape) < 0.5)
    return jnp.asarray(random.integers(0, 4, leaf.shape), leaf.dtype)


def _compare(
    name: str, ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray, errors: list[OutputError], moved: np.ndarray
) -> Counterexample | None:
    """Compares one output of the plan and of the original with float64, and returns an element that is wrong; None if there is
    none.

    moved: how far each exact result moves when the arguments are rounded (`reference.sensitivity`).
    """

    def differs(at: np.ndarray) -> Counterexample | None:
        at = at & np.isfinite(moved)
        if not at.any():
            return None
        index = tuple(int(n) for n in np.argwhere(at)[0])
        return Counterexample("execution", name, index, str(theirs[index]), str(ours[index]))

    if jnp.issubdtype(ours.dtype, jnp.complexfloating):
        found = (
            _compare(name, part(ours), part(theirs), part(exact), errors, np.abs(moved)) for part in (np.real, np.imag)
        )
        return next((wrong for wrong in found if wrong is not None), None)
    if not jnp.issubdtype(ours.dtype, jnp.floating):
        changed = (ours != theirs) & np.isfinite(moved)
        return differs(changed) if np.mean(changed) > _FEW else None
    dtype = str(ours.dtype)
    wide, plain = ours.astype(np.float64), theirs.astype(np.float64)
    wrong = differs(special_differences(wide, plain, exact))
    if wrong is not None:
        return wrong
    finite = np.isfinite(wide) & np.isfinite(plain) & np.isfinite(exact)
    if not finite.any():
        return None
    largest = float(np.abs(exact[finite]).max())
    ulp = last_place(ours.dtype, largest)
    fused_error, plain_error = (np.where(finite, np.abs(np.where(finite, x, 0) - np.where(finite, exact, 0)), 0) / ulp
                                for x in (wide, plain))  # fmt: skip
    errors.append(OutputError(name, dtype, float(fused_error.max()), float(np.sqrt(np.mean(fused_error**2))),
                              float(plain_error.max()), float(np.sqrt(np.mean(plain_error**2)))))  # fmt: skip
    slack = max(4.0, min(_PLUS_ULPS, _PLUS_SHARE * largest / ulp))
    allowed = np.where(np.isfinite(moved), moved, 0.0) * (_TIMES_MOVED / ulp)
    return differs(fused_error > _TIMES_PLAIN * plain_error.max() + slack + allowed)
