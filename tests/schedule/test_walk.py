"""The trees of a space and the walk that lowers trees: each lowers, is right, and moves the bytes that its placement says."""

import random
from collections import Counter

import numpy as np
import pytest

from benchmarks.tree_search import moves
from pallasfuse.device import assumed
from pallasfuse.errors import Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.tree import Do, walk
from pallasfuse.price.block_work import examine
from pallasfuse.schedule import space
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.placement import Broken, place
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree
from tests.schedule.regions import attention, chain, norm_product, random_region, three_products, two_passes

SHORT = (16, 32, 48)
REGIONS = {
    "chain": chain(32, 16, 48, 16),
    "attention": attention(2, 32, 16, 16, 16),
    "norm": norm_product(32, 16, 48),
    "passes": two_passes(32, 16, 16),
    "three": three_products(16, 32, 16, 48, 16),
} | {f"random {n}": random_region(n, SHORT) for n in range(8)}


def lowered(region, tree):
    return lower_tree(region, (tree,), FoldsOnDemand(region), Tiles("exact"))


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("name", REGIONS)
def test_every_tree_lowers_and_computes_the_same_with_the_bytes_of_its_placement(name):
    region, fold, draw = REGIONS[name], derivable(REGIONS[name]), random.Random(name)
    model = Model(region, assumed("gpu"))
    rng = np.random.default_rng(0)
    inputs = {t.name: rng.standard_normal([a.extent for a in t.axes]) for t in region.inputs}
    want = evaluate(LoopProgram(region.inputs, region.nests, region.outputs), inputs)
    for tree in space.trees(region, fold):
        sizes = {
            a.name: draw.choice([s for s in (8, 16, a.extent) if a.extent % s == 0 or s == 8])
            for a in region.axes.values()
        }
        tiled = space.tiled(region, tree, sizes, fold)
        programs = lowered(region, tiled)
        assert not isinstance(programs, Refusal), f"{tiled}: {programs}"
        (program,) = programs
        have = inputs | evaluate_tiles(program, inputs, move_last_block_back=True)
        for n in region.outputs:
            np.testing.assert_allclose(have[n], want[n], rtol=1e-9, atol=1e-9, err_msg=str(tiled))
        moved = Counter(s.name for s in place(region, tiled, fold).statements if s.kind != "compute")
        work = examine(program)
        by_program: Counter[str] = Counter()
        for access in work.accesses:
            by_program[access.tensor] += access.bytes * work.blocks
        assert by_program.keys() == moved.keys()
        found = model.estimate(place(region, tiled, fold)).moved
        assert {n: float(b) for n, b in found.items()} == pytest.approx(dict(by_program)), str(tiled)


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("name", REGIONS)
def test_both_refuse_the_same_trees(name):
    """Of the trees that are one move away, legal or not, in which no nest stands twice."""
    region, fold = REGIONS[name], derivable(REGIONS[name])
    verdicts: Counter[bool] = Counter()
    sizes = {a.name: 8 for a in region.axes.values()}
    for start in space.trees(region, fold, most=12):
        for tree in {space.canonical(region, t) for t in moves.moved(region, start)}:
            nests = [n.nest for _, n in walk(tree.body) if isinstance(n, Do)]
            if len(set(nests)) == len(nests):
                tiled = space.tiled(region, tree, sizes, fold)
                mine, programs = place(region, tiled, fold), lowered(region, tiled)
                refused = isinstance(mine, Broken)
                reasons = f"{mine if refused else 'legal'}; {programs if isinstance(programs, Refusal) else 'lowered'}"
                assert refused == isinstance(programs, Refusal), f"{tiled}: {reasons}"
                verdicts[refused] += 1
    assert verdicts[False] and verdicts[True]
