"""Words of JAX's generator of random numbers, computed element by element.

The generator is Threefry of Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3", with two words and 20 rounds. JAX
writes its rounds as a loop for CPUs, where XLA stores the words after each; one after the other, they stay in registers.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasfuse import _compat
from pallasfuse._compat import JaxprEqn

type Array = Any

GENERATOR = "threefry2x32"
"""The name of the generator."""
WIDTHS = (8, 16, 32)
"""The bits that are drawn from one pair of words."""
_PARITY = 0x1BD11BDA
"""The third word of a key is this, and the other two, by exclusive or."""
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""The bits by which a word is turned in each round, four and four."""
_GROUPS = 5
"""Groups of four rounds; after each, words of the key are added."""


def words(eqn: JaxprEqn) -> Callable[..., list[Array]]:
    """Returns what encrypts pairs of words with pairs of keys."""
    shape = _compat.shape_of(eqn.outvars[0])

    def run(*operands: Array) -> list[Array]:
        first, second, x, y = (jnp.broadcast_to(a, shape) for a in operands)
        return list(encrypted(first, second, x, y))

    return run


def bits(eqn: JaxprEqn) -> Callable[..., list[Array]] | None:
    """Returns what draws random bits of keys; None for other generators and orders of numbers."""
    (keys,), width, shape = eqn.invars, eqn.params["bit_width"], tuple(eqn.params["shape"])
    is_known = is_in_order(eqn) and is_known_key(keys)
    if not is_known or width not in WIDTHS or not 0 < math.prod(shape) < 1 << 32:
        return None

    def run(keys: Array) -> list[Array]:
        both = jax.random.key_data(keys)
        return [bits_of(both[..., 0], both[..., 1], shape, width)]

    return run


def bits_of(first: Array, second: Array, shape: tuple[int, ...], width: int) -> Array:
    """Computes random bits of each of some keys, given by their two words: over the dimensions of the keys and those of `shape`."""
    upper, lower = numbered(first, second, shape)
    return (upper ^ lower).astype(f"uint{width}")


def numbered(first: Array, second: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Computes two words for each key and each position of `shape`: the number of the position, encrypted with the key."""
    before = range(first.ndim, first.ndim + len(shape))
    number = lax.reshape(lax.iota(jnp.uint32, math.prod(shape)), shape)
    return encrypted(lax.expand_dims(first, before), lax.expand_dims(second, before), jnp.zeros((), jnp.uint32), number)


def is_in_order(eqn: JaxprEqn) -> bool:
    """Does an equation draw the number of each position by itself, as it was traced?"""
    with eqn.ctx.manager:
        return bool(jax.config.jax_threefry_partitionable)


def is_known_key(atom: Any) -> bool:
    """Are keys, or is a key, of this generator?"""
    known: bool = _compat.dtype_of(atom) == jax.eval_shape(lambda: jax.random.key(0, impl=GENERATOR)).dtype
    return known


def encrypted(first: Array, second: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Computes two words after all rounds."""
    keys = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    x, y = x + keys[0], y + keys[1]
    for group in range(_GROUPS):
        for turned in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ (y << jnp.uint32(turned) | y >> jnp.uint32(32 - turned))
        x, y = x + keys[(group + 1) % 3], y + (keys[(group + 2) % 3] + jnp.uint32(group + 1))
    return x, y
