"""`derive`: from the body of a reduction over unfinished values to its repair, or the reason why there is none."""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from pallasfuse.errors import Refusal
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import Expr, Read, substitute
from pallasfuse.ir.reducers import REDUCERS, Reducer
from pallasfuse.repair.canonical import Canonical, canonicalize, old
from pallasfuse.repair.emission import NotEmittableError
from pallasfuse.repair.expansion import NotExpandableError
from pallasfuse.repair.laurent import TooManyTermsError
from pallasfuse.repair.parsing import parse_expr
from pallasfuse.repair.result import Accumulator, Repair, accumulator_name
from pallasfuse.repair.rules import Problem, Solution, frames_read, solve, unchanged
from pallasfuse.repair.signs import Sign

MEMO_SIZE = 512


@dataclass(frozen=True, slots=True)
class Frame:
    """Facts about one predecessor value r, which the body reads as `Read(name, axes, dtype)`."""

    name: str
    sign: Sign = "any"


@dataclass(frozen=True, slots=True)
class _Refused:
    template: str
    expressions: tuple[Expr, ...]


_memo: OrderedDict[tuple[object, ...], Solution | _Refused] = OrderedDict()
_memo_lock = Lock()
_solve_lock = Lock()  # SymPy does not promise to be thread-safe


def derive(
    body: Expr | str,
    reducer: Reducer | str,
    frames: Sequence[Frame | str],
    *,
    signs: Mapping[Expr, Sign] | None = None,
    over: Collection[Axis] = (),
    invariant: Collection[str] = (),
) -> Repair | Refusal:
    """The repair of `reducer` over g(r, c) = `body`, when the frames r change (design, section 3, rule 2).

    Generalizes Neptune's theorems 4.2 and 4.3 from one accumulator to the k that g(r, .) spans. Every subexpression
    that reads no frame is opaque: whatever it is, it is one symbol to the algebra. The result is proved, not assumed.

    Args:
      body: an expression, or text that `parse_expr` reads (every name a float32 scalar).
      reducer: the fold, or its name.
      frames: the predecessors' values, with what is known of their signs.
      signs: known signs of opaque subexpressions (as nodes of `body`).
      over: the reduced axes. When given, an opaque part that has none of them is one value for the whole reduction,
        and may appear in the update.
      invariant: names of tensors with one value for the whole reduction, for bodies whose axes do not say so.

    Returns:
      The repair, whose accumulator 0 has `body` itself as its term; or a Refusal with the reason.
    """
    if isinstance(body, str):
        return _derive_text(body, reducer, frames, signs, over, invariant)
    return _derive(body, reducer, frames, signs, over, invariant)


def _derive_text(
    text: str,
    reducer: Reducer | str,
    frames: Sequence[Frame | str],
    signs: Mapping[Expr, Sign] | None,
    over: Collection[Axis],
    invariant: Collection[str],
) -> Repair | Refusal:
    """Text does not say what varies along the reduced axis: a name may be taken as one value for the whole reduction.

    Only one name, only when another one is left to vary, and only with a condition that says so.
    """
    body = parse_expr(text)
    answer = _derive(body, reducer, frames, signs, over, invariant)
    if isinstance(answer, Repair) or invariant:
        return answer
    opaque = sorted(body.tensors - {f if isinstance(f, str) else f.name for f in frames})
    for name in opaque if len(opaque) > 1 else ():
        again = _derive(body, reducer, frames, signs, over, (name,))
        if isinstance(again, Repair):
            return replace(again, conditions=(*again.conditions, f"{name} has one value for the whole reduction"))
    return answer


def _derive(
    expr: Expr,
    reducer: Reducer | str,
    frames: Sequence[Frame | str],
    signs: Mapping[Expr, Sign] | None,
    over: Collection[Axis],
    invariant: Collection[str],
) -> Repair | Refusal:
    fold = REDUCERS[reducer] if isinstance(reducer, str) else reducer
    facts = {f.name: f.sign for f in (Frame(f) if isinstance(f, str) else f for f in frames)}
    shape = canonicalize(expr, facts, signs or {}, over, invariant)
    key = (*shape.key, fold)
    with _memo_lock:
        answer = _memo.get(key)
        if answer is not None:
            _memo.move_to_end(key)
    if answer is None:
        with _solve_lock:
            answer = _memo.get(key) or _solve(Problem(shape.body, fold, shape.roles, shape.signs))
        with _memo_lock:
            _memo[key] = answer
            while len(_memo) > MEMO_SIZE:
                _memo.popitem(last=False)
    if isinstance(answer, _Refused):
        return Refusal(answer.template.format(*(str(shape.instantiate(e)) for e in answer.expressions)))
    return _instantiate(answer, shape, expr)


def _solve(problem: Problem) -> Solution | _Refused:
    if not frames_read(problem.body, problem.roles):
        return unchanged(problem)
    try:
        solution = solve(problem)
    except NotExpandableError as refused:
        return _Refused(refused.template, refused.expressions)
    except TooManyTermsError:
        return _Refused("{} has too many terms when it is multiplied out", (problem.body,))
    except NotEmittableError:
        return _Refused("the repair of {} is not a real expression over the operations of the IR", (problem.body,))
    if not dtypes.is_float(problem.body.dtype):
        return _Refused(f"{{}} is computed in {problem.body.dtype}, where the algebra of reals fails", (problem.body,))
    if not _agrees(problem, solution):
        return _Refused("the repair of {} does not agree with the original on sample values", (problem.body,))
    return solution


def _agrees(problem: Problem, solution: Solution) -> bool:
    """Checks on samples that the emitted expressions satisfy B(r') = M B(r): the proof is of M, this is of its text."""
    random = np.random.default_rng(7)
    checked = 0
    for _ in range(24):
        here: dict[str, np.ndarray] = {}
        for placeholder, role in problem.roles.items():
            assert isinstance(placeholder, Read)
            for node in (placeholder, old(placeholder)) if role == "frame" else (placeholder,):
                assert isinstance(node, Read)
                value = random.uniform(0.4, 1.9)
                if problem.signs[placeholder] in ("negative", "nonpositive") or (
                    problem.signs[placeholder] == "any" and random.random() < 0.3
                ):
                    value = -value
                here[node.tensor] = np.asarray(bool(random.random() < 0.6) if role == "predicate" else value)
        before = {n: old(n) for n, role in problem.roles.items() if role == "frame"}
        if any(evaluate_expr(substitute(x, before), (), here) == 0 for x in solution.nonzero):
            continue
        values = {
            accumulator_name(n): evaluate_expr(substitute(a.term, before), (), here)
            for n, a in enumerate(solution.accumulators)
        }
        wanted = [evaluate_expr(a.term, (), here) for a in solution.accumulators]
        got = [evaluate_expr(a.update, (), here | values) for a in solution.accumulators]
        if not (np.all(np.isfinite(wanted)) and np.all(np.isfinite(list(values.values())))):
            continue
        if not np.allclose(got, wanted, rtol=1e-6, atol=1e-7 * (1 + float(np.max(np.abs(wanted))))):
            return False
        checked += 1
        if checked == 3:
            return True
    return checked > 0


def _instantiate(solution: Solution, shape: Canonical, body: Expr) -> Repair:
    """Writes a solution as a repair over the original body's opaque parts and frames."""
    accumulators = tuple(
        Accumulator(body if n == 0 else shape.instantiate(a.term), a.reducer, shape.instantiate(a.update))
        for n, a in enumerate(solution.accumulators)
    )
    lines = (", ".join(str(shape.instantiate(x)) for x in line) for line in solution.matrix)
    matrix = f"[{', '.join(f'[{line}]' for line in lines)}]"
    nonzero = tuple(shape.instantiate(x) for x in solution.nonzero)
    conditions = (*solution.conditions, *(f"{x} is not zero at any frame" for x in nonzero))
    return Repair(accumulators, matrix, conditions, nonzero)
