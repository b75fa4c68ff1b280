"""A convolution with its dimensions in one order, whatever order its operands have, for those who write it otherwise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.writing import wide
from pallasfuse.jaxpr_frontend.plain_work import library_orders

Array = Any


def back(order: Sequence[int]) -> list[int]:
    """Returns the order that brings dimensions back to where they were before they were brought into an order."""
    return sorted(range(len(order)), key=order.__getitem__)


def is_misread(padding: Sequence[tuple[int, int]]) -> bool:
    """Does XLA's CPU library read beside images with such padding? It does where that takes elements away at the low end of a
    dimension and adds some at the high end (JAX 0.11.2: other numbers each time, or the end of the process)."""
    return any(low < 0 < high for low, high in padding)


@dataclass(frozen=True, slots=True)
class OrderedConvolution:
    """A convolution of real numbers, with its dimensions in one order: images by positions and channels, weights by window,
    channels and results."""

    numbers: Any
    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilated: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    between: tuple[int, ...]
    """The step from one element of an image to the next along each dimension, where zeros stand between them; 1 where none do."""
    groups: int
    channels: int
    """The channels of one group."""
    results: int
    """The results of all groups together."""
    dtype: Any
    summed: Any
    """The type in which products are summed up."""

    @classmethod
    def of(
        cls, eqn: JaxprEqn, zeros_between: bool = False, images_are_groups: bool = False
    ) -> "OrderedConvolution | None":
        """Returns the convolution of an equation; None where it has images as groups, no elements, or zeros between them.

        zeros_between: also where there are zeros between the elements of the images. images_are_groups: also where they are.
        """
        params, numbers = eqn.params, eqn.params["dimension_numbers"]
        shape, weights = _compat.shape_of(eqn.invars[0]), _compat.shape_of(eqn.invars[1])
        results, channels, *window = (weights[d] for d in numbers.rhs_spec)
        batches = params["batch_group_count"]
        if (batches != 1 and not images_are_groups) or min(shape, default=0) < 1:
            return None
        if math.prod(params["lhs_dilation"]) != 1 and not zeros_between:
            return None
        dtype = _compat.dtype_of(eqn.outvars[0])
        summed = wide(dtype)
        if summed is None or any(wide(_compat.dtype_of(a)) is None for a in eqn.invars):
            return None
        if not window or min(*_compat.shape_of(eqn.outvars[0]), *weights) < 1:
            return None
        return cls(
            numbers, tuple(window), tuple(params["window_strides"]), tuple(params["rhs_dilation"]), tuple(params["padding"]),
            tuple(params["lhs_dilation"]), params["feature_group_count"] * batches, channels, results, dtype, summed,
        )  # fmt: skip

    def padded(self, images: Array) -> Array:
        """Returns the images with their channels last, and with the zeros at their ends and between their elements."""
        x = jnp.transpose(images, library_orders(self.numbers)[0])
        edges = ((low, high, step - 1) for (low, high), step in zip(self.padding, self.between, strict=True))
        return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])

    def weights(self, kernel: Array) -> Array:
        return jnp.transpose(kernel, library_orders(self.numbers)[1])

    def meeting(self, dimension: int, position: int, extent: int) -> tuple[range, range]:
        """Returns the elements of an image along a dimension that a window at a position looks at, and those of the window that
        look at them, in the same order.

        Tap t is at t * dilated + position * stride - padding, where an image of so many elements has one in `between`.
        """
        taps, dilated = self.window[dimension], self.dilated[dimension]
        between, start = self.between[dimension], position * self.strides[dimension] - self.padding[dimension][0]
        found = [
            t
            for t in range(taps)
            if (start + t * dilated) % between == 0 and 0 <= start + t * dilated < extent * between
        ]
        apart = between // math.gcd(between, dilated)
        if not found:
            return range(0, 0, 1), range(0, 0, apart)
        first, last = ((start + t * dilated) // between for t in (found[0], found[-1]))
        return range(first, last + 1, apart * dilated // between), range(found[0], found[-1] + 1, apart)

    def positions(self, x: Array) -> list[int]:
        """Counts the windows along each dimension of padded images."""
        sizes = zip(x.shape[1:], self.window, self.dilated, self.strides, strict=False)
        return [(n - (taps - 1) * d - 1) // s + 1 for n, taps, d, s in sizes]

    def window_at(self, x: Array, position: Sequence[int]) -> Array:
        """Returns the elements that the window at a position looks at, of all padded images."""
        first = [p * s for p, s in zip(position, self.strides, strict=True)]
        last = [f + (n - 1) * d + 1 for f, n, d in zip(first, self.window, self.dilated, strict=True)]
        return lax.slice(x, [0, *first, 0], [x.shape[0], *last, x.shape[-1]], [1, *self.dilated, 1])

    def shifted(self, x: Array, taps: Sequence[int], positions: Sequence[int]) -> Array:
        """Returns one element of every window of padded images: that at `taps`."""
        first = [t * d for t, d in zip(taps, self.dilated, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, positions, self.strides, strict=True)]
        behind = x.shape[1 + len(first) :]
        return lax.slice(
            x, [0, *first, *(0 for _ in behind)], [x.shape[0], *last, *behind], [1, *self.strides, *(1 for _ in behind)]
        )

    def cut(self, x: Array, positions: Sequence[int]) -> Array:
        """Returns windows that do not overlap, each with its elements as the last dimension."""
        count = len(positions)
        missing = [n * s - size for n, s, size in zip(positions, self.strides, x.shape[1:], strict=False)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((0, m, 0) for m in missing), (0, 0, 0)])
        split = [length for pair in zip(positions, self.strides, strict=True) for length in pair]
        x = x.reshape(x.shape[0], *split, x.shape[-1])
        inside = [slice(0, taps) for taps in self.window]
        x = x[(slice(None), *(part for taps in inside for part in (slice(None), taps)))]
        x = jnp.transpose(x, (0, *range(1, 2 * count, 2), *range(2, 2 * count + 1, 2), 2 * count + 1))
        return x.reshape(*x.shape[: count + 1], -1)

    def placed(self, found: Array) -> Array:
        """Returns the results in the type and the order of dimensions that the operation has."""
        return jnp.transpose(found.astype(self.dtype), back(library_orders(self.numbers)[2]))
