"""Abstract expressions: what a tensor is computed with, whichever of its elements are (Mirage, section 4.3).

    expression = sum of monomials, each as often as it occurs
    monomial   = product of atoms and their powers
    atom       = Tensor | SumOver(axis) | Inverse(expression) | Root(expression) | Exponential(monomial) | Applied(operation, ...)

A sum over an axis is a factor, `SumOver(axis)`: then all that Mirage's axioms say of sums (one after the other, of a sum, of a
product, of a quotient) is what they say of products. Their equivalence is that of polynomials with natural numbers, which have
one normal form: no solver is asked, and none gives up. But for products in divisors and roots, of which only the factors that all
terms have are taken out, it is complete. Literals are ones, and so is a sign. There is no cancellation, neither of quotients nor
of differences: with it, everything would be a part of everything.

An expression x is a *part* of another one, y, if y is equal to one that x is a subexpression of: y = x·m + z for a monomial m and
some z, or x is a part of what an atom of y is made of. A tensor whose expression is no part of the output's is of no use for it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.reducers import SUM, Reducer

type Monomial = frozenset[tuple[Atom, int]]
"""Powers of different atoms; the empty one is one."""
type Polynomial = frozenset[tuple[Monomial, int]]
"""Different monomials, and how often each is added."""


@dataclass(frozen=True)
class Tensor:
    """Any element of a tensor."""

    name: str


@dataclass(frozen=True)
class SumOver:
    """The sum over an axis, as a factor of what is summed."""

    axis: Axis


@dataclass(frozen=True)
class Inverse:
    """One divided by a part of a divisor."""

    of: Polynomial


@dataclass(frozen=True)
class Root:
    """The square root of a part of its argument."""

    of: Polynomial


@dataclass(frozen=True)
class Exponential:
    """The exponential of one term of its argument."""

    of: Polynomial


@dataclass(frozen=True)
class Applied:
    """Any other operation: nothing is known of it."""

    operation: str
    of: tuple[Polynomial, ...]


type Atom = Tensor | SumOver | Inverse | Root | Exponential | Applied

_ONE_MONOMIAL: Monomial = frozenset()
ONE: Polynomial = frozenset({(_ONE_MONOMIAL, 1)})
_MOST_MONOMIALS = 64


class TooLongError(Exception):
    """An expression has more monomials than are kept: nothing is said about it, so that it is kept by who asks."""


class Law(Enum):
    """The equivalences of abstract expressions that can be left out, beside those of sets: any order, any brackets.

    Together these are Mirage's 13, and those of repairs (exponentials) and norms (roots).
    """

    DISTRIBUTE = "(a + b) * c = a * c + b * c"
    SUMS = "sum(i, a) * b = sum(i, a * b), sum(i, sum(j, a)) = sum(j, sum(i, a)), sum(i, a) + sum(i, b) = sum(i, a + b)"
    INVERSES = "1 / (a * b) = 1 / a * 1 / b"
    ROOTS = "sqrt(a * b) = sqrt(a) * sqrt(b)"
    EXPONENTIALS = "exp(a + b) = exp(a) * exp(b)"


LAWS = frozenset(Law)


def atom(of: Atom) -> Polynomial:
    """One atom as an expression."""
    return frozenset({(frozenset({(of, 1)}), 1)})


def _product(a: Monomial, b: Monomial) -> Monomial:
    if not a or not b:
        return a or b
    powers = dict(a)
    for factor, power in b:
        powers[factor] = powers.get(factor, 0) + power
    return frozenset(powers.items())


def _limited(found: Mapping[Monomial, int]) -> Polynomial:
    if len(found) > _MOST_MONOMIALS:
        raise TooLongError
    return frozenset(found.items())


def _quotient(a: Monomial, b: Monomial) -> Monomial | None:
    """The monomial that b is to be multiplied with to be a; None where there is none."""
    powers = dict(a)
    for factor, power in b:
        left = powers.get(factor, 0) - power
        if left < 0:
            return None
        powers[factor] = left
    return frozenset((f, p) for f, p in powers.items() if p)


def _common(of: Polynomial) -> Monomial:
    """The greatest monomial that divides all monomials of an expression."""
    first, *rest = (dict(m) for m, _ in of)
    for other in rest:
        first = {f: min(p, other[f]) for f, p in first.items() if f in other}
    return frozenset(first.items())


@dataclass(frozen=True)
class Abstraction:
    """Normal forms of abstract expressions under some laws: equal expressions are the same object."""

    laws: frozenset[Law] = LAWS

    def plus(self, terms: Iterable[Polynomial]) -> Polynomial:
        """The sum of expressions."""
        found: Counter[Monomial] = Counter()
        for term in terms:
            found.update(dict(term))
        return _limited(found)

    def times(self, a: Polynomial, b: Polynomial) -> Polynomial:
        """The product of two expressions, multiplied out."""
        if Law.DISTRIBUTE not in self.laws:
            a, b = (p if len(p) == 1 else atom(Applied("sum of terms", (p,))) for p in (a, b))
        found: Counter[Monomial] = Counter()
        for x, n in a:
            for y, k in b:
                found[_product(x, y)] += n * k
        return _limited(found)

    def reduced(self, reducer: Reducer, axes: Iterable[Axis], of: Polynomial) -> Polynomial:
        """An expression folded over axes."""
        for axis in sorted(axes):
            is_factor = reducer == SUM and Law.SUMS in self.laws
            of = self.times(atom(SumOver(axis)), of) if is_factor else atom(Applied(f"{reducer} over {axis}", (of,)))
        return of

    def inverse(self, of: Polynomial) -> Polynomial:
        """One divided by an expression."""
        return self._apart(of, Law.INVERSES, Inverse)

    def root(self, of: Polynomial) -> Polynomial:
        """The square root of an expression."""
        return self._apart(of, Law.ROOTS, Root)

    def _apart(self, of: Polynomial, law: Law, kind: type[Inverse] | type[Root]) -> Polynomial:
        """A function that is the product of itself of all factors: those that all terms have are taken out."""
        if law not in self.laws:
            return atom(kind(of))
        common = _common(of)
        rest = frozenset((m, n) for x, n in of if (m := _quotient(x, common)) is not None)
        found = {kind(atom(factor)): power for factor, power in common}
        if rest != ONE:
            found[kind(rest)] = 1
        return frozenset({(frozenset(found.items()), 1)})

    def exponential(self, of: Polynomial) -> Polynomial:
        """The exponential of an expression."""
        if Law.EXPONENTIALS not in self.laws:
            return atom(Exponential(of))
        powers = {Exponential(frozenset({(m, 1)})): n for m, n in of if m}
        return frozenset({(frozenset(powers.items()), 1)})

    def expression(self, root: Expr, tensors: Mapping[str, Polynomial]) -> Polynomial:
        """The abstract expression of a scalar expression. tensors: those of what it reads; what has none is an atom."""
        found: dict[Expr, Polynomial] = {}
        for node in postorder(root):
            match node:
                case Read(tensor, _, _):
                    found[node] = tensors.get(tensor) or atom(Tensor(tensor))
                case Const():
                    found[node] = ONE
                case Index(axis, _):
                    found[node] = atom(Applied(f"position along {axis}", ()))
                case Apply(op, args):
                    found[node] = self.applied(op, [found[a] for a in args])
                case _:
                    assert_never(node)
        return found[root]

    def applied(self, op: str, args: list[Polynomial]) -> Polynomial:
        """The abstract expression of a scalar operation."""
        match op, args:
            case (("convert" | "neg"), [x]):
                return x
            case (("add" | "sub"), [x, y]):
                return self.plus((x, y))
            case "mul", [x, y]:
                return self.times(x, y)
            case "square", [x]:
                return self.times(x, x)
            case "div", [x, y]:
                return self.times(x, self.inverse(y))
            case "exp", [x]:
                return self.exponential(x)
            case "sqrt", [x]:
                return self.root(x)
            case "rsqrt", [x]:
                return self.inverse(self.root(x))
        return atom(Applied(op, tuple(args)))


@dataclass
class Goal:
    """The expression of an output, which answers whether others are parts of it; answers are remembered."""

    abstraction: Abstraction
    of: Polynomial
    _wholes: list[dict[Monomial, int]] = field(default_factory=list)
    _known: dict[Polynomial, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        waiting, seen = [self.of], set[Polynomial]()
        while waiting:
            whole = waiting.pop()
            if whole not in seen:
                seen.add(whole)
                self._wholes.append(dict(whole))
                for monomial, _ in whole:
                    waiting += self._inside(monomial)

    def has_part(self, of: Polynomial) -> bool:
        """Is an expression a part of the output's?"""
        known = self._known.get(of)
        if known is None:
            known = self._known[of] = any(_is_part(of, whole) for whole in self._wholes)
        return known

    def _inside(self, monomial: Monomial) -> Iterable[Polynomial]:
        """Yields the expressions that the atoms of a monomial are functions of; of atoms of one kind, what a law joins them to."""
        joined: dict[type[Inverse] | type[Root], Polynomial] = {}
        exponents: list[Polynomial] = []
        for factor, power in monomial:
            match factor:
                case Inverse(of) | Root(of):
                    for _ in range(power):
                        joined[type(factor)] = self.abstraction.times(joined.get(type(factor), ONE), of)
                case Exponential(of):
                    exponents += [of] * power
                case Applied(_, several):
                    yield from several
                case Tensor() | SumOver():
                    pass
                case _:
                    assert_never(factor)
        yield from joined.values()
        if exponents:
            yield self.abstraction.plus(exponents)


def _is_part(of: Polynomial, whole: Mapping[Monomial, int]) -> bool:
    """Is a whole equal to an expression, times a monomial, and something that is added?"""
    one = next(iter(of))[0]
    for monomial in whole:
        factor = _quotient(monomial, one)
        if factor is not None and all(whole.get(_product(m, factor), 0) >= n for m, n in of):
            return True
    return False
