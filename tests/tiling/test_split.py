"""Rolling or split: which kernels are split, into how many parts, and what is predicted of both."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.targets import TRITON
from pallasfuse.tiling.split import Times, fills, split
from tests.programs_by_name import only_group, schedule_of


def weighted(q, k, v):
    """q [head, group, dim]; k, v [key, head, dim]."""
    scores = jnp.einsum("hgd,khd->hgk", q, k, preferred_element_type=jnp.float32)
    return jnp.einsum("hgk,khd->hgd", jax.nn.softmax(scores, -1).astype(v.dtype), v)


def kernel(heads, group, keys, target="triton", **options):
    q = jax.ShapeDtypeStruct((heads, group, 128), jnp.float16)
    k = jax.ShapeDtypeStruct((keys, heads, 128), jnp.float16)
    fused = pf.fuse(weighted, target=target, options=pf.FuseOptions(**options))
    (only,) = fused.explain(q, k, k).kernels
    return only


def test_few_blocks_are_split_and_many_are_not():
    few, many = kernel(8, 8, 8192), kernel(128, 8, 8192)
    assert few.strategy == "split_k" and len(few.phases) == 2
    assert few.price.us < kernel(8, 8, 8192, parts=1).price.us
    assert many.strategy == "rolling_update" and len(many.phases) == 1


def test_rows_that_share_operands_are_one_tile():
    assert (
        dict(kernel(8, 8, 8192).program.grid)[few_axis(kernel(8, 8, 8192), 1)] == 16
    )  # padded to what a product takes


def few_axis(only, number):
    return only.schedule.grid[number][0]


def test_short_axes_are_not_split():
    only = kernel(8, 8, 100)
    assert only.schedule.parts == 1
    assert only.strategy == "rolling_update"


def test_every_part_has_a_trip():
    for keys in (1000, 2048, 5000, 32768):
        schedule = kernel(4, 8, keys).schedule
        assert 1 <= schedule.parts <= schedule.trips


def test_the_user_decides():
    assert kernel(8, 8, 8192, parts=1).strategy == "rolling_update"
    only = kernel(128, 8, 8192, parts=5)
    assert (only.schedule.parts, only.strategy) == (5, "split_k")
    with pytest.raises(ValueError, match=r"FuseOptions.parts is a positive integer or None, got 0"):
        pf.FuseOptions(parts=0)


def test_what_a_mask_hides_makes_no_parts():
    group = only_group("softmax")
    schedule = replace(schedule_of(group, 1, 1), grid=())
    device = TRITON.on(replace(TRITON.device, memory_gb_s=1e-3))
    assert split(group, schedule, device).parts > 1
    assert split(group, schedule, device, share=0.05).parts == 1
    assert not fills(schedule, device)


def test_more_parts_move_more_states():
    group = only_group("variance")
    schedule = replace(schedule_of(group, 1, 1), parts=2)
    slow = TRITON.on(replace(TRITON.device, memory_gb_s=1e-6))
    times = [Times(group, slow, 1.0).ms(replace(schedule, parts=p)) for p in (13, 1000)]
    assert times[0] < times[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("parts", [1, 3])
def test_lengths_at_run_time_bound_the_loop(target, parts):
    """What lies past the length, and the rest of its tile, is not read."""

    def chain(x, y, n):
        seen = jnp.where(jnp.arange(x.shape[1]) < n[:, None], x, -jnp.inf)
        return jnp.einsum("ij,ijd->id", jax.nn.softmax(seen, axis=-1), y)

    random = np.random.default_rng(0)
    x, y = random.normal(size=(4, 100)).astype(np.float32), random.normal(size=(4, 100, 3)).astype(np.float32)
    lengths = np.asarray([17, 100, 1, 64], np.int32)
    want = np.asarray(chain(x, y, lengths))
    poisoned = y.copy()
    for row, n in enumerate(lengths):
        poisoned[row, -(-n // 16) * 16 :] = np.nan  # the plain function would make it 0 * NaN
    fused = pf.fuse(chain, target=target, options=pf.FuseOptions(tiles=(("i", 1), ("j", 16), ("k", 16)), parts=parts))
    np.testing.assert_allclose(fused(x, poisoned, lengths), want, atol=1e-6)
    (only,) = fused.explain(x, y, lengths).kernels
    assert (only.strategy == "split_k") == (parts > 1)


def test_a_length_of_zero_is_not_a_number_where_the_program_says_so():
    def chain(x, n):
        return jax.nn.softmax(jnp.where(jnp.arange(x.shape[1]) < n[:, None], x, -jnp.inf), axis=-1) @ jnp.ones(
            (x.shape[1], 2)
        )

    x, n = np.ones((2, 64), np.float32), np.asarray([0, 3], np.int32)
    for parts in (1, 4):
        fused = pf.fuse(chain, target="xla", options=pf.FuseOptions(tiles=(("i", 1), ("j", 8)), parts=parts))
        np.testing.assert_allclose(fused(x, n), chain(x, n), rtol=1e-6)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("n", [2**31 - 1, -(2**31), 2**27 + 1])
def test_huge_lengths(n):
    """A bound that might overflow is none."""

    def chain(x, n):
        return jax.scipy.special.logsumexp(jnp.where(jnp.arange(x.shape[1]) <= n[:, None] - 5, x, -jnp.inf), axis=-1)

    x, n = np.ones((1, 64), np.float32), np.asarray([n], np.int32)
    fused = pf.fuse(chain, target="xla", options=pf.FuseOptions(tiles=(("i", 1), ("j", 8))))
    np.testing.assert_allclose(fused(x, n), chain(x, n), rtol=1e-6)


def test_tiles_that_are_asked_for_stay():
    rows = jax.ShapeDtypeStruct((4, 1 << 20), jnp.float32)
    options = pf.FuseOptions(target="triton", tiles=(("j", 16384), ("i", 1)))
    (only,) = pf.fuse(lambda x: jax.nn.softmax(x, -1), options=options).explain(rows).kernels
    assert only.schedule.rolled_tile == 16384 and only.schedule.parts > 1


def test_parts_are_counted_in_tiles_that_exist():
    def chain(x):
        return jnp.max(x), jnp.sum(jnp.exp(x - jnp.max(x)))

    for columns in (4500, 9000):
        (only,) = pf.fuse(chain, target="triton").explain(jax.ShapeDtypeStruct((6, columns), jnp.float32)).kernels
        assert only.tiles[only.schedule.rolled.name] == only.schedule.rolled_tile
