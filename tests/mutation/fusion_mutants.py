"""Mistakes in the rewrites that make a group: deduplication, inlining, hoisting, folding, stability, refinement, grouping."""

import math
from dataclasses import replace
from typing import Any

from pallasfuse.fusion.hoisting import Factor
from pallasfuse.ir.expr import Apply, Const, Expr, Read, apply, const, postorder, read, substitute
from pallasfuse.ir.fold import OLD, Accumulator, Fold, Group
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.reducers import AND, MAX, OR
from tests.mutation.planting import (
    Mutant,
    Plant,
    in_accumulators,
    in_bodies,
    in_folds,
    in_groups,
    in_updates,
    instead_of,
    renamed,
    result_of,
    rewrite,
    value_at,
)


def _copies_the_first(program: LoopProgram, *, same_body: bool) -> LoopProgram:
    """Every later reduction over the same axes becomes a copy of the first."""
    first: Nest | None = None
    nests = []
    for nest in program.nests:
        if isinstance(nest, Nest) and nest.is_reduction:
            if first is None:
                first = nest
            elif (first.axes, first.reduced) == (nest.axes, nest.reduced) and (
                not same_body or first.body is nest.body
            ):
                copy = read(first.name, first.axes, first.dtype)
                nests.append(replace(nest, body=copy, reduced=(), reducer=None, precision=None))
                continue
        nests.append(nest)
    return replace(program, nests=tuple(nests))


def _deduplicates(*, same_body: bool) -> Plant:
    return result_of("pallasfuse.fusion.inline:deduplicate", lambda p, *_: _copies_the_first(p, same_body=same_body))


def _without_finish(fold: Fold | None, *_: Any, **__: Any) -> Fold | None:
    """What is computed from the one term of a sum is forgotten."""
    if fold is None:
        return None
    main = fold.accumulators[0]
    return replace(fold, finish=read(main.name, main.axes, main.dtype))


def _frames(change: Any) -> Plant:
    return in_folds(lambda f: replace(f, frames=tuple(change(x) for x in f.frames)))


def _negated(x: Expr) -> Expr:
    return apply("neg", x)


def _times(x: Expr, factor: float) -> Expr:
    return apply("mul", x, const(factor, x.dtype))


def _old_and_new_swapped(update: Expr) -> Expr:
    frames = [n for n in postorder(update) if isinstance(n, Read) and ".frame" in n.tensor]
    other = {n: n.tensor.removesuffix(OLD) if n.tensor.endswith(OLD) else n.tensor + OLD for n in frames}
    return substitute(update, {n: read(other[n], n.indices, n.dtype) for n in frames})


def _old_for_new(update: Expr) -> Expr:
    frames = [n for n in postorder(update) if isinstance(n, Read) and ".frame" in n.tensor]
    return substitute(update, {n: read(n.tensor.removesuffix(OLD), n.indices, n.dtype) for n in frames})


def _first_pass(fold: Fold) -> Fold:
    return replace(fold, pass_index=0)


def _outputs_swapped(group: Group) -> Group:
    a, b = group.outputs
    return replace(group, outputs=(replace(a, body=b.body), replace(b, body=a.body)))


def _hoisted_out_of_a_maximum(fold: Fold) -> Fold:
    main = fold.accumulators[0]
    match main.term:
        case Apply("mul", (x, factor)) if fold.nest.reducer == MAX:
            name = read(main.name, main.axes, main.dtype)
            return replace(fold, accumulators=(replace(main, term=x),), finish=apply("mul", name, factor))
    return fold


def _without_inversion(hoisted: Any, *_: Any) -> Any:
    return replace(hoisted, factors=tuple(Factor(f.value, False) for f in hoisted.factors))


def _first_frame_only(values: list[Expr], *_: Any) -> list[Expr]:
    return values[:1]


def _of_another_count(delta: Expr | None, *_: Any) -> Expr | None:
    return None if delta is None else _times(delta, 13.0)


def _drops_a_select(node: Apply) -> Expr | None:
    return node.args[1] if node.op == "select" else None


def _without_absolute_values(root: Expr) -> Expr:
    return rewrite(root, lambda node: node.args[0] if node.op == "abs" else None)


def _all_instead_of_any(a: Accumulator) -> Accumulator:
    return replace(a, reducer=AND) if a.reducer == OR else a


def _constants(root: Expr) -> list[Const]:
    return [n for n in postorder(root) if isinstance(n, Const)]


def _constant(old: float, new: float) -> Any:
    return lambda root: substitute(root, {n: const(new, n.dtype) for n in _constants(root) if n.value == old})


def _epsilon_times_ten(root: Expr) -> Expr:
    return substitute(root, {n: const(10 * n.value, n.dtype) for n in _constants(root) if 0 < n.value < 1e-3})


def _nothing_is_unfinished(
    real: Any, nest: Any, rolled: Any, index: int, unfinished: Any, *rest: Any, **kwargs: Any
) -> Any:
    return real(nest, rolled, index, {}, *rest, **kwargs)


_FUSION = "pallasfuse.fusion"

MUTANTS = (
    # deduplicate, inline
    Mutant("merges_reductions_of_other_bodies", "fusion/inline", _deduplicates(same_body=False), "variance"),
    Mutant("merges_a_minimum_with_a_maximum", "fusion/inline", _deduplicates(same_body=True), "largest_and_smallest"),
    Mutant(
        "inlined_map_keeps_its_axes",
        "fusion/inline",
        value_at("pallasfuse.ir.expr:Renamings.renamed", lambda _, root, *axes: root),
        "weighted_copy",
    ),
    Mutant(
        "inlined_map_loses_its_mask",
        "fusion/inline",
        result_of(f"{_FUSION}.inline:simplify", lambda e, *_: rewrite(e, _drops_a_select), here_only=True),
        "lower_triangle",
    ),
    # hoisting
    Mutant(
        "factor_not_given_back",
        "fusion/hoisting",
        value_at(f"{_FUSION}.hoisting:Hoisted.finish", lambda self, accumulated: accumulated),
        "sum_of_scaled",
    ),
    Mutant(
        "divisor_given_back_as_factor",
        "fusion/hoisting",
        result_of(f"{_FUSION}.hoisting:hoist", _without_inversion),
        "masked_share",
    ),
    Mutant(
        "divisor_not_given_back",
        "fusion/hoisting",
        in_folds(lambda f: replace(f, finish=read(f.accumulators[0].name, f.nest.axes, f.accumulators[0].dtype))),
        "attention",
    ),
    Mutant(
        "factor_hoisted_out_of_a_maximum",
        "fusion/hoisting",
        in_folds(_hoisted_out_of_a_maximum),
        "largest_of_scaled",
    ),
    Mutant(
        "maximum_hoisted_out_of_a_sum",
        "fusion/hoisting",
        value_at(f"{_FUSION}.folding:_sums_only", lambda *_: True),
        "normalized_large",
        "xla",
    ),
    Mutant(
        "growth_of_the_rest_not_asked",
        "fusion/hoisting",
        value_at(f"{_FUSION}.folding:degree", lambda *_: 0),
        "large_shares",
        "xla",
    ),
    # folding
    Mutant("frame_negated", "fusion/folding", _frames(lambda f: replace(f, value=_negated(f.value))), "softmax"),
    Mutant(
        "frame_of_another_count",
        "fusion/folding",
        _frames(lambda f: replace(f, value=_times(f.value, 0.5))),
        "norm_dot",
    ),
    Mutant(
        "frame_forgotten",
        "fusion/folding",
        result_of(f"{_FUSION}.folding:_frame_values", _first_frame_only),
        "layer_norm_dot",
    ),
    Mutant("old_and_new_frame_swapped", "fusion/folding", in_updates(_old_and_new_swapped), "softmax"),
    Mutant("predecessor_is_stale", "fusion/folding", in_updates(_old_for_new), "softmax"),
    Mutant("predecessor_of_moments_is_stale", "fusion/folding", in_updates(_old_for_new), "variance"),
    Mutant("update_forgotten", "fusion/folding", in_accumulators(lambda a: replace(a, update=None)), "softmax"),
    Mutant("update_doubled", "fusion/folding", in_updates(lambda u: _times(u, 2.0)), "softmax"),
    Mutant("term_negated", "fusion/folding", in_accumulators(lambda a: replace(a, term=_negated(a.term))), "norm_dot"),
    Mutant("sum_folded_as_maximum", "fusion/folding", in_accumulators(lambda a: replace(a, reducer=MAX)), "softmax"),
    Mutant(
        "empty_taken_as_neutral",
        "fusion/folding",
        in_folds(lambda f: replace(f, empty_is_neutral=True)),
        "first_masked",
    ),
    Mutant(
        "empty_moved_to_an_infinite_frame",
        "fusion/folding",
        in_folds(lambda f: replace(f, identity_where=())),
        "exponentials_of_visible",
        "xla",
    ),
    Mutant(
        "infinite_sum_taken_as_empty",
        "fusion/folding",
        in_folds(lambda f: replace(f, identity_where=tuple(e for frame in f.frames for e in frame.empties))),
        "exponentials_of_all",
        "xla",
    ),
    Mutant(
        "positive_frame_not_asked",
        "fusion/folding",
        _frames(lambda f: replace(f, positive=False)),
        "late_divisor",
        "xla",  # in real numbers nothing is wrong: the sum of exponentials is positive at every unfinished frame
    ),
    Mutant(
        "positive_frame_asked_without_need",
        "fusion/folding",
        value_at(f"{_FUSION}.folding:_relies_on_sign", lambda *_: True),
        "small_after_zeros",
        "xla",
    ),
    Mutant(
        "factor_in_no_range",
        "fusion/stability",
        value_at(f"{_FUSION}.folding:range_of", lambda *_: (0.0, math.inf)),
        "factor_that_grows",
        "xla",
    ),
    Mutant(
        "empty_predecessors_forgotten",
        "fusion/folding",
        value_at(f"{_FUSION}.folding:_empties", lambda fold: frozenset()),
        "late_rows",
        "xla",
    ),
    Mutant(
        "finite_guard_of_the_program_dropped",
        "fusion/folding",
        in_bodies(lambda e: rewrite(e, _drops_a_select)),
        "late_logarithms",
        "xla",
    ),
    Mutant("absolute_value_dropped", "fusion/folding", in_bodies(_without_absolute_values), "quantized"),
    Mutant("some_becomes_all", "fusion/folding", in_accumulators(_all_instead_of_any), "above_the_mean"),
    Mutant("comparison_reversed", "fusion/folding", in_bodies(renamed("gt", "lt")), "above_the_mean"),
    Mutant("comparison_takes_ties", "fusion/folding", in_bodies(renamed("gt", "ge")), "ties", "tiles"),
    Mutant("mask_loses_the_diagonal", "fusion/folding", in_bodies(renamed("le", "lt")), "lower_triangle"),
    Mutant("window_one_shorter", "fusion/folding", in_bodies(_constant(7, 6)), "narrow_window"),
    Mutant("small_constant_of_another_size", "fusion/folding", in_bodies(_epsilon_times_ten), "norm_dot"),
    # stability
    Mutant(
        "exponent_not_bounded",
        "fusion/stability",
        value_at(f"{_FUSION}.folding:exponent_is_bounded", lambda *_: None),
        "centred_steep",
        "xla",
    ),
    Mutant(
        "divisor_may_be_zero",
        "fusion/stability",
        value_at(f"{_FUSION}.folding:divides_safely", lambda *_: None),
        "zero_sum_first",
        "xla",
    ),
    Mutant(
        "frame_is_not_of_these_values",
        "fusion/stability",
        value_at(f"{_FUSION}.folding:is_centred", lambda *_: True),
        "another_mean",
        "xla",
    ),
    # refinement
    Mutant(
        "deviation_negated",
        "fusion/refinement",
        result_of(f"{_FUSION}.refinement:_deviation", lambda d, *_: None if d is None else _negated(d)),
        "far_from_zero",
        "accuracy",
    ),
    Mutant(
        "deviation_not_divided",
        "fusion/refinement",
        result_of(f"{_FUSION}.refinement:_deviation", _of_another_count),
        "far_from_zero",
        "accuracy",
    ),
    Mutant(
        "refines_around_no_mean",
        "fusion/refinement",
        value_at(f"{_FUSION}.refinement:_mean_of", lambda *_: True),
        "around_a_share",
    ),
    # grouping
    Mutant("outputs_swapped", "fusion/grouping", in_groups(_outputs_swapped), "mean_and_variance"),
    Mutant("second_pass_joins_the_first", "fusion/grouping", in_folds(_first_pass), "fourth_moment"),
    Mutant(
        "nothing_follows_what_is_taken",
        "fusion/folding",
        result_of(f"{_FUSION}.folding:picked_fold", _without_finish),
        "taken",
    ),
    Mutant(
        "earliest_pass_is_too_early",
        "fusion/grouping",
        instead_of(f"{_FUSION}.candidates:fold_over", _nothing_is_unfinished),
        "softmax",
    ),
    # the types and expressions that all of them share
    Mutant(
        "accumulates_in_half_precision",
        "ir/dtypes",
        value_at("pallasfuse.ir.dtypes:accumulator", lambda t: t),
        "half_products",
        "accuracy",
    ),
    Mutant(
        "simplification_drops_masks",
        "ir/simplify",
        result_of(
            "pallasfuse.ir.simplify:_step", lambda e, node, args: args[1] if node.args and node.op == "select" else e
        ),
        "lower_triangle",
    ),
    Mutant(
        "substitution_of_first_operands_only",
        "ir/expr",
        instead_of(
            "pallasfuse.ir.expr:with_args",
            # however often a difference is rebuilt: swapped operands would be swapped back
            lambda real, node, args: real(node, args[:1] * 2 if getattr(node, "op", "") == "sub" else args),
        ),
        "softmax",
    ),
)
