"""Programs that ought to be the same operation for operation: every operation is an uninterpreted function.

A number is a 64-bit hash of the term that computes it, so one evaluation decides, but for collisions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.affine_constants import as_operations
from pallasfuse.ir.domain import Arrays
from pallasfuse.ir.reducers import Reducer
from pallasfuse.primitive_names import PLATFORMS
from pallasfuse.verification.field import Array, mix
from pallasfuse.verification.jaxprs import body_of


def _word(text: str) -> np.uint64:
    word = np.uint64(0)
    for n in range(0, len(text), 8):
        word = np.uint64(mix(word, np.uint64(int.from_bytes(text[n : n + 8].encode()[:8].ljust(8, b"\0"), "little"))))
    return word


class Structure(Arrays):
    """`ir.domain.Domain` over hashes of terms."""

    def variable(self, name: str, shape: Sequence[int]) -> Array:
        """An input: different numbers everywhere."""
        return mix(_word(name), np.arange(int(np.prod(shape)), dtype=np.uint64).reshape(tuple(shape)))

    def constant(self, value: float | int | bool, dtype: str, rank: int) -> Array:
        return np.full((1,) * rank, _word(f"{value!r}: {dtype}"))

    def integers(self, values: Array, dtype: str) -> Array:
        return mix(_word(f"position: {dtype}"), values)

    def apply(self, op: str, args: Sequence[Array], dtype: str) -> Array:
        return mix(_word(f"{op}: {dtype}"), *args)

    def reduce(
        self, reducer: Reducer, value: Array, dims: tuple[int, ...], dtype: str, *, joins: bool = False
    ) -> Array:
        with np.errstate(over="ignore"):
            return mix(_word(f"{reducer}: {dtype}"), mix(value).sum(dims, keepdims=True, dtype=np.uint64))

    def number(self, value: Array) -> int:
        raise AssertionError("a hash is no number")

    def assemble(self, parts: Sequence[tuple[tuple[Any, ...], Array]], shape: tuple[int, ...], dtype: str) -> Array:
        result = np.zeros(shape, np.uint64)
        for index, part in parts:
            result[index] = part
        return result


class Positions(Structure):
    """Hashes terms as `Structure` does, but adds up and multiplies positions that are known: `2 * 6 + 3` is 15."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def constant(self, value: float | int | bool, dtype: str, rank: int) -> Array:
        whole = dtype == "int32" and isinstance(value, int)
        return self._known(np.full((1,) * rank, value)) if whole else super().constant(value, dtype, rank)

    def integers(self, values: Array, dtype: str) -> Array:
        return self._known(np.asarray(values)) if dtype == "int32" else super().integers(values, dtype)

    def apply(self, op: str, args: Sequence[Array], dtype: str) -> Array:
        numbers = [self._numbers_of(a) for a in args] if op in _OF_POSITIONS and dtype == "int32" else [None]
        known = [n for n in numbers if n is not None]
        return self._known(_OF_POSITIONS[op](*known)) if len(known) == len(args) else super().apply(op, args, dtype)

    def _known(self, values: Array) -> Array:
        found = super().integers(values, "int32")
        self._numbers |= zip(found.ravel().tolist(), values.ravel().tolist(), strict=True)
        return found

    def _numbers_of(self, hashes: Array) -> Array | None:
        found = [self._numbers.get(h) for h in hashes.ravel().tolist()]
        return None if None in found else np.asarray(found, np.int64).reshape(hashes.shape)


_OF_POSITIONS: dict[str, Callable[[Array, Array], Array]] = {"add": np.add, "mul": np.multiply}


def terms(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
    """A hash of the term of each result, over hashes of the inputs; calls are taken apart.

    Two equations are the same function when they hold the same parameters, two held arrays when they are the same object.
    """
    values: dict[Var, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, constant in zip(jaxpr.constvars, jaxpr.consts, strict=True):
        operations = as_operations(constant)  # a constant of positions may be computed instead
        values[var] = hash(("array", id(constant))) if operations is None else terms(operations, [])[0]

    def term(atom: Any) -> int:
        if isinstance(atom, Literal):
            return hash(("literal", repr(np.asarray(atom.val).tolist()), str(atom.aval)))
        return values[atom]

    for eqn in jaxpr.eqns:
        operands = [term(a) for a in eqn.invars]
        body = body_of(eqn)
        if body is None and (body := _of_every_platform(eqn)) is not None:
            _, *operands = operands
        if body is None and eqn.primitive.name == "custom_linear_solve":
            body, operands = _solver(eqn, operands)
        if body is not None:
            found = terms(body, operands)
        else:
            found = [hash((eqn.primitive.name, id(eqn.params), *operands, n)) for n in range(len(eqn.outvars))]
        values.update(zip(eqn.outvars, found, strict=True))
    return [term(a) for a in jaxpr.outvars]


def _of_every_platform(eqn: JaxprEqn) -> Jaxpr | None:
    """Finds the branch for all platforms that a choice does not name, where it names none that programs are lowered for.

    The frontend has a rule of its own for this, which is what is checked here.
    """
    named = eqn.params.get("branches_platforms") or ()
    others = [b for b, p in zip(eqn.params.get("branches", ()), named, strict=False) if p is None]
    ours = set(PLATFORMS).intersection(p for platforms in named for p in platforms or ())
    return others[0] if others and not ours else None


def _solver(eqn: JaxprEqn, operands: Sequence[int]) -> tuple[Jaxpr, list[int]]:
    """Finds what solves a linear system, with its own operands and the right sides.

    Operands come in the order of what multiplies by the matrix, by its transpose, and what solves with each. The frontend has a
    rule of its own for this, too.
    """
    of_matrix, of_transpose, of_solver, of_other = eqn.params["const_lengths"]
    begin = of_matrix + of_transpose
    own, right_sides = operands[begin : begin + of_solver], operands[begin + of_solver + of_other :]
    return eqn.params["jaxprs"].solve, [*own, *right_sides]
