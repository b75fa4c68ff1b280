"""`TileProgram`: a kernel as statements over tiles with named axes (Blockbuster's listings, Neptune figure 14).

A tile value has a set of axes and no layout: elementwise expressions align by axis name. Each axis has one tile size
in the whole program, except inside a loop segment with a smaller `tile` (an exact tail). Scalar expressions are the IR's own:
a `Read` names an earlier statement's value, `Index(axis)` is the global position of each row of the tile.

Invariants, checked by `verify`: every read names a value that is in scope; loops carry and yield the same names.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, apply, const, index, read
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.lookup import verify as verify_lookup
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, SUM, Reducer
from pallasfuse.ir.tensors import Tensor


def block_start(axis: Axis) -> str:
    """The scalar by which bounds read the first position of the current grid block along `axis`."""
    return f"start.{axis.name}"


def visited(axis: Axis) -> str:
    """The scalar by which loop bodies read how many positions of `axis` are done after the current tile."""
    return f"visited.{axis.name}"


def before(axis: Axis) -> str:
    """The scalar by which loop bodies read how many positions of `axis` were done before the current tile."""
    return f"before.{axis.name}"


def to_visit(axis: Axis) -> str:
    """The scalar by which loop bodies read how many positions of `axis` the whole loop visits."""
    return f"to_visit.{axis.name}"


def most(tensor: str) -> str:
    """The scalar by which bounds read the largest value of a range's end, `left` or `right`, in the rows of the block."""
    return f"{tensor}.most"


def least(tensor: str) -> str:
    """The scalar by which bounds read the smallest value of a solid range's end, `left` or `right`, in the rows of the block."""
    return f"{tensor}.least"


@dataclass(frozen=True, slots=True)
class Range:
    """The interval of `axis` outside of which a predicate over data is false: in every row one, found before the kernel runs.

    `left` counts the positions from the first at which it is true to the end of the axis, `right` those from the start to the last
    one. Both are zero in a row where it is nowhere true. `all_if_none`: all of such a row is visited, not nothing.
    `count` is the number of positions at which it is true: a row is solid where these are all between the first and the last one.
    """

    axis: Axis
    predicate: Expr
    left: Tensor
    right: Tensor
    count: Tensor
    all_if_none: bool = False

    @property
    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Everything that is found of a row before the kernel runs."""
        return self.left, self.right, self.count

    @property
    def nests(self) -> tuple[Nest, Nest, Nest]:
        """The reductions by which it is found, all in one pass over what the predicate reads."""
        here, extent, one = index(self.axis), const(self.axis.extent, "int32"), const(1, "int32")
        terms: tuple[Expr, ...] = apply("sub", extent, here), apply("add", here, one), one
        return tuple(
            Nest(t.name, t.axes, apply("select", self.predicate, n, const(0, "int32")), t.dtype, (self.axis,), reducer)
            for t, n, reducer in zip(self.found, terms, (MAX, MAX, SUM), strict=True)
        )  # type: ignore[return-value]

    def visited(self, end: Expr, right: Expr) -> Expr:
        """An end of what is visited of a row, counted like `left` or `right`, from its value."""
        if not self.all_if_none:
            return end
        zero, extent = const(0, "int32"), const(self.axis.extent, "int32")
        return apply("select", apply("eq", right, zero), extent, end)

    def covers(self) -> Expr:
        """The predicate over positions and the two ends that is true of what is visited for the sake of a row."""
        here, extent = index(self.axis), const(self.axis.extent, "int32")
        left, right = (read(t.name, t.axes, t.dtype) for t in (self.left, self.right))
        after = apply("ge", here, apply("sub", extent, self.visited(left, right)))
        return apply("and", after, apply("lt", here, self.visited(right, right)))

    def solid(self, end: Expr, left: Expr, right: Expr, count: Expr) -> Expr:
        """An end of the range of a row, counted like `left` or `right`, where the row is solid; else that of an empty one, 0."""
        extent = const(self.axis.extent, "int32")
        is_solid = apply("eq", apply("add", count, extent), apply("add", left, right))
        return apply("select", is_solid, end, const(0, "int32"))

    def fills(self) -> Expr:
        """The predicate over positions and what is found that implies `predicate`: true inside the ranges of solid rows."""
        here, extent = index(self.axis), const(self.axis.extent, "int32")
        left, right, count = (read(t.name, t.axes, t.dtype) for t in self.found)
        after = apply("ge", here, apply("sub", extent, self.solid(left, left, right, count)))
        return apply("and", after, apply("lt", here, self.solid(right, left, right, count)))


@dataclass(frozen=True, slots=True)
class Load:
    """`name` = the tile of input `tensor` whose dimension d runs over `indices[d]`; zero outside the tensor.

    `again`: the block has loaded it before, or will: a cache may keep it until the last time. Says nothing about its value.
    """

    name: str
    tensor: str
    indices: tuple[Axis, ...]
    dtype: str
    again: Literal["", "later", "last"] = ""


@dataclass(frozen=True, slots=True)
class Let:
    """`name` = an elementwise expression over tiles.

    `pinned`: every user must see the same rounded value. A compiler that contracts `x - s * c` into a fused
    multiply-add sees another frame in a term than in the repair, and their difference is multiplied by the data.
    """

    name: str
    axes: tuple[Axis, ...]
    value: Expr
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Reduce:
    """`name` = `value` folded over the axes `over` of the tile.

    `joins`: the values are themselves folded from parts of one axis.
    """

    name: str
    axes: tuple[Axis, ...]
    reducer: Reducer
    value: Expr
    over: tuple[Axis, ...]
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Contract:
    """`name` = the sum over `over` of `lhs * rhs`, accumulated in `dtype`: a matrix product."""

    name: str
    axes: tuple[Axis, ...]
    lhs: Expr
    rhs: Expr
    over: tuple[Axis, ...]
    dtype: str
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """Write `value` to the current tile of output `tensor` (dimension d runs over `indices[d]`)."""

    tensor: str
    indices: tuple[Axis, ...]
    value: Expr


@dataclass(frozen=True, slots=True)
class Segment:
    """Trips `[start, stop)` of a loop, counted in tiles of `tile` positions from `offset`; runs `body`."""

    start: Expr
    stop: Expr
    offset: int
    tile: int
    body: tuple["Statement", ...]
    label: str = ""
    edge: bool = False
    """A tile may reach past the end of the axis."""


@dataclass(frozen=True, slots=True)
class Carry:
    """A loop-carried value: `init` before the first trip; bodies read it as `name` and yield `next_name`."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    init: Expr
    next_name: str


@dataclass(frozen=True, slots=True)
class Split:
    """Every block of a grid axis has a part of a loop, in order; what the loop carries then is a part's state."""

    part: Axis
    here: Expr
    """The number of positions that the part of a block visits."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A sequential loop over tiles of `axis`, in segments that share the carried values."""

    axis: Axis
    carries: tuple[Carry, ...]
    segments: tuple[Segment, ...]
    to_visit: Expr
    """The number of positions that all segments visit together, in the blocks of all parts."""
    first: Expr
    """The first position that is visited."""
    split: Split | None = None
    backwards: bool = False
    """The last tile first: what an earlier loop has read last may still be in a cache. Of loops that carry nothing."""


Statement = Load | Let | Reduce | Contract | Store | Loop


def every(body: Iterable[Statement]) -> Iterator[Statement]:
    """All statements in order, those of a loop after the loop itself."""
    for s in body:
        yield s
        if isinstance(s, Loop):
            for segment in s.segments:
                yield from every(segment.body)


def expressions(statement: Statement) -> tuple[Expr, ...]:
    """Returns the expressions that a statement computes itself, without those of the statements inside it."""
    match statement:
        case Let() | Reduce() | Store():
            return (statement.value,)
        case Contract():
            return statement.lhs, statement.rhs
        case Load() | Loop():
            return ()


@dataclass(frozen=True, slots=True)
class Instead:
    """Names another program, whose results are taken where `measure`, known after the loop, reaches `limit` in some row.

    It means the same and rounds otherwise, has the same grid and tiles, and loads and stores the same; a kernel may run it for
    more blocks than need it.
    """

    measure: Expr
    limit: float
    program: "TileProgram"


@dataclass(frozen=True, slots=True)
class TileProgram:
    """One kernel. `grid` gives the axes and block sizes that run in parallel; `order` is the canonical axis order."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    grid: tuple[tuple[Axis, int], ...]
    tiles: tuple[tuple[Axis, int], ...]
    body: tuple[Statement, ...]
    warps: int = 4
    stages: int = 2
    alternate: bool = False
    """Two warpgroups take turns with the products of a loop's step."""
    descending: tuple[Axis, ...] = ()
    """Grid axes whose blocks start from the end: the longest first, when masks make later blocks longer."""
    ahead: bool = False
    """The products that a trip begins with are computed together with those that the trip before ends with."""
    persistent: bool = False
    """As many blocks are started as run at a time; each goes on to the next one while its last results leave."""
    interleave: int = 1
    """The number of blocks of the other grid axes that run side by side, for one position of the last axis after the other."""
    eager: bool = False
    """The operands that the next trip begins with are awaited while the last products of a trip run."""
    instead: Instead | None = None
    ranges: tuple[Range, ...] = ()
    """The ranges of which the kernel reads what is found: whoever runs it computes them first, from other inputs."""
    later: tuple[Statement, ...] = ()
    """Statements that turn a stored state into results once parts are merged, where they are known. They do not run here."""
    lookups: tuple[Lookup, ...] = ()
    """The inputs that nobody stores: their tiles are loaded from other tensors, by tables."""

    @property
    def followed(self) -> tuple[Statement, ...]:
        """Returns the statements that results depend on: the stores of a state give way to what follows."""
        return (*(s for s in self.body if not isinstance(s, Store)), *self.later) if self.later else self.body

    def tile(self, axis: Axis) -> int:
        return dict(self.tiles)[axis]

    @property
    def given(self) -> tuple[Tensor, ...]:
        """The inputs without what is found of ranges from the others, and with what is looked up in place of its result."""
        made = {t.name for r in self.ranges for t in r.found} | {x.result.name for x in self.lookups}
        own = {t.name: t for t in self.inputs if t.name not in made}
        for x in self.lookups:
            own |= {t.name: t for t in (x.source, x.table) if t.name not in own}
        return tuple(own.values())

    @property
    def order(self) -> tuple[Axis, ...]:
        return tuple(a for a, _ in self.tiles)

    def __str__(self) -> str:
        return show(self)


def verify(program: TileProgram) -> TileProgram:
    """Check the invariants above; returns the program.

    Raises:
      InvalidProgramError: naming the statement and the value that is not in scope.
    """
    tensors = {t.name for t in program.inputs}
    for r in program.ranges:
        ends = {t.name for t in r.found}
        need_first = r.predicate.tensors - (tensors - ends)
        if (
            need_first
            or not ends <= tensors
            or r.predicate.axes - {r.axis} != set(r.left.axes)
            or any(t.axes != r.left.axes for t in r.found)
        ):
            raise InvalidProgramError(
                f"tile program {program.name}: the range of {r.predicate} is not what its inputs give"
            )
    for x in program.lookups:
        if verify_lookup(x).result not in program.inputs:
            raise InvalidProgramError(f"tile program {program.name}: {x} is not among its inputs")
    outputs = {t.name for t in program.outputs}
    stored: set[str] = set()

    def need(where: str, expr: Expr, scope: set[str]) -> None:
        missing = {t for t in expr.tensors if t not in scope}
        if missing:
            raise InvalidProgramError(f"tile program {program.name}: {where} reads {sorted(missing)}, not in scope")

    def block(body: tuple[Statement, ...], scope: set[str]) -> set[str]:
        scope = set(scope)
        for s in body:
            match s:
                case Load(name, tensor):
                    if tensor not in tensors:
                        raise InvalidProgramError(f"tile program {program.name}: load of unknown tensor {tensor!r}")
                    scope.add(name)
                case Let(name, _, value) | Reduce(name, _, _, value):
                    need(name, value, scope)
                    scope.add(name)
                case Contract(name, _, lhs, rhs):
                    need(name, lhs, scope)
                    need(name, rhs, scope)
                    scope.add(name)
                case Store(tensor, _, value):
                    if tensor not in outputs:
                        raise InvalidProgramError(f"tile program {program.name}: store to unknown tensor {tensor!r}")
                    need(f"store {tensor}", value, scope)
                    stored.add(tensor)
                case Loop(axis, carries, segments):
                    for c in carries:
                        need(c.name, c.init, scope)
                    need(f"loop {axis}", s.to_visit, scope)
                    need(f"loop {axis}", s.first, scope)
                    if s.split is not None:
                        need(f"loop {axis}", s.split.here, scope)
                    if s.backwards and carries:
                        raise InvalidProgramError(f"tile program {program.name}: loop {axis} carries values backwards")
                    for segment in segments:
                        need(f"loop {axis}", segment.start, scope)
                        need(f"loop {axis}", segment.stop, scope)
                    inside = scope | {c.name for c in carries} | {visited(axis), before(axis), to_visit(axis)}
                    for segment in segments:
                        got = block(segment.body, inside)
                        lost = [c.next_name for c in carries if c.next_name not in got]
                        if lost:
                            raise InvalidProgramError(f"tile program {program.name}: loop {axis} does not yield {lost}")
                    scope |= {c.name for c in carries}
        return scope

    known = block(program.body, {block_start(a) for a, _ in program.grid})
    for s in program.later:
        for expr in expressions(s):
            need("what follows", expr, known)
        known |= set() if isinstance(s, Store | Loop) else {s.name}
    if program.instead is not None:
        need("its measure", program.instead.measure, known)
        other = verify(program.instead.program)
        if _frame(other) != _frame(program):
            raise InvalidProgramError(f"tile program {program.name}: what runs instead is another kernel")
    others = math.prod(-(-a.extent // t) for a, t in program.grid[:-1])
    if others % program.interleave:
        raise InvalidProgramError(
            f"tile program {program.name}: {program.interleave} of {others} blocks cannot run side by side"
        )
    if stored != outputs:
        raise InvalidProgramError(f"tile program {program.name}: {sorted(outputs - stored)} is never stored")
    return program


def _frame(program: TileProgram) -> tuple[object, ...]:
    """Returns everything that two programs must have in common for one kernel to run both."""
    bounds, moves = [], []
    for s in program.body:
        segments = s.segments if isinstance(s, Loop) else ()
        bounds += [(g.start, g.stop, g.offset, g.tile) for g in segments]
        bodies = [g.body for g in segments] or [(s,)]
        moves += [(m.tensor, m.indices) for body in bodies for m in body if isinstance(m, Load | Store)]
    return (
        program.inputs,
        program.outputs,
        program.ranges,
        program.lookups,
        program.grid,
        program.tiles,
        program.warps,
        program.stages,
        bounds,
        moves,
    )


def _names(axes: tuple[Axis, ...]) -> str:
    return ", ".join(a.name for a in axes)


def _lines(body: tuple[Statement, ...], indent: str) -> Iterator[str]:
    for s in body:
        match s:
            case Load(name, tensor, indices):
                yield f"{indent}{name} = load {tensor}[{_names(indices)}]"
            case Let(name, axes, value):
                yield f"{indent}{name}[{_names(axes)}] = {value}"
            case Reduce(name, axes, reducer, value, over):
                yield f"{indent}{name}[{_names(axes)}] = {reducer}({value}; {_names(over)})"
            case Contract(name, axes, lhs, rhs, over, dtype):
                yield f"{indent}{name}[{_names(axes)}]: {dtype} = dot({lhs}, {rhs}; {_names(over)})"
            case Store(tensor, indices, value):
                yield f"{indent}store {tensor}[{_names(indices)}] = {value}"
            case Loop(axis, carries, segments):
                for c in carries:
                    yield f"{indent}{c.name}[{_names(c.axes)}]: {c.dtype} = {c.init}"
                for g in segments:
                    at = f" from {g.offset}" if g.offset else ""
                    at += " backwards" if s.backwards else ""
                    label = f"  # {g.label}" if g.label else ""
                    yield f"{indent}for {axis} in [{g.start}, {g.stop}) by {g.tile}{at}:{label}"
                    yield from _lines(g.body, indent + "  ")
                    if carries:
                        yield f"{indent}  yield {', '.join(f'{c.name} <- {c.next_name}' for c in carries)}"


def show(program: TileProgram) -> str:
    """The kernel as text: grid, loops with their bounds, loads, dots, reductions, carried values, stores."""
    grid = ", ".join(f"{a.name}:{a.extent}/{t}" for a, t in program.grid)
    lines = [f"kernel {program.name} grid({grid})"]
    lines += [
        f"  {', '.join(t.name for t in r.found)}[{_names(r.left.axes)}] = range of {r.axis} where {r.predicate}"
        for r in program.ranges
    ]
    lines += [f"  {x}" for x in program.lookups]
    lines += _lines(program.body, "  ")
    if program.instead is not None:
        lines.append(f"  where {program.instead.measure} >= {program.instead.limit:g} in a row, instead:")
        lines += _lines(program.instead.program.body, "    ")
    return "\n".join(lines)
