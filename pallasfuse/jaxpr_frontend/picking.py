"""The rule for a gather that takes one element along a dimension by an index: the sum of what is there at the index and zeros
elsewhere. It can share a pass with other reductions along the dimension."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from pallasfuse._compat import Jaxpr, JaxprEqn, Literal, Var
from pallasfuse.errors import Refusal
from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Expr, apply, const, convert, select
from pallasfuse.ir.reducers import SUM
from pallasfuse.jaxpr_frontend.dimensions import Dimensions
from pallasfuse.jaxpr_frontend.plans import LARGEST, Plan, Rule, dtype_of, flat, shape_of

type Makers = Mapping[Var, JaxprEqn]
type _Term = Callable[[tuple[Expr, ...], Expr], Expr]

_NO_PICK = "gather of anything but one element along one axis, for every row, is left to XLA"


def rules(jaxpr: Jaxpr) -> dict[str, Rule]:
    """The rules that look at how the operands of an equation of `jaxpr` are made."""
    makers: Makers = {v: e for e in jaxpr.eqns for v in e.outvars}

    def gather(eqn: JaxprEqn, dims: Dimensions, space: int) -> Plan | Refusal:
        return _gather(eqn, dims, space, makers)

    return {"gather": gather}


def _gather(eqn: JaxprEqn, dims: Dimensions, space: int, makers: Makers) -> Plan | Refusal:
    array, indices = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    shape, out = shape_of(array), shape_of(eqn.outvars[0])
    if any(int(n) != 1 for n in eqn.params["slice_sizes"]):
        return Refusal(_NO_PICK)
    # the dimensions of the result that are no offsets are those of the indices, in order
    of_indices = [d for d in range(len(out)) if d not in {int(o) for o in numbers.offset_dims}]
    rows = {
        int(a): of_indices[int(i)]
        for a, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    }
    picked: list[tuple[int, Any]] = []
    for column, dim in enumerate(int(d) for d in numbers.start_index_map):
        component = _component(indices, column, len(numbers.start_index_map), makers)
        if component is None:
            return Refusal("gather by several indices, not made by joining them, is left to XLA")
        along = _position_along(component, makers)
        if along is not None and of_indices[along] not in rows.values() and shape[dim] == out[of_indices[along]]:
            rows[dim] = of_indices[along]
        else:
            picked.append((dim, component))
    others = [d for d, n in enumerate(out) if n != 1 and d not in rows.values()]
    if len(picked) != 1 or len(set(rows.values())) != len(rows) or others:
        return Refusal(_NO_PICK)
    ((along_dim, index),) = picked
    if not dtypes.is_float(dtype_of(array)) or any(n > LARGEST for n in shape):
        return Refusal(f"gather of {dtype_of(array)} along {shape[along_dim]} elements is left to XLA")
    body = _body(eqn, dtype_of(index), shape[along_dim])
    if isinstance(body, Refusal):
        return body
    result = dims.fresh_shape(out, space)
    (reduced,) = dims.fresh_shape((shape[along_dim],), space)
    if not reduced:
        return Refusal("gather along a unit axis is left to XLA")
    read = flat([reduced if d == along_dim else result[rows[d]] if d in rows else () for d in range(len(shape))])
    at = flat([result[d] for d in of_indices])
    return Plan(flat(result), (read, at), lambda args, position: body(args, position(reduced)), reduced, SUM,
                operands=(array, index), picks=True)  # fmt: skip


def _body(eqn: JaxprEqn, index_dtype: str, extent: int) -> _Term | Refusal:
    """`(array element, index), position -> term`, with what an index out of range means."""
    dtype = dtype_of(eqn.outvars[0])
    mode, fill = eqn.params["mode"], eqn.params["fill_value"]
    fills = mode == GatherScatterMode.FILL_OR_DROP
    if not fills and mode not in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS):
        return Refusal(f"gather with mode {mode} is left to XLA")
    if not fills and not _holds(index_dtype, extent):
        return Refusal(f"gather by indices of type {index_dtype}, which cannot count {extent} elements, is left to XLA")
    # an index that may be out of range is compared as int32 where it is filled, else in a type that holds it
    compared = "int32" if fills or dtypes.itemsize_bytes(index_dtype) < 4 else index_dtype

    def body(args: tuple[Expr, ...], position: Expr) -> Expr:
        one, end = const(1, compared), const(extent, compared)
        index = convert(args[1], compared)
        # the index, or that of the first or the last element: nothing overflows
        follows = apply("add", apply("min", index, end), one)
        nearest = apply("sub", apply("min", apply("max", follows, one), end), one)
        value = args[0]
        if fills:
            inside = apply("and", apply("ge", index, const(0, compared)), apply("lt", index, end))
            value = select(
                inside, value, const(math.nan if fill is None else float(np.asarray(fill, jnp.dtype(dtype))), dtype)
            )
        return select(apply("eq", convert(position, compared), nearest), value, const(0.0, dtype))

    return body


def _holds(dtype: str, extent: int) -> bool:
    return bool(np.iinfo(dtype).max >= extent + 1)


def _component(indices: Any, column: int, columns: int, makers: Makers) -> Any:
    """The indices along one dimension, from those along all: a variable with as many elements as rows."""
    if isinstance(indices, Literal):
        return None
    if columns == 1:
        return indices
    maker = makers.get(indices)
    if maker is None or maker.primitive.name != "concatenate" or len(maker.invars) != columns:
        return None
    last = len(shape_of(indices)) - 1
    part = maker.invars[column]
    joined = int(maker.params["dimension"]) == last and all(shape_of(a)[last] == 1 for a in maker.invars)
    return part if joined and isinstance(part, Var) else None


def _position_along(atom: Any, makers: Makers) -> int | None:
    """The dimension along which every element is its own position, if that is how the variable is made."""
    maker = makers.get(atom) if isinstance(atom, Var) else None
    if maker is None or not dtypes.is_integer(dtype_of(atom)):
        return None
    source = maker.invars[0] if maker.invars else None
    along: int | None = None
    match maker.primitive.name:
        case "iota" if not maker.invars:
            along = int(maker.params["dimension"])
        case "copy" | "convert_element_type" | "stop_gradient":
            along = _position_along(source, makers)
        case "broadcast_in_dim" if len(maker.invars) == 1:
            before = _position_along(source, makers)
            if before is not None:
                along = int(maker.params["broadcast_dimensions"][before])
                along = along if shape_of(atom)[along] == shape_of(source)[before] else None
        case "select_n" if len(maker.invars) == 3 and _is_negative(maker.invars[0], maker.invars[1], makers):
            along = _position_along(maker.invars[1], makers)  # no position is negative
    fits = along is not None and shape_of(atom)[along] - 1 <= np.iinfo(dtype_of(atom)).max
    return along if fits else None


def _is_negative(predicate: Any, of: Any, makers: Makers) -> bool:
    maker = makers.get(predicate) if isinstance(predicate, Var) else None
    if maker is None or maker.primitive.name != "lt" or maker.invars[0] is not of:
        return False
    zero = maker.invars[1]
    return isinstance(zero, Literal) and np.ndim(zero.val) == 0 and int(zero.val) == 0
