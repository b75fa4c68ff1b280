"""Verdicts say what a clock found about a plan: one for each kernel, and one for the whole call."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

WHOLE_CALL = "the whole call"
"""The subject of a verdict that is not of one kernel."""

BODIES = "kernels in the bodies of loops"
"""The subject of a verdict on the whole call with such kernels, against the same call whose loops are XLA's."""

WRITTEN_OUT = "loops and operations written out"
"""The subject of a verdict on the whole call in such a form, as XLA runs it."""

FORM = "sums and products in another order"
"""The subject of a verdict on the form of a program, as XLA runs it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says what became of a kernel, or of the whole call (`subject`), when it was to be compared with XLA's own on the device.

    `kept`: it is used. `ours_us` and `xla_us`: the medians of one call on the device, None where nothing was measured; `reason`
    then says why. `seconds`: what the check took, with its share of what was compiled together; 0 for what was known from before
    (`remembered`).
    """

    subject: str
    kept: bool
    reason: str
    ours_us: float | None = None
    xla_us: float | None = None
    seconds: float = 0.0
    remembered: bool = False

    @property
    def saved_us(self) -> float:
        """The microseconds by which one call is faster than XLA's; 0 where the kernel is not used or nothing was measured."""
        return self.xla_us - self.ours_us if self.kept and self.ours_us is not None and self.xla_us is not None else 0.0

    @property
    def speedup(self) -> float:
        """How many times as long XLA's own takes; 1 where nothing was measured."""
        return 1.0 if not self.ours_us or self.xla_us is None else self.xla_us / self.ours_us

    def overruled(self, why: str) -> "Verdict":
        """Returns the verdict on what was faster by itself, and is not used for another reason."""
        return replace(self, kept=False, reason=f"{self.reason}; {why}")

    def __str__(self) -> str:
        if self.ours_us is None or self.xla_us is None:
            return f"{self.subject}: {self.reason}"
        when = "known from before" if self.remembered else f"checked in {self.seconds:.2g} s"
        times = f"{self.ours_us:.4g} us, XLA's {self.xla_us:.4g} us ({self.speedup:.2f}x)"
        return f"{self.subject}: {times}, {when}: {self.reason}"


def words_for_times(ours: float | None, theirs: float | None) -> str:
    """Says what a kernel or a call takes, and what XLA's own does, in microseconds."""
    return "not measured" if ours is None or theirs is None else f"{ours:.4g} us against {theirs:.4g} us"


def words_for_kernels(entry: Mapping[str, Any]) -> str:
    """Says what kernels take alone, where they were compared and XLA's won; else nothing. entry: the record of a comparison.

    Nothing either where they are all that was timed."""
    if entry["faster"] or math.isclose(entry.get("kernels_us", entry["us"]), entry["us"]):
        return ""
    times = words_for_times(entry["kernels_us"], entry["xla_kernels_us"])
    return f"; kernels alone, without the gaps between them: {times}"
