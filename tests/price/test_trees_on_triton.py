"""Prices of products as Triton runs them: who reads the sides of a product, what is spilled where, what trips wait for."""

from dataclasses import replace

import jax
import pytest

from benchmarks.schedule_regions import chain, norm_product, traced
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.region import region_of_program
from pallasfuse.ir.tile_program import Contract, every
from pallasfuse.ir.tree import parse
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.block_work import examine
from pallasfuse.price.kernel import price_kernel
from pallasfuse.resources import triton
from pallasfuse.targets import TRITON
from pallasfuse.tiling import arithmetic
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree
from tests.resources.test_triton_spills import repeated


def lowered(region, text):
    (program,) = lower_tree(region, parse(text), FoldsOnDemand(region), Tiles("masked", TRITON.smallest_dot))
    return arithmetic.rewrite_for(TRITON, program)


def us(region, text, term="operands in shared memory"):
    return next(t.us for t in price_kernel([(lowered(region, text), TRITON)]).terms if t.name == term)


@pytest.fixture(scope="module")
def product():
    return traced(lambda x, w: x @ w, (16, 4096), (4096, 4096))


def test_warps_without_rows_of_their_own_read_the_same_operands(product):
    """Of a tile of 32 columns, two warps have rows; four others read what they read (25.3 us measured on an H200, and 15.4)."""
    few, many = (us(product, f"k {{ k:32@grid j:128~3 ( t0 ) }} [warps={w}]") for w in (4, 8))
    assert many == pytest.approx(2 * few)


def test_products_of_warpgroups_read_less(product):
    """64 columns are the rows of a warpgroup's product (8.3 us measured on an H200), 32 those of single warps (15.8)."""
    wide, narrow = (us(product, f"k {{ k:{k}@grid j:128~3 ( t0 ) }} [warps=4]") for k in (64, 32))
    assert wide < narrow / 2


def test_trips_wait_less_for_loads_that_begin_early(product):
    deep, shallow = (us(product, f"k {{ k:64@grid j:64~{n} ( t0 ) }} [warps=4]", "waiting for loads") for n in (5, 2))
    assert deep < shallow


def test_a_computed_side_is_laid_out_by_every_warp_that_takes_it():
    """A norm inside of the loop of a product (27 and 49 us measured on an H200)."""
    region = norm_product(16, 4096, 4096)
    few, many = (us(region, f"k {{ k:32@grid j:128~3 ( t2 t11 ) }} [warps={w}]", "vector units") for w in (4, 8))
    assert many > 1.5 * few
    assert us(region, "k { k:32@grid j:128~3 ( t2 t11 ) } [warps=4]", "vector units") > 4 * us(
        traced(lambda x, w: x @ w, (16, 4096), (4096, 4096)), "k { k:32@grid j:128~3 ( t0 ) } [warps=4]", "vector units"
    )


def test_what_is_spilled_around_a_loop_is_not_spilled_in_its_trips():
    """All columns of the second product are too many registers; the loop of the first one needs few of them."""
    region = chain(512, 512, 1024, 256)
    program = lowered(region, "k { i:256@grid l:32@grid k:128 ( j:128 ( t0 ) t1 ) } [warps=4]")
    held, work = triton.resources(program, TRITON), examine(program)
    assert held.spills
    assert {s.path for s in held.spills} <= set(work.executions)
    executed = {len(s.path): work.executions[s.path] for s in held.spills}
    assert executed.get(2, 0.0) == 4  # trips over k
    assert held.spilled_bytes == sum(s.bytes for s in held.spills)


def test_loads_that_no_trip_begins_ahead_do_not_overlap(product):
    """What waits for its own loads takes longer than the busiest resource by itself."""
    ahead, waiting = (
        price_kernel([(lowered(product, f"k {{ k:64@grid j:128~{n} ( t0 ) }} [warps=4]"), TRITON)]) for n in (3, 1)
    )
    busiest = [max(t.us for t in p.terms) for p in (ahead, waiting)]
    assert ahead.us / busiest[0] < waiting.us / busiest[1]


@pytest.fixture(scope="module")
def squares():
    """Products of 1024 x 1024 matrices by how both lie in memory, with the measured times of such kernels on an H200: float32
    operands along what is summed (54 us for 4096 rows), the right one across it (77), both (124)."""
    functions = {"along": lambda x, w: x @ w.T, "right": lambda x, w: x @ w, "both": lambda x, w: x.T @ w}
    return {
        (name, dtype): traced(f, (1024, 1024), (1024, 1024), dtype=dtype)
        for name, f in functions.items()
        for dtype in ("float32", "bfloat16")
    }


def test_float32_operands_are_rounded_and_turned_on_their_way(squares):
    half, *wide = (
        price_kernel([(own_program(squares[key]), TRITON)]).us
        for key in (("both", "bfloat16"), ("along", "float32"), ("right", "float32"), ("both", "float32"))
    )
    assert half < wide[0] / 1.5
    assert wide[0] < 0.8 * wide[2]
    assert wide[0] < wide[1] < wide[2]


def test_operands_of_two_bytes_are_read_as_they_lie(squares):
    along, both = (price_kernel([(own_program(squares[n, "bfloat16"]), TRITON)]).us for n in ("along", "both"))
    assert along == pytest.approx(both, rel=0.02)


def own_program(region):
    rows, columns = (a.name for a in region.nests[0].axes)
    (summed,) = (a.name for a in region.nests[0].reduced)
    name = region.nests[0].name
    return lowered(region, f"k {{ {rows}:256@grid {columns}:64@grid ( {summed}:16~3 ( {name} ) ) }} [warps=8]")


def test_a_product_for_each_of_many_is_none_of_matrix_units():
    """Rows, columns and sums of 64, for each of 16 in one block: no matrix unit takes it, and all of it is vector work."""
    region = traced(lambda x, w: jax.numpy.einsum("bij,bjk->bik", x, w), (16, 64, 64), (16, 64, 64), dtype="bfloat16")
    axes = [a.name for a in (*region.nests[0].axes, *region.nests[0].reduced)]
    name = region.nests[0].name

    def terms(batch):
        text = (
            f"k {{ {axes[0]}:{batch}@grid {axes[1]}:64@grid {axes[2]}:16@grid ( {axes[3]}:16 ( {name} ) ) }} [warps=4]"
        )
        return {t.name: t.us for t in price_kernel([(lowered(region, text), TRITON)]).terms}

    one, several = terms(1), terms(4)
    assert one["matrix units"] > 0 and several["matrix units"] == 0
    assert several["vector units"] > 4 * one["vector units"]


def test_few_warps_do_not_hide_latencies():
    """A row of exponentials in blocks of four warps, one on each multiprocessor, and two."""
    region = traced(lambda x, w: jax.numpy.exp(x) @ w, (64, 1024), (1024, 64), dtype="bfloat16")
    names = [n.name for n in region.nests]
    rows, columns = (a.name for a in region.nests[-1].axes)
    (summed,) = (a.name for a in region.nests[-1].reduced)
    body = " ".join(names)
    few, many = (
        us(
            region,
            f"k {{ {rows}:64@grid {columns}:64@grid ( {summed}:64~3 ( {body} ) ) }} [warps={w}]",
            "special functions",
        )
        for w in (4, 8)
    )
    assert few == pytest.approx(2 * many)


def test_what_a_library_computes_takes_its_instructions():
    def of(f):
        region = traced(lambda x, w: f(x) @ w, (64, 1024), (1024, 64), dtype="float32")
        return price_kernel([(own_program_of(region), TRITON)])

    def own_program_of(region):
        rows, columns = (a.name for a in region.nests[-1].axes)
        (summed,) = (a.name for a in region.nests[-1].reduced)
        body = " ".join(n.name for n in region.nests)
        return lowered(region, f"k {{ {rows}:64@grid {columns}:64@grid ( {summed}:64~3 ( {body} ) ) }} [warps=4]")

    times = [
        next(t.us for t in of(f).terms if t.name == "vector units")
        for f in (jax.numpy.exp2, jax.numpy.exp, jax.numpy.log)
    ]
    assert times[0] < times[1] < times[2]


def test_integers_are_converted_on_special_function_units():
    """Weights of a byte, beside operands of two: the matrix units take both as half types."""

    def of(dtype):
        jaxpr = jax.make_jaxpr(lambda x, w: x @ w.astype(x.dtype))(
            jax.ShapeDtypeStruct((64, 1024), jax.numpy.bfloat16), jax.ShapeDtypeStruct((1024, 64), dtype)
        )
        program = convert(jaxpr).program
        region = region_of_program(program, Graph(program).inlined())
        rows, columns = (a.name for a in region.nests[-1].axes)
        (summed,) = (a.name for a in region.nests[-1].reduced)
        body = " ".join(n.name for n in region.nests)
        made = lowered(region, f"k {{ {rows}:64@grid {columns}:64@grid ( {summed}:64~3 ( {body} ) ) }} [warps=4]")
        (product,) = (s for s in every(made.body) if isinstance(s, Contract))
        assert {product.lhs.dtype, product.rhs.dtype} == {"bfloat16"}
        return next(t.us for t in price_kernel([(made, TRITON)]).terms if t.name == "special functions")

    assert of(jax.numpy.int8) > of(jax.numpy.bfloat16)


def test_what_is_spilled_beyond_the_cache_crosses_the_memory():
    """Every thread of the blocks that live at a time has places of its own for it."""
    program = lowered(chain(512, 512, 1024, 256), "k { i:256@grid l:32@grid k:128 ( j:128 ( t0 ) t1 ) } [warps=4]")
    few, many = (
        price_kernel([(program, TRITON.on(replace(TRITON.device, cache_bytes=n)))]) for n in (1 << 30, 1 << 16)
    )
    moved = [next(t for t in p.terms if t.name == "device memory") for p in (few, many)]
    spilled = next(t.amount for t in few.terms if t.name == "spilled registers")
    assert moved[1].amount - moved[0].amount == pytest.approx(spilled, rel=0.2)
    assert many.us > few.us


def test_a_sum_that_is_repeated_along_rows_is_summed_once():
    """The emitter repeats the result, not what is summed: threads exchange as much for many rows as for few."""
    few, many = (examine(repeated(rows), spreads=True) for rows in (4, 128))
    assert many.shuffles == few.shuffles > 0


def test_results_of_a_block_that_is_alone_leave_with_nothing_beside_them():
    """A short product with many results, by tiles that leave no room for a second block on a multiprocessor (one took 44 us on an
    H100 where 29 were foretold): its price is more than what takes longest, though its loads begin ahead."""
    region = traced(lambda x, w: x @ w, (8192, 64), (64, 8192))
    price = price_kernel([(lowered(region, "i { i:256@grid k:128@grid j:16~3 ( t0 ) } [warps=8]"), TRITON)])
    assert price.us > 1.1 * max(t.us for t in price.terms)
