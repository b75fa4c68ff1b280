"""Transposes of stored values that stay outside of the kernels that read them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.execution import execute
from pallasfuse.fusion.candidates import candidates, components
from pallasfuse.fusion.graph import Graph
from pallasfuse.ir.expr import Read, postorder
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan, prove_plan
from pallasfuse.targets import XLA_CPU

LENGTH, HEADS, FEATURES = 2048, 4, 64


def attend(q, k, v, bias):
    scores = jnp.einsum("qhd,khd->hqk", q, k) + bias
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, -1), v)


def gathered_bias(q, k, v, table, buckets):
    return attend(q, k, v, table[buckets].transpose(2, 0, 1))


def stored_bias(q, k, v, bias):
    return attend(q, k, v, bias.transpose(2, 0, 1))


def bias_in_order(q, k, v, bias):
    return attend(q, k, v, bias)


def structs(*shapes):
    return [jax.ShapeDtypeStruct((LENGTH, HEADS, FEATURES), jnp.float32)] * 3 + [
        jax.ShapeDtypeStruct(s, jnp.int32 if s == (LENGTH, LENGTH) else jnp.float32) for s in shapes
    ]


def plan(function, *shapes, target="mosaic_gpu"):
    return pf.fuse(function, options=pf.FuseOptions(target=target, price=True)).explain(*structs(*shapes))


def neighbours(kernel, length=LENGTH):
    """Is the rolled axis the last one, in each read of a value of queries, keys and heads?"""
    group = kernel.group
    return {
        node.indices[-1] == group.rolled
        for fold in group.folds for node in postorder(fold.nest.body)
        if isinstance(node, Read) and sorted(a.extent for a in node.indices) == [HEADS, length, length]
    }  # fmt: skip


def transposes_of_bias(found):
    """How many steps of XLA make a value of heads, queries and keys."""
    equations = [s for s in found.steps if not hasattr(s, "group")]
    return sum(
        e.primitive.name == "transpose" and e.outvars[0].aval.shape == (HEADS, LENGTH, LENGTH) for e in equations
    )


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(
    ("function", "shapes"),
    [(gathered_bias, [(32, HEADS), (LENGTH, LENGTH)]), (stored_bias, [(LENGTH, LENGTH, HEADS)])],
)
def test_a_kernel_reads_neighbours_of_what_was_stored_in_another_order(function, shapes):
    found = plan(function, *shapes)
    (kernel,) = found.kernels
    assert len(kernel.group.folds) == 3
    assert neighbours(kernel) == {True}
    assert transposes_of_bias(found) == 1  # computed by XLA


def test_nothing_is_stored_again_that_is_in_order():
    (kernel,) = plan(bias_in_order, (HEADS, LENGTH, LENGTH)).kernels
    assert kernel.group.inputs == ("q", "k", "v", "bias")
    assert neighbours(kernel) == {True}


def test_layers_share_one_transpose():
    def layers(q, k, v, bias):
        bias = bias.transpose(2, 0, 1)
        return attend(attend(q, k, v, bias), k, v, bias)

    found = plan(layers, (LENGTH, LENGTH, HEADS))
    assert sum(len(k.group.folds) for k in found.kernels) == 6
    assert all(neighbours(k) == {True} for k in found.kernels)
    assert transposes_of_bias(found) == 1


MANY_CORES = XLA_CPU.on(replace(XLA_CPU.device, multiprocessors=64, price_error=1.0))
"""A device that transposes in no time, and whose prices are taken at their word."""


def test_what_is_stored_for_others_may_be_read_as_it_lies():
    """The sum is a result: a kernel that reads it needs no other order of what it is made of."""

    def with_sum(q, k, v, bias):
        total = bias.transpose(2, 0, 1) * 0.5
        return attend(q, k, v, total), total

    graph = Graph(convert(jax.make_jaxpr(with_sum)(*structs((LENGTH, LENGTH, HEADS)))).program)
    axes = dict.fromkeys(a for n in graph.reductions() for a in n.reduced)
    found = [c for a in axes for m in components(graph, a) for c in candidates(graph, a, m, XLA_CPU, {})]
    whole = [c for c in found if len(c.group.folds) == 3]
    assert [sorted(c.way.relaid) for c in whole] == [[], ["t0"], ["t1"]]
    assert "bias" in whole[0].group.inputs and {"bias", "t0"}.isdisjoint(whole[2].group.inputs)


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("function", [gathered_bias, stored_bias])
def test_the_numbers_are_those_of_the_plain_function(function):
    length = 256
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(length, HEADS, FEATURES)), jnp.float32) for _ in range(3))
    table = jnp.asarray(rng.normal(size=(32, HEADS)), jnp.float32)
    buckets = jnp.asarray(rng.integers(0, 32, size=(length, length)), jnp.int32)
    arguments = (q, k, v, table, buckets) if function is gathered_bias else (q, k, v, table[buckets])
    found = make_plan(jax.make_jaxpr(function)(*arguments), MANY_CORES, FuseOptions(price=True))
    (kernel,) = found.kernels
    assert neighbours(kernel, length) == {True}
    assert prove_plan(found, delta=1e-4).holds
    (result,) = execute(found, arguments)
    np.testing.assert_allclose(result, jax.jit(function)(*arguments), rtol=2e-5, atol=2e-5)
