"""Loops with several trips written out one after the other, so that XLA computes neighbouring trips together.

XLA fuses no operation of one trip with one of the next, unless both stand in one body. On a GPU, a trip of a small body is mostly
the starts of its kernels, and copies of its results to where they are stacked. The equations are those of the program, in their
order; whether that is faster, a clock decides (`loop_check`). Without one, loops are unrolled a little whose trips are nothing but
starts, or of which a few trips in one body are predicted to take less time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn
from pallasfuse.device import Device
from pallasfuse.first_time import IMPORTS
from pallasfuse.jaxpr_frontend import ALL_CALLS, SOLVER, bodies, flatten, left_by_user
from pallasfuse.loop_invariants import bytes_of

MOST_TRIPS = 16
"""With so many trips in one, 94% of what trips cost besides their work is saved."""
MOST_EQUATIONS = 384
"""The most equations of a body with its trips written out: compiling takes about as long as there are equations, or longer where
XLA computes what a trip hands on for each that reads it."""
_MOST_ADDED = 4 * MOST_EQUATIONS
"""The most equations by which a program becomes longer: loops behind that stay as they are."""
_LEAST_SHARE = 0.25
"""Of the equations of a program that are in no loop, as many must run in loops for these to be worth it."""
_STEP = 4
"""Bodies of two lengths are tried, one so many times the other: fewer trips may be faster than more."""
_KERNELS = 2
"""XLA starts at least so many kernels a trip: for its work, and to count trips and stack results."""
_LEAST_GAIN = 1.2
"""Without a clock, more trips in one body must be predicted to be so many times as fast as the best number so far: the price
exaggerates. (Of 13 loops on an H200, 2026-11-29, with two and with four trips in one body, those with such a price took 1.03 to
0.41 times as long by the times of their kernels, others 1.09 to 0.65 times.)"""
_LOOPS = frozenset({"scan", "while"})
_ENTERED = (ALL_CALLS - {SOLVER}) | _LOOPS | {"cond"}
"""What XLA compiles as part of the program: not the kernels that a user has written, and not how a user solves a system."""
_PRICED = frozenset((
    "dot_general", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin",
    "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "gather", "dynamic_update_slice", "stack", "unstack",
))  # fmt: skip
"""What a trip may do besides computing element by element, if no clock is asked."""


def unrollings(jaxpr: Jaxpr, exclude: Sequence[str] = (), *, partly: bool) -> dict[str, Jaxpr]:
    """Returns the program with the innermost loops of known length unrolled, in two ways: as far as the bounds allow, and less far.

    Each has words that say how far. What the user has unrolled, or leaves to XLA (`exclude`: as of `FuseOptions`), stays as it is.
    partly: also loops of which some trips are left, which saves starts of kernels; else only those that are loops no more.
    """
    found: dict[str, Jaxpr] = {}
    if _compat.has_symbolic_shapes(jaxpr) or _are_a_small_part(jaxpr):
        return found
    for step in (1, _STEP):
        unroller = _Unroller(
            MOST_EQUATIONS // step, MOST_TRIPS // step, exclude,
            lambda loop, most: most if partly or most == loop.params["length"] else 1,
        )  # fmt: skip
        changed = unroller.of(jaxpr)
        if changed is not jaxpr:
            found.setdefault(unroller.words, changed)
    return found


def _are_a_small_part(jaxpr: Jaxpr) -> bool:
    """Is so little of a program in its loops that nobody would see what they gain, though the whole is compiled for each way?

    Equations are counted as often as they run.
    """
    counted = [eqn for eqn in loops(jaxpr) if eqn.primitive.name == "scan"]
    trips = (e.params["length"] * equations(e.params["jaxpr"]) for e in counted if isinstance(e.params["length"], int))
    others = equations(jaxpr) - sum(equations(e.params["jaxpr"]) for e in counted)
    return sum(trips) < _LEAST_SHARE * others


def unrolled_surely(jaxpr: Jaxpr, device: Device, exclude: Sequence[str] = ()) -> Jaxpr:
    """Returns the program with those of its loops unrolled a little that need no clock: itself where there are none.

    In such a loop, what a trip reads, writes and multiplies takes less time than a GPU's shortest kernels for it, or XLA is
    predicted to take much less time for its trips if some are in one body.
    """
    if device.platform != "gpu" or _compat.has_symbolic_shapes(jaxpr):
        return jaxpr
    return _Unroller(MOST_EQUATIONS, MOST_TRIPS // _STEP, exclude, partial(_surely, device=device)).of(jaxpr)


def _surely(loop: JaxprEqn, most: int, device: Device) -> int:
    """Returns how many trips of a loop, at most so many, go into one body without a clock; 1 leaves it as it is."""
    work = work_us(loop, device)
    if work < _KERNELS * device.kernel_us:
        return most
    if most < 2 or not math.isfinite(work) or _compat.scan_counts(loop) is None:
        return 1
    chosen = 1
    try:
        best_us = _trip_us(loop, 1, device)
        powers = (1 << n for n in range(1, most.bit_length()))
        for trips in (*(n for n in powers if n < most), most):
            us = _trip_us(loop, trips, device)
            if _LEAST_GAIN * us <= best_us:
                chosen, best_us = trips, us
    except Exception:  # a program must not fail because of a form of it
        return 1
    return chosen


def priced_us(jaxpr: Jaxpr, device: Device) -> float:
    """Returns the microseconds that XLA is predicted to take for a program, but for loops of which nobody knows the trips."""
    with IMPORTS:  # few programs have such forms
        from pallasfuse.jaxpr_frontend.conversion import convert
        from pallasfuse.price.xla import price_xla
    us: float = price_xla(convert(flatten(jaxpr)).program, device).us
    return us


def _trip_us(loop: JaxprEqn, trips: int, device: Device) -> float:
    """Returns the microseconds that XLA is predicted to take for a trip of a loop that has so many in one body."""
    one = jax.make_jaxpr(partial(_in_one_body, loop, trips))(*(_compat.struct_of(v) for v in loop.invars))
    length: int = loop.params["length"] // trips * trips
    return priced_us(one, device) / length


def _in_one_body(loop: JaxprEqn, trips: int, *operands: Any) -> list[Any]:
    """Runs a loop with so many trips in one body, but for those that are left at the end: as JAX unrolls it."""
    counts = _, carried = _compat.scan_counts(loop) or (0, 0)
    body, count, reverse = loop.params["jaxpr"], loop.params["length"] // trips, loop.params["reverse"]
    fixed, states, rows = _compat.scan_parts(operands, counts)

    def several(states: tuple[Any, ...], rows: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        made: list[Any] = []
        for trip in range(trips)[:: -1 if reverse else 1]:
            found = _compat.eval_jaxpr(body, body.consts, *fixed, *states, *(row[trip] for row in rows))
            states, each = tuple(found[:carried]), found[carried:]
            made = [each, *made] if reverse else [*made, each]
        return states, [jnp.stack(column) for column in zip(*made, strict=True)]

    parts = [row[: count * trips].reshape(count, trips, *row.shape[1:]) for row in rows]
    if count == 1:
        states, made = several(states, [part[0] for part in parts])
        return [*states, *made]
    states, made = lax.scan(several, states, parts, length=count, reverse=reverse)
    return [*states, *(column.reshape(count * trips, *column.shape[2:]) for column in made)]


def work_us(loop: JaxprEqn, device: Device) -> float:
    """Returns the microseconds that the memory and the matrix units need for one trip of a loop; infinite where that is not known.

    The bytes are those of the body's operands and results, and of the largest value in between.
    """
    with IMPORTS:  # most programs have no loop
        from pallasfuse.jaxpr_frontend.conversion import is_map
    body = flatten(loop.params["jaxpr"])
    if not all(is_map(e) or e.primitive.name in _PRICED for e in body.eqns):
        return math.inf
    between = max((bytes_of(v) for e in body.eqns for v in e.outvars), default=0.0)
    moved = between + sum(bytes_of(v) for v in (*body.constvars, *body.invars, *body.outvars))
    multiplied_us = sum(_product_us(e, device) for e in body.eqns if e.primitive.name == "dot_general")
    return float(1e-3 * moved / device.memory_gb_s + multiplied_us)


def _product_us(eqn: JaxprEqn, device: Device) -> float:
    """Returns the microseconds of a product at the rate of large ones."""
    (summed, _), _ = eqn.params["dimension_numbers"]
    shape = _compat.shape_of(eqn.invars[0])
    flops = 2.0 * math.prod(_compat.shape_of(eqn.outvars[0])) * math.prod(shape[d] for d in summed)
    rate = device.matmul_tflop_s.get(str(_compat.dtype_of(eqn.invars[0])), min(device.matmul_tflop_s.values()))
    return float(1e-6 * flops / rate)


def equations(jaxpr: Jaxpr) -> int:
    """Counts the equations of a jaxpr, those of bodies and calls as well, each body once."""
    return sum(1 + sum(map(equations, bodies(eqn))) for eqn in jaxpr.eqns)


def loops(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the loops of a jaxpr, also those in bodies and calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _LOOPS:
            yield eqn
        for body in bodies(eqn):
            yield from loops(body)


class _Unroller:
    """Unrolls the loops of a jaxpr, to bodies of no more than so many equations and trips."""

    def __init__(
        self, most_equations: int, most_trips: int, exclude: Sequence[str], wanted: Callable[[JaxprEqn, int], int]
    ) -> None:
        """`wanted` is given a loop and the most trips that one body may have, and returns how many it gets."""
        self.most_equations, self.most_trips, self.exclude, self.wanted = most_equations, most_trips, exclude, wanted
        self.added = 0
        """The equations by which the program has become longer."""
        self._trips: list[int] = []
        self._done: dict[int, Jaxpr] = {}

    @property
    def words(self) -> str:
        """Words that say how many trips are written out in which number of loops."""
        counts = {n: self._trips.count(n) for n in self._trips}
        return ", ".join(f"{n} trips" if c == 1 else f"{n} trips in {c} loops" for n, c in counts.items())

    def of(self, jaxpr: Jaxpr) -> Jaxpr:
        """Returns the jaxpr with unrolled loops; itself where there are none. Calls of one function stay calls of one function."""
        if id(jaxpr) not in self._done:
            eqns = [self._equation(eqn) for eqn in jaxpr.eqns]
            same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
            made = jaxpr if same else _compat.replace_jaxpr(jaxpr, jaxpr.constvars, jaxpr.consts, eqns, jaxpr.outvars)
            self._done[id(jaxpr)] = made
        return self._done[id(jaxpr)]

    def _equation(self, eqn: JaxprEqn) -> JaxprEqn:
        if "call" in eqn.params or eqn.effects or left_by_user(eqn, self.exclude) is not None:
            return eqn
        if eqn.primitive.name == "scan" and not any(loops(eqn.params["jaxpr"])):
            trips = self._trips_of(eqn)
            if trips < 2:
                return eqn
            added = (trips - 1) * equations(eqn.params["jaxpr"])
            if self.added + added > _MOST_ADDED:
                return eqn
            self._trips.append(trips)
            self.added += added
            return _compat.with_params(eqn, {**eqn.params, "unroll": trips})
        if eqn.primitive.name not in _ENTERED:
            return eqn
        changed = {name: self._parameter(value) for name, value in eqn.params.items()}
        if all(changed[name] is value for name, value in eqn.params.items()):
            return eqn
        return _compat.with_params(eqn, changed)

    def _trips_of(self, eqn: JaxprEqn) -> int:
        """Returns how many trips of a loop become one: all of them, or a power of two; 1 where the user has said how many."""
        length, own = eqn.params["length"], max(1, equations(eqn.params["jaxpr"]))
        if eqn.params["unroll"] != 1 or not isinstance(length, int) or length < 2:  # it may be symbolic
            return 1
        most = min(self.most_trips, max(1, self.most_equations // own))
        return self.wanted(eqn, length if length <= most else 1 << (most.bit_length() - 1))

    def _parameter[T](self, value: T) -> T:
        if isinstance(value, Jaxpr):
            return self.of(value)  # type: ignore[return-value]
        if isinstance(value, tuple | list) and any(isinstance(v, Jaxpr) for v in value):
            found = [self.of(v) if isinstance(v, Jaxpr) else v for v in value]
            changed = any(new is not old for new, old in zip(found, value, strict=True))
            return type(value)(found) if changed else value  # type: ignore[return-value,call-arg]
        return value
