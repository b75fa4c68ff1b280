"""Is a repaired fold as stable as the program it replaces? A plan whose frame is unstable is a wrong plan.

Two dangers: an exponential that is bounded at the finished frame but overflows at an unfinished one, and an update that
divides by a frame that may be zero.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from pallasfuse.errors import Refusal
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, MIN, SUM, Reducer

_EXPONENTIAL = frozenset({"exp", "exp2", "expm1", "sinh", "cosh"})


@dataclass(frozen=True, slots=True)
class Bound:
    """A frame that is the running maximum (or minimum) of `body` itself."""

    reducer: Reducer
    body: Expr
    guarded: bool = False
    """The program replaces the maximum by a constant where it is not finite."""


def exponent_is_bounded(
    term: Expr,
    rolled: Axis,
    frames: Mapping[Expr, Bound | None],
    atoms: frozenset[Expr],
    tame: frozenset[Expr] = frozenset(),
) -> Refusal | None:
    """None when every exponential that reads a frame has a bounded argument at every unfinished frame.

    `frames` maps the reads of the frames to the bound each gives, if any. In the argument's linear form every atom that
    varies along the rolled axis must be paired with a running maximum (or minimum) of that very atom, and every other
    frame must be a logarithm (`tame`): those move by little, while an unfinished mean may be anywhere.
    """
    names = frozenset(f.tensor for f in frames if isinstance(f, Read))
    for node in postorder(term):
        if not isinstance(node, Apply) or not node.tensors & names:
            continue
        if node.op in _EXPONENTIAL:
            argument = node.args[0]
        elif node.op == "pow" and node.args[1].tensors & names:
            argument = node.args[1]
        else:
            continue
        form = linear_form(argument, atoms | frozenset(frames))
        slack: dict[Expr, float] = {}
        for frame, bound in frames.items():
            if bound is not None and frame in form:
                slack[bound.body] = slack.get(bound.body, 0.0) + form[frame]
        wild = next((a for a in form if a is not None and frames.get(a, "") is None and a not in tame), None)
        if wild is not None:
            return Refusal(
                f"{node.op}({argument}) may overflow before {wild} is finished: nothing bounds its unfinished values"
            )
        for atom, k in form.items():
            if atom is None or atom in frames or rolled not in atom.axes:
                continue
            bounds = [b for b in frames.values() if b is not None and b.body is atom]
            wanted = MAX if k > 0 else MIN
            if node.op in ("sinh", "cosh") or not any(b.reducer == wanted for b in bounds):
                return Refusal(f"{node.op}({argument}) may overflow before {', '.join(sorted(names))} is finished: "
                               f"{atom} is not bounded by a running {wanted}")  # fmt: skip
            if not math.isclose(slack.get(atom, 0.0), -k, rel_tol=1e-6):
                return Refusal(f"{node.op}({argument}) may overflow: {atom} and its running {wanted} do not cancel")
    return None


_BOUNDED_BY_ONE = frozenset({"tanh", "logistic", "sin", "cos", "sign", "erf"})


def is_bounded(term: Expr, nest: Nest, rolled: Axis, frames: Mapping[Expr, Bound | None]) -> bool:
    """True when partial results of `nest` are finite at every unfinished frame, whatever finite or infinite data they read.

    Then no infinity meets a repair that rounds to zero. A maximum that the program itself replaces where it is infinite
    may fall: its terms must be exponentials and nothing else, so that none counts without the largest.
    """
    if nest.reducer not in (SUM, MAX, MIN) or not dtypes.is_float(term.dtype):
        return False
    if any(b is not None and b.guarded for b in frames.values()) and not _is_exponential(term):
        return False
    return _largest(term, rolled, frames) * volume(nest.reduced) < dtypes.largest(term.dtype)


def _is_exponential(term: Expr) -> bool:
    match term:
        case Apply("convert", (x,)):
            return _is_exponential(x)
        case Apply(op):
            return op in ("exp", "exp2")
    return False


def _largest(root: Expr, rolled: Axis, frames: Mapping[Expr, Bound | None]) -> float:
    """A bound of |root|, inf where none is known. An exponential of a difference with a running maximum has one."""
    names = frozenset(f.tensor for f in frames if isinstance(f, Read))
    atoms = frozenset(b.body for b in frames.values() if b is not None)
    values: dict[Expr, float] = {}
    for node in postorder(root):
        of = [values[a] for a in node.args]
        value = math.inf
        match node:
            case Const(constant):
                value = abs(float(constant))
            case Index(axis):
                value = float(axis.extent)
            case Apply("exp" | "exp2", (argument,)) if argument.tensors & names:
                form = linear_form(argument, atoms | frozenset(frames))
                shift = form.pop(None, 0.0)
                if shift < 64 and all(frames.get(a) is not None or a in atoms for a in form if a is not None):
                    value = math.exp(max(shift, 0.0))
            case Apply("add" | "sub", _):
                value = sum(of)
            case Apply("mul", (_, _)):
                value = of[0] * of[1]
            case Apply("select", (_, _, _)):
                value = max(of[1:])
            case Apply("neg" | "abs" | "convert", _):
                value = of[0]
            case Apply(op) if op in _BOUNDED_BY_ONE and not node.tensors & names:
                value = 1.0
        if node.dtype == "bool":
            value = 1.0
        values[node] = value if not dtypes.is_float(node.dtype) or value < dtypes.largest(node.dtype) else math.inf
    return values[root]


_LARGEST_POWER = 8


def divides_safely(update: Expr, positive: frozenset[str]) -> Refusal | None:
    """None when every frame that the update divides by (or takes a root or logarithm of) is known to be positive.

    High powers are refused as well: a factor that overflows and one that vanishes are no number together.
    """

    def risky(x: Expr) -> frozenset[str]:
        return frozenset(t for t in x.tensors if not t.startswith("acc.") and t not in positive)

    for node in postorder(update):
        match node:
            case Apply("integer_pow", (x, Const(n))) if abs(n) > _LARGEST_POWER:
                return Refusal(f"the repair takes {x} to the power {n}, which may overflow where the result does not")
            case Apply("div", (_, x)) | Apply("rsqrt" | "log" | "sqrt", (x,)):
                bad = risky(x)
            case Apply("pow" | "integer_pow", (x, n)) if not (
                isinstance(n, Const) and n.value >= 0 and n.value == int(n.value)
            ):
                bad = risky(x)
            case _:
                continue
        if bad:
            return Refusal(f"the repair divides by {x}, which may be zero before it is finished")
    return None


def is_polynomial(update: Expr) -> bool:
    """True when the update is finite for all finite frames and accumulators."""
    return all(
        not isinstance(n, Apply) or n.op in ("add", "sub", "mul", "neg", "square", "convert")
        or (n.op == "integer_pow" and isinstance(n.args[1], Const) and n.args[1].value >= 0)
        or (n.op == "div" and isinstance(n.args[1], Const))
        for n in postorder(update)
    )  # fmt: skip


_ENTIRE = frozenset({"add", "sub", "mul", "neg", "square", "sin", "cos"}) | _EXPONENTIAL


def is_entire(root: Expr, frame: frozenset[str]) -> bool:
    """True when `root` is known to be analytic in the reads of `frame` at all their real values.

    Functions that are analytic everywhere and agree for positive frames agree for all: where the terms and updates of a fold are,
    its repair holds at zero and below too, though its derivation was told that the frame is positive. (The factor by which it moves
    a maximum stays positive: it never vanishes, as moving back undoes it, and is 1 where nothing moves.)
    """
    for node in postorder(root):
        if not isinstance(node, Apply) or not node.tensors & frame or node.op in _ENTIRE:
            continue
        match node:
            case Apply("div" | "integer_pow", (_, x)) if not x.tensors & frame:
                whole = node.op == "div" or (isinstance(x, Const) and x.value >= 0)
            case Apply("pow", (Const(base), _)):
                whole = base > 0
            case Apply("convert"):
                whole = dtypes.is_float(node.dtype)
            case Apply("select", (predicate, _, _)):
                whole = not predicate.tensors & frame
            case _:
                whole = False
        if not whole:
            return False
    return True


def power_of(root: Expr, frame: str) -> float | None:
    """The n for which `root` is proportional to the n-th power of a positive frame; None where there may be none."""
    powers: dict[Expr, float | None] = {}
    for node in postorder(root):
        found: float | None = None
        if frame not in node.tensors:
            powers[node] = 0.0
            continue
        match node:
            case Read():
                found = 1.0
            case Apply("mul" | "div" as op, (a, b)):
                p, q = powers[a], powers[b]
                found = None if p is None or q is None else p + q if op == "mul" else p - q
            case Apply(op, (x,)) if op in _POWER and dtypes.is_float(node.dtype):
                found = _times(powers[x], _POWER[op])
            case Apply("integer_pow" | "pow", (x, Const(n))):
                found = _times(powers[x], float(n))
            case Apply("add" | "sub" | "max" | "min", cases):
                found = _common(powers, cases)
            case Apply("select", (predicate, *cases)) if frame not in predicate.tensors:
                found = _common(powers, cases)
        powers[node] = found
    return powers[root]


_POWER = {"neg": 1.0, "abs": 1.0, "convert": 1.0, "square": 2.0, "sqrt": 0.5, "rsqrt": -0.5}


def _times(power: float | None, n: float) -> float | None:
    return None if power is None else n * power


def _common(powers: Mapping[Expr, float | None], cases: Iterable[Expr]) -> float | None:
    """The power of all; zeros and infinities stay what they are, whatever scales them."""
    found = {powers[c] for c in cases if not (isinstance(c, Const) and (c.value == 0 or math.isinf(c.value)))}
    return found.pop() if len(found) == 1 else None


def range_of(terms: Sequence[Expr], frame: str, positive: Iterable[str]) -> tuple[float, float]:
    """Between what a positive frame must stay for its factor not to make `terms` underflow; (0, inf) where it is no mere factor.

    A repair divides the factor out again, and with it multiplies what was lost. At the square root of the smallest normal number
    terms keep their digits unless they are smaller than that themselves, and none overflows that would not without the factor.
    The factors of a term share it. Of a frame that is not a mere factor nothing is asked: what is added to it cancels at a frame
    that is far from it.
    """
    low, high = 0.0, math.inf
    powers = [power_of(t, frame) for t in terms]
    for term, power in zip(terms, powers, strict=True):
        if None in powers or not power:
            continue
        reach = sum(abs(power_of(term, f) or 0.0) for f in positive)
        kinds = {n.dtype for n in postorder(term) if frame in n.tensors and dtypes.is_float(n.dtype)}
        digits = -math.log2(max(map(dtypes.smallest, kinds)))
        farthest = 4.0 ** math.floor(digits / 4 / max(reach, 1.0))
        low, high = (max(low, 1 / farthest), high) if power > 0 else (low, min(high, farthest))
    return low, high


def is_anchored(term: Expr, late: Expr, bounds: Mapping[Expr, Bound | None]) -> bool:
    """True when the term, wherever it subtracts `late`, also subtracts a running maximum (or minimum) from what it is that of.

    Then what remains without `late` has one sign, and is as large as the spread of the values and not as the values are.
    """
    linear = ("add", "sub", "neg")
    inner = {a for n in postorder(term) if isinstance(n, Apply) and n.op in linear for a in n.args}
    for node in postorder(term):
        if not (isinstance(node, Apply) and node.op in linear and node not in inner and late.tensors <= node.tensors):
            continue
        known = {f: b for f, b in bounds.items() if b is not None}
        form = linear_form(node, frozenset((late, *known, *(b.body for b in known.values()))))
        if not any(
            form.get(f) and math.isclose(form.get(b.body, 0.0), -form[f], rel_tol=1e-6) for f, b in known.items()
        ):
            return False
    return True


def is_centred(term: Expr, frame: Expr, bodies: list[Expr]) -> bool:
    """True when the term subtracts the frame, wherever it does, from the very values that the frame is a statistic of.

    Then the accumulators stay as small as the spread of the values; else a frame that wanders makes them cancel. A
    frame that only scales the term has nothing to cancel.
    """
    linear = ("add", "sub", "neg")
    inner = {a for n in postorder(term) if isinstance(n, Apply) and n.op in linear for a in n.args}
    for node in postorder(term):
        if isinstance(node, Apply) and node.op in linear and node not in inner and frame.tensors <= node.tensors:
            form = linear_form(node, frozenset((frame, *bodies)))
            of_frame = form.get(frame, 0.0)
            if of_frame and not any(math.isclose(form.get(b, 0.0), -of_frame, rel_tol=1e-6) for b in bodies):
                return False
    return True


# --- linear forms: an expression as a sum of constant multiples of atoms


def linear_form(root: Expr, atoms: AbstractSet[Expr]) -> dict[Expr | None, float]:
    """Coefficients of `root` over atoms (None: the constant). Members of `atoms` are never taken apart."""
    total: dict[Expr | None, float] = {}
    coefficient = {root: 1.0}
    for node in reversed(list(postorder(root))):  # users before their arguments: a shared part is taken apart once
        k = coefficient.pop(node, 0.0)
        if not k:
            continue
        atom: Expr | None = node
        parts: tuple[tuple[Expr, float], ...] = ()
        if node not in atoms:
            match node:
                case Const(value):
                    atom, k = None, k * float(value)
                case Apply("add", (a, b)):
                    parts = (a, k), (b, k)
                case Apply("sub", (a, b)):
                    parts = (a, k), (b, -k)
                case Apply("neg", (a,)):
                    parts = ((a, -k),)
                case Apply("mul", (a, Const(value))) | Apply("mul", (Const(value), a)):
                    parts = ((a, k * float(value)),)
                case Apply("div", (a, Const(value))) if value:
                    parts = ((a, k / float(value)),)
                case Apply("convert", (a,), dtype) if dtypes.is_float(dtype) and dtypes.is_float(a.dtype):
                    parts = ((a, k),)
        for part, times in parts:
            coefficient[part] = coefficient.get(part, 0.0) + times
        if not parts:
            total[atom] = total.get(atom, 0.0) + k
    return {atom: k for atom, k in total.items() if k}
