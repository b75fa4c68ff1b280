"""Operations that XLA runs one element at a time, decomposed into others that it fuses.

For some operations XLA has neither a library nor a loop that uses the vector units (which, depends on the platform). What they
compute can be said by operations for which it has. Whether that is faster, the price says, operation by operation, and then a
clock for the whole program (`written_out`). Values change as by another order of sums, by a rounding more in powers, and by
a few units in the last place in sines, tangents and their inverses.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions import (
    angles,
    arcs,
    in_place,
    joins,
    largest,
    places,
    powers,
    products,
    ragged,
    random_words,
    running,
    short_axes,
    sorting,
    updates,
    window_axes,
    windows,
)  # fmt: skip
from pallasfuse.decompositions.neighbours import NONE, Neighbours, computed_again, neighbours
from pallasfuse.decompositions.operand_orders import sums_of_products, with_more_rows_first
from pallasfuse.decompositions.shared_operands import with_fewer_merges
from pallasfuse.decompositions.writing import (
    Run,
    Writer,
    as_usual,
    has_types_of,
    traced_as,
    with_results,
    with_source_of,
)
from pallasfuse.device import Device
from pallasfuse.first_time import IMPORTS
from pallasfuse.jaxpr_frontend import called, flatten, left_by_user, with_bodies
from pallasfuse.price.terms import Price
from pallasfuse.primitive_names import WITH_BODIES

__all__ = ["Decomposer", "Rule", "WithKernels"]

type Rule = Callable[[JaxprEqn], Run | None]
"""Returns what computes an operation in another way; None where it knows none."""
type WithKernels = Callable[[Jaxpr], tuple[Run, float]]
"""Returns what runs a jaxpr with the kernels that are planned for it, and the microseconds that this is predicted to take."""
type Clock = Callable[[Jaxpr, Jaxpr], bool | None]
"""Is the second of two programs of one operation faster than the first? None: nobody knows."""

_POOLS: dict[str, tuple[Rule, ...]] = dict.fromkeys(
    ("reduce_window_max", "reduce_window_min", "reduce_window_sum"), (windows.pool,)
)
_RULES: dict[str, dict[str, tuple[Rule, ...]]] = {
    "gpu": {
        **_POOLS,
        "concatenate": (joins.choice,),
        "conv_general_dilated": (
            windows.convolution,
            windows.evened,
            windows.patches,
            windows.few_positions,
            windows.of_examples,
            windows.by_channel,
            window_axes.along_fewer,
            window_axes.beside_each_other,
        ),
        "dot_general": (products.aligned, products.of_few_terms),
        "top_k": (
            *map(largest.of_parts, largest.LENGTHS),
            *map(largest.of_short_parts, largest.SHORT_LENGTHS),
        ),
        "ragged_dot_general": (ragged.in_blocks,),
        "scatter-add": (updates.in_single_steps, updates.by_place, *map(updates.in_copies, updates.COPIES)),
    },
    "cpu": {
        **_POOLS,
        **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), (running.running,)),
        **dict.fromkeys(("argmax", "argmin"), (places.first_place,)),
        "conv_general_dilated": (
            windows.convolution,
            windows.few_positions,
            windows.by_channel,
            windows.by_features,
            windows.each_group,
            windows.of_slices,
            window_axes.along_fewer,
            window_axes.beside_each_other,
        ),
        "dot_general": (products.product,),
        "ragged_dot_general": (ragged.in_blocks,),
        "pow": (powers.power,),
        "rsqrt": (powers.inverse_root,),
        **dict.fromkeys(("sin", "cos", "tan"), (angles.wave,)),
        **dict.fromkeys(("atan2", "atan", "asin", "acos"), (arcs.arc,)),
        "sort": (sorting.by_integers,),
        "random_bits": (random_words.bits,),
        "threefry2x32": (random_words.words,),
    },
}
"""The rules that may be worth it, by platform."""
_IN_BODIES: dict[str, dict[str, Rule]] = {"cpu": {"conv_general_dilated": windows.in_order}}
"""The rules for operations in bodies of loops and in branches that XLA itself computes in another way elsewhere."""
_OF_LOOPS = {"scan": in_place.updated_in_place}
"""The rules by which loops are other loops, of the same bodies; they are told which equations may be written in another way."""
_SURE_OF_COPIES = 1.03
"""A loop that computes the same with fewer copies must be predicted to be so many times as fast on a GPU: what both prices have
wrong is the same. (Seven programs on an H200 were 1.2 to 2 times as fast. Fifteen loops compiled for an H100, whose new slices are
reduced, multiplied, sorted or stacked, copy no array in a trip.) On a CPU a clock must say so."""
_FOR_KERNELS = frozenset({"ragged_dot_general"})
"""Operations whose other ways are worth it where kernels take part in them: XLA would write parts of an operand anew."""
_WITH_NEIGHBOURS = frozenset({"concatenate", "dot_general"})
"""Operations of which other ways pad operands, take a part of a larger result, or find what gathers take for each element: priced
with what stands around them (GPUs)."""
_STORED_FIRST = frozenset({"conv_general_dilated"})
"""Operations of which other ways are sums over arrays as large as the result. On a CPU the sum is in memory before several
operations read it, or one that reduces or multiplies: XLA would compute it in each, or give a library products and additions one by
one, with every array of the sum in memory. (On two cores, four programs with such convolutions took 0.47 to 1.00 times as long.)"""
_CHOICE_US = 60.0
"""A choice takes so long on a CPU, by itself: the loop that finds the condition, and to wait for it. (Inverse tangents and tangents
of 1000 to 20,000 numbers on two cores, 2026-11-29: 20 to 80. GPUs have no way with a choice.)"""
_LEAST_US = 20.0
"""Operations that are predicted to take less, in all trips of the loops around them, stay as they are: nobody would see what
another way gains."""
_TRIPS = {"while": 10}
"""Loops of which nobody knows the trips are taken to have so many."""
_FEWEST_KERNELS = 4
"""Operations in loops that take no longer than so many kernels that do nothing stay as they are: another way has kernels, too."""


@dataclass(frozen=True, slots=True)
class Decomposer:
    """Decides which operations are decomposed, and does it.

    exclude: as of `FuseOptions`: what the user leaves to XLA stays as it is. gain: how many times as fast another way must be
    predicted to be. clock: times operations instead, where it can.
    """

    device: Device
    exclude: tuple[str, ...]
    gain: float
    clock: Clock | None = None
    rules: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    """Further rules, by the names of operations."""
    with_kernels: WithKernels | None = None
    """Runs other ways with kernels where that is what makes them faster; None: nothing is planned."""
    short_axes: bool = True
    """Also arrays with a short last axis are written as one for each position."""
    spared: frozenset[str] = frozenset()
    """The names of operations that stay as they are in bodies of loops and in branches."""
    _known: dict[str, int | None] = field(default_factory=dict)
    """The answers of `_fastest` by the texts of operations, and of `_with_other_operands` (0: it is) by those of products: the
    layers of a model have the same ones."""
    _written_us: dict[str, float] = field(default_factory=dict)
    """The prices of operations as they are written, by the same texts."""
    _runs: dict[tuple[str, int], Run] = field(default_factory=dict)
    """The functions that run an operation in another way with kernels of its own, by the text of the operation, as in `_known`, and
    the number of the way."""

    def of(self, jaxpr: Jaxpr, trips: int | None = None) -> Jaxpr:
        """Returns the program with operations decomposed; itself where nothing is.

        trips: how often it runs, if it is a body of loops or a branch.
        """
        if _compat.has_symbolic_shapes(jaxpr) or not self._may_have_some(jaxpr):
            return jaxpr
        flat = flatten(jaxpr)
        writer, changed = Writer(flat), False
        makers = {v: eqn for eqn in flat.eqns if self._may(eqn) for v in eqn.outvars}
        around = neighbours(flat) if self.device.platform == "gpu" else lambda _: NONE
        again = computed_again(flat) if self.device.platform == "cpu" else frozenset()
        read = {a for eqn in flat.eqns for a in eqn.invars if not isinstance(a, Literal)}.union(
            a for a in flat.outvars if not isinstance(a, Literal)
        )
        sums = sums_of_products(flat) if self.device.platform == "cpu" else {}
        for eqn in flat.eqns:
            if (
                not eqn.effects
                and self._may(eqn)
                and (
                    self._with_other_operands(writer, eqn, makers, sums, trips)
                    or self._write(writer, eqn, around, read, again, trips)
                )
            ):
                changed = True
            else:
                writer.keep(eqn)
        made = writer.written() if changed else flat
        if self.device.platform == "gpu":
            apart = self._with_fewer_merges(made)
            made, changed = apart, changed or apart is not made
        if self._takes_axes_apart:
            apart = self._with_short_axes_apart(made)
            if apart is not made and self.gain * self._price_us(apart) <= self._price_us(made):
                made, changed = apart, True
        return made if changed else jaxpr

    def questions(self, jaxpr: Jaxpr) -> list[tuple[Jaxpr, Jaxpr]]:
        """Returns what `of` asks the clock: operations as they are written, each with another way to compute it; between stand-ins
        for their neighbours where these count."""
        asked: list[tuple[Jaxpr, Jaxpr]] = []
        replace(self, clock=lambda *pair: asked.append(pair), _known={}).of(jaxpr)
        return asked

    def _with_fewer_merges(self, jaxpr: Jaxpr) -> Jaxpr:
        """Writes products so that XLA merges fewer of them (`shared_operands`); returns the jaxpr itself where that fails."""
        try:
            return with_fewer_merges(jaxpr, self._may, self.device, self._price, self.gain)
        except Exception:  # a program must not fail because of a form of it
            return jaxpr

    @property
    def _takes_axes_apart(self) -> bool:
        return self.short_axes and self.device.platform == "cpu"

    def _with_short_axes_apart(self, jaxpr: Jaxpr) -> Jaxpr:
        """Writes short axes out (`short_axes`); returns the jaxpr itself where that fails or changes the types of results."""
        try:
            made = short_axes.with_short_axes_apart(jaxpr, self._may)
        except Exception:  # a program must not fail because of a form of it
            return jaxpr
        return made if has_types_of(made.outvars, jaxpr.outvars) else jaxpr

    def _may(self, eqn: JaxprEqn) -> bool:
        """May an equation be written in another way, or has the user left it to XLA?"""
        return left_by_user(eqn, self.exclude) is None

    def _write(
        self, writer: Writer, eqn: JaxprEqn, around: Callable[[JaxprEqn], Neighbours], read: Collection[Var],
        again: Collection[Var], trips: int | None,
    ) -> bool:  # fmt: skip
        """Write an equation in another way; False where there is none that is faster.

        read: what something reads; again: what is read so that XLA would compute it again (`computed_again`); trips: as in `of`.
        """
        name = eqn.primitive.name
        wanted = tuple(v in read for v in eqn.outvars)
        run = None
        if not self._is_spared(eqn, trips):
            beside = around(eqn) if name in _WITH_NEIGHBOURS else NONE
            run = self._faster_way(eqn, beside, wanted, self._least_us(trips), self._ways(eqn))
            as_elsewhere = None if run is not None or trips is None else self._as_elsewhere(eqn)
            if as_elsewhere is not None:
                writer.instead(eqn, as_elsewhere)
                return True
        if run is None and name in WITH_BODIES:
            inside = (trips or 1) * (eqn.params["length"] if name == "scan" else _TRIPS.get(name, 1))
            made = with_bodies(eqn, partial(self._body, trips=inside), scoped=bool(self.exclude))
            run = self._other_loop(made, wanted, trips)
            if run is None and made is not eqn:
                writer.keep(made)
                return True
            eqn = made
        if run is None:
            return False
        stored = name in _STORED_FIRST and any(v in again for v in eqn.outvars)
        writer.instead(eqn, (lambda *operands: lax.optimization_barrier(run(*operands))) if stored else run)
        return True

    def _other_loop(self, eqn: JaxprEqn, wanted: Sequence[bool], trips: int | None) -> Run | None:
        """Returns what computes a loop, whose body is decomposed, as another one that is faster; None where none is."""
        if (way := self._way_of_loop(eqn)) is None:
            return None
        # on a CPU an update may be computed inside of what reads it, beside a copy of the whole array: only a clock knows
        surer = replace(self, gain=math.inf if self.device.platform == "cpu" else min(self.gain, _SURE_OF_COPIES))
        return surer._faster_way(eqn, NONE, wanted, self._least_us(trips), [way], of_loop=True)

    def _way_of_loop(self, eqn: JaxprEqn) -> Run | None:
        """Returns what computes a loop as another loop; None where no rule knows one, or it fails."""
        rule = _OF_LOOPS.get(eqn.primitive.name)
        return None if rule is None else _unless_it_fails(partial(rule, may=self._may), eqn)

    def _with_other_operands(
        self,
        writer: Writer,
        eqn: JaxprEqn,
        makers: Mapping[Var, JaxprEqn],
        sums: Mapping[Var, JaxprEqn],
        trips: int | None,
    ) -> bool:
        """Write a product with what is transposed before, or with its operands in the other order (CPUs); False where there is no
        such product, or it is not faster. sums: as of `sums_of_products`."""
        if self.device.platform != "cpu" or self._is_spared(eqn, trips):
            return False
        try:
            is_dot = eqn.primitive.name == "dot_general"
            found = products.untransposed(eqn, makers) if is_dot else with_more_rows_first(eqn, makers, sums)
            if found is None:
                return False
            written, other = (traced_as(eqn, run, found.atoms) for run in (found.written, found.other))
            key = str(written)
            if self._as_written_us(key, lambda: written) < self._least_us(trips):
                return False
            if key not in self._known:
                is_worth_it = self._is_faster(written, self._written_us[key], other, self._price_us(other))
                self._known[key] = 0 if is_worth_it else None
        except Exception:  # a program must not fail because of a form of it
            return False
        if self._known[key] is None:
            return False
        writer.keep(found.eqn)
        return True

    def _as_elsewhere(self, eqn: JaxprEqn) -> Run | None:
        """Returns what computes an operation of a body as XLA does it elsewhere; None where there is no such way."""
        rule = _IN_BODIES.get(self.device.platform, {}).get(eqn.primitive.name)
        try:
            run = None if rule is None else rule(eqn)
            made = None if run is None else traced_as(eqn, run, eqn.invars)
            return run if made is not None and has_types_of(made.outvars, eqn.outvars) else None
        except Exception:  # a program must not fail because of a form of it
            return None

    def _is_spared(self, eqn: JaxprEqn, trips: int | None) -> bool:
        """Does an operation stay as it is, as it stands in a body? trips: as in `of`."""
        return trips is not None and eqn.primitive.name in self.spared

    def _least_us(self, trips: int | None) -> float:
        """Returns the microseconds that one run of an operation must be predicted to take for another way to be looked for."""
        one_us = self.device.kernel_us + self.device.launch_us
        return max(_LEAST_US / max(1, trips or 1), min(_LEAST_US, _FEWEST_KERNELS * one_us))

    def _as_written_us(self, key: str, written: Callable[[], Jaxpr]) -> float:
        """Returns the microseconds that an operation is predicted to take alone, as it is written; 0 where nobody can say."""
        if key not in self._written_us:
            self._written_us[key] = 0.0
            with contextlib.suppress(Exception):  # a program must not fail because of a form of it
                self._written_us[key] = self._price_us(written())
        return self._written_us[key]

    def has_rules(self, names: Collection[str]) -> bool:
        """Are there rules for one of some operations on this platform?"""
        return any(self.rules.get(name) or _RULES.get(self.device.platform, {}).get(name) for name in names)

    def _is_faster(self, written: Jaxpr, before_us: float, other: Jaxpr, us: float) -> bool:
        """Is another way to compute an operation faster, by the clock, or where there is none, by so much by its price?"""
        timed = None if self.clock is None else self.clock(written, other)
        return self.gain * us <= before_us if timed is None else timed

    def _ways(self, eqn: JaxprEqn) -> list[Run]:
        """The functions that compute an operation in other ways: those of the rules that have one, and do not fail."""
        name = eqn.primitive.name
        rules = *_RULES.get(self.device.platform, {}).get(name, ()), *self.rules.get(name, ())
        return [run for rule in rules if (run := _unless_it_fails(rule, eqn)) is not None]

    def _body(self, body: Jaxpr, trips: int) -> Jaxpr:
        """Returns the body of a loop or a choice decomposed, where it has the same types then. trips: how often it runs."""
        made = self.of(body, trips)
        return made if has_types_of(made.outvars, body.outvars) else body

    def _may_have_some(self, jaxpr: Jaxpr) -> bool:
        """Is there an operation that might be decomposed in a jaxpr, or in what it calls?"""
        seen = set[int]()  # equal layers call one function
        axes = self._takes_axes_apart
        on_cpu, in_bodies = self.device.platform == "cpu", _IN_BODIES.get(self.device.platform, {})

        def within(part: Jaxpr) -> bool:
            if id(part) in seen:
                return False
            seen.add(id(part))
            dots = sum(eqn.primitive.name == "dot_general" for eqn in part.eqns)
            return (not on_cpu and dots > 1) or any(
                self._ways(eqn)
                or self._way_of_loop(eqn) is not None
                or (on_cpu and eqn.primitive.name in ("transpose", "reduce_sum"))
                or eqn.primitive.name in in_bodies
                or (axes and any(map(short_axes.is_short, eqn.outvars)))
                or any(map(within, called(eqn)))
                for eqn in part.eqns
            )

        return within(jaxpr)

    def _faster_way(
        self, eqn: JaxprEqn, around: Neighbours, wanted: Sequence[bool], least_us: float, ways: Sequence[Run], *,
        of_loop: bool = False,
    ) -> Run | None:  # fmt: skip
        """Returns a faster one of some ways to compute an operation: by the clock, or without one by its price; None if none is.

        wanted: says of each result whether something reads it. least_us: what it must be predicted to take as it is written.
        of_loop: the ways are other loops (`_other_loop`).
        """
        if not ways or not any(wanted):
            return None
        values = [a.val if isinstance(a, Literal) else None for a in eqn.invars]
        avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        key = f"{eqn.primitive.name} {eqn.params} {avals} {values} {around} {wanted} {of_loop}"
        if self._as_written_us(key, partial(_alone, eqn)) < least_us:
            return None
        if key not in self._known:
            self._known[key] = self._fastest(eqn, ways, key, around, wanted)
        number = self._known[key]
        return None if number is None else self._runs.get((key, number), ways[number])

    def _fastest(
        self, eqn: JaxprEqn, ways: Sequence[Run], key: str, around: Neighbours, wanted: Sequence[bool]
    ) -> int | None:
        """Returns the number of the way that `_faster_way` takes: of several, the one with the least price that is fast enough."""
        try:
            written, before_us = _alone(eqn), self._written_us[key]
            if around.have_stand_ins:
                written = traced_as(eqn, around.around(lambda *values: _compat.bind(eqn, values)), eqn.invars)
                before_us = self._price_us(written)
            elif not all(wanted):
                written = with_results(written, wanted)
                before_us = self._price_us(written)
        except Exception:  # a program must not fail because of a form of it
            return None
        others: dict[int, Jaxpr] = {}
        prices_us: dict[int, float] = {}
        for number, run in enumerate(ways):
            with contextlib.suppress(Exception):  # a way that fails when it is traced is none
                other, us = self._traced(eqn, run, (key, number))
                if has_types_of(other.outvars, eqn.outvars) and has_types_of(other.invars, eqn.invars):
                    if around.have_stand_ins:
                        other = traced_as(eqn, around.around(run), eqn.invars)
                        us = self._price_us(other)
                    elif not all(wanted):
                        other = with_results(other, wanted)
                        us = self._way_us(other)
                    others[number], prices_us[number] = other, us
        for number in sorted(others, key=prices_us.__getitem__):
            if self._is_faster(written, before_us, others[number], prices_us[number]):
                return number
        return None

    def _traced(self, eqn: JaxprEqn, run: Run, key: tuple[str, int]) -> tuple[Jaxpr, float]:
        """Returns the jaxpr of another way to compute an operation, and the microseconds that it is predicted to take."""
        other = traced_as(eqn, run, eqn.invars)
        if self.with_kernels is None or eqn.primitive.name not in _FOR_KERNELS or other.constvars:
            return other, self._way_us(other)
        self._runs[key], us = self.with_kernels(with_source_of(eqn, other))
        return traced_as(eqn, self._runs[key], eqn.invars), us

    def _way_us(self, way: Jaxpr) -> float:
        """Returns the microseconds that XLA is predicted to take for another way to compute an operation, with usual operands."""
        usual, choices = as_usual(way)
        return self._price_us(usual) + _CHOICE_US * choices

    def _price_us(self, jaxpr: Jaxpr) -> float:
        """Returns the microseconds that XLA is predicted to take for a jaxpr."""
        return self._price(jaxpr).us

    def _price(self, jaxpr: Jaxpr) -> Price:
        """Returns what XLA is predicted to take for a jaxpr, by terms."""
        with IMPORTS:  # most programs have nothing to decompose
            from pallasfuse.jaxpr_frontend.conversion import convert
            from pallasfuse.price.xla import price_xla
        return price_xla(convert(flatten(jaxpr)).program, self.device)


def _unless_it_fails(rule: Rule, eqn: JaxprEqn) -> Run | None:
    """Returns what a rule has for an equation; None where it fails: a program must not fail because of a form of it."""
    with contextlib.suppress(Exception):
        return rule(eqn)
    return None


def _alone(eqn: JaxprEqn) -> Jaxpr:
    """Returns a program that computes one operation, as it is written."""
    return traced_as(eqn, lambda *values: _compat.bind(eqn, values), eqn.invars)
