"""Prices: terms with units, what they see of a kernel, and what XLA would take for the same program."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse import device
from pallasfuse.ir.expr import Apply
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.price import gpu
from pallasfuse.price.block_accesses import Access
from pallasfuse.price.block_work import BlockWork, examine
from pallasfuse.price.gpu_traffic import moved_by
from pallasfuse.price.kernel import price_kernel
from pallasfuse.price.terms import NOTHING, Price, Term
from pallasfuse.price.xla import XlaPrices, price_xla
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion
from pallasfuse.price.xla_habits import habits_on
from pallasfuse.price.xla_kernels import xla_kernels
from pallasfuse.targets import MOSAIC_GPU, TRITON, XLA_CPU

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
H200 = device.find("NVIDIA H200", "gpu")


def struct(*shape, dtype=jnp.float16):
    return jax.ShapeDtypeStruct(shape, dtype)


def softmax(x):
    return jax.nn.softmax(x, -1)


def attend(q, k, v):
    scores = jnp.einsum("hid,hjd->hij", q, k, preferred_element_type=jnp.float32)
    return jnp.einsum("hij,hjd->hid", softmax(scores).astype(q.dtype), v)


QKV = [struct(16, 2048, 64)] * 3


def program(function, *arguments):
    return convert(jax.make_jaxpr(function)(*arguments)).program


def kernel_of(function, *arguments, target=TRITON, **options):
    jaxpr = jax.make_jaxpr(function)(*arguments)
    (kernel,) = make_plan(jaxpr, target, FuseOptions(price=False, **options)).kernels
    return kernel


def planned_kernels(function, *arguments, target):
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return make_plan(jaxpr, target, FuseOptions(price=True)).kernels


def on(kernel, where):
    """The price of a kernel on another device of its kind."""
    return price_kernel([(p.program, p.target.on(where)) for p in kernel.phases])


def term(price, name):
    return next(t for t in price.terms if t.name == name)


# --- terms


def test_prices_add_up_by_name_and_say_what_limits():
    one = Price(3.0, (Term("memory", 10.0, "B", 2.0), Term("launch", 1, "kernel", 1.0)))
    both = one + Price(2.0, (Term("memory", 5.0, "B", 2.0),))
    assert both.us == 5.0 and term(both, "memory").amount == 15.0 and term(both, "memory").us == 4.0
    assert both.limit == "memory" and "memory 15 B" in str(both)
    assert (NOTHING + one).us == one.us


def test_every_term_of_a_kernel_has_a_unit_and_is_printed():
    plan = pf.fuse(attend, options=FuseOptions(price=False)).explain(*QKV, target="mosaic_gpu")
    price = plan.kernels[0].price
    assert all(t.unit and t.us >= 0 for t in price.terms)
    assert price.limit in str(plan) and f"price on {H100.kind}" in str(plan) and "price of XLA's kernels" in str(plan)


# --- kernels


def _paged(page):
    """A softmax over rows of so many elements together that a table names, of 2^20 elements in all."""
    pages, table = jax.ShapeDtypeStruct((4096, page), jnp.float32), jax.ShapeDtypeStruct((64, 2**14 // page), jnp.int32)
    return kernel_of(
        lambda p, t: jax.nn.softmax(p[t].reshape(64, -1)), pages, table, target=XLA_CPU, tiles=(("r", 2**12),)
    )


def test_what_is_looked_up_is_read_in_runs_of_a_page():
    """Of the pool only what the table names counts, and short pages take longer than long ones."""
    short, long = _paged(4), _paged(512)
    for kernel, page in ((short, 4), (long, 512)):
        (lookup,) = kernel.lookups.values()
        found = [a for a in examine(kernel.program).accesses if a.tensor == lookup.source.name]
        assert {a.run_bytes for a in found} == {4 * page}
        assert all(a.unique_bytes == 4 * min(4096 * page, 2**20) for a in found)
    assert term(short.price, "copied slices").us > 1.5 * term(long.price, "copied slices").us


def test_a_table_that_is_looked_up_and_read_as_a_whole_crosses_memory_as_a_whole():
    """As in a language model whose last layer is its table of tokens."""
    few = Access("table", 100, 100, 1e4, 1, pipelined=False, gathered=True)
    whole = Access("table", 1e4, 1e4, 1e6, 1, pipelined=True)
    for accesses in ([few, whole], [whole, few]):
        (moved,) = moved_by(BlockWork(100, 4, 2, accesses), 1e9, kept=False, ahead=False)
        assert moved.memory == 1e6


def test_a_column_of_a_row_major_matrix_costs_whole_sectors():
    def rows(x):
        return softmax(x)

    def columns(x):
        return jax.nn.softmax(x, 0)

    wide = examine(kernel_of(rows, struct(4096, 4096)).program)
    narrow = kernel_of(columns, struct(4096, 4096), tiles=(("j", 1),)).program
    assert all(a.sector_bytes() == a.bytes for a in wide.accesses)
    assert all(a.sector_bytes() == 16 * a.bytes for a in examine(narrow).accesses)


def test_masked_tiles_are_not_priced():
    def causal(q, k, v):
        scores = jnp.einsum("hid,hjd->hij", q, k, preferred_element_type=jnp.float32)
        visible = jnp.arange(2048)[None] <= jnp.arange(2048)[:, None]
        return jnp.einsum("hij,hjd->hid", softmax(jnp.where(visible, scores, -jnp.inf)).astype(q.dtype), v)

    everything, half = (kernel_of(f, *QKV, target=MOSAIC_GPU).price for f in (attend, causal))
    assert term(half, "matrix units").amount < 0.65 * term(everything, "matrix units").amount


def test_a_faster_memory_makes_what_streams_faster_and_products_not():
    row = kernel_of(softmax, struct(8192, 8192))
    product = kernel_of(attend, *QKV, target=MOSAIC_GPU)
    for kernel, gain in ((row, 1.2), (product, 1.0)):
        phases = [(p.program, p.target.on(H200)) for p in kernel.phases]
        assert kernel.price.us / price_kernel(phases).us == pytest.approx(gain, rel=0.2)


def test_few_blocks_do_not_reach_the_memory_s_bandwidth():
    cold = replace(H100, found_share=0.0)  # few rows would be in the cache
    few, many = (on(kernel_of(softmax, struct(n, 8192)), cold) for n in (8, 8192))
    moved = [term(p, "device memory") for p in (few, many)]
    assert moved[0].amount / moved[0].us < 0.3 * moved[1].amount / moved[1].us


def test_what_a_program_leaves_in_the_cache_is_read_sooner():
    kernel = kernel_of(softmax, struct(512, 8192))
    size = 2 * 512 * 8192 * 2
    assert H100.among(H100.cache_bytes) == H100
    assert H100.among(4 * H100.cache_bytes).found_bytes == H100.cache_bytes / 4
    found, not_found = (on(kernel, H100.among(n)) for n in (size, 100 * H100.cache_bytes))
    assert found.us < 0.9 * not_found.us
    assert term(found, "waiting for loads").us < term(not_found, "waiting for loads").us
    assert XLA_CPU.device.among(1e15) == XLA_CPU.device


def test_one_multiprocessor_takes_no_more_than_its_port():
    kernel = kernel_of(softmax, struct(4, 16384))
    slow, fast = (on(kernel, replace(H100, port_bytes=n)) for n in (8, 64))
    assert term(slow, "multiprocessors' ports").us == pytest.approx(8 * term(fast, "multiprocessors' ports").us)
    assert term(fast, "multiprocessors' ports").us > term(fast, "cache sectors").us, "four of 132 multiprocessors read"
    assert slow.us > fast.us
    assert term(on(kernel, replace(H100, port_bytes=0)), "multiprocessors' ports").us == 0.0


def test_copies_that_begin_ahead_overlap_with_what_a_block_computes_alone():
    """Resources that compute for one block overlap badly with one another, and well with copies for its later trips."""
    few = [struct(8, 1024, 64)] * 3
    (kernel,) = planned_kernels(attend, *few, target=TRITON)
    ahead, not_ahead = (price_kernel([(replace(p.program, stages=n), p.target) for p in kernel.phases]) for n in (3, 1))
    assert ahead.us < not_ahead.us
    again = [term(p, "cache sectors") for p in (ahead, not_ahead)]
    assert again[0].amount == again[1].amount and again[0].us < 0.6 * again[1].us, (
        "copies come at the rate of the ports"
    )
    launch_us = term(ahead, "launch").us
    moving = [
        term(ahead, n).us
        for n in ("device memory", "cache sectors", "multiprocessors' ports", "blocks that begin", "waiting for loads")
    ]
    computing = [t.us for t in ahead.terms if t.us and t.us not in (*moving, launch_us)]
    assert min(max(moving), max(computing)) > 0.2 * max(*moving, *computing)
    (phase,) = kernel.phases
    work = examine(phase.program)
    assert work.blocks <= H100.multiprocessors and work.trips > 1
    every = [*moving, *computing]
    filling = gpu._FILLING * (sum(every) - max(every)) / work.trips
    beside, alone = together(4, *moving, together(2, *computing)), together(1.5, *every)
    busy = beside + gpu._outside_loops(work) * (alone - beside)
    assert ahead.us - launch_us == pytest.approx(busy + filling, rel=1e-6)


def test_what_a_block_moves_outside_of_its_loop_counts_by_its_share():
    row, column = Access("x", 3e4, 64, 1e6, 4.0, True, loop=1), Access("y", 6e4, 64, 1e6, 1.0, False, is_store=True)
    work = BlockWork(264, 8, 3, accesses=[row, column])
    assert gpu._outside_loops(work) == pytest.approx(1 / 3)
    assert gpu._outside_loops(BlockWork(264, 8, 3)) == 0.0


def together(exponent, *times):
    return sum(us**exponent for us in times) ** (1 / exponent)


def test_a_block_waits_for_pieces_where_most_of_what_it_moves_is_in_them():
    piece, row = Access("x", 3e4, 64, 1e6, 1.0, False), Access("y", 2e4, 512, 1e6, 1.0, False)
    work = BlockWork(264, 8, 1, accesses=[piece, row], reductions=2)
    assert gpu._reduces_pieces(work)
    assert not gpu._reduces_pieces(replace(work, accesses=[piece, row, row]))
    assert not gpu._reduces_pieces(replace(work, reductions=0))


def test_stores_to_the_cache_are_not_waited_for():
    """Few rows are asked for at a time, from a cache that holds them: as many for sums as for what stores as much as it loads."""
    loads, stores = (on(kernel_of(f, struct(64, 4096)), H100) for f in (lambda x: jax.nn.logsumexp(x, -1), softmax))
    moved = [term(p, "device memory") for p in (loads, stores)]
    assert moved[0].us > 0
    assert moved[1].amount > 1.9 * moved[0].amount and moved[1].us == pytest.approx(moved[0].us)


def test_a_left_operand_in_columns_is_packed_too():
    def product(x, w):
        return jax.nn.softmax(jnp.einsum("ki,kj->ij", x, w), -1)

    def in_rows(x, w):
        return jax.nn.softmax(jnp.einsum("ik,kj->ij", x, w), -1)

    shapes = struct(512, 64, dtype=jnp.float32), struct(512, 1024, dtype=jnp.float32)
    turned = kernel_of(product, *shapes, target=XLA_CPU)
    straight = kernel_of(in_rows, struct(64, 512, dtype=jnp.float32), shapes[1], target=XLA_CPU)
    packed = [sum(t.amount for t in k.price.terms if t.name == "packed operands") for k in (turned, straight)]
    assert packed[0] - packed[1] == 64 * 512 * 16  # in each of eight trips, twice


def test_what_a_block_stores_for_its_reductions_counts():
    def summed(x, w):
        return jnp.sum(jnp.exp(x) * w, -1) * jnp.max(x, -1)

    def chosen(x, w):
        return jnp.sum(jnp.where(w > 0, jnp.exp(x), 0.5), -1) * jnp.max(x, -1)

    shapes = [struct(64, 8192, dtype=jnp.float32)] * 2
    kept = [
        examine(kernel_of(f, *shapes, target=XLA_CPU, tiles=(("i", 16),)).program).kept_bytes for f in (summed, chosen)
    ]
    assert kept == [0, 16 * 8192 * 4]


def test_reductions_of_a_block_are_calls_of_the_library_if_they_are_large():
    shape = [struct(64, 8192, dtype=jnp.float32)]
    calls = [
        term(kernel_of(softmax, *shape, target=XLA_CPU, tiles=(("i", n),)).price, "library calls").amount
        for n in (16, 32)
    ]
    assert calls[0] == 2 * calls[1] > 0
    assert term(kernel_of(softmax, struct(4, 128), target=XLA_CPU).price, "library calls").amount == 0


def test_every_sum_of_a_short_axis_adds_up_its_lanes():
    def distances(x, y):
        return jax.nn.softmax(-jnp.sum(jnp.square(x[:, None] - y[None]), -1), -1)

    kernel = kernel_of(distances, struct(256, 3, dtype=jnp.float32), struct(512, 3, dtype=jnp.float32), target=XLA_CPU)
    assert term(kernel.price, "sums of lanes").amount >= 256 * 512


# --- XLA's kernels


def test_maps_fuse_and_products_are_the_library_s():
    kernels = xla_kernels(program(attend, *QKV), habits_on(H100))
    assert [type(k) for k in kernels].count(LibraryProduct) == 2
    (rows,) = [k for k in kernels if isinstance(k, LoopFusion)]
    assert rows.is_row  # read once: XLA keeps rows of this length on the chip


def test_long_rows_are_read_by_every_reduction():
    short, long = (xla_kernels(program(softmax, struct(64, n)), habits_on(H100)) for n in (4096, 131072))
    assert len(short) == 1 and len(long) == 3


def test_a_transposed_operand_is_copied():
    def one(a, b):
        return jnp.einsum("bmk,bkn->bmn", a, b)

    def other(a, b):
        return jnp.einsum("mbk,knb->bmn", a, b)

    def copies(f, *shapes):
        return sum(len(k.copies) for k in xla_kernels(program(f, *map(lambda s: struct(*s), shapes)), habits_on(H100)))

    assert copies(one, (8, 64, 32), (8, 32, 16)) == 0
    assert copies(other, (64, 8, 32), (32, 16, 8)) == 1


def test_a_small_product_with_a_vector_is_no_library_s():
    def fusions(f, *shapes, device=H100):
        kernels = xla_kernels(program(f, *(struct(*s) for s in shapes)), habits_on(device))
        assert all(isinstance(k, LoopFusion) for k in kernels)
        return kernels

    def times(h, w):
        return h @ w

    def times_transposed(h, w):
        return h @ w.T

    terms, total = fusions(times, (1, 4096), (4096, 1024))
    assert terms.written_bytes == terms.sources["w"] == total.read_bytes  # stored, as few blocks would sum them
    assert total.reduces_columns and not total.is_product
    (row,) = fusions(times_transposed, (1, 4096), (1024, 4096))
    assert not row.reduces_columns
    for wide in ((256, 1024), (1024, 4096)):
        (columns,) = fusions(times, (1, wide[0]), wide)
        assert columns.reduces_columns and not columns.is_product
    (large,) = fusions(times, (1, 4096), (4096, 4096))
    assert large.is_product
    assert len(fusions(times, (1, 8192), (8192, 64))) == 1  # two steps, of many blocks each


def test_what_reads_a_product_of_stored_terms_comes_after_it():
    def function(h, w):
        y = h @ w
        return y, w * y

    kernels = xla_kernels(program(function, struct(1, 1024), struct(1024, 1024)), habits_on(H100))
    (maker,) = [k for k in kernels if any(n.endswith(".terms") for n in k.makes)]
    assert len(maker.makes) == 1 and len(kernels) == 3


def test_a_block_that_reduces_a_column_takes_as_long_as_it_is_long():
    def columns(x):
        return x.sum(0)

    def us(rows, width, dtype=jnp.float32):
        price = price_xla(program(columns, struct(rows, width, dtype=dtype)), H100)
        return term(price, "the longest column").us

    assert us(4096, 512) > 4 * us(1024, 512) > 0  # more bytes are farther away
    assert us(4096, 4096) == 4 * us(1024, 4096) > 4 * us(1024, 512)
    # a thread has four columns of short elements, if there are so many, and two of others
    assert us(4096, 1536, jnp.bfloat16) > 1.9 * us(4096, 1538, jnp.bfloat16)
    assert us(1 << 16, 512) < us(4096, 512)  # two steps
    batches = price_xla(program(lambda x: x.sum(1), struct(64, 4096, 64, dtype=jnp.float32)), H100)
    # not all that is kept lies side by side
    assert us(4096, 64) < term(batches, "the longest column").us < us(4096, 4096)
    assert term(price_xla(program(softmax, struct(64, 512)), H100), "the longest column").us == 0


def test_a_library_on_a_cpu_reads_batches_one_after_the_other():
    def scores(q, k):
        return jnp.einsum("ihd,jhd->hij", q, k)

    def in_order(q, k):
        return jnp.einsum("hid,hjd->hij", q, k)

    def copies(f, *shapes, device):
        (product,) = xla_kernels(program(f, *(struct(*s) for s in shapes)), habits_on(device))
        return len(product.copies)

    cpu = XLA_CPU.device
    assert copies(scores, (128, 8, 64), (96, 8, 64), device=cpu) == 2
    assert copies(scores, (128, 8, 64), (96, 8, 64), device=H100) == 0
    assert copies(in_order, (8, 128, 64), (8, 96, 64), device=cpu) == 0
    assert copies(scores, (128, 1, 64), (96, 1, 64), device=cpu) == 0  # one matrix


def test_what_a_kernel_reads_is_in_order():
    """A transpose that XLA lays out as it likes is free; one that a kernel reads is written with strided reads."""

    def function(x):
        return softmax(x.transpose(2, 0, 1) * 2)

    whole = program(function, struct(256, 512, 8, dtype=jnp.float32))
    read = next(n for n in whole.nests if not n.reduced and isinstance(n.body, Apply) and n.body.op == "mul").name
    made = frozenset(whole.outputs)
    price = price_xla(whole, XLA_CPU.device, made, frozenset({read}))
    strided = term(price, "strided reads")
    assert strided.amount == 256 * 512 * 8
    assert price.us > strided.us > 0.5 * price.us


def test_loops_that_read_in_strides_are_spread_over_the_cores():
    transposed = program(lambda x: x.transpose(1, 0), struct(1024, 1024, dtype=jnp.float32))
    of_two, of_four = (
        term(price_xla(transposed, replace(XLA_CPU.device, multiprocessors=n)), "strided reads").us for n in (2, 4)
    )
    assert of_two == pytest.approx(2 * of_four)
    few = program(lambda x: x.transpose(1, 0), struct(64, 64, dtype=jnp.float32))
    assert (
        len({term(price_xla(few, replace(XLA_CPU.device, multiprocessors=n)), "strided reads").us for n in (2, 4)}) == 1
    )


def test_what_another_kernel_reads_is_still_computed():
    def function(x, w):
        y = jnp.tanh(x @ w)
        return softmax(y)

    whole = program(function, struct(4096, 512), struct(512, 4096))
    result = whole.outputs[0]
    product = next(n.name for n in whole.nests if n.reduced)
    made = frozenset({result})
    assert price_xla(whole, H100, made).us == 0
    with_product = price_xla(whole, H100, made, frozenset({product}))
    assert 0 < with_product.us < price_xla(whole, H100).us
    assert term(with_product, "matrix units").amount == 2 * 4096 * 4096 * 512


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("device", [H100, XLA_CPU.device], ids=["gpu", "cpu"])
def test_many_prices_of_one_program_are_those_that_it_has_alone(device):
    def function(x, w, v):
        y = softmax(x @ w)
        z = jnp.tanh(x @ w) + 1
        return y @ v, jnp.sum(z * y, -1), jnp.sum(z * y, -1) + 1

    whole = program(function, struct(512, 256), struct(256, 1024), struct(1024, 128))
    prices, names = XlaPrices(whole, device), [n.name for n in whole.nests]
    pairs = list(itertools.combinations(names, 2))[::5]
    for made in [(), *itertools.combinations(names, 1), *pairs]:
        for read in ((), names[:1], names[3:5]):
            asked = frozenset(made), frozenset(read)
            alone = price_xla(whole, device, *asked)
            assert prices.price(*asked) == alone
            assert prices.us(*asked) == alone.us  # to the last bit: choices between equal ones are the same


def test_buffers_that_the_system_makes_anew_cost_on_a_cpu():
    cpu = XLA_CPU.device
    small, large = (price_xla(program(softmax, struct(n, 4096, dtype=jnp.float32)), cpu) for n in (512, 16384))
    assert term(small, "new pages").us == 0 and term(large, "new pages").us > 0


# --- the choice


def chosen(function, *arguments, target):
    return len(make_plan(jax.make_jaxpr(function)(*arguments), target, FuseOptions(price=True)).kernels)


def test_a_kernel_is_kept_where_it_beats_xla_by_more_than_the_price_s_error():
    assert chosen(attend, *QKV, target=MOSAIC_GPU) == 1
    sure = MOSAIC_GPU.on(replace(H100, price_error=1e3))
    assert chosen(attend, *QKV, target=sure) == 0


def test_where_a_clock_decides_later_a_price_may_be_wrong():
    doubtful = TRITON.on(replace(H100, price_error=3.0))
    x = struct(4096, 4096)
    assert chosen(softmax, x, target=doubtful) == 0
    assert chosen(softmax, x, target=replace(doubtful, timed=True)) == 1


def test_an_unknown_device_gets_careful_numbers():
    unknown = device.find("a device of tomorrow", "gpu")
    assert unknown.memory_gb_s == min(H100.memory_gb_s, H200.memory_gb_s)
    assert unknown.price_error > max(H100.price_error, H200.price_error)


def wide_softmax(columns, parts, tile):
    """The price of a softmax of long rows in clusters, on an H200."""
    x = jax.ShapeDtypeStruct((4096, columns), jnp.bfloat16)
    options = pf.FuseOptions(target="mosaic_cluster", check=False, price=False, parts=parts, tiles=(("j", tile),))
    (kernel,) = pf.fuse(lambda x: jax.nn.softmax(x, -1), options=options).explain(x).kernels
    return price_kernel([(p.program, p.target.on(H200)) for p in kernel.phases]).us


def test_clusters_as_measured():
    """Microseconds on an H200 of rows of 128256: the best cluster has eight blocks with several small tiles."""
    measured = {(2, 4096): 761, (2, 8192): 748, (4, 4096): 506, (4, 8192): 508, (8, 4096): 503, (8, 8192): 627}
    predicted = {s: wide_softmax(128256, *s) for s in measured}
    assert min(predicted, key=predicted.get) == (8, 4096)
    for schedule, us in measured.items():
        assert 0.75 < predicted[schedule] / us < 1.33, schedule


def test_every_warp_takes_part_in_a_reduction():
    """With four times as many warps, the same short tiles take longer."""
    x = jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16)
    found = []
    for warps in (2, 8):
        options = pf.FuseOptions(target="triton", check=False, price=False, warps=warps, tiles=(("j", 1024),))
        (kernel,) = pf.fuse(lambda x: jax.nn.logsumexp(x, -1), options=options).explain(x).kernels
        price = price_kernel([(p.program, p.target.on(H200)) for p in kernel.phases])
        found.append(next(t.us for t in price.terms if t.name == "vector units"))
    assert found[1] > 1.3 * found[0]
