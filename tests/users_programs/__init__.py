"""Programs as users write them, at small shapes: what `pallasfuse.verify` must not cry wolf over."""

from tests.users_programs import (
    activations,
    attention,
    clustering,
    distances,
    losses,
    masks,
    modules,
    norms,
    other_operations,
    published,
    rounding,
)

_MODULES = (
    attention,
    norms,
    activations,
    losses,
    clustering,
    masks,
    distances,
    rounding,
    other_operations,
    published,
    modules,
)
PROGRAMS = {name: program for module in _MODULES for name, program in module.PROGRAMS.items()}
