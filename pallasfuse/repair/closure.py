"""The space that the functions g(r, .) span, and the matrix that moves its basis from one frame to another.

Design, section 3, rule 2. With g = sum_b a_b(r) b(c), one function of the span is the row of its coefficients a_b(r).
The basis framed at r is g and its derivatives by the frames, until closed; M(r, r') = A(r') A(r)^-1.

SymPy takes a quarter of a second to import, and is imported when something is derived that needs it: plans that were kept do
without it, and so does a basis of one monomial.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any

from pallasfuse.repair import laurent
from pallasfuse.repair.laurent import IMAGINARY, Generator, Monomial, Poly, Var

Row = dict[Monomial, Poly]
Entry = tuple[Poly, Poly]
"""Numerator and denominator."""

MAX_RANK = 12
_MAX_DEGREE = 64
_PRIME = 2305843009213693921  # 2**61 - 31, congruent to 1 modulo 4: it has a square root of -1


def _imaginary_residue() -> int:
    for base in range(2, 100):
        if pow(base, (_PRIME - 1) // 2, _PRIME) == _PRIME - 1:
            return pow(base, (_PRIME - 1) // 4, _PRIME)
    raise AssertionError("no quadratic non-residue")


_I = _imaginary_residue()


class _Residues:
    """A random point over a finite field, for deciding ranks. A wrong rank is found by the proof, never trusted."""

    def __init__(self) -> None:
        self._random = Random(20240229)
        self._values: dict[Generator, tuple[int, Fraction]] = {}

    def poly(self, a: Poly) -> int:
        total = 0
        for monomial, coefficient in a.items():
            value = coefficient.numerator * pow(coefficient.denominator, -1, _PRIME)
            for generator, exponent in monomial:
                value = value * self._power(generator, exponent) % _PRIME
            total += value
        return total % _PRIME

    def _power(self, generator: Generator, exponent: Fraction) -> int:
        if generator == IMAGINARY:
            return _I
        if generator not in self._values:
            self._values[generator] = (self._random.randrange(2, _PRIME - 1), laurent.exponent_unit([exponent]))
        root, unit = self._values[generator]
        steps = exponent / unit
        if steps.denominator != 1:
            # refine the root: the old root becomes root ** denominator
            raise _Refine(generator, laurent.exponent_unit([exponent, unit]))
        return pow(root, int(steps), _PRIME)

    def refine(self, generator: Generator, unit: Fraction) -> None:
        self._values[generator] = (self._random.randrange(2, _PRIME - 1), unit)


class _Refine(Exception):
    def __init__(self, generator: Generator, unit: Fraction) -> None:
        super().__init__()
        self.generator, self.unit = generator, unit


def _pivots(rows: Sequence[Row], residues: _Residues) -> list[Monomial]:
    """Independent columns, at most one per row: len(result) is the rank of the rows."""
    columns = sorted({key for row in rows for key in row}, key=laurent.monomial_order)
    while True:
        try:
            table = [[residues.poly(row.get(key, {})) for key in columns] for row in rows]
            break
        except _Refine as need:
            residues.refine(need.generator, need.unit)
    found: list[Monomial] = []
    for position, key in enumerate(columns):
        pivot = next((n for n in range(len(found), len(table)) if table[n][position]), None)
        if pivot is None:
            continue
        step = len(found)
        table[step], table[pivot] = table[pivot], table[step]
        inverse = pow(table[step][position], -1, _PRIME)
        for n in range(step + 1, len(table)):
            factor = table[n][position] * inverse
            if factor:
                table[n] = [(x - factor * y) % _PRIME for x, y in zip(table[n], table[step], strict=True)]
        found.append(key)
    return found


def framed_basis(g: Row, cost: Callable[[Row], int]) -> list[Row] | None:
    """g and the derivatives that close its span, each in its simplest form; None beyond MAX_RANK."""
    directions = laurent.variables([m for a in g.values() for m in a], "frame")
    basis, residues = [g], _Residues()
    position = 0
    while position < len(basis):
        found: list[tuple[int, Row]] = []
        for direction in directions:
            row = {key: d for key, a in basis[position].items() if (d := laurent.derivative(a, direction))}
            if row and len(_pivots([*basis, row], residues)) > len(basis):
                found.append(_simplest(row, basis, cost))
        for _, row in sorted(found, key=lambda pair: pair[0]):
            if len(_pivots([*basis, row], residues)) <= len(basis):
                continue
            if len(basis) == MAX_RANK:
                return None
            basis.append(row)
        position += 1
    return basis


def _simplest(row: Row, basis: Sequence[Row], cost: Callable[[Row], int]) -> tuple[int, Row]:
    """Add multiples of earlier rows, then drop the factor, where the term becomes cheaper to compute."""
    best, best_cost = _cheapest(row, cost)
    while True:
        options = [(*_cheapest(c, cost), c) for c in _reductions(row, basis)]
        simple, simple_cost, candidate = min(options, key=lambda option: option[1], default=(best, best_cost, row))
        if simple_cost >= best_cost:
            return best_cost, best
        best, best_cost, row = simple, simple_cost, candidate


def _reductions(row: Row, basis: Sequence[Row]) -> list[Row]:
    """Rows that span the same with `basis`, and lack one column of `row`. No division by a frame is introduced."""
    result: list[Row] = []
    for earlier in basis:
        for key in sorted(row.keys() & earlier.keys(), key=laurent.monomial_order):
            if len(earlier[key]) != 1:
                continue
            ((monomial, coefficient),) = earlier[key].items()
            inverse = {laurent.monomial_power(monomial, Fraction(-1)): -1 / coefficient}
            factor = laurent.multiply(row[key], inverse)
            if any(g == IMAGINARY or (isinstance(g, Var) and e < 0) for m in factor for g, e in m):
                continue
            columns = [*row, *(k for k in earlier if k not in row)]
            sums = {k: laurent.add(row.get(k, {}), laurent.multiply(factor, earlier.get(k, {}))) for k in columns}
            result.append({k: a for k, a in sums.items() if a})
    return result


def _cheapest(row: Row, cost: Callable[[Row], int]) -> tuple[Row, int]:
    """A whole multiple of the row, or half of one (cosh x, rather than exp x + exp -x)."""
    whole = _normalized(row)
    multiples = [Fraction(1), Fraction(1, 2)]
    if any(g == IMAGINARY for a in row.values() for m in a for g, _ in m):
        multiples += [-f for f in multiples]  # the sign of a complex coefficient says nothing
    forms = [{key: laurent.scaled(a, f) for key, a in whole.items()} for f in multiples]
    return min(((form, cost(form)) for form in forms), key=lambda pair: pair[1])


def _normalized(row: Row) -> Row:
    """Drop the numeric factor, and powers of frames that all terms share: they only scale the accumulator.

    Exponentials stay: they keep the term in range.
    """
    if len(row) == 1:
        ((key, coefficient),) = row.items()
        if all(isinstance(g, Var) for m in coefficient for g, _ in m):
            return {key: laurent.number(1)}
    terms = [(m, c) for a in row.values() for m, c in a.items()]
    shared: dict[Generator, Fraction] = {}
    for generator in {g for m, _ in terms for g, _ in m if isinstance(g, Var)}:
        exponents = [dict(m).get(generator, Fraction(0)) for m, _ in terms]
        if min(exponents) > 0 or max(exponents) < 0:
            shared[generator] = -min(exponents) if min(exponents) > 0 else -max(exponents)
    leading_key = min(row, key=laurent.monomial_order)
    leading = row[leading_key][min(row[leading_key], key=laurent.monomial_order)]
    unit = laurent.exponent_unit(c for _, c in terms) * (1 if leading > 0 else -1)
    factor = {frozenset(shared.items()): 1 / unit}
    return {key: laurent.multiply(a, factor) for key, a in row.items()}


def transition(basis: Sequence[Row], aged: Callable[[Var], Var]) -> list[list[Entry]] | None:
    """M with B(r') = M B(r), proved on every column; None when there is no such matrix.

    `aged` maps a frame variable to its old value r; the frames themselves stand for the new value r'.
    """
    keys = sorted({key for row in basis for key in row}, key=laurent.monomial_order)
    columns = _pivots(basis, _Residues())
    if len(columns) < len(basis):
        return None
    factor = _common_factor(basis[0], aged) if len(basis) == 1 else None
    if factor is not None:
        return [[(factor, laurent.number(1))]]
    from sympy.polys.matrices import DomainMatrix  # a quarter of a second, which most programs never need

    space = _FractionSpace([a for row in basis for a in row.values()], aged)
    if space.degree > _MAX_DEGREE and any(len(a) > 1 for row in basis for a in row.values()):
        return None
    zero = space.field.zero
    new = [[space.element(row[k], 0) if k in row else zero for k in keys] for row in basis]
    old = [[space.element(row[k], 1) if k in row else zero for k in keys] for row in basis]
    size = len(basis)
    chosen = [keys.index(c) for c in columns]
    inverse = DomainMatrix([[row[n] for n in chosen] for row in old], (size, size), space.domain).inv()
    target = DomainMatrix([[row[n] for n in chosen] for row in new], (size, size), space.domain)
    matrix = (target * inverse).to_list()
    for i in range(size):
        for column in range(len(keys)):
            total = sum((matrix[i][j] * old[j][column] for j in range(size)), zero)
            if total != new[i][column]:
                return None
    return [[space.entry(x) for x in row] for row in matrix]


def _common_factor(row: Row, aged: Callable[[Var], Var]) -> Poly | None:
    """The factor by which all coefficients of a row change, where each of them is one monomial; None where they do not show one.

    A softmax has no others, and needs no field of fractions: the exponents of generators are subtracted.
    """
    factors_of: set[Monomial] = set()
    for coefficient in row.values():
        if len(coefficient) != 1:
            return None
        ((new, _),) = coefficient.items()
        before = laurent.map_monomial(new, aged)
        is_plain = not any(g == IMAGINARY or laurent.has_role(g, "predicate") for g, _ in new)
        if not is_plain or len({g for g, _ in before}) < len(new):  # two generators became one
            return None
        factors_of.add(laurent.multiply_monomials(new, laurent.monomial_power(before, Fraction(-1)))[0])
    return {factors_of.pop(): Fraction(1)} if len(factors_of) == 1 else None


class _FractionSpace:
    """Rational functions over the generators of some polynomials, new and old."""

    def __init__(self, polys: Sequence[Poly], aged: Callable[[Var], Var]) -> None:
        from sympy import QQ, QQ_I, Symbol

        exponents: dict[Generator, list[Fraction]] = {}
        complex_numbers = False
        for poly in polys:
            for monomial in poly:
                for generator, exponent in monomial:
                    if generator == IMAGINARY:
                        complex_numbers = True
                    else:
                        exponents.setdefault(generator, []).append(exponent)
        self._units: dict[Generator, Fraction] = {}
        self._positions: list[dict[Generator, int]] = [{}, {}]
        self._generators: list[Generator] = []
        self.degree = 1
        for generator in sorted(exponents, key=laurent.generator_order):
            unit = laurent.exponent_unit(exponents[generator])
            self.degree = max(self.degree, *(int(abs(e) / unit) for e in exponents[generator]))
            for age, version in enumerate((generator, laurent.map_generator(generator, aged))):
                if version not in self._units:
                    self._units[version] = unit
                    self._generators.append(version)
                self._positions[age][generator] = self._generators.index(version)
        self._complex = complex_numbers
        self._numbers: Any = QQ_I if complex_numbers else QQ
        self._rational: Any = QQ
        symbols = [Symbol(f"g{n}") for n in range(max(1, len(self._generators)))]
        self.domain: Any = self._numbers.frac_field(*symbols)
        self.field: Any = self.domain.field

    def _number(self, value: Fraction, imaginary: bool) -> Any:
        exact = self._rational(value.numerator, value.denominator)
        if not self._complex:
            return exact
        return self._numbers(0, exact) if imaginary else self._numbers(exact, 0)

    def element(self, a: Poly, age: int) -> Any:
        """The polynomial at the new (age 0) or old (age 1) values of the frames."""
        width = len(self.field.symbols)
        total = self.field.zero
        for monomial, coefficient in a.items():
            above, below, imaginary = [0] * width, [0] * width, False
            for generator, exponent in monomial:
                if generator == IMAGINARY:
                    imaginary = True
                    continue
                steps = int(exponent / self._units[generator])
                side = above if steps > 0 else below
                side[self._positions[age][generator]] = abs(steps)
            ring = self.field.ring
            numerator = ring.from_dict({tuple(above): self._number(coefficient, imaginary)})
            denominator = ring.from_dict({tuple(below): self._numbers.one})
            total += self.field.new(numerator, denominator)
        return total

    def entry(self, x: Any) -> Entry:
        """Move the denominator's shared monomial and leading coefficient, which may be complex, to the numerator."""
        numer, denom = x.numer, x.denom
        terms = denom.terms()
        shared = [min(column) for column in zip(*(exponents for exponents, _ in terms), strict=True)]
        scale = self._numbers.one / terms[0][1]
        content = frozenset((g, -n * self._units[g]) for g, n in zip(self._generators, shared, strict=False) if n)
        numerator, denominator = self._poly(numer.mul_ground(scale)), self._poly(denom.mul_ground(scale))
        moved = {content: Fraction(1)}
        return laurent.multiply(numerator, moved), laurent.multiply(denominator, moved)

    def _poly(self, x: Any) -> Poly:
        result: Poly = {}
        for exponents, value in x.terms():
            monomial = frozenset(
                (g, n * self._units[g]) for g, n in zip(self._generators, exponents, strict=False) if n
            )
            parts = ((value.x, False), (value.y, True)) if self._complex else ((value, False),)
            for part, imaginary in parts:
                if part:
                    coefficient = Fraction(int(part.numerator), int(part.denominator))
                    piece = {monomial: coefficient}
                    result = laurent.add(
                        result, laurent.multiply(piece, laurent.variable(IMAGINARY)) if imaginary else piece
                    )
        return result


def factors(a: Poly) -> tuple[Fraction, Monomial, list[tuple[Poly, int]]]:
    """a = number * monomial * product of polynomial ** n, over the rationals; no imaginary unit may occur."""
    generators = sorted({g for m in a for g, _ in m}, key=laurent.generator_order)
    shared: Mapping[Generator, Fraction] = {g: min(dict(m).get(g, Fraction(0)) for m in a) for g in generators}
    monomial = frozenset((g, e) for g, e in shared.items() if e)
    rest = laurent.multiply(a, {laurent.monomial_power(monomial, Fraction(-1)): Fraction(1)})
    if len(rest) == 1:
        return next(iter(rest.values())), monomial, []
    units = {g: laurent.exponent_unit(e for m in rest for h, e in m if h == g) for g in generators}
    degree = max(int(sum(e / units[g] for g, e in m)) for m in rest)
    if degree == 1 or degree > _MAX_DEGREE:
        leading = rest[min(rest, key=laurent.monomial_order)]
        unit = laurent.exponent_unit(rest.values()) * (1 if leading > 0 else -1)
        return unit, monomial, [(laurent.scaled(rest, 1 / unit), 1)]
    from sympy import QQ, Symbol

    ring: Any = QQ.poly_ring(*(Symbol(f"g{n}") for n in range(len(generators)))).ring
    poly = ring.from_dict({
        tuple(int(dict(m).get(g, Fraction(0)) / units[g]) for g in generators): QQ(c.numerator, c.denominator)
        for m, c in rest.items()
    })  # fmt: skip
    coefficient, found = poly.factor_list()
    total = Fraction(int(coefficient.numerator), int(coefficient.denominator))
    result: list[tuple[Poly, int]] = []
    for factor, times in found:
        piece = {
            frozenset((g, n * units[g]) for g, n in zip(generators, exponents, strict=True) if n): Fraction(
                int(c.numerator), int(c.denominator)
            )
            for exponents, c in factor.terms()
        }
        leading = piece[min(piece, key=laurent.monomial_order)]
        unit = laurent.exponent_unit(piece.values()) * (1 if leading > 0 else -1)
        total *= unit**times
        result.append((laurent.scaled(piece, 1 / unit), times))
    return total, monomial, result
