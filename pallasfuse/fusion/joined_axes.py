"""Neighbouring axes that a program never tells apart are one axis.

Rows and columns of an image, samples and positions of a batch: where all arrays have them side by side in the same order, all
reductions sum over both or neither, and nothing asks for a position along one of them, a loop over their product visits the same
elements in the same order. It can be tiled as one axis, where the tile of one of two had to hold the whole other one.

Arrays of a kernel are reshaped to the axes of its tensors, which moves nothing.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count, pairwise

from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Expr, Index, Read, Renamings, postorder, read, reads_in, rebuild, with_args
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, verify
from pallasfuse.ir.tensors import Tensor

Pair = tuple[Axis, Axis]


@dataclass(frozen=True, slots=True)
class Join:
    """Pairs of neighbouring axes that are made one, after some nests were left to XLA for that. All by name.

    `left`: these nests. `pair`: the axes that they would keep apart; empty where there are none. `pairs`: all that go together.
    """

    left: frozenset[str]
    pair: frozenset[str]
    pairs: frozenset[tuple[str, str]]


def with_joined_axes(program: LoopProgram) -> LoopProgram | None:
    """Returns the program with neighbouring axes as one that some reduction sums over together; None where there are none."""
    joins = joins_of(program)
    return verify(joined(program, joins)) if joins else None


def joins_of(program: LoopProgram) -> list[Join]:
    """Finds the axes of a program that are one, step by step."""
    found: list[Join] = []
    while True:
        pairs = _together(program)
        join = next(_joins_after_leaving(program), None) if pairs is None else _named(frozenset(), (), pairs)
        if join is None:
            return found
        found.append(join)
        program = joined(program, [join])


def joined(program: LoopProgram, joins: Sequence[Join]) -> LoopProgram:
    """Returns a program with axes made one: the program that the joins were found in, or it over other extents."""
    for join in joins:
        program = _left(program, join.left, join.pair)
        axes = {a.name: a for a in _axes(program)}
        program = _joined(program, frozenset((axes[a], axes[b]) for a, b in join.pairs))
    return program


def _axes(program: LoopProgram) -> Iterator[Axis]:
    """Yields the axes of all tensors, and those that nests reduce."""
    for node in program.definitions():
        yield from node.axes
        yield from node.reduced if isinstance(node, Nest) else ()


def with_left(program: LoopProgram, joins: Sequence[Join]) -> LoopProgram:
    """The program with nothing joined, but with the nests left to XLA that are left for some joins: joins keep their names."""
    return _left(program, frozenset().union(*(j.left for j in joins)), frozenset())


def _named(left: frozenset[str], pair: Iterable[Axis], pairs: frozenset[Pair]) -> Join:
    return Join(left, frozenset(a.name for a in pair), frozenset((a.name, b.name) for a, b in pairs))


def _joins_after_leaving(program: LoopProgram) -> Iterator[Join]:
    """Yields joins for which some small repetitions are left to XLA.

    A table that is repeated along an axis of its own (cosines for both halves of a head) would cut all arrays that it meets. Signs
    that are made of positions may meet them, too.
    """
    for pair in sorted(_summed_together(program), key=lambda p: (p[0].name, p[1].name)):
        largest = max((volume(d.axes) for d in program.definitions() if set(pair) <= {*d.axes}), default=0)
        left = frozenset(
            n.name for n in program.nests
            if isinstance(n, Nest) and _repeats(n, pair) and _SMALLER * volume(n.axes) <= largest
        )  # fmt: skip
        pairs = _together(_left(program, left, frozenset(a.name for a in pair))) if left else None
        if pairs is not None and pair in pairs:
            yield _named(left, pair, pairs)


def _left(program: LoopProgram, names: frozenset[str], pair: frozenset[str]) -> LoopProgram:
    """The program with some nests left to XLA, and axes of their own in arrays that have one of a pair without the other."""
    if not names:
        return program
    nests = tuple(
        External(n.name, n.axes, n.dtype, tuple(sorted(n.reads)), _REASON, n.source, form="elements")
        if n.name in names and isinstance(n, Nest) else n
        for n in program.nests
    )  # fmt: skip
    changed = replace(program, nests=nests)
    axes = {a for d in program.definitions() for a in d.axes if a.name in pair}
    return _with_own_axes(changed, axes) if axes else changed


def _with_own_axes(program: LoopProgram, pair: Set[Axis]) -> LoopProgram:
    """Gives axes of their own to the arrays that have one axis of a pair without the other: those that are repeated."""
    names = {a.name for a in _axes(program)}
    own: dict[Axis, Axis] = {}
    for axis in sorted(pair):
        name = next(n for n in map(f"{axis.name}{{}}".format, count(1)) if n not in names)
        names.add(name)
        own[axis] = Axis(name, axis.extent)
    renamings = Renamings()

    def renamed(axes: Sequence[Axis]) -> tuple[Axis, ...]:
        return tuple(own.get(a, a) for a in axes)

    def apart(axes: Iterable[Axis]) -> bool:
        return len({*pair} & {*axes}) == 1

    nests: list[Nest | External] = []
    for node in program.nests:
        if isinstance(node, Nest) and apart((*node.axes, *node.reduced)):
            body = renamings.renamed(node.body, own, own.values())
            nests.append(replace(node, axes=renamed(node.axes), reduced=renamed(node.reduced), body=body))
        else:
            nests.append(node)
    inputs = tuple(replace(t, axes=renamed(t.axes)) if apart(t.axes) else t for t in program.inputs)
    return replace(program, inputs=inputs, nests=tuple(nests))


_REASON = "it is a small array, repeated along an axis that is none elsewhere"
_SMALLER = 8
"""An array may be left to XLA if it has so many times fewer elements than the largest one with these axes (a judgement)."""


def _repeats(nest: Nest, pair: Pair) -> bool:
    """Does a nest only copy a tensor, for each position along one axis of a pair, or ask for positions along it?"""
    body = nest.body
    if nest.is_reduction:
        return False
    if isinstance(body, Read):
        return set(pair) <= {*nest.axes} and len({*pair} & {*body.indices}) == 1
    return any(isinstance(x, Index) and x.axis in pair for x in postorder(body))


def _together(program: LoopProgram) -> frozenset[Pair] | None:
    """Finds neighbouring axes that are one wherever they occur, under whatever names a tensor is read: all pairs that go together.

    None where there are none, or where no reduction sums over them.
    """
    wanted = _summed_together(program)
    if not wanted:
        return None
    apart = {*_told_apart(program)}
    classes = _classes(program)
    for pair in sorted(wanted - apart, key=lambda p: (p[0].name, p[1].name)):
        if classes[pair].isdisjoint(apart):
            return classes[pair]
    return None


def _summed_together(program: LoopProgram) -> set[Pair]:
    """The neighbouring axes that some reduction sums over both."""
    several = [n for n in program.nests if isinstance(n, Nest) and len(n.reduced) > 1]
    return {p for n in several for p in _neighbours(n) if set(p) <= set(n.reduced)}


def _sequences(program: LoopProgram) -> Iterator[tuple[Axis, ...]]:
    """Yields the axes of every tensor, and those along which it is read."""
    for node in program.definitions():
        yield node.axes
        if isinstance(node, Nest):
            yield from (x.indices for x in reads_in(node.body))


def _neighbours(nest: Nest) -> Iterator[Pair]:
    yield from (p for x in reads_in(nest.body) for p in pairwise(x.indices))


def _told_apart(program: LoopProgram) -> Iterator[Pair]:
    """Yields the pairs of neighbours that are not always neighbours, or of which something concerns one alone."""
    before: dict[Axis, set[Axis | None]] = {}
    after: dict[Axis, set[Axis | None]] = {}
    for axes in dict.fromkeys(_sequences(program)):
        for a, b in pairwise((None, *axes, None)):
            if a is not None:
                after.setdefault(a, set()).add(b)
            if b is not None:
                before.setdefault(b, set()).add(a)
    alone = {*_concerned(program)}
    sums = {n.reduced for n in program.nests if isinstance(n, Nest)}
    for a, nexts in after.items():
        for b in nexts - {None}:
            assert b is not None
            beside = nexts == {b} and before[b] == {a} and alone.isdisjoint((a, b))
            if not beside or any((a in axes) != (b in axes) for axes in sums):
                yield a, b


def _concerned(program: LoopProgram) -> Iterator[Axis]:
    """Yields the axes along which something asks for a position."""
    for node in program.nests:
        if isinstance(node, External):
            found = node.lookup
            if found is not None:
                tensors: Iterable[Tensor] = (found.result, found.source, found.table)
                yield from (*node.axes, *(a for t in tensors for a in t.axes))
        else:
            yield from (x.axis for x in postorder(node.body) if isinstance(x, Index))


def _classes(program: LoopProgram) -> dict[Pair, frozenset[Pair]]:
    """Returns for each pair of neighbours those that are the same dimensions of a tensor, directly or through others."""
    own = {node.name: node.axes for node in program.definitions()}
    classes: dict[Pair, frozenset[Pair]] = {p: frozenset((p,)) for s in _sequences(program) for p in pairwise(s)}
    for node in program.nests:
        for x in reads_in(node.body) if isinstance(node, Nest) else ():
            for one, other in zip(pairwise(own[x.tensor]), pairwise(x.indices), strict=True):
                if classes[one] is not classes[other]:
                    both = classes[one] | classes[other]
                    classes |= dict.fromkeys(both, both)
    return classes


def _joined(program: LoopProgram, pairs: frozenset[Pair]) -> LoopProgram:
    """Returns the program in which each of these pairs is one axis."""
    one = {a: Axis(f"{a.name}_{b.name}", a.extent * b.extent) for a, b in pairs}
    second = {b for _, b in pairs}

    def joined(axes: Sequence[Axis]) -> tuple[Axis, ...]:
        return tuple(one.get(a, a) for a in axes if a not in second)

    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        return read(node.tensor, joined(node.indices), node.dtype) if isinstance(node, Read) else with_args(node, args)

    nests: list[Nest | External] = []
    done: dict[Expr, Expr] = {}
    changed = second | one.keys()
    for node in program.nests:
        if isinstance(node, Nest):
            body = node.body if changed.isdisjoint(node.body.axes) else rebuild(node.body, step, done)
            reduced = joined(node.reduced)
            nests.append(replace(node, axes=joined(node.axes), reduced=reduced, body=body))
        else:
            nests.append(replace(node, axes=joined(node.axes)))
    inputs = tuple(replace(t, axes=joined(t.axes)) for t in program.inputs)
    return replace(program, inputs=inputs, nests=tuple(nests))
