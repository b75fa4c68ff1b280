"""Mistakes in the conversion of a jaxpr to a loop program."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pallasfuse.errors import Refusal
from pallasfuse.ir.expr import Expr, add, apply, const, index, mul, select
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.reducers import MIN
from tests.mutation.planting import Mutant, Plant, instead_of, result_of

_RULES = "pallasfuse.jaxpr_frontend.conversion:_RULES"


def _params(primitive: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    """The rule of a primitive sees other parameters."""

    def instead(real: Any, eqn: Any, dims: Any, space: int) -> Any:
        return real(eqn.replace(params=eqn.params | change(eqn.params)), dims, space)

    return instead_of(f"{_RULES}[{primitive}]", instead)


def _plan(primitive: str, change: Callable[[Any], Any]) -> Plant:
    return result_of(f"{_RULES}[{primitive}]", lambda plan, *_: plan if isinstance(plan, Refusal) else change(plan))


def _body(primitive: str, change: Callable[..., Expr]) -> Plant:
    """`change(real body, args, position)`"""

    def changed(plan: Any) -> Any:
        real = plan.body
        return replace(plan, body=lambda args, position: change(real, args, position))

    return _plan(primitive, changed)


def _taken(change: Callable[..., Expr]) -> Plant:
    """The body of a gather of single elements; `change(real body, args, position)`."""

    def changed(plan: Any, eqn: Any, dims: Any, *_: Any) -> Any:
        return (
            plan
            if isinstance(plan, Refusal)
            else replace(plan, body=lambda args, at: change(lambda a, _: plan.body(a, at), args, at(plan.reduced)))
        )

    return result_of("pallasfuse.jaxpr_frontend.picking:_gather", changed)


def _looked_up(change: Callable[[Lookup], Lookup]) -> Plant:
    """What is said of a gather of rows."""
    return result_of(
        "pallasfuse.jaxpr_frontend.lookups:_lookup", lambda x, *_: change(x) if isinstance(x, Lookup) else x
    )


def _halved(x: Lookup) -> Lookup:
    if x.blocks is None:
        return x
    blocks = replace(x.blocks, extent=2 * x.blocks.extent)
    axes = tuple(blocks if a == x.blocks else a for a in x.table.axes)
    return replace(x, block=x.block // 2, blocks=blocks, table=replace(x.table, axes=axes))


def eq_zero(position: Expr) -> Expr:
    return apply("eq", position, const(0, "int32"))


def _inverse(permutation: Any) -> tuple[int, ...]:
    return tuple(permutation.index(n) for n in range(len(permutation)))


def _columns(params: dict[str, Any]) -> dict[str, Any]:
    (lhs, _), batch = params["dimension_numbers"]
    return {"dimension_numbers": ((lhs, (1,)), batch)}


def _column_major(real: Any, self: Any, symbols: Any) -> Expr:
    total: Expr = const(0, "int32")
    stride = 1
    for axis in self._over(symbols):
        total = add(total, mul(index(axis), const(stride, "int32")))
        stride *= axis.extent
    return total


def _inner_body(change: Callable[[Any], Any]) -> Plant:
    """The body of every call that is inlined."""
    return result_of(
        "pallasfuse.jaxpr_frontend.inlining:_body", lambda body, *_: None if body is None else change(body)
    )


def _reversed_variables(which: str) -> Callable[[Any], Any]:
    from pallasfuse import _compat

    def change(body: Any) -> Any:
        if which == "outvars":
            return _compat.replace_jaxpr(body, body.constvars, body.consts, body.eqns, body.outvars[::-1])
        return body.replace(invars=body.invars[::-1])

    return change


def _mutant(name: str, plant: Plant, subject: str, check: str = "proof") -> Mutant:
    return Mutant(name, "jaxpr_frontend", plant, subject, check)


MUTANTS = (
    _mutant(
        "transpose_not_inverted",
        _params("transpose", lambda p: {"permutation": _inverse(p["permutation"])}),
        "permuted",
    ),
    _mutant("broadcast_to_rows", _params("broadcast_in_dim", lambda p: {"broadcast_dimensions": (0,)}), "biased"),
    _mutant("iota_off_by_one", _body("iota", lambda real, a, p: add(real(a, p), const(1, "int32"))), "masked_share"),
    _mutant("iota_along_rows", _params("iota", lambda p: {"dimension": 0}), "weighted_by_position"),
    _mutant("select_cases_swapped", _body("select_n", lambda real, a, p: real((a[0], a[2], a[1]), p)), "masked_share"),
    _mutant("subtraction_swapped", _body("sub", lambda real, a, p: real(a[::-1], p)), "softmax"),
    _mutant("division_swapped", _body("div", lambda real, a, p: real(a[::-1], p)), "norm_dot"),
    _mutant(
        "reduces_the_kept_axis", _plan("reduce_sum", lambda p: replace(p, kept=p.reduced, reduced=p.kept)), "square_sum"
    ),
    _mutant("maximum_as_minimum", _plan("reduce_max", lambda p: replace(p, reducer=MIN)), "softmax"),
    _mutant("product_over_columns", _params("dot_general", _columns), "square_dot"),
    _mutant("product_with_itself", _body("dot_general", lambda real, a, p: real((a[0], a[0]), p)), "square_dot"),
    _mutant("product_operands_swapped", _plan("dot_general", lambda p: replace(p, views=p.views[::-1])), "square_dot"),
    _mutant("clamp_bounds_swapped", _body("clamp", lambda real, a, p: real(a[::-1], p)), "clamped"),
    _mutant("power_off_by_one", _params("integer_pow", lambda p: {"y": p["y"] + 1}), "cubed"),
    _mutant(
        "binary_logarithm_without_factor", _body("log2", lambda real, a, p: apply("log", a[0])), "binary_logarithm"
    ),
    _mutant("cast_to_integer_dropped", _body("convert_element_type", lambda real, a, p: a[0]), "truncated", "loops"),
    _mutant(
        "positions_column_major",
        instead_of("pallasfuse.jaxpr_frontend.conversion:_Naming._position", _column_major),
        "weighted_by_number",
    ),
    _mutant("pages_of_half_their_size", _looked_up(_halved), "pages"),
    _mutant(
        "table_of_another_order",
        _looked_up(lambda x: replace(x, table=replace(x.table, axes=x.table.axes[::-1]))),
        "pages",
    ),
    _mutant("nothing_is_filled_in", _looked_up(lambda x: replace(x, fill=None)), "pages"),
    _mutant("taken_off_by_one", _taken(lambda real, a, p: real((a[0], add(a[1], const(1, "int32"))), p)), "taken"),
    _mutant(
        "taken_without_fill",
        _taken(lambda real, a, p: select(real(a, p).args[0], a[0], const(0.0, "float32"))),
        "taken",
    ),
    _mutant(
        "taken_from_two_places",
        _taken(lambda real, a, p: add(real(a, p), select(eq_zero(p), a[0], const(0.0, "float32")))),
        "taken",
    ),
    _mutant("results_of_a_call_swapped", _inner_body(_reversed_variables("outvars")), "calls"),
    _mutant("arguments_of_a_call_swapped", _inner_body(_reversed_variables("invars")), "calls"),
)
