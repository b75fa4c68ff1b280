"""Inspectable stages, as those of `jax.jit`: trace -> fuse -> tile -> lower -> compile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import jax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr
from pallasfuse.at_hand import for_device_at_hand, target_for
from pallasfuse.decisions import Grouping
from pallasfuse.first_time import Once, one_task
from pallasfuse.form_choice import Placements, choose_form
from pallasfuse.jaxpr_frontend import Converted, convert
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import schedule_grouping
from pallasfuse.plan import Body, Plan
from pallasfuse.primitive import FusedCall, bind
from pallasfuse.references import OfThisProcess
from pallasfuse.targets import Target, find


@dataclass(frozen=True)
class Call(OfThisProcess):
    """Everything that is needed to rebuild a traced call: the flat arguments' avals and how to unflatten."""

    jaxpr: Jaxpr
    arguments: tuple[Any, ...]
    unflatten: Callable[[Sequence[Any]], Any]
    flatten: Callable[..., list[Any]]
    options: FuseOptions
    name: str
    as_called: Callable[[], Any]
    """Traces what a call runs, by `jax.jit`: kernels are checked when it is lowered for a device at hand."""

    def original(self, *leaves: Any) -> list[Any]:
        """The unfused function, on flat arguments."""
        return _compat.eval_jaxpr(self.jaxpr, self.jaxpr.consts, *leaves)


@dataclass(frozen=True)
class Traced(OfThisProcess):
    """A function traced to a jaxpr and converted to a loop program."""

    call: Call
    converted: Converted

    @one_task()
    def fuse(self, target: str | None = None, *, timed: bool = False, one_device: bool = True) -> "Fused":
        """Choose groups and derive their folds. timed, one_device: as of `Target`."""
        call = self.call
        chosen = target_at_hand(target, call.options).judged(timed=timed, one_device=one_device)
        unchecked = replace(call.options, check=False)
        called = FusedCall(call.jaxpr, unchecked, call.name, Once())
        called.program(chosen)  # as for a call, whose target nobody names
        # bodies are lowered as they are shown
        shown = replace(unchecked, target=chosen.name)
        fused = FusedCall(call.jaxpr, shown, call.name, Once(), programs=called.programs)
        jaxpr, bodies = fused.with_bodies(chosen)
        written_out = fused.program(chosen) is not call.jaxpr
        changed = bodies or written_out
        converted = convert(jaxpr, exclude=call.options.exclude, symbolic=True) if changed else self.converted
        return Fused(self, chosen, *choose_form(converted, chosen, call.options), bodies, written_out)

    def lower(self, **options: Any) -> Any:
        """Lower what a call runs, as `jax.jit(f).trace(...).lower(**options)`: a `jax.stages.Lowered`."""
        return self.call.as_called().lower(**options)

    @property
    def jaxpr(self) -> Any:
        """The jaxpr of a call, with one equation for what is fused; `call.jaxpr` is that of the function."""
        return self.call.as_called().jaxpr

    @property
    def fun_name(self) -> str:
        return self.call.name

    def __str__(self) -> str:
        return str(self.converted.program)


@dataclass(frozen=True)
class Fused(OfThisProcess):
    """A loop program with its groups."""

    traced: Traced
    target: Target
    placements: Placements
    grouping: Grouping
    bodies: tuple[Body, ...] = ()
    """The bodies of loops and branches in which something is fused."""
    written_out: bool = False
    """As `Plan.written_out`."""

    def tile(self, target: str | None = None) -> "Tiled":
        """Choose tiles and lower every group to a tile program; another target than the groups' regroups first."""
        if target is not None and target != self.target.name:
            return self.traced.fuse(target).tile()
        plan = replace(schedule_grouping(self.placements, self.grouping), bodies=self.bodies)
        return Tiled(self.traced, plan.of_written_out() if self.written_out else plan)

    def __str__(self) -> str:
        return "\n".join(str(g) for g in self.grouping.groups) or "no group"


@dataclass(frozen=True)
class Tiled(OfThisProcess):
    """A complete plan."""

    traced: Traced
    plan: Plan

    def lower(self) -> "Lowered":
        """Lower the plan with `jax.jit` for the current platform."""
        call = self.traced.call
        options = replace(call.options, target=self.plan.target.name, check=False)
        plan = replace(self.plan, options=replace(self.plan.options, check=False))  # what is shown is what is lowered
        # the same plan, whatever is known of devices where it is lowered
        judged = product((False, True), repeat=2)
        plans = {(plan.target.name, timed, one, frozenset[int]()): plan for timed, one in judged}
        fused = FusedCall(call.jaxpr, options, call.name, Once(), plans)

        def run(*args: Any) -> Any:
            return bind(fused, *args)

        return Lowered(call, jax.jit(run).lower(*call.arguments))

    def __str__(self) -> str:
        return str(self.plan)


@dataclass(frozen=True)
class Lowered(OfThisProcess):
    """StableHLO for one platform."""

    call: Call
    lowered: Any

    def as_text(self) -> str:
        return str(self.lowered.as_text())

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The module itself, as of `jax.stages.Lowered`."""
        return self.lowered.compiler_ir(dialect)

    def cost_analysis(self) -> Any:
        """XLA's estimates of the program before it is compiled, as of `jax.stages.Lowered`."""
        return self.lowered.cost_analysis()

    def compile(self) -> "Compiled":
        """Compile for the current platform."""
        return Compiled(self.call, self.lowered.compile())


@dataclass(frozen=True)
class Compiled(OfThisProcess):
    """An executable with the function's own signature."""

    call: Call
    compiled: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call.unflatten(self.flat(*self.call.flatten(*args, **kwargs)))

    def flat(self, *leaves: Any) -> list[Any]:
        """The leaves of the result, from those of the arguments."""
        return list(self.compiled(*leaves))

    def as_text(self) -> str:
        """The compiled program."""
        return str(self.compiled.as_text())

    def cost_analysis(self) -> Any:
        """XLA's estimates of the compiled program (flops, bytes), as of `jax.stages.Compiled`."""
        return self.compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        """The bytes of the arguments, the results and the temporary memory, as of `jax.stages.Compiled`."""
        return self.compiled.memory_analysis()


def target_at_hand(name: str | None, options: FuseOptions) -> Target:
    """The target of a name, else the one that options ask for, else the best one here; for the device at hand."""
    name = name if name is not None else options.target
    return for_device_at_hand(find(name)) if name is not None else target_for(_platform(), options)


def _platform() -> str:
    platform = jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def trace(call: Call) -> Traced:
    """Convert a traced call."""
    return Traced(call, convert(call.jaxpr, exclude=call.options.exclude, symbolic=True))
