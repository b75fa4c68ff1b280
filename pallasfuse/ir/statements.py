"""The statements of tile programs (`ir/tile_program.py`), and the names by which they read where they are."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, Read, const, postorder
from pallasfuse.ir.reducers import Reducer

ZERO = const(0, "int32")


def block_start(axis: Axis) -> str:
    """The scalar by which bounds read the first position of the current window along `axis`: a grid block, or a loop's trip."""
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
    renamed: tuple[tuple[Axis, Axis], ...] = ()
    """Pairs of axes of one length, whole in every block: the value is a read along the first ones, the result has the second."""


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
class Buffer:
    """Memory that loops write piece by piece: `sizes` positions along `axes`, from the start of each axis' current window.

    It lives to the end of the body that it stands in. Only `Get` reads it, as it changes.
    """

    name: str
    axes: tuple[Axis, ...]
    sizes: tuple[int, ...]
    """Positions, so many that every window fits in which it is read or written."""
    dtype: str
    init: Expr
    """A constant: every element before the first `Set`."""
    memory: Literal["register", "shared", "cluster", "global"] = "register"


@dataclass(frozen=True, slots=True)
class Get:
    """`name` = the part of a buffer at the current windows of `axes`, which are all axes of the buffer."""

    name: str
    buffer: str
    axes: tuple[Axis, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Set:
    """Write `value`, broadcast to `axes`, to the part of a buffer at the current windows of `axes`."""

    buffer: str
    axes: tuple[Axis, ...]
    value: Expr


@dataclass(frozen=True, slots=True)
class Segment:
    """Trips `[start, stop)` of a loop, counted in tiles of `tile` positions from the loop's origin and `offset`; runs `body`."""

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
    """A loop-carried value: `init`, of any shape, before the first trip; bodies read it as `name` and yield `next_name`."""

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
    """A sequential loop over tiles of `axis`, in segments that share the carried values.

    Inside another loop over its axis, or a grid block, it cuts the window there into pieces; `first` and `to_visit` count for all
    loops over the axis together.
    """

    axis: Axis
    carries: tuple[Carry, ...]
    segments: tuple[Segment, ...]
    to_visit: Expr
    """The number of positions that all segments visit together, in the blocks of all parts."""
    first: Expr
    """The first position that is visited."""
    split: Split | None = None
    backwards: bool = False
    """The last tile first: what an earlier loop has read last may still be in a cache, or the values that the loop carries, in one
    segment, come from there."""
    origin: Expr = ZERO
    """The position from which trips are counted: the `block_start` of the axis where a window of it is open, else 0."""


Statement = Load | Let | Reduce | Contract | Store | Buffer | Get | Set | Loop


def every(body: Iterable[Statement]) -> Iterator[Statement]:
    """All statements in order, those of a loop after the loop itself."""
    for s in body:
        yield s
        if isinstance(s, Loop):
            for segment in s.segments:
                yield from every(segment.body)


def in_windows(body: Iterable[Statement], tiles: Mapping[Axis, int]) -> Iterator[tuple[Statement, Mapping[Axis, int]]]:
    """All statements in the order of `every`, each with the size of the window along every axis where it stands."""
    for s in body:
        yield s, tiles
        if isinstance(s, Loop):
            for segment in s.segments:
                yield from in_windows(segment.body, {**tiles, s.axis: segment.tile})


def expressions(statement: Statement) -> tuple[Expr, ...]:
    """Returns the expressions that a statement computes itself, without those of the statements inside it."""
    match statement:
        case Let() | Reduce() | Store() | Set():
            return (statement.value,)
        case Contract():
            return statement.lhs, statement.rhs
        case Buffer():
            return (statement.init,)
        case Load() | Get() | Loop():
            return ()


def reads_of(statement: Statement) -> set[str]:
    """Returns the names of the values that a statement reads, without those that only statements inside it read."""
    roots = [*expressions(statement)]
    if isinstance(statement, Loop):
        roots += [statement.first, statement.to_visit, statement.origin, *(c.init for c in statement.carries)]
        roots += [e for g in statement.segments for e in (g.start, g.stop)]
    return {n.tensor for r in roots for n in postorder(r) if isinstance(n, Read)}


def not_flat(body: Iterable[Statement]) -> str | None:
    """Says what emitters of one level of loops, whose values begin as numbers, cannot run of a body; None for nothing."""
    for s in every(body):
        match s:
            case Buffer(name) | Get(_, name) | Set(name):
                return f"it has buffers: {name}"
            case Loop(axis) if any(isinstance(x, Loop) for g in s.segments for x in g.body):
                return f"it has loops inside loops: inside that over {axis}"
            case Loop(axis) if s.origin is not ZERO:
                return f"it has a loop over {axis} inside a block of {axis}"
            case Loop(_, carries) if any(c.init.tensors or c.init.axes for c in carries):
                return "its loop carries values that begin as more than numbers"
    return None


def tile_name(statement: Statement) -> str | None:
    """The name that a statement gives to a tile; None for one that makes no tile."""
    return None if isinstance(statement, Store | Buffer | Set | Loop) else statement.name


def sets(body: Iterable[Statement]) -> tuple[str, ...]:
    """The names of the buffers that statements write, inside loops too."""
    return tuple(dict.fromkeys(s.buffer for s in every(body) if isinstance(s, Set)))


def operands_of_products(body: Iterable[Statement]) -> frozenset[str]:
    """Names the loads that matrix products read as they are: those a compiler copies to shared memory ahead of time."""
    roots = [e for s in body if isinstance(s, Contract) for e in (s.lhs, s.rhs)]
    return frozenset(n.tensor for r in roots for n in through_casts(r))


def through_casts(root: Expr) -> Iterator[Read]:
    """Yields the read of which an expression is a conversion, if it is one."""
    while isinstance(root, Apply) and root.op == "convert":
        root = root.args[0]
    if isinstance(root, Read):
        yield root


def sources_of[S: Contract | Reduce](body: Sequence[Statement], made: type[S]) -> frozenset[str]:
    """Names all that the products of a block are made of, or its reductions (`made`), themselves among it where others are."""
    wanted: set[str] = set()
    for s in reversed(body):
        if isinstance(s, made) or (isinstance(s, Let | Reduce) and s.name in wanted):
            wanted.update(*(e.tensors for e in expressions(s)))
    return frozenset(wanted)


def cut_axes(body: Sequence[Statement], around: frozenset[Axis] = frozenset()) -> frozenset[Axis]:
    """Returns the axes along which a loop stands in another loop, or in the tile of a grid. around: those of the loops around."""
    found: frozenset[Axis] = frozenset()
    for s in body:
        if isinstance(s, Loop):
            found |= {s.axis} & around
            for g in s.segments:
                found |= cut_axes(g.body, around | {s.axis})
    return found
