"""The products of a block: how their operands lie in memory, and what that costs on a GPU."""

import jax
import jax.numpy as jnp

from pallasfuse.fusion import product_regions
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Contract, every
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.price.block_work import examine
from pallasfuse.price.kernel import price_kernel
from pallasfuse.searched import searched
from pallasfuse.targets import TRITON, find
from tests.price.test_price import attend, kernel_of, program, struct, term


def test_a_side_whose_axes_become_one_passes_through_threads_where_trips_load_it():
    """One side of a product with two tiled axes is transposed and reshaped in registers; with one of them whole, it is loaded."""
    x, w = struct(16, 4096), struct(4096, 8, 64)

    def heads(x, w):
        return jax.nn.relu(jnp.einsum("ti,ihd->thd", x, w))

    loops = program(heads, x, w)
    (candidate,) = product_regions.candidates(Graph(loops), TRITON)
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in loops.definitions()}
    tiles = searched(candidate.group, TRITON, tensors)[0][1].phases[0].program
    (h, d) = (next(a for a in tiles.order if a.extent == n) for n in (8, 64))
    both, one = (examine(tiles, {h: n, d: 16}).products[0] for n in (8, 1))
    assert both.by_threads == both.columns * both.summed and one.by_threads == 0
    assert both.split == both.rows * both.columns and one.split == 0


def test_rows_that_are_loaded_before_the_loop_are_laid_out_once():
    """Queries of several positions and heads are the rows of one product: what the trips multiply them with is copied as it is."""
    q, k, v = struct(1, 8, 8, 8, 128), struct(1, 2048, 8, 128), struct(1, 2048, 8, 128)

    def grouped(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bihgd,bjhd->bhgij", q, k), -1)
        return jnp.einsum("bhgij,bjhd->bihgd", p, v)

    products = [p for x in kernel_of(grouped, q, k, v).phases for p in examine(x.program).products]
    assert products and all(p.rows > 8 and p.by_threads == 0 and p.split > 0 for p in products)


def test_products_that_keep_all_bits_are_computed_by_threads():
    """Matrix units round float32. Threads read rows and columns from shared memory, a word a clock at worst."""
    qkv = [struct(16, 2048, 64, dtype=jnp.float32)] * 3
    times = {}
    for precision in ("default", "highest"):
        with jax.default_matmul_precision(precision):
            phase = kernel_of(attend, *qkv).phases[0]
        products = [s for s in every(phase.program.body) if isinstance(s, Contract)]
        assert products and {p.precise for p in examine(phase.program).products} == {precision == "highest"}
        times[precision] = term(price_kernel([(phase.program, phase.target)]), "matrix units").us
    assert times["highest"] > 20 * times["default"]


def matrices_us(batch, channels):
    """Returns the microseconds that blocks of attention on a CPU take for the matrices of a batch, by themselves."""

    def attention(q, k, v):
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)

    jaxpr = jax.make_jaxpr(attention)(*[struct(batch, 6, channels)] * 3)
    (kernel,) = make_plan(jaxpr, find("xla"), FuseOptions(price=False, check=False)).kernels
    return term(kernel.price, "matrices of a batch").us


def test_blocks_on_a_cpu_pay_for_each_matrix_of_a_batch():
    """Tiny ones are computed one after the other, others by a library."""
    tiny, others = (matrices_us(64, channels) for channels in (5, 16))
    assert matrices_us(1, 5) == 0 and 0 < others < tiny / 3
    assert matrices_us(128, 5) > 1.5 * tiny
