"""Is a repaired fold as stable as the program it replaces? A plan whose frame is unstable is a wrong plan.

Two dangers: an exponential that is bounded at the finished frame but overflows at an unfinished one, and an update that
divides by a frame that may be zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pallasfuse.errors import Refusal
from pallasfuse.fusion.linear import linear_form
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Read, postorder
from pallasfuse.ir.reducers import MAX, MIN, Reducer

_EXPONENTIAL = frozenset({"exp", "exp2", "expm1", "sinh", "cosh"})


@dataclass(frozen=True, slots=True)
class Bound:
    """A frame that is the running maximum (or minimum) of `body` itself."""

    reducer: Reducer
    body: Expr


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


def divides_safely(update: Expr, positive: frozenset[str]) -> Refusal | None:
    """None when every frame that the update divides by (or takes a root or logarithm of) is known to be positive."""

    def risky(x: Expr) -> frozenset[str]:
        return frozenset(t for t in x.tensors if not t.startswith("acc.") and t not in positive)

    for node in postorder(update):
        match node:
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


def is_centred(term: Expr, frame: Expr, bodies: list[Expr]) -> bool:
    """True when the term subtracts the frame, if from anything, from the very values that the frame is a statistic of.

    Then the accumulators stay as small as the spread of the values; else a frame that wanders makes them cancel. A
    frame that only scales the term has nothing to cancel.
    """
    subtracted = False
    for node in postorder(term):
        if isinstance(node, Apply) and node.op in ("add", "sub") and frame.tensors <= node.tensors:
            form = linear_form(node, frozenset((frame, *bodies)))
            if form.get(frame, 0.0):
                subtracted = True
                if any(math.isclose(form.get(b, 0.0), -form[frame], rel_tol=1e-6) for b in bodies):
                    return True
    return not subtracted
