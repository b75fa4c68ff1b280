"""Operations without a nest that a loop computes element by element: slices, concatenations, paddings, bits of numbers.

On GPUs, XLA computes them inside of what reads them, as it does maps. For the price each becomes a map, whose body says how much of
which tensor it reads, and not from which places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from math import gcd

from pallasfuse.first_time import Recent
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import (
    Apply,
    Const,
    Expr,
    Read,
    apply,
    const,
    index,
    positions_in,
    postorder,
    read,
    reads_in,
    select,
)
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.plain_work import Windows
from pallasfuse.ir.tensors import Tensor
from pallasfuse.price.xla_reductions import is_product, is_short

MOST_REPEATED = 1 << 21
"""The elements that kernels compute again, beyond which one kernel more, of a microsecond, is cheaper: an estimate,
not measured."""
FEW = 8
"""The factor by which an operation makes less than it reads, for what it reads to be computed inside of it."""
_ONE = Axis("one", 1)
"""The axis of an operand of which a result reads one position."""


def _found(program: LoopProgram) -> LoopProgram:
    known = {d.name: d for d in program.definitions()}
    nests = [_as_map(n, known, at) if isinstance(n, External) else n for at, n in enumerate(program.nests)]
    return replace(program, nests=tuple(nests))


moves_as_maps = Recent(_found)
"""Returns the program with maps for the operations that move elements, and for those that compute them one by one."""


def computed_from(tensor: str, maps: Mapping[str, Nest]) -> frozenset[str]:
    """Returns a tensor, and all that it is computed from through maps."""
    found, waiting = {tensor}, [tensor]
    while waiting:
        source = maps.get(waiting.pop())
        if source is not None and not source.is_reduction:
            waiting += source.reads - found
            found |= source.reads
    return frozenset(found)


def _read_otherwise(program: LoopProgram) -> frozenset[str]:
    dimensions = {n.name: len(n.axes) for n in program.nests if isinstance(n, Nest)}
    return frozenset(
        e.tensor for n in program.nests if isinstance(n, Nest) for e in reads_in(n.body)
        if dimensions.get(e.tensor, len(e.indices)) != len(e.indices)
    )  # fmt: skip


read_otherwise = Recent(_read_otherwise)
"""Returns the tensors that some map reads with other dimensions than they have: they are in memory."""


def _joins(program: LoopProgram) -> frozenset[str]:
    """Finds the joins that are joins in XLA, too: where one of exactly two arrays repeats a single value, XLA pads the other."""
    sizes = {d.name: volume(d.axes) for d in program.definitions()}
    repeated: set[str] = set()
    """Arrays of several elements that are all the same."""
    found: set[str] = set()
    for node in program.nests:
        if isinstance(node, Nest):
            of_one = not positions_in(node.body)
            if of_one and not node.is_reduction and all(t in repeated or sizes[t] == 1 for t in node.reads):
                repeated |= {node.name} if sizes[node.name] > 1 else set()
        elif node.form == "join":
            two = len(node.operands) == 2 and sum(sizes[t] for t in node.operands) == sizes[node.name]
            if not (two and not repeated.isdisjoint(node.operands)):
                found.add(node.name)
    return frozenset(found)


def _ended_in_updates(program: LoopProgram) -> frozenset[str]:
    """Finds the reductions whose results only updates read, through maps or as they are: XLA's updates compute them, a thread
    each. (18 updates by rows of 8 to 2,048 elements, one of each reduction, compiled for an H100: all of them.)"""
    ended: set[str] = set()
    read_by_others = {*program.outputs}
    for node in reversed(program.nests):
        inside = isinstance(node, External) and node.form == "update"
        if node.name not in read_by_others and isinstance(node, Nest) and not is_product(node):
            if node.is_reduction:
                ended.add(node.name)
            else:
                inside = True
        if not inside:
            read_by_others |= node.reads
    return frozenset(ended)


def _stored_joins(program: LoopProgram) -> frozenset[str]:
    joins, ended = _joins(program), _ended_in_updates(program)
    carried: set[str] = set()
    stored: set[str] = set()
    for node in program.nests:
        joined = sorted((carried - stored) & node.reads)
        if isinstance(node, External):
            if node.name in joins and volume(node.axes) > MOST_REPEATED:
                carried.add(node.name)
        elif node.is_reduction and not is_short(node):
            stored |= set(joined) if node.name not in ended else set()
        elif joined and not node.is_reduction:
            carried.add(node.name)
    return frozenset(stored)


stored_joins = Recent(_stored_joins)
"""Returns the large joins, and the maps of them, that are written to memory: a kernel computes joins and maps of them, but does not
reduce them, unless a reduction has so few elements that a thread computes it, or ends in an update. Where they are joined again, or
several kernels read them, each computes what it needs. (12 functions of arrays and of their joins, compiled for an H100.)"""


def _threads_of_joins(program: LoopProgram) -> dict[str, float]:
    known = {d.name: d for d in program.definitions()}
    joins, stored, found = _joins(program), stored_joins(program), dict[str, float]()
    for node in program.nests:
        if isinstance(node, External):
            if node.name in joins:
                found[node.name] = _threads(node, known)
        elif not node.is_reduction:
            carried = max((found.get(t, 0.0) for t in node.reads if t not in stored), default=0.0)
            if carried:
                found[node.name] = carried
    return found


threads_of_joins = Recent(_threads_of_joins)
"""Returns the threads of the kernels that write joins, or maps of them, by the names of these: as many as the largest join has."""
_MOST_AT_ONCE = 8
"""The elements of each operand that one thread of a join moves, at most."""


def _threads(join: External, known: dict[str, Tensor | Nest | External]) -> float:
    """XLA's kernel has a thread for each element of the largest operand, or for so many as divide the lengths of all of them.

    Measured on an H100 for 19 joins of two and three operands.
    """
    operands = [known[t].axes for t in join.operands]
    largest = max(map(volume, operands), default=0)
    if any(len(axes) != len(join.axes) for axes in operands):  # there are some of length 1
        return float(largest)
    lengths = (
        a.extent for axes in operands for a, r in zip(axes, join.axes, strict=True) if a.extent != r.extent
    )  # fmt: skip
    return largest / min(max(1, gcd(*lengths)), _MOST_AT_ONCE)


def _as_map(node: External, known: dict[str, Tensor | Nest | External], at: int) -> Nest | External:
    """The map that stands for an operation, or the operation. at: its place in the program, by which it differs from others that
    read as much of the same tensors, from other places."""
    if node.moves_nothing or not (node.form in ("selection", "elements", "join") or _is_window(node, known)):
        return node
    operands = [known[t] for t in node.operands]
    taken = (
        operands[:1]
        if node.form in ("selection", "whole")
        else [d for d in operands if d.dtype == node.dtype] or operands[:1]
    )
    if not taken or len({d.dtype for d in taken}) > 1:
        return node
    largest = max(taken, key=lambda d: volume(d.axes))
    few = FEW * volume(node.axes) <= volume(largest.axes)
    reads: list[Expr] = [read(d.name, _places(d.axes, node.axes, fills=d is largest, few=few), d.dtype) for d in taken]
    # an operation: what is moved is no operand that a library could read where it lies
    body: Expr = reduce(lambda x, y: select(const(True, "bool"), y, x), reads, reads[0])
    for axis in frozenset(node.axes) - body.axes:  # each position along it has another operand
        body = select(apply("ge", index(axis), const(0, "int32")), body, body)
    place = apply("gt" if node.form == "selection" else "ge", const(at, "int32"), _NO_PLACE)
    body = select(place, body, body)
    for positions in (d for d in operands if d not in taken):
        one = read(positions.name, _places(positions.axes, node.axes, fills=False, few=True), positions.dtype)
        body = select(apply("ge", one, const(0, positions.dtype)), body, body)
    return Nest(node.name, node.axes, body, node.dtype, source=node.source)


_NO_PLACE = const(-1, "int32")
"""The place of an operation is compared with it, in the condition by which its map differs from others: hardly any program compares
two numbers that it knows."""
_MOST_WAYS = 4000
"""The search for different parts gives up after so many pairs of an expression and the operations that take it: it would take
longer than it is worth, and no parts are told apart then."""


def parts_taken(bodies: tuple[Expr, ...]) -> Mapping[tuple[str, tuple[Axis, ...]], int]:
    """Returns how many different parts of a tensor some bodies read along the same axes, where there are several."""
    return {place: len(parts) for place, parts in (_parts(bodies) or {}).items() if len(parts) > 1}


def takers_of(bodies: tuple[Expr, ...], place: tuple[str, tuple[Axis, ...]]) -> frozenset[int] | None:
    """Returns the operations, by their numbers in the program, that take the parts of a tensor which some bodies read along some
    axes: of each part the first and the last of them. None where the search for them gave up."""
    parts = _parts(bodies)
    if parts is None:
        return None
    conditions = {c for part in parts.get(place, ()) for c in part}
    numbers = (c.args[0].value for c in conditions if isinstance(c, Apply) and isinstance(c.args[0], Const))
    return frozenset(int(n) for n in numbers)


@lru_cache(1 << 12)
def moved_in(bodies: tuple[Expr, ...]) -> frozenset[int]:
    """Returns the operations that move elements in some bodies, by their numbers in the program."""
    selects = (e.args[0] for body in bodies for e in postorder(body) if isinstance(e, Apply) and e.op == "select")
    numbers = (c.args[0] for c in selects if isinstance(c, Apply) and c.args[-1] == _NO_PLACE)
    return frozenset(int(n.value) for n in numbers if isinstance(n, Const))


@lru_cache(1 << 12)
def _parts(bodies: tuple[Expr, ...]) -> Mapping[tuple[str, tuple[Axis, ...]], set[tuple[Expr, ...]]] | None:
    """Returns the different parts of tensors that some bodies read, by tensors and axes; None where the search gives up.

    A part of a part is told apart by the operation that took it from the tensor, and by the one that took it last.
    """
    found: dict[tuple[str, tuple[Axis, ...]], set[tuple[Expr, ...]]] = {}
    waiting: list[tuple[Expr, tuple[Expr, ...]]] = [(body, ()) for body in bodies]
    seen = set(waiting)
    while waiting and len(seen) <= _MOST_WAYS:
        node, taken = waiting.pop()
        if isinstance(node, Read) and taken:
            found.setdefault((node.tensor, node.indices), set()).add(taken)
        inner = (*taken[:1], node.args[0]) if _takes_part(node) else taken
        fresh = {(arg, inner) for arg in node.args} - seen
        seen |= fresh
        waiting += fresh
    return None if waiting else found


def _takes_part(node: Expr) -> bool:
    if not isinstance(node, Apply) or node.op != "select":
        return False
    place = node.args[0]
    return (
        isinstance(place, Apply)
        and place.op == "gt"
        and isinstance(place.args[0], Const)
        and place.args[1] == _NO_PLACE
    )


_MOST_IN_A_WINDOW = 64
"""Windows of more elements than these are kernels of their own: an estimate, not measured."""


def _is_window(node: External, known: dict[str, Tensor | Nest | External]) -> bool:
    """Does an operation reduce a few elements around each of its results?"""
    work = node.work
    return isinstance(work, Windows) and work.window <= _MOST_IN_A_WINDOW and (
        len(known[node.operands[0]].axes) == len(node.axes)
    )  # fmt: skip


def _places(axes: Sequence[Axis], results: Sequence[Axis], *, fills: bool, few: bool) -> tuple[Axis, ...]:
    """The axes of a result along which an operand is read, one for each of its dimensions, in place of its own.

    Those of the result as they are, where they are no dimensions of the operand: as much of it is read, and it lies in memory.
    fills: where it is shorter than the result, it stands for all others that are joined to it as well. few: so little of it is
    taken that it need not be in memory.
    """
    if len(axes) == len(results):
        return tuple(r if r.extent <= a.extent or fills else _ONE for a, r in zip(axes, results, strict=True))
    same: dict[Axis, Axis] = {}
    left = list(results)
    for axis in reversed(axes):
        found = next((r for r in reversed(left) if r.extent == axis.extent), None)
        if found is not None:
            same[axis] = found
            left = left[: left.index(found)]
    joins = len(axes) < len(results) and len(same) == len(axes)  # along a new axis
    if few or joins or len(same) == len(results):
        return tuple(same.get(a, _ONE) for a in axes)
    beside = _beside_one(axes, results)
    if beside is not None:
        return beside
    merged = _merged(axes, results, fills=fills) if len(axes) > len(results) else None
    return tuple(results) if merged is None else merged


def _beside_one(axes: Sequence[Axis], results: Sequence[Axis]) -> tuple[Axis, ...] | None:
    """Returns the axes of a result but the one along which operands are stacked, where all others are the operand's, some of which
    have become several neighbouring ones; None where there is no such axis."""
    for at in range(len(results)):
        rest = (*results[:at], *results[at + 1 :])
        if volume(rest) == volume(axes) and len(_in_order(rest, axes)) == len(axes):
            return rest
    return None


def _merged(axes: Sequence[Axis], results: Sequence[Axis], *, fills: bool) -> tuple[Axis, ...] | None:
    """Returns the axes along which an operand is read of which the result has neighbouring ones as one, or None if it has not.

    One dimension of the result may have another length than those of the operand: it is cut, padded, or joined. The longest of
    several stands for all: of a tensor that has only the others too little is counted. (Ten joins, slices and paddings of reshaped
    maps, compiled for an H100: one kernel each, without memory for what is reshaped.)
    """
    for at in range(len(results)):
        first, last = _in_order(axes, results[:at]), _in_order(axes[::-1], results[:at:-1])
        middle = axes[sum(map(len, first)) : len(axes) - sum(map(len, last))]
        if len(first) + len(last) < len(results) - 1 or not middle:
            continue
        places: list[Axis] = []
        for group, result in zip((*first, middle, *(g[::-1] for g in last[::-1])), results, strict=True):
            longest = max(group, key=lambda a: a.extent) if fills or volume(group) >= result.extent else None
            places += [result if a == longest else _ONE for a in group]
        return tuple(places)
    return None


def _in_order(axes: Sequence[Axis], results: Sequence[Axis]) -> list[Sequence[Axis]]:
    """Groups the dimensions of an operand by the result's dimensions that they are, from the first, as long as there are such."""
    found: list[Sequence[Axis]] = []
    at = 0
    for result in results:
        end = at + 1
        while end < len(axes) and volume(axes[at:end]) < result.extent:
            end += 1
        if at >= len(axes) or volume(axes[at:end]) != result.extent:
            break
        found.append(axes[at:end])
        at = end
    return found
