"""Leaves reshapes to XLA, which moves nothing for them, so that an axis is whole on one side and in parts on the other.

A reshape is a nest that copies a tensor over the same axes: where one array has a dimension in parts, all arrays that are read with
it have it so, however far away. With the reshape left to XLA these are two programs, with axes of their own.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import count, pairwise

from pallasfuse.fusion.joined_positions import Pair
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Renamings, reads_in
from pallasfuse.ir.loop_program import External, LoopProgram, Nest, is_reshape
from pallasfuse.ir.plain_work import Nothing
from pallasfuse.ir.tensors import Tensor

Region = tuple[str, Axis]
"""A part of a program in which an axis is one and the same, by one of the nests and tensors that have it."""


def reshapes_of(program: LoopProgram, pairs: Set[Pair]) -> dict[str, list[int]]:
    """Returns the reshapes whose results have some of these pairs of axes side by side, each with the places of pairs."""
    found = {
        n.name: [at for at, pair in enumerate(pairwise(n.axes)) if pair in pairs]
        for n in program.nests if isinstance(n, Nest) and is_reshape(n)
    }  # fmt: skip
    return {name: places for name, places in found.items() if places}


def as_left(nest: Nest, reason: str) -> External:
    """Returns an operation of XLA's that computes what a nest does, element by element."""
    work = Nothing() if is_reshape(nest) else None
    operands = tuple(sorted(nest.reads))
    return External(nest.name, nest.axes, nest.dtype, operands, reason, nest.source, form="elements", work=work)


def needed_reshapes(program: LoopProgram, left: Mapping[str, Sequence[int]], pairs: Set[Pair]) -> frozenset[str]:
    """Returns those of the reshapes left to XLA that have dimensions which are one axis on one side only.

    left: the reshapes, each with the places of pairs that count. pairs: the axes that are one."""
    own = {d.name: d.axes for d in program.definitions()}

    def joined(name: str, places: Sequence[int]) -> list[bool]:
        return [(own[name][at], own[name][at + 1]) in pairs for at in places]

    nodes = (n for n in program.nests if isinstance(n, External) and n.name in left)
    return frozenset(n.name for n in nodes if joined(n.name, left[n.name]) != joined(n.operands[0], left[n.name]))


def with_own_axes(program: LoopProgram, names: Set[str]) -> LoopProgram:
    """Returns a program in which each of these axes is several, one for each part of the program that only XLA's operations connect
    with the others. The largest part keeps its name."""
    regions = _Regions(program, names)
    sizes = Counter(
        (axis, regions.of(node.name, axis))
        for node in program.definitions() for axis in _axes_of(node) if axis.name in names
    )  # fmt: skip
    kept = {axis: region for (axis, region), _ in reversed(sizes.most_common())}
    kept |= {axis: regions.of(name, axis) for axis, name in regions.looked_up.items()}
    taken = {a.name for node in program.definitions() for a in _axes_of(node)}
    own: dict[Region, Axis] = {}
    for axis, region in sizes:
        if kept[axis] != region:
            name = next(n for n in map(f"{axis.name}{{}}".format, count(1)) if n not in taken)
            taken.add(name)
            own[region] = Axis(name, axis.extent)
    return _renamed(program, regions, own) if own else program


def _axes_of(node: Tensor | Nest | External) -> tuple[Axis, ...]:
    return (*node.axes, *node.reduced) if isinstance(node, Nest) else node.axes


class _Regions:
    """Finds the parts of a program in which an axis is one and the same: a union-find."""

    def __init__(self, program: LoopProgram, names: Set[str]) -> None:
        self._parent: dict[Region, Region] = {}
        own = {d.name: d.axes for d in program.definitions()}
        self.looked_up: dict[Axis, str] = {}
        """The axes along which places in tensors are found, each with an operation that has it: they keep their names."""
        for node in program.nests:
            if isinstance(node, Nest):
                for one in reads_in(node.body):
                    for a, b in zip(own[one.tensor], one.indices, strict=True):
                        if a == b and a.name in names:
                            self._join((node.name, a), (one.tensor, a))
            elif node.lookup is not None:
                found = node.lookup
                for tensor in (node, found.result, found.source, found.table):
                    for axis in tensor.axes:
                        self._join((tensor.name, axis), (self.looked_up.setdefault(axis, tensor.name), axis))

    def of(self, name: str, axis: Axis) -> Region:
        """Returns the part in which a nest or a tensor has an axis."""
        found = at = name, axis
        while (above := self._parent.get(found)) is not None:
            found = above
        while at != found:
            self._parent[at], at = found, self._parent[at]
        return found

    def _join(self, one: Region, other: Region) -> None:
        a, b = self.of(*one), self.of(*other)
        if a != b:
            # a nest comes after what it reads: the other way, paths would be as long as the program
            self._parent[a] = b


def _renamed(program: LoopProgram, regions: _Regions, own: dict[Region, Axis]) -> LoopProgram:
    """Returns a program in which the axes of some parts have names of their own."""
    renamings, moved = Renamings(), {axis for _, axis in own}

    def over(name: str, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        return tuple(own.get(regions.of(name, a), a) if a in moved else a for a in axes)

    def nodes() -> Iterator[Nest | External]:
        for node in program.nests:
            old = _axes_of(node)
            if moved.isdisjoint(old):
                yield node
            elif isinstance(node, Nest):
                body = renamings.renamed(node.body, old, over(node.name, old))
                yield replace(node, axes=over(node.name, node.axes), reduced=over(node.name, node.reduced), body=body)
            else:
                yield replace(node, axes=over(node.name, node.axes))

    inputs = tuple(replace(t, axes=over(t.name, t.axes)) for t in program.inputs)
    return replace(program, inputs=inputs, nests=tuple(nodes()))
