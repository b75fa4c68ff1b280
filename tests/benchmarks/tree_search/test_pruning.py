"""The paper's four rules: counts, and that none loses what matters."""

import pytest

from benchmarks.tree_search import pruning
from pallasfuse.device import assumed
from pallasfuse.ir.region import independent_axes
from pallasfuse.ir.tree import parse
from pallasfuse.schedule import space, tiles
from pallasfuse.schedule.candidates import ModelPrices, Space, without_equal_trees, without_padding
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.placement import Broken, place
from tests.schedule.regions import attention, chain, norm_product, random_region, three_products, two_passes

pytestmark = pytest.mark.any_jax  # no version of JAX changes it

GPU = assumed("gpu")
REGIONS = {
    "chain": chain(64, 48, 32, 96),
    "attention": attention(2, 64, 64, 32, 32),
    "norm": norm_product(64, 96, 128),
    "passes": two_passes(64, 96, 32),
    "three": three_products(64, 32, 48, 64, 32),
} | {f"random {n}": random_region(n) for n in range(6)}


def least(found, model):
    prices = ModelPrices(found, model)
    return min(float(prices.of_every(tree).min()) for tree in range(len(found.trees)))


def whole_space(region):
    fold = derivable(region)
    independent = [a.name for a in independent_axes(region)]
    return Space(region, tuple(space.all_trees(region, fold)), tiles.choices(region.axes.values(), independent), fold)


def test_both_readings_are_counted():
    region = chain(512, 256, 64, 64)
    literal, careful = (pruning.expression_stages(region, reading) for reading in pruning.READINGS)
    assert [(s.before, s.after) for s in literal] == [(26, 3), (3, 2)]
    assert [(s.before, s.after) for s in careful] == [(26, 5), (5, 3)]
    assert [str(s) for s in careful] == ["equal trees: 26 -> 5", "partial tiles: 5 -> 3"]


def test_counts_of_a_chain():
    """By our own trees: five for each block, as in the second reading; two without partial tiles, as in the first."""
    region = chain(1024, 1024, 512, 512)
    found, stages = pruning.prune(whole_space(region))
    assert [(s.rule, s.before, s.after) for s in stages] == [
        ("equal trees", 9 * 64 * 64 * 32 * 32, 5 * 64 * 64 * 32 * 32),
        ("partial tiles", 5 * 64 * 64 * 32 * 32, 2 * 64 * 64 * 32 * 32),
        ("padding", 2 * 64 * 64 * 32 * 32, 2 * 1764),
    ]
    memory = pruning.within_memory(found, Model(region, GPU))
    assert memory.before == 3528 and 0 < memory.after < memory.before


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("name", REGIONS)
def test_what_is_left_is_legal_and_not_empty(name):
    region = REGIONS[name]
    every = whole_space(region)
    for rule in pruning.RULES:
        left = rule.apply(every)
        assert 0 < left.count <= every.count
        every = left
    assert not any(isinstance(place(region, t, every.may_fold), Broken) for t in every.trees)
    assert pruning.within_memory(every, Model(region, GPU)).after > 0


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", REGIONS)
def test_equal_trees_lose_no_price(name):
    region = REGIONS[name]
    every, model = whole_space(region), Model(REGIONS[name], GPU)
    sizes = {a: c[:: max(1, len(c) // 3)] for a, c in every.choices.items()}
    every = Space(region, every.trees, sizes, every.may_fold)
    left = without_equal_trees(every)
    assert left.trees and least(left, model) == pytest.approx(least(every, model), rel=1e-9)


def test_the_only_tree_stays():
    region = REGIONS["chain"]
    partial = parse("kernel { i:1@grid l:1@grid ( j:1 k:1 ( t0 ) k:1 ( t1 ) ) }")
    better = parse("kernel { i:1@grid l:1@grid k:1 ( j:1 ( t0 ) t1 ) }")
    choices = tiles.choices(region.axes.values())
    assert pruning.PARTIAL_TILES.apply(Space(region, (*partial, *better), choices)).trees == better
    assert pruning.PARTIAL_TILES.apply(Space(region, partial, choices)).trees == partial


def test_some_size_is_left_of_every_axis():
    region = chain(5, 17, 1000, 48)
    left = without_padding(whole_space(region))
    assert all(left.choices.values())
    by_extent = {a.extent: left.choices[a.name] for a in region.axes.values()}
    assert by_extent[5] == (16,)
    assert by_extent[48] == (16, 48)
    assert 768 not in by_extent[1000] and 512 in by_extent[1000] and 1008 in by_extent[1000]


def test_memory_is_exact():
    """What fits by the rule is what the buffers of each candidate say."""
    region = chain(256, 256, 256, 256)
    found, _ = pruning.prune(whole_space(region))
    model = Model(region, GPU)
    fitting = 0
    for candidate in found:
        placement = place(region, found.tree(candidate), found.may_fold)
        fitting += not isinstance(placement, Broken) and bool(model.fits(model.estimate(placement)))
    assert pruning.within_memory(found, model).after == fitting < found.count
