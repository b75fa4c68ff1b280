"""Loops that are one kernel: what a trip hands on stays in registers, where XLA starts several kernels a trip.

Each trip of a small loop on a GPU is little but the starts of its kernels, and waiting for them. `tiling.recurrence` says which
loops need no value of another block, and lowers their bodies; here such an equation of a jaxpr is replaced by one that runs the
kernel (`loop_calls`).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn
from pallasfuse.decompositions.accumulators import accumulators_apart
from pallasfuse.decompositions.known_places import with_choices_at_known_places
from pallasfuse.decompositions.random_keys import has_keys, of_words
from pallasfuse.decompositions.selections import is_selection, without_selections
from pallasfuse.decompositions.systems import in_columns
from pallasfuse.decompositions.writing import Run, Writer, traced_as, with_source_of
from pallasfuse.device import Device
from pallasfuse.errors import Refusal
from pallasfuse.first_time import IMPORTS
from pallasfuse.ir.axes import Axis
from pallasfuse.jaxpr_frontend import Converted, flatten, left_by_user
from pallasfuse.loop_calls import LEFT_TO_XLA, KernelOfLoop, loops_as_kernels, recurrence_p
from pallasfuse.loop_distribution import distributed
from pallasfuse.price.kernel import price_kernel
from pallasfuse.resources import triton
from pallasfuse.resources.as_threads import as_threads_run_it
from pallasfuse.targets import TRITON, Target
from pallasfuse.tiling.recurrence import (
    Layout,
    Recurrence,
    each_of,
    last_of,
    layouts,
    lower_recurrence,
    parallel_axes,
    problem,
)

_MOST_EQUATIONS = 512
"""A loop body with more equations is not tried: its kernel would take long to compile."""
_MOST_WITH_SYSTEMS = 1200
"""The most equations of a body with its systems, updates and keys written out. (On an H200 kernels of 676 equations took 1.7 s to
compile; the largest that ran there has 1090.)"""
_SHORTEST = 4
"""Loops of fewer trips stay with XLA, which writes them out."""
_REGISTERS_OF_CONSTANTS = 64
"""The registers that a thread may use for constants; that all of them stay in registers is tried as well."""


@dataclass(frozen=True, slots=True)
class AsKernel:
    """A rule of decompositions: a loop as one kernel of a device, where it can be one."""

    device: Device
    exclude: tuple[str, ...] = ()
    """As of `FuseOptions`: a loop in whose body the user leaves something to XLA is left to it."""
    fails: Callable[[KernelOfLoop], bool] = lambda _: False
    """Is a kernel known to fail on the device? Then its loop is left to XLA."""
    shortest: int = _SHORTEST
    """The fewest trips of a loop that is a kernel."""
    fastest: Callable[[KernelOfLoop], str | None] = lambda _: None
    """Returns the name of the layout that a clock has found the fastest for the loop of a kernel, or `LEFT_TO_XLA`; None where no
    clock was asked."""
    _known: dict[tuple[Any, ...], tuple[JaxprEqn, Run | None]] = field(default_factory=dict)
    """The answers, with the equations that they were found for: a flattened program has the same bodies in other equations."""

    def __call__(self, eqn: JaxprEqn) -> Run | None:
        """Returns what computes a loop by its kernel, and what need not be in it before and after; None where it has no kernel."""
        body, others = eqn.params.get("jaxpr"), {k: v for k, v in eqn.params.items() if k != "jaxpr"}
        avals, source = [v.aval for v in (*eqn.invars, *eqn.outvars)], _compat.source_summary(eqn)
        key = id(body), f"{eqn.primitive.name} {others} {avals} {source} {eqn.source_info.name_stack} {eqn.ctx}"
        if key not in self._known:
            self._known[key] = eqn, self._run(eqn)
        return self._known[key][1]

    def _run(self, eqn: JaxprEqn) -> Run | None:
        body = flatten(_compat.within_scopes_of(eqn.params["jaxpr"], eqn))
        left = any(left_by_user(e, self.exclude) is not None for e in body.eqns)
        if left or not isinstance(eqn.params["length"], int) or len(body.eqns) > _MOST_EQUATIONS:
            return None
        inside = with_choices_at_known_places(in_columns(eqn.params["jaxpr"]))
        chosen = _compat.with_params(eqn, {**eqn.params, "jaxpr": inside})
        ways: list[Run | None]
        if has_keys(chosen):
            ways = [of_words(chosen)]
        else:
            ways = [accumulators_apart(chosen), lambda *args: list(_compat.bind(chosen, args))]
        for way in filter(None, ways):
            simpler = with_loops(with_source_of(eqn, traced_as(eqn, way, eqn.invars)), distributed)
            by_xla: list[JaxprEqn] = []
            found = None if simpler is None else with_loops(simpler, functools.partial(self._as_kernel, left=by_xla))
            if found is not None:
                return self._unless_it_fails(found)
            if by_xla:
                return None  # the same loop in another way was not compared
        return None

    def _unless_it_fails(self, jaxpr: Jaxpr) -> Run | None:
        failing = any(map(self.fails, loops_as_kernels(jaxpr)))
        return None if failing else functools.partial(_compat.eval_jaxpr, jaxpr, jaxpr.consts)

    def _as_kernel(self, eqn: JaxprEqn, left: list[JaxprEqn]) -> Run | None:
        """Returns what runs a scan as a kernel. left: those that a clock has left to XLA; is added to."""
        if not _may_be_kernel(eqn) or len(flatten(eqn.params["jaxpr"]).eqns) > _MOST_WITH_SYSTEMS:
            return None
        found = kernels_of(eqn, self.device, self.shortest)
        if isinstance(found, Refusal):
            return None
        name = self.fastest(found[0])
        if name == LEFT_TO_XLA:
            left.append(eqn)
            return None
        chosen = next((k for k in found if k.layout_name == name), found[0])
        return lambda *args: list(recurrence_p.bind(*args, of=chosen))


@dataclass(frozen=True, slots=True)
class InLoops(AsKernel):
    """A rule of decompositions: another operation than a loop, as loops that are kernels, where all of them can be."""

    way: Callable[[JaxprEqn], Run | None] = lambda _: None
    """Returns what computes the operation by loops; None where it knows nothing."""

    def _run(self, eqn: JaxprEqn) -> Run | None:
        way = self.way(eqn)
        written = None if way is None else with_source_of(eqn, traced_as(eqn, way, eqn.invars))
        found = None if written is None else with_loops(written, functools.partial(self._as_kernel, left=[]))
        return None if found is None else self._unless_it_fails(found)


def _may_be_kernel(eqn: JaxprEqn) -> bool:
    """Are all operations of a scan's body ones that a kernel may have? Shapes and types are not looked at."""
    with IMPORTS:
        from pallasfuse.jaxpr_frontend.conversion import may_have_nest
    return all(may_have_nest(e) or is_selection(e) for e in flatten(eqn.params["jaxpr"]).eqns)


def with_loops(jaxpr: Jaxpr, rule: Callable[[JaxprEqn], Run | None]) -> Jaxpr | None:
    """Returns a jaxpr, flat, in which every scan is what a rule says; None where it says nothing for one."""
    flat = flatten(jaxpr)
    writer = Writer(flat)
    for eqn in flat.eqns:
        run = rule(eqn) if eqn.primitive.name == "scan" else None
        if run is not None:
            writer.instead(eqn, run)
        elif eqn.primitive.name == "scan":
            return None
        else:
            writer.keep(eqn)
    return flatten(writer.written())


def trip_of(eqn: JaxprEqn, shortest: int = _SHORTEST) -> Converted | Refusal:
    """Converts one trip of a scan; the dimensions of what it leaves to the next trip are those of what it was left."""
    with IMPORTS:  # most programs have no loop
        from pallasfuse.jaxpr_frontend.conversion import convert

    counts, length = _compat.scan_counts(eqn), eqn.params["length"]
    if counts is None or not isinstance(length, int) or length < shortest:
        return Refusal("it has few trips, or nobody knows how many")
    body = without_selections(eqn.params["jaxpr"])
    if body.consts or body.effects or eqn.effects or not eqn.outvars:
        return Refusal("it has side effects, arrays of its own, or no results")
    constants, carried = counts

    def tied(*operands: Any) -> list[Any]:
        results = _compat.eval_jaxpr(body, (), *operands)
        states = operands[constants : constants + carried]
        # never true: it says which dimensions of what goes into a trip are which of what comes out of it
        return [*(lax.select(False, x, y) for x, y in zip(states, results, strict=False)), *results[carried:]]

    return convert(jax.make_jaxpr(tied)(*(_compat.struct_of(v) for v in body.invars)))


def recurrence_of(
    eqn: JaxprEqn, shortest: int = _SHORTEST
) -> tuple[Recurrence, tuple[str, ...], tuple[str, ...]] | Refusal:
    """The recurrence that a scan is, with the names of its operands and results in a kernel."""
    converted, counts = trip_of(eqn, shortest), _compat.scan_counts(eqn)
    if isinstance(converted, Refusal):
        return converted
    assert counts is not None
    constants, carried = counts
    program, results = converted.program, tuple(r for r in converted.results if isinstance(r, str))
    if converted.jaxpr.constvars or len(results) < len(converted.results):
        return Refusal("a result of a trip is a number, or an array that the program holds")
    names = tuple(t.name for t in program.inputs)
    states = tuple(zip(names[constants:], results[:carried], strict=False))
    own = {d.name: d.axes for d in program.definitions()}
    if any([a.extent for a in own[x]] != [a.extent for a in own[y]] for x, y in states):
        return Refusal("what goes into a trip has other dimensions than what comes out of it")
    found = Recurrence(
        f"loop_{'_'.join(results[:3])}", program, Axis("trip", eqn.params["length"]), states, names[constants + carried :],
        results[carried:], eqn.params["reverse"],
    )  # fmt: skip
    return found, names, (*(last_of(x) for x, _ in states), *map(each_of, results[carried:]))


def kernel_of(eqn: JaxprEqn, device: Device, shortest: int = _SHORTEST) -> KernelOfLoop | Refusal:
    """The kernel that runs a scan in the least time by its price, or why there is none."""
    found = kernels_of(eqn, device, shortest)
    return found if isinstance(found, Refusal) else found[0]


def kernels_of(eqn: JaxprEqn, device: Device, shortest: int = _SHORTEST) -> tuple[KernelOfLoop, ...] | Refusal:
    """The kernels that may run a scan, in all layouts, the cheapest first; or why there is none."""
    target = TRITON.on(device)
    found = recurrence_of(eqn, shortest)
    if isinstance(found, Refusal):
        return found
    recurrence, operands, results = found
    refused = problem(recurrence, target)
    if refused is not None:
        return refused
    found_at: list[tuple[float, KernelOfLoop]] = []
    every = frozenset(t.name for t in recurrence.constants)
    for layout in layouts(recurrence, target):
        for kept in dict.fromkeys((_kept(recurrence, layout, target), every)):
            chosen = replace(layout, kept=kept)
            program = lower_recurrence(recurrence, chosen, target)
            own = as_threads_run_it(program).program
            if triton.resources(own, target).shared_bytes > target.shared_memory_bytes:
                continue
            price = price_kernel([(program, target)])
            # the price knows of spilled registers only what is sure: what may have more must be faster beyond its error
            at_most_us = price.us * (device.price_error if triton.may_spill(own, target) else 1.0)
            found_at.append((at_most_us, KernelOfLoop(eqn, program, operands, results, price, chosen, target)))
    if not found_at:
        parallel = parallel_axes(recurrence)
        least = recurrence.largest(lambda a: 1 if a in parallel else target.padded(a.extent))
        return Refusal(f"no block has registers or shared memory for what it holds: values of {least} elements or more")
    return tuple(kernel for _, kernel in sorted(found_at, key=lambda priced: priced[0]))


def _kept(recurrence: Recurrence, layout: Layout, target: Target) -> frozenset[str]:
    """The constants that are loaded once: those that matrix units find in shared memory, and in registers others, smallest first.

    (Of 73 layouts of an H200's loops with products that loaded some constants in each trip, one took 0.71 of the time that it takes
    with all of them kept, nine 0.98 to 1, the others 1 to 12 times as long. The compiler may hold all at once then, too.)
    """
    blocks = dict(layout.grid)

    def tile(axis: Axis) -> int:
        return blocks.get(axis, target.padded(axis.extent))

    sizes = {t.name: math.prod(map(tile, t.axes)) for t in recurrence.constants}
    left, kept = _REGISTERS_OF_CONSTANTS * 32 * layout.warps, set(recurrence.multiplied(tile))
    for name in sorted(sizes.keys() - kept, key=sizes.__getitem__):
        left -= sizes[name]
        if left >= 0:
            kept.add(name)
    return frozenset(kept)
