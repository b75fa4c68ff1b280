"""Gathers whose neighbours read neighbours, and those that read anywhere."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import device
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.scattered import gathers_in
from pallasfuse.price.xla import price_xla

H200 = device.find("NVIDIA H200", "gpu")
N = 1 << 22


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def program(function, *arguments):
    return convert(flatten(jax.make_jaxpr(function)(*arguments))).program


def moved(image, shift):
    """An image read at places that differ from those of its results by shifts [2, rows, columns]."""
    rows, columns = jnp.meshgrid(*(jnp.arange(n) for n in image.shape), indexing="ij")
    return image[
        jnp.clip(rows + jnp.round(shift[0]).astype(int), 0, 399),
        jnp.clip(columns + jnp.floor(shift[1]).astype(int), 0, 299),
    ]


def turned(image, cosine, sine):
    rows, columns = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.float32) for n in image.shape), indexing="ij")
    places = [jnp.floor(a).astype(int) for a in (cosine * rows - sine * columns, sine * rows + cosine * columns)]
    return image[places[0] % image.shape[0], places[1] % image.shape[1]]


@pytest.mark.parametrize(
    ("function", "arguments", "near"),
    [
        (moved, (struct(400, 300), struct(2, 400, 300)), True),
        (turned, (struct(400, 300), struct(), struct()), True),
        (lambda x, at: x[at[:, None] + jnp.arange(64)], (struct(N), struct(999, dtype=jnp.int32)), True),
        (lambda x, at: x[(20 * jnp.arange(9999) + at) // 3], (struct(N), struct(dtype=jnp.int32)), True),
        (lambda x, at: x[7 * jnp.arange(9999) + at], (struct(N), struct(dtype=jnp.int32)), True),
        (lambda x, at: x[jnp.abs(at - 3 * jnp.arange(9999))], (struct(N), struct(dtype=jnp.int32)), True),
        (lambda x, at: x[9 * jnp.arange(9999) + at], (struct(N), struct(dtype=jnp.int32)), False),
        (lambda x, at: x[5 * jnp.arange(9999) + (5 * jnp.arange(9999) + at)], (struct(N), struct(dtype=jnp.int32)), False),
        (lambda x, at: x[jnp.arange(9999) + at], (struct(N), struct(9999, dtype=jnp.int32)), False),
        (lambda x, at: x[jnp.arange(999) * jnp.arange(999) + at], (struct(N), struct(dtype=jnp.int32)), False),
        (lambda x, at: x[(jnp.arange(9999) / 0.01 + at).astype(int)], (struct(N), struct()), False),
        (lambda x, at: x[(jnp.arange(9999) / 0.0 + at).astype(int)], (struct(N), struct()), False),
        (lambda x, at: x[jnp.arange(9999)[::64] + at], (struct(N), struct(dtype=jnp.int32)), False),
        (lambda x, at: x[at], (struct(N), struct(9999, dtype=jnp.int32)), False),
        (lambda x, at: x[500 * jnp.arange(8)[:, None] + at], (struct(4000), struct(8, 99, dtype=jnp.int32)), False),
        (lambda x, at: x[(jnp.arange(9999) * 7919 + at) % N], (struct(N), struct(dtype=jnp.int32)), False),
        (lambda x, at: x[at[::-1] ^ jnp.arange(9999)], (struct(N), struct(9999, dtype=jnp.int32)), False),
        (lambda x, at: x[jnp.cumsum(at)], (struct(N), struct(9999, dtype=jnp.int32)), False),
    ],
    ids=["moved", "turned", "runs", "thinned", "in strides", "backwards", "in long strides", "added strides", "drawn and counted",
         "squared", "widened", "by nothing", "every 64th", "drawn", "of rows", "hashed", "bits", "sums"],
)  # fmt: skip
def test_positions_that_count_up_follow_each_other(function, arguments, near):
    found = gathers_in(program(function, *arguments))
    assert bool(found) != near


def test_positions_that_positions_choose_are_drawn():
    counted = program(
        lambda x, at, order: x[(jnp.arange(9999) + at)[order]],
        *(struct(N), struct(dtype=jnp.int32), struct(999, dtype=jnp.int32)),
    )
    assert len(gathers_in(counted)) == 2


def test_long_ways_to_positions_are_followed():
    def steps(x, at):
        places = at + jnp.arange(4096)
        for n in range(600):
            places = jnp.minimum(places + 1, at + 4095) if n % 2 else places + at
        return x[places]

    assert not gathers_in(program(steps, struct(N), struct(dtype=jnp.int32)))

    def pointers(x, at):
        places = at
        for _ in range(300):
            places = places[places + jnp.arange(4096)]
        return x[places]

    assert len(gathers_in(program(pointers, struct(N), struct(4096, dtype=jnp.int32)))) == 301


def test_places_near_their_own_take_what_is_read_in_order():
    """Of four million, 7 us were measured on an H200, and 28 us of places that are drawn from a megabyte."""

    def shifted(x, by):
        return x[(jnp.arange(N) // 16 + jnp.round(by)).astype(int)] * 2

    near = price_xla(program(shifted, struct(1 << 18), struct(N)), H200).us
    drawn = price_xla(program(lambda x, i: x[i] * 2, struct(1 << 18), struct(N, dtype=jnp.int32)), H200).us
    assert near < 14 and drawn > 28
