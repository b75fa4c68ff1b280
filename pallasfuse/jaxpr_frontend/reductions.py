"""Rules for reductions and contractions."""

from typing import Any

from jax.lax import Precision

from pallasfuse._compat import JaxprEqn
from pallasfuse.errors import Refusal
from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Expr, convert, mul
from pallasfuse.ir.reducers import AND, MAX, MIN, OR, PROD, SUM, Reducer
from pallasfuse.jaxpr_frontend.dimensions import Dimensions
from pallasfuse.jaxpr_frontend.plans import Plan, Position, Rule, dtype_of, flat, same, shape_of


def _reduction(reducer: Reducer) -> Rule:
    def rule(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
        if len(eqn.invars) != 1:
            return Refusal(f"{eqn.primitive.name} of several operands")
        axes = {int(axis) for axis in eqn.params["axes"]}
        source, result = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
        if reducer in (AND, OR) and source != "bool":
            return Refusal(f"{eqn.primitive.name} over the bits of integers")
        if source != result:
            return Refusal(f"{eqn.primitive.name} from {source} to {result}")
        operand = dims.fresh_shape(shape_of(eqn.invars[0]), space)
        kept = flat([d for n, d in enumerate(operand) if n not in axes])
        reduced = flat([d for n, d in enumerate(operand) if n in axes])
        return Plan(kept, (flat(operand),), same, reduced, reducer if reduced else None)

    return rule


def _dot_general(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs_type, rhs_type = (dtype_of(x) for x in eqn.invars)
    result = dtype_of(eqn.outvars[0])
    operand = _operand_type(eqn, lhs_type, rhs_type, result)
    carried = None if operand is None else _accumulator(operand, result)
    if operand is None or carried is None:
        return Refusal(f"dot_general of {lhs_type} and {rhs_type} to {result}")
    lhs = dims.fresh_shape(shape_of(eqn.invars[0]), space)
    shared = {int(r): lhs[int(left)] for left, r in zip(lhs_batch, rhs_batch, strict=True)}
    shared |= {int(r): lhs[int(left)] for left, r in zip(lhs_contracting, rhs_contracting, strict=True)}
    rhs_shape = shape_of(eqn.invars[1])
    own = dims.fresh_shape((1 if n in shared else extent for n, extent in enumerate(rhs_shape)), space)
    rhs = [shared.get(n, dim) for n, dim in enumerate(own)]
    summed = [lhs[int(d)] for d in lhs_contracting]
    batch = [lhs[int(d)] for d in lhs_batch]
    used = {int(d) for d in (*lhs_contracting, *lhs_batch)}
    lhs_free = [dim for n, dim in enumerate(lhs) if n not in used]
    rhs_free = [dim for n, dim in enumerate(rhs) if n not in shared]
    reduced = flat(summed)

    def body(args: tuple[Expr, ...], position: Position) -> Expr:
        product = mul(*(convert(convert(a, operand), carried) for a in args))
        return product if reduced else convert(product, result)

    kept = flat([*batch, *lhs_free, *rhs_free])
    precision = _precision(eqn.params.get("precision"))
    views, unit_batch = (flat(lhs), flat(rhs)), any(shape_of(eqn.invars[0])[int(d)] == 1 for d in lhs_batch)
    return Plan(kept, views, body, reduced, SUM if reduced else None, precision, unit_batch=unit_batch)


def _operand_type(eqn: JaxprEqn, lhs: str, rhs: str, result: str) -> str | None:
    """The type that both operands are rounded to. JAX lowers a product of two types as one of operands of the result's type."""
    if lhs == rhs:
        return lhs
    precision = eqn.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision,)
    if not all(p is None or isinstance(p, Precision) for p in pair):
        return None  # an algorithm has types of its own
    return result if dtypes.is_float(result) or not (dtypes.is_float(lhs) or dtypes.is_float(rhs)) else None


def _accumulator(operand: str, result: str) -> str | None:
    """The type that products are formed and added in; None when the types do not go together."""
    for kind in (dtypes.is_float, dtypes.is_integer):
        if kind(operand) and kind(result):
            candidates = [dtypes.accumulator(operand), dtypes.accumulator(result)]
            widest = max(candidates, key=dtypes.itemsize_bytes)
            unsigned = {c.startswith("uint") for c in candidates}
            return widest if len(unsigned) == 1 else None
    return None


def _precision(precision: Any) -> str:
    """A `lax.Precision`, a pair of them (joined by a comma) or a `lax.DotAlgorithmPreset`, by name."""
    both = precision if isinstance(precision, tuple) else (precision, precision)
    names = ["DEFAULT" if p is None else getattr(p, "name", str(p)) for p in both]
    return names[0] if names[0] == names[1] else ",".join(names)


RULES: dict[str, Rule] = {
    "reduce_sum": _reduction(SUM),
    "reduce_prod": _reduction(PROD),
    "reduce_max": _reduction(MAX),
    "reduce_min": _reduction(MIN),
    "reduce_and": _reduction(AND),
    "reduce_or": _reduction(OR),
    "dot_general": _dot_general,
}
