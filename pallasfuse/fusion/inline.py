"""Rewrites of loop programs before grouping: of reductions that are computed twice one is left, and maps are inlined."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Renamings, read, reads_in, substitute
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.reducers import Reducer
from pallasfuse.ir.simplify import simplify

_Key = tuple[tuple[Axis, ...], tuple[Axis, ...], Reducer | None, str, str | None, Expr]


def deduplicate(program: LoopProgram) -> LoopProgram:
    """Replace every reduction that equals an earlier one by a map that reads it.

    Where the earlier one is a step inside of an operation, it is the one that becomes a map: no variable has its value.

    Example: `a[i] max[j]= x[i, j]; b[i] max[j]= x[i, j]` becomes `a[i] max[j]= x[i, j]; b[i] = a[i]`.
    """
    first: dict[_Key, Nest] = {}
    same: dict[str, Nest] = {}
    bodies = inline_maps(program)
    nests: list[Nest | External] = []
    for nest in program.nests:
        if isinstance(nest, Nest) and nest.is_reduction:
            renamed: dict[Expr, Expr] = {
                n: read(same[n.tensor].name, n.indices, n.dtype)
                for n in reads_in(bodies[nest.name]) if n.tensor in same
            }  # fmt: skip
            body = substitute(bodies[nest.name], renamed)
            key = (nest.axes, nest.reduced, nest.reducer, nest.dtype, nest.precision, body)
            original = first.setdefault(key, nest)
            if original.internal and not nest.internal:  # what a variable holds may be read by XLA, too
                first[key] = same[original.name] = replace(original, name=nest.name, internal=False, source=nest.source)
                at = nests.index(original)
                nests[at : at + 1] = [first[key], _copy(original, first[key])]
                continue
            if original is not nest:
                same[nest.name] = original
                nests.append(_copy(nest, original))
                continue
        nests.append(nest)
    return replace(program, nests=tuple(nests))


def _copy(nest: Nest, original: Nest) -> Nest:
    """Makes the map that reads an equal reduction, in the place of one."""
    body = read(original.name, original.axes, original.dtype)
    return replace(nest, body=body, reduced=(), reducer=None, precision=None, picks=False)


# --- inlining of maps, which brings a reduction's predecessors into sight (Neptune, InlineMapReturnReduce)


@dataclass(frozen=True, slots=True)
class Known:
    """Inlined bodies of a program's nests. Calls that keep other maps have many of them in common, and share this."""

    bodies: dict[tuple[Expr, tuple[tuple[str, Expr], ...]], Expr] = field(default_factory=dict)
    """By the body as it is written and those of the maps that it reads."""
    simplified: dict[Expr, Expr] = field(default_factory=dict)
    """Shared: a body contains those before it, and would be walked once for each."""
    renamings: Renamings = field(default_factory=Renamings)


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
            for node in reads_in(nest.body):
                if node.tensor in axes:
                    inner = bodies[node.tensor]
                    replacements[node] = known.renamings.renamed(inner, axes[node.tensor], node.indices)
            known.bodies[key] = simplify(substitute(nest.body, replacements), known.simplified)
        bodies[nest.name] = known.bodies[key]
        if not nest.is_reduction and nest.name not in keep:
            axes[nest.name] = nest.axes
    return bodies
