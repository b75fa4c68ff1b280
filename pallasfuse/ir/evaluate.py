"""Evaluation of expressions and loop programs with NumPy: over float64, the reference that every stage is compared with, or
over another domain (the verifier's finite fields).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64, Array, Domain, wide_type
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.loop_program import External, LoopProgram, Nest


def evaluate_over[V](root: Expr, space: tuple[Axis, ...], tensors: Mapping[str, V], domain: Domain[V]) -> V:
    """The value of `root` with one dimension per axis of `space`, of one element where it does not vary."""
    position = {axis: d for d, axis in enumerate(space)}
    values: dict[Expr, V] = {}

    def along(axis: Axis) -> Array:
        shape = [1] * len(space)
        shape[position[axis]] = axis.extent
        return np.arange(axis.extent).reshape(shape)

    for node in postorder(root):
        match node:
            case Const(value, dtype):
                values[node] = domain.constant(value, dtype, len(space))
            case Index(axis, dtype):
                values[node] = domain.integers(along(axis), dtype)
            case Read(tensor, indices):
                order = [position[a] for a in indices]
                if order == sorted(set(order)) and domain.shape(tensors[tensor]) == tuple(a.extent for a in indices):
                    extents = {p: a.extent for p, a in zip(order, indices, strict=True)}
                    values[node] = domain.reshape(tensors[tensor], tuple(extents.get(d, 1) for d in range(len(space))))
                else:
                    values[node] = domain.take(tensors[tensor], tuple(along(a) for a in indices))
            case Apply(op, args, dtype):
                values[node] = domain.apply(op, [values[a] for a in args], dtype)
    return values[root]


def evaluate_nest[V](nest: Nest, tensors: Mapping[str, V], domain: Domain[V]) -> V:
    """The tensor of one nest, with one dimension per axis."""
    value = evaluate_over(nest.body, nest.axes + nest.reduced, tensors, domain)
    value = domain.broadcast(value, tuple(a.extent for a in nest.axes + nest.reduced))
    if nest.reducer is None:
        return value
    dims = tuple(range(len(nest.axes), len(nest.axes) + len(nest.reduced)))
    folded = domain.reduce(nest.reducer, value, dims, nest.body.dtype)
    return domain.finished(domain.reshape(folded, tuple(a.extent for a in nest.axes)))


def evaluate_program[V](
    program: LoopProgram, inputs: Mapping[str, V], domain: Domain[V], external: Callable[[External, dict[str, V]], V]
) -> dict[str, V]:
    """Every tensor of the program, by name. `external` gives the tensors that only XLA can compute."""
    tensors: dict[str, V] = {t.name: inputs[t.name] for t in program.inputs}
    for nest in program.nests:
        tensors[nest.name] = (
            external(nest, tensors) if isinstance(nest, External) else evaluate_nest(nest, tensors, domain)
        )
    return tensors


def evaluate_expr(root: Expr, space: tuple[Axis, ...], tensors: Mapping[str, Any]) -> Array:
    """The value of `root` at every point of `space`: float64 (or int64, bool) with one dimension per axis of space."""
    wide: dict[str, Array] = {
        n.tensor: np.asarray(tensors[n.tensor]).astype(wide_type(n.dtype))
        for n in postorder(root)
        if isinstance(n, Read)
    }
    return np.broadcast_to(evaluate_over(root, space, wide, FLOAT64), tuple(a.extent for a in space))


def evaluate(program: LoopProgram, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Every tensor of the program, by name, in float64.

    Raises:
      InvalidProgramError: the program has a tensor that only XLA can compute, and `inputs` does not have it.
    """

    def external(nest: External, _: dict[str, Array]) -> Array:
        if nest.name not in inputs:
            raise InvalidProgramError(f"cannot evaluate {nest.name!r}: {nest.reason}")
        return np.asarray(inputs[nest.name])

    given: dict[str, Array] = {t.name: np.asarray(inputs[t.name]).astype(wide_type(t.dtype)) for t in program.inputs}
    return evaluate_program(program, given, FLOAT64, external)
