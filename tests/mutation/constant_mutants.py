"""Mistakes in constants: where they are folded, and where expressions carry them; and reads of one tensor along two axes."""

import math
from collections.abc import Callable
from typing import Any

from pallasfuse.ir.expr import Const, Expr, Read, const, postorder, read, rebuild, substitute, with_args
from tests.mutation.planting import Mutant, Plant, in_bodies, renamed, result_of

_FOLD = "pallasfuse.ir.simplify:_fold"


def _folds(op: str, change: Callable[..., float]) -> Plant:
    """The operation is folded to another number, made from the right one and its operands."""

    def spoil(result: Expr | None, folded: str, args: tuple[Const, ...], dtype: str) -> Expr | None:
        if folded != op or not isinstance(result, Const) or not dtype.startswith("float"):
            return result
        return const(float(change(float(result.value), *(float(a.value) for a in args))), dtype)

    return result_of(_FOLD, spoil)


def _literals(change: Callable[[float], float]) -> Plant:
    """Every finite float of a group but 0 and 1 is changed."""

    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if not isinstance(node, Const) or not node.dtype.startswith("float") or abs(node.value) in (0, 1, math.inf):
            return with_args(node, args)
        return const(change(float(node.value)), node.dtype)

    return in_bodies(lambda root: rebuild(root, step))


def _along_one_axis(root: Expr) -> Expr:
    """A tensor that is read along two axes is read along the last of them only."""
    reads = [n for n in postorder(root) if isinstance(n, Read) and len(n.indices) == 1]
    last = {n.tensor: n.indices for n in reads}
    moved: dict[Expr, Expr] = {n: read(n.tensor, last[n.tensor], n.dtype) for n in reads if n.indices != last[n.tensor]}
    return substitute(root, moved)


def _fold(name: str, op: str, change: Callable[..., Any], subject: str) -> Mutant:
    return Mutant(name, "ir", _folds(op, change), subject)


MUTANTS = (
    _fold("root_folded_to_its_argument", "sqrt", lambda _, x: x, "divided_by_a_root"),
    _fold("root_folded_to_its_inverse", "sqrt", lambda r, _: 1 / r, "divided_by_a_root"),
    _fold("root_folded_inexactly", "sqrt", lambda r, _: 1.001 * r, "divided_by_a_root"),
    _fold("root_of_a_neighbour", "sqrt", lambda _, x: math.sqrt(x + 1), "divided_by_a_root"),
    _fold("root_of_an_odd_number_of_a_neighbour", "sqrt", lambda _, x: math.sqrt(x + 2), "divided_by_an_odd_root"),
    _fold("root_folded_twice", "sqrt", lambda r, _: math.sqrt(r), "scaled_by_the_root_of_its_count"),
    _fold("logarithm_in_another_base", "log", lambda r, _: r / math.log(2), "scaled_by_a_logarithm"),
    _fold("sign_of_a_logarithm_lost", "log", lambda r, _: abs(r), "scaled_by_a_logarithm"),
    _fold("exponential_in_another_base", "exp", lambda _, x: 2**x, "scaled_by_folded_functions"),
    _fold("opaque_function_folded_inexactly", "tanh", lambda r, _: 1.01 * r, "scaled_by_folded_functions"),
    _fold("product_folded_as_sum", "mul", lambda _, x, y: x + y, "scaled_by_folded_functions"),
    _fold("quotient_folded_upside_down", "div", lambda r, *_: 1 / r, "scaled_by_folded_functions"),
    _fold("correction_of_a_count_forgotten", "sub", lambda _, x, y: x, "corrected_mean"),
    Mutant("literals_off_by_a_little", "fusion", _literals(lambda x: 1.001 * x), "cubic"),
    Mutant("literals_doubled", "fusion", _literals(lambda x: 2 * x), "cubic"),
    Mutant("literals_negated", "fusion", _literals(lambda x: -x), "largest_of_seventeen"),
    Mutant("literals_inverted", "fusion", _literals(lambda x: 1 / x), "largest_of_seventeen"),
    Mutant("odd_literal_replaced_by_another", "fusion", _literals(lambda x: x + 2), "largest_of_seventeen"),
    Mutant("maximum_of_odd_multiples_as_minimum", "fusion", in_bodies(renamed("max", "min")), "odd_multiples"),
    Mutant("two_axes_of_one_tensor_taken_for_one", "fusion", in_bodies(_along_one_axis), "within_segments"),
)
