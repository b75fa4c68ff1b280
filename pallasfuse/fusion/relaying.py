"""Transposes that are better computed once, outside of a kernel, than by strided reads in each of its blocks.

A map is inlined into the kernel that reads it. Where the map is a transpose of what lies in memory, every tile that varies along
the kernel's grid and its rolled axis only then gathers elements that are apart. Stored by XLA beforehand, they are neighbours.
"""

from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.ir.fold import Group
from pallasfuse.ir.loop_program import Nest


def transposes(graph: Graph, group: Group) -> frozenset[str]:
    """Finds the transposes behind strided reads of a group which make the rolled axis the one of neighbours."""
    strided = {node.tensor for nest in (*(f.nest for f in group.folds), *group.inner, *group.outputs)
               for node in postorder(nest.body) if isinstance(node, Read) and _is_strided(node, group)}  # fmt: skip
    if not strided:
        return frozenset()
    bodies = graph.inlined()
    behind = frozenset().union(*(graph.ancestors[f.name] for f in group.folds))
    return frozenset(
        name for name, nest in graph.nests.items()
        if name in behind and _is_transpose(nest) and nest.axes[-1] == group.rolled
        and isinstance(found := bodies[name], Read) and found.tensor in strided and found.indices[-1] != group.rolled
    )  # fmt: skip


def _is_strided(node: Read, group: Group) -> bool:
    """Does a tile of the grid and the rolled axis, without other axes, read elements that are apart?

    Operands of products have an axis that is whole inside a tile: they are not meant.
    """
    return group.rolled in node.indices[:-1] and set(node.indices) <= {group.rolled, *group.parallel}


def _is_transpose(nest: Nest) -> bool:
    """Are the elements of a nest those of one tensor, each once and in another order?"""
    body = nest.body
    return isinstance(body, Read) and body.indices != nest.axes and sorted(body.indices) == sorted(nest.axes)
