"""The kernels of a plan as they are measured: each with the part that it computes, and what is known about ways to run it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr
from pallasfuse.decisions import Placed
from pallasfuse.emission.lookups import stored
from pallasfuse.environment import environment
from pallasfuse.executables import Executables, Function, executables_of_task, is_shortage
from pallasfuse.execution import execute, run_kernel
from pallasfuse.first_time import IMPORTS
from pallasfuse.index_ranges import Bound, index_ranges
from pallasfuse.measure import Measured
from pallasfuse.parts import Part, part_of, producers, way, way_of_kernel
from pallasfuse.plan import Kernel, Plan
from pallasfuse.store import Identity, Record, Store, current

XLA = "XLA's own"
"""The name of XLA's program among those that are compared, and of a winner that is none of ours."""
OURS = "fused"
"""Names the program with kernels, where it is compared with XLA's alone."""


def comparison(found: Measured, key: str) -> Record:
    """Returns the record of how a program that ran (`key` among what was compared) compares with XLA's."""
    entry: Record = {"us": found.microseconds[key], "xla_us": found.microseconds[XLA], "faster": key in found.faster}
    if key in found.kernels:
        entry |= {"kernels_us": found.kernels[key], "xla_kernels_us": found.kernels[XLA]}
    return entry | {"seconds": found.seconds}


@dataclass(eq=False)
class Subject:
    """A kernel that is compared with XLA's own, and the record of that.

    A record has `ways`: by the text of a way to run the kernel how it compares (`us`, `xla_us`, `faster`, `predicted_us`,
    `seconds`; of short ones on a GPU also `kernels_us` and `xla_kernels_us`) or how it fails (`error`), each with its `schedule`;
    and, once it was tuned, the `winner`.
    """

    plan: Plan
    kernel: Kernel
    part: Part
    identity: Identity
    store: Store
    within: bool = True
    """It is part of a larger call, which hides the starts of its kernels: when it is short, their own time decides."""
    _functions: dict[int, tuple[Kernel, Function]] = field(default_factory=dict)
    """By the identity of kernels: each as a function."""

    @cached_property
    def way(self) -> str:
        """Returns words that say how the kernel runs as it is planned. Equal kernels share them."""
        return way_of_kernel(self.kernel)

    def way_of(self, placed: Placed) -> str:
        """Another way to run it, in such words."""
        return way(self.kernel.group, placed.schedule, placed.phases[0].target)

    @property
    def record(self) -> Record:
        return self.store.get(self.identity) or {}

    def entry(self, name: str) -> Record | None:
        """Returns the record of one way to run the kernel: its times or its error; None where that was not measured."""
        found: Record | None = self.record.get("ways", {}).get(name)
        return found if found is not None and ("us" in found or "error" in found) else None

    def note(self, name: str, entry: Record, *, on_disk: bool = True) -> None:
        """Remember how one way to run the kernel compares."""

        def change(record: Record) -> Record:
            return {**record, "ways": {**record.get("ways", {}), name: entry}}

        self.store.update(self.identity, change, on_disk=on_disk)

    def settle(self, winner: str) -> None:
        """Remember which way has won, or that XLA's own has."""
        self.store.update(self.identity, lambda record: {**record, "winner": winner})

    def others(self, *, searched: bool = False) -> Iterator[tuple[Placed, Kernel]]:
        """Other ways to run the kernel, the most promising first; searched: as of `pipeline.ways`."""
        with IMPORTS:
            from pallasfuse.pipeline import ways

        free = unbound(self.plan)
        seen = {self.way}
        for placed in chain(self.kernel.rivals, ways(self.plan, self.kernel, searched=searched)):
            if self.way_of(placed) not in seen:
                seen.add(self.way_of(placed))
                kernels = revised(free, {self.kernel.name: placed}).kernels
                yield placed, next(k for k in kernels if k.name == self.kernel.name)

    @property
    def rivals(self) -> Iterator[tuple[Placed, Kernel]]:
        """The other ways to run the kernel that were predicted to be about as fast."""
        with IMPORTS:
            from pallasfuse.pipeline import kernel_of

        for placed in self.kernel.rivals:
            yield placed, kernel_of(self.kernel.group, placed, self.kernel.replaced)

    def find(self, name: str) -> Placed | None:
        """The way to run the kernel that such words mean; None where there is none any more."""
        with IMPORTS:
            from pallasfuse.pipeline import ways

        known = (p for searched in (False, True) for p in ways(self.plan, self.kernel, searched=searched))
        return next((p for p in known if self.way_of(p) == name), None)

    def function(self, kernel: Kernel) -> Function:
        """Returns the kernel, run in one way, as a function of the inputs of its part, with the outputs of that: the same one
        whenever it is asked for."""
        _, found = self._functions.setdefault(id(kernel), (kernel, self._as_function(kernel)))
        return found

    @property
    def functions(self) -> list[Function]:
        """Returns what `function` has returned so far."""
        return [function for _, function in self._functions.values()]

    def _as_function(self, kernel: Kernel) -> Function:
        plan, part, own = self.plan, self.part, self.kernel.lookups
        shapes = [_compat.shape_of(plan.converted.variable[n.name]) for n in kernel.group.outputs]

        def run(*arrays: Any) -> list[Any]:
            given = {n: x for n, x in zip(part.input_names, arrays, strict=True) if n is not None}
            given |= stored([x for n, x in own.items() if n not in kernel.lookups], given)
            found = run_kernel(plan, kernel, given)
            return [found[name].reshape(shape) for name, shape in zip(kernel.stores, shapes, strict=True)]

        return run

    @property
    def avals(self) -> list[Any]:
        """Shapes and types of the part's inputs."""
        return [v.aval for v in self.part.inputs]

    @cached_property
    def below(self) -> list[Bound | None]:
        """Returns the numbers that integers of the part's inputs stay below."""
        return index_ranges(self.part.equations, self.part.inputs)

    def take_down(self, name: str, kernel: Kernel, found: Measured, key: str) -> str | None:
        """Remember what was found of one way to run the kernel (`key` among what was compared). Returns its error, if it has one.

        What fails when it runs, and not when it is compiled, is remembered by this process alone."""
        known = {"schedule": str(kernel.schedule), "target": kernel.target.name, "predicted_us": kernel.price.us}
        if key in found.uncompiled:
            error = found.uncompiled[key]
            self.note(name, known | {"error": error}, on_disk=not is_shortage(error))
            return found.uncompiled[key]
        if key in found.failed and not is_shortage(found.failed[key]):
            self.note(name, known | {"error": found.failed[key]}, on_disk=False)
            return found.failed[key]
        if key in found.microseconds:
            self.note(name, known | comparison(found, key))
        return None


@dataclass(eq=False)
class Bench:
    """A plan on a device: its kernels, and what is noted about them while they are measured."""

    plan: Plan
    device: Any
    store: Store = field(default_factory=current)
    subjects: list[Subject] = field(init=False)
    around: dict[str, str] = field(init=False)
    spent: dict[str, float] = field(default_factory=dict)
    """By the name of a kernel, what its check has taken, in seconds."""
    skipped: dict[str, str] = field(default_factory=dict)
    """By the name of a kernel, why it could not be timed."""
    executables: Executables = field(default_factory=executables_of_task)
    """Programs that comparisons of this task have asked for."""
    compiling_s: float = 0.0
    """The seconds that whole calls have taken to compile which were not compared yet."""
    _calls: dict[tuple[tuple[str, str], ...], Function] = field(default_factory=dict)
    """By the names of kernels, and how they run: the whole call with them."""

    @property
    def are_parts(self) -> bool:
        """Are kernels judged as parts of a larger call, which hides their starts?

        On a CPU nothing is hidden, and one judgement serves all calls.
        """
        return self.device.platform == "cpu" or len(self.plan.steps) > 1 or self.plan.boundary.timed

    @cached_property
    def xla_call(self) -> Function:
        """Computes the whole call without any kernel."""
        return whole_call(revised(unbound(self.plan), {k.name: "to compare" for k in self.plan.kernels}))

    def call(self, plan: Plan) -> Function:
        """Returns the whole call with the kernels of a plan: the same function whenever it is asked for."""
        kernels = tuple((k.name, way_of_kernel(k)) for k in plan.kernels)
        return self._calls.setdefault(kernels, whole_call(plan))

    def forget_programs(self) -> None:
        """Lets go of all that was compiled for comparisons: a task may go on with others, for which the device needs its memory."""
        own = [f for s in self.subjects for f in (s.part.run, *s.functions)]
        calls = [*self._calls.values(), *([self.xla_call] if "xla_call" in self.__dict__ else [])]
        self.executables.forget([*own, *calls])

    def __post_init__(self) -> None:
        self.around, makers = environment(self.device), producers(self.plan.converted)
        self.subjects = []
        for kernel in self.plan.kernels:
            part = part_of(self.plan.converted, kernel, makers)
            # alone, its starts are hidden by nothing: what is measured within a larger call is not said of it
            of = "part" if self.are_parts else "call of one part"
            identity = {**self.around, "of": of, "part": part.key, "target": self.plan.target.name}
            self.subjects.append(Subject(self.plan, kernel, part, identity, self.store, self.are_parts))


def revised(plan: Plan, changes: Mapping[str, Placed | str]) -> Plan:
    """As `pipeline.revised`, which is imported only where something changes."""
    if not changes:
        return plan
    with IMPORTS:
        from pallasfuse import pipeline
    return pipeline.revised(plan, changes)


def function_of(jaxpr: Jaxpr) -> Function:
    """Returns a program as a function of its arguments, as XLA runs it."""
    return lambda *args: _compat.eval_jaxpr(jaxpr, jaxpr.consts, *args)


def whole_call(plan: Plan) -> Function:
    """Returns the call that a plan is of as a function of its arguments."""
    free, consts = unbound(plan), list(plan.converted.jaxpr.consts)
    return lambda *args: execute(free, [*consts, *args])


def unbound(plan: Plan) -> Plan:
    """Returns the plan without what a user forbids it: any of its kernels may be left out."""
    return replace(plan, options=replace(plan.options, strict=False, verify=None))
