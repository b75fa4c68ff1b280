"""The analytical price: amounts by hand, and many candidates at a time priced as one by one."""

import math
import random

import numpy as np
import pytest

from benchmarks.tree_search.search import by_model, each
from pallasfuse.device import assumed
from pallasfuse.ir.region import independent_axes, spatial_axes
from pallasfuse.ir.tree import parse
from pallasfuse.schedule import space, tiles
from pallasfuse.schedule.candidates import Candidate, ModelPrices, Space
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model, published_slowdown
from pallasfuse.schedule.placement import Broken, place
from tests.schedule.regions import attention, chain, norm_product, random_region, traced

GPU = assumed("gpu")
M, N, K, H = 512, 256, 64, 128
CHAIN = chain(M, N, K, H)  # i: rows, k: columns of the first product, j: its sum, l: columns of the second


def amounts(text, region=CHAIN, fold=lambda nest, unfinished: False):
    price = Model(region, GPU).price(parse(text)[0], fold)
    return {t.name: t.amount for t in price.terms}


@pytest.mark.parametrize("tile_k", [16, 32])
def test_bytes_are_tiles_times_the_trips_around_their_place(tile_k):
    found = amounts(f"x {{ i:64@grid l:32@grid k:128 ( j:{tile_k} ( t0 ) t1 ) }}")
    blocks, columns = (M // 64) * (H // 32), N // 128
    a, b, d, e = K * 64 * columns, K * 128 * columns, 128 * 32 * columns, 64 * 32
    sectors = 1 if tile_k * 2 >= 32 else 32 / (tile_k * 2)
    assert found["cache"] == 2 * blocks * (a * sectors + b + d + e)
    assert found["device memory"] == 2 * (M * K + K * N + N * H + M * H)  # each is read again from the cache


def test_what_the_cache_cannot_hold_is_read_again():
    region = chain(65536, 64, 512, 64)
    rows = region.by_name["t0"].axes[0].name
    assert rows == "i"
    once = amounts("x { i:64@grid l:64@grid k:64 ( j:64 ( t0 ) t1 ) }", region)["device memory"]
    again = amounts("x { i:64@grid l:32@grid k:64 ( j:64 ( t0 ) t1 ) }", region)["device memory"]
    assert again - once == 2 * 65536 * 512  # the rows are 64 MB


def test_recomputed_products_count_again():
    deep = amounts("x { i:64@grid l:64@grid k:64 ( j:16 ( t0 ) t1 ) }")["matrix units"]
    flat = amounts("x { i:64@grid k:64 ( j:16 ( t0 ) l:64 ( t1 ) ) }")["matrix units"]
    assert flat == 2 * M * N * K + 2 * M * N * H
    assert deep == flat + 2 * M * N * K * (H // 64 - 1)


def test_small_tiles_take_the_unit_whole():
    """Of 16 rows and 16 columns one side is padded to 64, the other needs none."""
    small = amounts("x { i:16@grid k:16 ( j:16 ( t0 ) l:16 ( t1 ) ) }")["matrix units"]
    assert small == 4 * (2 * M * N * K + 2 * M * N * H)


def test_elementwise_work_is_counted_on_the_axes_of_each_expression():
    region = attention(1, 64, 128, 32, 32)
    text = "x { i:64@grid k:64 ( j:32 ( t0 ) t1 t8 t12 ) }"
    found = amounts(text, region, lambda nest, unfinished: True)
    exponentials = 64 * 128
    assert found["special functions"] >= exponentials  # shared by the two sums: not twice
    assert found["special functions"] < 4 * exponentials
    apart = amounts(
        "x { i:64@grid ( k:64 ( j:32 ( t0 ) t1 ) k:64 ( j:32 ( t0 ) t8 ) k:64 ( j:32 ( t0 ) t12 ) ) }", region
    )
    assert apart["special functions"] > found["special functions"]


def test_a_loop_that_runs_once_moves_loads_outwards():
    inside = amounts("x { i:64@grid l:64@grid k:64 ( j:32 ( t0 ) t1 ) }")["cache"]
    outside = amounts("x { i:64@grid l:64@grid k:64 ( t0 t1 ) }")["cache"]
    blocks, a = (M // 64) * (H // 64), 64 * K
    assert inside - outside == 2 * blocks * a * (N // 64 - 1)


def test_memory_of_a_block_is_what_lives_at_once():
    """Both products' operands are not there at the same time: the first loop's buffers end before the second one begins."""
    model = Model(CHAIN, GPU)
    tree = parse("x { i:64@grid k:128 ( j:16 ( t0 ) l:64 ( t1 ) ) }")[0]
    found = model.estimate(place(CHAIN, tree))
    assert found.shared_bytes == 2 * max(64 * 16 + 16 * 128, 128 * 64)
    assert found.register_bytes == 4 * (64 * 128 + 64 * H)
    slotted = parse("x { i:64@grid k:128 ( j:16~3 ( t0 ) l:64 ( t1 ) ) }")[0]
    assert model.estimate(place(CHAIN, slotted)).shared_bytes == 2 * max(3 * (64 * 16 + 16 * 128), 128 * 64)


def test_a_loop_of_more_than_sixteen_trips_indexes_shared_memory():
    region = chain(64, 64, 64, 512)
    few, many = (
        (
            Model(region, GPU).estimate(place(region, parse(f"x {{ i:64@grid j:64 ( k:64 ( t0 ) l:{t} ( t1 ) ) }}")[0]))
            for t in (32, 16)
        )
        if region.by_name["t0"].axes[1].name == "j"
        else (
            Model(region, GPU).estimate(place(region, parse(f"x {{ i:64@grid k:64 ( j:64 ( t0 ) l:{t} ( t1 ) ) }}")[0]))
            for t in (32, 16)
        )
    )
    assert few.register_bytes - many.register_bytes == 4 * 64 * 512
    assert many.shared_bytes > few.shared_bytes


def test_few_blocks_are_slow():
    published = Model(CHAIN, GPU, published_slowdown)
    rounds = Model(CHAIN, GPU)
    few, many = (parse(f"x {{ i:{t}@grid l:128@grid k:64 ( t0 t1 ) }}")[0] for t in (512, 64))
    for model in (published, rounds):
        assert model.price(few).us > 2.5 * model.price(many).us
    assert rounds.price(many).us < published.price(many).us


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("seed", range(6))
def test_many_candidates_at_a_time_have_the_prices_of_each(seed):
    region = (norm_product(64, 96, 128), attention(2, 64, 48, 32, 32), *map(random_region, range(4)))[seed]
    fold, draw = derivable(region), random.Random(seed)
    whole = [a.name for a in independent_axes(region)]
    found = Space(region, space.trees(region, fold), tiles.choices(region.axes.values(), whole), fold)
    model = Model(region, GPU)

    def price(tree):
        placement = place(region, tree, fold)
        if isinstance(placement, Broken):
            return np.inf
        estimate = model.estimate(placement)
        return float(estimate.us) if model.fits(estimate) else np.inf

    candidates = [
        Candidate(draw.randrange(len(found.trees)), tuple(draw.choice(c) for c in found.choices.values()))
        for _ in range(60)
    ]
    together = by_model(ModelPrices(found, model))(candidates)
    np.testing.assert_allclose(together, each(found, price)(candidates), rtol=1e-12)
    assert np.isfinite(together).any()
    most = math.prod(-(-a.extent // min(found.choices[a.name])) for a in spatial_axes(region))
    assert 0 < model.bound_us() <= model.bound_us(most) <= min(together)


def test_the_least_price_is_that_of_busy_units_of_as_many_multiprocessors_as_there_are_blocks():
    launch_us = GPU.kernel_us + GPU.launch_us
    products_us = 2e-6 * M * N * (K + H) / GPU.matmul_tflop_s["float16"]
    assert Model(CHAIN, GPU).bound_us() >= launch_us + max(products_us, GPU.latency_us)
    one_block_us = Model(CHAIN, GPU).bound_us(1)
    assert one_block_us >= launch_us + GPU.multiprocessors * products_us
    assert Model(CHAIN, GPU).bound_us(2) < one_block_us


def test_a_price_names_its_terms_and_units():
    price = Model(CHAIN, GPU).price(parse("x { i:64@grid k:64 ( j:16 ( t0 ) l:64 ( t1 ) ) }")[0])
    assert {t.name: t.unit for t in price.terms} == {
        "device memory": "B", "cache": "B", "matrix units": "flop", "operands in shared memory": "B", "vector units": "op",
        "special functions": "op",
        "waiting for loads": "trips", "launch": "kernel",
    }  # fmt: skip
    assert price.limit in str(price)
    broken = Model(CHAIN, GPU).price(parse("x { i:64@grid k:64 ( t1 ) }")[0])
    assert isinstance(broken, Broken) and broken.rule == 3


def test_one_tensor_read_along_two_axes_is_loaded_twice():
    region = traced(lambda x: x @ x.T, (64, 128))
    rows, columns = (a.name for a in region.nests[0].axes)
    summed = region.nests[0].reduced[0].name
    tree = parse(f"x {{ {rows}:16@grid {columns}:32@grid {summed}:64 ( {region.nests[0].name} ) }}")[0]
    loads = [s for s in place(region, tree).statements if s.kind == "load"]
    assert len(loads) == 2 and {s.axes[0].name for s in loads} == {rows, columns}


def test_a_cpu_has_no_shared_memory_to_exceed():
    model = Model(CHAIN, assumed("cpu"))
    found = model.estimate(place(CHAIN, parse("x { i:512@grid k:256 ( t0 t1 ) }")[0]))
    assert found.shared_bytes <= 1 << 20 and np.isfinite(found.us)
