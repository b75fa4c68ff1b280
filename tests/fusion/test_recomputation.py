"""Values that kernels compute for themselves, though something else computes them, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.fusion import candidates, recomputation
from pallasfuse.fusion.candidate import Candidate
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.inline import deduplicate
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.targets import TRITON
from tests.fusion.group_interpreter import GroupRun
from tests.programs_by_name import close, program_of, random_inputs

ROWS, COLUMNS = (300, 5), (400, 5)


def along_both_axes(x, y):
    scores = x @ y.T
    return jax.nn.logsumexp(scores, 1), jax.nn.logsumexp(scores, 0)


def found(function, *shapes) -> tuple[Graph, list[Candidate]]:
    graph = Graph(deduplicate(program_of(function, *shapes)))
    axes = dict.fromkeys(a for n in graph.reductions() for a in n.reduced)
    return graph, [
        c
        for axis in axes
        for members in candidates.components(graph, axis)
        for c in candidates.candidates(graph, axis, members, TRITON, {})
    ]


def planned(function, *arguments):
    options = pf.FuseOptions(check=False, price=True)
    return pf.fuse(function, target="mosaic_gpu", options=options).explain(*arguments)


def test_both_kernels_of_scores_that_are_normalised_along_both_axes_may_compute_them():
    graph, all_of_them = found(along_both_axes, ROWS, COLUMNS)
    alone = [c for c in all_of_them if c.again and len(c.group.folds) == 2]
    (scores,) = frozenset.union(*(c.again for c in alone))
    assert {c.group.rolled.extent for c in alone} == {300, 400}
    inputs = random_inputs(graph.program)
    want = evaluate(graph.program, inputs)
    for candidate in alone:
        assert scores not in candidate.covers
        assert scores not in {n.name for n in candidate.group.outputs}
        got = GroupRun(candidate.group, want, np.random.default_rng(0)).run(split=False)
        assert got
        for name, value in got.items():
            close(value, want[name])


def test_scores_of_a_contrastive_loss_are_stored_by_nobody():
    def loss(x, y):
        scores = jnp.dot(x, y.T, preferred_element_type=jnp.float32)
        both = jax.nn.logsumexp(scores, 1) + jax.nn.logsumexp(scores, 0) - 2 * jnp.diagonal(scores)
        return both.mean()

    rows = jax.ShapeDtypeStruct((4096, 128), "bfloat16")
    plan = planned(loss, rows, rows)
    assert not {"dot_general", "gather", "cond"} & {f.operation for f in plan.fallbacks}
    assert sum("dot" in str(k.phases[0].program) for k in plan.kernels) == 2


# --- what tells two roundings apart


def largest(scores):
    """A number that the kernel of the rows' maxima hands out, by way of one more reduction."""
    return scores.max(1).max()


def largest_and(function):
    def both(x, y):
        scores = x @ y.T
        return jnp.sum(scores.max(1)), function(scores, largest(scores))

    return both


APART = {
    "compared": lambda s, m: (s == m).sum(0),
    "below": lambda s, m: (s < m).sum(0),
    "root": lambda s, m: jnp.sqrt(m - s).sum(0),
    "root of a map": lambda s, m: jnp.sqrt(2 * (m - s) + 0.5 * (m - s)).sum(0),
    "divided by": lambda s, m: (1 / (m - s)).sum(0),
    "rounded": lambda s, m: jnp.round(s / m).sum(0),
    "made integers": lambda s, m: (s * (127 / m)).astype(jnp.int8).sum(0),
    "made booleans": lambda s, m: (s - m).astype(bool).sum(0),
    "finite": lambda s, m: jnp.isfinite(jnp.exp((s - m) * 1e9 + 88.7)).sum(0),
    "angle": lambda s, m: jnp.arctan2(s - m, -1.0).sum(0),
    "sorted together": lambda s, m: jnp.sort(jnp.append(s.reshape(-1), m)),
    "place": lambda s, m: jnp.argmax(jnp.append(s.reshape(-1), m)),
    "chosen by": lambda s, m: jnp.where(s - m, s, 0).sum(0),
}


def returned(x, y):
    scores = x @ y.T
    return scores, scores.max(1)


def maxima(x, y):
    scores = x @ y.T
    return scores.max(1), scores.max(0)


def best_of_both(x, y):
    scores = x @ y.T
    return -2 * scores.max(1), jnp.where(scores.max(0) > 0, scores.max(0), 0)


REFUSED = [*(pytest.param(largest_and(f), id=name) for name, f in APART.items()), returned, maxima, best_of_both]


@pytest.mark.parametrize("function", REFUSED)
def test_nothing_tells_two_roundings_of_one_value_apart(monkeypatch, function):
    assert not any(c.again for c in found(function, ROWS, COLUMNS)[1])
    monkeypatch.setattr(recomputation, "_meet", lambda *_: False)
    assert any(c.again for c in found(function, ROWS, COLUMNS)[1]), "the kernel could not have been refused"


def of_each_alone(x, y):
    scores = x @ y.T
    return scores.max(1).sum() > 0, (scores > 0).sum(0)


SMOOTH = {
    "softmax": lambda s, m: jnp.exp(s - m).sum(0),
    "scaled": lambda s, m: (s / (1 + jnp.exp(m))).sum(0),
    "chosen": lambda s, m: jnp.where(jnp.arange(COLUMNS[0]) < 7, s - m, 0.0).sum(0),
}
ALLOWED = [*(pytest.param(largest_and(f), id=name) for name, f in SMOOTH.items()), of_each_alone, along_both_axes]


@pytest.mark.parametrize("function", ALLOWED)
def test_a_value_and_what_is_made_of_it_may_round_apart(function):
    assert any(c.again for c in found(function, ROWS, COLUMNS)[1])


# --- the choice


def both_ways(x, y):
    scores = jnp.dot(x, y.T, preferred_element_type=jnp.float32)
    return jax.nn.logsumexp(scores, 1), jax.nn.logsumexp(scores, 0)


def and_a_gradient(x, y):
    (rows, columns), pull = jax.vjp(both_ways, x, y)
    return pull((jnp.ones_like(rows), jnp.ones_like(columns)))


@pytest.mark.parametrize(("function", "stored"), [(both_ways, False), (and_a_gradient, True)])
def test_scores_are_stored_where_a_gradient_needs_them(function, stored):
    """A kernel reads them then, and the other one still computes them by itself: that takes less time than to read them."""
    rows = jax.ShapeDtypeStruct((8192, 256), "bfloat16")
    plan = planned(function, rows, rows)
    assert len(plan.kernels) == 2
    assert sum(not k.group.inner for k in plan.kernels) == stored
    assert any(f.operation == "dot_general" for f in plan.fallbacks) == stored


def scaled_by_a_number(x, y, a, b):
    """A scale that all rows share is a reduction to one number."""
    return jax.nn.softmax(x * jnp.exp(jnp.sum(a * b)), 1) @ y


def test_a_number_for_all_blocks_may_be_given_to_a_kernel():
    graph, all_of_them = found(scaled_by_a_number, (30, 400), (400, 8), (5,), (5,))
    whole = [c for c in all_of_them if len(c.group.folds) == 3]
    inside = {bool(c.way.given): {n.name for n in c.group.inner} for c in whole}
    (scale,) = inside[False] - inside[True]
    (given,) = {c.way.given for c in whole if c.way.given}
    assert given == {scale} and not graph.nests[scale].axes
    candidate = next(c for c in whole if c.way.given)
    assert scale in candidate.group.inputs
    assert scale not in candidate.covers
    inputs = random_inputs(graph.program)
    want = evaluate(graph.program, inputs)
    for name, value in GroupRun(candidate.group, want, np.random.default_rng(0)).run(split=False).items():
        close(value, want[name])
