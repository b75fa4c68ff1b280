"""Loops with several trips written out one after the other, so that XLA computes neighbouring trips together.

XLA fuses no operation of one trip with one of the next, unless both stand in one body. On a GPU, a trip of a small body is mostly
the starts of its kernels, and copies of its results to where they are stacked. The equations are those of the program, in their
order; whether that is faster, a clock decides (`loop_check`).
"""

from collections.abc import Iterator, Sequence

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn
from pallasfuse.jaxpr_frontend import bodies, left_by_user

MOST_TRIPS = 16
"""With so many trips in one, 94% of what trips cost besides their work is saved."""
MOST_EQUATIONS = 384
"""The most equations of a body with its trips written out, and a quarter of the most of a whole program: compiling takes about as
long as there are equations, or longer where XLA computes what a trip hands on for each that reads it."""
_STEP = 4
"""Bodies of two lengths are tried, one so many times the other: fewer trips may be faster than more."""
_LOOPS = frozenset({"scan", "while"})


def unrollings(jaxpr: Jaxpr, exclude: Sequence[str] = (), *, partly: bool) -> dict[str, Jaxpr]:
    """Returns the program with the innermost loops of known length unrolled, in two ways: as far as the bounds allow, and less far.

    Each has words that say how far. What the user has unrolled, or leaves to XLA (`exclude`: as of `FuseOptions`), stays as it is.
    partly: also loops of which some trips are left, which saves starts of kernels; else only those that are loops no more.
    """
    found: dict[str, Jaxpr] = {}
    for step in (1, _STEP):
        unroller = _Unroller(MOST_EQUATIONS // step, MOST_TRIPS // step, exclude, partly=partly)
        changed = unroller.of(jaxpr)
        if changed is jaxpr:
            break
        if equations(changed) + unroller.added <= _STEP * MOST_EQUATIONS:
            found.setdefault(unroller.words, changed)
    return found


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

    def __init__(self, most_equations: int, most_trips: int, exclude: Sequence[str], *, partly: bool) -> None:
        self.most_equations, self.most_trips, self.exclude, self.partly = most_equations, most_trips, exclude, partly
        self.added = 0
        """Equations that are compiled besides those that there were."""
        self._trips: list[int] = []
        self._done: dict[int, Jaxpr] = {}

    @property
    def words(self) -> str:
        """Says how many trips are written out in each loop."""
        counts = {n: self._trips.count(n) for n in self._trips}
        return ", ".join(f"{n} trips" if c == 1 else f"{n} trips in {c} loops" for n, c in counts.items())

    def of(self, jaxpr: Jaxpr) -> Jaxpr:
        """The jaxpr with unrolled loops; itself where there are none. Calls of one function stay calls of one function."""
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
            self._trips.append(trips)
            self.added += (trips - 1) * equations(eqn.params["jaxpr"])
            return _compat.with_params(eqn, {**eqn.params, "unroll": trips})
        changed = {name: self._parameter(value) for name, value in eqn.params.items()}
        if all(changed[name] is value for name, value in eqn.params.items()):
            return eqn
        return _compat.with_params(eqn, changed)

    def _trips_of(self, eqn: JaxprEqn) -> int:
        """How many trips of a loop become one: all of them, or a power of two; 1 where the user has said how many."""
        length, own = eqn.params["length"], max(1, equations(eqn.params["jaxpr"]))
        if eqn.params["unroll"] != 1 or not isinstance(length, int) or length < 2:  # it may be symbolic
            return 1
        most = min(self.most_trips, max(1, self.most_equations // own))
        if length <= most:
            return length
        return 1 << (most.bit_length() - 1) if self.partly else 1

    def _parameter[T](self, value: T) -> T:
        if isinstance(value, Jaxpr):
            return self.of(value)  # type: ignore[return-value]
        if isinstance(value, tuple | list) and any(isinstance(v, Jaxpr) for v in value):
            found = [self.of(v) if isinstance(v, Jaxpr) else v for v in value]
            changed = any(new is not old for new, old in zip(found, value, strict=True))
            return type(value)(found) if changed else value  # type: ignore[return-value,call-arg]
        return value
