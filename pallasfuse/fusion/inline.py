"""Inlining of map nests: the rewrite that brings a reduction's predecessors into sight (Neptune, InlineMapReturnReduce)."""

from collections.abc import Set as AbstractSet

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, postorder, rename_axes, substitute
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.simplify import simplify


def inline_maps(program: LoopProgram, keep: AbstractSet[str] = frozenset()) -> dict[str, Expr]:
    """Every nest's body over inputs, reductions, external tensors and the maps named in `keep` only.

    A map read at other axes than its own is inlined with its axes renamed.
    """
    axes: dict[str, tuple[Axis, ...]] = {}
    bodies: dict[str, Expr] = {}
    simplified: dict[Expr, Expr] = {}  # shared: a body contains those before it, and would be walked once for each
    for nest in program.nests:
        if not isinstance(nest, Nest):
            continue
        replacements: dict[Expr, Expr] = {}
        for node in postorder(nest.body):
            if isinstance(node, Read) and node.tensor in axes:
                renaming = {a: b for a, b in zip(axes[node.tensor], node.indices, strict=True) if a != b}
                replacements[node] = rename_axes(bodies[node.tensor], renaming)
        bodies[nest.name] = simplify(substitute(nest.body, replacements), simplified)
        if not nest.is_reduction and nest.name not in keep:
            axes[nest.name] = nest.axes
    return bodies
