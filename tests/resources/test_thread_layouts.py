"""How tiles are spread over threads, and what these exchange for a sum."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import device
from pallasfuse.ir.axes import Axis
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.price.block_work import examine
from pallasfuse.resources.thread_layouts import LANES, Share, exchange, run_of, shares, vector_of
from pallasfuse.targets import TRITON

H200 = device.find("NVIDIA H200", "gpu")


def test_lanes_go_to_neighbours_first():
    assert shares([4, 32, 64], 4) == [Share(4, 1, 1), Share(16, 1, 2), Share(1, 32, 2)]
    assert shares([8192], 8, vector=8) == [Share(32, 32, 8)]
    assert shares([2, 16], 4, vector=4) == [Share(1, 2, 1), Share(4, 4, 1)]  # the rest of the lanes have copies


@pytest.mark.parametrize(("item", "elements", "found"), [(2, 8192, 8), (4, 8192, 4), (4, 256, 2), (1, 8, 1)])
def test_a_thread_loads_no_more_than_16_bytes_nor_its_share(item, elements, found):
    assert vector_of(item, elements, 4) == found


@pytest.mark.parametrize(("extents", "tile", "run"), [
    ((4096, 256), 128, 128), ((4096, 257), 128, 1), ((4096, 72), 128, 8), ((8192,), 8192, 8192), ((6001,), 8192, 1),
    ((4096, 256, 1), 128, 128),
])  # fmt: skip
def test_rows_of_an_odd_length_are_loaded_one_by_one(extents, tile, run):
    """Each row begins where the one before it ends, and what a mask cuts off ends anywhere."""
    axes = [Axis(f"a{n}", extent) for n, extent in enumerate(extents)]
    minor = next(a for a in reversed(axes) if a.extent > 1)
    assert run_of(axes, lambda a: tile if a is minor else 1) == run
    assert vector_of(2, 4096, 4, run) == min(run, 8)


def test_lanes_share_a_row_that_each_of_them_loads_one_by_one():
    """A row of an odd length: lanes and warps all have parts of each, and every thread has all results."""
    odd, even = exchange([32, 128], [1], 4), exchange([32, 128], [1], 4, vector=8)
    assert odd.copies == 4 * LANES and even.copies == LANES / 2
    assert odd.shuffles == 4 * 32 * 5


def test_every_result_of_a_sum_across_lanes_is_exchanged():
    across = exchange([4, 32, 64], [2], 4)
    assert (
        across.shuffles == 4 * 64 * 5
    )  # 64 results of a thread, five steps each; Triton's own code has 386 a warp and trip
    assert across.copies == 64
    along = exchange([4, 32, 64], [1], 4)
    assert along.shuffles == 0  # a thread has the axis, or another warp
    both = exchange([128, 128], [0, 1], 4, vector=4)
    assert both.shuffles == 4 * (32 * 5 + 5)  # every row of a thread's, then the sums of the rows
    row = exchange([1, 8192], [1], 8, vector=8)
    assert (row.shuffles, row.copies) == (8 * 5, 8 * LANES)


def of_pairs(x):
    return jnp.exp(-jnp.abs(x[:, None] - x[None]).sum(-1) / 64).sum(1)


def test_a_kernel_of_pairs_in_many_coordinates_is_priced_by_its_exchanges():
    jaxpr = jax.make_jaxpr(of_pairs)(jax.ShapeDtypeStruct((4096, 64), jnp.float32))
    kernel = make_plan(jaxpr, TRITON.on(H200), FuseOptions(price=False)).kernels[0]
    work = examine(kernel.phases[0].program, spreads=True)
    plain = examine(kernel.phases[0].program)
    assert plain.shuffles == 0 and work.shuffles > 0
    assert (
        work.operations.special > 4 * plain.operations.special
    )  # an exponential of a pair is computed by every lane of its row


def test_warps_wait_for_each_other_where_they_share_what_is_summed():
    assert exchange([4, 1024], [1], 4).between_warps
    assert not exchange([128, 32], [1], 4).between_warps
    assert exchange([128, 128], [0, 1], 4, vector=4).between_warps
