"""Counts the random tests that a stated bound on the error needs (Mirage, theorems 2 and 3).

An output of the fragment is a sum of k terms (f / g) e^(h / u), with distinct exponents; so is the difference of two outputs.
One test accepts two different ones with probability at most 1 - 1/k + o(1/k); without exponentials with at most d / p (Schwartz and
Zippel), d being the degree. k is counted on the loop program, symbolically: `exp(s[i, j])` is one exponent, its sum over j
as many as there are positions j, whatever it is multiplied with, and a power of that sum the multisets of them. A repair
multiplies by single exponentials and adds none. An opaque or uninterpreted value is a variable of its own; a square root
counts as the norm of its argument, which squares it. A comparison of inputs is a random bit.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder, rename_axes
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.ops import OPS
from pallasfuse.verification.field import CHAIN

_MOST_MONOMIALS = 64
_MOST_TERMS = 10**9


@dataclass(frozen=True, slots=True)
class Exponents:
    """The exponents of one exponential (`size` 1), or of a sum of products of such over some axes."""

    name: Hashable
    axes: frozenset[Axis]
    size: int

    def renamed(self, renaming: Mapping[Axis, Axis]) -> "Exponents":
        if not self.axes & renaming.keys():
            return self
        name = self.name
        if isinstance(name, frozenset):
            name = frozenset((e.renamed(renaming), power) for e, power in name)
        elif isinstance(name, Const | Index | Read | Apply):
            name = rename_axes(name, renaming)
        return Exponents(name, frozenset(renaming.get(a, a) for a in self.axes), self.size)


type Monomial = frozenset[tuple[Exponents, int]]
"""A product of powers of exponentials or their sums."""
type Support = frozenset[Monomial]
_ONE: Support = frozenset({frozenset()})


def _times(a: Support, b: Support) -> Support:
    products = (Counter(dict(x)) + Counter(dict(y)) for x in a for y in b)
    return _limited(frozenset(p.items()) for p in products)


def _limited(monomials: Iterable[Monomial]) -> Support:
    """Keeps at most a number of monomials: if there are more, one of as many exponents replaces all of them."""
    found = frozenset(monomials)
    if len(found) <= _MOST_MONOMIALS:
        return found
    axes = frozenset().union(*(e.axes for m in found for e, _ in m))
    return frozenset({frozenset({(Exponents(found, axes, _count(found)), 1)})})


def _power(a: Support, exponent: int) -> Support:
    if len(a) == 1:
        return frozenset(frozenset((e, p * exponent) for e, p in m) for m in a)
    result = _ONE
    for _ in range(exponent):
        result = _times(result, a)
    return result


def _count(support: Support) -> int:
    """Counts the exponents of a support: multisets of those of each factor."""
    total = 0
    for monomial in support:
        total += math.prod(math.comb(e.size + p - 1, p) for e, p in monomial)
    return min(_MOST_TERMS, total)


@dataclass(frozen=True, slots=True)
class Size:
    """The exponents of a numerator, the divisors (with theirs, and the power), and the degree."""

    above: Support = _ONE
    divisors: tuple[tuple[Expr, Support, int], ...] = ()
    degree: int = 1
    bits: int = 0
    """Comparisons of inputs that a boolean depends on."""

    @property
    def terms(self) -> int:
        """The number of exponents of the difference of two such values.

        Two functions of n bits differ for one of the 2^n at least.
        """
        if self.bits:
            return min(_MOST_TERMS, 1 << min(self.bits, 40))
        below = _ONE
        for _, support, power in self.divisors:
            below = _times(below, _power(support, power))
        both = _count(_times(self.above, below))
        return 1 if both <= 1 else 2 * both


def _merged(a: Size, b: Size, *, product: bool) -> tuple[tuple[tuple[Expr, Support, int], ...], Support, Support]:
    """Returns the divisors of both together, and the factor by which each numerator must be multiplied."""
    powers = [Counter({e: p for e, _, p in s.divisors}) for s in (a, b)]
    supports = {e: n for s in (a, b) for e, n, _ in s.divisors}
    joined = powers[0] + powers[1] if product else powers[0] | powers[1]
    factors = []
    for own in powers:
        factor = _ONE
        for divisor in joined:
            factor = _times(factor, _power(supports[divisor], joined[divisor] - own[divisor]))
        factors.append(factor)
    return tuple((e, supports[e], p) for e, p in joined.items()), factors[0], factors[1]


def _inverse_of(size: Size, divisor: Expr) -> Size:
    above = _ONE
    for _, support, power in size.divisors:
        above = _times(above, _power(support, power))
    return Size(above, ((divisor, size.above, 1),), size.degree)


def _product(a: Size, b: Size) -> Size:
    divisors, _, _ = _merged(a, b, product=True)
    return Size(_times(a.above, b.above), divisors, a.degree + b.degree)


def _apply(node: Apply, args: list[Size]) -> Size:
    if node.dtype == "bool" and node.op != "select":
        compares = OPS[node.op].kind == "comparison" and bool(node.tensors)
        return Size(bits=1 if compares else sum(a.bits for a in args))
    match node.op:
        case "add" | "sub":
            divisors, fa, fb = _merged(args[0], args[1], product=False)
            above = _limited(_times(args[0].above, fa) | _times(args[1].above, fb))
            return Size(above, divisors, args[0].degree + args[1].degree)
        case "select":
            a, b = args[1:]
            divisors, _, _ = _merged(a, b, product=False)
            return Size(_limited(a.above | b.above), divisors, max(a.degree, b.degree))
        case "mul":
            return _product(args[0], args[1])
        case "div":
            return _product(args[0], _inverse_of(args[1], node.args[1]))
        case "square":
            return _product(args[0], args[0])
        case "integer_pow" if isinstance(node.args[1], Const):
            power = min(64, abs(int(node.args[1].value)))
            base = args[0] if int(node.args[1].value) >= 0 else _inverse_of(args[0], node.args[0])
            divisors = tuple((e, n, p * power) for e, n, p in base.divisors)
            return Size(_power(base.above, power), divisors, base.degree * max(1, power))
        case "neg" | "abs" | "convert":
            return args[0]
        case "exp" | "exp2" | "expm1" | "sinh" | "cosh":
            own: Support = frozenset({frozenset({(Exponents(node, node.axes, 1), 1)})})
            extra: Support = _ONE if node.op == "expm1" else own if node.op in ("exp", "exp2") else frozenset(
                {frozenset({(Exponents(("minus", node), node.axes, 1), 1)})})  # fmt: skip
            return Size(own | extra, (), max(1, args[0].degree))
        case "sqrt" | "rsqrt":
            squared = Size(_power(args[0].above, 2), args[0].divisors, 2 * args[0].degree)
            return squared if node.op == "sqrt" else _inverse_of(squared, node.args[0])
        case _:
            return Size()


def sizes(program: LoopProgram) -> dict[str, Size]:
    """The size of every tensor's elements."""
    known: dict[str, Size] = {t.name: Size() for t in program.inputs}
    axes: dict[str, tuple[Axis, ...]] = {}
    for nest in program.nests:
        if isinstance(nest, External):
            known[nest.name] = Size()
        else:
            known[nest.name] = _nest(nest, known, axes)
            axes[nest.name] = nest.axes
    return known


def _nest(nest: Nest, known: Mapping[str, Size], axes: Mapping[str, tuple[Axis, ...]]) -> Size:
    values: dict[Expr, Size] = {}
    for node in postorder(nest.body):
        match node:
            case Const() | Index():
                values[node] = Size(degree=0)
            case Read(tensor, indices):
                renaming = {a: b for a, b in zip(axes.get(tensor, ()), indices, strict=False) if a != b}
                values[node] = _renamed(known[tensor], renaming)
            case Apply():
                values[node] = _apply(node, [values[a] for a in node.args])
    size = values[nest.body]
    if nest.reducer is None:
        return size
    if nest.reducer.name not in ("sum", "prod"):
        return Size(bits=size.bits * max(1, volume(nest.reduced)))
    count, over = max(1, volume(nest.reduced)), frozenset(nest.reduced)
    if nest.reducer.name == "prod":
        divisors = tuple((e, n, p * count) for e, n, p in size.divisors)
        return Size(_power(size.above, count), divisors, size.degree * count)
    varying = [d for d in size.divisors if d[0].axes & over]
    above = size.above
    for _, support, power in varying:
        above = _times(above, _power(support, power * (count - 1)))
    divisors = tuple((e, _summed(n, over), p * count if (e, n, p) in varying else p) for e, n, p in size.divisors)
    return Size(_summed(above, over), divisors, size.degree + len(varying) * count)


def _renamed(size: Size, renaming: Mapping[Axis, Axis]) -> Size:
    if not renaming:
        return size

    def support(s: Support) -> Support:
        return frozenset(frozenset((e.renamed(renaming), p) for e, p in m) for m in s)

    divisors = tuple((rename_axes(e, renaming), support(n), p) for e, n, p in size.divisors)
    return Size(support(size.above), divisors, size.degree, size.bits)


def _summed(support: Support, over: frozenset[Axis]) -> Support:
    """The exponents of a sum over axes: those of the factors that vary, once for each position."""
    found = set()
    for monomial in support:
        varying = frozenset((e, p) for e, p in monomial if e.axes & over)
        if not varying:
            found.add(monomial)
            continue
        axes = frozenset().union(*(e.axes for e, _ in varying))
        size = volume(axes & over) * math.prod(math.comb(e.size + p - 1, p) for e, p in varying)
        total = Exponents(varying, axes - over, size)
        found.add(frozenset((Counter(dict(monomial - varying)) + Counter({total: 1})).items()))
    return frozenset(found)


NEVER_ENOUGH = 10**18
"""Tests, where no number of them says anything."""


def miss_probability(size: Size) -> float:
    """Returns the probability, at most, that one test accepts two different outputs."""
    chance = min(0.5, 4.0 * max(1, size.degree) / CHAIN[1])
    terms = size.terms
    return min(1.0, 1 - 1 / terms + chance) if terms > 1 else chance


def trials_for(size: Size, delta: float) -> int:
    """The number of tests after which two different outputs are accepted with probability at most delta."""
    miss = miss_probability(size)
    return max(2, math.ceil(math.log(delta) / math.log(miss))) if miss < 1 else NEVER_ENOUGH
