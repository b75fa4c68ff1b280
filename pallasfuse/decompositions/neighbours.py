"""What stands around an operation in a program, as far as XLA computes it together with the operation's other ways.

Another way may begin by padding an operand, or end with a part of a larger result. Alone, both are copies. But XLA pads what it
computes while it stores it, and readers that it fuses take their part from the larger array themselves. Stand-ins for these
neighbours make the price see that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.decompositions.writing import Run
from pallasfuse.jaxpr_frontend.elementwise import RULES as MAPS

type Array = Any

_READS = frozenset({
    "argmax", "argmin", "broadcast_in_dim", "gather", "reduce_max", "reduce_min", "reduce_sum", "select_n", "slice", "squeeze",
    *MAPS,
})  # fmt: skip
"""Operations that take a part of an array themselves, where they read it."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What makes the operands of an operation, and what reads its result."""

    computed: tuple[bool, ...]
    """By operands: does XLA compute it where it is stored for the operation?"""
    read: bool
    """Do only operations read the result which XLA fuses with a part of it?"""

    def around(self, run: Run) -> Run:
        """Returns the computation of an operation with stand-ins for its neighbours: negations, and sums of rows."""
        if not self.read and not any(self.computed):
            return run

        def whole(*operands: Array) -> list[Array]:
            given = [-x if made else x for x, made in zip(operands, self.computed, strict=True)]
            return [jnp.sum(r, -1, dtype=jnp.float32) if self.read else r for r in run(*given)]

        return whole


NONE = Neighbours((), False)
"""Nothing stands around an operation but arrays in memory."""


def neighbours(jaxpr: Jaxpr) -> Callable[[JaxprEqn], Neighbours]:
    """Returns what finds the neighbours of an equation of a flat jaxpr."""
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        for var in {a for a in eqn.invars if isinstance(a, Var)}:
            readers.setdefault(var, []).append(eqn)
    results = {a for a in jaxpr.outvars if isinstance(a, Var)}

    def is_computed(atom: Var | Literal) -> bool:
        maker = makers.get(atom) if isinstance(atom, Var) else None
        alone = isinstance(atom, Var) and len(readers[atom]) == 1 and atom not in results
        return maker is not None and maker.primitive.name in MAPS and alone and _is_array_of_floats(atom)

    def is_read(var: Var) -> bool:
        return var not in results and var in readers and all(
            any(map(is_read, r.outvars)) if r.primitive.name == "reshape" else r.primitive.name in _READS for r in readers[var]
        )  # fmt: skip

    def found(eqn: JaxprEqn) -> Neighbours:
        read = all(_is_array_of_floats(v) and is_read(v) for v in eqn.outvars)
        return Neighbours(tuple(map(is_computed, eqn.invars)), read)

    return found


def _is_array_of_floats(atom: Var | Literal) -> bool:
    shape: Sequence[int] = _compat.shape_of(atom)
    return bool(jnp.issubdtype(_compat.dtype_of(atom), jnp.floating)) and len(shape) > 0
