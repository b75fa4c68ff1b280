"""The forms of XLA's kernels: calls of a library, loops over one space of points, and operations that are no nests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis, innermost, volume
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.plain_work import PlainWork
from pallasfuse.price.scattered import NEAR_BYTES, Pieces

Place = tuple[str, tuple[Axis, ...]]
"""A tensor, and the axes that run over its dimensions."""


@dataclass(frozen=True, slots=True)
class Copy:
    """An array that is written once more, with its dimensions in another order."""

    moved_bytes: float
    in_rows: bool
    """Its last dimension stays the last one."""
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Elements of an operand of a product that are neighbours in memory, and whether they are summed."""

    elements: int
    summed: bool


@dataclass(frozen=True, slots=True)
class LibraryProduct:
    """A matrix product that a library computes."""

    batch: int
    rows: int
    columns: int
    summed: int
    operand_dtype: str
    precise: bool
    read_bytes: float
    written_bytes: float
    copies: tuple[Copy, ...]
    """Operands whose dimensions are brought into another order before."""
    name: str = ""
    """The tensor that it makes."""
    operands: tuple[tuple[str, float], ...] = ()
    """The tensors that it reads, and their bytes."""
    in_columns: bool = False
    """The left operand lies in memory with the contracted axes before its own."""
    rhs_turned: bool = False
    """The right operand lies in memory with its own axes before the contracted ones."""
    reshaped: bool = False
    """Its result has fewer dimensions than what reads it."""
    turned: tuple[Copy, ...] = ()
    """Copies of operands that are computed, should they be made in the order of the program."""
    rows_of: tuple[Row, ...] = ()
    """The rows in which each operand lies in memory, after copies; empty where nobody knows them."""
    computes_operand: bool = False
    """It computes an operand as it reads it, of which it has more than a tile."""
    read_at_end: float | None = None
    """The bytes that it reads to compute its results further before they are stored; None: they are stored as they are."""

    @property
    def sources(self) -> dict[str, float]:
        return dict(self.operands)

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.summed


@dataclass(slots=True)
class LoopFusion:
    """Maps and reductions over one space of points."""

    roots: list[Nest]
    bodies: list[Expr]
    reads: dict[Place, float] = field(default_factory=dict)
    """Bytes."""
    is_row: bool = False
    """Several reductions and maps along a row that stays on the chip."""
    in_order: frozenset[str] = frozenset()
    """Tensors whose layout is given: results of the program, and what other kernels read."""
    inside: frozenset[str] = frozenset()
    """Tensors that are never stored: a library computes what makes them and what reads them together."""
    calls: int = 0
    """Calls of the library that are counted here: each once, in one of its parts."""
    call: int = 0
    """The number of the library's call that it is part of; 0 for loops."""
    cached_bytes: float = 0.0
    """Bytes that are read again, from the cache."""
    window_operations: float = 0.0
    """It takes so many operations to reduce windows around its elements."""
    pieces: tuple[Pieces, ...] = ()
    """Those of its reads that lie anywhere."""
    threads: float = 0.0
    """The threads of a kernel that writes a join; 0 where as many are started as are needed."""
    turned: float = 0.0
    """Elements of a matrix that the program transposes before it multiplies a vector with it (CPUs)."""
    streams_matrix: bool = False
    """Its first nest is the product of a vector and a matrix that a library's kernel streams, whatever its layout."""

    @property
    def by_library(self) -> bool:
        """Is it no loop, but part of a library's call?"""
        return self.call > 0

    @property
    def makes(self) -> tuple[str, ...]:
        return tuple(n.name for n in self.roots)

    @property
    def sources(self) -> dict[str, float]:
        """The tensors that it reads, and their bytes in memory."""
        read = {tensor: moved for (tensor, _), moved in self.reads.items() if tensor not in self.makes}
        return {tensor: 0.0 if tensor in self.inside else moved for tensor, moved in read.items()}

    @property
    def written_bytes(self) -> float:
        return sum(self.bytes_of(n) for n in self.roots if n.name not in self.inside)

    @staticmethod
    def bytes_of(root: Nest) -> float:
        return float(volume(root.axes) * dtypes.itemsize_bytes(root.dtype))

    @property
    def is_product(self) -> bool:
        """Is it a product that is streamed, and nothing else?"""
        return self.streams_matrix and len(self.roots) == 1

    @property
    def is_library_product(self) -> bool:
        """Is it the product of a vector and one matrix, which is a library's? Each of a batch is computed in a loop."""
        kept = [frozenset(axes) - self.reduced for _, axes in self.reads]
        return self.is_product and sum(map(len, kept)) == len(frozenset().union(*kept))

    @property
    def turns(self) -> bool:
        """Does it bring the dimensions of most of what it reads in another order?"""
        turned = 0.0
        for nest in self.roots:
            if not nest.is_reduction and len(nest.axes) > 1:
                last = innermost(nest.axes)
                turned += sum(b for (_, axes), b in self.reads.items() if last in axes and innermost(axes) != last)
        return 2 * turned > self.read_bytes

    @property
    def reduces_columns(self) -> bool:
        """Does it reduce along an axis whose elements are apart in memory, most of what it reads?"""
        apart = sum(b for (_, axes), b in self.reads.items() if self.reduced and axes and axes[-1] not in self.reduced)
        return 2 * apart > self.read_bytes

    @property
    def bytes_read_again(self) -> float:
        """The bytes that blocks take from a cache which is shared: of operands that several rows or columns are reduced with.

        Those of some 100 kB are found beside each multiprocessor. A block that reduces several neighbouring results takes what
        they have in common once.
        """
        reductions = [n for n in self.roots if n.is_reduction and n.name not in self.inside]
        found = 0.0
        for (_, axes), moved in self.reads.items():
            if moved > NEAR_BYTES:
                found += moved * max((_times_taken(axes, n) - 1 for n in reductions), default=0.0)
        return found

    @property
    def strided_elements(self) -> float:
        """The elements that a loop over its results reads in strides: neighbours of a result come from places that are apart.

        Only of results whose layout is given: XLA chooses that of any other one as its readers like it.
        """
        found = 0.0
        for nest in (n for n in self.roots if n.name in self.in_order):
            inner = innermost(nest.axes)
            for (_, indices), moved in self.reads.items():
                if not nest.reduced and inner in indices and innermost(indices) != inner:
                    found += moved / 4
        return found

    @property
    def reduced(self) -> frozenset[Axis]:
        """The axes that some nest reduces."""
        return frozenset(a for n in self.roots for a in n.reduced)

    @property
    def read_bytes(self) -> float:
        made = self.inside.union(self.makes)
        return sum(b for (tensor, _), b in self.reads.items() if tensor not in made)


_RESULTS_OF_A_BLOCK = 16
"""Neighbouring results that a block of a GPU reduces, about: it takes what they have in common once."""


def _times_taken(axes: Sequence[Axis], reduction: Nest) -> float:
    """Counts how often the blocks of a reduction together read a tensor whose dimensions run along `axes`, on average."""
    if not frozenset(reduction.reduced).issubset(axes):
        return 1.0
    missing = [a for a in reduction.axes if a not in axes]
    return max(1.0, volume(missing) / (_RESULTS_OF_A_BLOCK if innermost(reduction.axes) in missing else 1))


@dataclass(frozen=True, slots=True)
class Opaque:
    """An operation that is no nest: what it reads and writes crosses memory."""

    name: str
    read_bytes: float
    written_bytes: float
    looked_at: float = 0.0
    """The elements that it looks at one by one, as for the position of a maximum."""
    looked_at_for_each: float = 0.0
    """The elements that it looks at for each of its results."""
    operands: tuple[tuple[str, float], ...] = ()
    """The tensors that it reads, and their bytes."""
    work: PlainWork | None = None
    """What it computes; None: no more than it moves."""
    pieces: Pieces | None = None
    """Those that it changes, wherever they lie."""
    computes: tuple[Expr, ...] = ()
    """The expressions that it computes of its operands before it stores the results; empty if it stores the operands themselves."""
    computed_with: str = ""
    """Another result of the same operation, in whose price this one is."""
    stored: bool = True
    """Its result is stored; else its last part is computed inside of what reads it."""

    @property
    def sources(self) -> dict[str, float]:
        return dict(self.operands)

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.name,)


XlaKernel = LibraryProduct | LoopFusion | Opaque
