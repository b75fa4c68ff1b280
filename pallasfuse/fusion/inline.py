"""Inlining of map nests: the rewrite that brings a reduction's predecessors into sight (Neptune, InlineMapReturnReduce)."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, postorder, rename_axes, substitute
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.simplify import simplify


@dataclass(frozen=True, slots=True)
class Known:
    """Inlined bodies of a program's nests. Calls that keep other maps have many of them in common, and share this."""

    bodies: dict[tuple[Expr, tuple[tuple[str, Expr], ...]], Expr] = field(default_factory=dict)
    """By the body as it is written and those of the maps that it reads."""
    simplified: dict[Expr, Expr] = field(default_factory=dict)
    """Shared: a body contains those before it, and would be walked once for each."""


def inline_maps(
    program: LoopProgram, keep: AbstractSet[str] = frozenset(), known: Known | None = None
) -> dict[str, Expr]:
    """Every nest's body over inputs, reductions, external tensors and the maps named in `keep` only.

    A map read at other axes than its own is inlined with its axes renamed. known: of earlier calls for the same program; grows.
    """
    known = Known() if known is None else known
    axes: dict[str, tuple[Axis, ...]] = {}
    bodies: dict[str, Expr] = {}
    for nest in program.nests:
        if not isinstance(nest, Nest):
            continue
        key = nest.body, tuple((t, bodies[t]) for t in nest.reads if t in axes)
        if key not in known.bodies:
            replacements: dict[Expr, Expr] = {}
            for node in postorder(nest.body):
                if isinstance(node, Read) and node.tensor in axes:
                    renaming = {a: b for a, b in zip(axes[node.tensor], node.indices, strict=True) if a != b}
                    replacements[node] = rename_axes(bodies[node.tensor], renaming)
            known.bodies[key] = simplify(substitute(nest.body, replacements), known.simplified)
        bodies[nest.name] = known.bodies[key]
        if not nest.is_reduction and nest.name not in keep:
            axes[nest.name] = nest.axes
    return bodies
