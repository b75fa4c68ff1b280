"""Matrix products as XLA computes them: which sums are products, how a library reads their operands, what is computed inside."""

from collections.abc import Mapping, Sequence, Set
from functools import lru_cache

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.loop_program import Nest
from pallasfuse.price.xla_forms import Copy, LibraryProduct, Place, Row
from pallasfuse.price.xla_habits import Habits


def without_casts(expr: Expr) -> Expr:
    """The expression without the casts around it that lose nothing."""
    while isinstance(expr, Apply) and expr.op == "convert" and dtypes.is_exact_cast(expr.args[0].dtype, expr.dtype):
        expr = expr.args[0]
    return expr


@lru_cache(1 << 10)
def places(root: Expr) -> tuple[tuple[Place, float], ...]:
    """Returns the places that an expression reads, with the bytes of each."""
    return tuple(
        ((n.tensor, n.indices), float(volume(frozenset(n.indices)) * dtypes.itemsize_bytes(n.dtype)))
        for n in postorder(root)
        if isinstance(n, Read)
    )


def prologues(
    node: Nest, operands: tuple[Expr, Expr], given: frozenset[str], habits: Habits
) -> frozenset[Expr]:  # fmt: skip
    """The operands of one product of few rows that XLA computes inside of it: from one tensor of their own shape, and inputs of the
    program along neighbouring dimensions, which have no more bytes than the operand or are the program's own. In batches, from
    one tensor only; and none that is padded or masked by position. (44 products, compiled for an H100.)"""
    found = set()
    for own, other in (operands, operands[::-1]):
        core = without_casts(own)
        rows = volume(other.axes - own.axes - frozenset(node.reduced))
        if isinstance(core, Read) or rows > habits.fused_rows:
            continue
        shapes = [place for place, _ in places(core)]
        whole = [axes for _, axes in shapes if frozenset(axes) == core.axes]
        repeated = [place for place in shapes if frozenset(place[1]) != core.axes]
        batches = own.axes & other.axes - frozenset(node.reduced)
        if len(whole) != 1 or (repeated and batches) or _computes_along(core) or _depends_on_position(core):
            continue
        if not all(t in given and _are_neighbours(axes, whole[0]) for t, axes in repeated if volume(axes) > 1):
            continue
        size = volume(core.axes) * dtypes.itemsize_bytes(core.dtype)
        if sum(size for _, size in places(core)) <= size + _TOLERATED_BYTES or core.tensors <= given:
            found.add(core)
    return frozenset(found)


def _computes_along(operand: Expr) -> bool:
    """Is something computed along some of an operand's axes only, before it is repeated?"""
    return any(isinstance(n, Apply) and volume(n.axes) > 1 and n.axes < operand.axes for n in postorder(operand))


def _depends_on_position(operand: Expr) -> bool:
    """Is it known of a position alone which of several values stands there, as behind a row that is made longer?"""
    return any(isinstance(n, Apply) and n.op == "select" and not n.args[0].tensors for n in postorder(operand))


def _are_neighbours(axes: Sequence[Axis], order: Sequence[Axis]) -> bool:
    """Do axes follow one another in an order, but for those of one position? Then they may be one dimension."""
    places = [n for n, a in enumerate(x for x in order if x.extent > 1) if a in axes]
    return not places or places[-1] - places[0] < len(places)


_TOLERATED_BYTES = 1024
"""The bytes that may be read beyond those of an operand, in its place."""


def library_product(
    node: Nest, operands: tuple[Expr, Expr], layouts: tuple[Expr, Expr], stored: Mapping[Expr, str], prologues: Set[Expr],
    given: frozenset[str], as_wanted: frozenset[str], habits: Habits,
) -> LibraryProduct:  # fmt: skip
    """The call of a library. layouts: the operands as the program has them; stored: the names of those that are computed for
    it; prologues: those that are computed in it; given: the program's inputs, which a library reads in either order;
    as_wanted: what lies in memory as its only reader wants it, on a GPU."""
    over = frozenset(node.reduced)
    lhs, rhs = operands
    batch = lhs.axes & rhs.axes - over
    rows, columns = lhs.axes - rhs.axes - over, rhs.axes - lhs.axes - over
    cores = [without_casts(o) for o in operands]
    inside = [c in prologues and c not in stored for c in cores]
    names = [
        c.tensor if isinstance(c, Read) else max(places(c), key=lambda place: place[1])[0][0] if read else stored[c]
        for c, read in zip(cores, inside, strict=True)
    ]
    bytes_of = [
        sum(size for _, size in places(c)) if read else float(volume(c.axes) * dtypes.itemsize_bytes(c.dtype))
        for c, read in zip(cores, inside, strict=True)
    ]
    if not habits.fuses_moves or names[0] == names[1]:  # sides of one tensor may want two orders
        as_wanted = frozenset()
    # a copy of the left operand ends with the contracted axes, and that of the right one with its own
    copies = [
        Copy(2.0 * moved, ends_in(c.indices, last), name)
        for c, own, last, name, moved in zip(cores, (rows, columns), (over, columns), names, bytes_of, strict=True)
        if isinstance(c, Read) and c.tensor not in as_wanted and not _is_matrix(c.indices, batch, own, over, habits)
    ]
    multiplied = _operand_type(node, layouts, cores)
    rows_of = [_row(as_read(c), over) for c in cores]
    if habits.sums_neighbours and node.dtype == "int32" and multiplied == "int8":
        others = volume(columns), volume(rows)
        for n, (row, name, moved, reads) in enumerate(zip(rows_of, names, bytes_of, others, strict=True)):
            # what is computed is laid out as it is wanted; for few rows an operand is turned as it is read
            if not row.summed and name in given and reads > habits.fused_rows:
                copies.append(Copy(2.0 * moved, in_rows=False, tensor=name))
                rows_of[n] = Row(volume(over), summed=True)
    turned = tuple(
        Copy(2.0 * moved, ends_in(c.indices, last), name)
        for c, own, last, name, moved in zip(
            map(without_casts, layouts), (rows, columns), (over, columns), names, bytes_of, strict=True
        )
        if name in stored.values() and isinstance(c, Read) and not _is_matrix(c.indices, batch, own, over, habits)
    )
    right = without_casts(layouts[1])
    reshaped = node.unit_batch and not habits.strides_batches
    if reshaped and names[1] not in given and isinstance(right, Read) and right.indices[-1] in over:
        copies.append(Copy(2.0 * bytes_of[1], in_rows=False, tensor=names[1]))
    written = float(volume(node.axes) * dtypes.itemsize_bytes(node.dtype))
    precise = node.precision is not None and node.precision.lower() in ("highest", "float32")
    return LibraryProduct(
        volume(batch), volume(rows), volume(columns), volume(over), multiplied, precise, sum(bytes_of), written, tuple(copies),
        node.name, tuple(zip(names, bytes_of, strict=True)), not copies and _lies_before(cores[0], over, rows),
        isinstance(right, Read) and right.tensor not in {c.tensor for c in copies} and _lies_before(right, columns, over),
        reshaped, turned, tuple(rows_of),
    )  # fmt: skip


def _operand_type(node: Nest, layouts: tuple[Expr, Expr], cores: Sequence[Expr]) -> str:
    """The type of the elements that a library multiplies.

    Bytes are multiplied as they are where the program itself gives them to the product and sums them as int32; other integers are
    not, whatever they are cast from.
    """
    as_written = [without_casts(x).dtype for x in layouts]
    if not dtypes.is_integer(node.dtype):
        floats = [c.dtype if dtypes.is_float(c.dtype) else w for c, w in zip(cores, as_written, strict=True)]
        return max(floats, key=dtypes.itemsize_bytes)
    return "int8" if set(as_written) == {"int8"} and node.dtype == "int32" else "int32"


def as_read(operand: Expr) -> tuple[Axis, ...]:
    """The axes of an operand in the order in which most of what it is computed from lies in memory."""
    (_, first), _ = max(places(operand), key=lambda place: place[1], default=(("", ()), 0.0))
    return (*(a for a in first if a in operand.axes), *sorted(operand.axes - frozenset(first)))


def _row(order: Sequence[Axis], over: frozenset[Axis]) -> Row:
    """The last run of neighbouring axes in an order that all are contracted, or all are not."""
    last: list[Axis] = []
    for axis in reversed([a for a in order if a.extent > 1]):
        if last and (axis in over) != (last[0] in over):
            break
        last.append(axis)
    return Row(volume(last), summed=bool(last) and last[0] in over)


def _is_matrix(
    indices: Sequence[Axis], batch: frozenset[Axis], own: frozenset[Axis], over: frozenset[Axis], habits: Habits
) -> bool:  # fmt: skip
    """Can a library read the tensor as a batch of matrices? Its own axes, the contracted ones and the batch must each be
    neighbours in memory, and the last dimension no batch; on some platforms the batch comes first."""
    kinds = ["batch" if a in batch else "own" if a in own else "over" for a in indices if a.extent > 1]
    runs = [k for n, k in enumerate(kinds) if n == 0 or kinds[n - 1] != k]
    if not habits.strides_batches and "batch" in runs[1:]:
        return False
    return len(runs) == len(set(runs)) and (not runs or runs[-1] != "batch")


def ends_in(indices: Sequence[Axis], axes: frozenset[Axis]) -> bool:
    """Is the last dimension, but for those of one position, along one of these axes?"""
    return next((a in axes for a in reversed(indices) if a.extent > 1), True)


def _lies_before(operand: Expr, first: frozenset[Axis], last: frozenset[Axis]) -> bool:
    """Does an operand in memory begin with axes of `first` and end with those of `last`, others aside?"""
    if not isinstance(operand, Read):
        return False
    kinds = [a in last for a in operand.indices if a.extent > 1 and (a in first or a in last)]
    return bool(kinds) and kinds[-1] and not kinds[0]
