"""Programs of one operation or a few, which are timed alone on a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class Case:
    """Describes one program. label: its kind, shape and type."""

    label: str
    function: Callable[..., Any]
    structs: tuple[jax.ShapeDtypeStruct, ...]
    below: int = 1000
    """Whole numbers among the arguments are drawn from 0 up to this."""


def case(kind: str, words: str, function: Callable[..., Any], *arrays: tuple[Sequence[int], str]) -> Case:
    """Makes the record of a program of arrays of these shapes and types, named by its kind, words and first array."""
    shapes = " ".join("x".join(map(str, shape)) for shape, _ in arrays[:1])
    structs = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays)
    return Case(f"{kind} {words} {shapes} {arrays[0][1]}", function, structs)
