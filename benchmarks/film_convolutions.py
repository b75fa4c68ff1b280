"""Convolutions along three dimensions, of films and of scans, and their gradients, for `xla_alone.py films`."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.alone_cases import Case, case

_LAST, _SECOND = ("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW")
_PARTLY = (
    ((8, 8, 56, 56, 64), (1, 3, 3), 64, (1, 1, 1)), ((8, 8, 56, 56, 64), (3, 1, 1), 64, (1, 1, 1)),
    ((8, 32, 56, 56, 8), (1, 3, 3), 8, (1, 1, 1)), ((8, 32, 56, 56, 32), (3, 1, 1), 8, (1, 1, 1)),
    ((8, 32, 56, 56, 8), (5, 1, 1), 16, (8, 1, 1)), ((8, 32, 28, 28, 64), (7, 1, 1), 128, (8, 1, 1)),
    ((8, 8, 14, 14, 1024), (3, 1, 1), 256, (1, 1, 1)), ((8, 8, 14, 14, 256), (1, 3, 3), 256, (1, 1, 1)),
    ((8, 8, 56, 56, 128), (1, 3, 3), 128, (1, 2, 2)), ((4, 16, 112, 112, 3), (1, 7, 7), 45, (1, 2, 2)),
    ((2, 48, 48, 48, 32), (3, 1, 3), 32, (1, 1, 1)),
)  # fmt: skip
"""Images, windows, results and steps of layers in which windows do not move along all dimensions."""
_WHOLLY = (
    ((8, 32, 160, 160, 3), (5, 7, 7), 8, (1, 2, 2)), ((4, 32, 112, 112, 3), (7, 7, 7), 64, (2, 2, 2)),
    ((4, 16, 112, 112, 3), (3, 3, 3), 64, (1, 1, 1)), ((4, 16, 112, 112, 3), (3, 7, 7), 64, (1, 2, 2)),
    ((2, 64, 64, 64, 1), (3, 3, 3), 32, (1, 1, 1)), ((2, 48, 48, 48, 4), (3, 3, 3), 32, (1, 1, 1)),
    ((1, 8, 64, 64, 128), (3, 3, 3), 128, (1, 1, 1)), ((4, 16, 56, 56, 16), (3, 3, 3), 32, (1, 1, 1)),
    ((8, 16, 112, 112, 3), (2, 8, 8), 384, (2, 8, 8)), ((2, 48, 48, 48, 8), (5, 5, 5), 16, (1, 1, 1)),
)  # fmt: skip
_CHANNELS_SECOND = (
    ((2, 32, 24, 128, 128), (1, 3, 3), 32, (1, 1, 1)), ((2, 64, 24, 64, 64), (3, 1, 1), 64, (1, 1, 1)),
    ((2, 32, 64, 64, 48), (3, 3, 1), 32, (1, 1, 1)), ((4, 3, 16, 112, 112), (3, 3, 3), 64, (1, 1, 1)),
)  # fmt: skip


def films(platform: str) -> Iterator[Case]:
    """Yields layers of networks of films and scans, and the gradients of their images and weights where windows move partly."""
    layers = [(_LAST, layer, layer in _PARTLY) for layer in (*_PARTLY, *_WHOLLY)]
    layers += [(_SECOND, layer, layer[1] != (3, 3, 3)) for layer in _CHANNELS_SECOND]
    for (numbers, layer, has_gradients), dtype in itertools.product(layers, ("bfloat16", "float32")):
        images, window, results, strides = layer
        if platform == "cpu":
            images = (1, *images[1:])

        def layer_of(x: Any, w: Any, numbers: Any = numbers, strides: Any = strides) -> Any:
            return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=numbers)

        sizes = {"O": results, "I": images[numbers[0].index("C")], **dict(zip("DHW", window, strict=True))}
        kernel = tuple(sizes[d] for d in numbers[1])
        made = jax.eval_shape(layer_of, *(jax.ShapeDtypeStruct(s, dtype) for s in (images, kernel))).shape
        words = " x ".join(map(str, window)) + f" to {results} by {' x '.join(map(str, strides))}"
        yield case("films", f"{numbers[0]} {words}", layer_of, (images, dtype), (kernel, dtype))
        if has_gradients:
            of_images, of_weights = _gradients(layer_of, images, kernel)
            yield case("films", f"{numbers[0]} images' {words}", of_images, (made, dtype), (kernel, dtype))
            yield case("films", f"{numbers[0]} weights' {words}", of_weights, (images, dtype), (made, dtype))


def _gradients(
    layer: Callable[..., Any], images: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[Callable[..., Any], ...]:
    def of_images(g: Any, w: Any) -> Any:
        return jax.vjp(lambda x: layer(x, w), jnp.zeros(images, g.dtype))[1](g)

    def of_weights(x: Any, g: Any) -> Any:
        return jax.vjp(lambda w: layer(x, w), jnp.zeros(kernel, g.dtype))[1](g)

    return of_images, of_weights
