"""`FuseOptions.schedule`: the kernels of a function as its user writes them, and what is said of those that cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import pipeline, repetition, scheduled
from pallasfuse.errors import ScheduleError
from pallasfuse.subjects import Bench


def attend(q, k, v):
    i = jnp.arange(q.shape[1])
    s = jnp.where(i[:, None] >= i[None, :], jnp.einsum("hid,hjd->hij", q, k) * 0.125, -jnp.inf)
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(s, -1), v)


def chain(a, b, d):
    return (a @ b) @ d


def norm(x, g, w):
    return jax.nn.silu((x * g) @ w * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))


def two(x):
    return jax.nn.softmax(x, axis=-1), jnp.sum(x, axis=0)


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


QKV, ABD, XGW = [(2, 100, 16)] * 3, [(50, 40), (40, 60), (60, 30)], [(50, 40), (40,), (40, 30)]
KERNELS = {
    "rolled": (attend, QKV, "attn { i:1@grid j:32@grid ( m:32 ( t4 t10 t16 out ) ) }"),
    "in parts": (attend, QKV, "part { i:1@grid q.1:32@grid m/2@grid m:16 ( t4 t10 t16 out ) }"
                              " join { q.0:1@grid j:50@grid ( +t10 +t16 +out ) }"),
    "chain": (chain, ABD, "deep { a.0:16@grid d.1:16@grid b.1:32 ( b.0:8 ( t0 ) out ) }"),
    "norm": (norm, XGW, "n { x.0:16@grid w.1:10@grid ( g.0:20 ( t2 t4 ) out ) }"),
    "some of it": (norm, XGW, "n { x.0:16@grid ( x.1:20 ( t4 ) ) }"),
    "one of two results": (two, [(10, 40)], "rows { x.0:2@grid ( x.1:16 ( t0 t6 ) x.1:16 ( out.0 ) ) }"),
}  # fmt: skip


@pytest.mark.sampled(20, cover=())
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_function_runs_by_the_schedule_that_is_given(name, target):
    function, shapes, text = KERNELS[name]
    given = arrays(*shapes)
    fused = pf.fuse(function, target=target, options=pf.FuseOptions(schedule=text))
    for have, want in zip(jax.tree.leaves(fused(*given)), jax.tree.leaves(jax.jit(function)(*given)), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-4, atol=2e-5)
    plan = fused.explain(*given)
    (kernel,) = plan.kernels
    assert kernel.strategy == "scheduled"
    assert len(kernel.phases) == text.count("{")
    proof = pf.verify(fused, *given, delta=1e-4).proof
    assert proof.holds, (proof.uncovered, proof.counterexample)
    assert proof.trials > 0


def test_what_a_schedule_does_not_name_is_left_to_xla():
    plan = pf.fuse(norm, options=pf.FuseOptions(schedule=KERNELS["some of it"][2])).explain(*arrays(*XGW))
    (reason,) = [f.reason for f in plan.fallbacks if f.operation == "dot_general"]
    assert reason == "the schedule does not name it"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n { x.0:16@grid ( t2 t4 out }", "'}' where a loop"),
        ("n { x.9:16@grid ( t2 t4 out ) }", "no axis is called x.9; there are i, j, k, x.0"),
        ("n { x.0:16@grid ( t2 t99 out ) }", "nothing is called t99; there are"),
        ("n { x.0:16@grid ( out ) }", "no nest in it is a reduction"),
        ("n { x.0:16@grid ( g.0:20 ( t2 t4 out ) ) }", r"breaks rule 6 \(unfinished reads\): t"),
        ("n { x.0:16@grid ( g.0:20 ( t2 ) out ) } m { x.0:16@grid ( t4 ) }", r"breaks rule 3 \(nests\)"),
        ("n { x.0:16@grid x.1:16@grid x.1:6 ( t2 t4 ) }", r"rule 1 \(windows\): j:6 does not divide"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_run_says_which_rule_it_breaks(text, message):
    with pytest.raises(ScheduleError, match=message):
        pf.fuse(norm, options=pf.FuseOptions(schedule=text))(*arrays(*XGW))


def test_a_schedule_says_all_of_tiles_and_parts():
    with pytest.raises(ValueError, match="give either"):
        pf.FuseOptions(schedule="k { s }", parts=2)
    with pytest.raises(ValueError, match="as text"):
        pf.FuseOptions(schedule=3)


def finite(q, k, v):
    i = jnp.arange(q.shape[1])
    s = jnp.where(i[:, None] >= i[None, :], jnp.einsum("hid,hjd->hij", q, k) * 0.125, -1e9)
    return jnp.einsum("hij,hjd->hid", jax.nn.softmax(s, -1), v)


def test_masks_that_fill_in_numbers_bound_the_loops_of_trees_and_the_plan_says_so():
    text = "a { i:1@grid j:4@grid ( m:4 ( t4 t10 t16 ) m:4 ( t4 out ) ) }"
    given = arrays(*[(2, 10, 4)] * 3)
    fused = pf.fuse(finite, options=pf.FuseOptions(schedule=text))
    np.testing.assert_allclose(fused(*given), jax.jit(finite)(*given), rtol=2e-4, atol=2e-5)
    plan = fused.explain(*given)
    assert plan.kernels[0].visited_share < 1
    assert any("stands -1e+09" in e for e in plan.exceptions)
    report = pf.verify(fused, *given, delta=1e-4)
    assert report.equivalent, str(report)


def by_schedule(function, text, **options):
    return pf.fuse(function, options=pf.FuseOptions(schedule=text, **options))


# --- kernels that wait for what they leave to XLA


def chain_of_three(a, b, c, d):
    return ((a @ b) @ c) @ d


def sorted_between(x):
    return jnp.sum(jnp.sort(jnp.sum(x * x, 0)) * x, 1)


LONG = arrays((8, 6), (6, 7), (7, 5), (5, 9))
WAITING = [
    (chain_of_three, LONG, "k { i:4@grid ( t0 t2 ) }", "t2 reads t1, which the schedule leaves to XLA, and t1 is computed from t0"),
    (sorted_between, arrays((6, 4)), "k { x.0:6 ( t1 out ) }", "t5 reads t2, which the schedule leaves to XLA"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given", "text", "message"), WAITING)
def test_a_kernel_that_waits_for_what_it_leaves_to_xla_is_refused(function, given, text, message):
    with pytest.raises(ScheduleError, match=message):
        by_schedule(function, text)(*given)


def test_no_schedule_is_dropped_in_silence(monkeypatch):
    """Neither where a wait is found late, nor where a price is a bug."""
    monkeypatch.setattr(scheduled, "_refuse_waiting", lambda *_: None)
    with pytest.raises(ScheduleError, match="k cannot be run: its kernel and another one would wait"):
        by_schedule(chain_of_three, "k { i:4@grid ( t0 t2 ) }")(*LONG)

    def fails(*_, **__):
        raise ZeroDivisionError

    for module in (pipeline, repetition):
        monkeypatch.setattr(module, "price_kernel", fails)
    with pytest.raises(ScheduleError, match=r"k cannot be run: its kernel could not be priced \(ZeroDivisionError"):
        by_schedule(chain_of_three, "k { i:4@grid ( t0 ) }")(*LONG)


def test_reductions_of_a_kernel_that_is_given_up_have_the_reason():
    plan = by_schedule(chain, KERNELS["chain"][2]).explain(*arrays(*ABD))
    without = pipeline.revised(plan, {"deep": "it does not compile"})
    assert [f.reason for f in without.fallbacks] == ["it does not compile"] * 2


# --- names


def softmax_between(x):
    return 1.0, jax.nn.softmax(x, -1), jnp.sum(x, -1)


def test_results_count_literals():
    (x,) = arrays((8, 12))
    plan = by_schedule(softmax_between, "k { x.0:4@grid x.1:4 ( out.2 ) }").explain(x)
    assert plan.kernels[0].stores == (plan.converted.results[2],)
    with pytest.raises(ScheduleError, match=r"nothing is called out\.0; there are t0"):
        by_schedule(softmax_between, "k { x.0:4@grid x.1:4 ( out.0 ) }")(x)
    with pytest.raises(ScheduleError, match="nothing is called out; there are t0"):
        by_schedule(lambda x: (1.0, jnp.sum(x, -1)), "k { x.0:4@grid x.1:4 ( out ) }")(x)


def reshaped(x):
    y = x.reshape(2, 4, 6)
    return jnp.sum(y * y, -1)


def test_dimensions_are_those_of_the_argument():
    (x,) = arrays((8, 6))
    fused = by_schedule(reshaped, "k { x.1:2 ( out ) }")
    (kernel,) = fused.explain(x).kernels
    assert [a.name for a in kernel.group.inner[0].reduced] == [kernel.schedule.tree[0].body[0].axis]
    np.testing.assert_allclose(fused(x), reshaped(x), rtol=1e-5)
    with pytest.raises(ScheduleError, match=r"the dimension x\.0 is 2 axes here: i, j"):
        by_schedule(reshaped, "k { x.0:2 ( out ) }")(x)
    with pytest.raises(ScheduleError, match=r"the dimension x\.1 has one element, and no axis"):
        by_schedule(lambda x: jnp.sum(x, -1), "k { x.1:1 ( out ) }")(*arrays((8, 1, 6)))


def test_an_argument_may_be_called_out():
    def rows(out):
        return jax.nn.softmax(out, -1)

    (x,) = arrays((8, 6))
    fused = by_schedule(rows, "k { out.0:4@grid ( out!shared out.1:3 ( t0 t6 ) out.1:3 ( out ) ) }")
    assert fused.explain(x).kernels[0].reads == ("out",)
    np.testing.assert_allclose(fused(x), rows(x), rtol=1e-5)


def sums(x):
    return jnp.sum(x, -1), jnp.sum(x, -1) + 1, jnp.sum(x, -1)


@pytest.mark.parametrize("name", ["t1", "out.2"])
def test_a_reduction_that_is_computed_twice_is_named_where_it_comes_first(name):
    (x,) = arrays((8, 6))
    with pytest.raises(ScheduleError, match=rf"{name} is the same reduction as t0, which comes first"):
        by_schedule(sums, f"k {{ x.0:4@grid x.1:3 ( {name} ) }}")(x)
    fused = by_schedule(sums, f"k {{ x.0:4@grid ( x.1:3 ( t0 ) {name} out.1 ) }}")
    for have, want in zip(fused(x), sums(x), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5)
    left = by_schedule(sums, "k { x.0:4@grid x.1:3 ( t0 ) }").explain(x).fallbacks
    assert [f.reason for f in left if f.operation == "reduce_sum"] == ["the schedule does not name it"] * 2


def test_what_no_kernel_computes_is_no_nest():
    with pytest.raises(ScheduleError, match="t2 cannot be in a kernel: sort is left to XLA"):
        by_schedule(sorted_between, "k { x.0:6 ( t1 t2 ) }")(*arrays((6, 4)))


def test_a_result_that_is_an_argument_is_no_nest():
    options = pf.FuseOptions(schedule="k { x.0:4@grid ( t0 t6 out.1 out.0 ) }")
    with pytest.raises(pf.errors.ScheduleError, match=r"out\.0 is the argument x itself: nothing computes it"):
        pf.fuse(lambda x: (x, jax.nn.softmax(x, axis=-1)), options=options)(jnp.ones((8, 16)))


@pytest.mark.parametrize("target", ["xla", "interpret"])
def test_two_kernels_may_have_one_name(target):
    (x,) = arrays((8, 12))
    text = "k { x.0:4@grid x.1/2@grid x.1:3 ( out ) } k { x.0:4@grid ( +out ) }"
    fused = pf.fuse(lambda x: jnp.sum(x, -1), target=target, options=pf.FuseOptions(schedule=text))
    np.testing.assert_allclose(fused(x), jnp.sum(x, -1), rtol=1e-5, atol=1e-6)
    assert [p.program.name for p in fused.explain(x).kernels[0].phases] == ["k", "k_2"]


def scaled(x, w):
    return jax.nn.softmax(x @ (w * 2), -1)


SCALED = "k { x.0:4@grid ( w.1:4 ( w.0:3 ( t1 ) t2 t8 ) w.1:4 ( w.0:3 ( t1 ) out ) ) }"


def test_names_are_those_of_the_function_wherever_it_is_called():
    """In a loop where some arguments do not change, and in a function around it whose values it reads."""
    x, w = arrays((8, 6), (6, 12))
    fused = by_schedule(scaled, SCALED)

    def by_scan(f, x, w):
        return jax.lax.scan(lambda c, _: (c + f(c, w)[:, :6], None), x, length=2)[0]

    np.testing.assert_allclose(jax.jit(by_scan, static_argnums=0)(fused, x, w), by_scan(scaled, x, w), rtol=1e-5)
    text = "k { x.0:4@grid ( x0.1:4 ( x.1:3 ( t0 ) t1 t7 ) x0.1:4 ( x.1:3 ( t0 ) out ) ) }"
    around = jax.jit(lambda x, w: by_schedule(lambda x: jax.nn.softmax(x @ w, -1), text)(x))
    np.testing.assert_allclose(around(x, w), jax.nn.softmax(x @ w, -1), rtol=1e-5)


def test_names_in_a_sharded_map_are_those_of_the_function_where_nothing_is_marked():
    x, w = arrays((8, 6), (6, 12))
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    how = {"mesh": mesh, "in_specs": (spec("d"), spec()), "out_specs": spec("d")}
    fused = by_schedule(scaled, SCALED)
    unmarked = jax.jit(jax.shard_map(fused, **how, check_vma=False))
    np.testing.assert_allclose(unmarked(x, w), scaled(x, w), rtol=1e-5)
    with pytest.raises(ScheduleError, match="t1 cannot be in a kernel: pvary is left to XLA"):
        jax.jit(jax.shard_map(fused, **how))(x, w)


def test_what_xla_computes_may_be_kept():
    (x,) = arrays((6, 4))
    fused = by_schedule(sorted_between, "k { x.0:2@grid ( t2!shared x.1:2 ( out ) ) }")
    np.testing.assert_allclose(fused(x), sorted_between(x), rtol=1e-5)


def test_a_schedule_is_the_one_way_that_is_tuned():
    (x,) = arrays((8, 12))
    fused = by_schedule(lambda x: jax.nn.softmax(x, -1), "k { x.0:4@grid ( x.1:4 ( t0 t6 ) x.1:4 ( out ) ) }")
    plan, device = fused.planned(x)
    (subject,) = Bench(plan, device).subjects
    assert not list(subject.others())
    assert subject.find(subject.way) is not None
    tuned = pf.tune(fused, x, seconds=1.0)
    (candidate,) = tuned.candidates
    assert "k {" in candidate.schedule
    assert [k.name for k in tuned.plan.kernels] == ["k"]  # as later calls have it, whatever the clock says
    assert "(used)" not in str(tuned)


def test_a_schedule_needs_static_shapes():
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(ScheduleError, match="static shapes"):
        pf.fuse(lambda a, b: a @ b, options=pf.FuseOptions(schedule="x { a.0:64@grid ( t0 ) }")).explain(
            jax.ShapeDtypeStruct((n, 64), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)
        )
