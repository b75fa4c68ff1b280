"""Maps that are better computed once, outside of a kernel, than by strided reads in each of its blocks.

A map is inlined into the kernel that reads it. Where the map is a transpose of what lies in memory, every tile that varies along
the kernel's grid and its rolled axis only then gathers elements that are apart. Stored by XLA beforehand, they are neighbours.
"""

from collections.abc import Iterator

from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.expr import Read, reads_in
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import Nest


def in_order(graph: Graph, group: Group) -> Iterator[frozenset[str]]:
    """Yields sets of maps that a group may read from memory instead of strided tensors: they lie along the rolled axis.

    First the transposes of these tensors, then what is stored for others anyway, should there be such maps.
    """
    strided = {node.tensor for nest in (*(f.nest for f in group.folds), *group.inner, *group.outputs)
               for node in reads_in(nest.body) if _is_strided(node, group)}  # fmt: skip
    if not strided:
        return
    bodies = graph.inlined()
    behind = frozenset().union(*(graph.ancestors[f.name] for f in group.folds))
    along = {
        name: nest for name, nest in graph.nests.items()
        if name in behind and not nest.is_reduction and nest.axes[-1:] == (group.rolled,)
        and any(n.tensor in strided and n.indices[-1] != group.rolled for n in reads_in(bodies[name]))
    }  # fmt: skip
    transposed = frozenset(n for n, nest in along.items() if _is_transpose(nest) and isinstance(bodies[n], Read))
    stored = frozenset(along) & graph.outputs
    yield from dict.fromkeys(maps for maps in (transposed, stored) if maps)


def _is_strided(node: Read, group: Group) -> bool:
    """Does a tile of the grid and the rolled axis, without other axes, read elements that are apart?

    Operands of products have an axis that is whole inside a tile: they are not meant.
    """
    return group.rolled in node.indices[:-1] and set(node.indices) <= {group.rolled, *group.parallel}


def _is_transpose(nest: Nest) -> bool:
    """Are the elements of a nest those of one tensor, each once and in another order?"""
    body = nest.body
    return isinstance(body, Read) and body.indices != nest.axes and sorted(body.indices) == sorted(nest.axes)
