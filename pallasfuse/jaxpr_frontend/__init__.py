"""A jaxpr to a loop program: calls inlined, dimensions unified to axes, one table from primitive to nest."""

from pallasfuse.jaxpr_frontend.conversion import (
    convert,
    convert_in_parts,
    converted_later,
    is_layout,
    is_map,
    left_by_user,
)
from pallasfuse.jaxpr_frontend.converted import Converted, axes_of
from pallasfuse.jaxpr_frontend.inlining import BATCHED_AS_BODY, PLAIN_CALLS, bodies, called, flatten, fused_calls

__all__ = [
    "BATCHED_AS_BODY",
    "PLAIN_CALLS",
    "Converted",
    "axes_of",
    "bodies",
    "called",
    "convert",
    "convert_in_parts",
    "converted_later",
    "flatten",
    "fused_calls",
    "is_layout",
    "is_map",
    "left_by_user",
]
