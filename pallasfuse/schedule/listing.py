"""Block programs as text, line by line, as Blockbuster prints them: loops, loads, what is computed, stores."""

from collections.abc import Iterator

from pallasfuse.ir.region import Region
from pallasfuse.schedule.block_program import BlockKernel
from pallasfuse.schedule.placement import Broken, MayFold, Placed, Statement, no_folds, place


def lines(kernel: BlockKernel, may_fold: MayFold = no_folds) -> list[str]:
    """Returns the lines of one kernel, with the axes of tiles in brackets."""
    placement = place(kernel.region, kernel.tree, may_fold)
    assert not isinstance(placement, Broken), str(placement)
    return list(_lines(kernel.region, placement.body, ""))


def _lines(region: Region, body: tuple[Placed | Statement, ...], indent: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, Statement):
            yield indent + _statement(region, node)
            continue
        loop = node.loop
        part = (f" from {loop.begin}" if loop.begin else "") + (f" until {loop.end}" if loop.end else "")
        yield f"{indent}{'for' if _is_reduced_in(region, node) else 'forall'} {loop.axis}{part}:"
        yield from _lines(region, node.body, indent + "  ")


def _statement(region: Region, statement: Statement) -> str:
    name, axes = statement.name, ", ".join(a.name for a in statement.axes)
    if statement.kind != "compute":
        return f"{statement.kind} {name}[{axes}]"
    nest = region.by_name[name]
    kept = ", ".join(a.name for a in nest.axes)
    sign = {"sum": "+=", None: "="}.get(nest.reducer.name if nest.reducer else None, f"{nest.reducer}=")
    return f"{name}[{kept}] {sign} {nest.body}"


def _is_reduced_in(region: Region, node: Placed) -> bool:
    """Returns whether something in a loop is reduced by it, so that its trips are not independent."""

    def computes(of: Placed) -> Iterator[str]:
        for inner in of.body:
            if isinstance(inner, Placed):
                yield from computes(inner)
            elif inner.kind == "compute":
                yield inner.name

    return any(node.loop.axis in {a.name for a in region.by_name[n].reduced} for n in computes(node))
