"""Windows that move along arrays, as shifted arrays added or multiplied element by element.

XLA looks at the elements of a window one by one where it has no library for it: in pools, in convolutions in which each channel is
a group of its own, and in those of very few channels. Shifted arrays are one loop for it, with vectors and on all cores. The order
of sums changes, and a sum of nothing but minus zeros keeps its sign.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.writing import wide

Array = Any

MOST_TERMS = 128
"""The most shifted arrays that an operation becomes: compiling takes as long as there are terms."""
_COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    "reduce_window_sum": lax.add,
    "reduce_window_max": lax.max,
    "reduce_window_min": lax.min,
}


def pool(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A reduction over windows as one of shifted arrays, along one dimension after the other; None where it has too many."""
    window, strides, padding = (eqn.params[n] for n in ("window_dimensions", "window_strides", "padding"))
    dilated, combine = eqn.params["window_dilation"], _COMBINED[eqn.primitive.name]
    dtype = _compat.dtype_of(eqn.invars[0])
    summed = wide(dtype)
    if math.prod(eqn.params["base_dilation"]) != 1 or not 2 <= sum(n for n in window if n > 1) <= MOST_TERMS:
        return None
    if summed is None or min(*_compat.shape_of(eqn.invars[0]), *_compat.shape_of(eqn.outvars[0])) < 1:
        return None
    neutral = _neutral(eqn.primitive.name, summed)

    def run(x: Array) -> list[Array]:
        padded = lax.pad(x.astype(summed), jnp.asarray(neutral, summed), [(low, high, 0) for low, high in padding])
        for d, (taps, stride, dilation) in enumerate(zip(window, strides, dilated, strict=True)):
            positions = (padded.shape[d] - (taps - 1) * dilation - 1) // stride + 1
            shifted = (
                lax.slice_in_dim(padded, t * dilation, t * dilation + (positions - 1) * stride + 1, stride, axis=d)
                for t in range(taps)
            )
            padded = _folded(combine, shifted)
        return [padded.astype(dtype)]

    return run


def _neutral(name: str, dtype: Any) -> Any:
    if name == "reduce_window_sum":
        return 0
    largest = name == "reduce_window_min"
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return limits.max if largest else limits.min
    return jnp.inf if largest else -jnp.inf


def _folded(combine: Callable[[Array, Array], Array], terms: Iterable[Array]) -> Array:
    first, *others = terms
    for term in others:
        first = combine(first, term)
    return first


def convolution(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A convolution whose groups have few channels, as a sum of shifted arrays times weights; None where it has too many terms."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    shape, weights = _compat.shape_of(eqn.invars[0]), _compat.shape_of(eqn.invars[1])
    results, channels, *window = (weights[d] for d in numbers.rhs_spec)
    groups = params["feature_group_count"]
    if params["batch_group_count"] != 1 or math.prod(params["lhs_dilation"]) != 1 or min(shape, default=0) < 1:
        return None
    if not 2 <= math.prod(window) * channels <= MOST_TERMS or min(_compat.shape_of(eqn.outvars[0])) < 1:
        return None
    dtype = _compat.dtype_of(eqn.outvars[0])
    summed = wide(dtype)
    if summed is None or any(wide(_compat.dtype_of(a)) is None for a in eqn.invars):
        return None
    dilated, strides = params["rhs_dilation"], params["window_strides"]

    def run(images: Array, kernel: Array) -> list[Array]:
        batch, feature, *spatial = numbers.lhs_spec
        x = jnp.transpose(images, (batch, *spatial, feature)).astype(summed)
        of_results, of_channels, *of_window = numbers.rhs_spec
        w = jnp.transpose(kernel, (*of_window, of_channels, of_results)).astype(summed)
        x = lax.pad(
            x, jnp.zeros((), summed), [(0, 0, 0), *((low, high, 0) for low, high in params["padding"]), (0, 0, 0)]
        )
        positions = [
            (n - (taps - 1) * d - 1) // s + 1
            for n, taps, d, s in zip(x.shape[1:-1], window, dilated, strides, strict=True)
        ]
        x = x.reshape(*x.shape[:-1], groups, channels)
        w = w.reshape(*w.shape[:-1], groups, results // groups)

        def term(taps: Sequence[int], channel: int) -> Array:
            first = [t * d for t, d in zip(taps, dilated, strict=True)]
            last = [f + (n - 1) * s + 1 for f, n, s in zip(first, positions, strides, strict=True)]
            part = lax.slice(
                x,
                [0, *first, 0, channel],
                [x.shape[0], *last, groups, channel + 1],
                [1, *strides, 1, 1],
            )
            own = w[(*taps, channel)].reshape([1] * (part.ndim - 2) + [groups, results // groups])
            return part * own  # over the results of the group, which stand where its channels stood

        terms = (term(taps, c) for taps in itertools.product(*map(range, window)) for c in range(channels))
        found = _folded(lax.add, terms).reshape(x.shape[0], *positions, results).astype(dtype)
        batch, feature, *spatial = numbers.out_spec
        places = [0] * found.ndim
        for n, d in enumerate((batch, *spatial, feature)):
            places[d] = n
        return [jnp.transpose(found, places)]

    return run
