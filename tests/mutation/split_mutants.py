"""Mistakes in the parts of a split axis, and in bounds that are known at run time."""

from dataclasses import replace
from typing import Any

from pallasfuse.ir.expr import Apply, add, apply, convert, read
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tile_program import Load, Reduce, Statement, Store, TileProgram, block_start
from pallasfuse.tiling import masks
from pallasfuse.tiling.masks import integer
from tests.mutation.planting import Mutant, in_tiles, instead_of, result_of, value_at

_PASSES, _BOUNDS, _MASKS = "pallasfuse.tiling.passes", "pallasfuse.tiling.bounds", "pallasfuse.tiling.masks"


def _not_moved(real: Any, self: Any, frame: Any, values: Any, loaded: Any) -> Any:
    found = real(self, frame, values, loaded)
    last = next(iter(found.values()))
    return dict.fromkeys(found, last)


def _parts_overlap(plan: Any, _: Any, part: Any) -> Any:
    """The first part's loop goes on by a tile."""
    later = apply("ge", read(block_start(part), (), "int32"), integer(1))
    longer = apply("select", later, integer(0), integer(1))
    return replace(plan, trips=(replace(plan.trips[0], stop=add(plan.trips[0].stop, longer)), *plan.trips[1:]))


def _without_last_part(plan: Any, _: Any, part: Any) -> Any:
    last = apply("ge", read(block_start(part), (), "int32"), integer(part.extent - 1))
    return replace(plan, trips=tuple(replace(t, stop=apply("select", last, t.start, t.stop)) for t in plan.trips))


def _tail_in_every_part(plan: Any, before: Any, part: Any) -> Any:
    trips = [replace(t, stop=o.stop) if t.offset else t for t, o in zip(plan.trips, before.trips, strict=True)]
    return replace(plan, trips=tuple(trips))


def _parts_added(s: Statement) -> Statement:
    return replace(s, reducer=SUM) if isinstance(s, Reduce) and s.joins else s


def _states_in_new_units(program: TileProgram, *_: Any) -> TileProgram:
    def plain(s: Statement) -> Statement:
        scaled = isinstance(s, Store) and s.tensor.endswith(".part") and isinstance(s.value, Apply)
        return replace(s, value=s.value.args[0]) if scaled else s

    return replace(program, body=tuple(map(plain, program.body)))


def _whatever_is_read(real: Any, form: Any, rolled: Any, block: Any) -> Any:
    known = integer(0)
    for r, c in form.reads:
        known = add(known, apply("mul", convert(r, "int32"), integer(c)))
    return masks._interval(form, known, rolled, block)


def _in(room: str, *entries: Any) -> tuple[Mutant, ...]:
    return tuple(Mutant(e[0], f"tiling/{room}", *e[1:]) for e in entries)


MUTANTS = (
    *_in(
        "split",
        ("parts_not_moved", instead_of(f"{_PASSES}:Passes._last_frame", _not_moved), "split_softmax"),
        ("parts_not_moved_with_masks", instead_of(f"{_PASSES}:Passes._last_frame", _not_moved), "split_triangle"),
        ("maxima_of_parts_added", in_tiles(_parts_added), "split_largest"),
        ("parts_overlap", result_of(f"{_BOUNDS}:Plan.part", _parts_overlap), "split_softmax"),
        (
            "states_in_new_units",
            result_of("pallasfuse.tiling.units:rewrite", _states_in_new_units),
            "split_log_sum",
            "hopper proof",
        ),
        ("last_part_forgotten", result_of(f"{_BOUNDS}:Plan.part", _without_last_part), "split_variance"),
        ("tail_in_every_part", result_of(f"{_BOUNDS}:Plan.part", _tail_in_every_part), "split_variance"),
    ),
    *_in(
        "lengths",
        ("large_lengths_trusted", instead_of(f"{_MASKS}:_where_small", _whatever_is_read), "up_to", "xla"),
        (
            "length_rounded_down",
            value_at(f"{_BOUNDS}:_tiles_covering", lambda p, t: apply("div", p, integer(t))),
            "by_length",
        ),
        (
            "length_of_another_row",
            in_tiles(lambda s: replace(s, tensor="m") if isinstance(s, Load) and s.tensor == "n" else s),
            "by_length",
        ),
    ),
)
