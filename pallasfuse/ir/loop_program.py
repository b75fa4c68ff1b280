"""`LoopProgram`: *what* is computed, as a sequence of perfect nests (Neptune, figure 1a and appendix E).

Invariants, checked by `verify`:
- every tensor is defined once, before it is read; every read names one axis per dimension, of the same extent;
- the axes of a nest (kept and reduced) are distinct, and its body uses no other axis;
- a map nest has no reduced axes; a reduction has a reducer and at least one reduced axis.
"""

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.dtypes import itemsize_bytes
from pallasfuse.ir.expr import Const, Expr, Read, const, reads_in, rename_axes, substitute
from pallasfuse.ir.lookup import Lookup
from pallasfuse.ir.plain_work import Branches, Convolution, Nothing, PlainWork, Trips, Unknown
from pallasfuse.ir.reducers import Reducer
from pallasfuse.ir.simplify import simplify
from pallasfuse.ir.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """The user's source line that a node comes from."""

    summary: str = ""

    def __str__(self) -> str:
        return self.summary or "<unknown line>"


@dataclass(frozen=True, slots=True)
class Nest:
    """`name[axes] = body` (a map), or `name[axes] = reducer over reduced of body` (a reduction).

    `dtype` is the type of the stored result; a reduction is carried in the accumulator type of its body
    and converted when it is finished.
    """

    name: str
    axes: tuple[Axis, ...]
    body: Expr
    dtype: str
    reduced: tuple[Axis, ...] = ()
    reducer: Reducer | None = None
    source: Source = Source()
    precision: str | None = None
    """Precision of the products in a contraction, as JAX names it; None for a sum that the user wrote as a sum: full precision."""
    picks: bool = False
    """The program takes one element of the reduced axis by its index: the body is `select(axis == an index in range, x, 0)`."""
    unit_batch: bool = False
    """A contraction with a batch dimension of one element, which is no axis: XLA computes it in another shape."""
    internal: bool = False
    """A step inside of an operation of the program: no variable has its value, and only a kernel computes it."""

    @property
    def is_reduction(self) -> bool:
        return self.reducer is not None

    @property
    def reads(self) -> frozenset[str]:
        return self.body.tensors


ExternalForm = Literal["selection", "elements", "join", "update", "whole"]
"""The way in which an operation without a nest makes its result.

selection: of some elements of its operands, as they are. elements: each of its elements from one of every operand. join: of all
operands, one beside the other. update: as its first operand, with elements replaced by those of others, or combined with them.
whole: in another way.
"""


@dataclass(frozen=True, slots=True)
class External:
    """A tensor that XLA computes from `operands`, because of `reason`."""

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    operands: tuple[str, ...]
    reason: str
    source: Source = Source()
    lookup: Lookup | None = None
    """The place of each of its elements in another tensor, where a kernel may read them, so that it need not be stored."""
    form: ExternalForm = "whole"
    run: int = field(default=0, compare=False, repr=False)
    """The elements that lie side by side in each piece that positions, its second operand, choose; 0: none choose any."""
    within: int = field(default=0, compare=False, repr=False)
    """The elements of its first operand, one after the other, within which neighbouring pieces are chosen; 0: all of them."""
    combines: bool = field(default=False, compare=False, repr=False)
    """An update makes one element of those that are there and those that come."""
    work: PlainWork | None = field(default=None, compare=False, repr=False)
    """The work of the operation, for the price: one object for all of its results. None: it only moves elements, or nobody knows
    more of it than that."""
    operation: str = field(default="", compare=False, repr=False)
    """A text for the operation: XLA computes those once whose texts and operands are the same. Empty: there is none."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(self.operands)

    @property
    def moves_nothing(self) -> bool:
        """Is it another shape of what XLA stores already?"""
        return self.lookup is not None and self.lookup.source.name not in self.operands


@dataclass(frozen=True, slots=True)
class LoopProgram:
    """Inputs, nests in an order that respects their reads, and the names of the outputs."""

    inputs: tuple[Tensor, ...]
    nests: tuple[Nest | External, ...]
    outputs: tuple[str, ...]

    def definitions(self) -> Iterator[Tensor | Nest | External]:
        yield from self.inputs
        yield from self.nests

    def __str__(self) -> str:
        return show(self)


def as_xla_runs(program: LoopProgram, *, one_by_one: bool) -> LoopProgram:
    """Returns a program that costs XLA what this one does: steps of an operation are one, what is picked is looked at alone, a
    slice of an input is read where it is, and numbers that are known are no operations, nor on a GPU reshapes around convolutions.

    one_by_one: where an operation has steps (`Nest.internal`), XLA looks at one element after the other, as on a CPU, and computes
    its operand before. Else it is one pass: of a chain of steps the last one stays, and whatever begins one is empty.
    """
    steps = {n.name: n for n in program.nests if isinstance(n, Nest) and n.internal}
    first = {name: n for name, n in steps.items() if n.reads.isdisjoint(steps)}
    empty = {name: n.reducer.identity(n.dtype) if n.reducer is not None else 0 for name, n in first.items()}

    def apart(nest: Nest | External) -> Nest | External:
        if isinstance(nest, External):
            return nest
        if nest.picks:
            single = {a: Axis(a.name, 1) for a in nest.reduced}
            return replace(nest, body=rename_axes(nest.body, single), reduced=tuple(single.values()))
        if not nest.internal and nest.reads.isdisjoint(steps):
            return nest
        if one_by_one and not nest.internal:
            behind = frozenset[str]().union(*(steps[t].reads for t in nest.reads if t in steps))
            operands = tuple(sorted(behind - steps.keys()))
            return External(nest.name, nest.axes, nest.dtype, operands, "one element after the other", nest.source)
        known: dict[Expr, Expr] = {r: const(empty[r.tensor], r.dtype) for r in reads_in(nest.body) if r.tensor in empty}
        return replace(nest, body=simplify(substitute(nest.body, known)), internal=False)

    given = _given_to_xla(program)
    nests = _with_numbers(tuple(apart(n) for n in program.nests if n.name not in given))
    nests = nests if one_by_one else _with_shapes(nests, program)
    if not given and all(map(operator.is_, nests, program.nests)):
        return program
    return replace(program, inputs=(*program.inputs, *given.values()), nests=nests)


def _with_numbers(nests: tuple[Nest | External, ...]) -> tuple[Nest | External, ...]:
    """Returns the nests with the numbers that they read where these are known, as XLA computes them when it compiles: of the
    variance of n values, n less the correction, and whether that is positive."""
    numbers: dict[str, Const] = {}

    def computed(nest: Nest | External) -> Nest | External:
        if isinstance(nest, External) or nest.is_reduction:
            return nest
        if not any(t in numbers for t in nest.body.tensors) and (nest.body.tensors or nest.body.axes):
            return nest
        known: dict[Expr, Expr] = {r: numbers[r.tensor] for r in reads_in(nest.body) if r.tensor in numbers}
        body = simplify(substitute(nest.body, known))
        if isinstance(body, Const):
            numbers[nest.name] = body
        return nest if body is nest.body else replace(nest, body=body)

    return tuple(map(computed, nests))


SHAPE = "another shape of what is stored: it moves nothing"


def is_reshape(nest: Nest) -> bool:
    """Does a nest only copy a tensor, in the order in which its elements are stored?"""
    return (
        not nest.is_reduction and not nest.internal and isinstance(nest.body, Read) and nest.body.indices == nest.axes
    )


def _with_shapes(nests: tuple[Nest | External, ...], program: LoopProgram) -> tuple[Nest | External, ...]:
    """Returns the nests with reshapes around convolutions as operations that do nothing.

    They are those of results that nothing else reads, and of inputs that nothing but convolutions reads: XLA starts no kernel for
    them (layers of films, run on an H200).
    """
    around = {n.name for n in nests if isinstance(n, External) and isinstance(n.work, Convolution)}
    readers = Counter(t for n in nests for t in n.reads)
    by_others = frozenset[str]().union(*(n.reads for n in nests if n.name not in around), program.outputs)
    inputs = {t.name for t in program.inputs}

    def shaped(nest: Nest | External) -> Nest | External:
        if isinstance(nest, External) or not is_reshape(nest):
            return nest
        (source,) = nest.reads
        is_last = source in around and readers[source] == 1 and source not in program.outputs
        if not is_last and not (source in inputs and nest.name not in by_others):
            return nest
        around.add(nest.name)
        return External(nest.name, nest.axes, nest.dtype, (source,), SHAPE, nest.source, work=Nothing())

    return tuple(map(shaped, nests))


def _given_to_xla(program: LoopProgram) -> dict[str, Tensor]:
    """The slices of a program, and the numbers that say where they are: those that are inputs in another shape cost nothing."""
    tables = {n.lookup.table.name for n in program.nests if isinstance(n, External) and n.lookup and n.lookup.is_slice}
    inputs = {t.name for t in program.inputs}

    def is_given(nest: Nest | External) -> bool:
        if not isinstance(nest, Nest):
            return is_slice(nest)
        return nest.name in tables and isinstance(nest.body, Read) and nest.body.tensor in inputs

    found = (n for n in program.nests if n.name not in program.outputs and is_given(n)) if tables else ()
    return {n.name: Tensor(n.name, n.axes, n.dtype) for n in found}


def bytes_by_name(program: LoopProgram) -> dict[str, float]:
    """The bytes of every tensor of a program, by its name."""
    return {d.name: float(volume(d.axes) * itemsize_bytes(d.dtype)) for d in program.definitions()}


def is_slice(nest: Nest | External) -> bool:
    """Is a tensor a slice of another one, whose place a number says? Only of what kernels may read by themselves."""
    return isinstance(nest, External) and nest.lookup is not None and nest.lookup.is_slice


def verify(program: LoopProgram) -> LoopProgram:
    """Check the invariants above; returns the program.

    Raises:
      InvalidProgramError: naming the nest and the invariant that it breaks.
    """
    defined: dict[str, tuple[Axis, ...]] = {}

    def fail(where: str, why: str) -> None:
        raise InvalidProgramError(f"loop program: nest {where!r}: {why}")

    for node in program.definitions():
        if node.name in defined:
            fail(node.name, "defined twice")
        for operand in () if isinstance(node, Tensor) else node.reads:
            if operand not in defined:
                fail(node.name, f"reads {operand!r} before it is defined")
        if isinstance(node, Nest):
            space = node.axes + node.reduced
            if len(set(space)) != len(space):
                fail(node.name, "its axes are not distinct")
            if not node.body.axes <= set(space):
                fail(node.name, f"its body uses axes {sorted(node.body.axes - set(space))} that it does not loop over")
            if bool(node.reduced) != node.is_reduction:
                fail(node.name, "a reduction has a reducer and reduced axes, a map has neither")
            for sub in reads_in(node.body):
                have, want = [a.extent for a in sub.indices], [a.extent for a in defined[sub.tensor]]
                if have != want:
                    fail(node.name, f"reads {sub} with extents {have}, but the tensor has {want}")
        defined[node.name] = node.axes
    for name in program.outputs:
        if name not in defined:
            fail(name, "is an output but is never defined")
    return program


def show(program: LoopProgram) -> str:
    """Text in the style of Neptune's figure 1a: `name[kept axes] <- reducer(reduced axes) body`."""
    lines = []
    for t in program.inputs:
        lines.append(f"input {t.name}: {t.dtype}[{', '.join(f'{a.name}:{a.extent}' for a in t.axes)}]")
    for nest in program.nests:
        head = f"{nest.name}[{', '.join(a.name for a in nest.axes)}]"
        match nest:
            case External():
                lines.append(f"{head}: {nest.dtype} = xla({', '.join(nest.operands)})  # {nest.reason}")
            case Nest(reducer=None):
                lines.append(f"{head}: {nest.dtype} = {nest.body}")
            case Nest():
                over = ", ".join(f"{a.name}:{a.extent}" for a in nest.reduced)
                lines.append(f"{head}: {nest.dtype} {nest.reducer}[{over}]= {nest.body}")
    lines.append(f"return {', '.join(program.outputs)}")
    return "\n".join(lines)


def unknown_in(program: LoopProgram) -> list[str]:
    """Lists what a program contains of which nobody knows how long it takes, in its bodies, too: each name once, in order."""
    found: dict[str, None] = {}
    for node in program.nests:
        match node.work if isinstance(node, External) else None:
            case Unknown(what):
                found[what] = None
            case Trips(body=body):
                found |= dict.fromkeys(unknown_in(body.value))
            case Branches(branches):
                found |= dict.fromkeys(what for b in branches for what in unknown_in(b.value))
            case _:
                pass
    return list(found)
