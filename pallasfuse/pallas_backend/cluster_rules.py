"""The rules for rows that a cluster of thread blocks computes: what it can do, as data, and what the phases of a split ask of it.

Every block has a part of the row in shared memory, in slots of one tile each: what the first phase has loaded, a later one reads
there. One warpgroup computes. States, one number for each row, go to the shared memory of all blocks.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.reducers import Reducer
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import (
    Buffer,
    Carry,
    Contract,
    Get,
    Let,
    Load,
    Loop,
    Reduce,
    Set,
    Statement,
    Store,
    TileProgram,
    block_start,
    every,
    expressions,
    not_flat,
)
from pallasfuse.pallas_backend.mosaic_rules import (
    COPY_ALIGNMENT,
    FLOATS,
    INTEGER_OPERATIONS,
    OPERATIONS,
    REDUCERS,
)
from pallasfuse.pallas_backend.mosaic_shape import Unsuited
from pallasfuse.pallas_backend.mosaic_space import SHARED_BYTES, THREADS, Allocation, resources_of, total_bytes
from pallasfuse.price.visited_tiles import tile_range
from pallasfuse.resources.block import Resources
from pallasfuse.resources.clusters import leaving, streams_of
from pallasfuse.resources.exponentials import SMALL_CONDITION, by_instruction, is_approximate
from pallasfuse.tiling.arithmetic import CONDITION, INVERSE_CONDITION, inverts

MOST_BLOCKS = 16
"""The most blocks of a cluster; more than `Target.cluster` only where they are asked for."""
MEETING_WORDS = 2
"""The words of 32 bits that the barrier of a meeting of all blocks takes."""
MOST_SLOTS = 32
"""Barriers of one kind."""
SCALARS = FLOATS | {"int32"}
_MOST_ELEMENTS = 128
"""The most elements of a tile for each thread: more would not fit into its registers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The phases as the emitter takes them."""

    programs: tuple[TileProgram, ...]
    rolled: Axis
    tile: int
    vector: int
    """The number of neighbouring elements that a thread has."""
    part: Axis | None
    """The grid axis that numbers the blocks of a cluster; None where one block has the whole row."""
    parts: Axis | None
    """Along it lie the states of all parts."""
    slots: int
    """Tiles that a block has at most."""
    streams: tuple[Load, ...]
    """The first load of every tensor that has a buffer, which waits for the copy."""
    passing: tuple[Load, ...]
    """The load of every other tensor along the rolled axis: all rows have it, and one loop reads it, from a cache."""
    states: tuple[tuple[Tensor, ...], ...]
    """The tensors that each phase but the last one leaves for the next."""
    buffers: dict[str, str]
    """Tensor that is stored along the rolled axis -> the stream whose buffer it leaves by; itself, where it has its own."""
    approximate: bool
    """Results are rounded to half precision: `FAST` operations may be."""

    @property
    def blocks(self) -> int:
        """The number of blocks in a cluster."""
        return 1 if self.part is None else self.part.extent

    @property
    def whole(self) -> int:
        """Tiles that lie inside the axis."""
        return self.rolled.extent // self.tile

    @property
    def rest(self) -> int:
        """Elements of the last tile, if it reaches past the end."""
        return self.rolled.extent % self.tile

    @property
    def rows(self) -> tuple[tuple[Axis, int], ...]:
        """The grid of rows."""
        return tuple((a, t) for a, t in self.programs[-1].grid if a != self.part)

    @property
    def results(self) -> tuple[Tensor, ...]:
        return self.programs[-1].outputs

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the phases load, without states."""
        left = {t.name for states in self.states for t in states}
        return tuple(dict.fromkeys(t for p in self.programs for t in p.inputs if t.name not in left))


def problem(programs: Sequence[TileProgram]) -> str | None:
    """Returns why the phases cannot be one kernel of clusters; None if they can."""
    shape = examine(programs)
    return shape if isinstance(shape, str) else None


def conditions(programs: Sequence[TileProgram]) -> tuple[str, ...]:
    """Lists the ways in which the kernel rounds otherwise than the program."""
    shape = examine(programs)
    if isinstance(shape, str):
        return ()
    fast = any(by_instruction(p, rounded=shape.approximate) for p in programs)
    return (
        *((CONDITION, SMALL_CONDITION) if fast else ()),
        *((INVERSE_CONDITION,) if any(map(inverts, programs)) else ()),
    )


def examine(programs: Sequence[TileProgram]) -> Shape | str:
    """The shape of the phases, or the reason why they cannot be one kernel of clusters."""
    try:
        shape = _shape(tuple(programs))
        for program in programs:
            for statement in program.body:
                if shape.rolled in _axes(statement):
                    raise Unsuited("a whole row is computed at once")
            for statement in _all([program]):
                _check(shape, program, statement)
        _check_copies(shape)
        _check_space(shape)
    except Unsuited as reason:
        return str(reason)
    return shape


def _all(programs: Sequence[TileProgram]) -> Iterator[Statement]:
    """Every statement, those in loops too."""
    return every(s for program in programs for s in program.body)


def _axes(statement: Statement) -> frozenset[Axis]:
    """Returns the axes that a statement outside of loops runs over."""
    indices = statement.indices if isinstance(statement, Load | Store) else ()
    return frozenset(indices).union(*(e.axes for e in expressions(statement)))


def _shape(programs: tuple[TileProgram, ...]) -> Shape:
    reason = next((r for r in (not_flat(p.body) for p in programs) if r is not None), None)
    if reason is not None:
        raise Unsuited(reason)
    loops = [s for p in programs for s in p.body if isinstance(s, Loop)]
    if not loops:
        raise Unsuited("a row is one tile: it has no loop")
    rolled, tile = loops[0].axis, programs[0].tile(loops[0].axis)
    splits = {s.split.part for s in loops if s.split is not None}
    part = splits.pop() if splits else None
    if part is not None and (len(programs) < 2 or part.extent > MOST_BLOCKS):
        raise Unsuited(f"it leaves the states of {part.extent} parts")
    parts = next((a for a in programs[-1].order if a.name == f"{rolled.name}.parts"), None)
    for program in programs:
        several = [a.name for a, t in program.tiles if t > 1 and a not in (rolled, parts)]
        if several:
            raise Unsuited(f"a block has several elements along {', '.join(several)}, and one row is what it computes")
    if tile % THREADS or tile > THREADS * _MOST_ELEMENTS:
        raise Unsuited(f"{THREADS} threads do not share {tile} elements")
    loads: dict[str, Load] = {}
    for s in _all(programs):
        if isinstance(s, Load) and rolled in s.indices and loads.setdefault(s.tensor, s).indices != s.indices:
            raise Unsuited(f"{s.tensor} is read along two axes")
    streams = streams_of(programs, rolled)
    passing = tuple(s for s in loads.values() if s not in streams)
    if not streams:
        raise Unsuited("it loads nothing that differs from row to row")
    blocks = 1 if part is None else part.extent
    tiles = -(-rolled.extent // tile)
    slots = -(-tiles // blocks)
    shape = Shape(
        programs, rolled, tile, _vector(tile, [s.dtype for s in loads.values()]), part, parts, slots, streams, passing,
        tuple(p.outputs for p in programs[:-1]), leaving(programs, rolled, streams), is_approximate(programs),
    )  # fmt: skip
    for loop in loops:
        _check_loop(shape, loop)
    return shape


def _vector(tile: int, types: list[str]) -> int:
    """Sixteen bytes of the widest type, if the tile is a multiple of that for all threads."""
    vector = COPY_ALIGNMENT // max(map(dtypes.itemsize_bytes, types))
    while tile % (THREADS * vector):
        vector //= 2
    return vector


def _check_loop(shape: Shape, loop: Loop) -> None:
    """Every block visits its equal share of all tiles, in every loop: then it finds them in its slots."""
    tiles = -(-shape.rolled.extent // shape.tile)
    for number in range(shape.blocks):
        visited: list[int] = []
        for segment in loop.segments:
            found = tile_range(segment, {} if shape.part is None else {shape.part: number})
            if found is None or segment.offset or segment.tile != shape.tile:
                raise Unsuited("the tiles that masks leave to visit depend on the row")
            visited += found
        if visited != list(range(min(number * shape.slots, tiles), min((number + 1) * shape.slots, tiles))):
            raise Unsuited("masks hide tiles, which it would copy")
    loaded = [{s.tensor for s in g.body if isinstance(s, Load) and shape.rolled in s.indices} for g in loop.segments]
    if any(tensors != loaded[0] for tensors in loaded):
        raise Unsuited("the segments of a loop load different tensors")
    for carry in loop.carries:
        _check_scalar(shape, carry)
    merging(loop)


def merging(loop: Loop) -> dict[str, Reducer]:
    """Returns how the states that threads carry become one, by the name of the next state: by what a trip reduces for it.

    A state of which a trip reduces nothing, as a frame, must be the same in all threads once those that it is made of are one.

    Raises:
      Unsuited: they become none.
    """
    found: dict[str, Reducer] = {}
    wanted = {c.next_name for c in loop.carries}
    for segment in loop.segments:
        reduced = {s.name: s.reducer for s in segment.body if isinstance(s, Reduce)}
        own = {c.name for c in loop.carries} | reduced.keys()
        """These names have a value of their own in each thread."""
        for s in segment.body:
            if not isinstance(s, Let):
                continue
            if block_start(loop.axis) in s.value.tensors and loop.axis not in s.value.axes:
                raise Unsuited(f"{s.name} depends on where a tile begins")
            made_of = [reduced[t] for t in s.value.tensors if t in reduced]
            if s.name in wanted and len(made_of) == 1:
                if not _is_combined(s.value, made_of[0], reduced.keys()):
                    raise Unsuited(f"{s.name} is no {made_of[0]} of what was and what a trip reduces")
                if found.setdefault(s.name, made_of[0]) != made_of[0]:
                    raise Unsuited(f"segments reduce {s.name} in two ways")
            elif not own.isdisjoint(s.value.tensors):
                own.add(s.name)
        undefined = wanted - {s.name for s in segment.body if isinstance(s, Let)}
        for name in sorted(wanted & own | undefined):
            raise Unsuited(f"the states {name} of threads do not become one")
    return found


def _is_combined(value: Expr, reducer: Reducer, reduced: Collection[str]) -> bool:
    """Is a value what a reducer makes of something and of a reduction of the trip?"""
    match value:
        case Apply(op, (one, other)) if op == reducer.combine:
            last = [x for x in (one, other) if isinstance(x, Read) and x.tensor in reduced]
            return bool(last) or any(_is_combined(x, reducer, reduced) for x in (one, other))
    return False


def _check_scalar(shape: Shape, carry: Carry) -> None:
    if carry.dtype not in SCALARS or _wide(shape, carry.axes):
        raise Unsuited(f"{carry.name} is carried as {carry.dtype} over {[a.name for a in carry.axes]}")


def _wide(shape: Shape, axes: Sequence[Axis] | frozenset[Axis]) -> set[Axis]:
    return {a for a in axes if a in (shape.rolled, shape.parts)}


def _check(shape: Shape, program: TileProgram, statement: Statement) -> None:
    for root in expressions(statement):
        for node in postorder(root):
            _check_node(shape, node)
    tensors = {t.name: t for t in (*program.inputs, *program.outputs)}
    match statement:
        case Load(_, tensor, indices) | Store(tensor, indices):
            if tensors[tensor].dtype not in SCALARS:
                raise Unsuited(f"{tensor} is {tensors[tensor].dtype}")
            if shape.rolled in indices[:-1]:
                raise Unsuited(f"a row of {tensor} is not contiguous: {shape.rolled} is not its last axis")
        case Reduce(name, _, reducer, value, over):
            if reducer.name not in REDUCERS or value.dtype != "float32":
                raise Unsuited(f"{name} is a {reducer} of {value.dtype}")
            if len(_wide(shape, over)) != len(over):
                raise Unsuited(f"{name} reduces {[a.name for a in over]}")
        case Contract(name):
            raise Unsuited(f"{name} is a product")
        case Let() | Buffer() | Get() | Set() | Loop():
            pass  # buffers are refused as a whole


def _check_node(shape: Shape, node: Expr) -> None:
    if len(_wide(shape, node.axes)) > 1:
        raise Unsuited(f"{node} is a tile of states")
    match node:
        case Apply(op, _, dtype):
            allowed = OPERATIONS if dtype in FLOATS or dtype == "bool" else INTEGER_OPERATIONS
            if op not in allowed or dtype not in SCALARS | {"bool"}:
                raise Unsuited(f"{op} of {dtype} has no instruction")
        case Index(_, dtype) | Const(_, dtype) | Read(_, _, dtype) if dtype not in SCALARS | {"bool"}:
            raise Unsuited(f"{node} is {dtype}")


def _check_copies(shape: Shape) -> None:
    """The copy engine moves contiguous elements, whole sixteen bytes of them from such an address."""
    tensors = {t.name: t for t in (*shape.inputs, *shape.results)}
    for name in (*(s.tensor for s in shape.streams), *shape.buffers):
        row = shape.rolled.extent * dtypes.itemsize_bytes(tensors[name].dtype)
        if row % COPY_ALIGNMENT:
            raise Unsuited(f"{name} has rows of {row} bytes, no multiple of {COPY_ALIGNMENT}")


def word(tensor: Tensor) -> str:
    """Returns the type by which a state travels, which takes four bytes."""
    return "float32" if dtypes.is_float(tensor.dtype) else "int32"


def slots(shape: Shape) -> tuple[Allocation, ...]:
    """A buffer for every stream and for every result that leaves by one of its own."""
    types = {t.name: t.dtype for t in (*shape.inputs, *shape.results)}
    held = [s.tensor for s in shape.streams] + [n for n, b in shape.buffers.items() if n == b]
    return tuple(Allocation(name, shape.slots, (shape.tile,), types[name]) for name in held)


def boards(shape: Shape) -> tuple[Allocation, ...]:
    """Returns the allocations to which all blocks write their states: for every phase, one of each type."""
    found = []
    for number, tensors in enumerate(shape.states):
        types = [word(t) for t in tensors]
        for dtype in dict.fromkeys(types):
            size = types.count(dtype) * shape.blocks
            found.append(Allocation(f"{number}.{dtype}", 1, (size,), dtype))
    return tuple(found)


def words_told(shape: Shape) -> tuple[int, ...]:
    """Counts the words that are written to a block at each meeting: the end of a phase, whose states every block leaves."""
    return tuple(len(tensors) * shape.blocks for tensors in shape.states)


def meetings(shape: Shape) -> tuple[Allocation, ...]:
    """Returns the allocation of the barriers that await what is told."""
    words = MEETING_WORDS * len(shape.states)
    return (Allocation("meetings", 1, (words,), "int32"),) if words else ()


def barrier_count(shape: Shape) -> int:
    """Counts the barriers: one for each slot of a stream."""
    return len(shape.streams) * shape.slots


def shared_bytes(shape: Shape) -> int:
    """Returns the bytes of shared memory that one block takes."""
    return total_bytes((*slots(shape), *boards(shape), *meetings(shape)), barrier_count(shape))


def resources(programs: Sequence[TileProgram]) -> Resources | str:
    """Returns exactly what one block takes, or why the phases cannot be one kernel of clusters."""
    shape = examine(programs)
    if isinstance(shape, str):
        return shape
    return resources_of((*slots(shape), *boards(shape), *meetings(shape)), barrier_count(shape), THREADS)


def _check_space(shape: Shape) -> None:
    used = shared_bytes(shape)
    if used > SHARED_BYTES:
        raise Unsuited(f"its part of a row takes {used} bytes of shared memory, of {SHARED_BYTES}")
    if shape.slots > MOST_SLOTS:
        raise Unsuited(f"a block has {shape.slots} tiles of a row, and barriers for {MOST_SLOTS}")
