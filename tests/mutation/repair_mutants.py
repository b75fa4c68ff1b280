"""Mistakes in the algebra of repairs: in what it answers, and in its parts with its own check on samples switched off."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

from pallasfuse.ir.expr import Apply, Const, Expr, Read, apply, const, postorder, substitute
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.repair.result import Repair
from tests.mutation.planting import Mutant, Plant, all_of, instead_of, renamed, result_of, rewrite, swapped, value_at

_DERIVE = "pallasfuse.repair.derive:derive"
_ROOM = "pallasfuse.repair"


def _repairs(change: Any) -> Plant:
    """What the derivation answers is changed."""
    return result_of(_DERIVE, lambda r, *_, **__: change(r) if isinstance(r, Repair) else r)


def _updates(change: Any) -> Plant:
    return _repairs(
        lambda r: replace(r, accumulators=tuple(replace(a, update=change(a.update)) for a in r.accumulators))
    )


def _unchecked(*plants: Plant) -> Plant:
    """A mistake inside the algebra, with its own check on samples switched off."""
    return all_of(value_at(f"{_ROOM}.derive:_agrees", lambda *_: True), *plants)


def _transposed(repair: Repair) -> Repair:
    updates = [a.update for a in repair.accumulators]
    return replace(
        repair,
        accumulators=tuple(replace(a, update=u) for a, u in zip(repair.accumulators, updates[::-1], strict=True)),
    )


def _without(number: int) -> Any:
    """Accumulator `number` is dropped from the updates of the others."""

    def change(repair: Repair) -> Repair:
        accumulators = []
        for n, a in enumerate(repair.accumulators):
            gone = {
                r: const(0.0, r.dtype)
                for r in postorder(a.update)
                if isinstance(r, Read) and r.tensor == f"acc.{number}"
            }
            accumulators.append(a if n == number else replace(a, update=substitute(a.update, gone)))
        return replace(repair, accumulators=tuple(accumulators))

    return change


def _twos_are_ones(update: Expr) -> Expr:
    def step(node: Apply) -> Expr | None:
        if node.op == "mul" and isinstance(node.args[0], Const) and node.args[0].value == 2.0:
            return node.args[1]
        return None

    return rewrite(update, step)


def _squares_are_first_powers(update: Expr) -> Expr:
    return rewrite(update, lambda node: node.args[0] if node.op == "square" else None)


def _powers_are_factors(update: Expr) -> Expr:
    return rewrite(update, lambda node: apply("mul", *node.args) if node.op == "pow" else None)


def _of_ones(repair: Repair) -> Repair:
    """The count is counted twice."""
    changed = tuple(
        replace(a, term=const(2.0, a.term.dtype)) if isinstance(a.term, Const) else a for a in repair.accumulators
    )
    return replace(repair, accumulators=changed)


def _first_reducer(reducer: Any) -> Any:
    return lambda repair: replace(
        repair, accumulators=(replace(repair.accumulators[0], reducer=reducer), *repair.accumulators[1:])
    )


def _matrix_transposed(matrix: Any, *_: Any) -> Any:
    return matrix and [list(row) for row in zip(*matrix, strict=True)]


def _strips_every_mask(result: Any, body: Expr, problem: Any) -> Any:
    stripped, masks = result
    match stripped:
        case Apply("select", (p, x, Const())) if problem.roles.get(p) == "predicate":
            return x, [*masks, p]
    return result


def _not_squared(real: Any, self: Any, x: Expr, exponent: Fraction) -> Expr:
    return x if exponent == 2 else real(self, x, exponent)


def _unsigned(entry: Any, *_: Any) -> Any:
    return 1, entry[1]


def _sub_as_add(result: Any, op: str, operands: Any) -> Any:
    from pallasfuse.repair import laurent

    return laurent.add(*operands) if op == "sub" else result


_POSITIVE = tuple(
    value_at(f"pallasfuse.{module}:infer_sign", lambda *_: "positive")
    for module in ("repair.rules", "repair.canonical", "fusion.folding")
)

MUTANTS = (
    Mutant("exponent_has_the_wrong_sign", "repair", _updates(swapped("sub")), "softmax"),
    Mutant(
        "update_without_its_factor",
        "repair",
        _updates(lambda u: rewrite(u, lambda n: n.args[0] if n.op == "mul" else None)),
        "softmax",
    ),
    Mutant("ratio_inverted", "repair", _updates(swapped("div")), "norm_dot"),
    Mutant("rows_of_the_matrix_reversed", "repair", _repairs(_transposed), "variance"),
    Mutant("first_order_accumulator_dropped", "repair", _repairs(_without(1)), "variance"),
    Mutant("count_dropped", "repair", _repairs(_without(2)), "variance"),
    Mutant("coefficient_two_missing", "repair", _updates(_twos_are_ones), "variance"),
    Mutant("square_missing", "repair", _updates(_squares_are_first_powers), "variance"),
    Mutant("counts_twice", "repair", _repairs(_of_ones), "variance"),
    Mutant("maximum_joined_as_sum", "repair", _repairs(_first_reducer(SUM)), "scaled_max"),
    Mutant("sum_joined_as_maximum", "repair", _repairs(_first_reducer(MAX)), "norm_dot"),
    Mutant("shift_of_a_maximum_negated", "repair", _updates(swapped("sub")), "largest_of_shifted"),
    Mutant("scale_of_a_maximum_inverted", "repair", _updates(swapped("div")), "scaled_max"),
    Mutant("power_of_the_count_missing", "repair", _updates(_powers_are_factors), "product_of_scaled"),
    Mutant("exponential_of_another_base", "repair", _updates(renamed("exp", "exp2")), "softmax"),
    # inside the algebra
    Mutant(
        "transition_transposed",
        "repair/closure",
        _unchecked(result_of(f"{_ROOM}.closure:transition", _matrix_transposed)),
        "variance",
    ),
    Mutant(
        "old_value_is_the_new", "repair/canonical", _unchecked(value_at(f"{_ROOM}.rules:aged", lambda v: v)), "softmax"
    ),
    Mutant(
        "power_not_raised",
        "repair/emission",
        _unchecked(instead_of(f"{_ROOM}.emission:Emitter.raised", _not_squared)),
        "variance",
    ),
    Mutant(
        "difference_of_frames_reversed",
        "repair/emission",
        _unchecked(result_of(f"{_ROOM}.emission:_pair", lambda e, *_: swapped("sub")(e))),
        "layer_norm_dot",
    ),
    Mutant(
        "sign_of_an_entry_lost",
        "repair/emission",
        _unchecked(result_of(f"{_ROOM}.emission:Emitter.entry", _unsigned)),
        "waves",
    ),
    Mutant(
        "negation_forgotten", "repair/emission", _unchecked(value_at(f"{_ROOM}.rules:negated", lambda x: x)), "waves"
    ),
    Mutant(
        "difference_expanded_as_sum",
        "repair/expansion",
        _unchecked(result_of(f"{_ROOM}.expansion:_arithmetic", _sub_as_add)),
        "softmax",
    ),
    Mutant(
        "every_part_is_invariant",
        "repair/canonical",
        _unchecked(value_at(f"{_ROOM}.canonical:_is_invariant", lambda *_: True)),
        "largest_of_shifted",
        "tiles",
    ),
    Mutant(
        "mask_with_another_value_stripped",
        "repair/rules",
        _unchecked(result_of(f"{_ROOM}.rules:_identity_masked", _strips_every_mask)),
        "masked_shifted",
    ),
    Mutant("sign_of_a_scale_not_asked", "repair/signs", _unchecked(*_POSITIVE), "largest_of_scaled"),
    # the same, with its own check
    Mutant(
        "transition_transposed_but_sampled",
        "repair/closure",
        result_of(f"{_ROOM}.closure:transition", _matrix_transposed),
        "variance",
        "samples",
    ),
    Mutant(
        "power_not_raised_but_sampled",
        "repair/emission",
        instead_of(f"{_ROOM}.emission:Emitter.raised", _not_squared),
        "variance",
        "samples",
    ),
    Mutant(
        "difference_expanded_as_sum_but_sampled",
        "repair/expansion",
        result_of(f"{_ROOM}.expansion:_arithmetic", _sub_as_add),
        "softmax",
        "samples",
    ),
    Mutant(
        "mask_stripped_but_sampled",
        "repair/rules",
        result_of(f"{_ROOM}.rules:_identity_masked", _strips_every_mask),
        "masked_shifted",
        "samples",
    ),
)
