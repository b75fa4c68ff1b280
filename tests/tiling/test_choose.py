"""Which schedule is chosen for warpgroups: by the trips of a block, the elementwise work, and what fills the device."""

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from benchmarks.cases import ATTENTION

CASES = {case.name: case for case in ATTENTION}


def schedule(name, length):
    case = CASES[name]
    arrays = [
        jax.ShapeDtypeStruct((1, length, heads, case.head_dim), jnp.float16)
        for heads in (case.query_heads, case.key_heads, case.key_heads)
    ]
    (kernel,) = case.fused.explain(*arrays, *case.static, target="mosaic_gpu").kernels
    return kernel.schedule


@pytest.mark.parametrize(
    ("name", "length", "ahead"),
    [
        ("causal", 8192, False),
        ("causal", 32768, True),
        ("window", 32768, False),  # few trips, however long the axis
        ("softcap", 32768, False),  # much to compute between the products
    ],
)
def test_products_a_trip_ahead_pay_in_long_loops_that_compute_little(name, length, ahead):
    chosen = schedule(name, length)
    assert (chosen.ahead, chosen.alternate, chosen.eager) == (ahead, not ahead, not ahead)


@pytest.mark.parametrize("target", ["xla", "triton", "mosaic_gpu"])
def test_rows_are_those_of_the_products_also_where_heads_share_a_mask(target):
    """A mask varies along the queries, and heads share keys: tiles of heads would read the operands once for each query."""

    def attention(q, k, v, mask):
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    q, k = (jax.ShapeDtypeStruct((1, 2048, heads, 128), jnp.bfloat16) for heads in (32, 8))
    (kernel,) = (
        pf.fuse(attention).explain(q, k, k, jax.ShapeDtypeStruct((1, 1, 2048, 2048), bool), target=target).kernels
    )
    tiles = {a.extent: t for a, t in kernel.schedule.grid}
    assert tiles[2048] >= 128


@pytest.mark.parametrize(("length", "heads"), [(2048, 16), (8192, 4), (32768, 1)])
def test_as_many_heads_at_a_time_as_fill_the_device(length, heads):
    assert schedule("causal", length).interleave == heads


@pytest.mark.parametrize("order", ["hw", "wh"])
def test_tiles_lie_along_the_memory_of_the_largest_operand(order):
    """A vector and the rows of a matrix: the name that comes first decides nothing."""

    def product(x, y):
        return x @ y if order == "hw" else y @ x

    shapes = {"hw": ((1, 4096), (4096, 1024)), "wh": ((4096, 1024), (1, 4096))}[order]
    plan = pf.fuse(product, options=pf.FuseOptions(check=False, price=True)).explain(
        *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes), target="triton"
    )
    (kernel,) = plan.kernels
    assert [tile for _, tile in kernel.schedule.grid] == [64]
    assert kernel.schedule.parts > 8  # else few blocks read the matrix
    assert kernel.price.us < 0.6 * kernel.replaced.us


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_long_rows_are_read_by_blocks_of_four_warps(dtype):
    """Six programs of long rows were up to a tenth faster than with twice the tile and the warps, none slower by more than 1%."""
    rows = jax.ShapeDtypeStruct((4096, 128256), dtype)
    options = pf.FuseOptions(target="triton", price=False)
    (kernel,) = pf.fuse(lambda x: jax.nn.logsumexp(x.astype(jnp.float32), -1), options=options).explain(rows).kernels
    (axis,) = [a for a in kernel.tiles if kernel.tiles[a] > 1]
    assert (kernel.tiles[axis], kernel.schedule.warps) == (4096, 4)
