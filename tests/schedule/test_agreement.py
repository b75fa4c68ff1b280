"""The places of a tree's statements, by which trees are searched, and the walk that lowers a tree: they allow the same trees."""

import random

import pytest

from benchmarks.search import workloads
from pallasfuse.errors import Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.schedule import space, tiles
from pallasfuse.schedule.folds import derivable
from pallasfuse.schedule.placement import Broken, place
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree
from tests.schedule.parts import random_part

NAMES = ("G1", "G12", "S1", "S9", *(n for n in workloads() if not n[1:].isdigit()))
SUBJECTS = {n: workloads()[n] for n in NAMES} | {f"random {n}": (lambda n=n: random_part(n)) for n in range(12)}


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_can_be_placed_can_be_lowered(name):
    part, draw = SUBJECTS[name](), random.Random(name)
    may_fold, choices = derivable(part), tiles.choices(part.axes.values())
    found = space.trees(part, may_fold)
    legal = 0
    for tree in draw.sample(found, min(10, len(found))):
        kernel = space.tiled(part, tree, {a: draw.choice(sizes) for a, sizes in choices.items()})
        placed = place(part, kernel, may_fold)
        for tails in (Tiles("exact"), Tiles("masked", 16)):
            programs = lower_tree(part, (kernel,), FoldsOnDemand(part), tails)
            assert isinstance(placed, Broken) == isinstance(programs, Refusal), (str(kernel), placed, programs)
        legal += not isinstance(placed, Broken)
    assert legal
