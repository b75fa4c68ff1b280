"""The exponentials of a kernel that a GPU's own instruction may compute: it is right to 22 bits, and zero below 2^-126."""

from collections.abc import Callable, Iterator, Sequence

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Const, Expr, postorder
from pallasfuse.ir.reducers import MAX, MIN
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

FAST = frozenset({"exp", "exp2"})
"""Operations whose instructions are as right as a half-precision result."""
SMALL_CONDITION = "an exponential below 2^-126 is zero"


def is_approximate(programs: Sequence[TileProgram]) -> bool:
    """Are all results rounded to half precision? Then exponentials may be the device's own instructions, which are less exact."""
    return all(t.dtype in dtypes.HALF for t in programs[-1].outputs)


def coarse_values(program: TileProgram) -> frozenset[str]:
    """Returns the names of the values that come from a matrix product of half-precision operands."""
    return _made_of(program, lambda s: isinstance(s, Contract) and s.lhs.dtype in dtypes.HALF)


def _made_of(program: TileProgram, begins: Callable[[Statement], bool]) -> frozenset[str]:
    """Returns the names of some values and of all that is computed from them. begins: does a statement make one of the first?"""
    found: set[str] = set()

    def visit(body: tuple[Statement, ...]) -> None:
        for s in body:
            match s:
                case Contract(name) | Reduce(name) if begins(s):
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


def _of_maxima(program: TileProgram) -> frozenset[str]:
    """Returns the names of the values that are made of maxima, or minima, of the program."""
    return _made_of(program, lambda s: isinstance(s, Reduce) and s.reducer in (MAX, MIN))


def by_instruction(program: TileProgram, *, rounded: bool) -> frozenset[Expr]:
    """Returns the exponentials that may be the instruction: the value is coarse or rounded in the end, and a maximum is taken off.

    Where the largest argument is zero, what is smaller than 2^-126 does not count beside it. Elsewhere all terms of a sum may be,
    whose logarithm or quotient then depends on them.

    rounded: are all results of the kernel half-precision?
    """
    coarse, maxima = coarse_values(program), _of_maxima(program)
    return frozenset(
        node
        for node in _exponentials(program)
        if _is_below(node.args[0], maxima) and (rounded or not coarse.isdisjoint(node.tensors))
    )


def _is_below(argument: Expr, maxima: frozenset[str]) -> bool:
    """Is an argument a difference, or a multiple of one, of which one side is made of maxima?"""
    match argument:
        case (
            Apply("mul", (x, Const()))
            | Apply("mul", (Const(), x))
            | Apply("div", (x, Const()))
            | Apply("neg" | "convert", (x,))
        ):
            return _is_below(x, maxima)
        case Apply("sub", (_, _)):
            return not maxima.isdisjoint(argument.tensors)
    return False


def all_by_instruction(programs: Sequence[TileProgram]) -> bool:
    """Are all results half-precision, and may all exponentials of a kernel be the instruction?"""
    if not is_approximate(programs):
        return False
    return all(set(_exponentials(p)) <= by_instruction(p, rounded=True) for p in programs)


def takes_powers_of_two(program: TileProgram) -> bool:
    """Does the program have powers of two of coarse values, or powers of two and only half-precision results?"""
    coarse, rounded = coarse_values(program), is_approximate((program,))
    return any(
        node.op == "exp2" and (rounded or not coarse.isdisjoint(node.tensors)) for node in _exponentials(program)
    )


def _exponentials(program: TileProgram) -> Iterator[Apply]:
    for s in every(program.body):
        for root in expressions(s):
            for node in postorder(root):
                if isinstance(node, Apply) and node.op in FAST and node.dtype == "float32":
                    yield node
