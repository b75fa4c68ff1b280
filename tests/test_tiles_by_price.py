"""Kernels that only load and add are cut into parts while their price falls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import device, tiles_by_price
from pallasfuse.first_time import Once
from pallasfuse.primitive import FusedCall
from pallasfuse.targets import default_for
from pallasfuse.tiling.split import most_parts

H200 = default_for("cuda", frozenset({"9.0"})).on(device.find("NVIDIA H200", "gpu")).judged(timed=True, one_device=True)


def attend(q, k, v):
    scores = jnp.einsum("bhd,bthd->bht", q, k).astype(jnp.float32)
    return jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores).astype(v.dtype), v)


def kernel_of(function, *shapes, dtype="bfloat16", **options):
    structs = (jax.ShapeDtypeStruct(s, dtype) if isinstance(s, tuple) else s for s in shapes)
    options = pf.FuseOptions(price=True, **options)
    (found,) = FusedCall(jax.make_jaxpr(function)(*structs), options, "one", Once()).plan(H200).kernels
    return found


def kernel(batch, heads, length, channels, dtype="bfloat16", **options):
    shapes = (batch, heads, channels), *((batch, length, heads, channels),) * 2
    return kernel_of(attend, *shapes, dtype=dtype, **options)


@pytest.fixture
def falling(monkeypatch):
    """Lets prices fall by half each time that somebody asks for them."""
    prices = (2.0**-n for n in range(10_000))
    monkeypatch.setattr(tiles_by_price, "us_of", lambda _: next(prices))


def test_no_part_is_without_a_trip(falling):
    found = kernel(8, 16, 1031, 64).schedule

    assert found.trips == 9 and found.parts == 3


def test_there_are_no_more_parts_than_fill_the_device(falling):
    found = kernel(8, 16, 65536, 64)

    assert 1 < found.schedule.parts <= most_parts(found.group, found.schedule, H200) < found.schedule.trips


def test_kernels_with_products_stay_whole(falling):
    def rows(q, k, v):
        scores = jnp.einsum("hqd,hkd->hqk", q, k).astype(jnp.float32)
        return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores).astype(v.dtype), v)

    assert kernel_of(rows, *((8, 2048, 64),) * 3).schedule.parts == 1


def test_kernels_bounded_by_masks_over_data_are_cut_too():
    def segments(q, k, v, own, others):
        scores = jnp.einsum("bhd,bthd->bht", q, k).astype(jnp.float32)
        seen = jnp.where((own[:, None] == others)[:, None], scores, -jnp.inf)
        return jnp.einsum("bht,bthd->bhd", jax.nn.softmax(seen).astype(v.dtype), v)

    numbers = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8, 2048), jnp.int32)
    found = kernel_of(segments, (8, 16, 64), *((8, 2048, 16, 64),) * 2, *numbers)

    assert found.schedule.parts == 4 and found.phases[0].program.ranges


def test_one_block_for_each_multiprocessor_is_too_few():
    cut, whole = kernel(8, 16, 1024, 64), kernel(8, 16, 1024, 64, parts=1)

    assert (cut.schedule.parts, whole.schedule.parts) == (4, 1)
    assert cut.price.us < 0.8 * whole.price.us


def test_two_blocks_of_float32_are_enough():
    assert kernel(32, 8, 512, 128, dtype="float32").schedule.parts == 1


def test_tiles_that_a_user_asks_for_stay():
    asked = kernel(8, 16, 1024, 64, tiles=(("m", 128),))

    assert asked.schedule.rolled_tile == 128 and asked.schedule.parts > 1


def test_parts_of_an_uneven_length_are_put_together():
    q, k, v = (
        jax.random.normal(jax.random.key(n), s, jnp.float32)
        for n, s in enumerate([(2, 2, 32), (2, 530, 2, 32), (2, 530, 2, 32)])
    )
    fused = pf.fuse(attend, options=pf.FuseOptions(target="interpret", tiles=(("m", 128),), parts=4))

    assert [k.schedule.parts for k in fused.explain(q, k, v).kernels] == [4]
    np.testing.assert_allclose(fused(q, k, v), attend(q, k, v), rtol=2e-5, atol=2e-6)
