"""A jaxpr in float64: what its floating-point results are compared with."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import Jaxpr, JaxprEqn, Literal
from pallasfuse.primitive_names import KERNEL_OF_LOOP

_TYPES = ("new_dtype", "preferred_element_type", "dtype", "accumulation_type")
_ROUNDINGS = 4
_ROUNDED_OPERATIONS = frozenset({
    "add", "add_any", "sub", "mul", "div", "dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "exp", "exp2", "expm1",
    "log", "log1p", "tanh", "logistic", "erf", "rsqrt", "sqrt", "cbrt", "pow", "integer_pow", "square", "sin", "cos", "tan",
})  # fmt: skip
"""Operations whose results are rounded, of those that most programs are made of."""
_OF_BITS = ("bitcast_convert_type", "random_bits")
"""Operations whose results depend on the number of bits of a type."""


def _wide(dtype: Any) -> Any:
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def float64_results(jaxpr: Jaxpr, arguments: Sequence[Any]) -> list[np.ndarray]:
    """The results of a flat jaxpr with float64 in place of every floating-point type.

    Args:
      arguments: the values of its constants and inputs, in this order.
    """
    return float64_function(jaxpr)(arguments)


def float64_function(jaxpr: Jaxpr) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """`float64_results` of one jaxpr, compiled once for all arguments."""
    names = (*jaxpr.constvars, *jaxpr.invars)
    compiled = jax.jit(lambda *arrays: _run(jaxpr, dict(zip(names, arrays, strict=True))))

    def run(arguments: Sequence[Any]) -> list[np.ndarray]:
        with jax.enable_x64(True):
            values = [_as_wide(v, a) for v, a in zip(names, arguments, strict=True)]
            return [np.asarray(_as_numbers(x)) for x in compiled(*values)]

    return run


def _as_numbers(array: Any) -> Any:
    """Returns an array, or the words of keys of random numbers."""
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def _as_wide(variable: Any, array: Any) -> Any:
    dtype = _compat.dtype_of(variable)
    return np.asarray(array, _wide(dtype)) if isinstance(dtype, np.dtype) else array  # keys of random numbers stay


def _run(jaxpr: Jaxpr, given: dict[Any, Any], rounded: Callable[[JaxprEqn, Any, Any], Any] | None = None) -> list[Any]:
    """Returns the results of a jaxpr over float64.

    rounded: what becomes of a floating-point result, by its equation and variable. It is not asked in bodies of loops and branches.
    """
    known = dict(given)

    def look_up(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return jnp.asarray(atom.val, _wide(_compat.dtype_of(atom)))
        return known[atom]

    for eqn in jaxpr.eqns:
        results = _compat.bind(_widened(eqn), [look_up(a) for a in eqn.invars])
        for v, result in zip(eqn.outvars, results, strict=True):
            is_float = jnp.issubdtype(result.dtype, jnp.floating)
            known[v] = result.astype(_wide(result.dtype)) if is_float else result
            if is_float and rounded is not None:
                known[v] = rounded(eqn, v, known[v])
    return [look_up(v) for v in jaxpr.outvars]


def _widened(eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation over float64; for one that stands for a loop, the loop."""
    if eqn.primitive.name == KERNEL_OF_LOOP:
        eqn = eqn.params["of"].loop
    params = {key: _widened_body(value) for key, value in eqn.params.items()}
    for key in _TYPES:
        if params.get(key) is not None and eqn.primitive.name not in _OF_BITS:
            params[key] = _wide(params[key])
    if eqn.primitive.name == "reduce_precision":
        params |= {"exponent_bits": 11, "mantissa_bits": 52}
    widened: JaxprEqn = eqn.replace(params=params)
    return widened


def _widened_body(parameter: Any) -> Any:
    """Returns the bodies of loops, branches and solvers over float64, and any other parameter as it is."""
    if isinstance(parameter, tuple):
        parts = [_widened_body(x) for x in parameter]
        return type(parameter)(*parts) if hasattr(parameter, "_fields") else tuple(parts)
    if not isinstance(parameter, Jaxpr):
        return parameter
    held = {v: _as_wide(v, c) for v, c in zip(parameter.constvars, parameter.consts, strict=True)}
    arguments = [jax.ShapeDtypeStruct(_compat.shape_of(v), _wide(_compat.dtype_of(v))) for v in parameter.invars]
    return jax.make_jaxpr(lambda *arrays: _run(parameter, held | dict(zip(parameter.invars, arrays, strict=True))))(
        *arguments
    )


def sensitivity(
    jaxpr: Jaxpr, arguments: Sequence[Any], exact: Sequence[np.ndarray], seed: int,
    run: Callable[[Sequence[Any]], list[np.ndarray]] | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """Returns how far each result moves, at most, when the arguments are rounded once in the coarsest type of the program.

    Near a step, or a root of zero, no evaluation in floating point is right. Integers and special values that change have moved
    infinitely far.

    run: `float64_function(jaxpr)`, if it is there.
    """
    types = [_compat.dtype_of(v) for e in jaxpr.eqns for v in (*e.invars, *e.outvars)]
    eps = max((float(jnp.finfo(t).eps) for t in types if jnp.issubdtype(t, jnp.floating)), default=0.0)
    random = np.random.default_rng(seed)
    moved = [np.zeros(x.shape) for x in exact]
    signs: list[np.ndarray] = []
    run = run or float64_function(jaxpr)

    def rounded(array: Any, signs: np.ndarray) -> Any:
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return np.asarray(array, np.float64) * (1 + eps * signs) if is_float else array

    for n in range(_ROUNDINGS):  # every second time, each number is rounded the other way
        signs = [-s for s in signs] if n % 2 else [random.choice([-1, 1], a.shape) for a in arguments]
        results = run([rounded(a, s) for a, s in zip(arguments, signs, strict=True)])
        moved = [np.maximum(m, _distance(now, x)) for m, now, x in zip(moved, results, exact, strict=True)]
    return moved


def _by_chance(shape: tuple[int, ...], number: Any) -> Any:
    """Returns booleans that look drawn, by a hash of their places and a number (a compiler takes long for better ones)."""
    x = lax.iota(jnp.uint32, int(np.prod(shape, dtype=int))) * np.uint32(0x9E3779B1) + number * np.uint32(0x85EBCA77)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xC2B2AE3D)
    return ((x ^ (x >> np.uint32(13))) & np.uint32(1)).astype(bool).reshape(shape)


def noise(jaxpr: Jaxpr, arguments: Sequence[Any], exact: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
    """Returns how far each result moves, at most, when each sum, product and function in the program is rounded up or down by
    chance, as its own type rounds.

    A result that is zero for all arguments does not move with them. Such is the gradient of a bias that is subtracted again, as a
    part of a mean: in floating point it is what the roundings of its terms leave.
    """
    names = (*jaxpr.constvars, *jaxpr.invars)

    def run(number: Any, *arrays: Any) -> list[Any]:
        count = itertools.count(1)

        def rounded(eqn: JaxprEqn, variable: Any, value: Any) -> Any:
            dtype = _compat.dtype_of(variable)
            if eqn.primitive.name not in _ROUNDED_OPERATIONS or not jnp.issubdtype(dtype, jnp.floating):
                return value
            up = _by_chance(value.shape, number + np.uint32(2 * next(count)))
            half = 0.5 * float(jnp.finfo(dtype).eps)
            return value * jnp.where(up, 1 + half, 1 - half)

        return _run(jaxpr, dict(zip(names, arrays, strict=True)), rounded)

    compiled = jax.jit(run)
    moved = [np.zeros(x.shape) for x in exact]
    with jax.enable_x64(True):
        values = [_as_wide(v, a) for v, a in zip(names, arguments, strict=True)]
        for n in range(_ROUNDINGS):
            results = [np.asarray(_as_numbers(x)) for x in compiled(np.uint32(seed + 7919 * n), *values)]
            moved = [np.maximum(m, _distance(now, x)) for m, now, x in zip(moved, results, exact, strict=True)]
    return moved


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return np.where(a != b, np.inf, 0.0)
    with np.errstate(invalid="ignore"):
        apart = np.where(np.isnan(a) | np.isnan(b), np.inf, np.abs(a - b))
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart)


def largest_bytes(jaxpr: Jaxpr) -> int:
    """Bytes of the largest value in float64."""
    return max(
        (8 * int(np.prod(_compat.shape_of(v), dtype=np.int64)) for e in jaxpr.eqns for v in e.outvars), default=0
    )
