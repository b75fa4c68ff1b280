"""The check of kernels and of whole calls, with times that are made up: what wins is kept, and remembered."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import store, subjects, whole_calls
from pallasfuse.measure import Measured
from pallasfuse.options import FuseOptions
from pallasfuse.verdicts import WHOLE_CALL, words_for_kernels
from tests.check.clock import X, kernels_run, layers, left_to_xla, same, timed_by
from tests.programs_by_name import softmax, variance


def test_a_kernel_that_is_faster_is_kept(clock, monkeypatch):
    compared, seen = clock(2.0), kernels_run(monkeypatch)
    same(pf.fuse(softmax)(X), softmax(X))
    assert len(seen) == 1
    assert len(compared.compared) == 1  # the call is this kernel and nothing else


def test_a_kernel_that_is_not_faster_is_left_to_xla(clock, monkeypatch):
    clock(1.0)
    seen = kernels_run(monkeypatch)
    fused = pf.fuse(softmax)
    same(fused(X), softmax(X))
    assert seen == []
    plan = fused.explain(X)
    assert plan.kernels == ()
    (verdict,) = plan.verdicts
    assert (verdict.kept, verdict.ours_us, verdict.xla_us, verdict.remembered) == (False, 100.0, 100.0, True)
    assert any("not faster than XLA's on this device: 100 us against 100 us" in f.reason for f in plan.fallbacks)
    assert "XLA's is used" in str(plan)
    assert "XLA's is used" in plan.summary


def test_equal_parts_are_measured_once(clock):
    compared = clock(2.0)
    plan = pf.fuse(layers).trace(X).fuse().tile().plan
    assert len(plan.kernels) == 2
    same(pf.fuse(layers)(X), layers(X))
    assert len(compared.compared) == 2  # one kernel and the whole call
    pf.fuse(layers)(X)
    pf.fuse(softmax)(X)  # the same part of another program
    assert len(compared.compared) == 2


def test_a_call_of_one_kernel_hides_no_starts(clock, monkeypatch):
    """On a GPU, where the time of their kernels decides between short parts of a larger call."""
    compared = clock(2.0)
    monkeypatch.setattr(subjects.Bench, "are_parts", property(lambda bench: len(bench.plan.steps) > 1))
    pf.fuse(layers)(X)
    pf.fuse(softmax)(X)
    assert compared.parts == [True, False, False]  # a kernel of two, their whole call, and the same kernel as a call


def _body(x):
    first, second = layers(x)
    return first - second


_BODIES = {
    "no loop": (_body, False),
    "fori": (lambda x: lax.fori_loop(0, 3, lambda _, c: _body(c), x), True),
    "fori in fori": (lambda x: lax.fori_loop(0, 2, lambda _, y: lax.fori_loop(0, 3, lambda _, c: _body(c), y), x), True),
    "while": (lambda x: lax.while_loop(lambda c: c.sum() > 1e9, _body, x), False),
    "fori beside a while": (
        lambda x: lax.while_loop(lambda c: c.sum() > 1e9, jnp.sin, lax.fori_loop(0, 3, lambda _, c: _body(c), x)), False,
    ),
    "fori beside a choice": (
        lambda x: lax.cond(x.sum() > 1e9, jnp.sin, jnp.cos, lax.fori_loop(0, 3, lambda _, c: _body(c), x)), False,
    ),
}  # fmt: skip
"""Functions, and whether what has kernels in them hides their starts."""


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", _BODIES)
def test_a_body_hides_starts_where_the_loop_is_timed_after_it(clock, monkeypatch, name):
    function, wanted = _BODIES[name]
    compared, original = clock(2.0), whole_calls._measured
    hides = []

    def measured(bench, plan):
        found = original(bench, plan)
        hides.append(compared.parts[-1])
        assert bench.are_parts
        return found

    monkeypatch.setattr(whole_calls, "_measured", measured)
    same(pf.fuse(function)(X), function(X))
    assert hides and set(hides) == {wanted}


def test_one_kernel_is_part_of_a_loop_that_is_timed(monkeypatch):
    """On a GPU, where a call of one kernel hides no starts."""
    plan = pf.fuse(softmax).explain(X)
    in_a_loop = replace(plan, boundary=replace(plan.boundary, timed=True))
    monkeypatch.setattr(subjects.Bench, "device", SimpleNamespace(platform="gpu"), raising=False)
    monkeypatch.setattr(subjects.Bench, "__init__", lambda self, plan: setattr(self, "plan", plan))
    assert [subjects.Bench(p).are_parts for p in (plan, in_a_loop)] == [False, True]


def test_a_kernel_that_wins_by_its_own_time_is_told_with_that(clock, monkeypatch):
    timed_by(monkeypatch, lambda *_, **__: Measured(
        {subjects.XLA: 9.0, "fused": 30.0}, "fused", frozenset({"fused"}), kernels={subjects.XLA: 6.0, "fused": 3.0}))  # fmt: skip
    fused = pf.fuse(softmax)
    fused(X)
    (verdict,) = fused.explain(X).verdicts
    assert (verdict.ours_us, verdict.xla_us, verdict.saved_us) == (3.0, 6.0, 3.0)
    assert "by the times of kernels alone; with their starts 30 us against 9 us" in verdict.reason


def test_the_verdict_outlives_the_process(clock):
    compared = clock(0.5)
    pf.fuse(softmax)(X)
    store._store_in.cache_clear()  # as a new process would
    fused = pf.fuse(softmax)
    assert fused.explain(X).kernels == ()
    fused(X)
    assert len(compared.compared) == 1


@pytest.mark.parametrize(
    "change", [{"jax": "9"}, {"jaxlib": "9"}, {"pallasfuse": "9"}, {"device": "another"}, {"flags": "-O0"}]
)
def test_what_is_measured_elsewhere_does_not_count(clock, monkeypatch, change):
    compared = clock(0.5)
    pf.fuse(softmax)(X)
    around = subjects.environment
    monkeypatch.setattr(subjects, "environment", lambda device: around(device) | change)
    pf.fuse(softmax)(X)
    assert len(compared.compared) == 2


def test_other_shapes_types_and_operations_are_other_parts(clock):
    compared = clock(2.0)
    for x in (X, X[:, :128], X.astype("float16")):
        pf.fuse(softmax)(x)
    pf.fuse(lambda x: softmax(x * 2))(X)
    assert len(compared.compared) == 4


def test_a_call_that_gains_nothing_is_xlas_as_a_whole(clock, monkeypatch):
    clock(2.0, 0.9)
    seen = kernels_run(monkeypatch)
    fused = pf.fuse(layers)
    same(fused(X), layers(X))
    assert seen == []
    plan = fused.explain(X)
    assert plan.kernels == ()
    assert [v.kept for v in plan.verdicts] == [True, True, False]
    assert any("the whole call is not faster" in f.reason for f in plan.fallbacks)


def three(x, y):
    """Three kernels that differ, and what XLA keeps between them."""
    return softmax(left_to_xla(x)), variance(left_to_xla(-x)), softmax(left_to_xla(y) * 2)


Y = np.ascontiguousarray(X[:, :128])


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(
    ("of_calls", "used", "gain"),
    [
        ((0.9, 1.3, 0.95, 1.1, 1.4), (0, 1), 1.4),  # all, the first, the third, the second alone, both that gain
        ((0.9, 1.3, 0.95, 1.1, 1.25), (0,), 1.3),
        ((0.9, 1.3, 0.95, 1.0), (0,), 1.3),
        ((1.05, 1.3, 0.95, 1.0), (0,), 1.3),
        ((1.05, 1.055, 0.95, 1.0), (0, 1, 2), 1.05),  # no more than a seeming gain by fewer
    ],
)
def test_in_a_call_that_gains_little_kernels_are_timed_one_by_one(clock, monkeypatch, of_calls, used, gain):
    compared = clock(4.0, 1.5, 2.0, *of_calls)
    seen = kernels_run(monkeypatch)
    fused = pf.fuse(three)
    for got, want in zip(fused(X, Y), three(X, Y), strict=True):
        same(got, want)
    assert len(compared.compared) == 3 + len(of_calls)
    planned = pf.fuse(three).trace(X, Y).fuse().tile().plan.kernels
    plan = fused.explain(X, Y)
    assert [k.name for k in plan.kernels] == [planned[n].name for n in used] == seen
    assert [v.kept for v in plan.verdicts] == [True] * 3 + [False] * (len(of_calls) - 1) + [True]
    reasons = {v.reason for v in plan.verdicts}
    assert f"with {planned[2].name} alone" in reasons
    assert ("with all kernels" in reasons) == (len(used) < 3)
    assert any("the whole call is faster without it" in f.reason for f in plan.fallbacks) == (len(used) < 3)
    assert f"saves {100 - 100 / gain:.4g} us a call" in str(plan)
    assert len(compared.compared) == 3 + len(of_calls)


def test_where_no_kernel_gains_in_the_call_none_is_left(clock, monkeypatch):
    compared = clock(4.0, 1.5, 2.0, 0.9)
    seen = kernels_run(monkeypatch)
    fused = pf.fuse(three)
    fused(X, Y)
    assert len(compared.compared) == 3 + 1 + 3
    assert seen == []
    assert [v.kept for v in fused.explain(X, Y).verdicts] == [True] * 3 + [False] * 4
    assert len({str(f) for f in fused.explain(X, Y).fallbacks}) >= 3


def test_a_group_that_could_not_be_timed_is_not_used(clock, monkeypatch):
    """Nobody knows what it gains, and of the others none gains anything."""
    compared = clock(4.0, 1.5, 2.0, 0.8, 0.9, skipped=[4])
    seen = kernels_run(monkeypatch)
    fused = pf.fuse(three)
    fused(X, Y)
    assert seen == [] and fused.explain(X, Y).kernels == ()
    assert len(compared.compared) == 3 + 1 + 3


def test_a_group_that_does_not_run_is_left_out_silently(clock, recwarn):
    compared = clock(4.0, 1.5, 2.0, 0.8, 1.3, 1.3, 1.2, failed=[4])
    fused = pf.fuse(three)
    fused(X, Y)
    assert len(compared.compared) == 3 + 1 + 3 + 1  # the second and the third group gain, and are timed together
    assert not [w for w in recwarn if "does not run" in str(w.message)]
    planned = pf.fuse(three).trace(X, Y).fuse().tile().plan.kernels
    assert [k.name for k in fused.explain(X, Y).kernels] == [planned[2].name]
    pf.fuse(three)(X, Y)
    assert len(compared.compared) == 3 + 1 + 3 + 1


@pytest.mark.parametrize("kernels, used", [({4: 1.6}, 3), ({3: 1.1, 4: 1.6}, 1)])
def test_calls_are_compared_by_kernels_only_where_all_were(clock, kernels, used):
    """All kernels together take less by the clock; one group takes less only in kernels, which nobody counted of the others."""
    clock(4.0, 1.5, 2.0, 1.4, 1.3, 0.9, 0.9, kernels=kernels)
    fused = pf.fuse(three)
    fused(X, Y)
    assert len(fused.explain(X, Y).kernels) == used


def test_a_strict_call_is_not_tried_in_groups(clock):
    compared = clock(4.0, 1.5, 1.05)
    fused = pf.fuse(lambda x, y: (softmax(x), variance(y)), options=FuseOptions(strict=True, check=True))
    fused(X, Y)
    assert len(fused.explain(X, Y).kernels) == 2 and len(compared.compared) == 3


def test_what_was_nearly_even_is_tried_beside_those_that_are_left(clock):
    compared = clock(4.0, 0.95, 2.0, 0.9, 1.3, 0.9, 1.5)  # the first alone gains in the call, and more with the second
    fused = pf.fuse(three)
    fused(X, Y)
    planned = pf.fuse(three).trace(X, Y).fuse().tile().plan.kernels
    assert [k.name for k in fused.explain(X, Y).kernels] == [planned[0].name, planned[1].name]
    assert len(compared.compared) == 3 + 1 + 2 + 1


def promising(monkeypatch, *us):
    """The first kernels of a plan are predicted to be so much faster than XLA's; the others are not."""

    def priced(plan):
        saved = iter((*us, *([-1.0] * len(plan.kernels))))
        kernels = [
            replace(k, price=replace(k.price, us=1.0), replaced=replace(k.replaced, us=2.0 + next(saved)))
            for k in plan.kernels
        ]
        return replace(plan, kernels=tuple(kernels))

    doubts, by_price_alone = whole_calls._doubts, whole_calls._by_price_alone
    monkeypatch.setattr(whole_calls, "_doubts", lambda plan: doubts(priced(plan)))
    monkeypatch.setattr(
        whole_calls, "_by_price_alone", lambda bench, plan, *others: by_price_alone(bench, priced(plan), *others)
    )


def test_a_kernel_that_does_not_run_is_not_tried_for_its_price(clock, monkeypatch):
    promising(monkeypatch, 60.0, 20.0)
    tries = 3  # the first fails as it is planned and in two other ways, the second loses alone
    compared = clock(*[1.0] * tries, 0.5, 2.0, 1.2, 1.5, uncompiled=range(tries))
    fused = pf.fuse(three)
    with pytest.warns(UserWarning, match="does not run"):
        fused(X, Y)
    planned = [k.name for k in pf.fuse(three).trace(X, Y).fuse().tile().plan.kernels]
    assert [k.name for k in fused.explain(X, Y).kernels] == planned[1:2]
    assert len(compared.compared) == tries + 2 + 1 + 1


@pytest.mark.parametrize("faster", [True, False])
def test_what_the_price_alone_would_run_is_tried_where_it_promises_more_than_was_found(clock, monkeypatch, faster):
    """Two kernels lose alone, and win in the call; the third wins alone, and nothing is promised of it."""
    promising(monkeypatch, 60.0, 20.0)
    compared = clock(0.5, 0.5, 2.0, 1.2, 1.5 if faster else 1.21)
    fused = pf.fuse(three)
    fused(X, Y)
    planned = [k.name for k in pf.fuse(three).trace(X, Y).fuse().tile().plan.kernels]
    plan = fused.explain(X, Y)
    assert [k.name for k in plan.kernels] == (planned[:2] if faster else planned[2:])
    assert len(compared.compared) == 3 + 1 + 1
    kept = {v.subject: v.kept for v in plan.verdicts if v.subject != WHOLE_CALL}
    assert kept == {name: (name in planned[:2]) == faster for name in planned}
    told = [v for v in plan.verdicts if v.subject == WHOLE_CALL]
    assert any("what the price alone would run" in v.reason and v.kept == faster for v in told)


def test_what_the_price_promises_no_more_of_is_not_tried(clock, monkeypatch):
    promising(monkeypatch, 10.0)
    compared = clock(0.5, 0.5, 2.0, 1.2)  # 17 of 100 microseconds are found
    fused = pf.fuse(three)
    fused(X, Y)
    assert len(compared.compared) == 3 + 1


def test_integers_of_kernels_and_calls_are_drawn_below_what_they_mean(clock):
    compared = clock(2.0)

    def function(x, lengths):
        known = jnp.arange(256)[None, :] < lengths[:, None]
        return softmax(jnp.where(known, left_to_xla(x), -jnp.inf))

    pf.fuse(function)(X, np.full(64, 200))
    assert len(compared.below) == 2
    assert all(256 in below for below in compared.below)


def test_those_that_gain_least_are_timed_in_the_call_together(clock, monkeypatch):
    monkeypatch.setattr(whole_calls, "_ALONE", 1)
    compared = clock(4.0, 1.5, 2.0, 0.9, 0.95, 1.2)
    fused = pf.fuse(three)
    assert fused(X, Y)
    assert len(compared.compared) == 3 + 1 + 2
    planned = pf.fuse(three).trace(X, Y).fuse().tile().plan.kernels
    assert [k.name for k in fused.explain(X, Y).kernels] == [planned[1].name, planned[2].name]


def test_a_call_that_keeps_half_of_what_its_kernels_gain_is_left_as_it_is(clock):
    compared = clock(1.5, 1.05, 1.1, 1.35)  # 33, 5 and 9 of 100 microseconds alone, 26 together
    fused = pf.fuse(three)
    fused(X, Y)
    assert len(fused.explain(X, Y).kernels) == 3 and len(compared.compared) == 3 + 1


def test_what_no_clock_can_see_in_the_call_is_not_tried_kernel_by_kernel(clock):
    """What is left gains 1.1% of the call, and each further try compiles the whole program."""
    compared = clock(1.004, 1.005, 1.006, 0.9)
    fused = pf.fuse(three)
    fused(X, Y)
    assert fused.explain(X, Y).kernels == () and len(compared.compared) == 3 + 1


def test_a_call_that_does_not_run_is_not_tried_with_fewer_kernels(clock):
    compared = clock(2.0, failed=[3])
    with pytest.warns(UserWarning, match="the fused call does not run"):
        fused = pf.fuse(three)
        fused(X, Y)
    assert len(compared.compared) == 4


def test_a_kernel_that_wins_by_the_clock_alone_is_left_to_xla(monkeypatch):
    """Two starts of ours are fewer than XLA's three, and yet our kernels take longer."""

    def compare(functions, *_, **__):
        times, kernels = ({n: t for n, t in zip(functions, pair, strict=True)} for pair in ((22.9, 19.1), (6.5, 8.45)))
        return Measured(times, next(iter(functions)), frozenset(), kernels=kernels, seconds=0.1)

    timed_by(monkeypatch, compare)
    fused = pf.fuse(softmax)
    fused(X)
    plan = fused.explain(X)
    (verdict,) = plan.verdicts
    assert not verdict.kept
    told = "kernels alone, without the gaps between them: 8.45 us against 6.5 us"
    assert told in verdict.reason
    assert any(told in f.reason for f in plan.fallbacks)


def test_what_was_timed_by_kernels_alone_is_said_once():
    entry = {"faster": False, "us": 1e6 * (1e-6 * 1.184), "xla_us": 1.1, "kernels_us": 1.184, "xla_kernels_us": 1.1}
    assert entry["us"] != entry["kernels_us"]  # by the last bit
    assert words_for_kernels(entry) == ""
    assert "1.184 us against 1.1 us" in words_for_kernels({**entry, "us": 9.0, "xla_us": 10.0})


@pytest.mark.parametrize(
    ("alone", "with_it", "calls", "kept"),
    [(0.95, 1.5, 2, True), (0.95, 1.21, 2, False), (0.95, 0.9, 2, False), (0.8, 1.5, 1, False)],
)
def test_a_kernel_that_is_a_little_slower_alone_is_tried_in_the_whole_call(
    clock, monkeypatch, alone, with_it, calls, kept
):
    """What it leaves may be faster to read than what XLA would have left."""
    compared = clock(1.2, alone, 1.1, 1.2, with_it)
    seen = kernels_run(monkeypatch)
    fused = pf.fuse(three)
    for got, want in zip(fused(X, Y), three(X, Y), strict=True):
        same(got, want)
    assert len(compared.compared) == 3 + calls
    planned = [k.name for k in pf.fuse(three).trace(X, Y).fuse().tile().plan.kernels]
    plan = fused.explain(X, Y)
    assert [k.name for k in plan.kernels] == seen == (planned if kept else [planned[0], planned[2]])
    assert plan.verdicts[1].kept == kept
    saved = 100 - 100 / (with_it if kept else 1.2)
    assert f"saves {saved:.4g} us a call" in str(plan)
    assert len(compared.compared) == 3 + calls


def test_what_a_call_saves_is_told(clock):
    clock(2.0, 4.0)
    fused = pf.fuse(layers)
    assert fused.explain(X).verdicts == ()
    assert "checked" not in str(fused.explain(X))
    fused(X)
    assert "saves 75 us a call" in str(fused.explain(X))
    assert "checked: saves 75 us a call" in fused.explain(X).summary


def test_a_loop_that_may_not_end_is_not_run(clock):
    compared = clock(2.0)

    def function(x):
        x = softmax(x)
        return jax.lax.while_loop(lambda c: jnp.any(c > 1e-9), lambda c: c / 2, x)

    fused = pf.fuse(function)
    same(fused(X), function(X))
    assert len(compared.compared) == 1  # the kernel, not the call


def until_small(x):
    return lax.while_loop(lambda c: jnp.any(c > 1e-9), lambda c: c / 2, x)


@jax.custom_vjp
def halved(x):
    return until_small(x)


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (g,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.jit(until_small)(softmax(x)),
        lambda x: lax.scan(lambda c, _: (until_small(softmax(c)), None), x, length=3)[0],
        lambda x: lax.cond(x[0, 0] > 0, until_small, softmax, x),
        lambda x: halved(softmax(x)),
        lambda x: pf.fuse(lambda y: until_small(softmax(y)))(x) + 1.0,
    ],
    ids=["jit", "scan", "cond", "custom_vjp", "fuse"],
)
def test_no_clock_sees_what_has_a_loop_of_unknown_length_anywhere(function):
    plan, _ = pf.fuse(function).planned(X)
    assert not plan.target.timed
    assert pf.fuse(lambda x: lax.fori_loop(0, 3, lambda _, c: softmax(c), x)).planned(X)[0].target.timed


def test_bodies_of_a_loop_of_unknown_length_run_as_they_are_planned(clock):
    """The second kernel is not predicted to be faster by more than the error of prices, and no clock sees the whole."""
    clock(*[2.0] * 4)

    def body(c):
        x, y, number = c
        scores = y @ y.T * 0.1
        scores = jnp.where(jnp.arange(len(y))[:, None] >= jnp.arange(len(y)), scores, -jnp.inf)
        return jax.nn.softmax(x @ x.T * 0.1, -1) @ x, jax.nn.softmax(scores, -1) @ y, number + 1

    def steps(x, y):
        return lax.while_loop(lambda c: c[-1] < 3, body, (x, y, 0))[:-1]

    given = jnp.ones((1024, 64)), jnp.ones((4096, 32))
    fused = pf.fuse(steps, options=pf.FuseOptions(price=True))
    text = fused.lower(*given).as_text(debug_info=True)
    planned = {k.name for body in fused.explain(*given).bodies for k in body.plan.kernels}
    assert planned
    assert planned == set(re.findall(r"fused(?:_t[0-9]+)+", text))


def test_a_call_that_no_clock_sees_is_planned_as_if_nothing_were_timed(clock):
    """Its kernels must win by their price, and by their own clock: the second loses by that."""
    compared = clock(2.0, 0.5, 2.0)

    def function(x, y):
        return lax.while_loop(lambda c: jnp.any(c > 1e-9), lambda c: c / 2, x), *three(x, y)

    fused = pf.fuse(function)
    assert [f.planned(X, Y)[0].target.timed for f in (fused, pf.fuse(three))] == [False, True]
    fused(X, Y)
    planned = [k.name for k in fused.trace(X, Y).fuse().tile().plan.kernels]
    plan = fused.explain(X, Y)
    assert not plan.target.timed
    assert [k.name for k in plan.kernels] == [planned[0], planned[2]]
    assert len(compared.compared) == 3
