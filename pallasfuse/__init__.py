"""pallasfuse: a fusion compiler for JAX. Decorate a plain `jax.numpy` function with `fuse`; see README.md."""

from pallasfuse import tuning
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
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import Kernel, Plan
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
    "tune",
    "tuning",
    "verify",
]
