"""From a reduction that reads unfinished reductions to a proven, stable `Fold`, or the reason why not."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pallasfuse import repair
from pallasfuse.errors import Refusal
from pallasfuse.fusion.extremes import fold_at_extremes
from pallasfuse.fusion.hoisting import Hoisted, degree, hoist
from pallasfuse.fusion.refinement import refined_value
from pallasfuse.fusion.stability import (
    Bound,
    divides_safely,
    exponent_is_bounded,
    is_anchored,
    is_bounded,
    is_centred,
    is_entire,
    is_polynomial,
    range_of,
)
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Read, const, convert, postorder, read, select, substitute
from pallasfuse.ir.fold import OLD, Accumulator, Fold, Frame
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.neutrality import evaluate_under, values_under
from pallasfuse.ir.reducers import MAX, MIN, SUM, Reducer
from pallasfuse.repair.signs import Sign, infer_sign


@dataclass(frozen=True, slots=True)
class Folded:
    """A fold, where it rounds otherwise than the reduction that it replaces, and where it is no number though that is one."""

    fold: Fold
    conditions: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()


def plain_fold(nest: Nest, rolled: Axis, pass_index: int) -> Fold:
    """A reduction that reads nothing unfinished: one accumulator, no repair."""
    picked = picked_fold(nest, rolled, pass_index, unfinished=())
    if picked is not None:
        return picked
    assert nest.reducer is not None
    term = convert(nest.body, dtypes.accumulator(nest.body.dtype))
    name = f"{nest.name}.acc0"
    accumulator = Accumulator(name, nest.axes, nest.reducer, term, None)
    return Fold(nest, pass_index, (accumulator,), (), read(name, nest.axes, term.dtype))


def picked_fold(nest: Nest, rolled: Axis, pass_index: int, unfinished: Collection[str]) -> Fold | None:
    """The fold of a sum with one term: what is computed from that term is computed after the sum.

    None where the term is computed from several values that vary along the rolled axis.
    """
    if not nest.picks or nest.reduced != (rolled,):
        return None
    body = nest.body
    match body:
        case Apply("select", (Apply("eq", (position, at)) as here, value, Const(0))) if position.axes == {rolled}:
            pass
        case _:
            return None
    if rolled in at.axes or at.tensors & frozenset(unfinished):
        return None
    varying = _varying(value, rolled, frozenset(unfinished))
    if len(varying) != 1 or not dtypes.is_float(varying[0].dtype):
        return None
    (source,) = varying
    wide = dtypes.accumulator(source.dtype)
    term = select(here, convert(source, wide), const(0.0, wide))
    name = f"{nest.name}.acc0"
    finish = substitute(value, {source: convert(read(name, nest.axes, wide), source.dtype)})
    return Fold(
        nest,
        pass_index,
        (Accumulator(name, nest.axes, SUM, term, None),),
        (),
        convert(finish, dtypes.accumulator(body.dtype)),
    )


def _varying(root: Expr, rolled: Axis, unfinished: frozenset[str]) -> list[Expr]:
    """Maximal subexpressions that vary along the rolled axis and can be computed in the pass; constants aside, `root` reads
    nothing else along the axis."""
    found: dict[Expr, None] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if rolled not in node.axes:
            continue
        if node.tensors & unfinished or _is_choice(node, rolled):
            stack.extend(node.args)
        else:
            found[node] = None
    return list(found)


def _is_choice(node: Expr, rolled: Axis) -> bool:
    """A choice that does not vary along the axis."""
    return isinstance(node, Apply) and node.op == "select" and rolled not in node.args[0].axes


def _frame_values(body: Expr, rolled: Axis, unfinished: frozenset[str]) -> list[Expr]:
    """Maximal subexpressions that read unfinished reductions and do not vary along the rolled axis.

    Sums and differences are taken apart, so that `c - (m + log l)` is framed at m and at log l.
    """
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()
    stack = [body]
    while stack:
        node = stack.pop()
        if node in seen or not node.tensors & unfinished:
            continue
        seen.add(node)
        splits = isinstance(node, Apply) and node.op in ("add", "sub", "neg")
        if rolled in node.axes or splits:
            stack.extend(node.args)
        else:
            found[node] = None
    return list(found)


def fold_over(
    nest: Nest, rolled: Axis, pass_index: int, unfinished: Mapping[str, Fold], signs: Mapping[str, Sign], *,
    strict: bool = False,
) -> Folded | Refusal:  # fmt: skip
    """Derive the fold of `nest`, whose body reads the `unfinished` folds of the same pass (Neptune, algorithm 1). These include
    what they read unfinished themselves.

    `strict` refuses a fold with exceptions.
    """
    assert nest.reducer is not None
    names = frozenset(unfinished)
    if not nest.reads & names:
        return Folded(plain_fold(nest, rolled, pass_index))
    picked = picked_fold(nest, rolled, pass_index, names)
    if picked is not None:
        return Folded(picked)
    at_extremes = fold_at_extremes(nest, rolled, pass_index, unfinished)
    if at_extremes is not None:
        return Folded(*at_extremes)
    kept = frozenset(nest.axes)
    hoisted = Hoisted(nest.body, (), ())
    if nest.reducer == SUM and dtypes.is_float(nest.body.dtype) and not strict:
        hoisted = hoist(nest.body, lambda e: rolled not in e.axes and bool(e.tensors & names) and e.axes <= kept)
        if hoisted.factors and (degree(hoisted.rest, rolled) > 1 or not _sums_only(hoisted, unfinished)):
            hoisted = Hoisted(nest.body, (), ())  # the factor may be what keeps the terms in range
    body = convert(hoisted.rest, dtypes.accumulator(nest.body.dtype))

    frames: list[Frame] = []
    renamed: dict[Expr, Expr] = {}
    frame_signs: dict[str, Sign] = {}
    bounds: dict[Expr, Bound | None] = {}
    for value in _frame_values(body, rolled, names):
        if not value.axes <= kept:
            return Refusal(
                f"{value} varies along {sorted(a.name for a in value.axes - kept)}, which {nest.name} reduces"
            )
        if not dtypes.is_float(value.dtype):
            return Refusal(f"{value} is not a floating-point number")
        direct = [t for t in value.tensors if t in names]
        empties = sorted({e for t in direct for e in _empties(unfinished[t])})
        axes = tuple(a for a in nest.axes if a in value.axes)
        sign = infer_sign(value, signs)
        name = f"{nest.name}.frame{len(frames)}"
        frame = Frame(name, axes, value, tuple(sorted(direct)), tuple(empties), sign == "positive")
        frames.append(frame)
        renamed[value] = read(frame.name, axes, value.dtype)
        frame_signs[frame.name] = sign
        bounds[renamed[value]] = _bound(value, body, unfinished)
    framed = substitute(body, renamed)
    conditions, exceptions = list(hoisted.conditions), []
    if hoisted.factors:
        overflows = degree(hoisted.rest, rolled) > 0
        exceptions.append("a factor is applied after the sum: by it no term becomes 0 * inf or 0 / 0"
                          + (", and without it the sum does not overflow" if overflows else ""))  # fmt: skip
    if not frames:
        plain = Accumulator(f"{nest.name}.acc0", nest.axes, nest.reducer, body, None)
        finish = hoisted.finish(read(plain.name, nest.axes, plain.dtype))
        factors = _show_factors(hoisted)
        return Folded(
            Fold(nest, pass_index, (plain,), (), finish, hoisted=factors), tuple(conditions), tuple(exceptions)
        )

    atoms = frozenset(b.body for b in bounds.values() if b is not None)
    tame = frozenset(r for v, r in renamed.items() if isinstance(v, Apply) and v.op == "log")
    unstable = exponent_is_bounded(framed, rolled, bounds, atoms, tame)
    if unstable is not None:
        return unstable
    facts = [repair.Frame(f.name, frame_signs[f.name]) for f in frames]
    derived = repair.derive(framed, nest.reducer, facts, over=nest.reduced)
    if isinstance(derived, Refusal):
        return derived

    positive = frozenset(n for n, s in frame_signs.items() if s == "positive")
    positive |= frozenset(n + OLD for n in positive)
    if derived.rank > 1:
        for value, at in renamed.items():
            bodies = [unfinished[t].nest.body for t in value.tensors if t in names]
            if at not in tame and not is_centred(framed, at, bodies):
                return Refusal(f"{value} is no statistic of the values that it is subtracted from: until it is finished, "
                               "the accumulators might cancel")  # fmt: skip
    accumulators = []
    for position, part in enumerate(derived.accumulators):
        unsafe = divides_safely(part.update, positive)
        if unsafe is not None:
            return unsafe
        update = _attach_axes(part.update, nest, len(derived.accumulators), frames)
        accumulators.append(Accumulator(f"{nest.name}.acc{position}", nest.axes, part.reducer, part.term, update))
    frames = [replace(f, positive=f.positive and _relies_on_sign(f, accumulators)) for f in frames]
    frames = _in_range(frames, accumulators)

    conditions += [c for c in derived.conditions if c.startswith(repair.ROUNDING)]
    exceptions += [c for c in derived.conditions if not c.startswith(repair.ROUNDING)]
    by_extremes = all(unfinished[u].nest.reducer in (MAX, MIN) for f in frames for u in f.unfinished)
    if len(accumulators) > 1 or not by_extremes or not is_bounded(framed, nest, rolled, bounds):
        exceptions.append("no reduction of a part of the axis, and nothing that is computed from it, overflows or is infinite: "
                          "else the result may be NaN, infinite or finite where the program's is not")  # fmt: skip
    if strict and exceptions:
        return Refusal(f"strict: {body} may differ where values are not finite or overflow ({exceptions[-1]})")
    neutral = True
    for empty in sorted({e for f in frames for e in f.empties}):
        predecessor = unfinished[empty].nest
        assert predecessor.reducer is not None
        identity = float(predecessor.reducer.identity(predecessor.body.dtype))
        for a in accumulators:
            # NaN absorbs: the program's own sum is NaN then, whatever follows
            added = evaluate_under(a.term, {predecessor.body: identity}, {f.name for f in frames}).value
            neutral &= isinstance(added, float) and (math.isnan(added) or added == float(a.reducer.identity(a.dtype)))
    left = _where_empty(framed, nest.reducer, frames, unfinished, neutral=neutral)
    if isinstance(left, Refusal):
        return left
    if left.doubt and strict:
        return Refusal(f"strict: {body} may differ where values are not finite ({left.doubt})")
    exceptions += [left.doubt] if left.doubt else []
    polynomial = all(is_polynomial(a.update) for a in accumulators if a.update is not None)
    if not neutral and not polynomial:
        return Refusal(f"where {', '.join(sorted({e for f in frames for e in f.empties}))} has seen only masked elements, "
                       f"{body} is not known to contribute nothing")  # fmt: skip
    if polynomial and derived.rank <= 2:  # linear in every frame: a logarithm may be subtracted after the sum
        late = frozenset(at for at in tame if is_anchored(framed, at, bounds))
        frames = [replace(f, late=renamed[f.value] in late) for f in frames]
    result = hoisted.finish(read(accumulators[0].name, nest.axes, accumulators[0].dtype))
    factors = _show_factors(hoisted)
    refined = refined_value(
        frames, accumulators, nest, {n: f.nest for n, f in unfinished.items() if len(f.accumulators) == 1}
    )
    if refined is not None:
        conditions.append("moments are taken around the mean before it is rounded")
    fold = Fold(
        nest,
        pass_index,
        tuple(accumulators),
        tuple(frames),
        result,
        neutral,
        left.identity_where,
        refined,
        derived.matrix,
        factors,
    )
    return Folded(fold, tuple(dict.fromkeys(conditions)), tuple(dict.fromkeys(exceptions)))


@dataclass(frozen=True, slots=True)
class _Empty:
    """The finished predecessors that make a reduction its identity where they are theirs, and where the program differs."""

    identity_where: tuple[str, ...] = ()
    doubt: str = ""


def _where_empty(
    framed: Expr, reducer: Reducer, frames: list[Frame], unfinished: Mapping[str, Fold], *, neutral: bool
) -> _Empty | Refusal:
    """Looks at the terms of a reduction where a frame is infinite, however masks turn out, since no repair leads there.

    A predecessor is its identity where its own mask hides everything, and terms under the same mask are identities, too. It may
    also be so because of values; then a term that is not hidden is undefined, as the program's is.
    """
    finite = frozenset(f.name for f in frames)
    identity = float(reducer.identity(dtypes.accumulator(framed.dtype)))
    shown, doubts = [], dict[str, None]()
    joined: set[str] = set()
    for name in sorted({e for f in frames for e in f.empties}):
        nest = unfinished[name].nest
        assert nest.reducer is not None
        at = float(nest.reducer.identity(nest.body.dtype))
        assumed: dict[Expr, float] = {nest.body: at}
        for frame in frames:
            value = evaluate_under(frame.value, {read(name, nest.axes, nest.dtype): at}).value
            if _is_joined(frame.value, name):
                value = at  # so may be what it is joined with
                joined.add(name)
            if isinstance(value, float):
                assumed[read(frame.name, frame.axes, frame.value.dtype)] = value
        if all(math.isfinite(v) for e, v in assumed.items() if e is not nest.body):
            continue  # every frame is usable
        ways = values_under(framed, assumed, finite)
        refusal = Refusal(f"where {name} has seen only masked elements, {framed} is not known to contribute nothing")
        if ways is None:
            return refusal
        adds_nothing = [found.value == identity for _, found in ways]
        hidden = any(
            n and evaluate_under(nest.body, way).value == at for n, (way, _) in zip(adds_nothing, ways, strict=True)
        )
        if not hidden and not all(adds_nothing):
            continue
        others = [found.value for n, (_, found) in zip(adds_nothing, ways, strict=True) if not n]
        if not all(isinstance(v, float) and math.isnan(v) for v in others):
            return refusal
        shown.append(name)
        if name in joined:
            if not neutral:  # at a frame that is finite by what it is joined with
                return refusal
            doubts[f"where {name} is infinite, what it is joined with is a number below infinity"] = None
        if others:
            doubts[
                f"where {name} is infinite, every element is masked: else the result is not NaN where the program's is"
            ] = None
        elif any(found.assumes_finite_factor for _, found in ways):
            doubts[f"where {name} is infinite, what its terms are multiplied by is finite"] = None
    return _Empty(tuple(shown), "; ".join(doubts))


def _is_joined(value: Expr, name: str) -> bool:
    """Is a frame the maximum or minimum of a reduction and of others, which may be infinite?"""
    op = value.op if isinstance(value, Apply) else ""
    joined = _joined(value, op) if op in ("max", "min") else []
    others = [x for x in joined if not (isinstance(x, Read) and x.tensor == name)]
    return len(others) < len(joined) and not any(isinstance(x, Const) and math.isfinite(x.value) for x in others)


def _relies_on_sign(frame: Frame, accumulators: list[Accumulator]) -> bool:
    """False when the repair is known to hold whatever the sign of the frame."""
    names = frozenset((frame.name, frame.name + OLD))
    return not all(is_entire(e, names) for a in accumulators for e in (a.term, a.update) if e is not None)


def _in_range(frames: list[Frame], accumulators: list[Accumulator]) -> list[Frame]:
    """The frames that the repair divides by, kept where no product with them underflows."""
    positive, terms = [f.name for f in frames if f.positive], [a.term for a in accumulators]
    ranges = {n: range_of(terms, n, positive) for n in positive}
    return [replace(f, low=ranges[f.name][0], high=ranges[f.name][1]) if f.positive else f for f in frames]


def _bound(value: Expr, body: Expr, unfinished: Mapping[str, Fold]) -> Bound | None:
    """The running maximum (or minimum) that bounds a frame of `body`; of several, one of values that `body` reads."""
    found: list[Bound] = []
    for tensor, reducer in _bounding(value):
        source = unfinished.get(tensor)
        if source is None or source.nest.reducer not in (MAX, MIN) or len(source.accumulators) != 1:
            continue
        if reducer in (None, source.nest.reducer):
            found.append(Bound(source.nest.reducer, source.nest.body, isinstance(value, Apply)))
    inside = set(postorder(body)) if len(found) > 1 else set()
    return next((b for b in found if b.body in inside), found[0] if found else None)


def _bounding(value: Expr) -> list[tuple[str, Reducer | None]]:
    """The tensors whose value the frame is wherever that is finite, or that it is at least (MAX) or at most (MIN)."""
    match value:
        case Read(tensor):
            return [(tensor, None)]
        case Apply("select", (Apply("is_finite", (Read(tensor) as r,)), x, Const())) if x is r:
            return [(tensor, None)]
        case Apply("max" | "min" as op, _):
            return [(n.tensor, MAX if op == "max" else MIN) for n in _joined(value, op) if isinstance(n, Read)]
    return []


def _joined(value: Expr, op: str) -> list[Expr]:
    """The values that `op` joins; conversions between float types aside."""
    match value:
        case Apply(name, args) if name == op:
            return [n for a in args for n in _joined(a, op)]
        case Apply("convert", (Apply(name) as x,)) if name == op and dtypes.is_float(value.dtype):
            return _joined(x, op)
    return [value]


def _sums_only(hoisted: Hoisted, unfinished: Mapping[str, Fold]) -> bool:
    """Returns whether no hoisted factor reads a maximum or minimum: those are there to bound the terms.

    One may be read by terms of a sum that is divided by, where these are exponentials that it keeps below one:
    `l + exp(b - max(m, b))` bounds no more than `l` does.
    """
    stack = [part for f in hoisted.factors for part in (_joined(f.value, "add") if f.inverted else [f.value])]
    whole = {f.value for f in hoisted.factors}
    reads = (p.tensors for p in stack if p in whole or not _is_below_one(p))
    return all(unfinished[t].nest.reducer == SUM for t in frozenset().union(*reads) if t in unfinished)


def _is_below_one(value: Expr) -> bool:
    """Is a value known to be an exponential of what is at most zero: of a number less a maximum of it and others?"""
    match value:
        case Apply("convert", (x,)) if dtypes.is_float(x.dtype) and dtypes.is_float(value.dtype):
            return _is_below_one(x)
        case Apply("exp" | "exp2", (Apply("sub", (x, largest)),)):
            return x in _joined(largest, "max")
    return False


def _show_factors(hoisted: Hoisted) -> str:
    return ", ".join(("1 / " if f.inverted else "") + str(f.value) for f in hoisted.factors)


def _empties(fold: Fold) -> frozenset[str]:
    """The max and min folds that this fold's unfinished value depends on."""
    own = {fold.name} if fold.nest.reducer in (MAX, MIN) and dtypes.is_float(fold.nest.body.dtype) else set()
    return frozenset(own).union(*(f.empties for f in fold.frames))


def _attach_axes(update: Expr, nest: Nest, rank: int, frames: list[Frame]) -> Expr:
    """Name the accumulators of the repair room after their nest and give them its axes."""
    names = {repair.accumulator_name(n): f"{nest.name}.acc{n}" for n in range(rank)}
    replacements: dict[Expr, Expr] = {}
    for node in postorder(update):
        if isinstance(node, Read) and node.tensor in names:
            replacements[node] = read(names[node.tensor], nest.axes, node.dtype)
    return substitute(update, replacements)
