"""The trees of a space and the walk that lowers trees: each lowers, is right, and moves the bytes that its placement says."""

import random
from collections import Counter

import numpy as np
import pytest

from pallasfuse.device import assumed
from pallasfuse.errors import Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.tree import Do, walk
from pallasfuse.price.block_work import examine
from pallasfuse.schedule import moves, space
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.placement import Broken, place
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree
from tests.schedule.parts import attention, chain, norm_product, random_part, three_products, two_passes

SHORT = (16, 32, 48)
PARTS = {
    "chain": chain(32, 16, 48, 16),
    "attention": attention(2, 32, 16, 16, 16),
    "norm": norm_product(32, 16, 48),
    "passes": two_passes(32, 16, 16),
    "three": three_products(16, 32, 16, 48, 16),
} | {f"random {n}": random_part(n, SHORT) for n in range(8)}


def lowered(part, tree):
    return lower_tree(part, (tree,), FoldsOnDemand(part), Tiles("exact"))


@pytest.mark.parametrize("name", PARTS)
def test_every_tree_lowers_and_computes_the_same_with_the_bytes_of_its_placement(name):
    part, fold, draw = PARTS[name], derivable(PARTS[name]), random.Random(name)
    model = Model(part, assumed("gpu"))
    rng = np.random.default_rng(0)
    inputs = {t.name: rng.standard_normal([a.extent for a in t.axes]) for t in part.inputs}
    want = evaluate(LoopProgram(part.inputs, part.nests, part.outputs), inputs)
    for tree in space.trees(part, fold):
        sizes = {
            a.name: draw.choice([s for s in (8, 16, a.extent) if a.extent % s == 0 or s == 8])
            for a in part.axes.values()
        }
        tiled = space.tiled(part, tree, sizes, fold)
        programs = lowered(part, tiled)
        assert not isinstance(programs, Refusal), f"{tiled}: {programs}"
        (program,) = programs
        have = inputs | evaluate_tiles(program, inputs, move_last_block_back=True)
        for n in part.outputs:
            np.testing.assert_allclose(have[n], want[n], rtol=1e-9, atol=1e-9, err_msg=str(tiled))
        moved = Counter(s.name for s in place(part, tiled, fold).statements if s.kind != "compute")
        work = examine(program)
        by_program: Counter[str] = Counter()
        for access in work.accesses:
            by_program[access.tensor] += access.bytes * work.blocks
        assert by_program.keys() == moved.keys()
        found = model.estimate(place(part, tiled, fold)).moved
        assert {n: float(b) for n, b in found.items()} == pytest.approx(dict(by_program)), str(tiled)


@pytest.mark.parametrize("name", PARTS)
def test_both_refuse_the_same_trees(name):
    """Of the trees that are one move away, legal or not, in which no nest stands twice."""
    part, fold = PARTS[name], derivable(PARTS[name])
    verdicts: Counter[bool] = Counter()
    sizes = {a.name: 8 for a in part.axes.values()}
    for start in space.trees(part, fold, most=12):
        for tree in {space.canonical(part, t) for t in moves.moved(part, start)}:
            nests = [n.nest for _, n in walk(tree.body) if isinstance(n, Do)]
            if len(set(nests)) == len(nests):
                tiled = space.tiled(part, tree, sizes, fold)
                mine, programs = place(part, tiled, fold), lowered(part, tiled)
                refused = isinstance(mine, Broken)
                reasons = f"{mine if refused else 'legal'}; {programs if isinstance(programs, Refusal) else 'lowered'}"
                assert refused == isinstance(programs, Refusal), f"{tiled}: {reasons}"
                verdicts[refused] += 1
    assert verdicts[False] and verdicts[True]
