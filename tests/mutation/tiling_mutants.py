"""Mistakes in the way from a group to a tile program: masks, bounds, lowering, products, arithmetic, schedules."""

from dataclasses import replace
from typing import Any

from pallasfuse.ir.expr import Apply, Const, Expr, Read, add, apply, const, convert, mul, read, sub
from pallasfuse.ir.neutrality import Contribution
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tile_program import Let, Load, Loop, Statement, Store
from pallasfuse.tiling import masks
from pallasfuse.tiling.masks import Affine, Extent, Interval, integer
from pallasfuse.tiling.units import LOG2_E
from tests.mutation.planting import (
    Mutant,
    Plant,
    in_tiles,
    instead_of,
    renamed,
    result_of,
    rewrite,
    value_at,
)

_PASSES, _VALUES = "pallasfuse.tiling.passes", "pallasfuse.tiling.values"
_GUARDS = "pallasfuse.tiling.passes"
_BOUNDS = "pallasfuse.tiling.bounds"
_MASKS = "pallasfuse.tiling.masks"
_PRODUCTS = "pallasfuse.tiling.products"
_ARITHMETIC, _UNITS = "pallasfuse.tiling.arithmetic", "pallasfuse.tiling.units"
_CONTRACTION = "pallasfuse.tiling.contraction"


# --- lowering


def _loops(change: Any, *, streams: bool = False) -> Plant:
    """Loops with carried values, or (`streams`) those that only store."""
    return in_tiles(lambda s: change(s) if isinstance(s, Loop) and bool(s.carries) != streams else s)


def _carries(change: Any) -> Plant:
    return _loops(lambda s: replace(s, carries=tuple(change(c) for c in s.carries)))


def _lets(suffix: str, change: Any) -> Plant:
    def step(s: Statement) -> Statement:
        return replace(s, value=change(s.value)) if isinstance(s, Let) and s.name.endswith(suffix) else s

    return in_tiles(step)


def _branch(number: int) -> Any:
    """The outermost choice always takes one branch."""
    return lambda value: value.args[number] if isinstance(value, Apply) and value.op == "select" else value


def _swapped_branches(value: Expr) -> Expr:
    match value:
        case Apply("select", (p, a, b)):
            return apply("select", p, b, a)
    return value


def _other_tensor(s: Statement) -> Statement:
    names = {"t1": "t6", "t6": "t1"}
    return replace(s, tensor=names.get(s.tensor, s.tensor)) if isinstance(s, Store) else s


def _other_load(s: Statement) -> Statement:
    return replace(s, tensor={"x": "y", "y": "x"}[s.tensor]) if isinstance(s, Load) else s


def _transposed_load(s: Statement) -> Statement:
    return replace(s, indices=s.indices[::-1]) if isinstance(s, Load) else s


def _without_last_segment(loop: Loop) -> Loop:
    return replace(loop, segments=loop.segments[:-1])


def _stale_frame(real: Any, self: Any, frame: Any, values: Any, scope: Any, suffix: str, done: str) -> Expr:
    return real(self, frame, values, scope, "", done)


def _ratio_inverted(value: Expr, *_: Any) -> Expr:
    def step(node: Apply) -> Expr | None:
        if node.op == "mul" and isinstance(node.args[1], Apply) and node.args[1].op == "div":
            return apply("mul", node.args[0], apply("div", *node.args[1].args[::-1]))
        return None

    return rewrite(value, step)


def _not_extrapolated(value: Expr, *_: Any) -> Expr:
    def step(node: Apply) -> Expr | None:
        match node:
            case Apply("select", (Apply("eq"), plain, _)):
                return plain
        return None

    return rewrite(value, step)


def _without_finish(real: Any, self: Any, fold: Any, folds: Any) -> None:
    main = fold.accumulators[0]
    real(self, replace(fold, finish=read(main.name, main.axes, main.dtype)), folds)


# --- bounds and masks


def _trips(change: Any) -> Plant:
    return result_of(f"{_BOUNDS}:plan_loop", lambda plan, *_, **__: replace(plan, trips=tuple(change(plan.trips))))


def _unmasked_longer(trips: Any) -> Any:
    result, moved = [], False
    for trip in trips:
        new = trip
        if moved and trip.label == "masked":
            new, moved = replace(trip, start=add(trip.start, integer(1))), False
        if trip.label == "unmasked":
            new, moved = replace(trip, stop=add(trip.stop, integer(1))), True
        result.append(new)
    return result


def _all_true(trips: Any) -> Any:
    everything = frozenset().union(*(t.true for t in trips))
    return [replace(t, true=everything) for t in trips]


def _sees_block(change: Any) -> Plant:
    """The first position and the size of a block, as masks see them."""
    return instead_of(f"{_MASKS}:extent", lambda real, p, rolled, block: real(p, rolled, lambda a: change(*block(a))))


def _some_accumulator(real: Any, folds: Any, *args: Any, **kwargs: Any) -> Any:
    return real(folds[-1:], *args, **kwargs)


def _always_neutral(*_: Any, **__: Any) -> Contribution:
    return Contribution(0.0, False)


def _neutral_for_sums(real: Any, term: Any, reducer: Any, *rest: Any, **more: Any) -> Any:
    return real(term, SUM, *rest, **more)


def _less_as_at_most(real: Any, predicate: Any, *rest: Any) -> Any:
    if isinstance(predicate, Apply) and predicate.op == "lt":
        predicate = apply("le", *predicate.args)
    return real(predicate, *rest)


def _one_side(real: Any, predicate: Any, *rest: Any) -> Any:
    match predicate:
        case Apply("lt", (Apply("abs", (x,)), b)):
            return real(apply("lt", x, b), *rest)
    return real(predicate, *rest)


def _truncating(x: Expr, k: int) -> Expr:
    return apply("div", x, integer(k))


def _hull(a: Interval | None, b: Interval | None) -> Interval | None:

    return a or b if a is None or b is None else masks._hull(a, b)


def _without_constant(form: Affine | None, *_: Any) -> Affine | None:
    return None if form is None else Affine(form.coefficients, 0)


def _other_direction(negated: Expr | None, *_: Any) -> Expr | None:
    return None if negated is None else renamed("le", "ge")(negated)


def _whole_tiles(real: Any, loop: Loop, program: Any) -> float:
    segments = tuple(replace(g, tile=max(s.tile for s in loop.segments)) for g in loop.segments)
    return real(replace(loop, segments=segments), program)


# --- products and arithmetic


def _inverted_factors(real: Any, factors: Any, dtype: str) -> Expr:
    return real([(f, False) for f, _ in factors], dtype)


def _only_upper(real: Any, factors: Any, dtype: str) -> Expr:
    return real([f for f in factors if not f[1]], dtype)


def _any_factor(real: Any, value: Any) -> Any:
    match value:
        case Apply("mul", (x, Const(factor))) | Apply("mul", (Const(factor), x)):
            return x, float(factor)
    return real(value)


def _one_operand_scaled(real: Any, u: Any, factor: float) -> Expr:
    return sub(real(u.args[0], factor), u.args[1]) if isinstance(u, Apply) and u.op == "sub" else real(u, factor)


def _without_units(real: Any, self: Any, node: Any) -> Expr:
    return node if isinstance(node, Read) and node.tensor in self.family else real(self, node)


def _doubled(real: Any, node: Any, maximum: Any, lets: Any) -> Expr | None:
    x = real(node, maximum, lets)
    return None if x is None else mul(x, const(2.0, "float32"))


def _scaled_twice(real: Any, value: Any, lets: Any) -> Any:
    found = real(value, lets)
    return found and (mul(found[0], const(found[1], "float32")), found[1])


def _rows_multiplied(real: Any, node: Any, coarse: Any) -> Expr:
    match node:
        case Apply("div", (x, y), "float32") if x.tensors & coarse and y.axes < x.axes and y.axes:
            return mul(x, y)
    return real(node, coarse)


def _in(room: str, *entries: Any) -> tuple[Mutant, ...]:
    return tuple(Mutant(e[0], f"tiling/{room}", *e[1:]) for e in entries)


MUTANTS = (
    *_in(
        "lower",
        ("maximum_starts_at_zero", _carries(lambda c: replace(c, init=const(0, c.dtype))), "total_and_largest"),
        ("guard_missing", value_at(f"{_GUARDS}:usable", lambda value, frame: const(True, "bool")), "late_rows", "xla"),
        (
            "masked_guard_missing",
            value_at(f"{_GUARDS}:usable", lambda value, frame: const(True, "bool")),
            "upper_triangle",
        ),
        (
            "guard_does_not_ask_for_positive",
            instead_of(f"{_GUARDS}:usable", lambda real, value, frame: real(value, replace(frame, positive=False))),
            "late_divisor",
            "xla",
        ),
        (
            "guard_does_not_ask_for_range",
            instead_of(f"{_GUARDS}:usable", lambda real, value, frame: real(value, replace(frame, low=0.0))),
            "factor_that_grows",
            "xla",
        ),
        ("maxima_joined_by_addition", _lets(".next", renamed("max", "add")), "softmax"),
        (
            "tail_not_masked",
            value_at(f"{_VALUES}:Values._in_range", lambda self, value, *_: value),
            "softmax",
            "gpu proof",
        ),
        (
            "tail_mask_off_by_one",
            result_of(f"{_VALUES}:Values._in_range", lambda e, *_: renamed("lt", "le")(e)),
            "softmax",
            "gpu proof",
        ),
        (
            "tail_masked_with_zero",
            instead_of(
                f"{_VALUES}:Values._in_range", lambda real, self, v, padded, _, at: real(self, v, padded, 0.0, at)
            ),
            "total_and_largest",
            "gpu proof",
        ),
        ("stores_swapped", in_tiles(_other_tensor), "mean_and_variance"),
        ("loads_swapped", in_tiles(_other_load), "two_arguments"),
        ("load_transposed", in_tiles(_transposed_load), "square_softmax"),
        ("last_frame_is_kept", _lets(".value", _branch(1)), "late_rows", "xla"),
        (
            "frames_are_not_carried",
            _carries(lambda c: replace(c, next_name=c.name) if c.name.endswith(".old") else c),
            "softmax",
        ),
        (
            "accumulators_not_carried",
            _carries(lambda c: replace(c, next_name=c.name) if c.name.endswith("acc0") else c),
            "variance",
        ),
        (
            "late_frame_never_comes",
            instead_of(f"{_PASSES}:Passes._is_last", lambda real, self, frame, final: const(True, "bool")),
            "picked",
        ),
        (
            "late_frame_leaves_from_elsewhere",
            instead_of(f"{_PASSES}:Passes._last", lambda real, self, frame: const(1.0, frame.value.dtype)),
            "picked",
        ),
        ("old_frame_is_the_new", _lets(".from", _branch(1)), "softmax"),
        ("old_frame_at_the_first_tile_only", _lets(".from", _swapped_branches), "softmax"),
        ("frame_lags_behind", instead_of(f"{_PASSES}:Passes._frame_value", _stale_frame), "softmax"),
        (
            "extrapolation_inverted",
            result_of(f"{_PASSES}:Passes._current", _ratio_inverted),
            "far_from_zero",
            "accuracy",
        ),
        (
            "extrapolation_left_out",
            result_of(f"{_PASSES}:Passes._current", _not_extrapolated),
            "far_from_zero",
            "accuracy",
        ),
        ("finish_forgotten", instead_of(f"{_PASSES}:Passes._finish", _without_finish), "attention"),
        ("stores_forget_the_tail", _loops(_without_last_segment, streams=True), "softmax", "tiles"),
        ("reductions_forget_the_tail", _loops(_without_last_segment), "softmax"),
    ),
    *_in(
        "bounds",
        (
            "stop_rounded_down",
            value_at(f"{_BOUNDS}:_tiles_covering", lambda p, t: apply("div", p, integer(t))),
            "lower_triangle",
        ),
        (
            "start_rounded_up",
            value_at(f"{_BOUNDS}:_tiles_below", lambda p, t: apply("div", add(p, integer(t - 1)), integer(t))),
            "upper_triangle",
        ),
        (
            "says_that_it_visits_everything",
            result_of(
                f"{_BOUNDS}:plan_loop", lambda plan, s, rolled, *_, **__: replace(plan, to_visit=integer(rolled.extent))
            ),
            "lower_triangle",
            "tiles",
        ),
        (
            "first_position_forgotten",
            result_of(f"{_BOUNDS}:plan_loop", lambda plan, *_, **__: replace(plan, first=integer(0))),
            "upper_triangle",
            "tiles",
        ),
        ("mask_dropped_everywhere", _trips(_all_true), "lower_triangle"),
        ("unmasked_part_one_tile_longer", _trips(_unmasked_longer), "lower_triangle"),
        ("tail_trip_forgotten", _trips(lambda trips: [t for t in trips if t.label != "tail"]), "softmax"),
        ("edge_not_said", _trips(lambda trips: [replace(t, edge=False) for t in trips]), "softmax", "gpu tiles"),
        ("block_has_one_row", _sees_block(lambda first, size: (first, 1)), "lower_triangle"),
        ("block_starts_at_zero", _sees_block(lambda first, size: (integer(0), size)), "lower_triangle"),
        ("one_neutral_term_is_enough", instead_of(f"{_BOUNDS}:guards", _some_accumulator), "masked_share"),
        ("finite_mask_taken_as_neutral", value_at(f"{_BOUNDS}:is_neutral", _always_neutral), "finite_mask"),
        (
            "zero_taken_as_neutral_for_maxima",
            instead_of(f"{_BOUNDS}:is_neutral", _neutral_for_sums),
            "zero_under_maximum",
        ),
    ),
    *_in(
        "masks",
        ("end_off_by_one", result_of(f"{_MASKS}:_floor_plus_one", lambda e, *_: add(e, integer(-1))), "lower_triangle"),
        (
            "begin_off_by_one",
            result_of(f"{_MASKS}:_ceil_div", lambda e, *_, **__: add(e, integer(1))),
            "upper_triangle",
        ),
        (
            "possible_taken_as_certain",
            result_of(f"{_MASKS}:extent", lambda e, *_: Extent(e.possible, e.possible)),
            "lower_triangle",
        ),
        (
            "possible_and_certain_swapped",
            result_of(
                f"{_MASKS}:_nonnegative", lambda e, *_: e if e.certain is None else Extent(e.certain, e.possible)
            ),
            "lower_triangle",
        ),
        ("less_taken_as_at_most", instead_of(f"{_MASKS}:_extent", _less_as_at_most), "narrow_window"),
        ("one_side_of_a_distance", instead_of(f"{_MASKS}:_extent", _one_side), "by_distance"),
        ("negation_in_the_other_direction", result_of(f"{_MASKS}:_negate", _other_direction), "neither"),
        ("division_truncates", value_at(f"{_MASKS}:_floor_div", _truncating), "stretched_by_ones"),
        ("union_keeps_one_part", value_at(f"{_MASKS}:_hull", lambda a, b: a), "sinks"),
        ("hull_taken_as_certain", value_at(f"{_MASKS}:_union_inside", _hull), "sinks"),
        (
            "conjunction_asks_one_part",
            instead_of(f"{_MASKS}:both_hold", lambda real, x, y: Extent(real(x, y).possible, y.certain)),
            "narrow_window",
        ),
        ("offset_forgotten", result_of(f"{_MASKS}:affine", _without_constant), "stretched"),
    ),
    *_in(
        "products",
        ("divisor_multiplied", instead_of(f"{_PRODUCTS}:_join", _inverted_factors), "quantized"),
        ("divisor_lost", instead_of(f"{_PRODUCTS}:_join", _only_upper), "quantized"),
        (
            "operands_rounded",
            value_at(f"{_VALUES}:narrow", lambda side: convert(side, "float16")),
            "attention",
            "xla",
        ),
    ),
    *_in(
        "arithmetic",
        (
            "base_two_without_its_factor",
            value_at(f"{_ARITHMETIC}:_times", lambda u, factor: u),
            "half_attention",
            "gpu proof",
        ),
        (
            "scale_applied_twice",
            result_of(f"{_ARITHMETIC}:_positive_factor", lambda r, *_: r if r[1] is None else (r[0], r[1] * r[1])),
            "coarse_scores",
            "gpu proof",
        ),
        (
            "negative_factor_out_of_a_maximum",
            instead_of(f"{_ARITHMETIC}:_positive_factor", _any_factor),
            "negative_scores",
            "gpu proof",
        ),
        (
            "one_operand_scaled",
            instead_of(f"{_ARITHMETIC}:_times", _one_operand_scaled),
            "half_attention",
            "gpu proof",
        ),
        (
            "divisor_not_inverted",
            instead_of(f"{_ARITHMETIC}:_times", lambda real, x, f: real(x, 1 / f)),
            "divided_scores",
            "gpu proof",
        ),
    ),
    *_in(
        "units",
        ("rows_multiplied", instead_of(f"{_ARITHMETIC}:_by_rows", _rows_multiplied), "half_attention", "hopper proof"),
        (
            "factor_lost",
            instead_of(f"{_UNITS}:_Scaler._folded", lambda real, self, x, f: real(self, x, f / LOG2_E)),
            "half_log_sum",
            "hopper proof",
        ),
        (
            "read_in_the_wrong_units",
            instead_of(f"{_UNITS}:_Scaler._in_old_units", _without_units),
            "half_log_sum",
            "hopper proof",
        ),
    ),
    *_in(
        "contraction",
        ("factor_doubled", instead_of(f"{_CONTRACTION}:_taken_up", _doubled), "half_log_sum", "hopper proof"),
        (
            "maximum_of_the_scaled",
            instead_of(f"{_CONTRACTION}:_product", _scaled_twice),
            "half_log_sum",
            "hopper proof",
        ),
    ),
    *_in(
        "share",
        (
            "looks_at_the_first_block_only",
            value_at("pallasfuse.price.visited_tiles:_MAX_BLOCKS", 1),
            "lower_triangle",
            "share",
        ),
        (
            "segments_counted_in_whole_tiles",
            instead_of("pallasfuse.price.visited_tiles:_visited_share", _whole_tiles),
            "lower_triangle",
            "share",
        ),
    ),
    *_in(
        "trees",
        (
            "loops_without_their_last_tile",
            result_of(
                "pallasfuse.tiling.tree_loops:TreeLoops._outer_loop", lambda p, *_, **__: replace(p, trips=p.trips[:-1])
            ),
            "two_trips",
            "tiles",
        ),
        (
            "reductions_computed_twice_in_a_refined_value",
            result_of("pallasfuse.tiling.trees:TreeLowering._refined_at_once", lambda value, *_: add(value, value)),
            "variance_at_once",
        ),
    ),
)
