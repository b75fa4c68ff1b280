"""Evaluation of jaxprs over the finite fields, with rules of its own: nothing is shared with the frontend that it checks.

Shapes are asked for, not read from the equations: `shapes` may give smaller ones than those that were traced.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from pallasfuse.ir import dtypes
from pallasfuse.ir.ops import OPS
from pallasfuse.ir.reducers import REDUCERS, SUM
from pallasfuse.verification.domain import FiniteFields
from pallasfuse.verification.field import mix
from pallasfuse.verification.value import Value, stack

type Shapes = Callable[[Any], tuple[int, ...]]
type Literals = Callable[[Any, str], Any]

_CALLS = frozenset((
    "jit", "pjit", "closed_call", "core_call", "core_closed_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint", "pallasfuse",
))  # fmt: skip
_ALIASES = {"add_any": "add"}
_COPIES = frozenset({"stop_gradient", "copy", "copy_p", "name", "optimization_barrier", "reduce_precision"})
_REDUCTIONS = {f"reduce_{name}": reducer for name, reducer in REDUCERS.items()}


def traced_shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _dtype(atom: Any) -> str:
    return str(getattr(atom.aval, "dtype", "float32"))


class JaxprEvaluation:
    """Evaluates equations; `shapes` gives the shape of a variable and `literals` the number that a literal stands for."""

    def __init__(
        self, fields: FiniteFields, shapes: Shapes = traced_shape, literals: Literals = lambda value, dtype: value
    ) -> None:
        self.fields, self.shapes, self.literals = fields, shapes, literals
        self.constants: dict[int, Value] = {}
        """Values of arrays that jaxprs hold, by identity."""

    def run(self, jaxpr: Jaxpr, arguments: Sequence[Value]) -> dict[Var, Value]:
        """The value of every variable, from those of the constants and inputs, in this order."""
        values: dict[Var, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), arguments, strict=True))
        for eqn in jaxpr.eqns:
            if self.is_live(eqn):
                results = self.equation(eqn, [self.atom(a, values) for a in eqn.invars])
                values.update(zip(eqn.outvars, results, strict=True))
        return values

    def is_live(self, eqn: JaxprEqn) -> bool:
        return True

    def held(self, array: Any) -> Value:
        """The value of an array that a jaxpr holds."""
        return self.constants.get(id(array)) or _known(self.fields, array)

    def atom(self, atom: Any, values: Mapping[Var, Value]) -> Value:
        if not isinstance(atom, Literal):
            return values[atom]
        return self.fields.constant(
            self.literals(np.asarray(atom.val).reshape(()).item(), _dtype(atom)), _dtype(atom), 0
        )

    def equation(self, eqn: JaxprEqn, args: list[Value]) -> list[Value]:
        """The results of one equation."""
        name = eqn.primitive.name
        body = _body(eqn)
        if body is not None:
            values = self.run(body, [*(self.held(c) for c in body.consts), *args])
            return [self.atom(a, values) for a in body.outvars]
        out = eqn.outvars[0] if eqn.outvars else None
        rule = getattr(self, f"_{name}", None)
        if rule is not None:
            result = rule(eqn, args)
            if result is not None:
                return [result.typed(_dtype(out))]
        elif name in _COPIES and len(args) == len(eqn.outvars):
            return args
        elif _ALIASES.get(name, name) in OPS and name not in ("select", "convert"):
            return [self._elementwise(_ALIASES.get(name, name), args, eqn)]
        elif name in _REDUCTIONS:
            axes = tuple(int(a) for a in eqn.params["axes"])
            folded = self.fields.reduce(_REDUCTIONS[name], args[0].full(), axes, _dtype(eqn.invars[0]))
            return [self._shaped(folded, eqn).typed(_dtype(out))]
        return self._opaque(eqn, args)

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

    def _slice(self, eqn: JaxprEqn, args: list[Value]) -> Value | None:
        if self.shapes(eqn.outvars[0]) != traced_shape(eqn.outvars[0]):
            return args[0] if args[0].shape == self.shapes(eqn.outvars[0]) else None
        starts, strides = eqn.params["start_indices"], eqn.params["strides"] or (1,) * args[0].rank
        stops = eqn.params["limit_indices"]
        return args[0].take(tuple(slice(a, b, s) for a, b, s in zip(starts, stops, strides, strict=True)))

    def _rev(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        flipped = {int(d) for d in eqn.params["dimensions"]}
        return args[0].take(tuple(slice(None, None, -1 if d in flipped else 1) for d in range(args[0].rank)))

    def _concatenate(self, eqn: JaxprEqn, args: list[Value]) -> Value:
        return stack(args, int(eqn.params["dimension"])) if len(args) > 1 else args[0]

    # --- contractions and everything else

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

    def _opaque(self, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
        """An uninterpreted function of whole arrays."""
        fields = self.fields
        fields.notes[f"{eqn.primitive.name} of whole arrays"] = None
        name = f"{eqn.primitive.name}{sorted((k, str(v)) for k, v in eqn.params.items())}"
        bad = np.zeros((1,), bool)
        taint = np.zeros((1,), bool)
        words: list[Any] = [fields.tower.seeds, np.uint64(hash(name) & (2**63 - 1))]
        for arg in args:
            a = arg.plain().full()
            trials = fields.tower.trials
            key = np.broadcast_to(fields.key("array", (a,)), (*a.shape, trials)).reshape(-1, trials)
            with np.errstate(over="ignore"):
                place = np.arange(key.shape[0], dtype=np.uint64)[:, None]
                words.append(mix(key, place).sum(0, dtype=np.uint64))
            bad = bad | a.bad.reshape(-1, a.bad.shape[-1]).any(0)
            taint = taint | a.taint.reshape(-1, a.taint.shape[-1]).any(0)
        key = mix(*words)
        results = []
        for number, out in enumerate(eqn.outvars):
            shape, dtype = self.shapes(out), _dtype(out)
            places = np.arange(int(np.prod(shape)), dtype=np.uint64).reshape((*shape, 1))
            each = mix(key, places, np.uint64(number))
            flags = [f.reshape((1,) * len(shape) + f.shape) for f in (bad, taint)]
            make = fields.fresh if dtypes.is_float(dtype) else fields.integers_from
            results.append(make(each, dtype, *flags))
        return results


class NestedEvaluation(JaxprEvaluation):
    """Evaluates a jaxpr with calls in it, beside the flat list of equations that it became: an equation that was kept gives its
    shapes to the one that it comes from; the others are dead."""

    def __init__(self, fields: FiniteFields, shapes: Shapes, literals: Literals, kept: Sequence[JaxprEqn]) -> None:
        super().__init__(fields, self._shape, literals)
        self._flat_shapes, self._kept, self._next = shapes, kept, 0
        self._own: dict[Any, tuple[int, ...]] = {}

    def _shape(self, atom: Any) -> tuple[int, ...]:
        return self._own.get(atom) or traced_shape(atom)

    def is_live(self, eqn: JaxprEqn) -> bool:
        if _body(eqn) is not None:
            return True
        if self._next == len(self._kept) or self._kept[self._next].params is not eqn.params:
            return False
        twin = self._kept[self._next]
        self._next += 1
        self._own.update({own: self._flat_shapes(v) for own, v in zip(eqn.outvars, twin.outvars, strict=True)})
        return True

    def atom(self, atom: Any, values: Mapping[Var, Value]) -> Any:
        # what only dead equations read has no value
        return super().atom(atom, values) if isinstance(atom, Literal) else values.get(atom)


def _known(fields: FiniteFields, array: Any) -> Value:
    """An array as the numbers that it holds."""
    values = np.asarray(array)
    dtype = str(values.dtype)
    wide = values.astype(np.float64 if dtypes.is_float(dtype) else bool if dtype == "bool" else np.int64)
    return fields.real(wide[..., None], dtype)


def _body(eqn: JaxprEqn) -> Jaxpr | None:
    if eqn.primitive.name not in _CALLS:
        return None
    candidates = [eqn.params.get(key) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")]
    candidates.append(getattr(eqn.params.get("call"), "jaxpr", None))
    body = next((b for b in candidates if isinstance(b, Jaxpr)), None)
    return body if body is not None and len(body.invars) == len(eqn.invars) else None
