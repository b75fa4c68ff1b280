"""Every group, run by its folds over random parts at random frames, equals the loop program in float64."""

import numpy as np
import pytest

from tests.fusion.group_interpreter import GroupRun
from tests.programs_by_name import PROGRAMS, close, grouping, program, values


@pytest.mark.sampled(4)
@pytest.mark.parametrize("split", [False, True], ids=["rolling", "split"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_groups_equal_the_program(name, split):
    want = values(name)
    for seed in range(4):
        known = dict(want)
        for group in grouping(name).groups:
            with np.errstate(all="ignore"):
                got = GroupRun(group, known, np.random.default_rng(seed)).run(split=split)
            for tensor, value in got.items():
                close(value, want[tensor], message=f"{name}: {tensor}")


REFINED = ["variance", "layer_norm", "layer_norm_dot", "fourth_moment", "group_norm"]


@pytest.mark.parametrize("name", REFINED)
def test_refined_folds_correct_the_rounding_of_their_frame(name):
    want = values(name)
    (group,) = grouping(name).groups
    assert any(f.refined is not None for f in group.folds)
    got = GroupRun(group, want, np.random.default_rng(0), frame_error=1e-3).run(split=False)
    for tensor, value in got.items():
        close(value, want[tensor], message=tensor)


@pytest.mark.parametrize("name", PROGRAMS)
def test_groups_make_every_output_and_nothing_twice(name):
    groups = grouping(name).groups
    stored = [n.name for g in groups for n in g.outputs]
    assert len(stored) == len(set(stored))
    assert set(program(name).outputs) <= set(stored)
    inside = [f.name for g in groups for f in g.folds]
    assert len(inside) == len(set(inside))


@pytest.mark.parametrize("name", PROGRAMS)
def test_groups_come_after_those_they_read(name):
    made = {t.name for t in program(name).inputs}
    for group in grouping(name).groups:
        assert set(group.inputs) <= made
        made |= {n.name for n in group.outputs}


@pytest.mark.parametrize("name", PROGRAMS)
def test_reads_are_inputs_or_values_inside(name):
    for group in grouping(name).groups:
        inside = {f.name for f in group.folds} | {n.name for n in group.inner}
        bodies = [*(f.nest for f in group.folds), *group.inner, *group.outputs]
        assert frozenset().union(*(b.reads for b in bodies)) - inside == set(group.inputs)
        order = {f.name: (f.pass_index, n) for n, f in enumerate(group.folds)}
        for fold in group.folds:
            for other in fold.nest.reads & order.keys():
                assert order[other] < order[fold.name]
