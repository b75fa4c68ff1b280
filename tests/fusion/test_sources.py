"""Maps that take more bytes than what they are computed from."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.roundings import told_apart
from pallasfuse.fusion.sources import Sources
from pallasfuse.ir.evaluate import evaluate
from pallasfuse.jaxpr_frontend import convert
from tests.fusion.group_interpreter import GroupRun
from tests.fusion.test_recomputation import found
from tests.programs_by_name import close, random_inputs

HALF = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
FLOAT = jax.ShapeDtypeStruct((64, 128), jnp.float32)
ROW = jax.ShapeDtypeStruct((128,), jnp.float32)


def narrower(function, *structs) -> list[bool]:
    sources = Sources()
    nests = convert(jax.make_jaxpr(function)(*structs)).program.nests
    return [sources.add(n) for n in nests]


@pytest.mark.parametrize(
    ("function", "structs", "found"),
    [
        (lambda x: x.astype(jnp.float32), [HALF], [True]),
        (lambda x: x.astype(jnp.float32) * 2 + 1, [HALF], [True, True, True]),
        (lambda x: x * 2, [HALF], [False]),
        (lambda x: x.astype(jnp.bfloat16), [FLOAT], [False]),
        (lambda x, y: x.astype(jnp.float32) + y, [HALF, FLOAT], [True, False]),
        (lambda x, b: x.astype(jnp.float32) + b, [HALF, ROW], [True, False, True]),
        (lambda b: jnp.broadcast_to(b, (64, 128)), [ROW], [True]),
    ],
    ids=["converted", "a chain", "as many", "narrowed", "another as large", "a bias", "repeated"],
)  # fmt: skip
def test_a_map_and_what_it_is_computed_from(function, structs, found):
    assert narrower(function, *structs) == found


def test_what_a_map_is_no_narrower_than_is_a_source_of_its_own():
    """The doubled values are read as they are stored; what they were computed from does not count twice."""
    assert narrower(lambda x: (x * 2).astype(jnp.float32), HALF) == [False, True]


def test_values_that_somebody_stores_and_what_they_are_made_of():
    def function(x, w):
        shifted = x - x.max(-1, keepdims=True)
        scaled = jnp.exp(shifted) * 2
        return scaled @ w, jnp.sum(jnp.sin(shifted)), x + 1

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (8, 24))]
    graph = Graph(convert(jax.make_jaxpr(function)(*shapes)).program)
    ops = {n.name: getattr(n.body, "op", None) for n in graph.nests.values()}
    stored = {ops[n] for n in graph.stored & ops.keys()}
    assert {"exp", "mul", "sub", "add"} <= stored and "sin" not in stored
    assert not graph.widened  # all are float32, as what they are computed from


def test_of_several_values_only_what_they_become_together_is_stored():
    def function(x, w):
        shifted = x - x.max(-1, keepdims=True)
        return (jnp.sin(shifted) + jnp.cos(shifted)) @ w

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (8, 24))]
    graph = Graph(convert(jax.make_jaxpr(function)(*shapes)).program)
    ops = {n.name: getattr(n.body, "op", None) for n in graph.nests.values()}
    assert {ops[n] for n in graph.stored & ops.keys()} == {"add", "mul"}  # the sum, and the product of it


def test_the_operand_of_a_product_is_no_value_that_others_compute_again():
    def function(x, w):
        return jnp.exp(x - x.max(-1, keepdims=True)) @ w

    assert all(c.way.streams for c in found(function, (300, 400), (400, 2000))[1])
    summed = found(lambda x: jnp.sum(jnp.exp(x - x.max(-1, keepdims=True)), 0), (300, 400))[1]
    assert any(not c.way.streams for c in summed)


# --- values that are computed twice are told apart by nobody


def in_proportion(a, w):
    y = jnp.exp(jnp.sin(a)) * w
    return y / y.sum(-1, keepdims=True)


def below_the_top(a, w):
    p = in_proportion(a, w)
    return jnp.sum(jnp.sqrt(p.max(-1, keepdims=True) - p), 0)


def at_the_top(a, w):
    p = in_proportion(a, w)
    return jnp.sum(p == p.max(-1, keepdims=True), 0)


def surprise_below_the_top(a, w):
    logp = jax.nn.log_softmax(a) * w
    return jnp.mean(jnp.sqrt(logp.max(-1, keepdims=True) - logp), 0)


def as_many_as_are_small(a, w):
    p = in_proportion(a, w)
    return jnp.sum(jnp.log(p - p.min(-1, keepdims=True) + 1e-38) > -80, 0)


def columns_of_proportions(a, w):
    p = in_proportion(a, w)
    return jnp.sum(jnp.cos(p.sum(-1, keepdims=True) - p), 0)


@pytest.mark.parametrize("function", [below_the_top, at_the_top, surprise_below_the_top, as_many_as_are_small])
def test_what_is_compared_with_what_a_kernel_reduces_is_the_kernels_own(function):
    graph, all_of_them = found(function, (96, 6000), (6000,))
    assert graph.fragile
    stored = {(c.way, *(f.name for f in c.group.folds)): {n.name for n in c.group.outputs} for c in all_of_them}
    for (way, *folds), outputs in stored.items():
        not_stored = stored[replace(way, streams=True), *folds] - outputs
        assert graph.fragile.isdisjoint(not_stored)


def test_what_nobody_compares_may_be_computed_twice():
    graph, all_of_them = found(columns_of_proportions, (96, 6000), (6000,))
    assert not graph.fragile and any(not c.way.streams for c in all_of_them)


@pytest.mark.parametrize(
    ("function", "fragile"),
    [
        (lambda x: jnp.sum(jnp.sqrt(x + 1 - x.max())), False),  # a sum of numbers rounds in one way
        (lambda x: jnp.sum(jnp.sqrt(x * 3 - x.max())), True),
        (lambda x: jnp.sum(jnp.sqrt(x * 3)), True),
        (lambda x: jnp.sum(jnp.sqrt(x - jnp.sin(x * 3))), True),
        (lambda x: jnp.sum(jnp.sin(x * 3)), False),
        (lambda x: jnp.max(x * 3), True),
        (lambda x: jnp.argsort(x * 3), True),
        (lambda x: jnp.sum(jnp.where(x * 3 > 1, x, 0)), True),
        (lambda x: x * 3, True),
        (lambda x: jnp.sum(jnp.sqrt(x.astype(jnp.bfloat16).astype(jnp.float32))), True),
    ],
    ids=["sum", "product", "an edge", "of a sine", "smooth", "an extreme", "by XLA alone", "a choice", "a result", "narrowed"],
)  # fmt: skip
def test_maps_that_are_told_from_themselves(function, fragile):
    graph = Graph(convert(jax.make_jaxpr(function)(FLOAT)).program)
    assert bool(graph.fragile) == fragile


@pytest.mark.parametrize(
    ("product", "joined"),
    [
        (lambda x, y: x * y, True),
        (lambda x, y: jnp.square(x), True),
        (lambda x, y: x**3, True),
        (lambda x, y: -(x * y), True),
        (lambda x, y: jnp.where(y > 0, x * y, x), True),
        (jnp.maximum, False),
        (lambda x, y: -x, False),
    ],
    ids=["product", "square", "power", "negated", "chosen", "larger", "sign"],
)
def test_a_sum_that_a_compiler_may_join_with_a_product_rounds_in_two_ways(product, joined):
    def function(x, y):
        return jnp.sum(jnp.floor(jnp.negative(product(x, y)) + 1))

    program = convert(jax.make_jaxpr(function)(FLOAT, FLOAT)).program
    (total,) = [n.name for n in program.nests if getattr(n.body, "op", None) == "add"]
    assert (total in told_apart(program)) == joined


def entropy_of(logits):
    """The log-chances of rows are read by reductions that are none of the first kernel."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return jnp.sum(jnp.cos(logp), 0), jnp.sum(jnp.sin(logp), 0)


def test_a_kernel_need_not_store_what_others_could_compute_again():
    graph, all_of_them = found(entropy_of, (300, 400))
    rows_only = [c for c in all_of_them if not c.way.streams and len(c.group.folds) == 2]
    assert rows_only
    inputs = random_inputs(graph.program)
    want = evaluate(graph.program, inputs)
    for candidate in rows_only:
        names = [f.name for f in candidate.group.folds]
        others = [c for c in all_of_them if c.way.streams and [f.name for f in c.group.folds] == names]
        assert all(candidate.group.rolled not in n.axes for n in candidate.group.outputs)
        assert any(candidate.group.rolled in n.axes for c in others for n in c.group.outputs)
        got = GroupRun(candidate.group, want, np.random.default_rng(0)).run(split=False)
        assert got
        for name, value in got.items():
            close(value, want[name])


def scores_of_half(x, b):
    """Sums that are stored in half precision, whose rows are read in float32."""
    scores = jnp.sum(x, 0).astype(jnp.bfloat16).astype(jnp.float32) + b
    return jnp.exp(scores - scores.max(-1, keepdims=True)).sum(-1)


def test_a_kernel_may_read_what_others_computed_as_it_is_stored():
    graph, all_of_them = found(scores_of_half, (500, 30, 150), (150,))
    both = {c.way.widens: c for c in all_of_them if len(c.group.folds) == 2}
    assert set(both) == {False, True}
    types = {d.name: d.dtype for d in graph.program.definitions()}
    large = {w: {types[t] for t in c.group.inputs if t in graph.nests} for w, c in both.items()}
    assert large == {False: {"float32"}, True: {"bfloat16"}}
    inputs = random_inputs(graph.program)
    want = evaluate(graph.program, inputs)
    for name, value in GroupRun(both[True].group, want, np.random.default_rng(0)).run(split=False).items():
        close(value, want[name])
