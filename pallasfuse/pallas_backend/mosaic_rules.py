"""The rules of Mosaic GPU on Hopper: what it can do, as data, and what a tile program asks of it.

Matrix products are `wgmma`: the right side lies in shared memory, the left one there or, computed, in registers.
"""

from collections.abc import Iterator
from math import prod

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.tile_program import (
    Contract,
    Load,
    Loop,
    Reduce,
    Statement,
    Store,
    TileProgram,
    expressions,
)
from pallasfuse.pallas_backend import mosaic_space
from pallasfuse.pallas_backend.mosaic_shape import (
    WARPGROUP_ROWS,
    WARPS_PER_WARPGROUP,
    Shape,
    Unsuited,
    UnsuitedForm,
    accumulated,
    box,
    present,
    shape_of,
)
from pallasfuse.pallas_backend.mosaic_space import SHARED_BYTES, THREADS, resources_of
from pallasfuse.resources.block import Resources
from pallasfuse.resources.exponentials import SMALL_CONDITION, coarse_values

MOST_COLUMNS = 256
COLUMN_MULTIPLE = 8
COPY_ALIGNMENT = 16
"""Bytes: of every stride of an array that the copy engine reads or writes, and of a tile's minor dimension."""
SWIZZLES = (128, 64, 32, 16)
"""Bytes; a product takes as many contracted elements together."""
FLOATS = dtypes.HALF | {"float32"}
OPERATIONS = frozenset({
    "add", "sub", "mul", "div", "max", "min", "neg", "abs", "square", "sqrt", "rsqrt", "exp", "exp2", "log", "tanh", "logistic",
    "sin", "cos", "integer_pow", "round_even", "sign", "select", "convert", "eq", "ne", "lt", "le", "gt", "ge", "and", "or",
})  # fmt: skip
ROUGH = frozenset({"tanh"})
"""Operations whose approximate instructions are right to 11 bits."""
ROUGH_CONDITION = "tanh of a half-precision product is right to 11 bits, as the numbers multiplied are"
CONTRACTED_CONDITION = "a product is not rounded before a maximum of such products is subtracted from it"
INEXACT = frozenset({"log"})
"""Operations whose approximate instructions are right to 22 bits after the point."""
UNRELIABLE = frozenset({"sin", "cos"})
"""Operations whose approximate instructions are right near zero only."""
INTEGER_OPERATIONS = frozenset({"add", "sub", "mul", "div", "max", "min", "neg", "abs", "convert", "select"})
REDUCERS = frozenset({"sum", "max", "min"})
REGISTERS_PER_THREAD = 232


def swizzle(row_bytes: int) -> int:
    """The widest swizzle of a tile whose rows have so many bytes."""
    return next(s for s in SWIZZLES if row_bytes % s == 0)


def problem(program: TileProgram) -> str | None:
    """Returns why Mosaic GPU cannot run the program; None if it can."""
    shape = examine(program)
    return shape if isinstance(shape, str) else None


def misshapen(program: TileProgram) -> str | None:
    """Returns why Mosaic GPU cannot run a program, as far as loops, loads and tiles tell, which no rewrite changes."""
    try:
        _shape(program)
    except Unsuited as reason:
        return str(reason)
    return None


def is_misformed(program: TileProgram) -> bool:
    """Would Mosaic GPU refuse the program with tiles of other sizes, too, that have several elements along the same axes?"""
    try:
        _examined(program)
    except UnsuitedForm:
        return True
    except Unsuited:
        return False
    return False


def takes_rows(tile: int, warps: int) -> bool:
    """Does a tile of so many rows have a warpgroup of its own for each part of it?"""
    return tile == warps // WARPS_PER_WARPGROUP * WARPGROUP_ROWS


def _shape(program: TileProgram) -> Shape:
    shape = shape_of(program)
    _check_copies(program, shape)
    return shape


def examine(program: TileProgram) -> Shape | str:
    """The program's shape, or the reason why Mosaic GPU cannot run it."""
    try:
        shape = _examined(program)
    except Unsuited as reason:
        return str(reason)
    other = None if program.instead is None else examine(program.instead.program)
    return other if isinstance(other, str) else shape


def _examined(program: TileProgram) -> Shape:
    shape = _shape(program)
    for body in (shape.before, *(g.body for g in shape.segments), shape.after):
        for statement in body:
            _check(program, shape, statement)
    _check_carries(program, shape)
    _check_space(program, shape)
    return shape


def _check_copies(program: TileProgram, shape: Shape) -> None:
    """The copy engine wants contiguous rows, aligned strides and boxes of whole sixteen bytes."""
    loads = (*shape.streamed, *shape.resident, *shape.sliced)
    loaded, stored = FLOATS | {"bool", "int32"}, FLOATS | {"int32"}
    moves = [(s.tensor, s.indices, loaded, box(program, shape, s)) for s in loads]
    sizes = [tuple(program.tile(a) for a in present(program, s.indices)) for s in shape.stores]
    moves += [(s.tensor, s.indices, stored, size) for s, size in zip(shape.stores, sizes, strict=True)]
    tensors = {t.name: t for t in (*program.inputs, *program.outputs)}
    for name, indices, allowed, size in moves:
        tensor, kept = tensors[name], present(program, indices)
        if tensor.dtype not in allowed:
            raise Unsuited(f"{name} is {tensor.dtype}")
        item = dtypes.itemsize_bytes(tensor.dtype)
        if not 1 <= len(kept) <= 2:
            raise UnsuitedForm(f"a tile of {name} has {len(kept)} dimensions")
        if indices[-1] != kept[-1]:
            raise UnsuitedForm(f"a tile of {name} is not contiguous: {indices[-1]} is not part of it")
        if size[-1] * item % COPY_ALIGNMENT:
            raise Unsuited(f"a tile of {name} has rows of {size[-1] * item} bytes, no multiple of {COPY_ALIGNMENT}")
        stride = item
        for axis in reversed(indices[1:]):
            # arrays of vectors are padded to whole tiles, and so is what is loaded, for the price of a copy
            padded = kept == (axis,) or (allowed is loaded and axis in kept)
            stride *= -(-axis.extent // program.tile(axis)) * program.tile(axis) if padded else axis.extent
            if stride % COPY_ALIGNMENT:
                raise Unsuited(f"{name} has a stride of {stride} bytes, no multiple of {COPY_ALIGNMENT}")


def _check(program: TileProgram, shape: Shape, statement: Statement) -> None:
    loads = {s.name: s for s in (*shape.streamed, *shape.resident, *shape.sliced)}
    for root in expressions(statement):
        in_place = isinstance(statement, Contract) and isinstance(root, Read) and root.tensor in loads
        for node in postorder(root):
            if not in_place:
                _check_node(program, shape, loads, node)
    match statement:
        case Load(_, tensor, indices) if not present(program, indices):
            if statement.dtype not in FLOATS | {"int32"}:
                raise Unsuited(f"{tensor} is {statement.dtype}")
        case Reduce(name, axes, reducer, value, over):
            counts = value.dtype == "int32" and reducer.name in ("max", "min")
            if reducer.name not in REDUCERS or not (value.dtype == "float32" or counts):
                raise Unsuited(f"{name} is a {reducer} of {value.dtype}")
            if present(program, axes) != (shape.rows,) or len(present(program, over)) != 1:
                raise UnsuitedForm(
                    f"{name} reduces a tile to {[a.name for a in present(program, axes)]}, not to its rows"
                )
        case Contract():
            _check_product(program, shape, loads, statement)
        case Store(tensor, indices, _):
            kept = present(program, indices)
            if kept[0] != shape.rows or kept != _canonical(program, kept):
                raise UnsuitedForm(f"a tile of {tensor} is not stored by rows")


def _check_carries(program: TileProgram, shape: Shape) -> None:
    """Carried values stay in registers, by rows. One of each row may have half precision: a maximum of such scores has."""
    for carry in shape.loop.carries:
        kept = present(program, carry.axes)
        allowed = FLOATS | {"int32"} if kept == (shape.rows,) else {"float32"}
        if carry.dtype not in allowed or not kept or kept[0] != shape.rows:
            raise Unsuited(f"{carry.name} is carried as {carry.dtype} over {[a.name for a in kept]}")


def _canonical(program: TileProgram, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(a for a in program.order if a in axes)


def _check_node(program: TileProgram, shape: Shape, loads: dict[str, Load], node: Expr) -> None:
    kept = present(program, _canonical(program, tuple(node.axes)))
    if len(kept) > 2 or (len(kept) == 2 and kept[0] != shape.rows):
        raise UnsuitedForm(f"{node} is a tile over {[a.name for a in kept]}")
    match node:
        case Apply(op, _, dtype):
            allowed = OPERATIONS if dtype in FLOATS or dtype == "bool" else INTEGER_OPERATIONS
            if op not in allowed or dtype not in FLOATS | {"bool", "int32"}:
                raise Unsuited(f"{op} of {dtype} has no instruction")
        case Read(tensor) if tensor in loads:
            own = present(program, loads[tensor].indices)
            if own != _canonical(program, own):
                raise UnsuitedForm(f"{loads[tensor].tensor} would be transposed in registers")
        case Index(_, dtype) | Const(_, dtype) if dtype not in FLOATS | {"int32", "bool"}:
            raise Unsuited(f"{node} is {dtype}")


def _check_product(program: TileProgram, shape: Shape, loads: dict[str, Load], s: Contract) -> None:
    over = present(program, s.over)
    kept = [tuple(a for a in present(program, tuple(e.axes)) if a not in over) for e in (s.lhs, s.rhs)]
    if len(over) != 1 or kept[0] != (shape.rows,) or len(kept[1]) != 1:
        raise Unsuited(f"{s.name} is no product of rows and columns")
    (contracted,), (columns,) = over, kept[1]
    if s.lhs.dtype not in dtypes.HALF or s.rhs.dtype != s.lhs.dtype or s.dtype != "float32":
        raise Unsuited(f"{s.name} multiplies {s.lhs.dtype} and {s.rhs.dtype}")
    if not (isinstance(s.rhs, Read) and s.rhs.tensor in loads):
        raise Unsuited(f"the right side of {s.name} is computed: it does not lie in shared memory")
    right = loads[s.rhs.tensor]
    size = dict(zip(present(program, right.indices), box(program, shape, right), strict=True))
    n, k = size[columns], size[contracted]
    item = dtypes.itemsize_bytes(s.rhs.dtype)
    width = swizzle(list(size.values())[-1] * item)
    if isinstance(s.lhs, Read) and s.lhs.tensor in loads:  # both lie in shared memory, where Pallas wants one layout
        left = swizzle(box(program, shape, loads[s.lhs.tensor])[-1] * item)
        if left != width:
            raise Unsuited(f"the sides of {s.name} lie in shared memory with swizzles of {left} and {width} bytes")
    together = width // item
    if n % COLUMN_MULTIPLE or n > MOST_COLUMNS or k % together:
        raise Unsuited(f"{s.name} has {n} columns over {k} elements, {together} of them together: no shape of wgmma")


def _check_space(program: TileProgram, shape: Shape) -> None:
    used = mosaic_space.shared_bytes(program, shape)
    if used > SHARED_BYTES:
        raise Unsuited(f"its buffers take {used} bytes of shared memory, of {SHARED_BYTES}")
    needed = registers(program, shape)
    if needed > REGISTERS_PER_THREAD:
        raise Unsuited(f"its tiles take about {needed} registers, of {REGISTERS_PER_THREAD}")


def may_approximate(program: TileProgram) -> bool:
    """Says whether approximate instructions lose nothing that counts.

    Those of `ROUGH` are as right as a half-precision number: they may serve a loop over coarse values if all results are rounded to
    half precision. Those of `INEXACT` may serve coarse values, but nothing that is computed from them on the way.
    """
    coarse = coarse_values(program)
    rounded = all(t.dtype in dtypes.HALF for t in program.outputs)

    def is_coarse(node: Expr) -> bool:
        return isinstance(node, Read) and node.tensor in coarse

    def is_as_coarse(root: Expr) -> bool:
        reads = [n for n in postorder(root) if isinstance(n, Read)]
        return any(map(is_coarse, reads)) and all(is_coarse(n) or n.dtype in dtypes.HALF for n in reads)

    def fits(node: Apply, *, in_loop: bool) -> bool:
        if node.op in ROUGH:
            return in_loop and rounded and is_as_coarse(node.args[0])
        if node.op in INEXACT:
            (x,) = node.args
            return is_coarse(x.args[0] if isinstance(x, Apply) and x.op == "abs" else x)
        return node.op not in UNRELIABLE

    return all(fits(node, in_loop=in_loop) for node, in_loop in _applied(program.body))


def conditions(program: TileProgram) -> tuple[str, ...]:
    """Lists the ways in which the kernel rounds otherwise than the program."""
    contracted = (CONTRACTED_CONDITION,) if program.instead is not None else ()
    operations = {node.op for node, _ in _applied(program.body)}
    if not may_approximate(program):
        return contracted
    return (
        *contracted,
        *((SMALL_CONDITION,) if "exp2" in operations else ()),
        *((ROUGH_CONDITION,) if operations & ROUGH else ()),
    )


def _applied(body: tuple[Statement, ...], *, in_loop: bool = False) -> Iterator[tuple[Apply, bool]]:
    """Every operation, and whether it is inside a loop."""
    for s in body:
        if isinstance(s, Loop):
            for segment in s.segments:
                yield from _applied(segment.body, in_loop=True)
        for root in expressions(s):
            yield from ((n, in_loop) for n in postorder(root) if isinstance(n, Apply))


def resources(program: TileProgram) -> Resources | str:
    """Returns exactly what one block takes, or why Mosaic GPU cannot run the program."""
    shape = examine(program)
    if isinstance(shape, str):
        return shape
    barriers = mosaic_space.barrier_count(mosaic_space.slots(program, shape), shape.warpgroups)
    threads = THREADS * (shape.warpgroups + 1)  # the last one copies
    return resources_of(mosaic_space.allocations(program, shape), barriers, threads)


def registers(program: TileProgram, shape: Shape) -> int:
    """A low estimate per thread: carried tiles, and the widest tile that is computed twice (as float32, and for a product)."""
    in_place = accumulated(shape, shape.body)
    carried = sum(prod(WARPGROUP_ROWS if a == shape.rows else program.tile(a) for a in present(program, c.axes))
                  for c in shape.loop.carries)  # fmt: skip
    wide = max(
        (program.tile(a) for s in shape.body if isinstance(s, Contract) for a in present(program, s.axes)
         if a != shape.rows and s.name not in in_place),
        default=0,
    )  # fmt: skip
    return (carried + WARPGROUP_ROWS * wide * 3 // 2) // THREADS
