"""The scalar operations of `ir.ops` over the verifier's numbers.

The field operations follow Mirage, table 3, extended to a tower (see `field`). What a field cannot express (erf, floor,
a comparison of inputs) is an uninterpreted function: a random one, but the same wherever it is called.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pallasfuse.ir import dtypes
from pallasfuse.ir.ops import OPS, evaluated, wrapped
from pallasfuse.verification import field, kinds
from pallasfuse.verification.field import Array, mix
from pallasfuse.verification.sources import Residues, Sources
from pallasfuse.verification.value import (
    FINITE,
    NAN,
    NEGATIVE_INFINITY,
    POSITIVE_INFINITY,
    REPRESENTATIVE,
    ROOT,
    ZERO,
    Value,
)

_UNBOUNDED = frozenset({"add", "sub", "mul", "div", "exp", "exp2", "square", "integer_pow", "pow"})
"""Operations that overflow, or underflow to a zero, though their result is a finite number other than zero."""


class Numbers(Sources):
    """Arithmetic on `Value`s in one tower."""

    # --- the operations

    def apply(self, op: str, args: Sequence[Value], dtype: str) -> Value:
        """`op` elementwise, with broadcasting of unit dimensions."""
        result = self._apply(op, args, dtype)
        return self.of_constants(result) if all(a.constant for a in args) else result

    def _apply(self, op: str, args: Sequence[Value], dtype: str) -> Value:
        kind_of_op = OPS[op].kind
        if op == "convert":
            return self._convert(args[0], dtype)
        if op == "bitcast":
            return self._bitcast(args[0], dtype)
        if op == "select":
            return self._select(*args).typed(dtype)
        if kind_of_op == "comparison":
            return self._compare(op, list(args))
        if kind_of_op == "logical" or not dtypes.is_float(dtype):
            return self._exactly(op, args, dtype)
        if op in ("max", "min"):
            from pallasfuse.verification.order import extremum

            return extremum(self, op, args, merge=True).typed(dtype)
        args = [self._convert(a, dtype) if not dtypes.is_float(a.dtype) and op != "integer_pow" else a for a in args]
        rule = getattr(self, f"_{op}", None)
        result: Value = rule(*args) if rule is not None else self._uninterpreted(op, args)
        return result.typed(dtype)

    def flags(self, args: Sequence[Value]) -> tuple[Array, Array]:
        bad, taint = args[0].bad, args[0].taint
        for a in args[1:]:
            bad, taint = bad | a.bad, taint | a.taint
        return bad, taint

    def _reals(self, op: str, args: Sequence[Value]) -> Array | None:
        """The real result where all arguments are real numbers, unless float64 cannot hold it."""
        reals = [a.real for a in args]
        if any(r is None for r in reals):
            return None
        with np.errstate(all="ignore"):
            real = np.asarray(OPS[op].evaluate(*reals))
        if op in _UNBOUNDED and args[0].levels:
            finite = args[0].kind == FINITE
            for a in args[1:]:
                finite = finite & (a.kind == FINITE)
            lost = np.isinf(real) if op in ("add", "sub") else np.isinf(real) | (real == 0)
            if (finite & lost).any():
                return None
        return real

    def _exactly(self, op: str, args: Sequence[Value], dtype: str) -> Value:
        """Computes with integers and booleans in their own arithmetic."""
        real = self._reals(op, args)
        assert real is not None
        bad, taint = self.flags(args)
        return Value(dtype, np.zeros((1,) * real.ndim, np.int8), bad, taint, real=wrapped(real, dtype))

    def finish(self, op: str, args: Sequence[Value], residues: Residues, kind: Array, bad: Array | None = None,
               rooted: Array | None = None) -> Value:  # fmt: skip
        """A float result from its parts; `real` where all arguments are. rooted: where it is of a negative's magnitude."""
        args_bad, args_taint = self.flags(args)
        bad = args_bad if bad is None else args_bad | bad
        taint = args_taint if rooted is None else args_taint | np.where(rooted, ROOT, np.uint8(0))
        real = self._reals(op, args)
        if real is not None:
            return self.from_real(real.astype(np.float64), args[0].dtype, residues, bad)
        clean = [
            None if r is None else np.where(kind == FINITE, r, 0) if (kind != FINITE).any() else r for r in residues
        ]
        return Value(args[0].dtype, kind, bad, taint, tuple(clean[:-1]), clean[-1])

    def _levelwise(self, rule: Callable[..., Array], args: Sequence[Value], turn: bool = True) -> Residues:
        """`rule(p, *residues)` modulo each prime where all arguments are known."""
        results: Residues = []
        for level, p in enumerate(self.tower.primes):
            parts = [a.levels[level] for a in args]
            results.append(None if any(x is None for x in parts) else rule(p, *parts) % p)
        turns = [a.turn for a in args]
        results.append(
            rule(self.tower.chain.turn, *turns) % self.tower.chain.turn
            if turn and all(t is not None for t in turns)
            else None
        )
        return results

    def sign(self, x: Value) -> Array:
        """Returns 1 or -1 for finite values: the sign of the real number, or whether the lowest residue is a square."""
        if x.real is not None:
            return np.where(x.real < 0, -1, 1)
        if x.lowest < 0:
            return np.ones((1,) * (x.rank + 1), np.int64)
        residue = x.levels[x.lowest]
        assert residue is not None
        return np.where(field.is_square(residue, self.tower.primes[x.lowest]), 1, -1)

    def _with_members(self, result: Value, op: str, args: Sequence[Value]) -> Value:
        from pallasfuse.verification.order import carry_members

        return carry_members(self, result, op, args) if any(a.members for a in args) else result

    def _add(self, a: Value, b: Value) -> Value:
        result = self.finish("add", (a, b), self._levelwise(lambda p, x, y: x + y, (a, b)), kinds.add(a.kind, b.kind))
        return self._with_members(result, "add", (a, b))

    def _sub(self, a: Value, b: Value) -> Value:
        kind = kinds.add(a.kind, kinds.negative(b.kind))
        result = self.finish("sub", (a, b), self._levelwise(lambda p, x, y: x - y, (a, b)), kind)
        return self._with_members(result, "sub", (a, b))

    def _neg(self, a: Value) -> Value:
        result = self.finish("neg", (a,), self._levelwise(lambda p, x: -x, (a,)), kinds.negative(a.kind))
        return self._with_members(result, "neg", (a,))

    def _mul(self, a: Value, b: Value) -> Value:
        kind = kinds.multiply(a.kind, b.kind, lambda: self.sign(a), lambda: self.sign(b))
        result = self.finish("mul", (a, b), self._levelwise(lambda p, x, y: x * y, (a, b)), kind)
        return self._with_members(result, "mul", (a, b))

    def _div(self, a: Value, b: Value) -> Value:
        kind = kinds.divide(a.kind, b.kind, lambda: self.sign(a), lambda: self.sign(b))
        residues = self._levelwise(lambda p, x, y: x * field.inverse(y, p), (a, b))
        result = self.finish("div", (a, b), residues, kind, bad=self._zero_by_chance(b))
        return self._with_members(result, "div", (a, b))

    def _zero_by_chance(self, x: Value) -> Array:
        bad = np.zeros((1,) * x.kind.ndim, bool)
        for residue in x.levels:
            if residue is not None and (residue == 0).any():
                bad = bad | ((residue == 0) & (x.kind == FINITE))
        return bad

    def _integer_pow(self, x: Value, n: Value) -> Value:
        assert n.real is not None
        exponent = int(n.real.reshape(-1)[0])
        base = x if exponent >= 0 else self._div(self.constant(1.0, x.dtype, x.rank), x)
        residues = self._levelwise(lambda p, r: field.power(r, abs(exponent), p), (base,))
        result = self.finish("integer_pow", (x, n), residues, base.kind, bad=base.bad)
        return self._special("integer_pow", result, x, lambda v: np.float64(v) ** exponent)

    def _square(self, x: Value) -> Value:
        return self._mul(x.plain(), x.plain())

    def _pow(self, x: Value, y: Value) -> Value:
        exponent = float(y.real.reshape(-1)[0]) if y.real is not None and y.real.size == 1 else math.nan
        if exponent.is_integer() and abs(exponent) < 64:
            return self._integer_pow(x, y)
        if (2 * exponent).is_integer() and abs(exponent) < 64:
            root = self._integer_pow(self._sqrt(x.plain()), self.constant(int(2 * exponent), "int32", x.rank))
            return self._special("pow", root, x, lambda v: np.power(v, exponent))
        if y.real is not None and (y.real == np.trunc(y.real)).all() and (np.abs(y.real) < 64).all():
            chosen = self.constant(1.0, x.dtype, x.rank)
            for n in np.unique(y.real):
                whole = self._integer_pow(x.plain(), self.constant(int(n), "int32", x.rank))
                chosen = self.choose(y.real == n, whole, chosen)
            return replace(chosen, bad=chosen.bad | y.bad, taint=chosen.taint | y.taint)
        levels: Residues = []
        for i, p in enumerate(self.tower.primes):
            base, power = x.levels[i], y.levels[i + 1] if i + 1 < self.tower.levels else None
            if base is None or power is None:
                levels.append(None)
            else:
                q = self.tower.primes[i + 1]
                levels.append(self.tower.root_power(i, power * self.tower.root_logarithm(i, base) % q) % p)
        kind = np.where((x.kind == FINITE) & (y.kind == FINITE), FINITE, NAN).astype(np.int8)
        unusual = (x.kind != FINITE) | (y.kind != FINITE)
        return self.finish("pow", (x, y), [*levels, None], kind, bad=unusual, rooted=self.sign(x) < 0)

    def _abs(self, x: Value) -> Value:
        sign = self.sign(x)
        residues = self._levelwise(lambda p, r: np.where(sign < 0, -r, r), (x,))
        return self._special("abs", self.finish("abs", (x,), residues, x.kind), x)

    def _sign(self, x: Value) -> Value:
        sign = self.sign(x)
        residues: Residues = [sign % p for p in self.constants.moduli]
        return self._special("sign", self.finish("sign", (x,), residues, x.kind), x)

    def _sqrt(self, x: Value) -> Value:
        residues = self._levelwise(lambda p, r: field.square_root(r, p), (x,), turn=False)
        return self._special("sqrt", self.finish("sqrt", (x,), residues, x.kind, rooted=self.sign(x) < 0), x)

    def _rsqrt(self, x: Value) -> Value:
        return self._div(self.constant(1.0, x.dtype, x.rank), self._sqrt(x))

    def _cbrt(self, x: Value) -> Value:
        residues = self._levelwise(lambda p, r: field.cube_root(r, p), (x,), turn=False)
        return self._special("cbrt", self.finish("cbrt", (x,), residues, x.kind), x)

    def _exp(self, x: Value) -> Value:
        residues: Residues = []
        for i in range(self.tower.levels):
            above = x.levels[i + 1] if i + 1 < self.tower.levels else None
            residues.append(None if above is None else self.tower.root_power(i, above))
        kind = np.where(x.kind == ZERO, FINITE, x.kind).astype(np.int8)
        return self._special("exp", self.finish("exp", (x,), [*residues, None], kind), x)

    def _log(self, x: Value) -> Value:
        residues: Residues = [None]
        for i in range(self.tower.levels - 1):
            below = x.levels[i]
            residues.append(None if below is None else self.tower.root_logarithm(i, below))
        result = self.finish(
            "log", (x,), [*residues, None], x.kind, bad=self._zero_by_chance(x), rooted=self.sign(x) < 0
        )
        return self._special("log", result, x)

    def _exp2(self, x: Value) -> Value:
        log2 = [r.reshape((1,) * x.rank + r.shape[-1:]) for r in self.constants.log2()]
        residues = [None if r is None else r * s % p for r, s, p in
                    zip((*x.levels, x.turn), log2, self.constants.moduli, strict=True)]  # fmt: skip
        scaled = replace(x.plain(), levels=tuple(residues[:-1]), turn=residues[-1])
        result = self._exp(scaled)
        real = self._reals("exp2", (x,))
        return result if real is None else self.from_real(real, x.dtype, [*result.levels, None], result.bad)

    def _formula(self, op: str, x: Value, result: Value) -> Value:
        """A function written as a formula: its own special values and real numbers."""
        real = self._reals(op, (x,))
        if real is not None:
            return self.from_real(real.astype(np.float64), x.dtype, [*result.levels, result.turn], result.bad)
        return self._special(op, result, x)

    def _expm1(self, x: Value) -> Value:
        return self._formula("expm1", x, self._sub(self._exp(x), self.constant(1.0, x.dtype, x.rank)))

    def _log1p(self, x: Value) -> Value:
        return self._formula("log1p", x, self._log(self._add(self.constant(1.0, x.dtype, x.rank), x.plain())))

    def _hyperbolic(self, x: Value, minus: bool, op: str) -> Value:
        up, down = self._exp(x), self._exp(self._neg(x.plain()))
        total = self._sub(up, down) if minus else self._add(up, down)
        return self._formula(op, x, self._div(total, self.constant(2.0, x.dtype, x.rank)))

    def _sinh(self, x: Value) -> Value:
        return self._hyperbolic(x, True, "sinh")

    def _cosh(self, x: Value) -> Value:
        return self._hyperbolic(x, False, "cosh")

    def _circular(self, op: str, x: Value) -> Value:
        if x.turn is None:  # of an exponential: no angle is known
            return self._uninterpreted(op, (x,))
        levels: Residues = [self.tower.turn(level, x.turn)[op == "sin"] for level in range(self.tower.levels)] + [None]
        return self._special(op, self.finish(op, (x,), levels, x.kind), x)

    def _cos(self, x: Value) -> Value:
        return self._circular("cos", x)

    def _sin(self, x: Value) -> Value:
        return self._circular("sin", x)

    def _tan(self, x: Value) -> Value:
        return self._formula("tan", x, self._div(self._sin(x), self._cos(x)))

    def _special(self, op: str, result: Value, x: Value, evaluate: Callable[[Any], Any] | None = None) -> Value:
        """The result with the values that `op` has at zero, at infinities and at NaN."""
        if result.real is not None or not (x.kind != FINITE).any():
            return result
        evaluate = evaluate or OPS[op].evaluate
        for kind, at in REPRESENTATIVE.items():
            here = x.kind == kind
            if here.any():
                with np.errstate(all="ignore"):
                    value = float(evaluate(np.float64(at)))
                result = self.choose(here, self.constant(value, result.dtype, x.rank), result)
        return result

    # --- casts, choices, comparisons

    def _convert(self, x: Value, dtype: str) -> Value:
        if dtypes.is_float(dtype):
            if dtypes.is_float(x.dtype):
                return x.typed(dtype) if x.real is None else self._in_range(x, x.real, dtype)
            assert x.real is not None
            whole = x.real.astype(np.int64)
            residues: Residues = [whole % p for p in self.constants.moduli]
            if whole.shape[-1] > 1:  # from an input: an element of the field like any other
                return Value(
                    dtype, np.zeros((1,) * whole.ndim, np.int8), x.bad, x.taint, tuple(residues[:-1]), residues[-1]
                )
            return self.from_real(x.real.astype(np.float64), dtype, residues, x.bad, x.taint)
        if x.real is not None:
            with np.errstate(all="ignore"):
                real = x.real != 0 if dtype == "bool" else wrapped(x.real, dtype)
            return Value(dtype, np.zeros((1,) * real.ndim, np.int8), x.bad, x.taint, real=real)
        if dtype == "bool":
            return self._compare("ne", [x, self.constant(0.0, x.dtype, x.rank)])
        self.notes[f"conversion of inputs to {dtype}"] = None
        return self.integers_from(self.key("convert", (x,)), dtype, x.bad, x.taint)

    def _bitcast(self, x: Value, dtype: str) -> Value:
        """Takes bits for a float: known ones for the number that they stand for, those of an input for any element of the field."""
        assert x.real is not None
        if x.real.shape[-1] > 1:
            self.notes["bitcast"] = None
            return self.fresh(self.key(f"bitcast {dtype}", (x,)), dtype, x.bad, x.taint)
        with np.errstate(all="ignore"):
            return self.from_real(evaluated("bitcast", [x.real], dtype), dtype, None, x.bad, x.taint)

    def _in_range(self, x: Value, real: Array, dtype: str) -> Value:
        """A known number in another type, whose range it may leave: -1e30 is -inf in float16."""
        infinite, zero = dtypes.limits(dtype)
        size = np.abs(real)
        special = np.where(size >= infinite, np.copysign(np.inf, real), 0.0)
        leaves = np.isfinite(real) & (real != 0) & ((size >= infinite) | (size <= zero))
        if not leaves.any():
            return x.typed(dtype)
        return self.choose(leaves, self.from_real(special, dtype, None), x).typed(dtype)

    def integers_from(self, key: Array, dtype: str, bad: Array, taint: Array) -> Value:
        """Small integers (or booleans) that look random, from 64-bit keys."""
        real = (key >> np.uint64(7)) % np.uint64(2 if dtype == "bool" else 5)
        wide = real.astype(bool) if dtype == "bool" else real.astype(np.int64)
        return Value(dtype, np.zeros((1,) * real.ndim, np.int8), bad, taint, real=wide)

    def _select(self, predicate: Value, a: Value, b: Value) -> Value:
        assert predicate.real is not None
        result = self.choose(predicate.real.astype(bool), a, b)
        bad, taint = result.bad | predicate.bad, result.taint | predicate.taint
        return replace(result, bad=bad, taint=taint)

    def choose(self, where: Array, a: Value, b: Value) -> Value:
        """Returns a where `where` is true, and b elsewhere."""
        from pallasfuse.verification.order import choose_members

        def pick(x: Array | None, y: Array | None) -> Array | None:
            return None if x is None or y is None else np.where(where, x, y)

        def residues(x: Array | None, y: Array | None) -> Array | None:
            # an infinity or a NaN has no residues to lose
            if x is None and (a.kind != FINITE).all() and a.levels:
                x = np.zeros((1,) * (a.rank + 1), np.int64)
            if y is None and (b.kind != FINITE).all() and b.levels:
                y = np.zeros((1,) * (b.rank + 1), np.int64)
            return pick(x, y)

        result = Value(
            a.dtype, np.where(where, a.kind, b.kind).astype(np.int8), np.where(where, a.bad, b.bad),
            np.where(where, a.taint, b.taint),
            tuple(residues(x, y) for x, y in zip(a.levels, b.levels, strict=True)), residues(a.turn, b.turn),
            pick(a.real, b.real),
        )  # fmt: skip
        return choose_members(where, result, a, b) if a.members or b.members else result

    def _compare(self, op: str, args: list[Value]) -> Value:
        bad, taint = self.flags(args)
        if op == "is_finite":
            real = args[0].kind <= ZERO if args[0].levels else np.ones((1,) * (args[0].rank + 1), bool)
            return Value("bool", np.zeros((1,) * real.ndim, np.int8), bad, taint, real=np.asarray(real))
        a, b = args
        known = self._reals(op, args)
        if known is None:
            a, b = (x if x.levels else self._convert(x, "float32") for x in (a, b))
            rank = [np.select([x.kind == POSITIVE_INFINITY, x.kind == NEGATIVE_INFINITY], [1, -1], 0) for x in (a, b)]
            undecided = (a.kind <= ZERO) & (b.kind <= ZERO)
            both_zero = (a.kind == ZERO) & (b.kind == ZERO)
            order = np.sign(rank[0] - rank[1])
            if (undecided & ~both_zero).any():
                fields = self._order(a, b)
                bad = bad | (undecided & ~both_zero) if fields is None else bad
                order = np.where(undecided & ~both_zero, 1 if fields is None else fields, order)
            known = np.asarray(OPS[op].evaluate(order, 0))
            known = np.where((a.kind == NAN) | (b.kind == NAN), op == "ne", known)
        return Value("bool", np.zeros((1,) * known.ndim, np.int8), bad, taint, real=known)

    def _order(self, a: Value, b: Value) -> Array | None:
        """-1, 0 or 1: "a < b" when b - a is positive. None if the two have no residue in common."""
        self.notes["comparison of inputs"] = None
        for p, x, y in zip(self.tower.primes, a.levels, b.levels, strict=True):
            if x is not None and y is not None:
                return np.where(x == y, 0, np.where(field.is_square((y - x) % p, p), -1, 1))
        return None

    # --- uninterpreted functions

    def key(self, op: str, args: Sequence[Value]) -> Array:
        """A 64-bit number that depends on nothing but the function, the trial and the values of the arguments."""
        name = int.from_bytes(op.encode()[:8].ljust(8, b" "), "little") ^ len(op)
        words: list[Any] = [self.tower.seeds, np.uint64(name)]
        for a in args:
            if a.levels and a.lowest >= 0:
                words += [a.levels[a.lowest], a.kind * (a.kind != ZERO), np.uint64(a.lowest)]
            elif a.real is not None:
                words.append(
                    np.nan_to_num(a.real * 1.0).view(np.uint64)
                    if a.real.dtype == np.float64
                    else a.real.astype(np.int64)
                )
        return mix(*words)

    def fresh(self, key: Array, dtype: str, bad: Array, taint: Array) -> Value:
        """Finite floats that look random, from 64-bit keys."""
        moduli = self.constants.moduli
        residues = [(mix(key, np.uint64(n)) % np.uint64(p)).astype(np.int64) for n, p in enumerate(moduli)]
        return Value(dtype, np.zeros((1,) * key.ndim, np.int8), bad, taint, tuple(residues[:-1]), residues[-1])

    def _uninterpreted(self, op: str, args: Sequence[Value]) -> Value:
        bad, taint = self.flags(args)
        real = self._reals(op, args)
        if real is not None:
            return self.from_real(real.astype(np.float64), args[0].dtype, None, bad, taint)
        self.notes[op] = None
        result = self.fresh(self.key(op, args), args[0].dtype, bad, taint)
        if len(args) == 1:
            return self._special(op, result, args[0])
        nan = args[0].kind == NAN
        for a in args[1:]:
            nan = nan | (a.kind == NAN)
        return self.choose(nan, self.constant(np.nan, result.dtype, result.rank), result) if nan.any() else result
