"""The exponentials of a kernel that a GPU's own instruction may compute: it is right to 22 bits, and zero below 2^-126."""

from collections.abc import Sequence

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Expr, postorder
from pallasfuse.ir.tile_program import (
    Contract,
    Get,
    Let,
    Loop,
    Reduce,
    Set,
    Statement,
    TileProgram,
    every,
    expressions,
)

SMALL_CONDITION = "an exponential below 2^-126 is zero"


def is_approximate(programs: Sequence[TileProgram]) -> bool:
    """Are all results rounded to half precision? Then exponentials may be the device's own instructions, which are less exact."""
    return all(t.dtype in dtypes.HALF for t in programs[-1].outputs)


def coarse_values(program: TileProgram) -> frozenset[str]:
    """Names of the values that come from a matrix product of half-precision operands."""
    found: set[str] = set()

    def visit(body: tuple[Statement, ...]) -> None:
        for s in body:
            match s:
                case Contract(name, _, lhs) if lhs.dtype in dtypes.HALF:
                    found.add(name)
                case Let(name, _, value) | Reduce(name, _, _, value) if value.tensors & found:
                    found.add(name)
                case Set(buffer, _, value) if value.tensors & found:
                    found.add(buffer)
                case Get(name, buffer) if buffer in found:
                    found.add(name)
                case Loop(_, carries, segments):
                    found.update(c.name for c in carries if c.init.tensors & found)
                    for segment in segments:
                        visit(segment.body)
                    found.update(c.name for c in carries if c.next_name in found)

    before = -1
    while before != len(found):  # carried values reach the statements before them
        before = len(found)
        visit(program.followed)
    return frozenset(found)


def by_instruction(program: TileProgram) -> frozenset[Expr]:
    """Returns the powers of two that may be the instruction: of coarse values, or all where every result is half-precision."""
    coarse, rounded = coarse_values(program), is_approximate((program,))
    return frozenset(
        node
        for s in every(program.body)
        for root in expressions(s)
        for node in postorder(root)
        if isinstance(node, Apply) and node.op == "exp2" and node.dtype == "float32"
        and (rounded or not coarse.isdisjoint(node.tensors))
    )  # fmt: skip
