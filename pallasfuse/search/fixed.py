"""Tensors whose elements follow from their positions: deltas and zeros."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read
from pallasfuse.ir.loop_program import LoopProgram, Nest


@dataclass(frozen=True, slots=True)
class Fixed:
    """The tensors of a program that no operand decides about.

    deltas: of two axes, true or one where their positions are equal, and false or zero elsewhere. zeros: zero everywhere.
    """

    deltas: frozenset[str]
    zeros: frozenset[str]

    def is_zero(self, node: Expr) -> bool:
        return (isinstance(node, Const) and node.value == 0) or (isinstance(node, Read) and node.tensor in self.zeros)


@dataclass
class _Positions:
    """Which tensors are the position along one of their axes."""

    axes: Mapping[str, tuple[Axis, ...]]
    along: dict[str, Axis] = field(default_factory=dict)

    def of(self, node: Expr) -> Axis | None:
        """The axis whose position an expression is."""
        match node:
            case Index(axis, dtype):
                return axis if _holds(dtype, axis.extent - 1) else None
            case Read(tensor, indices, _) if tensor in self.along:
                return dict(zip(self.axes[tensor], indices, strict=True)).get(self.along[tensor])
            case Apply("add", (x, Const(value=0))) | Apply("convert", (x,)):
                along = self.of(x)
                return along if along is not None and _holds(node.dtype, along.extent - 1) else None
        return None


def _holds(dtype: str, number: int) -> bool:
    """Are all numbers up to this one different in a type?"""
    return dtypes.is_integer(dtype) and number < 1 << 8 * dtypes.itemsize_bytes(dtype) - 1


def fixed_in(program: LoopProgram) -> Fixed:
    """The deltas and zeros of a program."""
    positions = _Positions({d.name: d.axes for d in program.definitions()})
    deltas, zeros = set[str](), set[str]()
    for nest in program.nests:
        if not isinstance(nest, Nest) or nest.is_reduction:
            continue
        along = positions.of(nest.body)
        positions.along |= {} if along is None else {nest.name: along}
        match nest.body:
            case Apply("eq", (a, b)) if len(nest.axes) == 2 and {positions.of(a), positions.of(b)} == set(nest.axes):
                deltas.add(nest.name)
            case Read(tensor) | Apply("convert", (Read(tensor),)) if tensor in deltas and len(nest.axes) == 2:
                deltas.add(nest.name)
            case Read(tensor) | Apply("convert", (Read(tensor),)) if tensor in zeros:
                zeros.add(nest.name)
            case Const(value=0):
                zeros.add(nest.name)
    return Fixed(frozenset(deltas), frozenset(zeros))
