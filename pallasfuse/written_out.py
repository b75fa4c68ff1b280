"""Programs as XLA runs them faster: with loops and operations written out.

XLA fuses what stands in one program as operations that it knows. Trips of a loop that are written out one after the other
(`unrolled_loops`), and operations decomposed into others (`decompositions`), give it more to fuse. Which of these forms of a
program is used, a clock decides, for the call as a whole, once; what is planned afterwards is the program that has won. Without a
clock, only what is predicted to be faster beyond the error of the price is written out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr
from pallasfuse.check import BUDGET_S
from pallasfuse.decompositions import decomposed
from pallasfuse.device import Device
from pallasfuse.environment import environment
from pallasfuse.forms import ONE_OF_SEVERAL, UNTIMED
from pallasfuse.isolation import apart
from pallasfuse.measure import Measured, compare
from pallasfuse.parts import primitives, whole_key
from pallasfuse.store import Record, current
from pallasfuse.subjects import XLA, comparison
from pallasfuse.unrolled_loops import unrolled_surely, unrollings
from pallasfuse.verdicts import WRITTEN_OUT, Verdict

_MORE_MEMORY = 1.1
"""A form may take so many times as much memory: who computes in chunks has a reason for it."""
_WORTH_A_CLOCK = 1.05
"""An operation must be predicted to be so many times as fast for a clock to be asked."""
_OPERATIONS = "operations in parts"


def forms(jaxpr: Jaxpr, device: Device, exclude: Sequence[str] = ()) -> dict[str, Jaxpr]:
    """Returns other forms of a program that may be faster, each by words that say what it is. exclude: as of `FuseOptions`."""
    apart = decomposed(jaxpr, device, exclude, gain=_WORTH_A_CLOCK)
    unrolled = unrollings(apart, exclude, partly=device.platform == "gpu")
    if apart is jaxpr:
        return unrolled
    return {_OPERATIONS: apart} | {f"{_OPERATIONS}, {words}": form for words, form in unrolled.items()}


def surely_faster(jaxpr: Jaxpr, device: Device, exclude: Sequence[str] = ()) -> Jaxpr:
    """Returns the program with all written out that needs no clock; itself where nothing is."""
    return unrolled_surely(decomposed(jaxpr, device, exclude, gain=device.price_error), device, exclude)


def fastest(
    jaxpr: Jaxpr, ways: Mapping[str, Jaxpr], device: Any, *, measure: bool
) -> tuple[str | None, Verdict | None]:
    """Returns which of the forms of a program is the fastest by the clock, as XLA runs them, and what the clock said.

    None: the program as it is. ways: the forms, by words that say what they are. measure: False looks up what is known.
    """
    unfit = sorted(primitives(jaxpr) & (UNTIMED | ONE_OF_SEVERAL))
    if not ways:
        return None, None
    if unfit:
        return None, Verdict(WRITTEN_OUT, False, f"not measured: it has {', '.join(unfit)}")
    store = current()
    identity = {**environment(device), "of": "written out", "program": whole_key(jaxpr),
                "ways": ", ".join(map(whole_key, ways.values()))}  # fmt: skip
    known, seconds = store.get(identity), 0.0
    if known is None and not measure:
        return None, None
    if known is None:
        found = apart(lambda: _compared(jaxpr, ways, device), device)
        seconds = found.seconds
        best = min((n for n in ways if n in found.microseconds), key=found.microseconds.__getitem__, default=None)
        best = found.winner if found.winner in ways else best
        reasons = "; ".join(
            dict.fromkeys((*filter(None, [found.skipped]), *found.uncompiled.values(), *found.failed.values()))
        )
        entry: Record = {"skipped": reasons} if best is None else {**comparison(found, best), "way": best}
        known = store.update(identity, lambda _: entry, on_disk=best is not None)
    if "skipped" in known:
        return None, Verdict(WRITTEN_OUT, False, f"not measured ({known['skipped']})", seconds=seconds)
    used = bool(known["faster"]) and known["way"] in ways
    reason = f"{known['way']}: {'they are used' if used else 'all is as it was'}"
    verdict = Verdict(WRITTEN_OUT, used, reason, known["us"], known["xla_us"], seconds, remembered=not seconds)
    return (known["way"] if used else None), verdict


def _compared(jaxpr: Jaxpr, ways: Mapping[str, Jaxpr], device: Any) -> Measured:
    def run(one: Jaxpr) -> Callable[..., Any]:
        return lambda *args: _compat.eval_jaxpr(one, one.consts, *args)

    functions = {XLA: run(jaxpr)} | {words: run(one) for words, one in ways.items()}
    avals = [v.aval for v in jaxpr.invars]
    return compare(functions, avals, device, budget_s=BUDGET_S, most_memory=_MORE_MEMORY)
