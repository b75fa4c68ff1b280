"""Groups run by the definition of their folds, against the nests that they replace."""

from dataclasses import replace

import pytest

from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.evaluate import evaluate_nest
from pallasfuse.ir.expr import Read, apply, postorder, read, substitute
from pallasfuse.ir.fold import OLD
from pallasfuse.ir.loop_program import Nest
from pallasfuse.verification.compare import Comparison
from pallasfuse.verification.folds import GroupRun, random_frame
from tests.programs_by_name import only_group, program
from tests.verification.values import TRIALS, finite_fields

pytestmark = pytest.mark.any_jax

NAMES = ["softmax", "attention", "causal", "variance", "norm_dot", "quantized", "entropy", "fourth_moment"]


def tensors(name, fields):
    """Random inputs (squares where the sign is a fact) and every tensor of the program."""
    loops = program(name)
    signs = Graph(loops).signs
    known = {}
    for t in loops.inputs:
        value = fields.random([a.extent for a in t.axes], t.dtype)
        known[t.name] = fields.squares(value) if signs.get(t.name) == "positive" else value
    for nest in loops.nests:
        assert isinstance(nest, Nest)
        known[nest.name] = evaluate_nest(nest, known, fields).typed(nest.dtype)
    return known


def mismatches(group, name, *, split, seed=0):
    fields = finite_fields(3, TRIALS, seed)
    known = tensors(name, fields)
    found = {}
    for tensor, value in GroupRun(group, known, fields, split=split).run():
        comparison = found[tensor] = Comparison()
        comparison.add(known[tensor], value, TRIALS)
    return {n: c.mismatch for n, c in found.items() if c.mismatch is not None}


@pytest.mark.sampled(2, cover=("split",))
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_folds_are_the_reductions_that_they_replace(name, split):
    for seed in range(2):  # other cuts, another order of the positions, other frames
        assert not mismatches(only_group(name), name, split=split, seed=seed)


def spoiled(group, change):
    """The group with the update of its first repaired accumulator changed."""
    target = next(f for f in group.folds if any(a.update is not None for a in f.accumulators))
    first = next(a for a in target.accumulators if a.update is not None)
    accumulators = tuple(replace(a, update=change(a.update, target)) if a is first else a for a in target.accumulators)
    broken = replace(target, accumulators=accumulators)
    return replace(group, folds=tuple(broken if f is target else f for f in group.folds)), target.name


def without_update(update, fold):
    return None


def negated(update, fold):
    return apply("neg", update, dtype=update.dtype)


def swapped_frames(update, fold):
    """The repair from the new frame to the old one."""
    names = {f.name for f in fold.frames}
    return substitute(update, {
        n: read(n.tensor.removesuffix(OLD) if n.tensor.endswith(OLD) else n.tensor + OLD, n.indices, n.dtype)
        for n in postorder(update) if isinstance(n, Read) and n.tensor.removesuffix(OLD) in names
    })  # fmt: skip


@pytest.mark.parametrize("change", [without_update, negated, swapped_frames])
@pytest.mark.parametrize("name", ["softmax", "variance", "attention"])
def test_a_wrong_repair_is_noticed(name, change):
    group, fold = spoiled(only_group(name), change)
    assert fold in mismatches(group, name, split=False) or fold in mismatches(group, name, split=True)


def test_a_wrong_finish_is_noticed():
    group = only_group("softmax")
    last = group.folds[-1]
    wrong = replace(last, finish=apply("neg", last.finish, dtype=last.finish.dtype))
    found = mismatches(replace(group, folds=(*group.folds[:-1], wrong)), "softmax", split=False)
    assert last.name in found


def test_a_term_at_the_wrong_frame_is_noticed():
    """The frame is another value than the one that the term is finished at."""
    group = only_group("softmax")
    fold = next(f for f in group.folds if f.frames)
    shifted = tuple(replace(f, value=apply("neg", f.value, dtype=f.value.dtype)) for f in fold.frames)
    wrong = replace(group, folds=tuple(replace(f, frames=shifted) if f is fold else f for f in group.folds))
    assert fold.name in mismatches(wrong, "softmax", split=False)


def test_random_frames_are_positive_where_the_repair_relies_on_it():
    fields = finite_fields(2)
    group = only_group("quantized")
    frames = [f for fold in group.folds for f in fold.frames]
    for frame in frames:
        value = random_frame(frame, fields)
        assert value.shape == tuple(a.extent for a in frame.axes)
        assert (fields.sign(random_frame(replace(frame, positive=True), fields)) == 1).all()
        assert (fields.sign(random_frame(replace(frame, positive=False), fields)) == -1).any()
