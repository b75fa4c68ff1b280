"""A `Plan` is what a rule says about one equation: its loops, how it reads its operands, and its scalar body."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pallasfuse._compat import JaxprEqn
from pallasfuse.errors import Refusal
from pallasfuse.ir.expr import Expr
from pallasfuse.ir.reducers import Reducer
from pallasfuse.jaxpr_frontend.dimensions import Dimensions, Symbol

type Position = Callable[[Sequence[Symbol]], Expr]  # the row-major int32 position along a dimension's symbols
type Body = Callable[[tuple[Expr, ...], Position], Expr]
type Rule = Callable[[JaxprEqn, Dimensions, int], Plan | Refusal]  # the int is the equation's space


@dataclass(frozen=True, slots=True)
class Plan:
    """A nest over symbols. `views[n]` are the symbols that operand n is read over, () for a literal or a scalar."""

    kept: tuple[Symbol, ...]
    views: tuple[tuple[Symbol, ...], ...]
    body: Body
    reduced: tuple[Symbol, ...] = ()
    reducer: Reducer | None = None
    precision: str | None = None
    operands: tuple[Any, ...] = ()
    """The values that are read, where these are not the equation's own operands."""
    picks: bool = False
    """As `Nest.picks`."""
    unit_batch: bool = False
    """As `Nest.unit_batch`."""
    places: bool = False
    """The result is the place of what is reduced to: of its first element that equals the maximum or minimum (`places`)."""

    def reads(self, eqn: JaxprEqn) -> tuple[Any, ...]:
        """The variables and literals that `views` are of."""
        return self.operands or tuple(eqn.invars)


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal; tokens and other things without one count as scalars."""
    return tuple(getattr(atom.aval, "shape", ()))


LARGEST = 2**30
"""The most elements of an array in which places are counted in 32 bits."""


def dtype_of(atom: Any) -> str:
    return _name_of(getattr(atom.aval, "dtype", type(atom.aval).__name__))


@cache
def _name_of(dtype: Any) -> str:
    """The name of a type of elements, which NumPy puts together anew each time."""
    return str(dtype)


def flat[T](dims: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(symbol for dim in dims for symbol in dim)


def same(args: tuple[Expr, ...], position: Position) -> Expr:
    """The body of a pure renaming."""
    return args[0]
