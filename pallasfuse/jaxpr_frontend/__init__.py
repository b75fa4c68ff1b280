"""A jaxpr to a loop program: calls inlined, dimensions unified to axes, one table from primitive to nest."""

from pallasfuse.jaxpr_frontend.conversion import convert, is_layout, is_map, left_by_user
from pallasfuse.jaxpr_frontend.converted import Converted
from pallasfuse.jaxpr_frontend.inlining import PLAIN_CALLS, flatten

__all__ = ["PLAIN_CALLS", "Converted", "convert", "flatten", "is_layout", "is_map", "left_by_user"]
