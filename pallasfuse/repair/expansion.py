"""Expands an expression g(frames, opaque parts) to the formal sum of products that the algebra works on.

Each operation has one rule. What has no rule is refused, unless it depends on frames alone: then its value is taken
as one more frame, a *derived frame* (rule 2 holds for every value of a frame, so also for these).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, apply, const, postorder
from pallasfuse.ir.ops import OPS
from pallasfuse.repair import laurent
from pallasfuse.repair.laurent import IMAGINARY, ONE, Exp, Monomial, Poly, Var, number, variable
from pallasfuse.repair.result import ROUNDING
from pallasfuse.repair.signs import Sign, infer_sign

_MAX_PREDICATES = 4
_MAX_POWER = 12


class NotExpandableError(Exception):
    """Raised with the reason why there is no such sum. `template` has one {} for each of `expressions`."""

    def __init__(self, template: str, *expressions: Expr) -> None:
        super().__init__(template)
        self.template = template
        self.expressions = expressions


@dataclass(slots=True)
class Expansion:
    """Expands expressions in which each `Read` is a variable with a known role and (perhaps) a known sign."""

    roles: Mapping[Expr, laurent.Role]
    signs: Mapping[Expr, Sign]
    conditions: dict[str, None] = field(default_factory=dict)
    """Where floating point may differ from the algebra, in order of appearance."""

    def expand(self, root: Expr) -> Poly:
        """The formal sum that equals `root` over the reals.

        Raises:
          NotExpandableError: some operation on the path from a frame to the root has no rule.
        """
        values: dict[Expr, Poly] = {}
        frame_only: dict[Expr, bool] = {}
        for node in postorder(root):
            frame_only[node] = self._is_frame_only(node, frame_only)
            try:
                values[node] = self._rule(node, values, frame_only)
            except (NotExpandableError, laurent.TooManyTermsError) as error:
                if frame_only[node]:
                    values[node] = variable(Var(node, "frame"))
                elif isinstance(error, laurent.TooManyTermsError):
                    raise NotExpandableError("{} has too many terms when it is multiplied out", node) from error
                else:
                    raise
        return values[root]

    def _is_frame_only(self, node: Expr, known: Mapping[Expr, bool]) -> bool:
        match node:
            case Const(value, _):
                return math.isfinite(value)
            case Read():
                return self.roles[node] in ("frame", "invariant")
            case Index():
                return False
            case Apply():
                return all(known[a] for a in node.args)

    def _rule(self, node: Expr, values: Mapping[Expr, Poly], frame_only: Mapping[Expr, bool]) -> Poly:
        match node:
            case Const(value, _):
                return number(Fraction(value)) if math.isfinite(value) else variable(Var(node, "opaque"))
            case Read():
                return variable(Var(node, self.roles[node]))
            case Apply(op, args, dtype):
                if OPS[op].kind in ("comparison", "logical"):
                    raise NotExpandableError(
                        "{} depends on a value that is not finished yet: a choice by it cannot be repaired", node
                    )
                if op == "convert" and not dtypes.is_float(dtype):
                    raise NotExpandableError(
                        f"{{}} is not a finite sum of a(r)*b(c) terms: a cast to {dtype} has no algebra over its"
                        " argument", node,
                    )  # fmt: skip
                if not dtypes.is_float(dtype):
                    raise NotExpandableError(f"{{}} is computed in {dtype}, where the algebra of reals fails", node)
                operands = tuple(values[a] for a in args)
                if op in ("convert", "select"):
                    return self._structural(node, op, args, operands, frame_only)
                simple = _arithmetic(op, operands)
                return simple if simple is not None else self._nonlinear(node, op, args, operands, frame_only)
            case Index():
                raise AssertionError("an index is opaque")

    def _structural(
        self, node: Apply, op: str, args: tuple[Expr, ...], operands: tuple[Poly, ...], frame_only: Mapping[Expr, bool]
    ) -> Poly:
        if op == "convert":
            (x,) = args
            if not dtypes.is_exact_cast(x.dtype, node.dtype):
                if frame_only[x]:
                    return variable(Var(node, "frame"))  # the rounded value is a frame too: nothing moves
                self.conditions[f"{ROUNDING}{node.dtype} moves past the repair"] = None
            return operands[0]
        predicate = args[0]
        if isinstance(predicate, Const):
            return operands[1 if predicate.value else 2]
        if self.roles.get(predicate) != "predicate":
            raise NotExpandableError("{} chooses by {}, which depends on a value that is not finished yet", node,
                                     predicate)  # fmt: skip
        chosen = variable(Var(predicate, "predicate"))
        difference = laurent.add(operands[1], operands[2], -1)
        return laurent.add(operands[2], laurent.multiply(chosen, difference))

    def _nonlinear(
        self, node: Apply, op: str, args: tuple[Expr, ...], operands: tuple[Poly, ...], frame_only: Mapping[Expr, bool]
    ) -> Poly:
        x, arg = operands[0], args[0]
        if op == "div":
            denominator = self._by_cases(
                operands[1], lambda p: self._power(p, Fraction(-1), args[1], node, frame_only), node
            )
            return laurent.multiply(x, denominator)
        if op in ("integer_pow", "pow"):
            return self._general_power(node, args, operands, frame_only)
        exponent = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2)}.get(op)
        if exponent is not None:
            return self._by_cases(x, lambda p: self._power(p, exponent, arg, node, frame_only), node)
        match op:
            case "exp":
                return self._by_cases(x, lambda p: self._exponential("e", p, node), node)
            case "exp2":
                return self._by_cases(x, lambda p: self._exponential(Fraction(2), p, node), node)
            case "expm1" if not frame_only[node]:
                grown = self._by_cases(x, lambda p: self._exponential("e", p, node), node)
                return laurent.add(grown, number(-1))
            case "log":
                return self._by_cases(x, lambda p: self._logarithm(p, node), node)
            case "log1p" if not frame_only[node]:
                return self._by_cases(laurent.add(x, number(1)), lambda p: self._logarithm(p, node), node)
            case "sinh" | "cosh" | "sin" | "cos" if not frame_only[node]:
                return self._by_cases(x, lambda p: self._oscillation(op, p, node), node)
            case "abs":
                return self._absolute(node, arg, x)
            case _:
                raise NotExpandableError(
                    f"{{}} is not a finite sum of a(r)*b(c) terms: {op} has no algebra over its argument", node
                )

    def _by_cases(self, x: Poly, function: Callable[[Poly], Poly], node: Expr) -> Poly:
        """function(select(p, a, b)) = select(p, function(a), function(b)), for every predicate in x."""
        predicates = laurent.variables(x, "predicate")
        if len(predicates) > _MAX_PREDICATES:
            raise NotExpandableError("{} depends on too many predicates", node)
        if not predicates:
            return function(x)
        p = predicates[0]
        on_true = self._by_cases(laurent.assign(x, p, 1), function, node)
        on_false = self._by_cases(laurent.assign(x, p, 0), function, node)
        return laurent.add(on_false, laurent.multiply(variable(p), laurent.add(on_true, on_false, -1)))

    def _sign(self, generator: laurent.Generator) -> Sign:
        if isinstance(generator, Var):
            return infer_sign(generator.expr, self.signs)
        return "positive" if isinstance(generator, Exp) and generator.base != "i" else "any"

    def _power(self, x: Poly, exponent: Fraction, arg: Expr, node: Expr, frame_only: Mapping[Expr, bool]) -> Poly:
        """x ** exponent. A product is split where the signs of its factors allow it."""
        if exponent.denominator == 1 and 0 <= exponent <= _MAX_POWER:
            return laurent.power(x, int(exponent))
        if len(x) != 1:
            if frame_only[arg]:
                return {frozenset(((Var(arg, "frame"), exponent),)): Fraction(1)}
            if not x:
                raise NotExpandableError("{} divides by zero", node)
            raise NotExpandableError(
                "{} is not a finite sum of a(r)*b(c) terms: its denominator or base {} adds an unfinished value to"
                " something that varies", node, arg,
            )  # fmt: skip
        ((monomial, coefficient),) = x.items()
        if any(g == IMAGINARY for g, _ in monomial):
            raise NotExpandableError("{} is not a finite sum of a(r)*b(c) terms", node)
        if exponent.denominator != 1:
            unknown = [(g, e) for g, e in monomial if e.denominator == 1 and self._sign(g) not in
                       ("positive", "nonnegative")]  # fmt: skip
            if coefficient < 0 or len(unknown) > 1 or any(e != 1 for _, e in unknown):
                raise NotExpandableError("{} splits only where the sign of {} is known", node, arg)
        return laurent.multiply(_number_power(coefficient, exponent), {
            laurent.monomial_power(monomial, exponent): Fraction(1)})  # fmt: skip

    def _general_power(
        self, node: Apply, args: tuple[Expr, ...], operands: tuple[Poly, ...], frame_only: Mapping[Expr, bool]
    ) -> Poly:
        base, exponent = operands
        if laurent.is_constant(exponent):
            value = _readable(exponent.get(ONE, Fraction(0)))
            return self._by_cases(base, lambda p: self._power(p, value, args[0], node, frame_only), node)
        if laurent.is_constant(base) and base:
            q = base[ONE]
            if q <= 0:
                raise NotExpandableError("{} raises a number that is not positive to a varying power", node)
            return self._by_cases(exponent, lambda p: self._exponential(q, p, node), node)
        if infer_sign(args[0], self.signs) != "positive":
            raise NotExpandableError("{} is an exponential only where {} is known to be positive", node, args[0])
        logarithm = self._by_cases(base, lambda p: self._logarithm(p, node), node)
        product = laurent.multiply(logarithm, exponent)
        return self._by_cases(product, lambda p: self._exponential("e", p, node), node)

    def _exponential(self, base: Fraction | Literal["e", "i"], x: Poly, node: Expr) -> Poly:
        """base ** (a + b) = base ** a * base ** b."""
        result: dict[laurent.Generator, Fraction] = {}
        for monomial, coefficient in x.items():
            infinite = [g for g, _ in monomial if laurent.is_infinite(g)]
            if infinite:
                return self._exponential_of_infinity(base, monomial, coefficient, node)
            if any(g == IMAGINARY for g, _ in monomial):
                raise NotExpandableError("{} is not a finite sum of a(r)*b(c) terms", node)
            result[Exp(base, monomial)] = coefficient
        return {frozenset(result.items()): Fraction(1)}

    def _exponential_of_infinity(
        self, base: Fraction | Literal["e", "i"], monomial: Monomial, coefficient: Fraction, node: Expr
    ) -> Poly:
        """exp(-inf + finite) = 0."""
        if len(monomial) == 1 and base != "i" and (base == "e" or base > 1):
            ((generator, exponent),) = monomial
            assert isinstance(generator, Var) and isinstance(generator.expr, Const)
            if exponent == 1 and coefficient * (1 if generator.expr.value > 0 else -1) < 0:
                return {}
        raise NotExpandableError("{} is infinite or NaN where a predicate is false", node)

    def _logarithm(self, x: Poly, node: Expr) -> Poly:
        """log(a * b) = log(a) + log(b), where a > 0 is proved."""
        if len(x) != 1:
            raise NotExpandableError(
                "{} is not a finite sum of a(r)*b(c) terms: a logarithm splits over a product, not over a sum", node
            )
        ((monomial, coefficient),) = x.items()
        unknown = sorted(
            ((g, e) for g, e in monomial if self._sign(g) != "positive"),
            key=lambda pair: laurent.generator_order(pair[0]),
        )
        if coefficient < 0 or len(unknown) > 1 or any(e != 1 for _, e in unknown):
            raise NotExpandableError(
                "{} splits only where all factors but one are known to be positive; the sign of {} is not known",
                node, *(g.expr for g, _ in unknown[-1:] if isinstance(g, Var)),
            )  # fmt: skip
        result = {} if coefficient == 1 else _constant_call("log", coefficient)
        for generator, exponent in monomial:
            match generator:
                case Var(expr, role):
                    factor = variable(Var(apply("log", expr, dtype=expr.dtype), role))
                case Exp(base, inner):
                    factor = {inner: Fraction(1)}
                    self.conditions["log(exp(x)) is x also where exp(x) is rounded to zero or infinity"] = None
                    if isinstance(base, Fraction):
                        factor = laurent.multiply(factor, _constant_call("log", base))
                case _:
                    raise NotExpandableError("{} is not a finite sum of a(r)*b(c) terms", node)
            result = laurent.add(result, factor, exponent)
        return result

    def _oscillation(self, op: str, x: Poly, node: Expr) -> Poly:
        """Hyperbolic and trigonometric functions as exponentials."""
        base: Literal["e", "i"] = "e" if op.endswith("h") else "i"
        forward = self._exponential(base, x, node)
        backward = self._exponential(base, laurent.scaled(x, -1), node)
        half = Fraction(1, 2)
        if op.startswith("cos"):
            return laurent.scaled(laurent.add(forward, backward), half)
        difference = laurent.scaled(laurent.add(forward, backward, -1), half)
        return difference if base == "e" else laurent.multiply(difference, laurent.scaled(variable(IMAGINARY), -1))

    def _absolute(self, node: Expr, arg: Expr, x: Poly) -> Poly:
        match infer_sign(arg, self.signs):
            case "positive" | "nonnegative":
                return x
            case "negative" | "nonpositive":
                return laurent.scaled(x, -1)
            case _:
                raise NotExpandableError(
                    "{} is not a finite sum of a(r)*b(c) terms: the sign of {} is not known", node, arg
                )


def _arithmetic(op: str, operands: tuple[Poly, ...]) -> Poly | None:
    match op:
        case "add":
            return laurent.add(operands[0], operands[1])
        case "sub":
            return laurent.add(operands[0], operands[1], -1)
        case "neg":
            return laurent.scaled(operands[0], -1)
        case "mul":
            return laurent.multiply(operands[0], operands[1])
        case "square":
            return laurent.multiply(operands[0], operands[0])
        case _:
            return None


def _readable(value: Fraction) -> Fraction:
    """A float that is the nearest one to a simple fraction (1/3) means that fraction."""
    simple = value.limit_denominator(64)
    return simple if float(simple) == float(value) else value


def _number_power(value: Fraction, exponent: Fraction) -> Poly:
    if value == 1:
        return number(1)
    if exponent.denominator == 1:
        return number(value ** int(exponent))
    if exponent.denominator == 2:
        roots = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if roots[0] ** 2 == value.numerator and roots[1] ** 2 == value.denominator:
            return number(Fraction(*roots) ** exponent.numerator)
    call = apply("pow", const(float(value), "float64"), const(float(exponent), "float64"))
    return variable(Var(call, "invariant"))


def _constant_call(op: str, value: Fraction) -> Poly:
    return variable(Var(apply(op, const(float(value), "float64")), "invariant"))
