"""States of pieces, with every target's tiles, in float64: made, merged in any grouping, and finished."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.targets import TARGETS
from pallasfuse.tiling import arithmetic, states
from pallasfuse.tiling.choose import choose
from tests.programs_by_name import close, only_group, program, tensors_of, values

NAMES = ["attention", "causal", "empty_rows", "variance", "log_sum_exp", "entropy", "picked", "norm_dot", "layer_norm_dot",
         "batched_attention", "grouped_queries", "capped_with_bias", "one_query", "whole_array"]  # fmt: skip


def cut(name):
    """The group, its inputs' dimensions along the rolled axis, and the values of everything."""
    group, tensors, known = only_group(name), tensors_of(program(name)), values(name)
    given = {t: {d: a for d, a in enumerate(tensors[t].axes) if a == group.rolled} for t in group.inputs}
    return group, tensors, known, given


def state_of(name, target, start, stop, rolled_tile=None):
    group, tensors, known, given = cut(name)
    piece = states.localize(group, tensors, {group.rolled: stop - start}, given)
    schedule = choose(piece.group, target)[0]
    if rolled_tile is not None:
        schedule = replace(schedule, rolled_tile=rolled_tile, parts=2)
    local = arithmetic.rewrite_for(target, states.local(group, piece, schedule, target, inside=rolled_tile is not None))
    inputs = {}
    for t in local.inputs:
        if t.name == states.start_of(group.rolled):
            inputs[t.name] = np.array(start)
        else:
            at = tuple(slice(start, stop) if d in given[t.name] else slice(None) for d in range(len(t.axes)))
            inputs[t.name] = known[t.name][at]
    return evaluate_tiles(local, inputs)


def merged(name, parts):
    group, tensors, known, _ = cut(name)
    merge = states.merge(
        group, tensors, sum(next(iter(p.values())).shape[0] for p in parts)
    )  # the axis of parts comes first
    stacked = {}
    for t in merge.inputs:
        at = next((d for d, a in enumerate(t.axes) if a.name == f"{group.rolled.name}.part"), None)
        stacked[t.name] = known[t.name] if at is None else np.concatenate([p[t.name] for p in parts], at)
    found = evaluate_tiles(merge, stacked)
    for t in merge.inputs:
        at = next((d for d, a in enumerate(t.axes) if a.name == f"{group.rolled.name}.part"), None)
        if at is not None:
            found[t.name] = np.expand_dims(found.pop(states.merged_name(t.name)), at)
    return found


@pytest.mark.sampled(8, cover=("target",))
@pytest.mark.parametrize("target", [t for t in TARGETS.values() if not t.cluster], ids=lambda t: t.name)
@pytest.mark.parametrize("name", NAMES)
def test_states(name, target):
    group, tensors, known, _ = cut(name)
    n = group.rolled.extent
    cuts = (0, n // 3, n // 3 + 1, n)
    a, b, c = (state_of(name, target, *piece) for piece in pairwise(cuts))
    for state in (merged(name, [a, b, c]), merged(name, [c, merged(name, [b, a])])):
        finish = states.finish(group, tensors)
        have = evaluate_tiles(finish, {t.name: state.get(t.name, known.get(t.name)) for t in finish.inputs})
        for nest in group.outputs:
            close(have[nest.name], known[nest.name], tolerance=1e-9, message=name)


@pytest.mark.parametrize("name", ["attention", "causal", "log_sum_exp", "grouped_queries"])
def test_a_piece_in_parts(name):
    group, tensors, known, _ = cut(name)
    n = group.rolled.extent
    state = merged(
        name, [state_of(name, TARGETS["triton"], *piece, rolled_tile=2) for piece in [(0, n // 2), (n // 2, n)]]
    )
    finish = states.finish(group, tensors)
    have = evaluate_tiles(finish, {t.name: state.get(t.name, known.get(t.name)) for t in finish.inputs})
    for nest in group.outputs:
        close(have[nest.name], known[nest.name], message=name)


def test_positions_outside_of_the_axis_are_neutral():
    group, tensors, _, given = cut("attention")
    piece = states.localize(group, tensors, {group.rolled: 8}, given)
    target = TARGETS["xla"]
    schedule = choose(piece.group, target)[0]
    inside, checked = (states.local(group, piece, schedule, target, inside=i) for i in (True, False))
    assert states.start_of(group.rolled) in {t.name for t in checked.inputs}
    assert states.start_of(group.rolled) not in {t.name for t in inside.inputs}
