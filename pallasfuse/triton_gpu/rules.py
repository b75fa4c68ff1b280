"""The rules of Triton: what its compiler cannot make of a tile program, known before the program is written for it."""

from pallasfuse.emission.pallas_kernel import product_too_large
from pallasfuse.ir.tile_program import Buffer, Get, Set, TileProgram, in_windows
from pallasfuse.resources.exponentials import SMALL_CONDITION, by_instruction, is_approximate


def problem(program: TileProgram) -> str | None:
    """Returns why Triton cannot run the program; None if it can."""
    return product_too_large(program) or _parts_of_buffers(program)


def conditions(program: TileProgram) -> tuple[str, ...]:
    """Lists the ways in which the kernel rounds otherwise than the program."""
    return (SMALL_CONDITION,) if by_instruction(program, rounded=is_approximate((program,))) else ()


def is_misformed(program: TileProgram) -> bool:
    """Does Triton run no program with the same loops, whatever its tiles?"""
    return _parts_of_buffers(program) is not None


def _parts_of_buffers(program: TileProgram) -> str | None:
    """A buffer is a tile in registers, of which no instruction takes a part."""
    held: dict[str, tuple[int, ...]] = {}
    for s, tiles in in_windows(program.body, dict(program.tiles)):
        match s:
            case Buffer(name, _, sizes):
                held[name] = sizes
            case Get(_, name, axes) | Set(name, axes) if held[name] != tuple(tiles[a] for a in axes):
                return f"parts of {name} are read or written, which lies in registers"
    return None
