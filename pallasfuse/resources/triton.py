"""Shared memory of a Triton kernel, by an upper bound that is close.

Triton decides what lies in shared memory: it stages the operands of products there, copies ahead what a loop loads on the way to a
product, and moves a tile that changes its layout through scratch memory. Each of these is a `Buffer` with a lifetime, and a block
takes the most that is alive at once.
"""

from collections.abc import Iterable, Iterator

from pallasfuse.first_time import Recent
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Read, postorder
from pallasfuse.ir.tile_program import Contract, Let, Load, Reduce, Store, TileProgram, expressions
from pallasfuse.resources.block import REGISTER_BYTES, WARP, Buffer, Resources, Shared, most_registers, peak_bytes
from pallasfuse.resources.triton_operands import laid_out_anew_at, needed_until, of_product
from pallasfuse.resources.triton_registers import registers_needed
from pallasfuse.resources.triton_spills import demand_of, spills
from pallasfuse.resources.triton_view import COPY_BYTES, WARP_ROWS, Line, View
from pallasfuse.targets import Target

TILE_BYTES = 1024
"""Tiles that warpgroups read begin at such multiples; what is smaller leaves a gap before the next of them."""

_LAYOUTS_OF_A_ROW = 3
"""A row of which several threads hold the same elements may be copied ahead for each layout in which it is read: before a product,
as its results lie, and as a side of the next one. Two and three were seen in compiled kernels."""

_MATRIX = 2
"""The axes of tiles that steps of loops sum as they lie. Tiles of more, and of more than what is loaded or stored has, may be laid
out anew before: of 506 layouts of loops that were compiled for an H100, four needed the memory for that."""

view_of = Recent(View)
"""Returns the view of a program: its resources, its price and its rules all look at it."""


def resources(program: TileProgram, target: Target) -> Resources:
    """An upper bound of what Triton makes of a program."""
    return _resources(program, target)


def _found(program: TileProgram, target: Target) -> Resources:
    view, shared = view_of(program, target), shared_memory(program, target)
    threads = WARP * program.warps
    most = most_registers(threads)
    registers = min(registers_needed(view), most)
    demand = demand_of(view)
    likely = min(demand.most, registers)
    return Resources(shared.bytes, threads, registers, tuple(spills(view, demand, most)), shared.buffers, likely)


_resources = Recent(_found)


def may_spill(program: TileProgram, target: Target) -> bool:
    """Has a thread too few registers for all values that are alive at once, if none of them is computed piece by piece?"""
    return registers_needed(view_of(program, target)) > most_registers(WARP * program.warps)


def _in_shared_memory(program: TileProgram, target: Target) -> Shared:
    view = view_of(program, target)
    tiles, rows = tuple(_buffers(view)), tuple(_rows(view))
    most = max(peak_bytes((*tiles, *rows)), peak_bytes(tiles, TILE_BYTES if _has_warpgroups(view) else 1))
    return Shared(most, (*rows, *tiles))


shared_memory = Recent(_in_shared_memory)
"""Returns the shared memory that Triton takes for a program, an upper bound: it decides whether that runs, not its registers."""


def _has_warpgroups(view: View) -> bool:
    return any(p.warpgroup for p in view.products.values())


def _rows(view: View) -> Iterator[Buffer]:
    if view.products:
        sides = [a for p in view.products.values() for a in (*p.statement.axes, *p.statement.over)]
        rows = max(view.program.tile(a) for a in sides)
        yield Buffer("values of rows, laid out anew", REGISTER_BYTES * rows, 0, len(view.lines) - 1)


def _buffers(view: View) -> Iterator[Buffer]:
    if not view.products:
        yield from _other_layouts(view)
    for line in view.lines:
        at, s = line.number, line.statement
        match s:
            case Let(name, axes, value, _, renamed) if renamed:
                yield Buffer(
                    f"{name}, laid out anew", view.elements(axes) * dtypes.itemsize_bytes(value.dtype), at, at, True
                )
            case Load() if view.products:
                yield from _of_load(view, line, s)
            case Contract() if at in view.products:
                yield from of_product(view, view.products[at])
            case Contract(_, axes, _, _, over, dtype):
                yield from _of_sum(view, line, axes, over, dtype)
            case Reduce(_, axes, _, value, over):
                yield from _of_sum(view, line, axes, over, value.dtype)
            case Store(tensor, indices) if view.products:
                yield Buffer(f"{tensor}, laid out anew", view.bytes(indices, view.stored_type(s)), at, at, True)
            case _:
                pass


def _of_load(view: View, line: Line, s: Load) -> Iterator[Buffer]:
    """Lists the buffers of a load in a kernel with products: for what is staged for them, and what takes the layout of their
    results."""
    size, readers = view.bytes(s.indices, s.dtype), view.readers(line)
    takers = [view.products[r.number] for r in readers if r.number in view.products]
    direct = [p for p in takers if p.takes(s.name)]
    at = line.number
    if at in view.copied_ahead:
        in_place = len(direct) == len(readers) and all(p.warpgroup and p.half for p in direct)
        stays = in_place or len(direct) > 1
        # what goes on to registers leaves its slot at once, unless another product takes it later
        copies = view.program.stages - (0 if stays else 1)
        is_row = sum(view.program.tile(a) > 1 for a in s.indices) <= 1
        if is_row and not direct and view.elements(s.indices) < WARP * view.program.warps:
            copies *= _LAYOUTS_OF_A_ROW
        yield Buffer(f"{copies} of {s.tensor}", size * copies, line.scope.kept.first, line.scope.kept.last)
        return
    staged = [p for p in direct if p.half or not p.warpgroup or p.statement.lhs.tensors == {s.name}]
    if staged:
        yield Buffer(s.tensor, size, at, max(needed_until(view, line, p) for p in staged))
    if readers and len(direct) < len(readers):
        anew = view.elements(s.indices) * _widest_bytes(view, s)
        yield from (Buffer(f"{s.tensor}, laid out anew", anew, n, n, True) for n in laid_out_anew_at(view, line))


def _widest_bytes(view: View, s: Load) -> int:
    """Returns the bytes of an element where its layout changes: before it is converted to another type, or after."""
    return max(dtypes.itemsize_bytes(s.dtype), _converted(view).get(s.name, 0))


def _found_converted(view: View) -> dict[str, int]:
    """Returns the bytes of the widest type that each value is converted to, by its name."""
    found: dict[str, int] = {}
    for node in postorder(*(root for line in view.lines for root in expressions(line.statement))):
        match node:
            case Apply("convert", (Read(name),), dtype):
                found[name] = max(found.get(name, 0), dtypes.itemsize_bytes(dtype))
    return found


_converted = Recent(_found_converted)


def _of_sum(view: View, line: Line, axes: tuple[Axis, ...], over: tuple[Axis, ...], dtype: str) -> Iterator[Buffer]:
    """Lists the buffers for the parts of a reduction that different warps have."""
    warps = view.program.warps
    if view.products and all(p.warpgroup and p.m >= WARP_ROWS * warps for p in view.products.values()):
        return  # a warp has whole rows
    tile = (*axes, *over)
    if view.program.is_recurrent and len(_wide(view, tile)) > max(_most_axes_moved(view), _MATRIX):
        anew = view.elements(tile) * dtypes.itemsize_bytes(dtype)
        yield Buffer(f"what {line.name} sums, laid out anew", anew, line.number, line.number, True)
    summed = [view.program.tile(a) for a in over if view.program.tile(a) > 1]
    if len(summed) > 1:  # one axis after the other
        size = view.elements((*axes, *over)) // min(summed) * dtypes.itemsize_bytes(dtype)
        yield Buffer(f"{line.name}, summed along one axis", size, line.number, line.number, True)
    sharing = _warps_along(view, frozenset((*axes, *over)), frozenset(over))
    if sharing > 1 or view.elements(axes) > 1:
        size = view.elements(axes) * sharing * dtypes.itemsize_bytes(dtype)
        yield Buffer(f"parts of {line.name}", size, line.number, line.number, True)


def _most_axes_moved(view: View) -> int:
    """Counts the axes of the tile with the most of them that is loaded or stored."""
    statements = (line.statement for line in view.lines)
    return max((len(_wide(view, s.indices)) for s in statements if isinstance(s, Load | Store)), default=0)


def _warps_along(view: View, axes: frozenset[Axis], over: frozenset[Axis]) -> int:
    """Counts the warps that share a sum, at most, by the layouts of the loads that it may be computed in, whichever vectors they
    use."""
    most = min(view.program.warps, view.elements(over))
    statements = [line.statement for line in view.lines]
    if any(isinstance(s, Contract) for s in statements):
        return most
    tile = _wide(view, axes)
    loads = {s.indices for s in statements if isinstance(s, Load) and _wide(view, s.indices) == tile}
    found = (_warps_of(view, indices, over, vector) for indices in loads for vector in (1, 2, 4, 8, 16))
    return min(most, max(found, default=most))


def _wide(view: View, axes: Iterable[Axis]) -> frozenset[Axis]:
    return frozenset(a for a in axes if view.program.tile(a) > 1)


def _warps_of(view: View, indices: tuple[Axis, ...], over: frozenset[Axis], vector: int) -> int:
    """Warps along `over`, when neighbours, then lanes, then warps are given to the axes of a load from its minor one on."""
    lanes, warps, found = WARP, view.program.warps, 1
    for axis in reversed(indices):
        rest = max(1, view.program.tile(axis) // vector)
        own_lanes = min(lanes, rest)
        own_warps = min(warps, max(1, rest // own_lanes))
        lanes, warps, vector = lanes // own_lanes, warps // own_warps, 1
        found *= own_warps if axis in over else 1
    return found


def _other_layouts(view: View) -> Iterator[Buffer]:
    """Lists the buffers of layout changes in a kernel without products.

    The widest tile that is loaded or stored gives the layout there; others are laid out anew.
    """
    moves = [(line, s, s.dtype if isinstance(s, Load) else view.stored_type(s))
             for line in view.lines if isinstance(s := line.statement, Load | Store)]  # fmt: skip
    if not moves:
        return
    widest = max(moves, key=lambda move: view.elements(move[1].indices))
    layout: tuple[bool, int] | None = _layout(view, widest[0], widest[1].indices, widest[2])
    rank = len(_wide(view, widest[1].indices))
    if any(len(_wide(view, axes)) > rank for axes in _computed(view)):
        layout = None  # what is loaded is repeated along other axes, in a layout of its own
    for line, s, dtype in moves:
        elements, narrower = view.elements(s.indices), len(_wide(view, s.indices)) < rank
        # results of sums, and values of which a thread has one or none, are shared out in a way of their own
        own = narrower and (isinstance(s, Store) or elements <= WARP * view.program.warps)
        if elements > 1 and (own or _layout(view, line, s.indices, dtype) != layout):
            item = _widest_bytes(view, s) if isinstance(s, Load) else dtypes.itemsize_bytes(dtype)
            yield Buffer(f"{s.tensor}, laid out anew", elements * item, line.number, line.number, True)


def _computed(view: View) -> Iterator[tuple[Axis, ...]]:
    """Lists the axes of what is computed."""
    for line in view.lines:
        match line.statement:
            case Let(_, axes):
                yield axes
            case Reduce(_, axes, _, _, over) | Contract(_, axes, _, _, over):
                yield (*axes, *over)
            case _:
                pass


def _layout(view: View, line: Line, indices: tuple[Axis, ...], dtype: str) -> tuple[bool, int]:
    """Describes how threads share a tile: are its neighbours in memory those of the program's last axis, and how many has a
    thread?"""
    present = [a for a in indices if view.program.tile(a) > 1]
    in_order = [a for a in view.program.order if a in present]
    share = view.elements(indices) // (WARP * view.program.warps)
    # a tensor of one dimension begins where vectors do, and a mask at its end changes no layout
    whole = COPY_BYTES // dtypes.itemsize_bytes(dtype)
    vector = whole if len(indices) == 1 else view.vector(line, indices, dtype)
    return present[-1:] == in_order[-1:], min(vector, max(1, share))
