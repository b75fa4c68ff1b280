"""The search: as good as trying everything, the same each time; moves of trees."""

import math

import numpy as np
import pytest

from benchmarks.tree_search import moves
from benchmarks.tree_search.search import MOST_EXHAUSTIVE, Evolution, by_model, each, search
from pallasfuse.device import assumed
from pallasfuse.ir.region import independent_axes
from pallasfuse.ir.tree import parse, show
from pallasfuse.schedule import space, tiles
from pallasfuse.schedule.candidates import Candidate, ModelPrices, Space
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.placement import Broken, place
from tests.schedule.regions import attention, chain, norm_product, random_region, three_products

pytestmark = pytest.mark.any_jax  # no version of JAX changes it

GPU = assumed("gpu")


def candidates_of(region, *, little_padding=True):
    fold, whole = derivable(region), [a.name for a in independent_axes(region)]
    return Space(
        region,
        space.trees(region, fold),
        tiles.choices(region.axes.values(), whole, little_padding=little_padding),
        fold,
    )


def least(found, model):
    prices = ModelPrices(found, model)
    return min(float(prices.of_every(tree).min()) for tree in range(len(found.trees)))


@pytest.mark.sampled(60, cover=())
@pytest.mark.parametrize("seed", range(60))
def test_evolution_finds_what_trying_everything_finds(seed):
    region = random_region(seed)
    found = candidates_of(region)
    model = Model(region, GPU)
    best = least(found, model)
    assert math.isfinite(best)
    by_evolution = search(found, by_model(ModelPrices(found, model)), evolution=Evolution(seed=seed))
    assert best <= by_evolution.us <= 1.02 * best
    assert by_evolution.priced < max(found.count, 4000)


@pytest.mark.deep  # `test_evolution_finds_what_trying_everything_finds` is the same on a smaller space
def test_tiles_of_every_multiple_are_a_space_too_large_to_try():
    region = three_products(256, 128, 192, 96, 256)
    found = candidates_of(region, little_padding=False)
    assert found.count > 10 * MOST_EXHAUSTIVE
    best = least(found, Model(region, GPU))
    assert search(found, by_model(ModelPrices(found, Model(region, GPU)))).us <= 1.02 * best


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("region", [chain(128, 96, 64, 64), attention(2, 128, 96, 64, 64)], ids=["chain", "attention"])
def test_prices_on_a_share_of_a_device_are_those_that_it_has_alone(region):
    found = candidates_of(region)
    whole, share = ModelPrices(found, Model(region, GPU)), GPU.share(4)
    sizes, alone = found.all_sizes(), ModelPrices(found, Model(region, share))
    for tree in range(len(found.trees)):
        np.testing.assert_array_equal(whole.of_every(tree), whole.of_tree(tree, sizes))
        np.testing.assert_array_equal(whole.on(share).of_every(tree), alone.of_tree(tree, sizes))


@pytest.mark.parametrize("region", [chain(128, 96, 64, 64), norm_product(64, 256, 512)], ids=["chain", "norm"])
def test_a_small_space_is_tried_completely(region):
    found = candidates_of(region)
    result = search(found, by_model(ModelPrices(found, Model(region, GPU))))
    assert result.priced == found.count <= MOST_EXHAUSTIVE
    assert result.us == pytest.approx(least(found, Model(region, GPU)))
    assert [us for us, _ in result.best] == sorted(us for us, _ in result.best)
    assert len(result.best) == 10
    assert len({found.tree(c) for _, c in result.best}) == 10


def test_equal_arguments_find_the_same():
    region = chain(128, 96, 64, 64)
    found = candidates_of(region)
    runs = [
        search(found, by_model(ModelPrices(found, Model(region, GPU))), evolution=Evolution(seed=3)) for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_what_is_measured_decides():
    region = chain(128, 128, 64, 64)
    found = candidates_of(region)
    measured = []

    def measure(candidate):
        measured.append(candidate)
        return 1.0 if candidate.sizes[0] == 32 else 2.0

    result = search(found, by_model(ModelPrices(found, Model(region, GPU))), measure=measure)
    assert result.us == min(1.0 if c.sizes[0] == 32 else 2.0 for c in measured)
    assert len(set(measured)) == len(measured) < found.count / 2


def test_a_price_of_single_trees_is_asked_once_for_equal_ones():
    region = chain(64, 64, 64, 64)
    found = candidates_of(region)
    asked = []

    def price(tree):
        asked.append(tree)
        return float(len(show((tree,))))

    result = search(found, each(found, price))
    assert result.us == min(map(len, map(show, ((t,) for t in asked))))
    assert len(set(asked)) == len(asked) < found.count


def test_nothing_that_can_run_is_infinitely_slow():
    region = chain(64, 64, 64, 64)
    found = candidates_of(region)
    result = search(found, lambda candidates: [math.inf] * len(candidates), evolution=Evolution(generations=5))
    assert result.us == math.inf
    measured = search(found, lambda candidates: [math.inf] * len(candidates), measure=lambda candidate: 1.0)
    assert measured.us == math.inf and not measured.best


def test_the_trees_of_a_chain_are_moves_apart():
    found = candidates_of(chain(64, 48, 32, 96))
    near = moves.Neighbours(found)
    reached, waiting = {0}, [0]
    while waiting:
        new = set(near.trees(waiting.pop())) - reached
        reached |= new
        waiting += new
    assert reached == set(range(len(found.trees)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x { i:1@grid l:1@grid k:1 ( j:1 ( t0 ) t1 ) }", "x { i:1@grid k:1 ( j:1 ( t0 ) l:1 ( t1 ) ) }"),  # bind
        ("x { i:1@grid k:1 ( j:1 ( t0 ) l:1 ( t1 ) ) }", "x { l:1@grid i:1@grid k:1 ( j:1 ( t0 ) t1 ) }"),
        (
            "x { i:1@grid ( j:1 k:1 ( t0 ) k:1 l:1 ( t1 ) ) }",
            "x { i:1@grid ( j:1 k:1 ( t0 ) l:1 k:1 ( t1 ) ) }",
        ),  # order
        ("x { i:1@grid ( j:1 k:1 ( t0 ) k:1 l:1 ( t1 ) ) }", "x { i:1@grid k:1 ( j:1 ( t0 ) l:1 ( t1 ) ) }"),  # merge
        ("x { i:1@grid k:1 ( j:1 ( t0 ) l:1 ( t1 ) ) }", "x { i:1@grid ( j:1 k:1 ( t0 ) k:1 l:1 ( t1 ) ) }"),  # part
        ("x { i:1@grid ( t0 k:1 ( t1 ) ) }", "x { i:1@grid k:1 ( t0 t1 ) }"),  # sink
    ],
)
def test_moves(before, after):
    region = chain(64, 48, 32, 96)
    assert after in {str(t) for t in moves.moved(region, parse(before)[0])}


def test_neighbours_are_candidates():
    found = candidates_of(attention(1, 64, 64, 32, 32))
    near = moves.Neighbours(found)
    start = Candidate(0, tuple(c[0] for c in found.choices.values()))
    around = list(near.of(start))
    assert len(set(around)) == len(around) and start not in around
    assert {c.tree for c in around if c.sizes == start.sizes} == set(near.trees(0)) != set()
    for candidate in around:
        assert all(size in sizes for size, sizes in zip(candidate.sizes, found.choices.values(), strict=True))
        assert sum(a != b for a, b in zip(candidate.sizes, start.sizes, strict=True)) + (candidate.tree != 0) == 1
    assert not isinstance(place(found.region, found.trees[near.trees(0)[0]], found.may_fold), Broken)
