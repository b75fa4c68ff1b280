"""Loops in Pallas:Triton, each of which one part of a GPU limits: memory, the shared cache, vector units, latency.

Every block runs `trips` trips. The results are of no interest, but depend on everything that is computed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltr


def _call(
    body: Callable[..., None], out: Any, blocks: int, warps: int, stages: int, interpret: bool
) -> Callable[..., Any]:
    params = pltr.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(body, out_shape=out, grid=(blocks,), compiler_params=params, interpret=interpret)


def copy_tiles(x: Any, *, tile: int, warps: int = 4, interpret: bool = False) -> Any:
    """A copy, one tile for each block."""

    def body(x_ref: Any, o_ref: Any) -> None:
        here = pl.ds(pl.program_id(0) * tile, tile)
        pltr.store(o_ref.at[here], pltr.load(x_ref.at[here]))

    return _call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), x.size // tile, warps, 1, interpret)(x)


def read_tiles(
    x: Any, *, blocks: int, trips: int, tile: int, together: int = 4, warps: int = 4, interpret: bool = False
) -> Any:
    """Loads of tiles that do not depend on each other, `together` in each trip."""
    tiles = x.size // tile

    def body(x_ref: Any, o_ref: Any) -> None:
        first = pl.program_id(0) * together

        def trip(t: Any, total: Any) -> Any:
            begin = lax.rem(first + t * (blocks * together), tiles - together + 1)
            loaded = [pltr.load(x_ref.at[pl.ds((begin + n) * tile, tile)]) for n in range(together)]
            for one in loaded:
                total = total + one
            return total

        total = lax.fori_loop(0, trips, trip, jnp.zeros((tile,), x.dtype))
        pltr.store(o_ref.at[pl.ds(pl.program_id(0) * tile, tile)], total)

    return _call(body, jax.ShapeDtypeStruct((blocks * tile,), x.dtype), blocks, warps, 1, interpret)(x)


def follow(x: Any, *, blocks: int, trips: int, tile: int, warps: int = 4, interpret: bool = False) -> Any:
    """Loads whose addresses are the values of the loads before: an element of `x` (int32) says where the next one is."""

    def body(x_ref: Any, o_ref: Any) -> None:
        here = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
        last = lax.fori_loop(0, trips, lambda _, at: pltr.load(x_ref.at[at]), here)
        pltr.store(o_ref.at[pl.ds(pl.program_id(0) * tile, tile)], last)

    return _call(body, jax.ShapeDtypeStruct((blocks * tile,), x.dtype), blocks, warps, 1, interpret)(x)


def small_products(a: Any, b: Any, *, blocks: int, trips: int, interpret: bool = False) -> Any:
    """A product of a row of tiles with a column of tiles, whose loads are pipelined: trips that do next to nothing."""
    rows, columns, summed = a.shape[0], b.shape[1], a.shape[1] // trips

    def body(a_ref: Any, b_ref: Any, o_ref: Any) -> None:
        def trip(t: Any, total: Any) -> Any:
            here = pl.ds(t * summed, summed)
            left, right = pltr.load(a_ref.at[:, here]), pltr.load(b_ref.at[here, :])
            return total + jnp.dot(left, right, preferred_element_type=jnp.float32)

        total = lax.fori_loop(0, trips, trip, jnp.zeros((rows, columns), jnp.float32))
        pltr.store(o_ref.at[pl.ds(pl.program_id(0) * rows, rows), :], total)

    return _call(body, jax.ShapeDtypeStruct((blocks * rows, columns), jnp.float32), blocks, 4, 3, interpret)(a, b)


def additions(x: Any, *, blocks: int, trips: int, tile: int, number: int = 16, interpret: bool = False) -> Any:
    """Additions of a number that only the device knows, each to the sum so far: `number` in each trip."""

    def step(value: Any, start: Any) -> Any:
        for _ in range(number):
            value = value + start
        return value

    return _compute(step, x, blocks, trips, tile, interpret)


def exponentials(x: Any, *, blocks: int, trips: int, tile: int, number: int = 16, interpret: bool = False) -> Any:
    """Powers of two, each of the one before: `number` in each trip."""

    def step(value: Any, _: Any) -> Any:
        for _ in range(number):
            value = jnp.exp2(value)
        return value

    return _compute(step, x, blocks, trips, tile, interpret)


def _compute(step: Callable[[Any, Any], Any], x: Any, blocks: int, trips: int, tile: int, interpret: bool) -> Any:
    def body(x_ref: Any, o_ref: Any) -> None:
        start = pltr.load(x_ref.at[pl.ds(0, tile)])
        value = lax.fori_loop(0, trips, lambda _, v: step(v, start), start)
        pltr.store(o_ref.at[pl.ds(pl.program_id(0) * tile, tile)], value)

    return _call(body, jax.ShapeDtypeStruct((blocks * tile,), x.dtype), blocks, 4, 1, interpret)(x)
