"""Products that the differences under exponentials take up: one instruction instead of two.

`exp2(x c - F)`, where the frame F is a running maximum of `x c`, is one fused multiply-add and one exponential if the product need
not be rounded first. The rounding matters in one way only: where x is what F is the maximum of, the difference is the rounding
error of F = m c instead of zero: the kernel computes what the program gives where its maximum is off by that error. Most programs
do not care, as the maximum is there to keep exponentials in range: numerator and denominator have the same factor, and the
logarithm of a sum of exponentials cancels with what is added to it. Whether that is so is tried with numbers; programs that do
care are left alone. As the error must not become large either (half-precision terms would lose digits, and then overflow), the
loop notes how large its frames become, and if one reaches 2^24 (where the error reaches a factor of 2^0.5), the kernel runs the
program with rounded products instead.

What stores a state (`TileProgram.later`) may do this wherever the kernel that is not split may: it stores the very frames that
its terms are computed with, to a rounding in proportion to their size, and merging moves every accumulator from its own frame.
Both programs have the same frames, so a state from one can be merged with that from another.

The maximum is taken before the multiplication, which changes nothing: rounding is monotonic.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import (
    Apply,
    Const,
    Expr,
    Index,
    Read,
    apply,
    const,
    mul,
    postorder,
    read,
    rebuild,
    select,
    sub,
    with_args,
)
from pallasfuse.ir.ops import COMPARISONS
from pallasfuse.ir.reducers import MAX
from pallasfuse.ir.tile_program import (
    Buffer,
    Carry,
    Contract,
    Get,
    Instead,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Set,
    Statement,
    Store,
    TileProgram,
    expressions,
    not_flat,
    verify,
)
from pallasfuse.tiling.units import is_step

LIMIT = 2.0**24
"""Of a frame."""
_HARMLESS = 2.0**60
"""A number that is compared with this, or with its reciprocal, is in no result of its own accord."""
_BENDS = COMPARISONS | {"max", "min"}
_RAW, _PEAK = ".raw", ".peak"
_TRIALS = 8


@dataclass(frozen=True, slots=True)
class _Maximum:
    """A running maximum of x c, in one segment."""

    carry: Carry
    tile: Reduce
    raw: Expr
    """x, or a choice between x and an infinity."""
    factor: float
    frame: Let
    """The maximum, or zero where it is not finite."""

    @property
    def peak(self) -> Carry:
        name, axes = self.frame.name + _PEAK, self.frame.axes
        return Carry(name, axes, "float32", const(0.0, "float32"), f"{name}.next")


def rewrite(program: TileProgram, coarse: frozenset[str]) -> TileProgram:
    """The same kernel; loops that do not follow the pattern stay as they are, and so do loops inside loops.

    coarse: names of values that carry a rounding error in proportion to their size (`exponentials.coarse_values`). What a program
    says of results that come later is no part of the rewritten one.
    """
    plain = replace(program, later=())
    if not_flat(program.body) is not None:
        return plain
    for at, s in enumerate(program.body):
        found = _loop(s, coarse, program.later or program.body[at + 1 :]) if isinstance(s, Loop) else None
        if found is not None:
            loop, peak = found
            body = (*program.body[:at], loop, *program.body[at + 1 :])
            measure = read(peak.name, peak.axes, peak.dtype)
            return verify(replace(plain, body=body, instead=Instead(measure, LIMIT, plain)))
    return plain


def _loop(loop: Loop, coarse: frozenset[str], after: tuple[Statement, ...]) -> tuple[Loop, Carry] | None:
    for carry in loop.carries:
        found = [_maximum(carry, segment.body, coarse) for segment in loop.segments]
        maxima = [m for m in found if m is not None]
        if len(maxima) < len(found) or len({(m.factor, m.frame.name) for m in maxima}) != 1:
            continue
        if _is_free(loop, maxima[0], after):
            segments = tuple(_segment(g, m, loop) for g, m in zip(loop.segments, maxima, strict=True))
            peak = maxima[0].peak
            return replace(loop, carries=(*loop.carries, peak), segments=segments), peak
    return None


def _is_free(loop: Loop, maximum: _Maximum, after: tuple[Statement, ...]) -> bool:
    """Whether the results stay the same if all that takes up products gets a factor, with or without the maximum moving."""
    framed, moving = set(), {maximum.carry.name}
    for carry in loop.carries:
        values = {s.value for g in loop.segments for s in g.body if isinstance(s, Let) and s.name == carry.next_name}
        if carry.next_name == maximum.frame.name:
            moving.add(carry.name)
        elif values and all(_is_moved(carry, v, maximum) for v in values):
            framed.add(carry.name)
    affected = {c.name for g in loop.segments for c in loop.carries if c.next_name in _affected(g.body, maximum)}
    if not affected <= framed or not all(isinstance(s, Let | Store | Load) for s in after):
        return False
    if _steps(after, affected | moving):
        return False
    unknown = {c.name for c in loop.carries} - affected - moving
    read_after = {t for s in after for e in expressions(s) for t in e.tensors}
    if _is_invariant(after, affected, set()):
        return True
    return unknown.isdisjoint(read_after) and _is_invariant(after, affected, moving)


def _steps(after: tuple[Statement, ...], names: set[str]) -> bool:
    """Whether a result jumps, or bends, at some size of what is computed from `names`: samples might not show it."""
    names = set(names)
    for s in after:
        for node in postorder(*expressions(s)):
            if isinstance(node, Apply) and (node.op in _BENDS or is_step(node)):
                sides = [a for a in node.args if a.tensors & names]
                others = [a for a in node.args if not a.tensors & names]
                if len(sides) > 1 or (sides and not all(_is_harmless(a) for a in others)) or (sides and not others):
                    return True
        if isinstance(s, Let) and s.value.tensors & names:
            names.add(s.name)
    return False


def _is_harmless(node: Expr) -> bool:
    return isinstance(node, Const) and (node.value == 0 or not 1 / _HARMLESS < abs(float(node.value)) < _HARMLESS)


def _affected(body: tuple[Statement, ...], maximum: _Maximum) -> set[str]:
    """What is computed from the differences that take up products."""
    lets = {s.name: s for s in body if isinstance(s, Let)}
    found: set[str] = set()
    for s in body:
        if isinstance(s, Let | Reduce | Contract):
            nodes = list(postorder(*expressions(s)))
            reads = found & {n.tensor for n in nodes if isinstance(n, Read)}
            if reads or any(_taken_up(n, maximum, lets) is not None for n in nodes):
                found.add(s.name)
    return found


def _is_invariant(after: tuple[Statement, ...], framed: set[str], moving: set[str]) -> bool:
    """Whether stores stay the same where `framed` numbers are multiplied by 2^-x, and `moving` ones, which are equal, grow by x."""
    draw = np.random.default_rng(0)
    unseen = {s.tensor for s in after if isinstance(s, Store)}
    for _ in range(_TRIALS):
        x, maximum = draw.uniform(-1.0, 1.0), draw.uniform(-20.0, 20.0)
        first = {n: np.float64(2.0 ** draw.uniform(-1.0, 12.0)) for n in sorted(framed)} | dict.fromkeys(
            moving, maximum
        )
        second = {n: v + x if n in moving else v * 2.0**-x for n, v in first.items()}
        others: dict[Expr, float] = {}
        for s in after:
            if isinstance(s, Let | Store):
                one, two = (_number(s.value, known, others, draw) for known in (first, second))
                if isinstance(s, Store) and not np.allclose(one, two, rtol=1e-6, atol=1e-9, equal_nan=True):
                    return False
                if isinstance(s, Let):
                    first[s.name], second[s.name] = one, two
                elif np.isfinite(one):
                    unseen.discard(s.tensor)
    return not unseen


def _is_moved(carry: Carry, value: Expr, maximum: _Maximum) -> bool:
    """Whether a carried value is multiplied by what its terms are when the frame changes."""
    match value:
        case Apply("add", (Apply("mul", (Read(own), Apply("exp2", (Apply("sub", (Read(), Read(frame))),)))), more)):
            return own == carry.name and frame == maximum.frame.name and carry.name not in more.tensors
    return False


def _number(root: Expr, known: Mapping[str, Any], others: dict[Expr, float], draw: np.random.Generator) -> Any:
    """The value of an expression; what is not known is drawn."""

    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if isinstance(node, Read | Index):
            if isinstance(node, Read) and node.tensor in known:
                return const(np.asarray(known[node.tensor]).item(), node.dtype)
            drawn = others.setdefault(node, float(draw.uniform(-8.0, 8.0)))
            return const(drawn if dtypes.is_float(node.dtype) else round(drawn), node.dtype)
        return with_args(node, args)

    return evaluate_expr(rebuild(root, step), (), {})


def _maximum(carry: Carry, body: tuple[Statement, ...], coarse: frozenset[str]) -> _Maximum | None:
    lets = {s.name: s for s in body if isinstance(s, Let)}
    tiles = {s.name: s for s in body if isinstance(s, Reduce) and s.reducer == MAX}
    match lets.get(carry.next_name):
        case Let(_, _, Apply("max", (Read(own), Read(name)), "float32")) if own == carry.name and name in tiles:
            tile = tiles[name]
        case _:
            return None
    following = _or_zero(read(carry.next_name, carry.axes, "float32"))
    values = following, _or_zero(following)  # users guard against empty rows as well
    frame = next((s for s in lets.values() if s.pinned and s.value in values), None)
    product = _product(tile.value, lets)
    if frame is None or product is None or product[1] <= 0 or not product[0].tensors & coarse:
        return None
    maximum = _Maximum(carry, tile, *product, frame)
    nodes = (node for s in body for e in expressions(s) for node in postorder(e))
    return maximum if any(_taken_up(node, maximum, lets) is not None for node in nodes) else None


def _or_zero(x: Expr) -> Expr:
    """x where it is finite."""
    return select(apply("lt", apply("abs", x), const(math.inf, "float32")), x, const(0.0, "float32"))


def _product(value: Expr, lets: Mapping[str, Let]) -> tuple[Expr, float] | None:
    """(x, c) if the value is x c; a choice between such a product and an infinity is one."""
    match value:
        case Read(name) if name in lets and lets[name].pinned:
            return _product(lets[name].value, lets)
        case Apply("mul", (x, Const(c))) if x.tensors:
            return x, float(c)
        case Apply("select", (p, x, Const(other) as y)) if math.isinf(other):
            product = _product(x, lets)
            return product and (select(p, product[0], y), product[1])
    return None


def _taken_up(node: Expr, maximum: _Maximum, lets: Mapping[str, Let]) -> Expr | None:
    """x of `exp2(x c - F)`."""
    match node:
        case Apply("exp2", (Apply("sub", (value, Read(name))),)) if name == maximum.frame.name:
            product = _product(value, lets)
            if product is not None and product[1] == maximum.factor:
                return product[0]
    return None


def _segment(segment: Segment, maximum: _Maximum, loop: Loop) -> Segment:
    tile, frame, peak = maximum.tile, maximum.frame, maximum.peak
    lets = {s.name: s for s in segment.body if isinstance(s, Let)}
    factor, f = const(maximum.factor, "float32"), read(frame.name, frame.axes, "float32")

    def renewed(root: Expr) -> Expr:
        def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
            x = _taken_up(node, maximum, lets)
            return with_args(node, args) if x is None else apply("exp2", sub(mul(x, factor), f))

        return rebuild(root, step)

    body: list[Statement] = []
    for s in segment.body:
        match s:
            case Reduce() if s is tile:
                body.append(replace(s, name=s.name + _RAW, value=maximum.raw))
                body.append(Let(s.name, s.axes, mul(read(s.name + _RAW, s.axes, "float32"), factor), pinned=True))
            case Let() if s is frame:
                largest = apply("max", read(peak.name, peak.axes, peak.dtype), apply("abs", f))
                body += [s, Let(peak.next_name, peak.axes, largest)]
            case Let() | Reduce() | Store():
                body.append(replace(s, value=renewed(s.value)))
            case Contract():
                body.append(replace(s, lhs=renewed(s.lhs), rhs=renewed(s.rhs)))
            case Load() | Buffer() | Get() | Set() | Loop():
                body.append(s)
    needed = {t for s in body for e in expressions(s) for t in e.tensors} | {c.next_name for c in loop.carries}
    unread = {s.name for s in lets.values() if s.pinned and s.name not in needed}
    return replace(segment, body=tuple(s for s in body if not (isinstance(s, Let) and s.name in unread)))
