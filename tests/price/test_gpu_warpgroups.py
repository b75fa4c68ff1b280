"""Operands of long sums come in slices, in every trip of a kernel for warpgroups, beside the products."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import device
from pallasfuse.options import FuseOptions
from pallasfuse.price.block_work import examine
from pallasfuse.price.gpu_warpgroups import in_every_trip, taken_in_slices
from pallasfuse.price.kernel import price_kernel
from pallasfuse.primitive import FusedCall, Once
from pallasfuse.targets import find

H200 = find("mosaic_gpu").on(device.find("NVIDIA H200", "gpu"))
ROWS, COLUMNS = 4096, 32768


def log_sum_exp(x, w):
    """Of the logits of each row; no logit is stored."""
    return jax.nn.logsumexp((x @ w).astype(jnp.float32), axis=1)


def kernel_of(summed):
    """The one kernel for warpgroups of such rows with `summed` features."""
    x = jax.ShapeDtypeStruct((ROWS, summed), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((summed, COLUMNS), jnp.bfloat16)
    call = FusedCall(jax.make_jaxpr(log_sum_exp)(x, w), FuseOptions(price=False, check=False), "f", Once())
    (kernel,) = call.plan(H200.judged(timed=False, one_device=True)).kernels
    assert kernel.phases[0].target.name == "mosaic_gpu"
    return kernel


def sectors_of(kernel):
    """The bytes that the first program of a kernel takes from the shared cache, by its price."""
    phase = kernel.phases[0]
    (term,) = (t for t in price_kernel([(phase.program, phase.target)]).terms if t.name == "cache sectors")
    return term.amount


def test_a_long_sum_is_read_by_every_trip():
    kernel = kernel_of(4096)
    program = kernel.phases[0].program
    assert {t.name for t in program.inputs} >= taken_in_slices(program, H200.max_inner) != frozenset()
    rows, columns = max(tile for _, tile in program.grid), kernel.schedule.rolled_tile
    read = 2 * 4096 * ROWS * COLUMNS * (1 / rows + 1 / columns)
    assert sectors_of(kernel) == pytest.approx(read, rel=0.02)


def test_a_short_sum_keeps_the_rows_of_a_block():
    kernel = kernel_of(128)
    program = kernel.phases[0].program
    assert not taken_in_slices(program, H200.max_inner)
    rows, columns = max(tile for _, tile in program.grid), kernel.schedule.rolled_tile
    assert sectors_of(kernel) < 0.75 * 2 * 128 * ROWS * COLUMNS * (1 / rows + 1 / columns)


def test_only_what_stands_before_the_loop_is_read_more_often():
    program = kernel_of(4096).phases[0].program
    work, sliced = examine(program), taken_in_slices(program, H200.max_inner)
    before, after = work.accesses, in_every_trip(work, sliced).accesses
    grown = {a.tensor: b.bytes / a.bytes for a, b in zip(before, after, strict=True) if a != b}
    assert len(grown) == 1 and set(grown) < sliced
    assert {a.loop for a in after if a.tensor in sliced} == {1}
    assert list(grown.values()) == [pytest.approx(work.trips)]


def test_copies_hide_behind_the_products_of_a_long_sum():
    """On an H200 the kernel of 128256 columns took 5.9 ms with a soft cap, smoothed labels and a z-loss, the product alone 5.4."""
    kernel = kernel_of(4096)
    price = price_kernel([(p.program, p.target) for p in kernel.phases])
    by_matrix_units = next(t.us for t in price.terms if t.name == "matrix units")
    moved = max(t.us for t in price.terms if t.name in ("cache sectors", "multiprocessors' ports"))
    assert moved > 0.6 * by_matrix_units and price.us < 1.15 * by_matrix_units


def times_of(kernel):
    """The microseconds by the terms of its first program's price, and the price's own."""
    phase = kernel.phases[0]
    price = price_kernel([(phase.program, phase.target)])
    return {t.name: t.us for t in price.terms}, price.us


MOVING = (
    "device memory",
    "cache sectors",
    "multiprocessors' ports",
    "scattered loads",
    "blocks that begin",
    "waiting for loads",
)
COMPUTING = ("matrix units", "vector units", "special functions")


def joined(times, exponent):
    return sum(us**exponent for us in times) ** (1 / exponent)


def test_what_a_kernel_computes_and_moves_overlaps():
    terms, us = times_of(kernel_of(128))
    assert us == pytest.approx(joined([terms[n] for n in MOVING + COMPUTING], 3.0) + terms["launch"])


def test_what_follows_a_product_in_slices_overlaps_with_nothing_else_that_is_computed():
    terms, us = times_of(kernel_of(4096))
    computed = joined([terms[n] for n in COMPUTING], 1.5)
    assert us == pytest.approx(joined([computed, *(terms[n] for n in MOVING)], 4.0) + terms["launch"])


def test_the_longest_sum_that_a_tile_holds_comes_as_a_whole():
    program = kernel_of(H200.max_inner).phases[0].program
    assert not taken_in_slices(program, H200.max_inner) and taken_in_slices(program, H200.max_inner - 1)


def test_a_sum_over_the_axis_of_the_loop_is_never_in_slices():
    """The second product of attention sums over the keys, of which a trip has more than a head has elements."""
    q = k = v = jax.ShapeDtypeStruct((8, 4096, 64), jnp.bfloat16)

    def attention(q, k, v):
        scores = jnp.einsum("hid,hjd->hij", q, k, preferred_element_type=jnp.float32)
        return jnp.einsum("hij,hjd->hid", jax.nn.softmax(scores, -1).astype(v.dtype), v)

    call = FusedCall(jax.make_jaxpr(attention)(q, k, v), FuseOptions(price=False, check=False), "f", Once())
    (kernel,) = call.plan(H200.judged(timed=False, one_device=True)).kernels
    program = kernel.phases[0].program
    assert kernel.phases[0].target.name == "mosaic_gpu" and kernel.schedule.rolled_tile > 64
    sliced = taken_in_slices(program, 63)
    assert len(sliced) == 2 and sliced < {t.name for t in program.inputs}
    assert not taken_in_slices(program, 64)
