"""A jaxpr to a loop program: calls inlined, dimensions unified to axes, one table from primitive to nest."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pallasfuse.jaxpr_frontend.converted import Converted, axes_of
from pallasfuse.jaxpr_frontend.inlining import (
    ALL_CALLS,
    BATCHED_AS_BODY,
    PLAIN_CALLS,
    SOLVER,
    bodies,
    called,
    flatten,
    fused_calls,
    left_by_user,
    with_bodies,
)

if TYPE_CHECKING:
    from pallasfuse.jaxpr_frontend.conversion import convert, convert_in_parts, convert_rewritten, convert_terms_apart

__all__ = [
    "ALL_CALLS",
    "BATCHED_AS_BODY",
    "PLAIN_CALLS",
    "SOLVER",
    "Converted",
    "axes_of",
    "bodies",
    "called",
    "convert",
    "convert_in_parts",
    "convert_rewritten",
    "convert_terms_apart",
    "flatten",
    "fused_calls",
    "left_by_user",
    "with_bodies",
]

_LATER = frozenset({"convert", "convert_in_parts", "convert_rewritten", "convert_terms_apart"})
"""Names whose module is imported when they are first asked for: a plan that was kept needs no loop program."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.conversion"), name)
