"""Neighbours of an operation in a program, as far as XLA computes them together with the operation's other ways.

Another way may begin by padding an operand, or end with a part of a larger result. Alone, both are copies. But XLA pads what it
computes while it stores it, and readers that it fuses take their part from the larger array themselves. A choice between operands
finds the rows that a gather takes for each element, a concatenation for each operand. Stand-ins for these neighbours make the price
see that.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions.writing import Run
from pallasfuse.jaxpr_frontend.elementwise import RULES as MAPS

type Array = Any

_SAME_ARRAY = frozenset({"copy", "copy_p", "name", "reshape", "sharding_constraint", "squeeze", "stop_gradient"})
"""Operations that compute nothing: whoever reads their results reads what they are given."""
_COMPUTES = frozenset(MAPS) - _SAME_ARRAY
_READS = _COMPUTES | {
    "argmax", "argmin", "broadcast_in_dim", "gather", "reduce_max", "reduce_min", "reduce_sum", "slice",
}  # fmt: skip
"""Operations that take a part of an array themselves, where they read it."""
_TAKES_PARTS = frozenset({"concatenate", "dynamic_slice", "gather", "slice"})
"""Operations that need no more of an operand than they take, each element once or less."""
_MOVES = frozenset({"pad", "rev", "transpose"})
"""Operations that put each element somewhere else."""
_SPREAD = 2_654_435_761
"""Multiples of this, an odd number far from powers of two and small fractions of them, lie all over the numbers of 32 bits."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The operations that make the operands of another one, and those that read its result."""

    computed: tuple[bool, ...]
    """By operands: does XLA compute it where it is stored for the operation?"""
    read: bool
    """Do only operations read the result which XLA fuses with a part of it?"""
    gathered: tuple[bool, ...] = ()
    """By operands: does a gather take its elements from an array, where it is stored for the operation?"""

    @property
    def have_stand_ins(self) -> bool:
        """Is there one that the price sees another operation for?"""
        return self.read or any(self.computed) or any(self.gathered)

    def around(self, run: Run) -> Run:
        """Returns the computation of an operation with stand-ins for its neighbours: negations, rows at places of an operand that
        depend on it, and sums of rows."""
        if not self.have_stand_ins:
            return run

        def whole(*operands: Array) -> list[Array]:
            given = list(operands)
            for n, made in enumerate(self.computed):
                given[n] = -given[n] if made else given[n]
            for n, taken in enumerate(self.gathered):
                given[n] = _own_rows(given[n]) if taken else given[n]
            return [jnp.sum(r, -1, dtype=jnp.float32) if self.read else r for r in run(*given)]

        return whole


NONE = Neighbours((), False)
"""Nothing stands around an operation but arrays in memory."""


def neighbours(jaxpr: Jaxpr) -> Callable[[JaxprEqn], Neighbours]:
    """Returns a function that finds the neighbours of an equation of a flat jaxpr."""
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    readers = Counter(a for e in jaxpr.eqns for a in {a for a in e.invars if isinstance(a, Var)})
    results = {a for a in jaxpr.outvars if isinstance(a, Var)}
    taken = _taken_in_parts(jaxpr, results)

    def made(atom: Var | Literal) -> Var | None:
        """The array that an operand is in another shape, if something makes it for this operand alone."""
        while isinstance(atom, Var) and atom in makers and readers[atom] == 1 and atom not in results:
            if makers[atom].primitive.name not in _SAME_ARRAY:
                return atom
            atom = makers[atom].invars[0]
        return None

    def is_computed(atom: Var | Literal) -> bool:
        var = made(atom)
        return var is not None and makers[var].primitive.name in _COMPUTES and _is_array_of_floats(var)

    def is_gathered(atom: Var | Literal) -> bool:
        var = made(atom)
        return var is not None and makers[var].primitive.name == "gather" and len(_compat.shape_of(var)) > 1

    def found(eqn: JaxprEqn) -> Neighbours:
        if eqn.primitive.name == "concatenate":
            return Neighbours((), read=False, gathered=tuple(map(is_gathered, eqn.invars)))
        read = all(_is_array_of_floats(v) and taken.get(v, False) for v in eqn.outvars)
        return Neighbours(tuple(map(is_computed, eqn.invars)), read)

    return found


def computed_again(jaxpr: Jaxpr) -> frozenset[Var]:
    """Finds the variables of a flat jaxpr whose elements XLA would compute more than once, or one by one for a library, if it fused
    what computes them with what reads them: several operations read them, or one that reduces or multiplies, also through maps."""
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        for var in {a for a in eqn.invars if isinstance(a, Var)}:
            readers.setdefault(var, []).append(eqn)
    found: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        for var in eqn.outvars:
            own = readers.get(var, [])
            if len(own) > 1 or any(_reads_again(reader, found) for reader in own):
                found.add(var)
    return frozenset(found)


def _reads_again(eqn: JaxprEqn, found: Set[Var]) -> bool:
    """Does an operation read an operand as `computed_again` says? found: those of its results that something so reads."""
    name = eqn.primitive.name
    if name in _TAKES_PARTS:
        return False
    is_map = name in _COMPUTES or name in _SAME_ARRAY or name in _MOVES
    return not is_map or not found.isdisjoint(eqn.outvars)


def _own_rows(x: Array) -> Array:
    """Returns as many rows of an array, at places all over it that depend on the first element of each row.

    A gather's own array is often smaller, and found in a cache more often; how large it is nobody knows here.
    """
    first = jnp.real(x[:, *([0] * (x.ndim - 1))]).astype(jnp.int32)
    spread = jnp.arange(x.shape[0], dtype=jnp.uint32) * jnp.uint32(_SPREAD) + first.astype(jnp.uint32)
    return x[spread % jnp.uint32(x.shape[0])]


def _taken_in_parts(jaxpr: Jaxpr, results: Set[Var]) -> dict[Var, bool]:
    """Says of each variable that is read, whether all its readers take a part of it themselves. results: of the jaxpr."""
    taken: dict[Var, bool] = {}
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        own = any(taken.get(v, False) for v in eqn.outvars) if name in _SAME_ARRAY else name in _READS
        if name == "broadcast_in_dim" and math.prod(_compat.shape_of(eqn.invars[0])) == math.prod(
            _compat.shape_of(eqn.outvars[0])
        ):
            own = taken.get(eqn.outvars[0], False)
        for atom in eqn.invars:
            if isinstance(atom, Var):
                taken[atom] = taken.get(atom, atom not in results) and own
    return taken


def _is_array_of_floats(atom: Var | Literal) -> bool:
    shape: Sequence[int] = _compat.shape_of(atom)
    return bool(jnp.issubdtype(_compat.dtype_of(atom), jnp.floating)) and len(shape) > 0
