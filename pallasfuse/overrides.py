"""A context in which fused functions run with other options, or not fused at all: for tests, which compare both.

JAX's caches know of it: what was traced or compiled inside is not used outside, nor the reverse.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

import jax

from pallasfuse.options import FuseOptions

type Override = Literal["plain", "every kernel"] | FuseOptions | None
"""How fused functions are called instead: as their plain functions; with their own options, but with every kernel that can be
derived, neither priced nor timed; with these options; or as they are."""

_override = jax.make_user_context(None)


def overridden(override: Override) -> AbstractContextManager[None]:
    """A context in which every fused function that is called or traced is overridden."""
    context: AbstractContextManager[None] = _override(override)
    return context


def is_plain() -> bool:
    """Says whether fused functions run as their plain functions here."""
    return bool(_override.value == "plain")


def options_here(own: FuseOptions) -> FuseOptions:
    """The options that hold here for a fused function with options of its own."""
    override: Override = _override.value
    if isinstance(override, FuseOptions):
        return override
    return replace(own, price=False, check=False) if override == "every kernel" else own
