"""Trees of schedules of one rolled axis lower to the kernels that these schedules have, up to the order of statements."""

import re
from dataclasses import replace

import pytest

from pallasfuse.errors import Refusal
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


def lines(programs):
    """What a kernel says, without the order of what does not depend on each other."""
    text = "\n".join(re.sub(r"\.(all|value)\b", "", str(p)) for p in programs)
    return sorted(line for line in text.splitlines() if not re.fullmatch(r" *(\w+)\[.*\] = \1\[.*\]", line))


@pytest.mark.parametrize("target", [XLA_CPU, TRITON], ids=lambda t: t.name)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_flat_schedule_is_a_tree(name, target):
    loops = program(name)
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in loops.definitions()}
    for found in group(loops, FREE).groups:
        folds = {f.name: f for f in found.folds}
        listed = choose(found, target)[0]
        for schedule in (listed, replace(listed, rolled_tile=4), replace(listed, rolled_tile=4, parts=2)):
            if schedule.trips == 1 and any(f.refined is not None for f in found.folds):
                continue  # a single tile of a tree computes as the program says
            tree = tree_of(found, schedule)
            assert parse(show(tree)) == tree
            new = lower_tree(
                region_of_group(found, tensors), tree, lambda nest, axis, unfinished, folds=folds: folds[nest.name],
                Tiles(target.tails, target.smallest_dot, target.tile_multiple), strict=found.strict,
            )  # fmt: skip
            assert not isinstance(new, Refusal), (new, show(tree))
            assert lines(new) == lines(lower_for(target, found, schedule, tensors)), show(tree)
