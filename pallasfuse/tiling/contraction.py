"""Products that the differences under exponentials take up: one instruction instead of two.

`exp2(x c - F)`, where the frame F is a running maximum of `x c`, is one fused multiply-add and one exponential if the product need
not be rounded first. The rounding matters in one way only: where x is what F is the maximum of, the difference is the rounding
error of F = m c instead of zero. All terms of a row share that error, since F is the frame of everything that it is used for, so
it cancels, as long as it does not overflow. Therefore the loop notes how large its frames become, and if one reaches 2^28 (where
the error reaches 8), the kernel runs the program with rounded products instead.

The maximum is taken before the multiplication, which changes nothing: rounding is monotonic.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pallasfuse.ir.expr import (
    Apply,
    Const,
    Expr,
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
from pallasfuse.ir.reducers import MAX
from pallasfuse.ir.tile_program import (
    Carry,
    Contract,
    Instead,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Statement,
    Store,
    TileProgram,
)

LIMIT = 2.0**28
"""Of a frame."""
_RAW, _PEAK = ".raw", ".peak"


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
    """The same kernel; loops that do not follow the pattern stay as they are.

    coarse: names of values that carry a rounding error in proportion to their size (`arithmetic.coarse_values`).
    """
    for at, s in enumerate(program.body):
        found = _loop(s, coarse) if isinstance(s, Loop) else None
        if found is not None:
            loop, peak = found
            body = (*program.body[:at], loop, *program.body[at + 1 :])
            measure = read(peak.name, peak.axes, peak.dtype)
            return replace(program, body=body, instead=Instead(measure, LIMIT, program))
    return program


def _loop(loop: Loop, coarse: frozenset[str]) -> tuple[Loop, Carry] | None:
    for carry in loop.carries:
        found = [_maximum(carry, segment.body, coarse) for segment in loop.segments]
        maxima = [m for m in found if m is not None]
        if len(maxima) == len(found) and len({(m.factor, m.frame.name) for m in maxima}) == 1:
            segments = tuple(_segment(g, m) for g, m in zip(loop.segments, maxima, strict=True))
            peak = maxima[0].peak
            return replace(loop, carries=(*loop.carries, peak), segments=segments), peak
    return None


def _maximum(carry: Carry, body: tuple[Statement, ...], coarse: frozenset[str]) -> _Maximum | None:
    lets = {s.name: s for s in body if isinstance(s, Let)}
    tiles = {s.name: s for s in body if isinstance(s, Reduce) and s.reducer == MAX}
    match lets.get(carry.next_name):
        case Let(_, _, Apply("max", (Read(own), Read(name)), "float32")) if own == carry.name and name in tiles:
            tile = tiles[name]
        case _:
            return None
    following = read(carry.next_name, carry.axes, "float32")
    finite = apply("lt", apply("abs", following), const(math.inf, "float32"))
    value = select(finite, following, const(0.0, "float32"))
    frame = next((s for s in lets.values() if s.pinned and s.value == value), None)
    product = _product(tile.value, lets)
    if frame is None or product is None or product[1] <= 0 or not product[0].tensors & coarse:
        return None
    maximum = _Maximum(carry, tile, *product, frame)
    nodes = (node for s in body for e in _values(s) for node in postorder(e))
    return maximum if any(_taken_up(node, maximum, lets) is not None for node in nodes) else None


def _values(s: Statement) -> tuple[Expr, ...]:
    match s:
        case Let() | Reduce() | Store():
            return (s.value,)
        case Contract():
            return s.lhs, s.rhs
        case Load() | Loop():
            return ()


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


def _segment(segment: Segment, maximum: _Maximum) -> Segment:
    carry, tile, frame, peak = maximum.carry, maximum.tile, maximum.frame, maximum.peak
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
            case Load() | Loop():
                body.append(s)
    needed = {t for s in body for e in _values(s) for t in e.tensors} | {carry.next_name, peak.next_name}
    unread = {s.name for s in lets.values() if s.pinned and s.name not in needed}
    return replace(segment, body=tuple(s for s in body if not (isinstance(s, Let) and s.name in unread)))
