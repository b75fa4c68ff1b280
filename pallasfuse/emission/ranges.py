"""The pass before a kernel that is bounded by masks over data: the ends of ranges, as XLA computes them."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasfuse.emission.elementwise import TABLE, select
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, Index, Read, postorder
from pallasfuse.ir.ranges import Range

Array = Any


def range_ends(ranges: tuple[Range, ...], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Computes the ends of ranges and how much is visible between them, by name. `tensors[name]` has one dimension per axis.

    Both ends of a range and the count are one reduction of triples: what the predicate reads is read once, and XLA stores no
    predicate.
    """
    found: dict[str, Array] = {}
    for r in ranges:
        space = (*r.left.axes, r.axis)
        terms = [jnp.broadcast_to(_value(n.body, space, tensors), [a.extent for a in space]) for n in r.nests]
        results = lax.reduce(terms, [jnp.int32(0)] * 3, _joined, (len(space) - 1,))
        found |= dict(zip((t.name for t in r.found), results, strict=True))
    return found


def _joined(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    """The larger of both ends, and the sum of the counts."""
    return jnp.maximum(a[0], b[0]), jnp.maximum(a[1], b[1]), a[2] + b[2]


def _value(root: Expr, space: tuple[Axis, ...], tensors: Mapping[str, Array]) -> Array:
    """The value of an expression, with one dimension per axis of `space`, of one element where it does not vary."""
    dimension = {a: d for d, a in enumerate(space)}
    values: dict[Expr, Array] = {}

    def along(axis: Axis, dtype: Any) -> Array:
        shape = [axis.extent if a == axis else 1 for a in space]
        return lax.broadcasted_iota(dtype, shape, dimension[axis])

    for node in postorder(root):
        match node:
            case Const(value, dtype):
                values[node] = np.array(value, jnp.dtype(dtype))[()]
            case Index(axis, dtype):
                values[node] = along(axis, jnp.dtype(dtype))
            case Read(tensor, indices) if len(set(indices)) == len(indices):
                order = sorted(range(len(indices)), key=lambda d, i=indices: dimension[i[d]])  # type: ignore[misc]
                shape = [a.extent if a in indices else 1 for a in space]
                values[node] = lax.transpose(tensors[tensor], order).reshape(shape)
            case Read(tensor, indices):
                values[node] = tensors[tensor][tuple(along(a, jnp.int32) for a in indices)]
            case Apply("convert", (x,), dtype):
                values[node] = lax.convert_element_type(values[x], jnp.dtype(dtype))
            case Apply(op, args):
                values[node] = (select if op == "select" else TABLE[op])(*(values[a] for a in args))
    return values[root]
