"""Kernels that a search over trees finds: right, in the order of their prices, and tried by tuning."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import searched as searching
from pallasfuse.fusion import product_regions
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.region import region_of_group
from pallasfuse.ir.tensors import Tensor
from pallasfuse.pallas_backend import interpret
from pallasfuse.phases import is_misformed
from pallasfuse.pipeline import ways
from pallasfuse.price.kernel import price_kernel
from pallasfuse.proof import PlannedKernel, prove
from pallasfuse.schedule.model import Model
from pallasfuse.searched import launched, placed_by_tree, searched
from pallasfuse.targets import TRITON, XLA_CPU


def chain(a, b, d):
    return (a @ b) @ d


def attend(q, k, v):
    return jax.nn.softmax((q @ k.T).astype(jnp.float32), axis=-1).astype(q.dtype) @ v


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


PROGRAMS = {
    "chain": (chain, ((64, 32), (32, 128), (128, 64))),
    "chain of odd sizes": (chain, ((60, 32), (32, 100), (100, 48))),
    "attention": (attend, ((48, 32), (96, 32), (96, 64))),
}


MISFORMED = ("chain", "chain of odd sizes", "attention")
"""Programs with trees that keep parts of a value from one loop to the next, for which Triton has no registers."""


def planned(function, shapes, dtype="float16", target="triton", **options):
    avals = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    return pf.fuse(function, options=pf.FuseOptions(**options)).trace(*avals).fuse(target).tile().plan


def kernel_of(function, shapes, dtype="float16"):
    """The one kernel of a function, and the tensors of its program."""
    plan = planned(function, shapes, dtype, price=False)
    (kernel,) = plan.kernels
    return kernel, {d.name: Tensor(d.name, d.axes, d.dtype) for d in plan.program.definitions()}


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_found_computes_what_the_function_does(name):
    function, shapes = PROGRAMS[name]
    kernel, tensors = kernel_of(function, shapes, "float32")
    found = searched(kernel.group, TRITON, tensors)
    assert len(found) > 2
    assert [us for us, _ in found] == sorted(us for us, _ in found)
    assert len({str(p.schedule) for _, p in found}) == len(found)
    rng = np.random.default_rng(0)
    arrays = {
        n: jnp.asarray(rng.normal(size=[a.extent for a in tensors[n].axes]), jnp.float32) for n in kernel.group.inputs
    }
    want = function(*arrays.values())
    (output,) = (n.name for n in kernel.group.outputs)
    for us, placed in found[:: max(1, len(found) // 4)]:
        assert us == price_kernel([(p.program, p.target) for p in placed.phases]).us
        have = dict(arrays)
        for phase in placed.phases:
            have |= interpret.run(phase.program, have)
        np.testing.assert_allclose(have[output].reshape(want.shape), want, rtol=2e-3, atol=2e-3)


def test_a_tree_with_other_warps_and_slots_is_the_same_program():
    kernel, tensors = kernel_of(*PROGRAMS["attention"])
    region = region_of_group(kernel.group, tensors)
    trees = [placed.schedule.tree for _, placed in searched(kernel.group, TRITON, tensors)]
    changed = [tuple(launched(k, warps, slots) for k in tree) for tree in trees for warps in (4, 8) for slots in (1, 3)]
    lowered, folds = {}, FoldsOnDemand(region)
    for tree in changed:
        alone = placed_by_tree(kernel.group, tree, TRITON, FoldsOnDemand(region))
        assert placed_by_tree(kernel.group, tree, TRITON, folds, lowered) == alone
    assert len(lowered) < len(set(changed)) / 2


def test_nothing_is_searched_where_it_does_not_help(monkeypatch):
    kernel, tensors = kernel_of(*PROGRAMS["attention"])
    assert searched(kernel.group, XLA_CPU, tensors) == []
    for limit in ("_MOST_NESTS", "_MOST_TREES"):
        with monkeypatch.context() as patched:
            patched.setattr(searching, limit, 2)
            assert searched(kernel.group, TRITON, tensors) == []
    rows, of_rows = kernel_of(softmax, ((64, 128),))
    assert searched(rows.group, TRITON, of_rows) == []


def test_no_tree_is_made_where_none_can_be_as_fast_as_is_asked(monkeypatch):
    kernel, tensors = kernel_of(*PROGRAMS["attention"])
    least_us = Model(region_of_group(kernel.group, tensors), TRITON.device).bound_us()
    assert least_us <= min(us for us, _ in searched(kernel.group, TRITON, tensors))
    monkeypatch.setattr(searching, "_space", None)  # what makes the trees
    assert searched(kernel.group, TRITON, tensors, searching.Patience(0.1 * least_us)) == []


def test_tuning_tries_the_trees_that_are_predicted_to_be_faster():
    plan = planned(attend, ((256, 64), (256, 64), (256, 64)))
    (kernel,) = plan.kernels
    first, *listed = ways(plan, kernel)
    assert not any(p.schedule.tree for p in listed)  # nothing is searched where a kernel that fails is replaced
    trees = list(ways(plan, kernel, searched=True))
    first_us = price_kernel([(p.program, p.target) for p in first.phases]).us
    assert 0 < len(trees) <= 4
    assert all(price_kernel([(p.program, p.target) for p in t.phases]).us < first_us for t in trees)
    assert all(p.schedule.tree for p in trees)
    proof = prove(plan.converted, [PlannedKernel(kernel.group, trees[0].schedule, trees[0].phases)], delta=1e-4)
    assert proof.holds


def test_trees_whose_first_tiles_do_not_fit_are_searched():
    """By the model, the best tiles hold whole columns; those of this chain fit only in a loop over what the second product sums."""
    shapes = (8, 1024, 128), (8, 128, 1024), (8, 1024, 128)
    program = pf.fuse(chain).trace(*(jax.ShapeDtypeStruct(s, "float16") for s in shapes)).converted.program
    both = max(product_regions.candidates(Graph(program), TRITON), key=lambda c: len(c.group.inner)).group
    assert len(both.inner) == 2
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in program.definitions()}
    (us, best), *others = searched(both, TRITON, tensors)
    assert f"( {' '.join(n.name for n in both.inner)} )" in str(best.schedule), "both products in one loop"
    assert all(other >= us for other, _ in others)


def test_tiles_are_left_out_only_where_smaller_ones_are_too_large(monkeypatch):
    """A small tile may fail for other reasons, as that a product of it has no matrix units: larger ones may run."""
    shapes = (512, 256), (256, 512), (512, 256)
    program = pf.fuse(chain).trace(*(jax.ShapeDtypeStruct(s, "float16") for s in shapes)).converted.program
    group = min(product_regions.candidates(Graph(program), TRITON), key=lambda c: len(c.group.inner)).group
    region = region_of_group(group, {d.name: Tensor(d.name, d.axes, d.dtype) for d in program.definitions()})
    space = searching._space(region, searching._choices(region), strict=False)
    tried = searching._Tried(group, TRITON, space, FoldsOnDemand(region))
    small, large = (
        searching.Point(
            searching.Candidate(0, tuple(pick(s for s in sizes if s <= 128) for sizes in space.choices.values()))
        )
        for pick in (min, max)
    )
    monkeypatch.setattr(searching._Tried, "us", lambda self, point: 1.0 if point is large else float("inf"))
    monkeypatch.setattr(searching._Tried, "_is_too_large", lambda self, point: False)
    assert tried.running([small, large]) == [large]
    monkeypatch.setattr(searching._Tried, "_is_too_large", lambda self, point: True)
    assert tried.running([small, large]) == []


def test_tiles_that_fill_the_registers_of_few_warps_are_tried_with_more():
    """The model of a space knows no registers: the sums of its best tiles do not fit four warps: every trip would read them."""

    def added(h, w, x):
        return jnp.exp(x) + jnp.dot(h, w, preferred_element_type=jnp.float32).astype(x.dtype)

    (kernel,) = planned(added, ((4096, 64), (64, 1024), (4096, 1024)), "bfloat16", "mosaic_gpu", price=True).kernels
    assert kernel.price.us < 0.7 * kernel.replaced.us


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_trees_with_the_same_loops_are_misformed_with_all_tiles_or_with_none(name):
    """So that one of them says it for the others, which are not lowered."""
    function, shapes = PROGRAMS[name]
    kernel, tensors = kernel_of(function, [tuple(4 * n for n in s) for s in shapes])
    region = region_of_group(kernel.group, tensors)
    space = searching._space(region, searching._choices(region), strict=False)
    folds, verdicts = FoldsOnDemand(region), {}
    for candidate in random.Random(0).sample(list(space), 120):
        tree = (launched(replace(space.tree(candidate), name=kernel.name), 4, 1),)
        phases = searching.phases_of_tree(kernel.group, tree, TRITON, folds, {})
        if phases is not None:
            verdicts.setdefault(searching._loops(tree), []).append(is_misformed(phases))
    assert all(len(set(found)) == 1 for found in verdicts.values())
    assert any(len(found) > 2 for found in verdicts.values())
    assert {found[0] for found in verdicts.values()} == ({True, False} if name in MISFORMED else {False})


def test_loops_of_misformed_trees_are_lowered_once(monkeypatch):
    function, shapes = PROGRAMS["attention"]
    kernel, tensors = kernel_of(function, [tuple(4 * n for n in s) for s in shapes])
    every = searched(kernel.group, TRITON, tensors)
    lowered = []
    original = searching.phases_of_tree

    def counting(group, tree, *args):
        phases = original(group, tree, *args)
        if phases is not None:
            lowered.append(searching._loops(tree))
        return phases

    monkeypatch.setattr(searching, "phases_of_tree", counting)
    monkeypatch.setattr(searching, "is_misformed", lambda phases: True)
    searched(kernel.group, TRITON, tensors)
    assert len(lowered) == len(set(lowered)) > 0 and every


def test_few_rows_are_loaded_several_trips_ahead(monkeypatch):
    """A trip of a product of few rows waits for memory: of one to six slots those are best that hide that (`few_rows.py`)."""
    shapes = (16, 4096), (4096, 4096), (4096, 4096)
    avals = [jax.ShapeDtypeStruct(s, "float16") for s in shapes]
    program = pf.fuse(lambda x, w, v: jax.nn.silu(x @ w) * (x @ v)).trace(*avals).converted.program
    both = max(product_regions.candidates(Graph(program), TRITON), key=lambda c: len(c.group.inner)).group
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in program.definitions()}
    us, best = searched(both, TRITON, tensors)[0]
    assert best.phases[0].program.stages in (4, 6)
    monkeypatch.setattr(searching, "SLOTS", (1, 3))
    assert searched(both, TRITON, tensors)[0][0] > us
