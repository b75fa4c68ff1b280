"""Which reductions share a kernel, and the reasons of those that do not."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse.first_time import one_task
from pallasfuse.fusion import candidates, grouping
from pallasfuse.fusion.cost import Work, apart, together
from pallasfuse.fusion.graph import Graph
from pallasfuse.fusion.grouping import group
from pallasfuse.fusion.judging import Judge
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.ranges import FINDING_RANGES
from pallasfuse.price.terms import Price, Term
from pallasfuse.steps import external_reasons
from pallasfuse.targets import TRITON, XLA_CPU
from tests.programs_by_name import FREE, attention, only_group, program, program_of, softmax, two_softmaxes

BIG = (4096, 8192)


def folds(grouping):
    return [[f.name for f in g.folds] for g in grouping.groups]


def test_two_chains_are_two_kernels():
    loops = program_of(lambda x, y: (softmax(x), softmax(y)), (5, 13), (5, 13))
    got = group(loops, FREE)
    assert [len(f) for f in folds(got)] == [2, 2]
    assert got.left == ()
    assert {g.inputs for g in got.groups} == {("x",), ("y",)}


def test_chains_that_share_an_output_hand_values_over():
    first, second = group(program_of(two_softmaxes, (5, 13), (5, 13)), FREE).groups
    made = {n.name for n in first.outputs}
    assert set(second.inputs) & made
    assert [n.name for n in second.outputs] == [program("two_softmaxes").outputs[0]]


def test_reductions_over_one_axis_of_one_tensor_share_a_kernel():
    loops = program_of(lambda x: (jnp.max(x, -1), jnp.sum(x, -1), jnp.sum(x * x, -1)), BIG)
    assert [len(f) for f in folds(group(loops, TRITON))] == [3]


def through_the_other_axis(x):
    m = jnp.max(x, axis=1, keepdims=True)
    c = jnp.sum(jnp.exp(x - m), axis=0, keepdims=True)  # needs every row's maximum
    return jnp.sum(x * c, axis=1)


def through_xla(x):
    m = jnp.sort(jnp.max(x, axis=1))[:, None]  # rows exchange their maxima
    return jnp.sum(x * m, axis=1)


@pytest.mark.parametrize("function", [through_the_other_axis, through_xla])
@pytest.mark.parametrize("target", [FREE, XLA_CPU, TRITON], ids=lambda t: t.name)
def test_no_value_leaves_a_kernel_and_comes_back(function, target):
    for shape in ((5, 13), BIG):
        got = group(program_of(function, shape), target)
        assert all(len(f) == 1 for f in folds(got))
        assert all(left.reason for left in got.left)


def test_the_reason_names_the_value_outside():
    got = group(program_of(through_xla, BIG), XLA_CPU)
    assert "is computed outside the kernel from values inside it" in got.left[-1].reason


def test_an_inner_reduction_that_does_not_fit_becomes_an_input():
    small = replace(FREE, max_inner=2, long_products=False)  # the product of queries and keys sums three elements
    (chosen,) = group(program_of(lambda q, k: softmax(q @ k), (5, 3), (3, 13)), small).groups
    assert chosen.inner == ()
    assert len(chosen.folds) == 2
    (score,) = (n.name for n in program_of(lambda q, k: q @ k, (5, 3), (3, 13)).nests)
    assert chosen.inputs == (score,)


@pytest.mark.parametrize(("width", "together"), [(XLA_CPU.max_inner, True), (XLA_CPU.max_inner + 1, False)])
def test_an_axis_that_does_not_fit_into_a_tile_splits_the_chain(width, together):
    got = group(program_of(attention, (512, 64), (512, 64), (512, width)), XLA_CPU)
    assert len(folds(got)[0]) == (3 if together else 2)


def test_a_plain_matrix_product_after_a_kernel_stays_with_xla():
    got = group(program_of(attention, (512, 64), (512, 64), (512, XLA_CPU.max_inner + 1)), XLA_CPU)
    assert [len(f) for f in folds(got)] == [2]


def test_the_inner_reduction_is_computed_inside():
    chosen = only_group("attention")
    assert len(chosen.inner) == 1
    assert chosen.inputs == ("q", "k", "v")
    assert [a.name for a in chosen.parallel] == ["i"]


@pytest.mark.parametrize("target", [XLA_CPU, TRITON], ids=lambda t: t.name)
def test_a_single_reduction_stays_with_xla(target):
    got = group(program_of(lambda x: jnp.sum(x * x, -1), BIG), target)
    assert got.groups == ()
    (left,) = got.left
    assert "one kernel would not be faster" in left.reason or "a single reduction" in left.reason


@pytest.mark.parametrize("target", [XLA_CPU, TRITON], ids=lambda t: t.name)
def test_chains_over_big_rows_are_fused(target):
    got = group(program_of(lambda x, w: jnp.var(x, -1), BIG, BIG), target)
    assert [g.passes for g in got.groups] == [1]


def test_what_the_frontend_cannot_convert_has_its_reason():
    loops = program_of(lambda x: softmax(jnp.sort(x, -1)), (5, 13))
    (left,) = external_reasons(loops)
    assert "sort" in left.reason
    (chosen,) = group(loops, FREE).groups
    assert chosen.inputs == (left.name,)


def test_a_duplicate_reduction_is_computed_once():
    loops = program_of(lambda x: jnp.max(x, -1) + jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1), (5, 13))
    assert [len(f) for f in folds(group(loops, FREE))] == [2]


def test_an_intermediate_that_is_returned_is_stored():
    (chosen,) = group(program_of(lambda x: (jnp.max(x, -1), softmax(x)), (5, 13)), FREE).groups
    assert len(chosen.outputs) == 2


def test_grouping_is_deterministic():
    loops = program_of(jax.nn.standardize, (5, 13))
    assert str(group(loops, FREE)) == str(group(loops, FREE))


# --- the cost model


def test_work_of_one_reduction():
    (nest,) = (n for n in program_of(lambda x: jnp.sum(x * x, -1), (8, 16)).nests if n.is_reduction)
    (square,) = (n for n in program_of(lambda x: jnp.sum(x * x, -1), (8, 16)).nests if not n.is_reduction)
    work = apart(replace(nest, body=square.body))
    assert work == Work(0.0, 2 * 128, 128 * 4, 8 * 4, 1)


def test_work_of_a_matrix_product_counts_two_flops_per_multiplication():
    loops = program_of(lambda q, k: q @ k, (8, 16), (16, 4))
    (nest,) = loops.nests
    assert apart(nest) == Work(2.0 * 8 * 16 * 4, 0.0, (8 * 16 + 16 * 4) * 4, 8 * 4 * 4, 1)


def test_one_kernel_reads_its_inputs_once_and_writes_only_outputs():
    chosen = only_group("softmax")
    work = together([f.nest for f in chosen.folds], chosen.inner, chosen.outputs, chosen.parallel,
                    {f.name: 1 for f in chosen.folds})  # fmt: skip
    assert (work.bytes_read, work.bytes_written, work.launches) == (65 * 4, 65 * 4, 1)
    apart_bytes = sum(apart(f.nest).bytes_read for f in chosen.folds)
    assert apart_bytes > work.bytes_read


def test_the_least_time_is_the_larger_of_arithmetic_and_traffic_plus_launches():
    gpu = TRITON.device
    moved = 1e6 * gpu.memory_gb_s  # in a millisecond, and more than the cache holds
    assert Work(bytes_read=moved).least_us(gpu) == pytest.approx(1000.0)
    assert Work(bytes_read=moved, matmul_flops=1.0).least_us(gpu) == pytest.approx(1000.0)
    assert Work(vector_flops=2e6 * gpu.vector_gop_s, launches=2).least_us(gpu) == pytest.approx(
        2000.0 + 2 * gpu.kernel_us
    )


def test_folds_know_what_an_earlier_pass_has_finished():
    def function(x):
        return jnp.sum(jnp.round(8 * x / jnp.max(x, -1, keepdims=True)), -1)

    (chosen,) = group(program_of(function, (5, 13)), FREE).groups
    first, second = chosen.folds
    assert (first.pass_index, first.finished_reads) == (0, frozenset())
    assert (second.pass_index, second.finished_reads) == (1, {first.name})
    assert second.refusals


def test_a_repaired_fold_reads_nothing_finished():
    def function(x):
        return jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1)

    (chosen,) = group(program_of(function, (5, 13)), FREE).groups
    assert [f.finished_reads for f in chosen.folds] == [frozenset(), frozenset()]


@pytest.mark.parametrize(("dtype", "passes"), [("float32", 1), ("int32", 2)])
def test_integer_factors_are_not_hoisted(dtype, passes):
    """Integer division truncates: sum(40 x / t) is not 40 sum(x) / t."""

    def function(x):
        return jnp.sum(lax.div(x * 40, jnp.broadcast_to(jnp.sum(x, -1, keepdims=True), x.shape)), -1)

    (chosen,) = group(program_of(function, (5, 13), dtype=dtype), FREE).groups
    assert chosen.passes == passes
    assert any(f.hoisted for f in chosen.folds) is (dtype == "float32")


# --- cores that share the axis of a tensor


def attend(x, weights, bias):
    q, k, v = (jnp.einsum("nf,fhd->nhd", x, w) for w in weights)
    scores = jnp.where(bias > 0, jnp.einsum("qhd,khd->hqk", q, k), -1e9)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, -1), v)


def two_layers(x, first, second, bias):
    for weights in (first, second):
        x = x + jnp.einsum("nhd,fhd->nf", attend(x, weights[:3], bias), weights[3])
    return x


def layers_of(length):
    """Both layers read one bias: their queries are one axis, and so are their keys."""
    width, heads = 64, 2
    weights = (4, width, heads, width // heads)
    return program_of(two_layers, (length, width), weights, weights, (heads, length, length))


def test_equal_layers_that_share_axes_are_kernels_each():
    found = group(layers_of(64), XLA_CPU)
    assert sum(len(f) == 3 and reads_bias(g) for f, g in zip(folds(found), found.groups, strict=True)) == 2


def reads_bias(found):
    return "bias" in found.inputs


def test_cores_that_need_the_same_memory_are_worth_it_together():
    """XLA makes memory anew once for both: a kernel for one of them alone saves none of it."""
    loops = layers_of(4096)
    judge = Judge(Graph(loops), XLA_CPU, lambda *_: Price(0.0, ()))
    cores = [g for g in group(loops, XLA_CPU).groups if reads_bias(g)]
    alone = max(judge.replaced(g).us for g in cores)
    both = judge.apart(()).us - judge.apart(cores).us
    assert len(cores) == 2 and alone < 0.45 * both

    def chosen(us):
        def price(g, _):
            return Price(us / XLA_CPU.margin if reads_bias(g) and len(g.folds) == 3 else 1e9, ())

        return [g for g in group(loops, XLA_CPU, price).groups if reads_bias(g)]

    assert len(chosen(0.5 * alone)) == 2
    assert len(chosen((alone + 0.5 * both) / 2)) == 2
    assert chosen(0.51 * both) == []


def judged(us, target, terms=()):
    """What the kernel of a softmax saves whose price is so many times that of XLA's kernels; and XLA's price."""
    loops = program_of(softmax, BIG)
    (candidate,) = candidates_of(loops, target)
    judge = Judge(Graph(loops), target, lambda group, most_us: Price(us * apart_us(loops, target), terms))
    return judge.saving(candidate), apart_us(loops, target)


def apart_us(loops, target):
    return Judge(Graph(loops), target, lambda group, most_us: "none").apart(()).us


def candidates_of(loops, target):
    graph = Graph(loops)
    for axis in dict.fromkeys(a for n in graph.reductions() for a in n.reduced):
        for members in candidates.components(graph, axis):
            found = [c for c in candidates.candidates(graph, axis, members, target, {}) if len(c.group.folds) > 1]
            yield from found[:1]


def test_a_saving_that_is_predicted_goes_before_one_that_a_wrong_price_would_make():
    timed = TRITON.judged(timed=True)
    error = timed.device.price_error
    predicted, xla_us = judged(0.9, timed)
    hoped, _ = judged((1 + error) / 2, timed)
    hopeless, _ = judged(1.1 * error, timed)
    assert predicted == pytest.approx(0.1 * xla_us)
    assert 0 < hoped < 1e-2 * predicted
    assert hopeless < 0
    assert judged(0.99, TRITON)[0] < 0 < judged(0.9 / error, TRITON)[0], (
        "without a clock, an error of the price decides"
    )


def test_no_clock_decides_about_masks_over_data():
    """It would see drawn masks: what is not predicted to be faster where they hide nothing is not tried."""
    timed = TRITON.judged(timed=True)
    bounded = (Term(FINDING_RANGES, 1, "passes", 0.1),)
    hoped = (1 + timed.device.price_error) / 2
    assert judged(hoped, timed)[0] > 0 > judged(hoped, timed, bounded)[0]
    assert judged(0.9, timed, bounded)[0] == pytest.approx(judged(0.9, timed)[0])


def test_trees_of_products_need_one_device_and_a_wider_margin_without_a_clock():
    def both(a, b, c):
        return jnp.tanh(a @ b) @ c

    loops = program_of(both, (512, 64), (64, 512), (512, 64), dtype="float16")

    def covered(target, us):
        got = group(loops, target, lambda group, most_us: "none" if group.folds else Price(us, ()))
        return sorted(n.name for g in got.groups for n in g.inner)

    xla_us = apart_us(loops, TRITON)
    error = TRITON.device.price_error
    assert len(covered(TRITON.judged(timed=True), 0.4 * xla_us)) == 2
    assert covered(TRITON.judged(timed=False, one_device=False), 0.01 * xla_us) == []
    assert covered(TRITON, xla_us / error**1.5) == [], "the least of many prices is more often too low"
    assert covered(TRITON, 0.9 * xla_us / error**2) != []


def test_a_tree_takes_the_place_of_what_saves_less_and_has_no_folds():
    """A listed schedule that saves nothing, or less than a tree of a part of it, does not hide the tree of all of it."""
    loops = program_of(lambda q, k, v: softmax(q @ k) @ v, (256, 64), (64, 256), (256, 64), dtype="float16")
    timed = TRITON.judged(timed=True)
    xla_us = apart_us(loops, timed)

    def covered(whole_us, listed_us):
        def price(group, most_us):
            if group.folds:
                return Price(listed_us, ())
            reductions = {n.name for n in group.inner if n.is_reduction}
            return Price(whole_us if len(reductions) == 4 else 0.5 * xla_us, ())

        (only,) = group(loops, timed, price).groups
        return bool(only.folds), len([n for n in only.inner if n.is_reduction])

    assert covered(whole_us=0.2 * xla_us, listed_us=2 * xla_us) == (False, 4)
    assert covered(whole_us=0.2 * xla_us, listed_us=0.1 * xla_us)[0], "what is listed saves more"
    assert covered(whole_us=0.2 * xla_us, listed_us=0.4 * xla_us)[0], (
        "trees are tried beside what has folds, as its rivals"
    )


def test_programs_share_prices_of_a_task_only_where_xla_runs_the_same():
    def repeated(trips):
        jaxpr = jax.make_jaxpr(lambda x: lax.fori_loop(0, trips, lambda _, y: jnp.sort(y * 2.0), x))(jnp.ones(BIG))
        return convert(jaxpr).program

    few, many = repeated(3), repeated(300)
    assert few == many  # what XLA does in an operation is no part of a program
    apart = [apart_us(program, XLA_CPU) for program in (few, many)]
    with one_task():
        assert [apart_us(program, XLA_CPU) for program in (few, many, few, many)] == [*apart, *apart]
        judges = [Judge(Graph(few), XLA_CPU, lambda *_: "none") for _ in range(2)]
        assert judges[0].apart(()) is judges[1].apart(())
    assert apart[1] > 10 * apart[0]


def moments(x):
    """Dependent reductions of rows: each of them may be the last one of a kernel."""
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)
    return jnp.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1)


@pytest.mark.parametrize(
    ("most", "us", "strict"), [(1, 1e9, False), (100, 1e9, False), (1, 1e-3, False), (1, 1e9, True)]
)
def test_after_many_kernels_in_vain_no_more_are_priced(monkeypatch, most, us, strict):
    monkeypatch.setattr(grouping, "_MOST_IN_VAIN", most)
    priced = []

    def price(group, _):
        priced.append(group)
        return Price(us, ())

    found = group(program_of(moments, BIG), XLA_CPU.judged(timed=False), price, strict=strict)
    is_given_up = most == 1 and us == 1e9 and not strict
    assert any(entry.reason == grouping._GIVEN_UP for entry in found.left) == is_given_up
    assert us < 1.0 or strict or (len(priced) == 1) == is_given_up
    assert bool(found.groups) == (us < 1.0 or strict)


def test_what_is_given_up_is_not_priced_beside_what_is_chosen_either(monkeypatch):
    """The first kernel of one part pays, the first one of the other does not, and the others of that are given up."""
    priced = []

    def price(group, _):
        priced.append(group)
        return Price(1e-3 if "x" in group.inputs else 1e9, ())

    program = program_of(lambda x, y: (moments(x), moments(y)), BIG, BIG)
    counts = []
    for most in (1, 100):
        monkeypatch.setattr(grouping, "_MOST_IN_VAIN", most)
        priced.clear()
        found = group(program, XLA_CPU.judged(timed=False), price)
        assert [g.inputs for g in found.groups] == [("x",)]
        counts.append(sum("y" in g.inputs for g in priced))
    assert counts == [1, 2]
