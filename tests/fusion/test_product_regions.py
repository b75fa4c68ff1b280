"""Groups around matrix products: what they hold, what they leave out, and that their kernels compute what the program says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.device import find
from pallasfuse.fusion.candidate import Context
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.inline import deduplicate
from pallasfuse.fusion.product_regions import candidates, rebuild
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.pallas_backend import interpret
from pallasfuse.parts import way
from pallasfuse.price.visited_tiles import visited_shares
from pallasfuse.proof import PlannedKernel, prove
from pallasfuse.searched import searched
from pallasfuse.targets import TRITON, XLA_CPU

DEVICE = TRITON.on(find("NVIDIA H200", "gpu"))


def normed(x, scale, w):
    return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale) @ w


def layer_normed(x, w, b):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return jax.nn.relu(((x - mean) / jnp.sqrt(variance + 1e-5)) @ w + b)


def gated(x, w, v):
    return jax.nn.silu(x @ w) * (x @ v)


def low_rank(x, w, a, b):
    return x @ w + 2.0 * (x @ a @ b)


def residual(x, h, w):
    return h + x @ w


def heads(x, w):
    return jnp.tanh(jnp.einsum("td,dhe->the", x, w))


def queries_and_keys(x, w, v):
    """Two products of rows that are normalized once: both may compute what normalizes them."""
    y = x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1.0)
    return y @ w, y @ v


PROGRAMS = {
    "normed": (normed, ((16, 64), (64,), (64, 96)), [1, 2]),
    "layer_normed": (layer_normed, ((16, 64), (64, 96), (96,)), [1, 3]),
    "gated": (gated, ((16, 64), (64, 96), (64, 96)), [1, 1, 2]),
    "low_rank": (low_rank, ((16, 64), (64, 96), (64, 16), (16, 96)), [1, 1, 2, 2, 3]),
    "residual": (residual, ((16, 64), (16, 96), (64, 96)), [1]),
    "heads": (heads, ((16, 64), (64, 4, 32)), [1]),
    "queries_and_keys": (queries_and_keys, ((16, 64), (64, 96), (64, 32)), [1, 1, 2, 2]),
}


def converted(function, shapes, dtype="float32"):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
    return convert(jaxpr)


def found(program, target=DEVICE, **options):
    return list(candidates(Graph(deduplicate(program), **options), target))


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_group_computes_what_the_program_says(name):
    function, shapes, counts = PROGRAMS[name]
    whole = converted(function, shapes)
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in whole.program.definitions()}
    groups = [c.group for c in found(whole.program)]
    assert sorted(len(g.inner) for g in groups) == counts
    random = np.random.default_rng(0)
    arguments = [jnp.asarray(random.normal(size=s), jnp.float32) for s in shapes]
    for group in groups:
        assert not group.folds
        assert group.inner
        kernels = searched(group, DEVICE, tensors)
        assert kernels
        for _, placed in kernels[:: max(1, len(kernels) // 2)][:2]:
            proof = prove(whole, [PlannedKernel(group, placed.schedule, placed.phases)], delta=1e-4)
            assert proof.holds
            assert not proof.uncovered
            if set(group.inputs) <= {t.name for t in whole.program.inputs}:
                have = {
                    t.name: a.reshape([x.extent for x in t.axes])
                    for t, a in zip(whole.program.inputs, arguments, strict=True)
                }
                for phase in placed.phases:
                    have |= interpret.run(phase.program, have)
                wants = dict(zip(whole.results, jax.tree.leaves(function(*arguments)), strict=True))
                for output in {n.name for n in group.outputs} & wants.keys():
                    want = wants[output]
                    np.testing.assert_allclose(have[output].reshape(want.shape), want, rtol=2e-3, atol=2e-3)


def test_what_only_normalizes_rows_may_be_computed_by_every_reader():
    groups = found(converted(*PROGRAMS["queries_and_keys"][:2]).program)
    normed_groups = [c for c in groups if len(c.group.inner) == 2]
    assert len(normed_groups) == 2
    assert normed_groups[0].covers.isdisjoint(normed_groups[1].covers)
    assert all(len(c.covers) == 1 and len(c.group.outputs) == 1 for c in normed_groups)


def test_a_product_alone_is_the_librarys():
    assert found(converted(lambda x, w: x @ w, ((16, 64), (64, 96))).program) == []


def test_only_targets_that_search_trees_have_such_groups():
    assert found(converted(*PROGRAMS["gated"][:2]).program, XLA_CPU) == []


def test_strict_groups_have_no_exceptions():
    for candidate in found(converted(*PROGRAMS["layer_normed"][:2]).program, strict=True):
        assert candidate.group.strict
        assert candidate.group.exceptions == ()


def masked(x, h, factors):
    rows, columns = (jnp.arange(n) for n in factors.shape)
    return h + jnp.where(columns[None] <= rows[:, None], factors, 0) @ x


def test_no_tree_skips_what_a_mask_hides_without_saying_so():
    """A masked 0 times inf would add nothing: the group has no exception for that."""
    whole = converted(masked, ((1024, 256), (1024, 256), (1024, 1024)), "bfloat16")
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in whole.program.definitions()}
    for candidate in found(whole.program):
        assert candidate.group.exceptions == ()
        for _, placed in searched(candidate.group, DEVICE, tensors):
            assert visited_shares([p.program for p in placed.phases])[0] == 1.0


def test_what_others_have_made_is_not_computed_again():
    whole = converted(*PROGRAMS["queries_and_keys"][:2])
    graph = Graph(deduplicate(whole.program))
    (both, *_) = (c for c in candidates(graph, DEVICE) if len(c.group.inner) == 2)
    (made,) = (n.name for n in graph.nests.values() if both.group.inner[1].name in graph.consumers[n.name])
    again = rebuild(graph, both, Context(made=frozenset({made})), DEVICE)
    assert again is None or len(again.group.inner) == 1


def test_equal_kernels_run_in_ways_of_one_text():
    def layers(x, w, v, u):
        for _ in range(2):
            x = jax.nn.silu(x @ w) * (x @ v) @ u
        return x

    shapes = ((16, 64), (64, 96), (64, 96), (96, 64))
    whole = converted(layers, shapes)
    tensors = {d.name: Tensor(d.name, d.axes, d.dtype) for d in whole.program.definitions()}
    groups = [c.group for c in found(whole.program) if len(c.group.inner) == 2 and len(c.group.outputs) == 1]
    texts = []
    for group in groups[:2]:
        _, placed = searched(group, DEVICE, tensors)[0]
        texts.append(way(group, placed.schedule, placed.phases[0].target))
    first, second = texts
    assert first == second
