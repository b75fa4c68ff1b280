"""Kernels of one block without loops are written as loops of a program, whose price by XLA is the least that they can cost.

XLA compiles the same operations, with some barriers more.
"""

from collections.abc import Iterator, Mapping, Sequence

from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Expr, Read, mul, postorder, read, rename_axes, substitute
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.reducers import SUM
from pallasfuse.ir.tile_orders import ranks, strided
from pallasfuse.ir.tile_program import Contract, Let, Load, Reduce, Store, TileProgram

WITHOUT_LOOPS = "without loops"
"""The name of the term for kernels that XLA compiles as a program of its own: it takes no time, and counts them."""
_OF_TILES = (Load, Let, Reduce, Contract, Store)


def as_program(program: TileProgram) -> LoopProgram | None:
    """Returns the program that a kernel is where its only block has all positions of all axes; None where it has loops."""
    beside = program.lookups or program.ranges or program.instead or program.unrolled
    whole = all(tile == axis.extent for axis, tile in (*program.grid, *program.tiles))
    if beside or not whole or not all(isinstance(s, _OF_TILES) for s in program.body):
        return None
    nests = tuple(_nests(program, _named(program)))
    inputs = {t.name: t for t in program.inputs}
    taken = frozenset(t for n in nests for t in n.reads) & inputs.keys()
    return LoopProgram(tuple(inputs[t] for t in sorted(taken)), nests, tuple(t.name for t in program.outputs))


def _named(program: TileProgram) -> dict[str, str]:
    """Returns the results that are stored as they are: they are computed in their places, and not copied there."""
    made = {s.name: s.axes for s in program.body if isinstance(s, Reduce | Contract)}
    types = {t.name: t.dtype for t in program.outputs}
    found: dict[str, str] = {}
    for s in program.body:
        if not isinstance(s, Store) or not isinstance(s.value, Read):
            continue
        if made.get(s.value.tensor) == s.indices and s.value.dtype == types[s.tensor]:
            found.setdefault(s.value.tensor, s.tensor)
    return found


def _nests(program: TileProgram, named: Mapping[str, str]) -> Iterator[Nest]:
    """Yields the nest of each statement; what is loaded is read where it lies. named: as of `_named`."""
    types = {t.name: t.dtype for t in program.outputs}
    places = ranks(program)

    def strides(side: Expr, over: Sequence[Axis]) -> int:
        """Counts what the emitted loops would read in strides of a left side; they take the other one for that."""
        wide = [a for a in side.axes.union(over) if a.extent > 1]
        return strided(wide, over, places, volume(wide))

    def called(name: str) -> str:
        """The name of a value in the program: a result that is rounded before it is stored may have the name of what is stored."""
        return named.get(name) or (f"{name}.inside" if name in types else name)

    lies: dict[str, tuple[str, tuple[Axis, ...]]] = {}

    def of(body: Expr) -> Expr:
        reads = [n for n in postorder(body) if isinstance(n, Read) and n.tensor in lies]
        return substitute(body, {n: read(*lies[n.tensor], n.dtype) for n in reads})

    for s in program.body:
        match s:
            case Load():
                lies[s.name] = s.tensor, s.indices
            case Let():
                yield Nest(called(s.name), s.axes, rename_axes(of(s.value), dict(s.renamed)), s.value.dtype)
            case Reduce():
                yield Nest(called(s.name), s.axes, of(s.value), s.value.dtype, s.over, s.reducer)
            case Contract():
                left, right = sorted((s.lhs, s.rhs), key=lambda side: strides(side, s.over))
                body = mul(of(left), of(right))
                yield Nest(called(s.name), s.axes, body, s.dtype, s.over, SUM, precision=s.precision or "default")
            case Store() if not (isinstance(s.value, Read) and named.get(s.value.tensor) == s.tensor):
                value = of(s.value)
                yield Nest(s.tensor, s.indices, value, types.get(s.tensor, value.dtype))
        if isinstance(s, Let | Reduce | Contract) and called(s.name) != s.name:
            lies[s.name] = called(s.name), s.axes
