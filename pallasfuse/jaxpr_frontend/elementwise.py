"""Rules for the primitives that compute each element of their result from the same element of their operands."""

from collections.abc import Callable
from math import inf

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.errors import Refusal
from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Const, Expr, apply, const, convert, select
from pallasfuse.jaxpr_frontend.dimensions import Dimensions
from pallasfuse.jaxpr_frontend.plans import Body, Plan, Position, Rule, dtype_of, flat, same, shape_of

_LOG2_E = 1.4426950408889634


def _pointwise(eqn: JaxprEqn, dims: Dimensions, space: int, body: Body) -> Plan | Refusal:
    shape = shape_of(eqn.outvars[0])
    out = dims.fresh_shape(shape, space)
    views = []
    for atom in eqn.invars:
        operand = shape_of(atom) or (1,) * len(shape)
        if len(operand) != len(shape) or any(x not in (1, y) for x, y in zip(operand, shape, strict=True)):
            return Refusal(f"{eqn.primitive.name} of operands with different shapes")
        # a unit dimension is stretched
        views.append(flat([dim for extent, dim in zip(operand, out, strict=True) if extent != 1]))
    return Plan(flat(out), tuple(views), body)


def _scalar_op(op: str) -> Rule:
    def rule(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
        dtype = dtype_of(eqn.outvars[0])
        return _pointwise(eqn, dims, space, lambda args, _: _simplified(op, args, dtype))

    return rule


def _simplified(op: str, args: tuple[Expr, ...], dtype: str) -> Expr:
    """`op(*args)`, without the literals that change no value, not even the sign of a zero."""
    match op, args:
        case "max", (Const(value), x) | (x, Const(value)) if value == -inf:
            return x
        case "min", (Const(value), x) | (x, Const(value)) if value == inf:
            return x
        case "mul", (Const(value), x) | (x, Const(value)) if value == 1 and dtype != "bool":
            return x
        case "div", (x, Const(value)) if value == 1:
            return x
        case ("add", (Const(value), x) | (x, Const(value))) if value == 0 and dtypes.is_integer(dtype):
            return x
        case "sub", (x, Const(value)) if value == 0 and dtypes.is_integer(dtype):
            return x
    return apply(op, *args, dtype=dtype)


def _written_as(body: Callable[..., Expr]) -> Rule:
    """A primitive that is a formula over other scalar operations."""

    def rule(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
        return _pointwise(eqn, dims, space, lambda args, _: body(*args))

    return rule


def _identity(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    return _pointwise(eqn, dims, space, same)


def _sharding_constraint(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    if not _compat.is_sharding_constraint(eqn):
        return Refusal("sharding_constraint to another layout or memory is left to XLA")
    return _identity(eqn, dims, space)


def _log2(x: Expr) -> Expr:
    return apply("mul", apply("log", x), const(_LOG2_E, x.dtype))


def _one_minus_square(x: Expr) -> Expr:
    one = const(1.0, x.dtype)
    return apply("mul", apply("add", one, x), apply("sub", one, x))


def _clamp(low: Expr, x: Expr, high: Expr) -> Expr:
    return apply("min", apply("max", x, low), high)


def _convert(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    dtype = dtype_of(eqn.outvars[0])
    return _pointwise(eqn, dims, space, lambda args, _: convert(args[0], dtype))


def _integer_pow(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    exponent = const(int(eqn.params["y"]), "int32")
    dtype = dtype_of(eqn.outvars[0])
    return _pointwise(eqn, dims, space, lambda args, _: apply("integer_pow", args[0], exponent, dtype=dtype))


def _round(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    op = "round_away" if int(eqn.params["rounding_method"]) == 0 else "round_even"
    return _pointwise(eqn, dims, space, lambda args, _: apply(op, args[0]))


def _select_n(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    def body(args: tuple[Expr, ...], position: Position) -> Expr:
        which, *cases = args
        if which.dtype == "bool":
            return select(which, cases[1], cases[0]) if len(cases) == 2 else cases[0]
        chosen = cases[-1]
        for n in range(len(cases) - 2, -1, -1):
            chosen = select(apply("lt", which, const(n + 1, which.dtype)), cases[n], chosen)
        return chosen

    return _pointwise(eqn, dims, space, body)


def _shift(op: str, kept: str | None = None) -> Rule:
    """Returns the rule of a shift. kept: "sign" where the sign fills what a shift to the right leaves, "zeros" where zeros do."""

    def rule(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
        dtype = dtype_of(eqn.outvars[0])
        if dtype == "uint64" or (dtype == "int64" and kept == "zeros"):
            return Refusal(f"{eqn.primitive.name} of 64 bits without a sign is left to XLA")
        signed = dtype.removeprefix("u")
        moved_as = {"sign": signed, "zeros": f"u{signed}"}.get(kept or "", dtype)

        def body(args: tuple[Expr, ...], position: Position) -> Expr:
            x, amount = convert(args[0], moved_as), args[1]
            amount = const(int(amount.value), moved_as) if isinstance(amount, Const) else convert(amount, moved_as)
            return convert(apply(op, x, amount), dtype)

        return _pointwise(eqn, dims, space, body)

    return rule


def _bitcast(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
    """Takes bits for another type of as many. A float's bits are left to XLA: an evaluation in float64 does not know them."""
    source, target = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
    if not {source, target} <= dtypes.SUPPORTED or dtypes.itemsize_bytes(source) != dtypes.itemsize_bytes(target):
        return Refusal(f"bitcast_convert_type from {source} to {target}, of another size, is left to XLA")
    if source == target or (dtypes.is_integer(source) and dtypes.is_integer(target)):
        return _pointwise(eqn, dims, space, lambda args, _: convert(args[0], target))
    if not dtypes.is_integer(source) or "64" in source:
        return Refusal(f"bitcast_convert_type from {source} to {target} is left to XLA")
    return _pointwise(eqn, dims, space, lambda args, _: apply("bitcast", args[0], dtype=target))


_SAME_NAME = (
    "add", "sub", "mul", "div", "rem", "pow", "max", "min", "atan2", "nextafter", "neg", "abs", "sign", "floor", "ceil",
    "square", "sqrt", "rsqrt", "cbrt", "exp", "exp2", "expm1", "log", "log1p", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "logistic", "erf", "erfc", "erf_inv", "eq", "ne", "lt",
    "le", "gt", "ge", "is_finite", "and", "or", "xor", "not",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **{name: _scalar_op(name) for name in _SAME_NAME},
    "add_any": _scalar_op("add"),
    "log2": _written_as(_log2),
    "one_minus_square": _written_as(_one_minus_square),
    "clamp": _written_as(_clamp),
    "stop_gradient": _identity,
    "copy": _identity,
    "copy_p": _identity,
    "name": _identity,
    "sharding_constraint": _sharding_constraint,
    "convert_element_type": _convert,
    "shift_left": _shift("shift_left"),
    "shift_right_logical": _shift("shift_right", "zeros"),
    "shift_right_arithmetic": _shift("shift_right", "sign"),
    "bitcast_convert_type": _bitcast,
    "integer_pow": _integer_pow,
    "round": _round,
    "select_n": _select_n,
}
