"""Evaluation of jaxpr equations over the finite fields, with rules of its own: nothing is shared with the frontend that it checks.

Shapes are asked for, not read from the equations: `shapes` may give smaller ones than those that were traced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallasfuse._compat import Jaxpr, JaxprEqn, Literal
from pallasfuse.ir import dtypes
from pallasfuse.ir.ops import OPS
from pallasfuse.ir.reducers import REDUCERS, SUM
from pallasfuse.primitive_names import FUSED_CALL
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.value import Value, stack

type Shapes = Callable[[Any], tuple[int, ...]]
type Literals = Callable[[Any, str], Any]

_CALLS = frozenset((
    "jit", "pjit", "closed_call", "core_call", "core_closed_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint", FUSED_CALL, "custom_vmap_call",
))  # fmt: skip
_ALIASES = {"add_any": "add"}
_COPIES = frozenset((
    "stop_gradient", "copy", "copy_p", "name", "optimization_barrier", "reduce_precision", "sharding_constraint",
))  # fmt: skip
_MOVES = frozenset({"slice", "dynamic_slice", "pad", "concatenate", "split", "rev"})
_REDUCTIONS = {f"reduce_{name}": reducer for name, reducer in REDUCERS.items()}


def traced_shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _dtype(atom: Any) -> str:
    return str(getattr(atom.aval, "dtype", "float32"))


class Equations:
    """Evaluates equations; `shapes` gives the shape of a variable and `literals` the number that a literal stands for."""

    def __init__(
        self, fields: FiniteFields, shapes: Shapes = traced_shape, literals: Literals = lambda value, dtype: value
    ) -> None:
        self.fields, self.shapes, self.literals = fields, shapes, literals

    def literal(self, atom: Literal) -> Value:
        return self.fields.constant(
            self.literals(np.asarray(atom.val).reshape(()).item(), _dtype(atom)), _dtype(atom), 0
        )

    def equation(self, eqn: JaxprEqn, args: list[Value]) -> Value | None:
        """The result of an equation; None if there is no rule for it."""
        name = eqn.primitive.name
        rule = getattr(self, f"_{name}", None)
        if rule is not None:
            result: Value | None = rule(eqn, args)
        elif name in _COPIES:
            result = args[0]
        elif _ALIASES.get(name, name) in OPS and name not in ("select", "convert"):
            result = self._elementwise(_ALIASES.get(name, name), args, eqn)
        elif name in _REDUCTIONS:
            axes = tuple(int(a) for a in eqn.params["axes"])
            result = self._shaped(
                self.fields.reduce(_REDUCTIONS[name], args[0].full(), axes, _dtype(eqn.invars[0])), eqn
            )
        else:
            result = args[0] if self._moves_nothing(eqn) else None
        return None if result is None else result.typed(_dtype(eqn.outvars[0]))

    def _moves_nothing(self, eqn: JaxprEqn) -> bool:
        """A slice of everything, a padding by nothing, a concatenation of one array."""
        start, steps = eqn.params.get("start_indices") or (0,), eqn.params.get("strides") or (1,)
        flipped = eqn.params["dimensions"] if eqn.primitive.name == "rev" else ()
        shape = traced_shape(eqn.invars[0])
        same = shape == traced_shape(eqn.outvars[0]) and all(shape[int(d)] == 1 for d in flipped)
        return eqn.primitive.name in _MOVES and same and not any(start) and all(s == 1 for s in steps)

    def _shaped(self, value: Value, eqn: JaxprEqn) -> Value:
        return value.reshape(self.shapes(eqn.outvars[0]))

    def _elementwise(self, op: str, args: Sequence[Value], eqn: JaxprEqn) -> Value:
        rank = max(a.rank for a in args)
        aligned = [a if a.rank == rank else a.reshape((1,) * rank) for a in args]
        result = self.fields.apply(op, aligned, _dtype(eqn.outvars[0]))
        return result.broadcast(self.shapes(eqn.outvars[0]))

    # --- elementwise primitives with parameters

    def _convert_element_type(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        return self._elementwise("convert", args, eqn)

    def _integer_pow(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        exponent = self.fields.constant(int(eqn.params["y"]), "int32", args[0].rank)
        return self._elementwise("integer_pow", [args[0], exponent], eqn)

    def _round(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        return self._elementwise("round_away" if int(eqn.params["rounding_method"]) == 0 else "round_even", args, eqn)

    def _log2(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        ratio = self.fields.constant(1.4426950408889634, "float64", args[0].rank)
        return self._elementwise("mul", [self.fields.apply("log", args, args[0].dtype), ratio], eqn)

    def _one_minus_square(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        one = self.fields.constant(1.0, args[0].dtype, args[0].rank)
        return self._elementwise("sub", [one, self.fields.apply("square", args, args[0].dtype)], eqn)

    def _clamp(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        low, x, high = (a if a.rank else a.reshape((1,) * args[1].rank) for a in args)
        return self._elementwise("min", [self.fields.apply("max", [x, low], x.dtype), high], eqn)

    def _shift_left(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        return self._shifted("shift_left", args, eqn, _dtype(eqn.outvars[0]))

    def _shift_right_logical(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        return self._shifted("shift_right", args, eqn, f"u{_dtype(eqn.outvars[0]).removeprefix('u')}")

    def _shift_right_arithmetic(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        return self._shifted("shift_right", args, eqn, _dtype(eqn.outvars[0]).removeprefix("u"))

    def _shifted(self, op: str, args: list[Value], eqn: JaxprEqn, dtype: str) -> Value:
        """Shifts integers that are taken for those of `dtype`."""
        return self._elementwise(op, [self.fields.apply("convert", [a], dtype) for a in args], eqn)

    def _bitcast_convert_type(self, eqn: JaxprEqn, args: list[Value]) -> Value | None:
        source, target = _dtype(eqn.invars[0]), _dtype(eqn.outvars[0])
        if dtypes.is_float(source) or dtypes.itemsize_bytes(source) != dtypes.itemsize_bytes(target):
            return None
        return self._elementwise("bitcast" if dtypes.is_float(target) else "convert", args, eqn)

    def _select_n(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        which, *cases = (a if a.rank == args[1].rank else a.reshape((1,) * args[1].rank) for a in args)
        chosen = cases[-1]
        for n in range(len(cases) - 2, -1, -1):
            # case 0 is that of False
            is_n = (
                self.fields.apply("not", [which], "bool") if which.dtype == "bool"
                else self.fields.apply("le", [which, self.fields.constant(n, which.dtype, which.rank)], "bool")
            )  # fmt: skip
            chosen = self.fields.apply("select", [is_n, cases[n], chosen], chosen.dtype)
        return chosen.broadcast(self.shapes(eqn.outvars[0]))

    # --- primitives that move elements

    def _broadcast_in_dim(self, eqn: JaxprEqn, args: list[Value]) -> Value | None:
        if len(args) != 1:
            return None
        shape = self.shapes(eqn.outvars[0])
        target = [1] * len(shape)
        for extent, dim in zip(args[0].shape, eqn.params["broadcast_dimensions"], strict=True):
            target[int(dim)] = extent
        return args[0].reshape(tuple(target)).broadcast(shape)

    def _reshape(self, eqn: JaxprEqn, args: list[Value]) -> Value | None:
        return None if eqn.params.get("dimensions") is not None else self._shaped(args[0], eqn)

    def _squeeze(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        return self._shaped(args[0], eqn)

    def _expand_dims(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        return self._shaped(args[0], eqn)

    def _transpose(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        return args[0].full().transpose(tuple(int(d) for d in eqn.params["permutation"]))

    def _tile(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        shape = self.shapes(eqn.outvars[0])
        own = args[0].shape
        return args[0].take(np.ix_(*(np.arange(n) % m for n, m in zip(shape, own, strict=True))))

    def _iota(self, eqn: JaxprEqn, args: list[Value]) -> Value | None:
        if args:
            return None
        shape, dim = self.shapes(eqn.outvars[0]), int(eqn.params["dimension"])
        at = np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
        dtype = _dtype(eqn.outvars[0])
        known = self.fields.integers(at, "int32")
        return self.fields.apply("convert", [known], dtype).broadcast(shape)

    def _concatenate(self, eqn: JaxprEqn, args: list[Value]) -> Value | None:
        dim = int(eqn.params["dimension"])
        if any(a.shape[:dim] != args[0].shape[:dim] or a.shape[dim + 1 :] != args[0].shape[dim + 1 :] for a in args):
            return None
        return stack([a.full() for a in args], dim) if len(args) > 1 else args[0]

    def _slice(self, eqn: JaxprEqn, args: list[Value]) -> Value | None:
        ends = near_ends(eqn, args[0].shape)
        return None if ends is None else args[0].take(tuple(slice(*e) for e in ends))

    def _pad(self, eqn: JaxprEqn, args: list[Value]) -> Value | None:
        result = args[0].full()
        for dim, (low, high, inner) in enumerate(eqn.params["padding_config"]):
            if min(low, high, inner) < 0 or inner:
                return None
            for number, before in ((int(low), True), (int(high), False)):
                if number:
                    shape = tuple(number if d == dim else n for d, n in enumerate(result.shape))
                    border = args[1].reshape((1,) * len(shape)).broadcast(shape)
                    result = stack([border, result] if before else [result, border], dim)
        return result

    def _gather(self, eqn: JaxprEqn, args: list[Value]) -> Value | None:
        """Evaluates a gather of single elements, by comparing the position of each with the indices; None for any other gather."""
        array, indices = args
        numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
        by_index = [int(d) for d in numbers.start_index_map]
        shape, dtype = self.shapes(eqn.outvars[0]), _dtype(eqn.outvars[0])
        if any(int(n) != 1 for n in eqn.params["slice_sizes"]) or indices.shape[-1] != len(by_index):
            return None
        rank = indices.rank - 1
        columns = [indices.take((Ellipsis, n, slice(None))) for n in range(len(by_index))]
        limits = [array.shape[d] for d in by_index]
        limited = []
        for column, limit in zip(columns, limits, strict=True):
            low, high = (self.fields.constant(n, column.dtype, rank) for n in (0, limit - 1))
            limited.append(
                self.fields.apply("min", [self.fields.apply("max", [column, low], column.dtype), high], column.dtype)
            )
        # rows of the array stand where the indices that belong to them do
        rows = {
            int(a): int(i)
            for a, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        }
        order = tuple(sorted(rows).index(a) for a in sorted(rows, key=rows.__getitem__))
        others = tuple(d for d in range(rank) if d not in rows.values())
        result: Value | None = None
        for place in np.ndindex(*limits):
            at = dict(zip(by_index, place, strict=True))
            index = tuple(slice(None) if d in rows else at.get(d, 0) for d in range(array.rank))
            elements = array.take((*index, slice(None))).transpose(order).expand(others)
            if result is None:
                result = elements
                continue
            matches = [self.fields.apply("eq", [c, self.fields.constant(n, c.dtype, rank)], "bool")
                       for c, n in zip(limited, place, strict=True)]  # fmt: skip
            here = matches[0]
            for other in matches[1:]:
                here = self.fields.apply("and", [here, other], "bool")
            result = self.fields.apply("select", [here, elements, result], dtype)
        assert result is not None
        if str(mode).endswith("FILL_OR_DROP"):
            fill = eqn.params["fill_value"]
            missing = self.fields.constant(float("nan") if fill is None else float(np.asarray(fill)), dtype, rank)
            for column, limit in zip(columns, limits, strict=True):
                for op, n in (("ge", 0), ("lt", limit)):
                    inside = self.fields.apply(op, [column, self.fields.constant(n, column.dtype, rank)], "bool")
                    result = self.fields.apply("select", [inside, result, missing], dtype)
        elif not str(mode).endswith(("CLIP", "PROMISE_IN_BOUNDS")):
            return None
        return result.reshape(shape)

    # --- reductions with parameters

    def _argmax(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        """Evaluates the first position of an extremum from the last one back: what is no number comes before all numbers."""
        (axis,) = (int(a) for a in eqn.params["axes"])
        x, dtype = args[0].full(), _dtype(eqn.invars[0])
        reducer = REDUCERS["max" if eqn.primitive.name == "argmax" else "min"]
        extreme = self._shaped(self.fields.reduce(reducer, x, (axis,), dtype), eqn)
        elements = [x.take((*[slice(None)] * axis, n, Ellipsis)) for n in range(x.shape[axis])]
        # where nothing equals it: numbers of a field have no order
        result = self.fields.constant(0, "int32", extreme.rank)
        for op, others in (("eq", [extreme] * len(elements)), ("ne", elements)):
            for place in reversed(range(len(elements))):
                here = self.fields.apply(op, [elements[place], others[place]], "bool")
                at = self.fields.constant(place, "int32", extreme.rank)
                result = self.fields.apply("select", [here, at, result], "int32")
        return self._shaped(self.fields.apply("convert", [result], _dtype(eqn.outvars[0])), eqn)

    _argmin = _argmax

    # --- contractions

    def _dot_general(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
        sums, batches = (tuple(int(d) for d in lhs_sum), tuple(int(d) for d in rhs_sum)), (
            tuple(int(d) for d in lhs_batch), tuple(int(d) for d in rhs_batch))  # fmt: skip
        free = [
            tuple(d for d in range(a.rank) if d not in (*s, *b)) for a, s, b in zip(args, sums, batches, strict=True)
        ]
        lhs, rhs = (a.full().transpose((*b, *f, *s)) for a, b, f, s in zip(args, batches, free, sums, strict=True))
        batch, left, right, summed = len(batches[0]), len(free[0]), len(free[1]), len(sums[0])
        lhs = lhs.expand(tuple(batch + left + n for n in range(right)))
        rhs = rhs.expand(tuple(batch + n for n in range(left)))
        out = _dtype(eqn.outvars[0])
        product = self.fields.apply("mul", [lhs, rhs], out)
        rank = batch + left + right
        if summed:
            product = self.fields.reduce(SUM, product, tuple(range(rank, rank + summed)), out)
        return self._shaped(product, eqn)


NEAR = 16
"""As far from an end of an axis as a place that stays there when the axis is shorter."""


def near_ends(eqn: JaxprEqn, shape: Sequence[int]) -> list[tuple[int, int]] | None:
    """From where to where a slice is of an operand of this shape, along each dimension; None where that cannot be said.

    Where the axis is shorter than the traced one, each place counts from the end that it is near, and a half stays a half.
    """
    found = []
    strides = eqn.params["strides"] or (1,) * len(shape)
    places = zip(
        eqn.params["start_indices"],
        eqn.params["limit_indices"],
        strides,
        traced_shape(eqn.invars[0]),
        shape,
        strict=True,
    )
    for start, limit, stride, traced, short in places:
        if (
            int(stride) == 1
            and (int(limit) - int(start)) * 2 == traced
            and int(start) in (0, traced // 2)
            and short % 2 == 0
        ):
            found.append((short // 2, short) if start else (0, short // 2))
            continue
        ends = [p if short == traced or p < traced - p else short - (traced - p) for p in (int(start), int(limit))]
        far = short != traced and any(NEAR < p < traced - NEAR for p in (int(start), int(limit)))
        if int(stride) != 1 or far or not 0 <= ends[0] <= ends[1] <= short:
            return None
        found.append((ends[0], ends[1]))
    return found


def body_of(eqn: JaxprEqn) -> Jaxpr | None:
    """The jaxpr that a call runs; None if the equation is no call."""
    if eqn.primitive.name not in _CALLS:
        return None
    candidates = [eqn.params.get(key) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")]
    candidates.append(getattr(eqn.params.get("call"), "jaxpr", None))
    body = next((b for b in candidates if isinstance(b, Jaxpr)), None)
    return body if body is not None and len(body.invars) == len(eqn.invars) else None
