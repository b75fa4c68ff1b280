"""A tile program as the emitter for warpgroups takes it.

One loop over a rolled axis, whose streamed operands travel through shared memory; one warpgroup for each 64 rows of the tile.
The operands of a product whose sum is too long for a tile are streamed slice by slice, in every trip again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.tile_program import (
    Contract,
    Let,
    Load,
    Loop,
    Reduce,
    Segment,
    Statement,
    Store,
    TileProgram,
    every,
    expressions,
    not_flat,
)
from pallasfuse.targets import MOSAIC_GPU

WARPGROUP_ROWS = MOSAIC_GPU.warpgroup_rows
WARPS_PER_WARPGROUP = MOSAIC_GPU.warpgroup_warps
MOST_WARPGROUPS = 2
SLICE_BYTES = 128
"""Bytes of a row of an operand, in a slice of a long sum."""


class Unsuited(Exception):
    """Raised with the reason why Mosaic GPU cannot run a tile program."""


class UnsuitedForm(Unsuited):
    """Raised with a reason that tiles of other sizes do not change, as long as they have several elements along the same axes."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Describes how the operands of one product with a long sum are streamed."""

    product: str
    axis: Axis
    """Which is summed over."""
    size: int
    lhs: Load
    rhs: Load

    @property
    def count(self) -> int:
        """Slices in a trip; the last one may reach past the end, where both operands are zero."""
        return -(-self.axis.extent // self.size)

    @property
    def loads(self) -> tuple[Load, Load]:
        return self.lhs, self.rhs


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile program as the emitter takes it."""

    rows: Axis
    """The grid axis whose tile is shared out among the warpgroups."""
    warpgroups: int
    loop: Loop
    segments: tuple[Segment, ...]
    """One after the other without a gap; they load and multiply alike, and differ in their masks."""
    before: tuple[Statement, ...]
    after: tuple[Statement, ...]
    streamed: tuple[Load, ...]
    """Loads of the loop: one pipelined buffer each."""
    resident: tuple[Load, ...]
    """Other loads of tiles: one buffer for each warpgroup."""
    slices: tuple[Slices, ...] = ()
    """Products whose operands come slice by slice, and so are in none of these loads."""

    @property
    def sliced(self) -> dict[Load, Slices]:
        """Operands that are streamed slice by slice."""
        return {load: s for s in self.slices for load in s.loads}

    @property
    def body(self) -> tuple[Statement, ...]:
        """The statements of any trip: trips differ in their masks only."""
        return self.segments[0].body

    @property
    def stores(self) -> tuple[Store, ...]:
        return tuple(s for s in self.after if isinstance(s, Store))


def present(program: TileProgram, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes along which a tile has more than one element."""
    return tuple(a for a in axes if program.tile(a) > 1)


def shape_of(program: TileProgram) -> Shape:
    """The shape of a program.

    Raises:
      Unsuited: with the reason why the emitter cannot take it.
    """
    reason = not_flat(program.body)
    if reason is not None:
        raise Unsuited(reason)
    loops = [s for s in program.body if isinstance(s, Loop)]
    if len(loops) != 1 or not loops[0].carries:
        raise UnsuitedForm(f"it has {len(loops)} loops, and one with carried values is what can be emitted")
    (loop,) = loops
    for one, other in pairwise(loop.segments):
        if one.stop is not other.start or one.tile != other.tile or _moves(one.body) != _moves(other.body):
            raise Unsuited("the segments of its loop differ in more than their masks")
    tiled = [(a, t) for a, t in program.grid if t > 1]
    if len(tiled) != 1:
        raise UnsuitedForm(f"{len(tiled)} grid axes are tiled, and one gives the rows")
    rows, tile = tiled[0]
    warpgroups = program.warps // WARPS_PER_WARPGROUP
    if not 0 < warpgroups <= MOST_WARPGROUPS or tile != warpgroups * WARPGROUP_ROWS:
        raise Unsuited(f"a tile of {tile} rows is not {WARPGROUP_ROWS} for each of {warpgroups} warpgroups")
    at = program.body.index(loop)
    before, after = program.body[:at], program.body[at + 1 :]
    body = loop.segments[0].body
    loads = [s for s in body if isinstance(s, Load)]
    if not loads or any(loop.axis not in s.indices for s in loads):
        raise Unsuited("its loop loads what does not depend on the rolled axis, or nothing")
    if not any(isinstance(s, Contract) for s in body):
        raise Unsuited("its loop has no matrix product")
    slices = tuple(_slices(program, loop, s) for s in program.long_products(MOSAIC_GPU.max_inner))
    sliced = {load for s in slices for load in s.loads}
    streamed = tuple(s for s in loads if s not in sliced)
    tiles = [s for s in (*before, *after) if isinstance(s, Load) and present(program, s.indices)]
    resident = tuple(s for s in tiles if s not in sliced)
    return Shape(rows, warpgroups, loop, loop.segments, before, after, streamed, resident, slices)


def _slices(program: TileProgram, loop: Loop, product: Contract) -> Slices:
    over = present(program, product.over)
    everything = [s for s in every(program.body) if s is not loop]
    loads = {s.name: s for s in everything if isinstance(s, Load)}
    sides = [loads.get(e.tensor) if isinstance(e, Read) else None for e in (product.lhs, product.rhs)]
    (lhs, rhs) = sides
    if len(over) != 1 or lhs is None or rhs is None or lhs is rhs:
        raise Unsuited(f"{product.name} is a long sum of what is computed")
    for load in (lhs, rhs):
        readers = [s for s in everything if s is not load and any(load.name in e.tensors for e in expressions(s))]
        if any(not isinstance(s, Contract) or s.name != product.name for s in readers):
            raise Unsuited(f"{load.tensor} is read beside {product.name}, which takes it slice by slice")
    return Slices(product.name, over[0], SLICE_BYTES // dtypes.itemsize_bytes(lhs.dtype), lhs, rhs)


def box(program: TileProgram, shape: Shape, load: Load) -> tuple[int, ...]:
    """Returns the size of the tile that one copy of a streamed operand brings, one number per axis."""
    slices = shape.sliced.get(load)
    return tuple(
        slices.size if slices is not None and a == slices.axis else program.tile(a)
        for a in present(program, load.indices)
    )


def _moves(body: tuple[Statement, ...]) -> list[Statement | str]:
    return [s if isinstance(s, Load) else s.name for s in body if isinstance(s, Load | Contract)]


def accumulated(shape: Shape, body: tuple[Statement, ...]) -> dict[str, tuple[Let, Expr]]:
    """Products that are only added to something: name -> (the sum, the other addend). They accumulate in place, but those whose
    operands come in slices."""
    products = {s.name for s in body if isinstance(s, Contract)} - {s.product for s in shape.slices}
    uses: dict[str, int] = {}
    for s in body:
        for root in expressions(s):
            for node in postorder(root):
                if isinstance(node, Read) and node.tensor in products:
                    uses[node.tensor] = uses.get(node.tensor, 0) + 1
    found: dict[str, tuple[Let, Expr]] = {}
    defined = [s.name for s in body if isinstance(s, Load | Let | Reduce | Contract)]
    for s in body:
        match s:
            case Let(_, _, Apply("add", (other, Read(name)))) if uses.get(name) == 1 and other.tensors.isdisjoint(
                defined[defined.index(name) :]
            ):
                found[name] = s, other
    return found


@dataclass(frozen=True, slots=True)
class Trip:
    """The emitter's knowledge about the trips of one segment."""

    segment: Segment
    last_reader: Mapping[Statement, tuple[Load, ...]]
    """Statement -> the loads that none after it reads. What the loop does not read at all counts for its end."""
    accumulated: Mapping[str, tuple[Let, Expr]]
    starts: tuple[str, ...]
    """The products that a trip begins with."""
    ends: tuple[str, ...]
    """Those that it ends with, which are only added to something; both are empty where they are mixed."""
    ahead: tuple[Statement, ...]
    """The first products and their loads, if they read nothing else and nothing else reads what is loaded for them."""


def trip_of(shape: Shape, segment: Segment) -> Trip:
    """See `Trip`."""
    body = segment.body
    last: dict[Load, Statement] = dict.fromkeys((*shape.streamed, *shape.resident), body[-1])
    for load in last:
        readers = [s for s in body if s is load or any(load.name in e.tensors for e in expressions(s))]
        last[load] = (readers or body)[-1]
    sums = accumulated(shape, body)
    names = tuple(s.name for s in body if isinstance(s, Contract))
    starts, ends = tuple(n for n in names if n not in sums), tuple(n for n in names if n in sums)
    if names != starts + ends:
        starts = ends = ()
    products = tuple(s for s in body if isinstance(s, Contract) and s.name in starts)
    read = {t for s in products for e in (s.lhs, s.rhs) for t in e.tensors}
    loads = tuple(s for s in shape.streamed if s.name in read)
    others = {t for s in body if s not in products for e in expressions(s) for t in e.tensors}
    plain = all(isinstance(e, Read) for s in products for e in (s.lhs, s.rhs))
    known = read <= {s.name for s in (*shape.streamed, *shape.resident)}
    early: tuple[Statement, ...] = (
        (*loads, *products) if plain and known and others.isdisjoint(s.name for s in loads) else ()
    )
    by_reader = {s: tuple(load for load, reader in last.items() if reader is s) for s in last.values()}
    return Trip(segment, by_reader, sums, starts, ends, early)
