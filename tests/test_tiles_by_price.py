"""Kernels that only load and add are cut into parts while their price falls."""

import jax
import jax.numpy as jnp
import numpy as np

import pallasfuse as pf
from pallasfuse import device
from pallasfuse.first_time import Once
from pallasfuse.primitive import FusedCall
from pallasfuse.targets import default_for

H200 = default_for("cuda", frozenset({"9.0"})).on(device.find("NVIDIA H200", "gpu")).judged(timed=True, one_device=True)


def attend(q, k, v):
    scores = jnp.einsum("bhd,bthd->bht", q, k).astype(jnp.float32)
    return jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores).astype(v.dtype), v)


def kernel(batch, heads, length, channels, dtype="bfloat16", **options):
    shapes = (batch, heads, channels), *((batch, length, heads, channels),) * 2
    jaxpr = jax.make_jaxpr(attend)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
    (found,) = FusedCall(jaxpr, pf.FuseOptions(price=True, **options), "attend", Once()).plan(H200).kernels
    return found


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
