"""Convolutions along three and more dimensions, as convolutions along those dimensions only along which windows move.

Where a window has one element along a dimension, each position is an image of its own; where it covers all of the images, its
elements are summed like channels. So are most convolutions of films, along time or along pictures, and the gradients of their
weights. A library has its fast kernels for two dimensions, and copies images of three to another order. Sums are in another order;
and what is zero for lack of images stays zero where a weight is infinite or not a number.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.ordered_convolution import back, is_misread

Array = Any

_FEWEST_DIMENSIONS = 3
"""Convolutions along fewer dimensions stay as they are: the library has kernels for them."""
_EACH, _ALL, _MOVING = "each position by itself", "all positions together", "moving windows"


@dataclass(frozen=True, slots=True)
class _Convolution:
    """Describes a convolution by its parameters and shapes, which need not be those of an equation.

    Its dimensions stay where they lie: `OrderedConvolution` is for those who bring them into one order.
    """

    params: Mapping[str, Any]
    images: tuple[int, ...]
    kernel: tuple[int, ...]
    result: tuple[int, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "_Convolution | None":
        """Returns the convolution of an equation; None where it has no elements, or is along few dimensions."""
        images, kernel, result = (_compat.shape_of(a) for a in (*eqn.invars, eqn.outvars[0]))
        has_few = len(eqn.params["window_strides"]) < _FEWEST_DIMENSIONS
        if has_few or eqn.params.get("out_sharding") is not None or 0 in (*images, *kernel, *result):
            return None
        return cls(eqn.params, images, kernel, result)

    @property
    def numbers(self) -> Any:
        """Says which axes of both operands and the result are images, channels, and positions, as JAX has it."""
        return self.params["dimension_numbers"]

    @property
    def in_memory(self) -> list[int]:
        """Returns the dimensions along which windows may move, in the order in which they lie in the images."""
        return sorted(range(len(self.params["window_strides"])), key=lambda n: self.numbers.lhs_spec[2 + n])

    def taps(self, n: int) -> int:
        """Counts the elements of a window along a dimension."""
        return self.kernel[int(self.numbers.rhs_spec[2 + n])]

    def kind(self, n: int) -> str:
        """Says how windows look at images along a dimension."""
        is_dense = self.params["lhs_dilation"][n] == 1
        if self.taps(n) == 1 and (is_dense or self.params["window_strides"][n] == 1):
            return _EACH
        is_one = self.result[self.numbers.out_spec[2 + n]] == 1
        return _ALL if is_one and is_dense else _MOVING

    def met(self, images: Array, n: int) -> Array:
        """Returns the part of the images that windows look at along a dimension along which they do not move."""
        axis, kind, stride = self.numbers.lhs_spec[2 + n], self.kind(n), self.params["window_strides"][n]
        edges = [(0, 0, 0)] * images.ndim
        edges[axis] = (*self.params["padding"][n], 0)
        if kind == _ALL:
            step = self.params["rhs_dilation"][n]
            return lax.slice_in_dim(_padded(images, edges), 0, (self.taps(n) - 1) * step + 1, step, axis=axis)
        if kind == _EACH and stride > 1:
            return lax.slice_in_dim(_padded(images, edges), 0, None, stride, axis=axis)
        return images

    def joins(self) -> tuple[list[int], list[list[int]]] | None:
        """Returns the dimensions that are joined with the images or the channels, and those that are one with others or alone.

        None where there are no fewer then, where windows move along none, and where XLA's CPU library would misread them.
        """
        count = len(self.params["window_strides"])
        kinds = [self.kind(n) for n in range(count)]
        groups = [
            group
            for kind, same in groupby(self.in_memory, key=kinds.__getitem__)
            for group in ([[n] for n in same] if kind == _MOVING else [list(same)])
        ]
        fixed = [group for group in groups if kinds[group[0]] != _MOVING]
        # the first dimensions lie beside the images; of others, one has to be brought there if that is what it takes
        first = next((group for group in fixed if group is groups[0] or len(groups) == count), [])
        left = [group for group in groups if group is not first]
        reads_beside = is_misread([self.params["padding"][n] for n in range(count) if kinds[n] == _MOVING])
        return None if not left or len(left) == count or reads_beside else (first, left)

    def fewer(self) -> Callable[[Array, Array], Array] | None:
        """Returns what computes the convolution along fewer dimensions; None as of `joins`."""
        joins = self.joins()
        if joins is None:
            return None
        (first, groups), numbers = joins, self.numbers
        ends, inside = [(0, 0, 0)] * len(self.result), list(self.result)
        for n in self.in_memory:
            if self.kind(n) == _EACH and self.params["window_strides"][n] == 1:
                axis = numbers.out_spec[2 + n]
                ends[axis] = (*self.params["padding"][n], self.params["lhs_dilation"][n] - 1)
                inside[axis] = self.images[numbers.lhs_spec[2 + n]]

        def joined(spec: Sequence[int], beside: int, shape: Sequence[int]) -> _Joined:
            """Joins the axes of an array: the first dimensions with what is first or second in the specification of its axes."""
            axes = [[spec[0]], [spec[1]], *([spec[2 + n] for n in group] for group in groups)]
            axes[beside] += [spec[2 + n] for n in first]
            return _Joined(axes, tuple(shape))

        def along(name: str) -> list[Any]:
            """Returns a parameter along each dimension that is left."""
            plain = (0, 0) if name == "padding" else 1
            return [self.params[name][n] if self.kind(n) == _MOVING else plain for n, *_ in groups]

        params = {**self.params, **{name: along(name) for name in _ALONG}}

        def run(images: Array, kernel: Array) -> Array:
            for n in self.in_memory:
                images = self.met(images, n)
            x = joined(numbers.lhs_spec, 0 if first and self.kind(first[0]) == _EACH else 1, images.shape)
            # where it has one element along the first dimensions, it does not matter where these are joined
            w, made = joined(numbers.rhs_spec, 1, self.kernel), joined(numbers.out_spec, 0, inside)
            numbered = lax.ConvDimensionNumbers(x.places, w.places, made.places)
            found = _convolved(x.taken(images), w.taken(kernel), {**params, "dimension_numbers": numbered})
            return _padded(made.given(found), ends)

        return run


_ALONG = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
"""The parameters of a convolution along each dimension, in the order in which JAX takes them."""


def _convolved(images: Array, kernel: Array, params: Mapping[str, Any]) -> Array:
    """Convolves images as the parameters of an equation say."""
    strides, padding, between, holes = (params[name] for name in _ALONG)
    return lax.conv_general_dilated(
        images, kernel, strides, padding, between, holes, params["dimension_numbers"], params["feature_group_count"],
        params["batch_group_count"], params["precision"], params["preferred_element_type"],
    )  # fmt: skip


def along_fewer(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Returns what computes a convolution along fewer dimensions; None where windows move along all of them, or along few.

    Dimensions beside each other that are alike are one. The first ones, or one, are joined with the images, or with the channels.
    """
    of = _Convolution.of(eqn)
    run = None if of is None else of.fewer()
    return None if run is None else lambda images, kernel: [run(images, kernel)]


_MOST_TAPS = 8
"""The most times that an image is written down beside itself (a judgement)."""


def beside_each_other(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Returns what computes a convolution with the elements of its windows along one dimension as channels.

    Windows move along one dimension less then. None for groups, and where images would be many times as large. A library sums over
    many channels at a time: the few of a picture fill a small part of that.
    """
    of = _Convolution.of(eqn)
    if of is None or max(of.params["feature_group_count"], of.params["batch_group_count"]) > 1:
        return None
    n = next((n for n in of.in_memory if of.kind(n) == _MOVING), None)
    if n is None:
        return None
    taps, numbers = of.taps(n), of.numbers
    count = of.result[numbers.out_spec[2 + n]]
    if taps > min(_MOST_TAPS, count):
        return None
    image_axis, kernel_axis, channels = numbers.lhs_spec[2 + n], numbers.rhs_spec[2 + n], numbers.rhs_spec[1]
    stride, step = of.params["window_strides"][n], of.params["rhs_dilation"][n]
    image_shape, kernel_shape = list(of.images), list(of.kernel)
    image_shape[image_axis], kernel_shape[kernel_axis] = count, 1
    image_shape[numbers.lhs_spec[1]] = kernel_shape[channels] = taps * kernel_shape[channels]
    along_it = {"window_strides": 1, "padding": (0, 0), "lhs_dilation": 1, "rhs_dilation": 1}
    params = {**of.params, **{name: _with(of.params[name], n, value) for name, value in along_it.items()}}
    if is_misread(params["padding"]):
        return None
    other = _Convolution(params, tuple(image_shape), tuple(kernel_shape), of.result)
    run_other = other.fewer() or functools.partial(_convolved, params=params)

    def run(images: Array, kernel: Array) -> list[Array]:
        edges = [(0, 0, 0)] * images.ndim
        edges[image_axis] = (*of.params["padding"][n], of.params["lhs_dilation"][n] - 1)
        x = _padded(images, edges)
        shifted = [
            lax.slice_in_dim(x, t * step, t * step + (count - 1) * stride + 1, stride, axis=image_axis)
            for t in range(taps)
        ]
        parts = [lax.slice_in_dim(kernel, t, t + 1, axis=kernel_axis) for t in range(taps)]
        return [run_other(jnp.concatenate(shifted, numbers.lhs_spec[1]), jnp.concatenate(parts, channels))]

    return run


def _with(values: Sequence[Any], n: int, value: Any) -> tuple[Any, ...]:
    """Returns the values with another one in one place."""
    return (*values[:n], value, *values[n + 1 :])


def _padded(x: Array, edges: Sequence[tuple[int, int, int]]) -> Array:
    """Returns an array with zeros at the ends of its axes and between its elements; itself where there are none."""
    return lax.pad(x, jnp.zeros((), x.dtype), edges) if any(map(any, edges)) else x


@dataclass(frozen=True, slots=True)
class _Joined:
    """Joins axes of an array to one where the first of them is, and takes them apart again."""

    groups: list[list[int]]
    """The axes that are one, in the order of a specification of a convolution's dimensions: a group for each."""
    shape: tuple[int, ...]

    @property
    def in_order(self) -> list[list[int]]:
        """Returns the groups in the order of the axes that they become."""
        return sorted(self.groups)

    @property
    def order(self) -> list[int]:
        """Returns the axes as they lie where those of a group are side by side."""
        return [axis for group in self.in_order for axis in group]

    @property
    def places(self) -> tuple[int, ...]:
        """Returns the axis that each group has become."""
        return tuple(map(self.in_order.index, self.groups))

    def taken(self, x: Array) -> Array:
        """Returns an array with its axes joined."""
        return jnp.transpose(x, self.order).reshape(
            [math.prod(self.shape[a] for a in group) for group in self.in_order]
        )

    def given(self, x: Array) -> Array:
        """Returns an array with its axes apart again."""
        return jnp.transpose(x.reshape([self.shape[a] for a in self.order]), back(self.order))
