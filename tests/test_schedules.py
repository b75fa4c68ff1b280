"""`FuseOptions.schedule`: the kernels of a function as its user writes them, and what is said of those that cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.errors import ScheduleError


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


@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_function_runs_by_the_schedule_that_is_given(name, target):
    function, shapes, text = KERNELS[name]
    given = arrays(*shapes)
    fused = pf.fuse(function, target=target, options=pf.FuseOptions(schedule=text))
    for have, want in zip(jax.tree.leaves(fused(*given)), jax.tree.leaves(function(*given)), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-4, atol=2e-5)
    plan = fused.explain(*given)
    (kernel,) = plan.kernels
    assert kernel.strategy == "scheduled"
    assert len(kernel.phases) == text.count("{")
    proof = pf.verify(fused, *given).proof
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
    np.testing.assert_allclose(fused(*given), finite(*given), rtol=2e-4, atol=2e-5)
    plan = fused.explain(*given)
    assert plan.kernels[0].visited_share < 1
    assert any("stands -1e+09" in e for e in plan.exceptions)
    report = pf.verify(fused, *given)
    assert report.equivalent, str(report)
