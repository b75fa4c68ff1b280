"""`Plan`: what was decided about one jaxpr, as kernels and equations that XLA keeps."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn, Var
from pallasfuse.decisions import Grouping, Original, Phase, Placed, lookups_of, reads_of
from pallasfuse.first_time import Later
from pallasfuse.ir.boundary import NO_LOOP, Boundary
from pallasfuse.ir.fold import Group
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.schedule import Schedule
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import TileProgram
from pallasfuse.jaxpr_frontend import Converted
from pallasfuse.jaxpr_frontend.converted import named_boundary
from pallasfuse.options import FuseOptions
from pallasfuse.price.terms import Price
from pallasfuse.references import OfThisProcess
from pallasfuse.targets import Target
from pallasfuse.verdicts import Verdict

if TYPE_CHECKING:
    from pallasfuse.errors import Refusal
    from pallasfuse.loop_calls import KernelOfLoop
    from pallasfuse.proof import Proof
    from pallasfuse.schedule.snapshots import Snapshots
    from pallasfuse.search.found import Rewriting

ZEROS_OF_LOOPS = "in a loop that is one kernel, a zero that changes its place along an axis loses its sign"
"""The condition of a plan with such loops: there, elements change places in sums."""
REORDERED_SUMS = "reassociation only"
"""The condition of every plan that may compute sums in another order than the program."""
Strategy = Literal["rolling_update", "split_k", "single_pass", "scheduled", "searched"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a plan.

    `flops`, `bytes_read` and `bytes_written` are what the kernel does (masked tiles that are skipped do not count).
    """

    name: str
    strategy: Strategy
    axes: Mapping[str, int]
    tiles: Mapping[str, int]
    repairs: Mapping[str, str]
    flops: float
    bytes_read: float
    bytes_written: float
    visited_share: float
    group: Group
    schedule: Schedule
    phases: tuple[Phase, ...]
    """The tile programs that run one after the other: one, or with a split axis, those that make states and one that combines
    them."""
    declined: tuple[str, ...]
    """Why the targets before that have no kernel for the group."""
    price: Price
    """The kernel's time on its device, by terms."""
    replaced: Price
    """XLA's predicted time for what the kernel computes, beside the other kernels of the plan."""
    original: Original | None = field(default=None, compare=False)
    """The kernel in canonical names, which it has in common with equal ones; None where it runs in a way of its own."""
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The names that those of `original` stand for."""
    rivals: tuple[Placed, ...] = field(default=(), compare=False)
    """Other ways to run it that are predicted to take about as long."""

    @property
    def program(self) -> TileProgram:
        """The first phase; of a kernel that is not split, the only one."""
        return self.phases[0].program

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the tensors that it reads: of what it looks up, where that stands, and the table."""
        return reads_of(self.group.inputs, self.lookups)

    @property
    def lookups(self) -> dict[str, Lookup]:
        """The inputs of the group that the kernel reads from other tensors, by tables."""
        return lookups_of(self.phases)

    @property
    def takes_slices(self) -> bool:
        """Does it read parts of arrays whose place a number says, which would be stored for it otherwise?"""
        return any(x.is_slice for x in self.lookups.values())

    @property
    def stores(self) -> tuple[str, ...]:
        """The names of the tensors that it stores."""
        return tuple(nest.name for nest in self.group.outputs)

    @property
    def reductions(self) -> tuple[str, ...]:
        """The names of the tensors that its folds compute."""
        return tuple(f.name for f in self.group.folds) or tuple(n.name for n in self.group.inner if n.is_reduction)

    @property
    def target(self) -> Target:
        """Whose emitter runs it: the plan's target, or one that stands in for it."""
        return self.phases[0].target


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operation that was left to XLA, with its place in the source and the reason."""

    operation: str
    source: str
    reason: str
    asked: bool = False
    """The user asked for it, by `leave` or `FuseOptions.exclude`."""

    def __str__(self) -> str:
        return f"{self.operation} at {self.source}: {self.reason}"


@dataclass(frozen=True, slots=True)
class KernelSnapshots:
    """The forms of what a kernel computes, from loops for each nest alone to the most fused."""

    kernel: Kernel
    found: "Snapshots | Refusal"


Step = Kernel | JaxprEqn


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a loop or a branch, which is planned by itself.

    number: among those of a program, in its order. what: words that say which it is. trips: of its loop, in which its kernels save
    what they replace; None where nobody knows how many there are, where there is no loop, and where more is saved than that.
    """

    number: int
    what: str
    plan: "Plan"
    trips: int | None = None


@dataclass(frozen=True)
class Plan(OfThisProcess):
    """Everything that was decided about one jaxpr for one target. `str(plan)` is the derivation, stage by stage."""

    converted: Converted
    target: Target
    grouped: Later[Grouping]
    kernels: tuple[Kernel, ...]
    left: Later[tuple[Fallback, ...]]
    own_conditions: tuple[str, ...]
    """As `conditions`, of what is outside the bodies of loops."""
    own_exceptions: tuple[str, ...]
    """As `exceptions`, of what is outside the bodies of loops."""
    steps: tuple[Step, ...]
    options: FuseOptions
    proof: "Proof | None" = None
    """Made when `FuseOptions.verify` asks for it."""
    verdicts: tuple[Verdict, ...] = ()
    """The measurements on the device of the call: kernels that lost against XLA's are not among `kernels` any more."""
    bodies: tuple[Body, ...] = ()
    """The bodies of loops and branches in which something is fused."""
    rewritings: "tuple[Rewriting, ...]" = ()
    """The tensors that are computed by other sums and products than those of the program; `converted` has them."""
    boundary: Boundary = NO_LOOP
    """The boundary of the program, where it is the body of a loop."""
    outdoes: bool = False
    """There is another form, with cheaper sums and products, than which these kernels are predicted to be faster still."""
    stored_beside: frozenset[str] = frozenset()
    """The names of tensors that XLA is to store, as it would without the kernels that compute them by themselves."""
    written_out: bool = False
    """Trips of its loops, or operations, are written out: a clock has found that to be faster, or without one it is sure."""

    @property
    def grouping(self) -> Grouping:
        """The groups that became kernels, and the reductions that did not."""
        return self.grouped.value

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The operations that are left to XLA, with the reasons; without those in the bodies of loops."""
        return self.left.value

    def all(self) -> Iterator["Plan"]:
        """Yields this plan and those of the bodies inside it."""
        yield self
        for body in self.bodies:
            yield from body.plan.all()

    def of_written_out(self) -> "Plan":
        """The plan as one of a program with loops or operations written out: sums may have another order."""
        of_loops = (ZEROS_OF_LOOPS,) if self.loops else ()
        conditions = dict.fromkeys((REORDERED_SUMS, *self.own_conditions, *of_loops))
        return replace(self, written_out=True, own_conditions=tuple(conditions))

    @property
    def conditions(self) -> tuple[str, ...]:
        """The ways, besides the order of summation, in which results may differ from the program: exceptions, and roundings that
        move."""
        return tuple(dict.fromkeys(c for plan in self.all() for c in plan.own_conditions))

    @property
    def exceptions(self) -> tuple[str, ...]:
        """Those conditions that name where a result may be NaN, infinite or finite though the program's is not."""
        return tuple(dict.fromkeys(e for plan in self.all() for e in plan.own_exceptions))

    @property
    def fuses(self) -> bool:
        """Does it run otherwise than the program: by a kernel, there or in the body of a loop, or in another form?"""
        return bool(self.kernels or self.bodies or self.rewritings or self.written_out)

    @property
    def program(self) -> LoopProgram:
        return self.converted.program

    @property
    def loops(self) -> "tuple[KernelOfLoop, ...]":
        """The loops that are one kernel each: what a trip hands on stays in it."""
        from pallasfuse.loop_calls import loops_as_kernels

        return loops_as_kernels(self.converted.jaxpr)

    @property
    def emitters(self) -> frozenset[str]:
        """The names of the targets whose kernels it has."""
        of_loops = {"triton"} if self.loops else set[str]()
        return frozenset(phase.target.name for kernel in self.kernels for phase in kernel.phases) | of_loops

    @cached_property
    def at_boundary(self) -> Mapping[str, Price]:
        """The price of what XLA stores for each kernel at its boundary, and at that of a loop's body, by the names of kernels."""
        if not self.kernels or self.target.platform != "gpu":
            return {}
        from pallasfuse.price.stored_at_boundary import boundary_prices

        kernels = [(k.name, k.group, k.reads) for k in self.kernels]
        boundary = named_boundary(self.converted, self.boundary)
        stored = boundary_prices(self.program, kernels, boundary, self.target.device)
        return {name: price for name, price in stored.items() if price.terms}

    @cached_property
    def repeated(self) -> Mapping[Original, str]:
        """The kernels, in canonical names, that this plan has several times, with what their scopes and names have in common."""
        places = defaultdict[Original, list[Kernel]](list)
        for kernel in self.kernels:
            if kernel.original is not None:
                places[kernel.original].append(kernel)
        several = {original: kernels for original, kernels in places.items() if len(kernels) > 1}
        return {o: _common_name(f"{self.scopes_of(k)}/{k.name}" for k in kernels) for o, kernels in several.items()}

    @cached_property
    def snapshots(self) -> tuple[KernelSnapshots, ...]:
        """The forms of what each kernel computes, from unfused to most fused; of equal kernels those of the first."""
        from pallasfuse.schedule.snapshots import snapshots_of_group

        tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in self.program.definitions()}
        distinct = {k.name if k.original is None else k.original: k for k in reversed(self.kernels)}
        return tuple(KernelSnapshots(k, snapshots_of_group(k.group, tensors)) for k in reversed(distinct.values()))

    @cached_property
    def variables_beside(self) -> frozenset[Var]:
        """The variables of `stored_beside`."""
        return frozenset(self.converted.variable[name] for name in self.stored_beside)

    @cached_property
    def _makers(self) -> Mapping[Var, JaxprEqn]:
        return {v: e for e in self.converted.jaxpr.eqns for v in e.outvars}

    def scopes_of(self, kernel: Kernel) -> Any:
        """The scopes of the user, as of `jax.named_scope`, around all reductions of a kernel: the longest stack that they share.

        What a kernel computes besides, element by element, may be of other scopes: a mask that all layers share, say.
        """
        variable = self.converted.variable
        made = (self._makers.get(variable[name]) for name in kernel.reductions if name in variable)
        return _compat.common_scopes(eqn for eqn in made if eqn is not None)

    @cached_property
    def text(self) -> str:
        from pallasfuse.explain import explain

        return explain(self)

    @property
    def summary(self) -> str:
        """One screen: kernels, repairs, bytes, fallbacks, conditions; of a long plan what matters most."""
        from pallasfuse.explain import summarize

        return summarize(self)

    def show(self, stage: str, kernel: str | None = None) -> str:
        """One stage of the derivation: 'program', 'rewritten', 'kernels' (all, or the one of a name), 'checked', 'bodies', 'left',
        'conditions'.

        'snapshots', which is no stage of it: the forms of what kernels compute, from unfused to most fused, with their prices.

        Raises:
          ValueError: there is no such stage or kernel.
        """
        from pallasfuse.explain import show

        return show(self, stage, kernel)

    def html(self, path: str | Path | None = None, *, kernel: str | None = None) -> str:
        """The plan as a page that needs no other file, with the derivation of one kernel; also written to `path`.

        kernel: the name of one; None: the one that takes longest.

        Raises:
          ValueError: there is no such kernel.
        """
        from pallasfuse.page import page

        text = page(self, kernel)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        return self.text


def _common_name(paths: Iterable[str]) -> str:
    """Returns one name for several, with a star where they differ: `layer_*/core` of `layer_0/core` and `layer_1/core`."""

    def common(names: set[str]) -> str:
        stems = {re.sub(r"\d.*", "", name) for name in names}
        return names.pop() if len(names) == 1 else f"{stems.pop()}*" if len(stems) == 1 else "*"

    return "/".join(common(set(part)) for part in zip(*(path.split("/") for path in paths), strict=False))
