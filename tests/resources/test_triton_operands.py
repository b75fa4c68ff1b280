"""How long what products take lies in shared memory, and what passes through it. `tests/aot` asks the compiler."""

import jax
import jax.numpy as jnp

from benchmarks import kernels
from pallasfuse.resources import triton
from pallasfuse.targets import find
from tests.resources.test_triton import buffers, plain, program_of, qkv, shared

TRITON = find("triton")
KIB = 1 << 10


def found(program, name):
    return [b for b in triton.resources(program, TRITON).buffers if b.name.startswith(name)]


def scaled(q, k, v):
    return kernels.attention((q.astype(jnp.float32) * 0.3).astype(q.dtype), k, v)


def test_a_side_that_no_trip_changes_is_staged_before_the_loop():
    """Queries that are scaled lie beside the keys and values that the loop copies ahead."""
    program = program_of(scaled, *qkv("bfloat16"), rows=64, rolled=64, warps=4, stages=2)
    (left,) = found(program, "left side")
    (keys,) = found(program, "2 of k")
    assert left.bytes == 64 * 64 * 2
    assert (left.first, left.last) == (0, keys.last)
    assert shared(program) >= left.bytes + 2 * keys.bytes


def test_loops_share_a_side_that_none_of_them_changes():
    """Keys that end inside a tile make two loops: one buffer, to the end of the last."""
    program = program_of(scaled, *qkv("bfloat16", n=1000), rows=64, rolled=64, warps=4, stages=2)
    (left,) = found(program, "left side")
    assert left.last >= max(b.last for b in found(program, "k"))


def test_a_rounded_side_that_no_trip_changes_stays_too():
    """The right side of a product of float32 is staged again as it is rounded: once, where the loop does not change it."""

    def rows_of(w, x):  # the loop goes over the left side's rows
        return jnp.max(jnp.einsum("nd,md->nm", x, w), axis=1)

    program = program_of(rows_of, kernels.array(64, 64), kernels.array(4096, 64), warps=4, stages=2)
    for side in found(program, "right side"):
        assert side.bytes == 64 * 64 * 4


def biased(x, w, t):
    return jnp.max(jnp.einsum("nd,md->nm", x, w, preferred_element_type=jnp.float32) + t, axis=-1)


def test_a_product_begins_with_what_it_is_added_to():
    """Its sides wait for it, while that takes the layout of its result."""
    arrays = kernels.array(1024, 64, dtype="bfloat16"), kernels.array(64, 64, dtype="bfloat16"), kernels.array(1024, 64)
    program = program_of(biased, *arrays, rows=64, warps=4, stages=2)
    (w,) = found(program, "w")
    bias = found(program, "t, laid out anew")
    assert w.last == bias[-1].last
    assert shared(program) >= 2 * 64 * 64 * 2 + 64 * 64 * 4


def test_sides_that_were_copied_ahead_become_operands_in_registers():
    """Weights of a byte are converted on their way from shared memory; a mean of what was loaded is not known there in time."""

    def converted(w, s, x):
        y = (w.astype(jnp.float32) * s[:, None]).astype(jnp.bfloat16)
        return jnp.sum(jnp.einsum("nd,md->nm", y, x, preferred_element_type=jnp.float32), axis=-1)

    arrays = kernels.array(1024, 512, dtype="int8"), kernels.array(1024), kernels.array(64, 512, dtype="bfloat16")
    names = buffers(program_of(converted, *arrays, rows=64, warps=4, stages=2))
    assert not any(n.startswith("left side") for n in names if any("of w" in m for m in names))
    normed = program_of(kernels.norm_then_product, kernels.array(512, 1024, dtype="bfloat16"),
                        kernels.array(1024, 256, dtype="bfloat16"), rows=128, rolled=64, warps=8, stages=2)  # fmt: skip
    assert [b.bytes for b in found(normed, "left side")] == [128 * 64 * 2]


def test_small_buffers_leave_a_gap_before_tiles_of_warpgroups():
    """A mask of a byte for each key takes 256 bytes, and tiles begin at multiples of 1024."""

    def by_key(q, k, v, mask):
        s = jnp.einsum("nhd,mhd->hnm", q, k, preferred_element_type=jnp.float32) * 0.125
        p = jax.nn.softmax(jnp.where(mask, s, -1e9), axis=-1)
        return jnp.einsum("hnm,mhd->nhd", p.astype(v.dtype), v)

    mask = kernels.array(1024, dtype="bool")
    masked = shared(program_of(by_key, *qkv("bfloat16"), mask, rows=64, rolled=128, warps=4, stages=3))
    without = shared(program_of(plain, *qkv("bfloat16"), rows=64, rolled=128, warps=4, stages=3))
    assert masked // KIB * KIB - without // KIB * KIB == KIB


def test_what_is_repeated_along_other_axes_is_laid_out_anew():
    """Without a product: numbers that are compared with every class."""

    def counts(numbers):
        return jnp.sum(numbers[None, :] == jnp.arange(4096)[:, None], axis=1) * 2.0

    program = program_of(counts, kernels.array(32768, dtype="int32"))
    (loaded,) = {t.name for t in program.inputs}
    rolled = max(t for _, t in program.tiles)
    assert buffers(program)[f"{loaded}, laid out anew"] == 4 * rolled


def test_one_value_passes_at_a_time():
    """What a product begins with and what is stored in the end take turns."""

    def late(x, w, a, b):
        return x @ w + a + b

    tile = kernels.array(4096, 128)
    program = program_of(late, kernels.array(4096, 32), kernels.array(32, 128), tile, tile, rows=256, warps=8)
    passing = [b.bytes for b in found(program, "") if b.passing]
    assert passing.count(256 * 128 * 4) >= 2
    assert shared(program) < 2 * 256 * 128 * 4


def test_a_sum_may_change_its_warps_where_loops_dissolve():
    """Eight warps, rows for four of them, and two loops of one trip each."""
    many, few = (program_of(plain, *qkv("float32", n=192), rows=64, rolled=128, warps=n, stages=2) for n in (8, 4))
    assert found(many, "2 of") == []
    moved, stored = ([b for b in found(p, "") if b.passing and b.bytes == 64 * 64 * 4] for p in (many, few))
    assert len(moved) == len(stored) + 2
