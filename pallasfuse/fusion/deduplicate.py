"""Reductions that are computed twice: the second becomes a copy of the first."""

from dataclasses import replace

from pallasfuse.fusion.inline import inline_maps
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, Read, postorder, read, substitute
from pallasfuse.ir.loop_program import External, LoopProgram, Nest
from pallasfuse.ir.reducers import Reducer

_Key = tuple[tuple[Axis, ...], tuple[Axis, ...], Reducer | None, str, str | None, Expr]


def deduplicate(program: LoopProgram) -> LoopProgram:
    """Replace every reduction that equals an earlier one by a map that reads it.

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
                for n in postorder(bodies[nest.name]) if isinstance(n, Read) and n.tensor in same
            }  # fmt: skip
            body = substitute(bodies[nest.name], renamed)
            key = (nest.axes, nest.reduced, nest.reducer, nest.dtype, nest.precision, body)
            original = first.setdefault(key, nest)
            if original is not nest:
                same[nest.name] = original
                copy = read(original.name, original.axes, original.dtype)
                nests.append(replace(nest, body=copy, reduced=(), reducer=None, precision=None, picks=False))
                continue
        nests.append(nest)
    return replace(program, nests=tuple(nests))
