"""Counts the instructions of a thread's code between two branches of a kernel: a compiler orders them as one piece.

Each element of a tile that a thread has is instructions of its own there. The compiler takes more than in proportion longer for
longer pieces, and beyond some thousands of instructions it no longer finds an order in which few values are alive: they spill. Nor
does code of more than 128 kB, of 16 bytes for each instruction, stay in the cache of a multiprocessor.
"""

from pallasfuse.ir.expr import Apply, Expr, postorder
from pallasfuse.ir.tile_program import TileProgram, expressions
from pallasfuse.price.operations import of_node
from pallasfuse.resources.block import WARP
from pallasfuse.resources.triton import view_of
from pallasfuse.targets import Target

LONGEST = 4096
"""A thread should run no more instructions in one piece.

Of 37 compilations for an H100 (12 kernels of whole programs, with 1 to 16 warps), the 29 of up to 4,041 took at most 3.4 s, and two
spilled more than 1 kB a thread. The other eight, of 4,250 to 14,068, took 2.6 to 29 s; six spilled more than 1 kB, one of
them 41 kB. And functions of 8 M elements, of 8 to 128 in each thread, take as long as a copy up to about so many instructions
(`sin`, `cos`, `pow`, `atan2`, `erf_inv`); of twice as many they take 1.4 to 1.7 times as long, of four times as many 4 to 11
times. A kernel of warpgroups whose threads have 128 sines, of a loop's and of its end, took eleven times as long as it was priced.
"""
_SELDOM = dict.fromkeys(("sin", "cos", "tan"), 100.0)
"""Instructions that such a function has for large numbers: 64 sines in a thread take 1.4 times as long as a copy, as so many of the
others' instructions do with these."""


def too_long(program: TileProgram, target: Target) -> str | None:
    """Returns why the compiler should not be given a program; None where no piece of its code is too long."""
    longest = instructions(program, target)
    if longest <= LONGEST:
        return None
    return f"a thread runs {longest:.0f} instructions without a branch, of {LONGEST} that its compiler orders well"


def instructions(program: TileProgram, target: Target) -> float:
    """Counts the instructions of a thread in the longest body of a loop, or outside of loops: those of elementwise expressions."""
    view, threads = view_of(program, target), WARP * program.warps
    seen: dict[int, set[Expr]] = {}
    found: dict[int, float] = {}
    for line in view.lines:
        own = seen.setdefault(id(line.scope), set())
        for node in (n for root in expressions(line.statement) for n in postorder(root)):
            if isinstance(node, Apply) and node not in own:
                own.add(node)
                each = of_node(node)
                times = max(1.0, view.elements(node.axes) / threads)
                found[id(line.scope)] = found.get(id(line.scope), 0.0) + times * (
                    each.simple
                    + each.special
                    + each.library
                    + each.branching
                    + each.converted
                    + _SELDOM.get(node.op, 0.0)
                )
    return max(found.values(), default=0.0)
