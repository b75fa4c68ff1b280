"""A jaxpr to a loop program: calls inlined, dimensions unified to axes, one table from primitive to nest."""

from pallasfuse.jaxpr_frontend.conversion import convert
from pallasfuse.jaxpr_frontend.converted import Converted

__all__ = ["Converted", "convert"]
