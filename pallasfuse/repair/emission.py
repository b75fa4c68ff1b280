"""Turns formal sums of products back into scalar expressions, in forms that are cheap and stay in range.

- Exponentials are joined before they are evaluated: exp(c - r), never exp(c) / exp(r).
- A difference of an old and a new value is taken before it is raised to a power, exponentiated or multiplied.
- Old and new factors with opposite exponents become one power of their ratio: sqrt(r.old / r).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from pallasfuse.ir.expr import Apply, Const, Expr, apply, const, convert, postorder, select
from pallasfuse.repair import laurent
from pallasfuse.repair.closure import Entry, factors
from pallasfuse.repair.laurent import IMAGINARY, ONE, Exp, Generator, Imaginary, Monomial, Poly, Var


class NotEmittableError(Exception):
    """The value is not a real expression over the operations of the IR."""


Signed = tuple[int, Expr]
"""A sign and a magnitude."""


@dataclass(frozen=True, slots=True)
class Emitter:
    """Builds expressions of type `dtype`. `aged` maps a frame variable to its old value."""

    dtype: str
    aged: Callable[[Var], Var]

    def number(self, value: Fraction | float) -> Const:
        return const(float(value), self.dtype)

    def entry(self, entry: Entry) -> Signed:
        """Writes numerator / denominator as an expression."""
        numerator, denominator = entry
        sign, above = self.signed(numerator)
        if denominator == laurent.number(1):
            return sign, above
        below_sign, below = self.signed(denominator)
        return sign * below_sign, apply("div", above, below)

    def poly(self, a: Poly) -> Expr:
        return self._with_sign(self.signed(a))

    def signed(self, a: Poly) -> Signed:
        """The expression that equals `a`, with the sign of its leading term taken out."""
        predicates = laurent.variables(a, "predicate")
        if predicates:
            p = predicates[0]
            on_true, on_false = (self.poly(laurent.assign(a, p, value)) for value in (1, 0))
            return 1, on_true if on_true is on_false else select(p.expr, on_true, on_false)
        if not a:
            return 1, self.number(0)
        return self._sum([self._product(piece, extra) for piece, extra in self._pieces(a)])

    def _with_sign(self, signed: Signed) -> Expr:
        sign, x = signed
        return x if sign > 0 else negated(x) or apply("neg", x)

    def _sum(self, terms: Sequence[Signed]) -> Signed:
        """Positive terms first; the result's sign is negative only when every term is."""
        if all(sign < 0 for sign, _ in terms):
            sign, total = self._sum([(1, x) for _, x in terms])
            return -sign, total
        ordered = sorted(terms, key=lambda t: -t[0])
        total = ordered[0][1]
        for sign, x in ordered[1:]:
            total = apply("add" if sign > 0 else "sub", total, x)
        return 1, total

    def _pieces(self, a: Poly) -> list[tuple[Poly, list[Expr]]]:
        """`a` as a sum of (polynomial without exponentials) * (product of exponentials, cosh, sin, ...)."""
        groups: dict[Monomial, dict[Monomial, Poly]] = {}
        for monomial, coefficient in sorted(a.items(), key=lambda item: laurent.monomial_order(item[0])):
            real: Monomial = frozenset((g, e) for g, e in monomial if isinstance(g, Exp) and g.base != "i")
            phase: Monomial = frozenset((g, e) for g, e in monomial if isinstance(g, Exp) and g.base == "i")
            rest = monomial - real - phase
            groups.setdefault(real, {}).setdefault(phase, {})[rest] = coefficient
        pieces: list[tuple[Monomial, Poly, list[Expr]]] = []
        for real, phases in groups.items():
            pieces.extend((real, part, wave) for part, wave in self._waves(phases))
        result: list[tuple[Poly, list[Expr]]] = []
        while pieces:
            exponentials, part, wave = pieces.pop(0)
            opposite = laurent.monomial_power(exponentials, Fraction(-1))
            mirror = next(
                (p for p in pieces if exponentials and p[0] == opposite and p[2] == wave
                 and p[1] in (part, laurent.scaled(part, -1))), None,
            )  # fmt: skip
            if mirror is not None and all(isinstance(g, Exp) and g.base == "e" for g, _ in exponentials):
                pieces.remove(mirror)
                op = "cosh" if mirror[1] == part else "sinh"
                sign, argument = self.signed(self._exponent(exponentials))
                flip = -1 if op == "sinh" and sign < 0 else 1
                result.append((laurent.scaled(part, 2 * flip), [*wave, apply(op, argument)]))
            else:
                result.append((part, [*wave, *self._exponentials(exponentials)]))
        return result

    def _waves(self, phases: dict[Monomial, Poly]) -> list[tuple[Poly, list[Expr]]]:
        """a e^(ix) + b e^(-ix) = (a + b) cos x + i (a - b) sin x."""
        result: list[tuple[Poly, list[Expr]]] = []
        left = dict(phases)
        while left:
            phase = min(left, key=laurent.monomial_order)
            a = left.pop(phase)
            if not phase:
                result.append((_real(a), []))
                continue
            b = left.pop(laurent.monomial_power(phase, Fraction(-1)), {})
            sign, argument = self.signed(self._exponent(phase))
            for op, part in (
                ("cos", laurent.add(a, b)),
                ("sin", laurent.scaled(laurent.multiply(laurent.add(a, b, -1), laurent.variable(IMAGINARY)), sign)),
            ):
                if part:
                    result.append((_real(part), [apply(op, argument)]))
        return result

    def _exponent(self, exponentials: Monomial) -> Poly:
        total: Poly = {}
        for generator, exponent in exponentials:
            assert isinstance(generator, Exp)
            total = laurent.add(total, {generator.exponent: exponent})
        return total

    def _exponentials(self, real: Monomial) -> list[Expr]:
        """One exponential per base."""
        bases: dict[object, list[tuple[Generator, Fraction]]] = {}
        for generator, exponent in real:
            assert isinstance(generator, Exp)
            bases.setdefault(generator.base, []).append((generator, exponent))
        result: list[Expr] = []
        for base, members in sorted(bases.items(), key=lambda item: str(item[0])):
            argument = self.poly(self._exponent(frozenset(members)))
            if base == "e":
                result.append(apply("exp", argument))
            elif base == 2:
                result.append(apply("exp2", argument))
            else:
                assert isinstance(base, Fraction)
                result.append(apply("pow", self.number(base), argument))
        return result

    def _product(self, coefficient: Poly, extra: Sequence[Expr]) -> Signed:
        """A polynomial without exponentials, factored, times `extra`."""
        value, monomial, rest = factors(coefficient)
        above, below = self._monomial(monomial)
        sign = 1 if value > 0 else -1
        for factor, times in rest:
            factor_sign, x = self._difference(factor)
            sign *= factor_sign**times
            above.append(self.raised(x, Fraction(times)))
        above += extra
        value = abs(value)
        if value != 1 or not above:
            above.insert(0, self.number(value))
        product = above[0]
        for x in above[1:]:
            product = apply("mul", product, x)
        for x in below:
            product = apply("div", product, x)
        return sign, product

    def _monomial(self, monomial: Monomial) -> tuple[list[Expr], list[Expr]]:
        """Numerator and denominator factors."""
        exponents = dict(monomial)
        above: list[Expr] = []
        below: list[Expr] = []
        for generator in sorted(exponents, key=laurent.generator_order):
            exponent = exponents.get(generator)
            if exponent is None:
                continue
            if isinstance(generator, Imaginary) or not isinstance(generator, Var):
                raise NotEmittableError
            x = convert(generator.expr, self.dtype)
            old = self.aged(generator)
            if old != generator and exponents.get(old) == -exponent:
                del exponents[old]
                y = convert(old.expr, self.dtype)
                ratio = apply("div", x, y) if exponent > 0 else apply("div", y, x)
                above.append(self.raised(ratio, abs(exponent)))
            elif exponent > 0:
                above.append(self.raised(x, exponent))
            elif exponent == Fraction(-1, 2):
                above.append(apply("rsqrt", x))
            else:
                below.append(self.raised(x, -exponent))
            # a later generator may be the old value of an earlier one: it is done already
            exponents.pop(generator, None)
        return above, below

    def raised(self, x: Expr, exponent: Fraction) -> Expr:
        """x ** exponent for a positive exponent, with the cheapest operation."""
        if exponent == 1:
            return x
        if exponent == 2:
            return apply("square", x)
        if exponent == Fraction(1, 2):
            return apply("sqrt", x)
        if exponent.denominator == 1:
            return apply("integer_pow", x, const(int(exponent), "int32"), dtype=self.dtype)
        return apply("pow", x, self.number(exponent))

    def _difference(self, a: Poly) -> Signed:
        """A sum of monomials. A value and its old value with opposite coefficients are subtracted first."""
        left, pairs = dict(a), 0
        terms: list[Signed] = []
        for monomial in sorted(a, key=laurent.monomial_order):
            if monomial not in left:
                continue
            coefficient = left.pop(monomial)
            old = laurent.map_monomial(monomial, self.aged)
            if monomial not in (ONE, old) and left.get(old) == -coefficient:
                del left[old]
                (_, x), (_, y) = self._product({monomial: Fraction(1)}, ()), self._product({old: Fraction(1)}, ())
                pairs += 1
                pair, scale = _pair(x, y) if coefficient > 0 else _pair(y, x), abs(coefficient)
                terms.append((1, pair if scale == 1 else apply("mul", self.number(scale), pair)))
            else:
                terms.append(self._product({monomial: coefficient}, ()))
        sign, total = self._sum(terms)
        backward = negated(total) if pairs == len(terms) else None
        # differences are written old - new everywhere, so that equal ones are shared
        return (sign, total) if backward is None else (-sign, backward)


def _pair(x: Expr, y: Expr) -> Expr:
    """x - y, with one logarithm for two."""
    match x, y:
        case Apply("log", (a,)), Apply("log", (b,)):
            return apply("log", apply("div", a, b))
        case _:
            return apply("sub", x, y)


def negated(x: Expr) -> Expr | None:
    """-x at no cost, or None."""
    match x:
        case Const(value, dtype):
            return const(-value, dtype)
        case Apply("sub", (a, b)):
            return apply("sub", b, a)
        case Apply("log", (Apply("div", (a, b)),)):
            return apply("log", apply("div", b, a))
        case Apply("add", (a, Const() as b)):
            left = negated(a)
            return None if left is None else apply("sub", left, b)
        case Apply("add", (a, b)):
            left, right = negated(a), negated(b)
            return None if left is None or right is None else apply("add", left, right)
        case Apply("mul", (a, b)):
            right = None if isinstance(b, Const) else negated(b)
            if right is not None:
                return apply("mul", a, right)
            left = None if isinstance(a, Const) else negated(a)
            return None if left is None else apply("mul", left, b)
        case Apply("div", (a, b)) if not isinstance(a, Const):
            left = negated(a)
            return None if left is None else apply("div", left, b)
        case _:
            return None


def _real(a: Poly) -> Poly:
    if any(g == IMAGINARY for m in a for g, _ in m):
        raise NotEmittableError
    return a


def node_count(expr: Expr) -> int:
    """Counts the operations of an expression; shared ones count once."""
    return sum(1 for node in postorder(expr) if node.args)
