"""Exact algebra over opaque parts and frames: Laurent polynomials with rational exponents over formal generators.

A generator is a scalar (`Var`) or the exponential of one monomial (`Exp`). Generators are formally independent; an
identity that holds between the formal objects holds for every value, which is what a proof needs. Two relations are
built in: a predicate is idempotent (p * p = p), and the imaginary unit squares to -1.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import Literal

from pallasfuse.ir.expr import Const, Expr, apply, const

Role = Literal["opaque", "predicate", "frame", "invariant"]


@dataclass(frozen=True, slots=True)
class Var:
    """A scalar. Opaque parts vary with the reduced axis; frames are predecessors' values; invariants are neither."""

    expr: Expr
    role: Role


@dataclass(frozen=True, slots=True)
class Exp:
    """base ** exponent for one monomial. `base` is a positive number, or "e", or "i" for exp(sqrt(-1) * exponent)."""

    base: Fraction | Literal["e", "i"]
    exponent: "Monomial"


@dataclass(frozen=True, slots=True)
class Imaginary:
    """sqrt(-1)."""


Generator = Var | Exp | Imaginary
Monomial = frozenset[tuple[Generator, Fraction]]
Poly = dict[Monomial, Fraction]

IMAGINARY = Imaginary()
ONE: Monomial = frozenset()
MAX_TERMS = 300


class TooManyTermsError(Exception):
    """A product has more than MAX_TERMS terms."""


def number(value: Fraction | int) -> Poly:
    return {ONE: Fraction(value)} if value else {}


def variable(generator: Generator) -> Poly:
    return {frozenset(((generator, Fraction(1)),)): Fraction(1)}


def multiply_monomials(a: Monomial, b: Monomial) -> tuple[Monomial, int]:
    """The product and its sign (the imaginary unit squares to -1)."""
    if not a:
        return b, 1
    if not b:
        return a, 1
    exponents = dict(a)
    sign = 1
    for generator, exponent in b:
        total = exponents.get(generator, Fraction(0)) + exponent
        match generator:
            case Imaginary():
                sign = -1 if total % 4 in (2, 3) else 1
                total = total % 2
            case Var(role="predicate"):
                total = Fraction(1)
            case _:
                pass
        if total:
            exponents[generator] = total
        else:
            del exponents[generator]
    return frozenset(exponents.items()), sign


def add(a: Poly, b: Poly, scale: Fraction | int = 1) -> Poly:
    """a + scale * b."""
    result = dict(a)
    for monomial, coefficient in b.items():
        total = result.get(monomial, Fraction(0)) + scale * coefficient
        if total:
            result[monomial] = total
        else:
            result.pop(monomial, None)
    return result


def multiply(a: Poly, b: Poly) -> Poly:
    if len(a) * len(b) > MAX_TERMS:
        raise TooManyTermsError
    result: Poly = {}
    for monomial_a, coefficient_a in a.items():
        for monomial_b, coefficient_b in b.items():
            monomial, sign = multiply_monomials(monomial_a, monomial_b)
            total = result.get(monomial, Fraction(0)) + sign * coefficient_a * coefficient_b
            if total:
                result[monomial] = total
            else:
                result.pop(monomial, None)
    return result


def scaled(a: Poly, factor: Fraction | int) -> Poly:
    return {m: c * factor for m, c in a.items()} if factor else {}


def power(a: Poly, exponent: int) -> Poly:
    result = number(1)
    for _ in range(exponent):
        result = multiply(result, a)
    return result


def monomial_power(monomial: Monomial, exponent: Fraction) -> Monomial:
    return frozenset((g, e * exponent) for g, e in monomial) if exponent else ONE


def is_constant(a: Poly) -> bool:
    return not a or (len(a) == 1 and ONE in a)


@lru_cache(maxsize=4096)
def has_role(generator: Generator, role: Role) -> bool:
    """Says whether a variable of this role occurs in the generator (or its exponent)."""
    match generator:
        case Var(_, own):
            return own == role
        case Exp(_, exponent):
            return any(has_role(g, role) for g, _ in exponent)
        case Imaginary():
            return False


def varies(generator: Generator) -> bool:
    """Says whether the generator changes along the reduced axis."""
    return has_role(generator, "opaque") or has_role(generator, "predicate")


def variables(monomials: Iterable[Monomial], role: Role) -> list[Var]:
    """The variables of this role, in order of appearance in their names."""
    found: dict[Var, None] = {}
    for monomial in monomials:
        for generator, _ in monomial:
            match generator:
                case Var(_, own) if own == role:
                    found[generator] = None
                case Exp(_, exponent):
                    found.update(dict.fromkeys(variables((exponent,), role)))
                case _:
                    pass
    return sorted(found, key=generator_order)


def separate(a: Poly) -> dict[Monomial, Poly] | Exp:
    """a = sum of b(opaque) * a_b(frames), keyed by b; or the first generator that mixes the two."""
    keyed: dict[Monomial, Poly] = {}
    for monomial, coefficient in a.items():
        column, row = [], []
        for generator, exponent in monomial:
            if varies(generator):
                if has_role(generator, "frame"):
                    assert isinstance(generator, Exp)
                    return generator
                column.append((generator, exponent))
            else:
                row.append((generator, exponent))
        keyed.setdefault(frozenset(column), {})[frozenset(row)] = coefficient
    return keyed


def join(keyed: Mapping[Monomial, Poly]) -> Poly:
    """The inverse of `separate`."""
    result: Poly = {}
    for key, coefficient in keyed.items():
        result = add(result, multiply({key: Fraction(1)}, coefficient))
    return result


def derivative(a: Poly, direction: Var) -> Poly:
    """Partial derivative; the other variables, frames derived from the same tensors included, are held fixed."""
    result: Poly = {}
    for monomial, coefficient in a.items():
        for generator, exponent in monomial:
            inner = _generator_log_derivative(generator, direction)
            if inner:
                result = add(result, multiply({monomial: coefficient * exponent}, inner))
    return result


def _generator_log_derivative(generator: Generator, direction: Var) -> Poly:
    """g' / g."""
    match generator:
        case Var():
            return {frozenset(((generator, Fraction(-1)),)): Fraction(1)} if generator == direction else {}
        case Exp(base, exponent):
            inner = derivative({exponent: Fraction(1)}, direction)
            match base:
                case "e":
                    return inner
                case "i":
                    return multiply(inner, variable(IMAGINARY))
                case _:
                    logarithm = apply("log", const(float(base), "float64"))
                    return multiply(inner, variable(Var(logarithm, "invariant")))
        case Imaginary():
            return {}


def assign(a: Poly, predicate: Var, value: int) -> Poly:
    """`a` where the predicate is known to be 0 or 1."""
    result: Poly = {}
    for monomial, coefficient in a.items():
        rest = frozenset((g, e) for g, e in monomial if g != predicate)
        if value or len(rest) == len(monomial):
            result = add(result, {rest: coefficient})
    return result


def map_variables(a: Poly, rename: Callable[[Var], Var]) -> Poly:
    """`a` over other variables."""
    return {map_monomial(m, rename): c for m, c in a.items()}


def map_monomial(monomial: Monomial, rename: Callable[[Var], Var]) -> Monomial:
    return frozenset((map_generator(g, rename), e) for g, e in monomial)


def map_generator(generator: Generator, rename: Callable[[Var], Var]) -> Generator:
    match generator:
        case Var():
            return rename(generator)
        case Exp(base, exponent):
            return Exp(base, map_monomial(exponent, rename))
        case Imaginary():
            return generator


def exponent_unit(exponents: Iterable[Fraction]) -> Fraction:
    """The largest u such that every exponent is a whole multiple of u."""
    values = [e for e in exponents if e]
    if not values:
        return Fraction(1)
    denominator = lcm(*(e.denominator for e in values))
    return Fraction(gcd(*(int(e * denominator) for e in values)), denominator)


@lru_cache(maxsize=4096)
def generator_order(generator: Generator) -> tuple[object, ...]:
    """A total, readable order: opaque parts first, then frames, then invariants, then exponentials."""
    match generator:
        case Var(expr, role):
            name = str(expr)
            return (0, ("predicate", "opaque", "frame", "invariant").index(role), len(name), name, expr.dtype)
        case Exp(base, exponent):
            return (1, str(base), *monomial_order(exponent))
        case Imaginary():
            return (2,)


def monomial_order(monomial: Monomial) -> tuple[object, ...]:
    """Higher degrees first, then the order of the generators."""
    parts = sorted((generator_order(g), -e) for g, e in monomial)
    return (-sum(e for _, e in monomial), tuple(parts))


def is_infinite(generator: Generator) -> bool:
    return isinstance(generator, Var) and isinstance(generator.expr, Const)
