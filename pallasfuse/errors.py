"""Every error class that a user can meet, and `Refusal`, the value a pass returns instead of a wrong answer."""

from dataclasses import dataclass


class PallasfuseError(Exception):
    """Base class: catch this to catch everything that pallasfuse raises on purpose."""


class FusionError(PallasfuseError):
    """`strict=True` and some part of the function was left to XLA; the message lists source lines and reasons."""


class TargetError(PallasfuseError):
    """The named target does not exist, cannot run on this platform, or cannot express the kernel."""


class ScheduleError(PallasfuseError):
    """The schedule that was asked for cannot be read, does not fit the program, or breaks a rule: the message says which, and
    where."""


class TraceError(PallasfuseError):
    """The function could not be traced with the given arguments."""


class VerificationError(PallasfuseError):
    """A stage of a plan computes something else than the stage before: a bug in pallasfuse, please report it. The message names
    the stage and a counterexample."""


class InvalidProgramError(PallasfuseError):
    """An internal program breaks an invariant of its representation: a bug in pallasfuse, please report it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says why a rewrite does not apply. Passes return it; they do not raise."""

    reason: str

    def __str__(self) -> str:
        return self.reason
