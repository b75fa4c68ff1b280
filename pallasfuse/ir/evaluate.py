"""Float64 evaluation of expressions and loop programs with NumPy: the reference that every stage is compared with.

Casts between float types are not rounded here: the evaluator says what the program means, not how it rounds.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.loop_program import External, LoopProgram
from pallasfuse.ir.ops import OPS

Array = np.ndarray[Any, Any]


def wide_type(dtype: str) -> type:
    return np.float64 if dtypes.is_float(dtype) else np.bool_ if dtype == "bool" else np.int64


def evaluate_expr(root: Expr, space: tuple[Axis, ...], tensors: Mapping[str, Array]) -> Array:
    """The value of `root` at every point of `space`: float64 (or int64, bool) with one dimension per axis of space."""
    position = {axis: d for d, axis in enumerate(space)}
    shape = tuple(a.extent for a in space)
    values: dict[Expr, Array] = {}

    def spread(x: Array, axes: tuple[Axis, ...]) -> Array:
        if len(set(axes)) != len(axes):  # a diagonal, x[i, i]
            letters = {a: chr(97 + n) for n, a in enumerate(dict.fromkeys(axes))}
            x = np.einsum(f"{''.join(letters[a] for a in axes)}->{''.join(letters.values())}", x)
            axes = tuple(letters)
        order = sorted(range(len(axes)), key=lambda d: position[axes[d]])
        wide = [1] * len(space)
        for a in axes:
            wide[position[a]] = a.extent
        return x.transpose(order).reshape(wide)

    with np.errstate(all="ignore"):
        for node in postorder(root):
            match node:
                case Const(value, dtype):
                    values[node] = np.asarray(value, wide_type(dtype))
                case Index(axis, _):
                    values[node] = spread(np.arange(axis.extent), (axis,))
                case Read(tensor, indices, dtype):
                    values[node] = spread(np.asarray(tensors[tensor]).astype(wide_type(dtype)), indices)
                case Apply("convert", (x,), dtype):
                    # float -> integer truncates; everything else keeps its value
                    values[node] = values[x].astype(wide_type(dtype))
                case Apply(op, args, dtype):
                    values[node] = np.asarray(OPS[op].evaluate(*(values[a] for a in args))).astype(wide_type(dtype))
        return np.broadcast_to(values[root], shape)


def evaluate(program: LoopProgram, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every tensor of the program, by name, in float64.

    Raises:
      InvalidProgramError: the program has a tensor that only XLA can compute.
    """
    tensors: dict[str, Array] = {t.name: np.asarray(inputs[t.name]) for t in program.inputs}
    for nest in program.nests:
        if isinstance(nest, External):
            if nest.name not in inputs:
                raise InvalidProgramError(f"cannot evaluate {nest.name!r}: {nest.reason}")
            tensors[nest.name] = np.asarray(inputs[nest.name])
            continue
        value = evaluate_expr(nest.body, nest.axes + nest.reduced, tensors)
        if nest.reducer is not None:
            over = tuple(range(len(nest.axes), len(nest.axes) + len(nest.reduced)))
            with np.errstate(all="ignore"):
                if 0 in value.shape:
                    value = np.full(value.shape[: len(nest.axes)], nest.reducer.identity(nest.body.dtype))
                else:
                    value = nest.reducer.reduce(value, axis=over)
        tensors[nest.name] = value
    return tensors
