"""Random schedule trees with random tiles: all that no rule refuses compute what the function does, on every machine."""

import random

import pytest

from pallasfuse.errors import Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.ir.tree import parse, show
from pallasfuse.tiling.rules import RULES
from pallasfuse.tiling.trees import lower_tree
from tests.tiling.random_programs import SUBJECTS
from tests.tiling.random_trees import Walker
from tests.tiling.tree_programs import MACHINES, TILES, in_float64, on_machine

NAMES = sorted(SUBJECTS)
SHARDS, PAIRS = 100, 10


def walked(seed):
    """A subject, a tree of it and the tiles with which it was found."""
    name = NAMES[seed % len(NAMES)]
    tiles = list(TILES.values())[(seed // len(NAMES)) % len(TILES)]
    walker = Walker(SUBJECTS[name].region, tiles, random.Random(seed))
    tree = walker.walk(6 + seed % 11)
    for reason in walker.refused:
        rule = int(reason.removeprefix("rule ").split()[0])
        assert reason.startswith(f"rule {rule} ({RULES[rule]}): ")
    return SUBJECTS[name], tree, tiles


def judged(seed, machines):
    subject, tree, tiles = walked(seed)
    try:
        in_float64(subject, lower_tree(subject.region, tree, FoldsOnDemand(subject.region), tiles), tiles)
        for machine in machines:
            own, run = MACHINES[machine]
            programs = lower_tree(subject.region, tree, FoldsOnDemand(subject.region), own)
            assert not isinstance(programs, Refusal), programs
            on_machine(subject, programs, run)
    except Exception as error:
        error.add_note(f"{show(tree)}\nwith {tiles} of\n{subject.region}")
        raise


def test_there_are_many_programs():
    assert len(SUBJECTS) >= 30


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("seed", range(0, 5 * len(NAMES), 8))
def test_in_float64(seed):
    judged(seed, ())


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("seed", range(1, len(NAMES), 9))
def test_on_machines(seed):
    judged(seed, MACHINES)


@pytest.mark.deep
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_thousand_pairs(shard):
    for seed in range(1000 + shard * PAIRS, 1000 + (shard + 1) * PAIRS):
        judged(seed, MACHINES)


FOUND = {
    "partial states in another order of axes": (
        "batched_attention", "p { i:2@time n:1@mesh m/3@grid ( t0 ) } q { +t0 t1 t7 t10 t11 }"),
    "a value that two loops take apart": (
        "causal", "k { t6 t11 t17 i:4@group m:4 ( i:1 i:1 i:1~2 m:2 ( t20 ) t17 ) }"),
    "loops beyond the end of the axis": ("above_the_mean", "k { i:3~2 i:1 ( t0 t5 i:1 i:1 ( t6 t5 t10 ) t6 ) }"),
    "a merge in smaller windows than that of its frame": (
        "layer_norm_dot", "p { k:16@time k:8@time j/3@grid j:16 ( t0 t5 t11 ) } q { j:8 i:2 ( +t0 +t5 i:1 ( +t11 ) ) }"),
    "a frame outside of the loop in which its sum goes on": (
        "variance", "p { j/3@grid j:4 ( t0 j:1 ( t7 ) ) } q { i:16@time ( +t0 +t7 t12 ) }"),
    "the same in one block": ("variance", "k { j:4 ( t0 j:1 ( t7 ) ) t12 }"),
    "what stands before a cluster over its axis": ("norm_dot", "k { t1 j:8@cluster ( t7 ) +t7 }"),
    "a merge, and the same again": (
        "layer_norm", "p { j:10@grid j/4@grid j:5~2 ( t0 t5 ) } q { j:16@time ( +t0 +t5 t0 t5 t12 t12 ) }"),
    "a merge after a loop": ("leading_axis", "p { j:1@grid i/4@grid i:7 ( t0 t6 ) } q { +t0 +t6 i:7@cluster ( t0 t8 ) +t0 }"),
    "a third loop": ("picked", "k { j:7 ( t6 ) j:4 ( t6 t12 t19 ) j:7~2 i:8~2 ( t19 ) }"),
    "masks that bound the loop of what is moved": ("masked columns", "k { i:4@grid l:4 ( t1 t6 t12 m:4 ( t19 ) ) }"),
}  # fmt: skip


ON_MACHINES = {
    "tiles of one position beyond the end": (
        "chain", "p { j/2@grid j/4 i:4 j:16 j:4 j:1 ( t0 ) } q { j:2@mesh ( +t0 i:4 i:4~2 ( t1 ) ) }"),
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ON_MACHINES)
def test_found_on_machines(name, machine):
    program, text = ON_MACHINES[name]
    tiles, run = MACHINES[machine]
    found = lower_tree(SUBJECTS[program].region, parse(text), FoldsOnDemand(SUBJECTS[program].region), tiles)
    on_machine(SUBJECTS[program], found, run)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", FOUND)
def test_found_before(name, tiles):
    """Trees on which the walk once was wrong."""
    program, text = FOUND[name]
    subject = SUBJECTS[program]
    found = lower_tree(subject.region, parse(text), FoldsOnDemand(subject.region), TILES[tiles])
    assert not isinstance(found, Refusal), found
    in_float64(subject, found, TILES[tiles])


REFUSED = {
    "a sum inside a loop that it lacks": (4, "positive products", "k { t4 t4 k/4 j/2 ( t5 k:8~2 i:16 ( t4 ) ) }"),
    "two states of one sum": (7, "variance", "p { j/3@grid ( j:4 ( t0 ) j:4 ( t0 j:1 ( t7 ) ) ) } q { +t0 +t7 t12 }"),
    "an output that is apart and whole": (7, "batched chain", "k { t0 a!shared k:3@cluster ( k:1 ( t1 ) t0 t1 ) +t1 }"),
    "a merge where its frame goes on": (6, "scaled_max", "p { j/2@grid j:11~2 ( t1 t5 ) } q { i:3 ( +t1 j:2 ( t1 +t5 ) ) }"),
    "a merge where it goes on itself": (6, "masked products", "p { l/4@grid m:3 l:3~2 ( t10 t14 ) } q { l:3~2 ( +t14 t10 t14 ) }"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_since(name):
    """Trees that were lowered to something else."""
    rule, program, text = REFUSED[name]
    subject = SUBJECTS[program]
    for tiles in TILES.values():
        found = lower_tree(subject.region, parse(text), FoldsOnDemand(subject.region), tiles)
        assert isinstance(found, Refusal)
        assert found.reason.startswith(f"rule {rule} ("), found
