"""How the error bounds of a primitive's operands become those of its results: one table; `error_bounds.py` says why."""

import itertools
import math
from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from tests.property.balls import Arithmetic, Array, Ball, corners, distance, exactly, is_float

# --- elementwise operations

Rule = Callable[[Any, list[Ball], Arithmetic], list[Ball]]
RULES: dict[str, Rule] = {}


def _positive_domain(f: Callable[[Array], Array]) -> Rule:
    def rule(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
        value, radius = corners(f, balls[0])
        if not balls[0].certain:
            clipped = Ball(balls[0].value, balls[0].radius)
            low = np.where(
                clipped.value >= 0, np.maximum(clipped.value - clipped.radius, 0), clipped.value - clipped.radius
            )
            radius = np.maximum(distance(f(low), value), distance(f(clipped.value + clipped.radius), value))
            radius = np.where(np.isposinf(clipped.radius), np.inf, radius)
        return [a.rounded(value, radius, eqn.outvars[0].aval.dtype, 4)]

    return rule


def _elementwise(f: Callable[..., Array], roundings: float) -> Rule:
    def rule(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
        dtype = eqn.outvars[0].aval.dtype
        value, radius = corners(f, *balls)
        return [a.rounded(value.astype(np.float64 if is_float(dtype) else dtype), radius, dtype, roundings)]

    return rule


def _divide(x: Array, y: Array) -> Array:
    if np.issubdtype(np.result_type(x, y), np.integer):
        safe = np.where(y == 0, 1, y)
        return np.where(y == 0, -1, (np.sign(x) * np.sign(safe) * (np.abs(x) // np.abs(safe)))).astype(
            np.result_type(x, y)
        )
    return np.divide(x, y)


def _division(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    x, y = balls
    value, radius = corners(_divide, x, y)
    dtype = eqn.outvars[0].aval.dtype
    if is_float(dtype):
        radius = np.where((np.abs(y.value) <= y.radius) & (y.radius > 0), np.inf, radius)
        # the reciprocal that XLA multiplies by may be flushed to zero
        vast = a.unit is None and np.isfinite(value) & (np.abs(y.value) + y.radius > 0.9 / float(jnp.finfo(dtype).tiny))
        radius = radius + np.where(vast, np.abs(value), 0.0)
    return [a.rounded(value, radius, dtype, 2)]


def _remainder(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    value = np.fmod(balls[0].value, np.where(balls[1].value == 0, 1, balls[1].value))
    unknown = (balls[0].radius > 0) | (balls[1].radius > 0)
    return [a.rounded(value, np.where(unknown, np.inf, 0.0), eqn.outvars[0].aval.dtype, 1)]


def _even(f: Callable[[Array], Array], roundings: float, largest: float = np.inf) -> Rule:
    """An even function that grows with |x|, or one whose slope is at most 1 and which is at most `largest`."""

    def rule(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
        x = balls[0]
        value = f(x.value)
        if np.isfinite(largest):
            radius = np.minimum(x.radius, 2 * largest)
            radius = np.where(np.isposinf(x.radius), np.inf, radius)
            return [
                a.rounded(
                    value, radius + 4 * a.roundoff(eqn.outvars[0].aval.dtype), eqn.outvars[0].aval.dtype, roundings
                )
            ]
        _, radius = corners(lambda y: f(np.abs(y)), Ball(np.abs(x.value), x.radius))
        return [a.rounded(value, radius, eqn.outvars[0].aval.dtype, roundings)]

    return rule


def _integer_power(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    y, x, dtype = int(eqn.params["y"]), balls[0], eqn.outvars[0].aval.dtype
    if not is_float(dtype):
        value, radius = corners(lambda z: np.power(z, y), x)
        return [a.rounded(value, radius, dtype)]
    with np.errstate(all="ignore"):
        value = np.power(x.value, float(y))
        _, radius = corners(lambda z: np.power(z, float(y)), Ball(np.abs(x.value), x.radius))
    if y < 0:
        radius = np.where((np.abs(x.value) <= x.radius) & (x.radius > 0), np.inf, radius)
    return [a.rounded(value, radius, dtype, abs(y) + 1)]


def _power(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    dtype = eqn.outvars[0].aval.dtype
    x, y = balls
    value, radius = corners(lambda p, q: np.power(np.asarray(p, np.float64), q), x, y)
    stretch = (
        np.abs(y.value * np.log(np.where(x.value > 0, x.value, 1.0))) if not y.value.shape or x.value.shape else 0.0
    )
    return [a.rounded(value, radius + 2 * a.roundoff(dtype) * stretch * np.abs(value), dtype, 4)]


def _exp2(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    dtype = eqn.outvars[0].aval.dtype
    value, radius = corners(np.exp2, balls[0])
    stretch = np.where(value > 0, np.abs(balls[0].value), 0.0)
    return [a.rounded(value, radius + a.roundoff(dtype) * np.where(value > 0, stretch * value, 0.0), dtype, 4)]


def _comparison(f: Callable[[Array, Array], Array]) -> Rule:
    def rule(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
        x, y = balls
        reach = x.radius + y.radius
        unsure = (reach > 0) & ~(distance(x.value, y.value) > reach)
        return [Ball(f(x.value, y.value), unsure.astype(np.float64))]

    return rule


def _logical(f: Callable[..., Array]) -> Rule:
    def rule(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
        value = np.asarray(f(*(b.value for b in balls)))
        radius = np.zeros(value.shape)
        if value.dtype != bool:
            unsure = sum((b.radius for b in balls), radius)
            return [Ball(value, np.where(unsure > 0, np.inf, 0.0))]
        for flips in itertools.product((False, True), repeat=len(balls)):
            at = f(*(b.value ^ (flip & (b.radius > 0)) for b, flip in zip(balls, flips, strict=True)))
            radius = np.maximum(radius, at != value)
        return [Ball(value, radius)]

    return rule


def _select(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    which, cases = balls[0], balls[1:]
    shape = cases[0].value.shape
    pick = np.broadcast_to(which.value.astype(np.int64), shape)
    unsure = np.broadcast_to(which.radius > 0, shape)
    value = np.select([pick == n for n in range(len(cases))], [c.value for c in cases])
    radius = np.select([pick == n for n in range(len(cases))], [c.radius for c in cases])
    for case in cases:
        radius = np.where(unsure, np.maximum(radius, distance(case.value, value) + case.radius), radius)
    return [Ball(value, radius)]


def _convert(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    x, source, target = balls[0], eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if is_float(target):
        narrower = not is_float(source) or jnp.finfo(source).eps < jnp.finfo(target).eps or (
            jnp.finfo(source).max > jnp.finfo(target).max)  # fmt: skip
        folded = 0.0
        if a.unit is not None and narrower and not x.value.shape:  # a stage may round a constant to its type
            folded = float(jnp.finfo(target).eps) * abs(float(x.value))
        radius = x.radius + folded
        return [a.rounded(x.value.astype(np.float64), radius, target, float(narrower and source.kind != "b"))]
    if target.kind == "b":
        unsure = (x.radius > 0) & (np.abs(x.value.astype(np.float64)) <= x.radius)
        return [Ball(x.value != 0, unsure.astype(np.float64))]
    value, radius = corners(
        lambda y: np.trunc(y) if is_float(source) else y, Ball(x.value.astype(np.float64), x.radius)
    )
    with np.errstate(all="ignore"):
        low, high = np.iinfo(target).min, np.iinfo(target).max
        kept = np.clip(np.nan_to_num(value), low, high).astype(target) if is_float(source) else x.value.astype(target)
    return [Ball(kept, np.where(np.isfinite(value), radius, np.inf))]


def _round(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    away = int(eqn.params["rounding_method"]) == 0
    f = (lambda x: np.trunc(x + np.copysign(0.5, x))) if away else np.round
    value, radius = corners(f, balls[0])
    return [a.rounded(value, radius, eqn.outvars[0].aval.dtype, 0)]


def _is_finite(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    return [Ball(np.isfinite(balls[0].value), np.isposinf(balls[0].radius).astype(np.float64))]


def _sign(x: Array) -> Array:
    return np.where(x == 0, x, np.sign(x))


for _name, _f, _roundings in [
    ("add", np.add, 1), ("add_any", np.add, 1), ("sub", np.subtract, 1), ("mul", np.multiply, 1), ("max", np.maximum, 0),
    ("min", np.minimum, 0), ("neg", np.negative, 0), ("sign", _sign, 0), ("floor", np.floor, 0), ("ceil", np.ceil, 0),
    ("exp", np.exp, 4), ("expm1", np.expm1, 4), ("tanh", np.tanh, 4), ("logistic", scipy.special.expit, 4),
    ("erf", scipy.special.erf, 4), ("erfc", scipy.special.erfc, 8), ("cbrt", np.cbrt, 4), ("atan", np.arctan, 4),
    ("asinh", np.arcsinh, 4), ("sinh", np.sinh, 4), ("atan2", np.arctan2, 4), ("stop_gradient", np.asarray, 0),
    ("copy", np.asarray, 0), ("copy_p", np.asarray, 0), ("log1p", np.log1p, 4), ("name", np.asarray, 0),
    ("erf_inv", scipy.special.erfinv, 8), ("optimization_barrier", np.asarray, 0),
]:  # fmt: skip
    RULES[_name] = _elementwise(_f, _roundings)
RULES |= {
    "log": _positive_domain(np.log), "log2": _positive_domain(np.log2), "sqrt": _positive_domain(np.sqrt),
    "rsqrt": _positive_domain(lambda x: 1.0 / np.sqrt(x)), "abs": _even(np.abs, 0), "square": _even(np.square, 1),
    "cosh": _even(np.cosh, 4), "sin": _even(np.sin, 4, 1.0), "cos": _even(np.cos, 4, 1.0), "exp2": _exp2, "div": _division,
    "rem": _remainder, "integer_pow": _integer_power, "pow": _power, "eq": _comparison(np.equal),
    "ne": _comparison(np.not_equal), "lt": _comparison(np.less), "le": _comparison(np.less_equal),
    "gt": _comparison(np.greater), "ge": _comparison(np.greater_equal), "and": _logical(np.bitwise_and),
    "or": _logical(np.bitwise_or), "xor": _logical(np.bitwise_xor), "not": _logical(np.invert), "select_n": _select,
    "convert_element_type": _convert, "round": _round, "is_finite": _is_finite,
}  # fmt: skip


def _clamp(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    low, x, high = balls
    value, radius = corners(lambda p, q, r: np.minimum(np.maximum(q, p), r), low, x, high)
    return [a.rounded(value, radius, eqn.outvars[0].aval.dtype, 0)]


RULES["clamp"] = _clamp


# --- reductions, scans and products


def _added(a: Arithmetic, value: Array, inherited: Array, magnitude: Array, n: int, dtype: Any) -> Ball:
    if not is_float(dtype):
        return a.rounded(value.astype(dtype), inherited, dtype)
    rounding = np.where(np.isfinite(value), a.gamma(n, dtype) * magnitude, 0.0)
    return a.rounded(value, inherited + rounding, dtype, 0)


def _count(x: Ball, axes: Sequence[int]) -> int:
    return math.prod(x.value.shape[d] for d in axes)


def _reduce_sum(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    x, axes, dtype = balls[0], tuple(eqn.params["axes"]), eqn.outvars[0].aval.dtype
    size = np.abs(x.value.astype(np.float64)) + x.radius
    value, inherited = np.sum(x.value, axes), np.sum(x.radius, axes)
    return [_added(a, np.asarray(value), inherited, np.sum(size, axes), _count(x, axes), dtype)]


def _reduce_prod(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    x, axes, dtype = balls[0], tuple(eqn.params["axes"]), eqn.outvars[0].aval.dtype
    size = np.abs(x.value.astype(np.float64))
    reach = np.prod(size + x.radius, axes)
    return [
        _added(
            a, np.asarray(np.prod(x.value, axes)), distance(reach, np.prod(size, axes)), reach, _count(x, axes), dtype
        )
    ]


def _reduce_extreme(f: Callable[..., Array]) -> Rule:
    def rule(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
        axes = tuple(eqn.params["axes"])
        value, radius = corners(lambda x: f(x, axis=axes), balls[0])
        radius = np.where(np.isposinf(balls[0].radius).any(axes), np.inf, radius)
        return [a.rounded(value, radius, eqn.outvars[0].aval.dtype, 0)]

    return rule


def _reduce_logical(f: Callable[..., Array]) -> Rule:
    def rule(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
        axes, x = tuple(eqn.params["axes"]), balls[0]
        low, high = x.value & (x.radius == 0), x.value | (x.radius > 0)
        return [Ball(f(x.value, axis=axes), (f(low, axis=axes) != f(high, axis=axes)).astype(np.float64))]

    return rule


def _arg_extreme(sign: int) -> Rule:
    def rule(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
        (axis,), x = eqn.params["axes"], balls[0]
        y = sign * x.value.astype(np.float64)
        value = np.argmax(y, axis)
        shape = [1] * y.ndim
        shape[axis] = y.shape[axis]
        candidate = ~(y + x.radius < np.max(y - x.radius, axis, keepdims=True))
        away = np.abs(np.arange(y.shape[axis]).reshape(shape) - np.expand_dims(value, axis))
        radius = np.max(np.where(candidate & (x.radius.max(axis, keepdims=True) > 0), away, 0), axis)
        return [Ball(value.astype(eqn.outvars[0].aval.dtype), radius.astype(np.float64))]

    return rule


def _cumulative(name: str) -> Rule:
    def rule(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
        axis, dtype = eqn.params["axis"], eqn.outvars[0].aval.dtype
        turn = (lambda x: np.flip(x, axis)) if eqn.params["reverse"] else (lambda x: x)
        x, n = Ball(turn(balls[0].value), turn(balls[0].radius)), balls[0].value.shape[axis]
        if name == "cumsum":
            size = np.cumsum(np.abs(x.value.astype(np.float64)) + x.radius, axis)
            ball = _added(a, np.cumsum(x.value, axis), np.cumsum(x.radius, axis), size, n, dtype)
        elif name == "cumprod":
            size = np.abs(x.value.astype(np.float64))
            reach = np.cumprod(size + x.radius, axis)
            ball = _added(a, np.cumprod(x.value, axis), distance(reach, np.cumprod(size, axis)), reach, n, dtype)
        else:
            f = {"cummax": np.maximum, "cummin": np.minimum, "cumlogsumexp": np.logaddexp}[name]
            value, radius = corners(lambda y: f.accumulate(y, axis), x)
            ball = a.rounded(value, radius, dtype, 8 * n if name == "cumlogsumexp" else 0)
        return [Ball(turn(ball.value), turn(ball.radius))]

    return rule


def _dot_general(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    x, y, dtype = *balls, eqn.outvars[0].aval.dtype
    names = iter(ascii_letters)
    left = [next(names) for _ in x.value.shape]
    right = [next(names) for _ in y.value.shape]
    for i, j in (*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)):
        right[j] = left[i]
    out = [left[d] for d in lb] + [n for d, n in enumerate(left) if d not in (*lb, *lc)]
    out += [n for d, n in enumerate(right) if d not in (*rb, *rc)]

    def product(p: Array, q: Array) -> Array:
        return np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(out)}", p, q)

    p, q = (b.value.astype(np.float64) for b in (x, y))
    value, size = product(p, q), product(np.abs(p) + x.radius, np.abs(q) + y.radius)
    if not is_float(dtype):
        return [
            a.rounded(product(x.value.astype(dtype), y.value.astype(dtype)), np.where(size > 2**31, np.inf, 0.0), dtype)
        ]
    inherited = product(np.abs(p), y.radius) + product(x.radius, np.abs(q)) + product(x.radius, y.radius)
    n = math.prod(x.value.shape[d] for d in lc) + 1
    finite = np.isfinite(value)
    summed = a.rounded(value, np.where(finite, inherited + a.gamma(n, np.float32) * size, 0.0), np.float32, 0)
    return [a.rounded(value, summed.radius, dtype, float(dtype != np.float32))]


RULES |= {
    "reduce_sum": _reduce_sum, "reduce_prod": _reduce_prod, "reduce_max": _reduce_extreme(np.max),
    "reduce_min": _reduce_extreme(np.min), "reduce_and": _reduce_logical(np.all), "reduce_or": _reduce_logical(np.any),
    "argmax": _arg_extreme(1), "argmin": _arg_extreme(-1), "dot_general": _dot_general,
    **{name: _cumulative(name) for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
}  # fmt: skip


# --- layout: the same on values and radii


def _layout(f: Callable[..., Array | Sequence[Array]]) -> Rule:
    def rule(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
        values, radii = f(eqn, *(b.value for b in balls)), f(eqn, *(b.radius for b in balls))
        if not isinstance(values, (list, tuple)):
            return [Ball(np.asarray(values), np.asarray(radii))]
        return [Ball(v, r) for v, r in zip(values, radii, strict=True)]

    return rule


def _broadcast(eqn: Any, x: Array, *_: Array) -> Array:
    shape = eqn.params["shape"]
    wide = [1] * len(shape)
    for d, target in enumerate(eqn.params["broadcast_dimensions"]):
        wide[target] = x.shape[d]
    return np.broadcast_to(x.reshape(wide), shape)


def _slice(eqn: Any, x: Array) -> Array:
    p = eqn.params
    strides = p["strides"] or (1,) * x.ndim
    return x[tuple(slice(*s) for s in zip(p["start_indices"], p["limit_indices"], strides, strict=True))]


def _iota(eqn: Any, *_: Array) -> Array:
    shape, d = eqn.params["shape"], eqn.params["dimension"]
    wide = [1] * len(shape)
    wide[d] = shape[d]
    dtype = np.float64 if is_float(eqn.params["dtype"]) else eqn.params["dtype"]
    return np.broadcast_to(np.arange(shape[d], dtype=dtype).reshape(wide), shape)


RULES |= {
    "broadcast_in_dim": _layout(_broadcast), "slice": _layout(_slice),
    "iota": lambda eqn, balls, a: [exactly(_iota(eqn))],
    "reshape": _layout(lambda eqn, x, *_: x.reshape(eqn.params["new_sizes"])),
    "transpose": _layout(lambda eqn, x: x.transpose(eqn.params["permutation"])),
    "squeeze": _layout(lambda eqn, x: x.reshape(eqn.outvars[0].aval.shape)),
    "expand_dims": _layout(lambda eqn, x: x.reshape(eqn.outvars[0].aval.shape)),
    "rev": _layout(lambda eqn, x: np.flip(x, eqn.params["dimensions"])),
    "stack": _layout(lambda eqn, *xs: np.stack(xs, eqn.params["axis"])),
    "concatenate": _layout(lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"])),
    "split": _layout(lambda eqn, x: np.split(x, np.cumsum(eqn.params["sizes"])[:-1], eqn.params["axis"])),
    "tile": _layout(lambda eqn, x: np.tile(x, eqn.params["reps"])),
}  # fmt: skip
INDEXED = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "pad": 2}
"""Moves elements of so many operands to where the other operands say: XLA does it, for the values and for the radii."""


def by_xla(eqn: Any, balls: list[Ball], a: Arithmetic) -> list[Ball]:
    def run(operands: list[Array]) -> Array:
        with jax.enable_x64(True):
            return np.asarray(eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.params))

    moved = INDEXED[eqn.primitive.name]
    value = run([b.value for b in balls])
    if not all(b.certain for b in balls[moved:]):
        return [Ball(value, np.full(value.shape, np.inf))]
    # what is filled in where an index lies outside is not known, unless it is zero
    radius = run([*(b.radius for b in balls[:moved]), *(b.value for b in balls[moved:])])
    return [Ball(value, np.where(radius >= 0, radius, np.inf))]
