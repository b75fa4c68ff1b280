"""Schedules of one rolled axis are trees: what they print is what they run."""

from dataclasses import replace

import pytest

from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.grouping import group
from pallasfuse.ir.region import region_of_group
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tree import parse, show
from pallasfuse.targets import TRITON, XLA_CPU
from pallasfuse.tiling.choose import choose
from pallasfuse.tiling.flat import tree_of
from pallasfuse.tiling.lower import lower_for
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree
from tests.programs_by_name import FREE, PROGRAMS, program


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", [XLA_CPU, TRITON], ids=lambda t: t.name)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_tree_that_is_printed_derives_the_same_kernel(name, target):
    """Also from its text, with folds that are derived anew."""
    loops = program(name)
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in loops.definitions()}
    for found in group(loops, FREE).groups:
        listed = choose(found, target)[0]
        for schedule in (listed, replace(listed, rolled_tile=4), replace(listed, rolled_tile=4, parts=2)):
            tree = tree_of(found, schedule)
            assert parse(show(tree)) == tree
            region = region_of_group(found, tensors)
            tiles = Tiles(target.tails, target.smallest_dot, target.tile_multiple)
            new = lower_tree(
                region, parse(show(tree)), FoldsOnDemand(region, strict=found.strict), tiles, strict=found.strict
            )
            assert new == lower_for(target, found, schedule, tensors), show(tree)
