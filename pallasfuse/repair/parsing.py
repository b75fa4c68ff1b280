"""Scalar expressions from text, for humans and tests: `exp(c - r) * (w + b)`."""

import ast
import math

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Expr, apply, const, convert, read
from pallasfuse.ir.ops import OPS

_BINARY: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip
_CONSTANTS = {"inf": math.inf, "nan": math.nan}


def parse_expr(text: str, dtype: str = "float32") -> Expr:
    """The expression that `text` spells in Python syntax; every name is a scalar of type `dtype`.

    Operators + - * / ** and comparisons, calls of the operations in `ir.ops.OPS`, and calls of a type name (a cast).
    The first argument of `select` is a bool when it is a bare name; an integer literal exponent gives `integer_pow`.

    Raises:
      InvalidProgramError: the text is not such an expression.
    """
    try:
        return _build(ast.parse(text, mode="eval").body, dtype)
    except SyntaxError as error:
        raise InvalidProgramError(f"cannot parse the expression {text!r}: {error.msg}") from error


def _build(node: ast.expr, dtype: str) -> Expr:
    match node:
        case ast.Constant(bool() as value):
            return const(value, "bool")
        case ast.Constant(int() | float() as value):
            return const(float(value), dtype)
        case ast.Name(name):
            return const(_CONSTANTS[name], dtype) if name in _CONSTANTS else read(name, (), dtype)
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return const(-float(value), dtype)
        case ast.UnaryOp(ast.USub(), ast.Name("inf")):
            return const(-math.inf, dtype)
        case ast.UnaryOp(ast.USub(), x):
            return apply("neg", _build(x, dtype))
        case ast.BinOp(base, ast.Pow(), exponent):
            power = _literal_int(exponent)
            if power is not None:
                return apply("integer_pow", _build(base, dtype), const(power, "int32"), dtype=dtype)
            return apply("pow", _build(base, dtype), _build(exponent, dtype))
        case ast.BinOp(left, operator, right) if type(operator) in _BINARY:
            return apply(_BINARY[type(operator)], _build(left, dtype), _build(right, dtype))
        case ast.Compare(left, [operator], [right]) if type(operator) in _COMPARE:
            return apply(_COMPARE[type(operator)], _build(left, dtype), _build(right, dtype))
        case ast.Call(ast.Name(name), [x], []) if name in dtypes.SUPPORTED:
            return convert(_build(x, dtype), name)
        case ast.Call(ast.Name("select"), [ast.Name(predicate), on_true, on_false], []):
            return apply("select", read(predicate, (), "bool"), _build(on_true, dtype), _build(on_false, dtype))
        case ast.Call(ast.Name("integer_pow"), [base, exponent], []) if _literal_int(exponent) is not None:
            return apply("integer_pow", _build(base, dtype), const(_literal_int(exponent) or 0, "int32"), dtype=dtype)
        case ast.Call(ast.Name(name), arguments, []) if name in OPS and OPS[name].arity == len(arguments):
            return apply(name, *(_build(a, dtype) for a in arguments))
        case _:
            raise InvalidProgramError(f"cannot read {ast.unparse(node)!r} as a scalar expression")


def _literal_int(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() as value)):
            return -value
        case _:
            return None
