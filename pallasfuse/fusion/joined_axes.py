"""Neighbouring axes that a program never tells apart are one axis.

Rows and columns of an image, samples and positions of a batch: where all arrays have them side by side in the same order, all
reductions sum over both or neither, and nothing asks for a position along one of them alone, a loop over their product visits the
same elements in the same order. It can be tiled as one axis, where the tile of one of two had to hold the whole other one.

Some operations that would tell them apart may be left to XLA for that: small tables that are repeated, and reshapes, by which words
that are scored in chunks at the end would be words in chunks in all layers before.

Arrays of a kernel are reshaped to the axes of its tensors, which moves nothing.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise

from pallasfuse.fusion.joined_positions import Pair, in_order, with_joined_positions
from pallasfuse.fusion.shapes_left import as_left, needed_reshapes, reshapes_of, with_own_axes
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Expr, Read, positions_in, read, reads_in, rebuild, with_args
from pallasfuse.ir.loop_program import SHAPE, External, LoopProgram, Nest, is_reshape, verify
from pallasfuse.price.xla_reductions import is_product


@dataclass(frozen=True, slots=True)
class Join:
    """Pairs of neighbouring axes that are made one, after some nests were left to XLA for that. All by name.

    `left`: these nests. `own`: the axes that they would keep apart; empty where there are none. `pairs`: all that go together.
    """

    left: frozenset[str]
    own: frozenset[str]
    pairs: frozenset[tuple[str, str]]


def with_joined_axes(program: LoopProgram, *, leaves_reshapes: bool = False) -> LoopProgram | None:
    """Returns the program with neighbouring axes as one that some reduction sums over together; None where there are none.

    leaves_reshapes: also where reshapes are left to XLA for that; None where there is no such reshape."""
    joins = joins_of(program, leaves_reshapes=leaves_reshapes)
    return verify(joined(program, joins)) if joins else None


def joins_of(program: LoopProgram, *, leaves_reshapes: bool = False) -> list[Join]:
    """Finds the axes of a program that are one, step by step. leaves_reshapes: as of `with_joined_axes`."""
    found: list[Join] = []
    reshapes = False
    while True:
        pairs = _together(program, _summed_together(program) | (_of_rows(program).keys() if reshapes else set()))
        join = next(_joins_after_leaving(program), None) if pairs is None else _named(frozenset(), (), pairs)
        if join is None and leaves_reshapes:
            join = _join_beside_reshapes(program)
            reshapes |= join is not None
        if join is None:
            return found if reshapes == leaves_reshapes else []
        found.append(join)
        program = joined(program, [join])


def joined(program: LoopProgram, joins: Sequence[Join]) -> LoopProgram:
    """Returns a program with axes made one: the program that the joins were found in, or it over other extents."""
    for join in joins:
        program = _left(program, join.left, join.own)
        axes = {a.name: a for a in _axes(program)}
        program = _joined(program, frozenset((axes[a], axes[b]) for a, b in join.pairs))
    return program


def _axes(program: LoopProgram) -> Iterator[Axis]:
    """Yields the axes of all tensors, and those that nests reduce."""
    for node in program.definitions():
        yield from node.axes
        yield from node.reduced if isinstance(node, Nest) else ()


def with_left(program: LoopProgram, joins: Sequence[Join]) -> LoopProgram:
    """Returns the program with nothing joined, but with the nests left to XLA that some joins leave: joins keep their names."""
    return _left(program, frozenset().union(*(j.left for j in joins)), frozenset())


def _named(left: frozenset[str], own: Iterable[Axis], pairs: frozenset[Pair]) -> Join:
    return Join(left, frozenset(a.name for a in own), frozenset((a.name, b.name) for a, b in pairs))


def _join_beside_reshapes(program: LoopProgram) -> Join | None:
    """Finds a join for which reshapes are left to XLA, and no more of them than it needs.

    It is looked for where rows are reduced along both axes, as those of a softmax are, or where both count rows that are so reduced
    in a chain with a product. A product sums over both as fast.
    """
    rows = _of_rows(program)
    if not rows:
        return None
    apart, classes = {*_told_apart(program)}, _classes(program)
    alike = frozenset().union(*(classes[p] for p in rows if not classes[p].isdisjoint(apart)))
    left = reshapes_of(program, alike)
    if not left:
        return None
    axes = frozenset(a for n in program.nests if n.name in left for a in n.axes)
    names = frozenset(a.name for a in axes)

    most = _left(program, frozenset(left), names)
    if _together(most, _of_rows(most).keys()) is None:
        return None
    needed = needed_reshapes(most, left, {p for found in _never_apart(most) for p in found})
    needed = _fewest(program, needed, names)
    joined_then = _joined_after(program, needed, names)
    return None if joined_then is None or not needed else _named(needed, axes, joined_then[0])


def _joined_after(
    program: LoopProgram, leaving: frozenset[str], names: frozenset[str]
) -> tuple[frozenset[Pair], frozenset[str]] | None:
    """Returns the pairs that are one axis after some reshapes were left, and the reductions that they are joined for; None where
    there are none."""
    changed = _left(program, leaving, names)
    rows = _of_rows(changed)
    pairs = _together(changed, rows.keys())
    return None if pairs is None else (pairs, frozenset().union(*(rows[p] for p in pairs & rows.keys())))


def _fewest(program: LoopProgram, needed: frozenset[str], names: frozenset[str]) -> frozenset[str]:
    """Returns some of the reshapes, by which no fewer reductions have joined axes than by all of them.

    Several are tried without at once, as most are needed for nothing: halves, and halves of those that are needed."""
    found = _joined_after(program, needed, names)
    if found is None:
        return needed
    tries = _NESTS // len(program.nests)
    waiting = [sorted(needed)]
    while waiting and tries > 0:
        some, tries = waiting.pop(), tries - 1
        others = _joined_after(program, needed.difference(some), names)
        if others is not None and others[1] >= found[1]:
            needed, found = needed.difference(some), others
        elif len(some) > 1:
            middle = len(some) // 2
            waiting += [some[middle:], some[:middle]]
    return needed


_NESTS = 20_000
"""So many nests may be looked at to find reshapes that need not be left (a judgement)."""


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
        changed = _left(program, left, frozenset(a.name for a in pair))
        pairs = _together(changed, _summed_together(changed)) if left else None
        if pairs is not None and pair in pairs:
            yield _named(left, pair, pairs)


def _left(program: LoopProgram, names: frozenset[str], own: frozenset[str]) -> LoopProgram:
    """Returns the program with some nests left to XLA, and several axes for one of `own` where only XLA's operations lead from one
    part of the program to the other."""
    if not names:
        return program
    nests = tuple(
        as_left(n, SHAPE if is_reshape(n) else _REASON) if n.name in names and isinstance(n, Nest) else n
        for n in program.nests
    )
    return with_own_axes(replace(program, nests=nests), own)


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
    return not set(pair).isdisjoint(positions_in(body))


def _together(program: LoopProgram, wanted: Set[Pair]) -> frozenset[Pair] | None:
    """Finds neighbouring axes that are one wherever they occur, under whatever names a tensor is read: all pairs that go together
    with some of those that are wanted, and have no axis in common with others. None where there are none."""
    if not wanted:
        return None
    found, taken = frozenset[Pair](), frozenset[Axis]()
    for pairs in _never_apart(program):
        axes = frozenset(a for p in pairs for a in p)
        if not pairs.isdisjoint(wanted) and taken.isdisjoint(axes):
            found, taken = found | pairs, taken | axes
    return found or None


def _never_apart(program: LoopProgram) -> list[frozenset[Pair]]:
    """Finds the neighbouring axes that are one wherever they occur: all pairs that go together, by the first of their names."""
    apart = {*_told_apart(program)}
    together = {pairs for pairs in _classes(program).values() if pairs.isdisjoint(apart)}
    return sorted(together, key=lambda pairs: min((a.name, b.name) for a, b in pairs))


def _summed_together(program: LoopProgram) -> set[Pair]:
    """Finds the neighbouring axes that some reduction sums over both."""
    several = [n for n in program.nests if isinstance(n, Nest) and len(n.reduced) > 1]
    return {p for n in several for p in _neighbours(n) if set(p) <= set(n.reduced)}


def _of_rows(program: LoopProgram) -> dict[Pair, frozenset[str]]:
    """Finds the neighbouring axes for which it is worth it to leave reshapes, each pair with the reductions that gain by it.

    Rows are reduced along both of them; or both are the last that count rows of what a product makes, and the inner one is no
    multiple of a tile. Reductions to one number have no rows, and products sum over two axes as fast as over one."""
    found: dict[Pair, frozenset[str]] = {}
    of_products: dict[str, frozenset[Axis]] = {}
    """The axes of a product that is behind a map."""
    for node in program.nests:
        if not isinstance(node, Nest):
            continue
        behind = frozenset().union(*(of_products.get(t, frozenset()) for t in node.reads))
        if not node.is_reduction:
            of_products[node.name] = behind
        elif is_product(node):
            of_products[node.name] = frozenset(node.axes)
        elif node.axes:
            pairs = {p for p in _neighbours(node) if set(p) <= set(node.reduced)}
            last = node.axes[-2:]
            if len(last) > 1 and last[1].extent % _ROWS and behind.issuperset((*last, *node.reduced)):
                pairs.add((last[0], last[1]))
            for pair in pairs:
                found[pair] = found.get(pair, frozenset()) | {node.name}
    return found


_ROWS = 128
"""The rows of the largest tiles of products that kernels have (`schedule`): a judgement for what a multiple of it is."""


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
    concerned = _concerned(program)
    summed: dict[Axis, set[tuple[Axis, ...]]] = {}
    for reduced in {n.reduced for n in program.nests if isinstance(n, Nest)}:
        for axis in reduced:
            summed.setdefault(axis, set()).add(reduced)
    for a, nexts in after.items():
        for b in nexts - {None}:
            assert b is not None
            beside = nexts == {b} and before[b] == {a} and all((a, b) in concerned.get(x, {(a, b)}) for x in (a, b))
            if not beside or summed.get(a) != summed.get(b):
                yield a, b


def _concerned(program: LoopProgram) -> dict[Axis, frozenset[Pair]]:
    """Finds the axes along which something asks for positions, each with the pairs along which it does as if they were one."""
    found: dict[Axis, frozenset[Pair]] = {}
    for node in program.nests:
        if isinstance(node, External):
            tensors = () if node.lookup is None else (node.lookup.result, node.lookup.source, node.lookup.table, node)
            found |= dict.fromkeys((a for t in tensors for a in t.axes), frozenset())
        elif asked := positions_in(node.body):
            pairs = in_order(node.body)
            found |= {a: found.get(a, pairs) & pairs for a in asked}
    return found


def _classes(program: LoopProgram) -> dict[Pair, frozenset[Pair]]:
    """Returns for each pair of neighbours those that are the same dimensions of a tensor, directly or through others."""
    own = {node.name: node.axes for node in program.definitions()}
    pairs = {p for s in {*_sequences(program)} for p in pairwise(s)}
    classes = {p: frozenset((p,)) for p in pairs}
    for node in program.nests:
        renamed = (x for x in reads_in(node.body) if x.indices != own[x.tensor]) if isinstance(node, Nest) else ()
        for x in renamed:
            for one, other in zip(pairwise(own[x.tensor]), pairwise(x.indices), strict=True):
                if classes[one] is not classes[other]:
                    both = classes[one] | classes[other]
                    classes |= dict.fromkeys(both, both)
    return classes


def _joined(program: LoopProgram, pairs: frozenset[Pair]) -> LoopProgram:
    """Returns the program in which each of these pairs is one axis."""
    taken = {a.name for a in _axes(program)}
    both: dict[Pair, Axis] = {}
    for a, b in sorted(pairs):  # in an order that is the same in every process
        name = f"{a.name}_{b.name}"
        name = next(n for n in chain((name,), (f"{name}_{k}" for k in count(1))) if n not in taken)
        taken.add(name)
        both[a, b] = Axis(name, a.extent * b.extent)
    one = {a: axis for (a, _), axis in both.items()}
    second = {b for _, b in pairs}

    def joined(axes: Sequence[Axis]) -> tuple[Axis, ...]:
        return tuple(one.get(a, a) for a in axes if a not in second)

    def step(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if isinstance(node, Read):
            return read(node.tensor, joined(node.indices), node.dtype)
        return with_joined_positions(with_args(node, args), both)

    nests: list[Nest | External] = []
    done: dict[Expr, Expr] = {}
    changed = second | one.keys()
    for node in program.nests:
        inside = node.body.axes.union(node.reduced) if isinstance(node, Nest) else frozenset[Axis]()
        if changed.isdisjoint(inside.union(node.axes)):
            nests.append(node)
        elif isinstance(node, Nest):
            body = rebuild(node.body, step, done)
            reduced = joined(node.reduced)
            nests.append(replace(node, axes=joined(node.axes), reduced=reduced, body=body))
        else:
            nests.append(replace(node, axes=joined(node.axes)))
    inputs = tuple(replace(t, axes=joined(t.axes)) for t in program.inputs)
    return replace(program, inputs=inputs, nests=tuple(nests))
