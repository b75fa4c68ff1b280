"""One rule per reducer: from the formal sum of a body to its repair (design, section 3, rule 2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, Read, apply, const, postorder, read, substitute
from pallasfuse.ir.reducers import SUM, Reducer
from pallasfuse.repair import laurent
from pallasfuse.repair.canonical import aged, old
from pallasfuse.repair.closure import MAX_RANK, Entry, Row, framed_basis, transition
from pallasfuse.repair.emission import Emitter, NotEmittableError, negated, node_count
from pallasfuse.repair.expansion import Expansion, NotExpandableError
from pallasfuse.repair.laurent import ONE, Exp, Monomial, Poly, Var
from pallasfuse.repair.result import Accumulator, accumulator_name
from pallasfuse.repair.signs import Sign, infer_sign, is_strict

MAX_OPERATIONS = 40
"""The most operations of an update, on average. A longer one loses more to rounding and to time than a second pass does."""
MAX_TERM_OPERATIONS = 24
"""The most operations of the term that one element adds to a companion."""

_Matrix = tuple[tuple[Expr, ...], ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """A repair over placeholders."""

    accumulators: tuple[Accumulator, ...]
    matrix: _Matrix
    conditions: tuple[str, ...] = ()
    nonzero: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """One body over placeholders, with what is known about them."""

    body: Expr
    reducer: Reducer
    roles: Mapping[Expr, laurent.Role]
    signs: Mapping[Expr, Sign]

    @property
    def dtype(self) -> str:
        return dtypes.accumulator(self.body.dtype)

    @property
    def emitter(self) -> Emitter:
        return Emitter(self.dtype, aged)

    def accumulator(self, position: int) -> Read:
        return read(accumulator_name(position), (), self.dtype)


def solve(problem: Problem) -> Solution:
    """The repair of one problem.

    Raises:
      NotExpandableError, NotEmittableError: there is none, or none that can be written down.
    """
    match problem.reducer.name:
        case "sum":
            return _solve_sum(problem)
        case "max" | "min":
            return _solve_extremum(problem)
        case "prod":
            return _solve_product(problem)
        case name:
            raise NotExpandableError(f"{{}} under {name}: no algebra moves an unfinished value out of {name}",
                                     problem.body)  # fmt: skip


def unchanged(problem: Problem) -> Solution:
    """The repair of a body that reads no frame."""
    one = problem.emitter.number(1)
    return Solution((Accumulator(problem.body, problem.reducer, problem.accumulator(0)),), ((one,),))


def _expand(problem: Problem, body: Expr) -> tuple[Poly, tuple[str, ...]]:
    expansion = Expansion(problem.roles, problem.signs)
    poly = expansion.expand(body)
    return poly, tuple(expansion.conditions)


def _separated(poly: Poly, body: Expr, emitter: Emitter) -> Row:
    row = laurent.separate(poly)
    if isinstance(row, Exp):
        x = emitter.poly(laurent.variable(row)) if row.base != "i" else body
        raise NotExpandableError("{} is not a finite sum of a(r)*b(c) terms: {} ties an unfinished value to one that"
                                 " varies", body, x)  # fmt: skip
    return row


def _solve_sum(problem: Problem) -> Solution:
    emitter = problem.emitter
    poly, conditions = _expand(problem, problem.body)
    row = _separated(poly, problem.body, emitter)

    def cost(candidate: Row) -> int:
        try:
            return node_count(emitter.poly(laurent.join(candidate)))
        except NotEmittableError:
            return 10**6

    basis = framed_basis(row, cost)
    if basis is None:
        raise NotExpandableError(f"{{}} needs more than {MAX_RANK} accumulators", problem.body)
    longest = max((cost(b) for b in basis[1:]), default=0)
    if longest > MAX_TERM_OPERATIONS:
        raise NotExpandableError(f"{{}} needs an accumulator whose terms take {longest} operations", problem.body)
    matrix = transition(basis, aged) if row else [[(laurent.number(1), laurent.number(1))]]
    if matrix is None:
        raise NotExpandableError("the repair of {} could not be proved", problem.body)
    terms = [problem.body, *(emitter.poly(laurent.join(b)) for b in basis[1:])]
    accumulators = tuple(
        Accumulator(term, SUM, _row_update(problem, position, matrix[position])) for position, term in enumerate(terms)
    )
    operations = sum(node_count(a.update) for a in accumulators)
    if operations > MAX_OPERATIONS * len(accumulators):
        raise NotExpandableError(
            f"the repair of {{}} takes {operations} operations for {len(accumulators)} accumulators", problem.body
        )
    entries = tuple(tuple(_signed_expr(emitter, entry) for entry in line) for line in matrix)
    nonzero = _nonzero(problem, [entry for line in matrix for entry in line])
    return Solution(accumulators, entries, conditions, nonzero)


def _row_update(problem: Problem, position: int, line: Sequence[Entry]) -> Expr:
    """sum_j M_ij acc_j, the diagonal first."""
    order = sorted(range(len(line)), key=lambda j: (j != position, j))
    total: Expr | None = None
    for j in order:
        numerator, denominator = line[j]
        if not numerator:
            continue
        sign, x = problem.emitter.entry((numerator, denominator))
        opposite = negated(x) if sign < 0 and not isinstance(x, Const) else None
        if opposite is not None:
            sign, x = 1, opposite
        acc = problem.accumulator(j)
        product = acc if isinstance(x, Const) and x.value == 1 else apply("mul", acc, x)
        if total is None:
            total = product if sign > 0 else apply("neg", product)
        else:
            total = apply("add" if sign > 0 else "sub", total, product)
    return problem.emitter.number(0) if total is None else total


def _signed_expr(emitter: Emitter, entry: Entry) -> Expr:
    sign, x = emitter.entry(entry)
    return x if sign > 0 else negated(x) or apply("neg", x)


def _nonzero(problem: Problem, entries: Sequence[Entry]) -> tuple[Expr, ...]:
    """Returns the divisors of an update at the old frame that may be zero, written over the frames' own names."""
    renewed = {old(frame): frame for frame, role in problem.roles.items() if role == "frame"}
    found: dict[Expr, None] = {}

    def need(x: Expr) -> None:
        new = substitute(x, renewed)
        if new is not x and not is_strict(infer_sign(new, problem.signs)):
            found[new] = None

    for numerator, denominator in entries:
        for monomial in numerator:
            for generator, exponent in sorted(monomial, key=lambda pair: laurent.generator_order(pair[0])):
                if isinstance(generator, Var) and exponent < 0:
                    need(generator.expr)
        if denominator != laurent.number(1):
            need(problem.emitter.signed(denominator)[1])
    return tuple(found)


def _identity_masked(body: Expr, problem: Problem) -> tuple[Expr, list[Expr]]:
    """Strip select(p, x, identity): the identity of the reducer takes part in nothing. Returns x and the masks."""
    masks: list[Expr] = []
    while isinstance(body, Apply):
        match body:
            case Apply("select", (p, x, Const(value, dtype))) if problem.roles.get(
                p
            ) == "predicate" and value == problem.reducer.identity(dtype):
                masks.append(p)
                body = x
            case Apply("convert", (x,), dtype) if x.dtype != dtype and isinstance(x, Apply) and x.op == "select":
                p, on_true, on_false = x.args
                body = apply("select", p, apply("convert", on_true, dtype=dtype),
                             const(on_false.value, dtype) if isinstance(on_false, Const) and dtypes.is_float(dtype)
                             else apply("convert", on_false, dtype=dtype))  # fmt: skip
                if not isinstance(on_false, Const):
                    break
            case _:
                break
    return body, masks


def _solve_extremum(problem: Problem) -> Solution:
    """max and min commute with x -> a x + d for a > 0: g = a(r) b(c) + d(r) with a sign of `a` that is fixed."""
    emitter, name = problem.emitter, problem.reducer.name
    body, _ = _identity_masked(problem.body, problem)
    poly, conditions = _expand(problem, body)
    row = _separated(poly, problem.body, emitter)
    shift = row.pop(ONE, {})
    shift_old = laurent.map_variables(shift, aged)
    acc: Expr = problem.accumulator(0)
    if not row:
        update = emitter.poly(shift)
        return _single(problem, update, update, conditions, ())
    basis_matrix = transition([row], aged)
    if basis_matrix is None:
        raise NotExpandableError(
            f"{{}} under {name} is not of the form a(r)*b(c) + d(r), the only one that {name} commutes with",
            problem.body,
        )
    ratio = basis_matrix[0][0]
    if ratio == (laurent.number(1), laurent.number(1)):
        # max(b) + d: exact also where b is infinite
        moved = laurent.add(shift, shift_old, -1)
        sign, x = emitter.signed(moved)
        update = acc if not moved else apply("add" if sign > 0 else "sub", acc, x)
        return _single(problem, update, emitter.poly(moved), conditions, ())
    scale = _coefficient_expr(emitter, row)
    sign_of_scale = infer_sign(scale, problem.signs)
    if sign_of_scale == "any":
        raise NotExpandableError(
            f"{{}} under {name}: the sign of {{}} is not known, and a negative factor turns {name} around",
            problem.body, scale,
        )  # fmt: skip
    nonzero = _nonzero(problem, [ratio])
    factor = _signed_expr(emitter, ratio)
    if shift:
        sign, x = emitter.signed(shift_old)
        acc = apply("sub" if sign > 0 else "add", acc, x)
    update = apply("mul", acc, factor)
    if shift:
        sign, x = emitter.signed(shift)
        update = apply("add" if sign > 0 else "sub", update, x)
    return _single(problem, update, factor, conditions, nonzero)


def _coefficient_expr(emitter: Emitter, row: Mapping[Monomial, Poly]) -> Expr:
    """a(r), up to a constant factor."""
    first = min(row, key=laurent.monomial_order)
    return emitter.poly(row[first])


def _single(
    problem: Problem, update: Expr, shown: Expr, conditions: tuple[str, ...], nonzero: tuple[Expr, ...]
) -> Solution:
    accumulator = Accumulator(problem.body, problem.reducer, update)
    return Solution((accumulator,), ((shown,),), conditions, nonzero)


def _solve_product(problem: Problem) -> Solution:
    """prod of a(r) b(c) is prod of b(c) times a(r) ** count; prod of b(c) ** a(r) is (prod of b(c)) ** a(r)."""
    emitter = problem.emitter
    body, masks = _identity_masked(problem.body, problem)
    poly, conditions = _expand(problem, body)
    if laurent.variables(poly, "predicate"):
        raise NotExpandableError("{} under prod: a mask whose other branch is not 1 is not supported", problem.body)
    row = laurent.separate(poly)
    if isinstance(row, Exp):
        return _solve_powers(problem, poly, conditions)
    matrix = transition([row], aged) if row else None
    if matrix is None:
        raise NotExpandableError("{} under prod is not of the form a(r)*b(c), the only one that prod splits over",
                                 problem.body)  # fmt: skip
    ratio = matrix[0][0]
    nonzero = _nonzero(problem, [ratio])
    factor = _signed_expr(emitter, ratio)
    count = problem.accumulator(1)
    if factor.args and isinstance(factor, Apply) and factor.op == "exp":
        repeated = apply("exp", apply("mul", factor.args[0], count))
    else:
        repeated = apply("pow", factor, count)
    one: Expr = emitter.number(1)
    for mask in masks:
        one = apply("select", mask, one, emitter.number(0))
    moved = apply("mul", problem.accumulator(0), repeated)
    accumulators = (Accumulator(problem.body, problem.reducer, moved), Accumulator(one, SUM, count))
    return Solution(accumulators, ((repeated,),), conditions, nonzero)


def _solve_powers(problem: Problem, poly: Poly, conditions: tuple[str, ...]) -> Solution:
    """log g = a(r) * log b(c), with b(c) > 0 because it is an exponential."""
    refusal = NotExpandableError(
        "{} under prod is neither a(r)*b(c) nor b(c)**a(r), the only forms that prod splits over", problem.body
    )
    if len(poly) != 1 or next(iter(poly.values())) != 1:
        raise refusal
    ((monomial, _),) = poly.items()
    logarithm: Poly = {}
    for generator, exponent in monomial:
        if not isinstance(generator, Exp) or generator.base != "e":
            raise refusal
        logarithm = laurent.add(logarithm, {generator.exponent: Fraction(exponent)})
    row = laurent.separate(logarithm)
    if isinstance(row, Exp) or ONE in row:
        raise refusal
    matrix = transition([row], aged)
    if matrix is None:
        raise refusal
    ratio = matrix[0][0]
    factor = _signed_expr(problem.emitter, ratio)
    update = apply("pow", problem.accumulator(0), factor)
    nonzero = _nonzero(problem, [ratio])
    return _single(problem, update, factor, conditions, nonzero)


def frames_read(body: Expr, roles: Mapping[Expr, laurent.Role]) -> bool:
    return any(roles.get(node) == "frame" for node in postorder(body))
