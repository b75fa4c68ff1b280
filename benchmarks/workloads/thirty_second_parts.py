"""The codes of Huffman for 256 symbols, which a program of the thirty-second set uses."""

import jax.numpy as jnp
from jax import lax


def huffman_lengths(count):
    """This grows Huffman's tree over 256 symbols, and gives the length of each code, at most 16 bits."""
    total = jnp.sum(count)
    weigh = jnp.where(count > 0, jnp.maximum(count, total // 1024 + 1), 0)
    far = jnp.int32(2**30)

    def join(_, carry):
        weigh, group, depth = carry
        one = jnp.argmin(jnp.where(weigh > 0, weigh, far))
        rest = jnp.where(weigh > 0, weigh, far).at[one].set(far)
        two = jnp.argmin(rest)
        good = rest[two] < far
        inside = (group == one) | (group == two)
        depth = depth + (good & inside)
        joined = weigh.at[two].add(weigh[one]).at[one].set(0)
        return jnp.where(good, joined, weigh), jnp.where(good & inside, two, group), depth

    start = (weigh, jnp.arange(256), jnp.zeros(256, jnp.int32))
    depth = lax.fori_loop(0, 255, join, start)[2]
    return jnp.where(count > 0, jnp.maximum(depth, 1), 0)


def huffman_codes(long):
    """This numbers codes in order of their lengths, and of symbols within a length."""
    many = jnp.zeros(18, jnp.int32).at[long].add(1).at[0].set(0)
    first = jnp.zeros(18, jnp.int32)
    for j in range(1, 18):
        first = first.at[j].set((first[j - 1] + many[j - 1]) << 1)
    order = jnp.argsort(jnp.where(long > 0, long, 99) * 256 + jnp.arange(256))
    place = jnp.zeros(256, jnp.int32).at[order].set(jnp.arange(256))
    before = jnp.cumsum(many) - many
    return first[long] + place - before[long]
