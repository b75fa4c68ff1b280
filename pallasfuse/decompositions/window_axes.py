"""Convolutions along three and more dimensions, as convolutions along those dimensions only along which windows move.

Where a window has one element along a dimension, each position is an image of its own; where it covers all of the images, its
elements are summed like channels. So are most convolutions of films, along time or along pictures, and the gradients of their
weights. A library has its fast kernels for two dimensions, and copies images of three to another order. Sums are in another order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn

Array = Any

_FEWEST_DIMENSIONS = 3
"""Convolutions along fewer dimensions stay as they are: the library has kernels for them."""
_EACH, _ALL, _MOVING = "each position by itself", "all positions together", "moving windows"


def along_fewer(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Returns what computes a convolution along fewer dimensions; None where windows move along all of them, or along few.

    Dimensions beside each other that are alike are one. The first ones are joined with the images, or with the channels.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    count = len(params["window_strides"])
    shapes = [_compat.shape_of(a) for a in (*eqn.invars, eqn.outvars[0])]
    if count < _FEWEST_DIMENSIONS or params.get("out_sharding") is not None or min(map(math.prod, shapes)) == 0:
        return None
    kinds = [_kind(eqn, n) for n in range(count)]
    in_memory = sorted(range(count), key=lambda n: numbers.lhs_spec[2 + n])
    runs = [
        run
        for kind, alike in groupby(in_memory, key=kinds.__getitem__)
        for run in ([[n] for n in alike] if kind == _MOVING else [list(alike)])
    ]
    first = runs.pop(0) if kinds[runs[0][0]] != _MOVING else []
    if not runs or len(runs) == count:
        return None
    joined_with = 0 if first and kinds[first[0]] == _EACH else 1

    def joined(spec: Sequence[int], beside: int, *, shape: Sequence[int]) -> _Joined:
        """The axes of one operand, or of the result, whose first dimensions are joined with the first or the second of its axes."""
        axes = [[spec[0]], [spec[1]], *([spec[2 + n] for n in run] for run in runs)]
        axes[beside] += [spec[2 + n] for n in first]
        return _Joined(axes, tuple(shape))

    kept = shapes[2], numbers.out_spec
    inside = [kept[0][d] for d in kept[1]]
    ends = [(0, 0, 0)] * len(shapes[2])
    for n in range(count):
        if kinds[n] == _EACH and params["window_strides"][n] == 1:
            ends[numbers.out_spec[2 + n]] = (*params["padding"][n], params["lhs_dilation"][n] - 1)
            inside[2 + n] = shapes[0][numbers.lhs_spec[2 + n]]
    made_shape = [0] * len(inside)
    for d, size in zip(numbers.out_spec, inside, strict=True):
        made_shape[d] = size

    def of_runs(name: str, otherwise: Any) -> list[Any]:
        return [params[name][run[0]] if kinds[run[0]] == _MOVING else otherwise for run in runs]

    def run(images: Array, kernel: Array) -> list[Array]:
        for n in range(count):
            images = _met(images, numbers.lhs_spec[2 + n], kinds[n], eqn, n)
        x = joined(numbers.lhs_spec, joined_with, shape=images.shape)
        # where it has one element along the first dimensions, it does not matter where these are joined
        w = joined(numbers.rhs_spec, 1, shape=kernel.shape)
        made = joined(numbers.out_spec, 0, shape=made_shape)
        found = lax.conv_general_dilated(
            x.taken(images), w.taken(kernel), of_runs("window_strides", 1), of_runs("padding", (0, 0)),
            of_runs("lhs_dilation", 1), of_runs("rhs_dilation", 1),
            lax.ConvDimensionNumbers(x.places, w.places, made.places),
            params["feature_group_count"], params["batch_group_count"], params["precision"],
            params["preferred_element_type"],
        )  # fmt: skip
        return [lax.pad(made.given(found), jnp.zeros((), found.dtype), ends)]

    return run


def _kind(eqn: JaxprEqn, n: int) -> str:
    """Says how windows look at images along a dimension."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    taps = _compat.shape_of(eqn.invars[1])[numbers.rhs_spec[2 + n]]
    is_dense = params["lhs_dilation"][n] == 1
    if taps == 1 and (is_dense or params["window_strides"][n] == 1):
        return _EACH
    positions = _compat.shape_of(eqn.outvars[0])[numbers.out_spec[2 + n]]
    return _ALL if positions == 1 and is_dense and params["padding"][n] == (0, 0) else _MOVING


def _met(images: Array, axis: int, kind: str, eqn: JaxprEqn, n: int) -> Array:
    """Returns the part of the images that windows look at along a dimension along which they do not move."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    stride = params["window_strides"][n]
    if kind == _ALL:
        taps = _compat.shape_of(eqn.invars[1])[numbers.rhs_spec[2 + n]]
        step = params["rhs_dilation"][n]
        return lax.slice_in_dim(images, 0, (taps - 1) * step + 1, step, axis=axis)
    if kind == _EACH and stride > 1:
        edges = [(0, 0, 0)] * images.ndim
        edges[axis] = (*params["padding"][n], 0)
        return lax.slice_in_dim(lax.pad(images, jnp.zeros((), images.dtype), edges), 0, None, stride, axis=axis)
    return images


@dataclass(frozen=True, slots=True)
class _Joined:
    """The axes of an array, of which some are joined to one where the first of them is."""

    groups: list[list[int]]
    """The axes that are one, in the order of a specification of a convolution's dimensions: a group for each."""
    shape: tuple[int, ...]
    in_order: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_order", sorted(self.groups))

    @property
    def places(self) -> tuple[int, ...]:
        """The axis that each group has become."""
        return tuple(map(self.in_order.index, self.groups))

    def taken(self, x: Array) -> Array:
        """Returns an array with its axes joined."""
        order = [axis for group in self.in_order for axis in group]
        return jnp.transpose(x, order).reshape([math.prod(self.shape[a] for a in group) for group in self.in_order])

    def given(self, x: Array) -> Array:
        """Returns an array with its axes apart again."""
        order = [axis for group in self.in_order for axis in group]
        return jnp.transpose(
            x.reshape([self.shape[a] for a in order]), sorted(range(len(order)), key=order.__getitem__)
        )
