"""pallasfuse: a fusion compiler for JAX. Decorate a plain `jax.numpy` function with `fuse`; see README.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pallasfuse.api import FusedFunction, fuse
from pallasfuse.errors import (
    FusionError,
    InvalidProgramError,
    PallasfuseError,
    Refusal,
    TargetError,
    TraceError,
    VerificationError,
)
from pallasfuse.first_time import IMPORTS
from pallasfuse.leaving import leave
from pallasfuse.options import FuseOptions

if TYPE_CHECKING:
    from pallasfuse import repair as repair
    from pallasfuse import tuning
    from pallasfuse.plan import Kernel, Plan
    from pallasfuse.report import Report, verify
    from pallasfuse.streaming import FoldState, StreamedFunction, fold
    from pallasfuse.tuning import Tuned, tune

__version__ = "0.1.0"

__all__ = [
    "FoldState",
    "FuseOptions",
    "FusedFunction",
    "FusionError",
    "InvalidProgramError",
    "Kernel",
    "PallasfuseError",
    "Plan",
    "Refusal",
    "Report",
    "StreamedFunction",
    "TargetError",
    "TraceError",
    "Tuned",
    "VerificationError",
    "fold",
    "fuse",
    "leave",
    "tune",
    "tuning",
    "verify",
]

_LATER = {
    "FoldState": "streaming",
    "Kernel": "pipeline",
    "Plan": "pipeline",
    "Report": "report",
    "StreamedFunction": "streaming",
    "Tuned": "tuning",
    "fold": "streaming",
    "tune": "tuning",
    "verify": "report",
}
"""Names whose modules are imported when they are first asked for: these import all that makes plans, SymPy and the emitters too."""
_MODULES = frozenset({"repair", "tuning"})
"""Modules that users name, for which the same holds."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with IMPORTS:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        found = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
