"""Judges a fused program against its float64 evaluation, on every emitter that runs on a CPU.

The tolerance of every element is its radius from `error_bounds`, which counts rounding errors: `OPERATIONS` for each one that
the plain program makes. A fused program makes others, and not many more of them: a reduction with a repair rounds each term
as the plain one does, and multiplies what it carries by a repair once per trip, which for tiles of one element is one more
product (of rounded factors) and one more addition for every term. `OPERATIONS` is the ratio of these counts. Nothing else is
allowed for.

Where the analysis says that an element is infinite or not a number, the fused program says so too, or what the plain program says
(XLA's own maximum may drop a NaN). Where it knows nothing (a division by what may be zero, a sum that may overflow), the element is
not judged; `Verdict.unjudged` is the share of such elements.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

import pallasfuse as pf
from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.evaluate import evaluate as evaluate_loop_program
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.loop_program import External, Nest
from pallasfuse.plan import Kernel, Plan
from pallasfuse.stages import Tiled
from tests.property.balls import Arithmetic, Ball, exactly
from tests.property.error_bounds import evaluate
from tests.property.programs import Program

OPERATIONS = 4.0
FUSED, PLAIN, FLOAT64 = Arithmetic(operations=OPERATIONS), Arithmetic(), Arithmetic(2.0**-53, OPERATIONS)
SPLIT = " split"
"""Suffix of an emitter whose kernels have the rolled axis in parts."""
PARTS = 3
COMPILED = ("xla", "interpret", "xla split")
INTERPRETED = ("loop program", "tiles of xla", "tiles of interpret", "tiles of triton", "tiles of triton split")
"""The float64 interpreters of what each stage made; `tiles of ...`: of the kernels planned for a target, with its tails."""
EMITTERS = (*COMPILED, *INTERPRETED)
MOST_TRIPS = 600
"""Kernels with more tiles than that are not interpreted."""


@dataclass(frozen=True)
class Verdict:
    """What came of one program on one emitter."""

    problems: tuple[str, ...]
    strategies: tuple[str, ...] = ()
    trips: int = 0
    fallbacks: tuple[str, ...] = ()
    worst: float = 0.0
    """The largest share of the tolerance that an element used."""
    unjudged: float = 0.0

    @property
    def event(self) -> str:
        if not self.strategies:
            return "left to XLA"
        return "partly fused" if self.fallbacks else "fully fused"

    @property
    def rolls(self) -> bool:
        return "rolling_update" in self.strategies and self.trips > 1


@dataclass
class Findings:
    """Problems of several arrays, and the worst use of the tolerance among them."""

    excepted: bool = False
    """The plan names exceptions: results that are not finite where the program's are, or the other way round."""
    problems: list[str] = field(default_factory=list)
    worst: float = 0.0
    elements: int = 0
    unjudged: int = 0

    def compare(self, name: str, got: Any, truth: Ball, plain: Any = None) -> None:
        """Judge one array; `plain` is what the plain program gave."""
        ours = _as_float64(got)
        theirs = truth.value if plain is None else _as_float64(plain)
        if ours.shape != truth.value.shape:
            self.problems.append(f"{name}: shape {ours.shape}, expected {truth.value.shape}")
            return
        if plain is not None and np.asarray(got).dtype != np.asarray(plain).dtype:
            self.problems.append(f"{name}: {np.asarray(got).dtype}, plain {np.asarray(plain).dtype}")
            return
        value, radius = truth.value.astype(np.float64), truth.radius
        with np.errstate(all="ignore"):
            error = np.abs(ours - value)
            finite = np.isfinite(ours) & np.isfinite(value)
            inside = finite & (error <= radius)
            alike = (
                _alike(ours, value)
                | _alike(ours, theirs)
                | (np.isfinite(ours) & np.isfinite(theirs) & ~np.isfinite(value))
            )
            wrong = ~(inside | (alike & ~finite) | np.isposinf(radius) | (self.excepted & ~finite))
            judged = finite & ~np.isposinf(radius) & (radius > 0)
            used = np.where(judged, error / np.where(judged, radius, 1.0), 0.0)
        self.elements += wrong.size
        self.unjudged += int(np.isposinf(radius).sum())
        self.worst = max(self.worst, float(used.max(initial=0.0)))
        if wrong.any():
            at = np.unravel_index(np.argmax(np.where(wrong, np.where(finite, used, np.inf), -1.0)), wrong.shape)
            where = [int(n) for n in at]
            self.problems.append(
                f"{name}: {int(wrong.sum())} of {wrong.size} elements are wrong; at {where} {ours[at]:.9g}, expected "
                f"{value[at]:.9g} within {radius[at]:.3g} (plain {theirs[at]:.9g}, largest {_largest(value):.3g})"
            )

    def verdict(self, plan: Plan | None = None, more: Iterable[str] = ()) -> Verdict:
        problems = (*self.problems, *more)
        share = self.unjudged / max(1, self.elements)
        if plan is None:
            return Verdict(problems, worst=self.worst, unjudged=share)
        problems = (*problems, *(str(f) for f in plan.fallbacks if "please report" in f.reason))
        trips = max((k.schedule.trips for k in plan.kernels), default=0)
        return Verdict(
            problems, tuple(k.strategy for k in plan.kernels), trips, tuple(map(str, plan.fallbacks)), self.worst, share
        )


def _aligned(x: Any, offset: int) -> np.ndarray:
    """A copy that begins `offset` bytes after a multiple of 64."""
    array = np.asarray(x)
    memory = np.zeros(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _as_float64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def fuse_for(fn: Callable[..., Any], target: str, tiles: tuple[tuple[str, int], ...]) -> Callable[..., Any]:
    parts = PARTS if target.endswith(SPLIT) else None
    return pf.fuse(fn, target=target.removesuffix(SPLIT), options=pf.FuseOptions(tiles=tiles, parts=parts))


class Case:
    """A function with its arguments and what all emitters are compared with, computed once."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], tiles: tuple[tuple[str, int], ...] = ()) -> None:
        self.fn, self.args = fn, list(args)
        # after z, axes are named a1, a2, ...
        self.tiles = (*tiles, *((f"a{n}", tiles[n % len(tiles)][1]) for n in range(1, 60))) if tiles else ()
        self._plans: dict[str, Tiled] = {}

    @cached_property
    def traced(self) -> Any:
        return jax.make_jaxpr(lambda *a: jax.tree.leaves(self.fn(*a)))(*self.args)

    @cached_property
    def plain(self) -> list[np.ndarray]:
        return [np.asarray(y) for y in jax.tree.leaves(jax.jit(self.fn)(*self.args))]

    @cached_property
    def truth(self) -> list[Ball]:
        return self._evaluate(FUSED)

    def _evaluate(self, arithmetic: Arithmetic) -> list[Ball]:
        jaxpr = getattr(self.traced, "jaxpr", self.traced)
        balls = [arithmetic.rounded(b.value, b.radius, np.asarray(a).dtype, 0) for a in self.args for b in [exactly(a)]]
        return evaluate(jaxpr, self.traced.consts, balls, arithmetic)[0]

    @cached_property
    def plain_verdict(self) -> Verdict:
        """The plain program is judged as well: where it lies outside of its own bound, the bound is wrong."""
        findings = Findings()
        for n, (got, ball) in enumerate(zip(self.plain, self._evaluate(PLAIN), strict=True)):
            findings.compare(f"plain output {n}", got, ball, got)
        return findings.verdict()

    def plan(self, target: str) -> Tiled:
        if target not in self._plans:
            self._plans[target] = fuse_for(self.fn, target, self.tiles).trace(*self.args).fuse().tile()
        return self._plans[target]

    @cached_property
    def variables(self) -> Mapping[str, Ball]:
        """Every tensor of the loop program for XLA's loops, by name."""
        return self.variables_of("xla")

    def variables_of(self, target: str) -> Mapping[str, Ball]:
        """Every tensor of a target's loop program, by name, evaluated from the converted jaxpr with float64 roundings.

        Targets take loops otherwise, and count the equations around them.
        """
        converted = self.plan(target).plan.converted
        _, known = evaluate(converted.jaxpr, converted.jaxpr.consts, [exactly(a) for a in self.args], FLOAT64)
        extents = {d.name: tuple(a.extent for a in d.axes) for d in converted.program.definitions()}
        balls = {name: known[var] for name, var in converted.variable.items() if var in known}
        return {
            n: Ball(b.value.reshape(extents[n]), b.radius.reshape(extents[n])) for n, b in balls.items() if n in extents
        }

    def judge(self, emitter: str) -> Verdict:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if emitter in COMPILED:
                return self._compiled(emitter)
            if emitter == "loop program":
                return self._loop_program()
            return self._tiles(emitter.removeprefix("tiles of "))

    def _compiled(self, target: str) -> Verdict:
        tiled = self.plan(target)
        try:
            have = jax.tree.leaves(tiled.lower().compile()(*self.args))
        except pf.TargetError as error:
            if "FuseOptions.tiles" in str(error):  # the tiles that were asked for are refused, with the reason
                return Verdict(())
            raise
        verdict = self._against(have, self.plain, tiled.plan)
        for again in self.replays() if verdict.problems else ():
            verdict = min(verdict, self._against(have, again, tiled.plan), key=lambda v: len(v.problems))
        return verdict

    def _against(self, have: Sequence[Any], plain: Sequence[Any], plan: Plan) -> Verdict:
        findings = Findings(bool(plan.exceptions))
        for n, (got, own, ball) in enumerate(zip(have, plain, self.truth, strict=True)):
            findings.compare(f"output {n}", got, ball, own)
        return findings.verdict(plan)

    def replays(self) -> Iterator[list[np.ndarray]]:
        """The plain program's results for the same inputs elsewhere in memory.

        XLA's CPU backend computes exp(NaN) otherwise in vectors than in scalars, and alignment decides which elements those are:
        where the plain program itself says now NaN, now a number, so may the fused one.
        """
        function = jax.jit(self.fn)
        for offset in (0, 16, 32, 48):
            yield [np.asarray(y) for y in jax.tree.leaves(function(*(_aligned(a, offset) for a in self.args)))]

    @cached_property
    def loop_values(self) -> Mapping[str, Any]:
        """Every tensor of the loop program, as its interpreter has it."""
        program = self.plan("xla").plan.program
        given = {t.name for t in program.inputs} | {n.name for n in program.nests if isinstance(n, External)}
        return evaluate_loop_program(program, {n: b.value for n, b in self.variables.items() if n in given})

    @cached_property
    def wraps(self) -> bool:
        """Integers leave their types: they wrap on a device, but not in the interpreters, which have 64 bits."""
        nests = [
            n
            for n in self.plan("xla").plan.program.nests
            if isinstance(n, Nest) and n.dtype.startswith(("int", "uint"))
        ]
        bits = {n.name: np.iinfo(n.dtype) for n in nests}
        return any(
            v.size and (v.min() < bits[n].min or v.max() > bits[n].max)
            for n, v in self.loop_values.items()
            if n in bits
        )

    def _loop_program(self) -> Verdict:
        program, findings, got = self.plan("xla").plan.program, Findings(), self.loop_values
        if self.wraps:
            return Verdict((), unjudged=1.0)
        for nest in program.nests:
            if isinstance(nest, Nest) and not nest.internal:  # a step of an operation is no variable
                findings.compare(nest.name, got[nest.name], self.variables[nest.name])
        return findings.verdict()

    def _tiles(self, target: str) -> Verdict:
        plan, broken = self.plan(target).plan, []
        findings = Findings(bool(plan.exceptions))
        if self.wraps:
            return Verdict((), unjudged=1.0)
        variables = self.variables_of(target)
        for kernel in plan.kernels:
            if kernel.schedule.trips * _blocks(kernel.program.grid) > MOST_TRIPS:
                continue
            known = {name: variables[name].value for name in kernel.reads}
            for back in (False, True) if plan.target.tails == "exact" else (False,):
                try:
                    outputs = _evaluate(kernel, known, back=back)
                except InvalidProgramError as error:
                    broken.append(f"{kernel.name}: {error}")
                    continue
                for name, got in outputs.items():
                    findings.compare(f"{name} of {kernel.name}, back={back}", got, variables[name])
        return findings.verdict(plan, broken)


def _evaluate(kernel: Kernel, known: Mapping[str, Any], *, back: bool) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for phase in kernel.phases:
        inputs = {t.name: {**known, **outputs}[t.name] for t in phase.program.given}
        outputs |= evaluate_tiles(phase.program, inputs, move_last_block_back=back)
    return {n.name: outputs[n.name] for n in kernel.group.outputs}


def _blocks(grid: Iterable[tuple[Any, int]]) -> int:
    blocks = 1
    for axis, tile in grid:
        blocks *= -(-axis.extent // tile)
    return blocks


def judge(program: Program, target: str) -> Verdict:
    return Case(program.function(), program.arguments(), program.tiles).judge(target)


def judge_function(
    fn: Callable[..., Any], args: Sequence[Any], target: str, tiles: tuple[tuple[str, int], ...] = ()
) -> Verdict:
    """Run `fn` fused and not, and compare."""
    return Case(fn, args, tiles).judge(target)


def exact(function: Callable[..., Any], *args: Any, perturbed: bool = False) -> list[list[np.ndarray]]:
    """The results in float64; then, if `perturbed`, the radius of each of their elements."""
    truth = Case(function, args).truth
    values = [b.value for b in truth]
    return [values, [b.radius for b in truth]] if perturbed else [values]


def compare(
    have: Sequence[Any], plain: Sequence[Any], references: Sequence[Sequence[np.ndarray]]
) -> tuple[list[str], float]:
    """What is wrong with the results `have`, and the worst share of the tolerance used; `references` are those of `exact`."""
    findings = Findings()
    for n, (got, own) in enumerate(zip(have, plain, strict=True)):
        findings.compare(f"output {n}", got, Ball(references[0][n], references[1][n]), own)
    return findings.problems, findings.worst
