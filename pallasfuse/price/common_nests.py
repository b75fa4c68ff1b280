"""A program in which nothing is computed twice: XLA finds equal operations before it fuses."""

from collections.abc import Collection
from dataclasses import replace

from pallasfuse.ir.expr import Expr, Read, postorder, read, substitute
from pallasfuse.ir.loop_program import External, LoopProgram, Nest


def without_repetitions(program: LoopProgram, kept: Collection[str] = ()) -> LoopProgram:
    """Returns the program without nests that equal an earlier one, but for results and those in `kept`."""
    looked_up = {
        t.name for n in program.nests if isinstance(n, External) and n.lookup is not None
        for t in (n.lookup.result, n.lookup.source, n.lookup.table)
    }  # fmt: skip
    named = {*program.outputs, *kept, *looked_up}
    first: dict[object, str] = {}
    same: dict[str, str] = {}
    nests: list[Nest | External] = []
    for nest in program.nests:
        if isinstance(nest, External):
            repeated = same.keys() & nest.reads
            nests.append(replace(nest, operands=tuple(same.get(t, t) for t in nest.operands)) if repeated else nest)
            continue
        body = _reading(nest.body, same) if same.keys() & nest.reads else nest.body
        key = nest.axes, nest.reduced, nest.reducer, nest.dtype, nest.precision, nest.picks, body
        earlier = first.setdefault(key, nest.name)
        if earlier != nest.name and nest.name not in named:
            same[nest.name] = earlier
        else:
            nests.append(nest if body is nest.body else replace(nest, body=body))
    return replace(program, nests=tuple(nests)) if same else program


def _reading(body: Expr, same: dict[str, str]) -> Expr:
    reads = [n for n in postorder(body) if isinstance(n, Read) and n.tensor in same]
    return substitute(body, {n: read(same[n.tensor], n.indices, n.dtype) for n in reads})
