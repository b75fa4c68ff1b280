"""Windows that move along arrays, as shifted arrays added or multiplied element by element.

XLA looks at the elements of a window one by one where it has no library for it: in pools, in convolutions in which each channel
is a group of its own, and in those of very few channels. Shifted arrays are one loop for it, with vectors and on all cores. It
writes out the holes of windows as zeros, which its libraries multiply, beside padding that differs at both ends; and they do
not see that windows that do not overlap are rows of one product, nor that long ones at a few positions are. Some only have their
dimensions, or their groups, where its library has them. The order of sums changes, a sum of nothing but minus zeros keeps its
sign, and an infinite factor of a zero beside or between images may give no number.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn
from pallasfuse.decompositions.ordered_convolution import OrderedConvolution, back, is_misread
from pallasfuse.decompositions.writing import wide
from pallasfuse.jaxpr_frontend.plain_work import is_of_a_library, library_orders, lies_otherwise

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
    """Returns what computes a convolution whose groups have few channels as a sum of shifted arrays times weights.

    There may be zeros between the elements of images. None where it has too many terms.
    """
    of = OrderedConvolution.of(eqn, zeros_between=True)
    if of is None or not 2 <= math.prod(of.window) * of.channels <= MOST_TERMS:
        return None

    def run(images: Array, kernel: Array) -> list[Array]:
        x, w = of.padded(images.astype(of.summed)), of.weights(kernel.astype(of.summed))
        positions = of.positions(x)
        x = x.reshape(*x.shape[:-1], of.groups, of.channels)
        w = w.reshape(*w.shape[:-1], of.groups, of.results // of.groups)

        def term(taps: Sequence[int], channel: int) -> Array:
            part = of.shifted(x, taps, positions)[..., channel : channel + 1]
            own = w[(*taps, channel)].reshape([1] * (part.ndim - 2) + [of.groups, of.results // of.groups])
            return part * own  # over the results of the group, which stand where its channels stood

        terms = (term(taps, c) for taps in itertools.product(*map(range, of.window)) for c in range(of.channels))
        found = _folded(lax.add, terms)
        return [of.placed(found.reshape(x.shape[0], *positions, of.results))]

    return run


_FEWEST_PRODUCTS = 1 << 15
"""A convolution of fewer products takes less time than the transpositions around it. (Eight in loops, on two cores: those of
1 to 9 thousand products take 7 to 1.6 times as long with them, one of 21 thousand 0.9 times, and those of 37 to 147 thousand 0.2 to
0.5 times.)"""


def in_order(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Returns what brings the dimensions of a convolution into the order of XLA's library, and those of its result back.

    None where they are in it, where no library has it, and of small ones. XLA's CPU backend does the same, but not in bodies of
    loops and branches, where it computes such convolutions product by product. Sums are in another order then.
    """
    if (
        is_misread(eqn.params["padding"])
        or not lies_otherwise(eqn)
        or _products(eqn) < _FEWEST_PRODUCTS
        or eqn.params.get("out_sharding") is not None
    ):
        return None
    ordered = _ordered(eqn)
    return _brought(eqn, lambda x, w: _compat.bind(ordered, [x, w])[0])


def by_features(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Writes a convolution whose images are groups as one whose channels are, in the order of XLA's library.

    So gradients of grouped convolutions are written, and those of tasks that each have weights of their own. XLA's CPU backend has
    no library for them. None for others, and for small ones.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    groups, (batch, *_) = params["batch_group_count"], numbers.lhs_spec
    if (
        groups == 1
        or is_misread(eqn.params["padding"])
        or not is_of_a_library(eqn)
        or _products(eqn) < _FEWEST_PRODUCTS
    ):
        return None
    if params.get("out_sharding") is not None or _compat.shape_of(eqn.invars[0])[batch] < groups:
        return None
    ordered = _ordered(eqn, batch_group_count=1, feature_group_count=groups)

    def computed(x: Array, w: Array) -> Array:
        x = jnp.moveaxis(x.reshape(groups, -1, *x.shape[1:]), 0, -2)
        return _compat.bind(ordered, [x.reshape(*x.shape[:-2], groups * x.shape[-1]), w])[0]

    return _brought(eqn, computed)


_MOST_GROUPS, _FEWEST_CHANNELS = 32, 8
"""The most convolutions that one of groups becomes, and the fewest channels and results of each: of three with fewer, two take 1.3
and 2 times as long apart, on two cores, and one 0.65 times."""


def each_group(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Writes a convolution of groups of channels as one for each group, in the order of XLA's CPU library, which is faster so.

    None for others, for many groups, and for groups of few channels.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    groups, (results, channels, *_) = params["feature_group_count"], numbers.rhs_spec
    weights = _compat.shape_of(eqn.invars[1])
    if not 1 < groups <= _MOST_GROUPS or min(weights[channels], weights[results] // groups) < _FEWEST_CHANNELS:
        return None
    if is_misread(eqn.params["padding"]) or not is_of_a_library(eqn) or params.get("out_sharding") is not None:
        return None
    alone = _ordered(eqn, feature_group_count=1)

    def computed(x: Array, w: Array) -> Array:
        parts = zip(jnp.split(x, groups, -1), jnp.split(w, groups, -1), strict=True)
        return jnp.concatenate([_compat.bind(alone, list(part))[0] for part in parts], axis=-1)

    return _brought(eqn, computed)


def _products(eqn: JaxprEqn) -> int:
    """Counts the products of a convolution."""
    weights = _compat.shape_of(eqn.invars[1])
    results: int = weights[eqn.params["dimension_numbers"].rhs_spec[0]]
    return math.prod(_compat.shape_of(eqn.outvars[0])) * (math.prod(weights) // max(1, results))


def _ordered(eqn: JaxprEqn, **groups: int) -> JaxprEqn:
    """Returns a convolution whose dimensions are in the order of XLA's CPU library, with other numbers of groups."""
    last = len(_compat.shape_of(eqn.invars[0])) - 1
    own = (0, last, *range(1, last))
    numbers = lax.ConvDimensionNumbers(own, (last, last - 1, *range(last - 1)), own)
    return _compat.with_params(eqn, {**eqn.params, "dimension_numbers": numbers, **groups})


def _brought(eqn: JaxprEqn, computed: Callable[[Array, Array], Array]) -> Callable[..., list[Array]]:
    """Returns what brings the operands of a convolution into the order of XLA's CPU library, and the result back from it."""
    images_order, weights_order, results_order = library_orders(eqn.params["dimension_numbers"])

    def run(images: Array, kernel: Array) -> list[Array]:
        found = computed(lax.transpose(images, images_order), lax.transpose(kernel, weights_order))
        return [lax.transpose(found, back(results_order))]

    return run


def evened(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A convolution with as many zeros at both ends of each dimension, and the part of its results that is wanted.

    None where that is so already, windows have no holes, or results would not be at the same positions. XLA writes out the holes of
    windows as zeros beside padding that differs at both ends: the library then multiplies these.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    padding, strides = params["padding"], params["window_strides"]
    more = [max(low, high) - low for low, high in padding]
    is_uneven = any(low != high for low, high in padding) and min(n for ends in padding for n in ends) >= 0
    fits = all(n % stride == 0 for n, stride in zip(more, strides, strict=True))
    with_holes = max(params["rhs_dilation"]) > 1 and math.prod(params["lhs_dilation"]) == 1
    shape = _compat.shape_of(eqn.outvars[0])
    if not (is_uneven and fits and with_holes) or min(shape) < 1:
        return None
    starts = [0] * len(shape)
    for d, n, stride in zip(numbers.out_spec[2:], more, strides, strict=True):
        starts[d] = n // stride
    same = [(n + low, n + low) for n, (low, _) in zip(more, padding, strict=True)]

    def run(images: Array, kernel: Array) -> list[Array]:
        found = _compat.bind(_compat.with_params(eqn, {**params, "padding": tuple(same)}), [images, kernel])
        return [lax.slice(found[0], starts, [a + n for a, n in zip(starts, shape, strict=True)])]

    return run


def patches(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A convolution as one product of matrices, with the elements of a window in each row.

    None where these rows would be many copies of the images: windows overlap, and have no holes that a library would
    compute with.
    """
    of = OrderedConvolution.of(eqn)
    if of is None or of.groups != 1:
        return None
    apart = all(n <= s for n, s in zip(of.window, of.strides, strict=True)) and max(of.dilated) == 1
    with_holes = len(of.window) == 1 and of.dilated[0] > 1 and of.window[0] <= _MOST_COPIES
    if not apart and not with_holes:
        return None

    def run(images: Array, kernel: Array) -> list[Array]:
        x, w = of.padded(images), of.weights(kernel)
        positions = of.positions(x)
        rows = of.cut(x, positions) if apart else jnp.concatenate(
            [of.shifted(x, taps, positions) for taps in itertools.product(*map(range, of.window))], axis=-1
        )  # fmt: skip
        found = lax.dot_general(
            rows, w.reshape(-1, of.results), (((rows.ndim - 1,), (0,)), ((), ())),
            precision=eqn.params["precision"], preferred_element_type=eqn.params["preferred_element_type"],
        )  # fmt: skip
        return [of.placed(found)]

    return run


_MOST_COPIES = 8
"""The most times that an element of an image may stand in the rows of a product."""
_MOST_POSITIONS, _LONG_WINDOW = 64, 16
"""The most products that a convolution becomes (a judgement: for windows of 8 x 8 or 4 x 4 x 4). Its own windows have more elements
than there are of these, and more than so many."""


def few_positions(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A convolution with long windows at a few positions as one product of matrices for each of these.

    XLA does not see that two gradients are like that: those of the weights of windows with holes along one dimension, and of
    transposed convolutions. None elsewhere.
    """
    of = OrderedConvolution.of(eqn, zeros_between=True)
    if of is None or of.groups != 1:
        return None
    params, (batch, feature, *spatial) = eqn.params, of.numbers.lhs_spec
    results, channels, *window = of.numbers.rhs_spec
    counts = [_compat.shape_of(eqn.outvars[0])[d] for d in of.numbers.out_spec[2:]]
    unseen = max(of.between) > 1 or (len(counts) == 1 and of.strides[0] > 1)
    positions, taps = math.prod(counts), math.prod(of.window)
    if not unseen or not 1 <= positions <= min(_MOST_POSITIONS, taps - 1) or taps <= _LONG_WINDOW:
        return None
    # in the order in which the images lie
    of_images, of_kernel = zip(*sorted(zip((feature, *spatial), (channels, *window), strict=True)), strict=True)

    def product(images: Array, kernel: Array, position: Sequence[int]) -> Array:
        for n, (of_image, of_window) in enumerate(zip(spatial, window, strict=True)):
            inside, taps = of.meeting(n, position[n], images.shape[of_image])
            images = lax.slice_in_dim(images, inside.start, inside.stop, inside.step, axis=of_image)
            kernel = lax.slice_in_dim(kernel, taps.start, taps.stop, taps.step, axis=of_window)
        return lax.dot_general(
            images, kernel, ((of_images, of_kernel), ((), ())), precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )  # fmt: skip

    def run(images: Array, kernel: Array) -> list[Array]:
        found = [product(images, kernel, p) for p in itertools.product(*map(range, counts))]
        return [of.placed(jnp.stack(found, axis=1).reshape(images.shape[batch], *counts, kernel.shape[results]))]

    return run


_MOST_WINDOWS, _MOST_WINDOW_BYTES = 64, 1 << 28
"""The most windows of an image that are written down beside each other, and the bytes of all of them (judgements)."""


def of_examples(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Writes a convolution of groups, with long windows at a few positions, as one product of matrices for each group.

    So the gradient of weights is written of which each example of a batch has its own. None for others, and where the windows
    beside each other would take much memory.
    """
    of = OrderedConvolution.of(eqn, zeros_between=True)
    if of is None or of.groups == 1:
        return None
    params, taps = eqn.params, math.prod(of.window)
    counts = [_compat.shape_of(eqn.outvars[0])[d] for d in of.numbers.out_spec[2:]]
    positions, images = math.prod(counts), _compat.shape_of(eqn.invars[0])[of.numbers.lhs_spec[0]]
    elements = positions * images * taps * of.groups * of.channels
    if not 1 <= positions <= min(_MOST_WINDOWS, taps - 1) or elements * of.dtype.itemsize > _MOST_WINDOW_BYTES:
        return None

    def run(images: Array, kernel: Array) -> list[Array]:
        x, w = of.padded(images), of.weights(kernel)
        windows = jnp.stack([of.window_at(x, p) for p in itertools.product(*map(range, counts))])
        found = lax.dot_general(
            windows.reshape(positions, x.shape[0], taps, of.groups, of.channels),
            w.reshape(taps, of.channels, of.groups, -1), (((2, 4), (0, 1)), ((3,), (2,))),
            precision=params["precision"], preferred_element_type=params["preferred_element_type"],
        )  # fmt: skip
        found = jnp.transpose(found, (2, 1, 0, 3))  # from groups, positions, images, and the results of a group
        return [of.placed(found.reshape(x.shape[0], *counts, of.results))]

    return run


_MOST_SLICES = 16
"""The most convolutions that one becomes: each is a call of the library, and reads the images anew."""


def of_slices(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """A convolution along three dimensions as several along two: of slices of the images, one for each slice of the windows or,
    where these are fewer, for each position along the first dimension. None for others, and where there would be many.

    A CPU's library copies windows of three dimensions one element after the other, on one core.
    """
    of = OrderedConvolution.of(eqn)
    if of is None or len(of.window) != 3 or is_misread(eqn.params["padding"]):
        return None
    params, (_, _, first, *_) = eqn.params, of.numbers.out_spec
    taps, step, stride = of.window[0], of.dilated[0], of.strides[0]
    count = _compat.shape_of(eqn.outvars[0])[first]
    is_summed = taps <= count or of.groups != 1
    if (taps if is_summed else count) > _MOST_SLICES:
        return None

    def flat(images: Array, kernel: Array) -> Array:
        return lax.conv_general_dilated(
            images, kernel, of.strides[1:], of.padding[1:], rhs_dilation=of.dilated[1:],
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=of.groups, precision=params["precision"],
        )  # fmt: skip

    def run(images: Array, kernel: Array) -> list[Array]:
        x = jnp.transpose(images.astype(of.summed), library_orders(of.numbers)[0])
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (*of.padding[0], 0), *[(0, 0, 0)] * 3])
        w = of.weights(kernel.astype(of.summed))

        def of_tap(tap: int) -> Array:
            part = lax.slice_in_dim(x, tap * step, tap * step + (count - 1) * stride + 1, stride, axis=1)
            found = flat(part.reshape(-1, *part.shape[2:]), w[tap])
            return found.reshape(part.shape[0], count, *found.shape[1:])

        def at(position: int) -> Array:
            start = position * stride
            part = lax.slice_in_dim(x, start, start + (taps - 1) * step + 1, step, axis=1)
            rows, columns = jnp.moveaxis(part, 1, 3), jnp.moveaxis(w, 0, 2)
            return flat(rows.reshape(*rows.shape[:3], -1), columns.reshape(*columns.shape[:2], -1, of.results))

        if is_summed:
            return [of.placed(_folded(lax.add, map(of_tap, range(taps))))]
        return [of.placed(jnp.stack([at(p) for p in range(count)], axis=1))]

    return run


def by_channel(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Returns what computes a convolution whose images are groups of their own at a few positions: a sum for each, and each group.

    So the gradient of weights is written where each channel has weights of its own: its images are channels, and its windows are as
    long as the results of the convolution. None elsewhere.
    """
    of = OrderedConvolution.of(eqn, zeros_between=True, images_are_groups=True)
    if of is None or eqn.params["batch_group_count"] == 1:
        return None
    counts = [_compat.shape_of(eqn.outvars[0])[d] for d in of.numbers.out_spec[2:]]
    images = _compat.shape_of(eqn.invars[0])[of.numbers.lhs_spec[0]]
    if images != of.groups or not 1 <= math.prod(counts) <= min(MOST_TERMS, math.prod(of.window)):
        return None

    several = of.results // of.groups
    edges = [(low, high, step - 1) for (low, high), step in zip(of.padding, of.between, strict=True)]

    def run(images: Array, kernel: Array) -> list[Array]:
        batch, feature, *spatial = of.numbers.lhs_spec
        results, channels, *window = of.numbers.rhs_spec
        x = jnp.transpose(images, (feature, *spatial, batch)).astype(of.summed)
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
        w = jnp.transpose(kernel, (channels, *window, results)).astype(of.summed)
        # parts of one length: sums of 31 of different lengths took ten times as long on two cores
        parts = [of.window_at(x, p) for p in itertools.product(*map(range, counts))]
        if several > 1:
            parts, w = [part[..., None] for part in parts], w.reshape(*w.shape[:-1], of.groups, several)
        found = jnp.stack([jnp.sum(part * w, axis=range(1 + len(counts))) for part in parts])
        return [of.placed(found.reshape(1, *counts, of.results))]

    return run
