"""Snapshots of programs: Blockbuster's examples step by step, and others; each computes what the program does."""

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.schedule_regions import (
    Operators,
    block_attention,
    block_norm_gated,
    block_norm_product,
    chain,
    gated,
    low_rank,
    traced,
    two_passes,
)
from pallasfuse.device import assumed
from pallasfuse.errors import InvalidProgramError, Refusal
from pallasfuse.fusion.demand import FoldsOnDemand
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.expr import add, apply, mul
from pallasfuse.ir.loop_program import LoopProgram
from pallasfuse.ir.region import region_of_program
from pallasfuse.ir.tree import Keep, RangeLoop, walk
from pallasfuse.jaxpr_frontend.conversion import convert
from pallasfuse.schedule.block_program import problem, recomputed, with_maps_inlined
from pallasfuse.schedule.model import Model
from pallasfuse.schedule.placement import place
from pallasfuse.schedule.rule import Legality
from pallasfuse.schedule.rules import RULES
from pallasfuse.schedule.snapshots import snapshots, snapshots_of_program
from pallasfuse.schedule.space import tiled
from pallasfuse.tiling.tree_values import Tiles
from pallasfuse.tiling.trees import lower_tree
from tests.programs_by_name import PROGRAMS as SMALL
from tests.programs_by_name import program, random_inputs
from tests.schedule.evaluate_trees import evaluate_trees
from tests.schedule.regions import random_region

EXAMPLES = {
    "attention": block_attention(48, 32, 16, 64),
    "norm + product": block_norm_product(48, 32, 64),
    "norm + gated": block_norm_gated(48, 32, 16, 64),
}


def normalized(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def centred_product(x, y):
    c = x - x.mean(-1, keepdims=True)
    return c * jax.lax.rsqrt((c * c).mean(-1, keepdims=True) + 1e-5) @ y


def expected_log(x, w):
    """An expectation under a softmax of logits, and its logarithm: an invention."""
    z = x @ w
    p = jax.nn.softmax(z, -1)
    return (p * jnp.tanh(z)).sum(-1), jax.nn.logsumexp(z, -1)


PROGRAMS = EXAMPLES | {
    "stable attention": traced(lambda q, k, v: jax.nn.softmax(q @ k.T * 0.1, -1) @ v, (32, 16), (48, 16), (48, 32)),
    "normalized queries": traced(
        lambda q, k, v: jax.nn.softmax(normalized(q) @ normalized(k).T, -1) @ v, (32, 16), (48, 16), (48, 32)
    ),
    "centred product": traced(centred_product, (32, 48), (48, 16)),
    "chain": chain(32, 16, 48, 64),
    "low rank": low_rank(32, 48, 16, 64),
    "gated": gated(32, 48, 64),
    "gated with a third": traced(
        lambda x, w, v, u: jax.nn.silu(x @ w) * (x @ v) @ u, (32, 16), (16, 48), (16, 48), (48, 64)
    ),
    "two passes": two_passes(32, 48, 16),
    "variance": traced(lambda x: ((x - x.mean(-1, keepdims=True)) ** 2).mean(-1), (32, 48)),
    "expected logarithm": traced(expected_log, (32, 16), (16, 48)),
}


def inputs_of(region):
    rng = np.random.default_rng(0)
    return {t.name: rng.standard_normal([a.extent for a in t.axes]) for t in region.inputs}


def wanted(region, inputs):
    values = evaluate(LoopProgram(region.inputs, region.nests, region.outputs), inputs)
    return {name: values[name] for name in region.outputs}


def reads_unfinished(snapshot):
    fold = snapshot.legality.may_fold(snapshot.program.region)
    placed = [place(k.region, k.tree, fold) for k in snapshot.kernels]
    return any(s.unfinished for p in placed for s in p.statements)


# --- what the paper has


@pytest.mark.parametrize(
    ("name", "counts", "lines"),
    [
        ("attention", [{1: 10, 3: 3, 4: 1, 9: 1}, {1: 11, 3: 3, 4: 1, 6: 1, 9: 1}], 14),
        # the paper's listing has the square and its sum on one line here, and on two in its third example
        (
            "norm + product",
            [{1: 12, 2: 2, 3: 4, 4: 1, 5: 1}, {1: 12, 2: 3, 3: 4, 4: 1, 5: 1, 6: 1}],
            15 + 1,
        ),
        (
            "norm + gated",
            [
                {1: 14, 2: 1, 3: 4, 4: 2, 8: 1},
                {1: 15, 2: 1, 3: 4, 4: 2, 6: 1, 8: 1},
                {1: 15, 2: 2, 3: 4, 4: 2, 6: 2, 8: 1},
            ],
            19,
        ),
    ],
)
def test_the_examples_take_the_steps_of_the_paper(name, counts, lines):
    found = snapshots(EXAMPLES[name], stable=False)
    assert [s.counts for s in found] == counts
    assert sum(counts[-1].values()) == {"attention": 17, "norm + product": 22, "norm + gated": 26}[name]
    assert len(found.last.lines) == lines
    assert len(found.last.kernels) == 1
    assert not found.refused


def test_the_last_form_of_the_first_example():
    assert (
        str(snapshots(EXAMPLES["attention"], stable=False).last)
        == """\
forall m:
  forall l:
    for n:
      for d:
        load q[m, d]
        load k[n, d]
        s[m, n] += q[m, d] * k[n, d]
      e[m, n] = exp(s[m, n] * 0.25)
      z[m] += e[m, n]
      load v[n, l]
      o_unscaled[m, l] += e[m, n] * v[n, l]
    r[m] = 1 / z[m]
    o[m, l] = o_unscaled[m, l] * r[m]
    store o[m, l]"""
    )


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("attention", {"l": {"s", "e", "z", "r"}}),
        (
            "norm + product",
            {"n": {"s", "square", "squares", "mean", "r"}, "m": {"z_unscaled_factors"}},
        ),
        (
            "norm + gated",
            {"nk": {"square", "squares", "r"}, "n": {"f_unscaled", "g_unscaled", "f", "g", "h", "a"}},
        ),
    ],
)
def test_what_an_extension_computes_again(name, again):
    found: dict[str, set[str]] = {}
    for nest, axes in snapshots(EXAMPLES[name], stable=False).last.recomputed.items():
        found.setdefault("".join(axes), set()).add(nest)
    assert found == again


MULTIPLES = {
    "attention": {"q": "ln", "k": "ml", "v": "m", "o": ""},
    "norm + product": {"x": "n", "y": "m", "z": ""},
    "norm + gated": {"x": "nk", "w": "mn", "v": "mn", "u": "m", "o": ""},
}
"""The axes in whose blocks the last forms load and store each tensor again (Blockbuster, section 5)."""


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_last_forms_move_what_the_paper_says(name):
    """By evaluation of the kernels that they are lowered to, at two numbers of blocks along each axis; the model agrees."""
    region = EXAMPLES[name]
    last = snapshots(region, stable=False).last
    kernel = with_maps_inlined(last.kernels[0])
    fold = last.legality.may_fold(last.program.region)
    inputs = inputs_of(region)
    want = wanted(region, inputs)
    whole = {a.name: a.extent for a in region.axes.values()}
    for axis in region.axes:
        for count in (2, 4):
            sizes = {a: extent // (count if a == axis else 2) for a, extent in whole.items()}
            tree = tiled(kernel.region, kernel.tree, sizes, fold)
            programs = lower_tree(kernel.region, (tree,), FoldsOnDemand(kernel.region), Tiles("exact"))
            assert not isinstance(programs, Refusal), programs
            moved: Counter[str] = Counter()
            have = evaluate_tiles(programs[0], inputs, moved=moved)
            blocks = {a: whole[a] // sizes[a] for a in whole}
            size = {t.name: prod(a.extent for a in t.axes) for t in (*region.inputs, *map(region.by_name.get, want))}
            by_paper = {t: size[t] * prod(blocks[a] for a in axes) for t, axes in MULTIPLES[name].items()}
            assert dict(moved) == by_paper
            (listed,) = last.kernels
            placement = place(listed.region, tiled(listed.region, listed.tree, sizes, fold), fold)
            by_model = Model(listed.region, assumed("gpu")).estimate(placement).moved
            assert {n: b / 4 for n, b in by_model.items()} == by_paper
            for n, value in want.items():
                np.testing.assert_allclose(have[n], value, rtol=1e-9)


# --- the conditions of rules


def test_a_shift_that_may_cancel_stays_in_its_product():
    found = snapshots(EXAMPLES["norm + product"])
    assert 5 not in found.last.counts
    (reason,) = found.refused
    assert reason.startswith("R5 (move a shift past a sum) at z_unscaled: mean[m] is not bounded: without a frame")


def test_a_bounded_shift_leaves_its_product():
    m, k, n = (Axis(name, 32) for name in "mkn")
    on = Operators()
    p = on.map("p", (m, k), add(on.input("x", m, k), apply("tanh", on.input("c", m))))
    on.sum("y", (m, n), k, mul(p, on.input("w", k, n)))
    found = snapshots(on.region("y"))
    assert found.last.counts[5] == 1
    assert {n.name: {a.name for a in n.axes} for n in found.last.program.region.nests}["y_factors"] == {"n"}


def test_the_scales_of_keys_move_to_the_scores():
    """They have an axis that the queries lack: nothing is shared by all keys."""
    m, n, d, l = (Axis(name, 32) for name in "mndl")  # noqa: E741
    on = Operators()
    q, k, v = on.input("q", m, d), on.input("k", n, d), on.input("v", n, l)
    squares = on.sum("squares", (n,), d, mul(k, k))
    c = on.map("c", (n,), apply("rsqrt", squares))
    s = on.sum("s", (m, n), d, mul(q, on.map("p", (n, d), mul(k, c))))
    on.sum("o", (m, l), n, mul(on.map("e", (m, n), apply("tanh", s)), v))
    region = on.region("o")
    found = snapshots(region)
    nests = found.last.program.region.by_name
    assert "p" not in nests
    assert str(nests["s_unscaled"].body) == "q[m, d] * k[n, d]"
    assert str(nests["s"].body) == "s_unscaled[m, n] * c[n]"
    inputs = inputs_of(region)
    sizes = {a.name: 16 for a in region.axes.values()}
    have = evaluate_trees(found.last.program.region, found.last.program.body, inputs, sizes)
    np.testing.assert_allclose(have["o"], wanted(region, inputs)["o"], rtol=1e-9)


def test_an_extension_says_how_often_it_computes_again():
    device = assumed("gpu")
    region = block_attention(256, 256, 64, 512)
    first, last = snapshots(region)
    assert first.recompute_factors(device) == {}
    (tree,) = last.tiled(device)
    sizes = {n.axis: n.size for _, n in walk(tree.tree.body) if isinstance(n, RangeLoop)}
    assert last.recompute_factors(device) == {("l",): 512 // sizes["l"]}
    assert [a.again for a in last.applications if a.rule == 6] == [("l",)]


def test_a_whole_program_has_snapshots():
    program = convert(jax.make_jaxpr(centred_product)(jnp.ones((32, 48)), jnp.ones((48, 16)))).program
    found = snapshots_of_program(program)
    assert len(found.last.kernels) == 1
    assert found.last.counts[6] == 1


def test_what_xla_computes_has_none():
    program = convert(jax.make_jaxpr(lambda x: jnp.sort(x).sum(-1))(jnp.ones((32, 48)))).program
    with pytest.raises(InvalidProgramError, match="reads"):
        snapshots_of_program(program)


# --- all programs


@pytest.mark.sampled(4, cover=("stable",))
@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_snapshots_are_legal_and_compute_what_the_program_does(name, stable):
    region = PROGRAMS[name]
    assert check(region, inputs_of(region), {a.name: 16 for a in region.axes.values()}, stable=stable) >= 2


@pytest.mark.parametrize("seed", range(4))
def test_snapshots_of_random_contractions(seed):
    region = random_region(seed, (16, 32, 48))
    assert check(region, inputs_of(region), {a.name: 16 for a in region.axes.values()}) >= 2


@pytest.mark.sampled(15, cover=())
@pytest.mark.parametrize("maps", ["inlined", "kept"])
@pytest.mark.parametrize("name", SMALL)
def test_snapshots_of_small_programs(name, maps):
    """With masks, integers, several results; of extents that no tile divides."""
    of = program(name)
    kept = frozenset(n.name for n in of.nests) if maps == "kept" else frozenset()
    if maps == "kept" and name == "distances":
        pytest.skip("a nest reads another at other positions than its own: it is no region")
    region = region_of_program(of, Graph(of).inlined(kept), kept)
    sizes = {a.name: -(-a.extent // 2) if maps == "kept" else 1 for a in region.axes.values()}
    check(region, random_inputs(of), sizes)


def check(region, inputs, sizes, *, stable=True):
    """Compares each snapshot with the program; returns the number of those that can be evaluated."""
    want = wanted(region, inputs)
    found = snapshots(region, stable=stable)
    compared = 0
    for snapshot in (found.unfused, *found):
        fold = snapshot.legality.may_fold(snapshot.program.region)
        assert problem(snapshot.program, fold) is None
        if not reads_unfinished(snapshot):
            have = evaluate_trees(snapshot.program.region, snapshot.program.body, inputs, sizes)
        else:
            have = lowered_and_run(snapshot, inputs, sizes)
            if have is None:  # buffers of what a kernel computes are not lowered yet
                continue
        compared += 1
        for n, value in want.items():
            np.testing.assert_allclose(have[n], value, rtol=1e-6, atol=1e-8, err_msg=str(snapshot))
    return compared


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", EXAMPLES)
def test_peeling_instead_of_extending(name):
    """Rule 7 computes nothing twice: the other trips read what the first one has stored."""
    region = EXAMPLES[name]
    inputs = inputs_of(region)
    program = snapshots(region, stable=False).found[0].program
    legality = Legality(stable=False)
    sites = [s for path in ((), (0,)) for s in RULES[7].sites(program, path)]
    peeled = [p for p in (RULES[7].apply(program, s, legality) for s in sites) if not isinstance(p, Refusal)]
    assert peeled
    for after in peeled:
        assert dict(recomputed(after)) == dict(recomputed(program))
        have = evaluate_trees(after.region, after.body, inputs, {a: 16 for a in region.axes})
        for n, value in wanted(region, inputs).items():
            np.testing.assert_allclose(have[n], value, rtol=1e-9)


def test_the_first_form_of_the_third_example_reads_what_it_has_stored_as_often_as_there_are_blocks():
    region = EXAMPLES["norm + gated"]
    first = snapshots(region, stable=False).found[0]
    (kernel,) = first.kernels
    model = Model(kernel.region, assumed("gpu"))
    for count in (2, 4):
        sizes = {a.name: a.extent // (count if a.name == "n" else 2) for a in region.axes.values()}
        placement = place(kernel.region, tiled(kernel.region, kernel.tree, sizes))
        assert model.estimate(placement).moved["a"] == (1 + count) * 48 * 16 * 4


def lowered_and_run(snapshot, inputs, sizes):
    """Returns the results of a snapshot by its tile programs; None where a kernel reads what it keeps in global memory."""
    fold = snapshot.legality.may_fold(snapshot.program.region)
    known = dict(inputs)
    for kernel in map(with_maps_inlined, snapshot.kernels):
        if any(isinstance(n, Keep) for _, n in walk(kernel.tree.body)):
            return None
        tree = tiled(kernel.region, kernel.tree, sizes, fold)
        programs = lower_tree(kernel.region, (tree,), FoldsOnDemand(kernel.region), Tiles("exact"))
        assert not isinstance(programs, Refusal), f"{tree}: {programs}"
        known |= evaluate_tiles(programs[0], known)
    return known


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_snapshot_has_a_price(name):
    found = snapshots(PROGRAMS[name])
    device = assumed("gpu")
    prices = [s.us(device) for s in (found.unfused, *found)]
    assert all(0 < us < float("inf") for us in prices)
    shown = found.show(device)
    assert f"snapshot {len(found.found)}: " in shown and "unfused: " in shown


def test_fusion_makes_fewer_kernels_than_there_are_nests():
    for name, region in PROGRAMS.items():
        found = snapshots(region)
        assert len(found.last.kernels) < max(2, len(found.unfused.kernels)), name
