"""Judges a fused program against the function that it replaces: NaN pattern, and error against a float64 evaluation."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

import pallasfuse as pf
from tests.property.programs import Program


def _wide(dtype: Any) -> Any:
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


_EXACT = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "select_n", "max", "min", "neg", "abs",
                    "reduce_max", "reduce_min", "stop_gradient", "copy", "iota", "sign", "round", "floor"})  # fmt: skip


def _in_float64(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], noise: Any, rng: np.random.Generator
) -> list[Any]:
    """The jaxpr's meaning with every floating-point type replaced by float64.

    The result of every operation that rounds is changed by up to `noise` times half an ulp of its own type.
    """
    values: dict[Any, Any] = {}

    def look_up(atom: Any) -> Any:
        x = atom.val if isinstance(atom, Literal) else values[atom]
        return jnp.asarray(x, _wide(jnp.asarray(x).dtype if not hasattr(x, "dtype") else x.dtype))

    values.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        operands = [look_up(a) for a in eqn.invars]
        inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if inner is not None:
            body = getattr(inner, "jaxpr", inner)
            results = _in_float64(body, getattr(inner, "consts", ()), operands, noise, rng)
        else:
            params = dict(eqn.params)
            for key in ("new_dtype", "preferred_element_type", "dtype"):
                if params.get(key) is not None:
                    params[key] = _wide(params[key])
            got = eqn.primitive.bind(*operands, **params)
            results = got if eqn.primitive.multiple_results else [got]
            if eqn.primitive.name in ("reduce_max", "reduce_min") and operands[0].dtype == np.float64:
                # XLA's may drop a NaN
                results = [jnp.where(jnp.any(jnp.isnan(operands[0]), eqn.params["axes"]), jnp.nan, results[0])]
            kept = eqn.primitive.name == "convert_element_type" and not (
                jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
                and jnp.finfo(eqn.invars[0].aval.dtype).eps < jnp.finfo(eqn.outvars[0].aval.dtype).eps
                if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) else False
            )  # fmt: skip
            if eqn.primitive.name not in _EXACT and not kept:
                results = [_shake(r, v.aval.dtype, noise, rng) for r, v in zip(results, eqn.outvars, strict=True)]
        values.update(zip(eqn.outvars, results, strict=True))
    return [look_up(v) for v in jaxpr.outvars]


def _shake(x: Any, dtype: Any, noise: Any, rng: np.random.Generator) -> Any:
    if not jnp.issubdtype(dtype, jnp.floating):
        return x
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    return x * (1 + noise * half_ulp * rng.uniform(-1, 1, x.shape))


def exact(function: Callable[..., Any], *args: Any, perturbed: bool = False) -> list[list[np.ndarray]]:
    """The results in float64; then, if `perturbed`, twice with random relative errors of half an ulp after every operation.

    How far the perturbed results lie from the exact ones is what the program's own rounding may do to it.
    """
    traced = jax.make_jaxpr(function)(*args)
    rng = np.random.default_rng(7)
    variants = [0.0, 1.0, -1.0] if perturbed else [0.0]
    with jax.enable_x64(True):
        wide = [np.asarray(a, _wide(a.dtype)) for a in args]
        jaxpr = getattr(traced, "jaxpr", traced)
        run = jax.jit(lambda noise, *xs: _in_float64(jaxpr, traced.consts, xs, noise, rng))
        run = run.lower(0.0, *wide).compile({"xla_backend_optimization_level": 0})
        return [[np.asarray(y) for y in run(v, *wide)] for v in variants]


@dataclass(frozen=True)
class Verdict:
    """What came of one program on one target."""

    problems: tuple[str, ...]
    strategies: tuple[str, ...]
    trips: int
    fallbacks: tuple[str, ...]
    worst: float

    @property
    def event(self) -> str:
        if not self.strategies:
            return "left to XLA"
        return "partly fused" if self.fallbacks else "fully fused"

    @property
    def rolls(self) -> bool:
        return "rolling_update" in self.strategies and self.trips > 1


def _as_array(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def judge(program: Program, target: str) -> Verdict:
    fn = program.function()
    args = program.arguments()
    return judge_function(fn, args, target, program.tiles)


def compare(
    have: Sequence[Any], plain: Sequence[Any], references: Sequence[Sequence[np.ndarray]]
) -> tuple[list[str], float]:
    """Where the fused results `have` are not as good as the `plain` ones; and the worst share of the tolerance used.

    The tolerance, in the largest norm: four times the plain program's own error, plus four times what random
    half-ulp errors of its operations do to the exact result, plus 16 ulps of the largest result.
    """
    problems: list[str] = []
    worst = 0.0
    np.seterr(invalid="ignore")
    for n, (got, own) in enumerate(zip(have, plain, strict=True)):
        if got.shape != own.shape or got.dtype != own.dtype:
            problems.append(f"output {n}: {got.dtype}{got.shape}, plain {own.dtype}{own.shape}")
            continue
        ours, theirs, truth = _as_array(got), _as_array(own), references[0][n]
        if ours.dtype != np.float64:
            if not np.array_equal(ours, theirs):
                problems.append(f"output {n}: integers differ")
            continue
        for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
            # XLA's own max and min may drop a NaN: what agrees with float64 instead is right as well
            wrong = (test(ours) != test(theirs)) & (test(ours) != test(truth))
            if wrong.any():
                problems.append(
                    f"output {n}: {kind} in {test(ours).sum()} of {ours.size} elements, plain has {test(theirs).sum()}"
                )
        finite = np.isfinite(theirs) & np.isfinite(ours) & np.isfinite(truth)
        if not finite.any():
            continue
        eps = float(jnp.finfo(got.dtype).eps)

        def largest(x: np.ndarray, where: np.ndarray = finite) -> float:
            return float(np.abs(x[where]).max())

        inherent = max((largest(r[n] - truth, finite & np.isfinite(r[n])) for r in references[1:]
                        if (finite & np.isfinite(r[n])).any()), default=0.0)  # fmt: skip
        allowed = 4 * largest(theirs - truth) + 4 * inherent + 16 * eps * largest(truth) + 1e-35
        error = largest(ours - truth)
        worst = max(worst, error / allowed)
        if error > allowed:
            problems.append(f"output {n}: error {error:.3g}, allowed {allowed:.3g} (plain {largest(theirs - truth):.3g}, "
                            f"inherent {inherent:.3g}, largest {largest(truth):.3g})")  # fmt: skip
    return problems, worst


def fuse_for(fn: Callable[..., Any], target: str, tiles: tuple[tuple[str, int], ...]) -> Callable[..., Any]:
    return pf.fuse(fn, target=target, options=pf.FuseOptions(tiles=tiles))


def judge_function(
    fn: Callable[..., Any], args: Sequence[Any], target: str, tiles: tuple[tuple[str, int], ...] = ()
) -> Verdict:
    """Run `fn` fused and not, and compare."""
    fused = fuse_for(fn, target, tiles)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiled = fused.trace(*args).fuse().tile()  # planned once; calls of the fused function itself: test_transforms
        plan = tiled.plan
        have = jax.tree.leaves(tiled.lower().compile()(*args))
        plain = jax.tree.leaves(jax.jit(fn)(*args))
        references = exact(lambda *a: jax.tree.leaves(fn(*a)), *args, perturbed=True)
    problems, worst = compare(have, plain, references)
    problems = [*problems, *(str(f) for f in plan.fallbacks if "please report" in f.reason)]
    trips = max((k.schedule.trips for k in plan.kernels), default=0)
    return Verdict(
        tuple(problems), tuple(k.strategy for k in plan.kernels), trips, tuple(map(str, plan.fallbacks)), worst
    )
