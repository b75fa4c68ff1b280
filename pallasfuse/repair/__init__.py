"""Repairs: how the partial results of a reduction move when the values that its body reads change (design, section 3).

The only room that imports SymPy.
"""

from pallasfuse.ir.fold import OLD
from pallasfuse.repair.derive import Frame, derive
from pallasfuse.repair.parsing import parse_expr
from pallasfuse.repair.result import ROUNDING, Accumulator, Repair, accumulator_name
from pallasfuse.repair.signs import Sign, infer_sign, reduction_sign

__all__ = [
    "OLD",
    "ROUNDING",
    "Accumulator",
    "Frame",
    "Repair",
    "Sign",
    "accumulator_name",
    "derive",
    "infer_sign",
    "parse_expr",
    "reduction_sign",
]
