"""Mistakes in the ranges that masks over data leave: the pass that finds them, what bounds take from it, and who may use them."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from pallasfuse.ir.expr import Apply, add, apply, const, index, sub
from pallasfuse.ir.reducers import MAX, MIN
from pallasfuse.ir.tile_program import Load, Reduce, Statement
from tests.mutation.planting import Mutant, Plant, in_tiles, instead_of, value_at

_TILES, _BOUNDS, _RANGES = "pallasfuse.ir.tile_program", "pallasfuse.tiling.bounds", "pallasfuse.tiling.ranges"


def _blind(position: Any) -> Plant:
    """The pass does not see one position."""

    def narrower(real: Any, predicate: Any, axis: Any, **rest: Any) -> Any:
        seen = apply("ne", index(axis), const(position % axis.extent, "int32"))
        return real(apply("and", predicate, seen), axis, **rest)

    return instead_of(f"{_RANGES}:range_of", narrower)


def _least_of_block(s: Statement) -> Statement:
    return replace(s, reducer=MIN) if isinstance(s, Reduce) and s.name.endswith(".most") else s


def _other_end(s: Statement) -> Statement:
    return replace(s, tensor=s.tensor.replace(".right", ".left")) if isinstance(s, Load) else s


def _begins_late(real: Any, self: Any, *args: Any) -> Any:
    found = real(self, *args)
    return replace(found, possible=replace(found.possible, low=add(found.possible.low, const(1, "int32"))))


def _solid_too_long(real: Any, self: Any, *args: Any) -> Any:
    found = real(self, *args)
    return replace(found, certain=replace(found.certain, high=add(found.certain.high, const(1, "int32"))))


def _solid_too_early(real: Any, self: Any, *args: Any) -> Any:
    found = real(self, *args)
    return replace(found, certain=replace(found.certain, low=sub(found.certain.low, const(1, "int32"))))


def _most_solid_of_block(s: Statement) -> Statement:
    return replace(s, reducer=MAX) if isinstance(s, Reduce) and s.name.endswith(".least") else s


def _always_solid(real: Any, self: Any, end: Any, *rest: Any) -> Any:
    return end


def _negated(real: Any, predicates: Any) -> Any:
    first, *rest = predicates
    return real([first.args[0] if isinstance(first, Apply) and first.op == "not" else apply("not", first), *rest])


def _nothing_visited(real: Any, *args: Any, number: int, all_if_none: bool) -> Any:
    return real(*args, number=number, all_if_none=False)


def _witnessed(real: Any, *args: Any, **kwargs: Any) -> bool:
    return True


def _least(a: Any, b: Any) -> Any:
    return (*(jnp.minimum(x, y) for x, y in zip(a[:2], b[:2], strict=True)), a[2] + b[2])


def _one_more(a: Any, b: Any) -> Any:
    return (
        jnp.maximum(a[0], b[0]),
        jnp.maximum(a[1], b[1]),
        jnp.maximum(jnp.maximum(a[0], b[0]) + jnp.maximum(a[1], b[1]) - 13, 0),
    )


MUTANTS = tuple(
    Mutant(name, "tiling/ranges", *rest)
    for name, *rest in (
        ("range_starts_late", _blind(0), "masked_by_array"),
        ("range_ends_early", _blind(-1), "masked_by_array"),
        ("finite_range_ends_early", _blind(-1), "filled_by_array"),
        ("least_end_of_block", in_tiles(_least_of_block), "masked_by_array"),
        ("other_end_of_range", in_tiles(_other_end), "masked_by_array"),
        (
            "bounds_start_late",
            instead_of("pallasfuse.tiling.passes:Passes._range_ends", _begins_late),
            "masked_by_array",
        ),
        ("what_is_hidden_has_the_range", instead_of(f"{_RANGES}:conjunction", _negated), "masked_by_array"),
        (
            "row_that_is_hidden_not_averaged",
            instead_of(f"{_RANGES}:range_of", _nothing_visited),
            "filled_by_array",
            "xla",
        ),
        ("other_masks_show_the_same", instead_of(f"{_BOUNDS}:_shows_some", _witnessed), "filled_twice", "xla"),
        ("least_ends_emitted", value_at("pallasfuse.emission.ranges:_joined", _least), "masked_by_array", "xla"),
        (
            "solid_range_too_long",
            instead_of("pallasfuse.tiling.passes:Passes._range_ends", _solid_too_long),
            "masked_by_array",
        ),
        (
            "solid_range_too_early",
            instead_of("pallasfuse.tiling.passes:Passes._range_ends", _solid_too_early),
            "filled_by_array",
        ),
        ("solid_by_one_row_of_block", in_tiles(_most_solid_of_block), "masked_by_array", "xla"),
        ("gaps_are_solid", instead_of(f"{_TILES}:Range.solid", _always_solid), "masked_by_array", "xla"),
        (
            "gaps_emitted_as_solid",
            value_at("pallasfuse.emission.ranges:_joined", _one_more),
            "masked_by_array",
            "xla",
        ),
    )
)
