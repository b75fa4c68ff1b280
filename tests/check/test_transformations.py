"""The check by the clock, inside transformations, threads and configurations."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import check, execution, isolation, loop_check, primitive, store, written_out
from pallasfuse.measure import Measured
from pallasfuse.options import FuseOptions
from pallasfuse.verdicts import BODIES, WHOLE_CALL, WRITTEN_OUT
from tests.check.clock import Clock, X, kernels_run, same, timed_by
from tests.programs_by_name import softmax, variance


@pytest.mark.sampled(5, cover=())
@pytest.mark.parametrize("transform", ["jit", "vmap", "scan", "nested", "x64", "nans", "device", "promotion", "ensure"])
def test_it_is_checked_inside(transform):
    fused = pf.fuse(softmax)
    x = jnp.asarray(X)
    match transform:
        case "jit":
            same(jax.jit(lambda y: fused(y) + 1)(x), softmax(x) + 1)
        case "vmap":
            same(jax.vmap(fused)(x[None]), softmax(x)[None])
        case "scan":
            same(jax.lax.scan(lambda c, _: (fused(c), None), x, length=2)[0], softmax(softmax(x)))
        case "nested":
            outer = pf.fuse(
                lambda y: jax.lax.scan(lambda c, _: (fused(c), None), variance(y)[:, None] + y, length=2)[0]
            )
            same(outer(x), softmax(softmax(variance(x)[:, None] + x)))
        case "x64":
            with jax.enable_x64(True):
                got = fused(X.astype("float64"))
                assert got.dtype == jnp.float64
                same(got, softmax(x))
        case "nans":
            with jax.debug_nans(True):
                same(jax.jit(fused)(x), softmax(x))
        case "device":
            with jax.default_device(jax.devices()[0]):
                same(fused(X), softmax(x))
        case "promotion":
            with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
                same(
                    pf.fuse(lambda y: jnp.exp(y - y.max(1, keepdims=True)).sum(1))(x),
                    jnp.exp(X - X.max(1, keepdims=True)).sum(1),
                )
        case "ensure":

            @jax.jit
            def function(y):
                with jax.ensure_compile_time_eval():
                    known = fused(np.ones((4, 8), np.float32))
                return y + known.sum()

            same(function(x), x + 4)
    assert list(store.current().entries())


def test_lowering_inside_a_trace():
    """A lowering while something else is traced: no tracer leaks into what is measured."""
    fused = pf.fuse(softmax)

    @jax.jit
    def function(x):
        assert jax.jit(fused).lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile() is not None
        return fused(x)

    same(function(X), softmax(X))


def test_many_threads_check_one_after_the_other(monkeypatch):
    functions = [softmax, variance, lambda x: softmax(-x), lambda x: softmax(x * 2)] * 2
    results, at_once, most = {}, [0], [0]
    original = check.compare

    def counted(*args, **kwargs):
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        try:
            return original(*args, **kwargs)
        finally:
            at_once[0] -= 1

    monkeypatch.setattr(check, "compare", counted)

    def run(number):
        results[number] = pf.fuse(functions[number])(X)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(functions))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    for n, f in enumerate(functions):
        same(results[n], f(X))
    assert most[0] == 1


def test_a_call_that_is_checked_by_itself_and_inside_another_one(monkeypatch):
    """One thread checks a call and waits for its turn, another one has the turn and lowers the same call inside a loop."""
    inner = pf.fuse(softmax)
    outer = pf.fuse(lambda x: jax.lax.scan(lambda c, _: (inner(c), None), variance(x)[:, None] + x, length=2)[0])
    x = jnp.asarray(X)
    calls = [jax.jit(inner), jax.jit(outer), jax.jit(lambda y: inner(y) + 1)]
    results = {}
    threads = [
        threading.Thread(target=lambda n=n, f=f: results.update({n: f(x)}), daemon=True) for n, f in enumerate(calls)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert len(results) == 3
    same(results[1], softmax(softmax(variance(x)[:, None] + x)))


def test_whoever_measures_waits_for_nobody(monkeypatch):
    """The lock of a call is held by a thread that waits for its turn: the thread whose turn it is goes on without it."""
    compared = []
    timed_by(monkeypatch, lambda *a, **k: compared.append(1) or Measured(skipped="a test"))
    plan = pf.fuse(softmax).trace(X).fuse().tile().plan
    call = primitive.FusedCall(plan.converted.original, FuseOptions(), "softmax", primitive.Once(), {"xla": plan})
    device = jax.devices()[0]
    with call.check_lock:
        assert (
            isolation.apart(lambda: call.plan_on(plan.target, device), device)
            .verdicts[0]
            .reason.startswith("not measured (a test)")
        )


def test_interruption_leaves_nothing_locked(monkeypatch):
    def interrupted(*_, **__):
        raise SystemExit

    original = check.compare
    monkeypatch.setattr(check, "compare", interrupted)
    with pytest.raises(SystemExit):
        pf.fuse(softmax)(X)
    monkeypatch.setattr(check, "compare", original)
    same(pf.fuse(softmax)(X), softmax(X))
    assert isolation.apart(lambda: 1, jax.devices()[0]) == 1


def test_what_is_written_can_be_read_by_anyone(tmp_path):
    pf.fuse(softmax)(X)
    files = list(tmp_path.rglob("*.json"))
    assert files
    for file in files:
        content = json.loads(file.read_text())
        assert content["identity"]["jax"] == jax.__version__


@pytest.fixture
def slow_kernels(monkeypatch):
    """Kernels that compute everything many times over."""
    original = execution.emit

    def slow(target, program, inputs):
        def again(_, found):
            given, _ = jax.lax.optimization_barrier((inputs, found))
            return original(target, program, given)

        return jax.lax.fori_loop(0, 60, again, original(target, program, inputs))

    monkeypatch.setattr(execution, "emit", slow)


@pytest.mark.usefixtures("slow_kernels")
def test_the_check_tells_the_truth_about_a_slow_kernel():
    """By the clock they lose, on a busy machine, too."""
    fused = pf.fuse(softmax)
    x = np.random.default_rng(0).normal(size=(512, 2048)).astype("float32")
    same(fused(x), softmax(x))
    (verdict,) = fused.explain(x).verdicts
    assert not verdict.kept
    assert verdict.ours_us > verdict.xla_us


def scanned(x, weights):
    return jax.lax.scan(lambda c, w: (jax.nn.softmax(c @ w, -1) @ w.T, c.sum()), x, weights)


@pytest.mark.usefixtures("slow_kernels")
def test_bodies_that_lose_are_left_to_xla(clock):
    """The check of a body decides for it alone: the loop is the program's own then."""
    clock(0.5)
    x, weights = (
        np.random.default_rng(n).normal(size=s).astype("float32") for n, s in enumerate([(64, 32), (3, 32, 512)])
    )
    fused = pf.fuse(scanned)
    before = fused.explain(x, weights)
    assert [len(b.plan.kernels) for b in before.bodies] == [1]
    for have, want in zip(fused(x, weights), scanned(x, weights), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)
    assert not fused.explain(x, weights).fuses
    text = jax.jit(fused).lower(x, weights).as_text()
    assert text.count("dot_general") == 2


def test_bodies_that_win_are_used(clock):
    made = clock(2.0)
    x, weights = np.ones((64, 32), "float32"), np.ones((3, 32, 512), "float32")
    fused = pf.fuse(scanned)
    fused(x, weights)
    (body,) = fused.explain(x, weights).bodies
    assert [v.kept for v in body.plan.verdicts if v.subject == body.plan.kernels[0].name] == [True]
    assert made.compared


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("faster", [True, False])
def test_the_clock_decides_about_the_whole_call_with_its_loops(clock, monkeypatch, faster):
    """A body that wins alone, in a loop that wins or loses by it; the verdict is kept."""
    made = clock(2.0)
    whole = Clock(2.0 if faster else 0.5)
    monkeypatch.setattr(loop_check, "compare", whole)
    monkeypatch.setattr(written_out, "compare", Clock(0.5))
    x, weights = np.ones((64, 32), "float32"), np.ones((3, 32, 512), "float32")
    for _ in range(2):
        fused = pf.fuse(scanned)
        for have, want in zip(fused(x, weights), scanned(x, weights), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-4)
        plan = fused.explain(x, weights)
        assert bool(plan.bodies) == faster
        assert [v.kept for v in plan.verdicts if v.subject == BODIES] == [faster]
    assert made.compared and len(whole.compared) == 1


def test_loops_that_cannot_be_timed_keep_their_bodies(clock, monkeypatch):
    clock(2.0)
    whole = Clock(0.5)
    monkeypatch.setattr(loop_check, "compare", whole)

    def until(x, w):
        return jax.lax.while_loop(
            lambda s: s[1].sum() > 1e9, lambda s: (s[0] + 1, jax.nn.softmax(s[1] @ w, -1) @ w.T), (0, x)
        )

    def either(x, w):
        return jax.lax.cond(x.sum() > 0, lambda x: jax.nn.softmax(x @ w, -1) @ w.T, lambda x: x, x)

    for function, what in ((until, "while"), (either, "cond")):
        fused = pf.fuse(function)
        fused(np.ones((64, 32), "float32"), np.ones((32, 512), "float32"))
        plan = fused.explain(np.ones((64, 32), "float32"), np.ones((32, 512), "float32"))
        (verdict,) = (v for v in plan.verdicts if v.subject == BODIES)
        assert plan.bodies and verdict.kept and what in verdict.reason
    assert not whole.compared


def test_choices_that_have_no_kernels_do_not_prevent_that_check(clock, monkeypatch):
    """Both programs choose among the same branches."""
    clock(2.0)
    whole = Clock(0.5)
    monkeypatch.setattr(loop_check, "compare", whole)
    monkeypatch.setattr(written_out, "compare", Clock(0.5))

    def function(x, weights):
        return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, scanned(x, weights)[0])

    x, weights = np.ones((64, 32), "float32"), np.ones((3, 32, 512), "float32")
    fused = pf.fuse(function)
    fused(x, weights)
    (verdict,) = (v for v in fused.explain(x, weights).verdicts if v.subject == BODIES)
    assert whole.compared and not verdict.kept and not fused.explain(x, weights).bodies


def test_a_failure_of_that_check_leaves_the_bodies(clock, monkeypatch):
    clock(2.0)
    monkeypatch.setattr(loop_check, "compare", lambda *args, **kwargs: 1 / 0)
    x, weights = np.ones((64, 32), "float32"), np.ones((3, 32, 512), "float32")
    seen = kernels_run(monkeypatch)
    with pytest.warns(UserWarning, match="could not be checked .ZeroDivisionError"):
        pf.fuse(scanned)(x, weights)
    assert seen


def test_what_could_not_be_timed_is_tried_once_in_a_process(clock, monkeypatch):
    clock(2.0)
    whole = Clock(2.0, failed=range(9))
    monkeypatch.setattr(loop_check, "compare", whole)
    monkeypatch.setattr(written_out, "compare", Clock(0.5))
    x, weights = np.ones((64, 32), "float32"), np.ones((3, 32, 512), "float32")
    for _ in range(2):
        fused = pf.fuse(scanned)
        fused(x, weights)
        (verdict,) = (v for v in fused.explain(x, weights).verdicts if v.subject == BODIES)
        assert verdict.kept and "it fails" in verdict.reason
    assert len(whole.compared) == 1


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("faster", [True, False])
def test_of_two_loops_the_one_that_loses_alone_is_left_before_the_whole_is_timed(clock, monkeypatch, faster):
    """What `explain` shows then is what the call runs."""

    def both(x, weights):
        y, _ = jax.lax.scan(lambda c, w: (jax.nn.softmax(c @ w, -1) @ w.T, None), x, weights)
        return jax.lax.scan(lambda c, w: (jax.nn.softmax(jnp.sin(c @ w), -1) @ w.T, None), y, weights)[0]

    clock(0.5, 2.0)
    whole = Clock(2.0 if faster else 0.5)
    monkeypatch.setattr(loop_check, "compare", whole)
    monkeypatch.setattr(written_out, "compare", Clock(0.5))
    x, weights = np.ones((64, 32), "float32"), np.ones((3, 32, 512), "float32")
    fused = pf.fuse(both)
    np.testing.assert_allclose(fused(x, weights), both(x, weights), rtol=1e-4)
    plan = fused.explain(x, weights)
    assert len(whole.compared) == 1
    assert [v.kept for v in plan.verdicts if v.subject == BODIES] == [faster]
    assert len(plan.bodies) == faster
    assert jax.jit(fused).lower(x, weights).as_text().count("while") >= 2


@pytest.mark.parametrize("faster", [True, False])
def test_bodies_that_lose_alone_may_win_in_their_loop(clock, monkeypatch, faster):
    clock(0.5)
    whole = Clock(2.0 if faster else 0.5)
    monkeypatch.setattr(loop_check, "compare", whole)
    monkeypatch.setattr(written_out, "compare", Clock(0.5))
    x, weights = np.ones((64, 32), "float32"), np.ones((3, 32, 512), "float32")
    for _ in range(2):
        seen = kernels_run(monkeypatch)
        fused = pf.fuse(scanned)
        for have, want in zip(fused(x, weights), scanned(x, weights), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-4)
        plan = fused.explain(x, weights)
        assert bool(seen) == bool(plan.bodies) == faster
        assert [v.reason for v in plan.verdicts if v.subject == WHOLE_CALL] == (
            ["as it is planned, with kernels that were not faster alone, or in another form"] if faster else []
        )
    assert len(whole.compared) == 1


@pytest.mark.parametrize("faster", [True, False])
def test_kernels_of_a_form_that_xla_runs_no_faster_may_win(clock, monkeypatch, faster):
    """Sums of complex quotients are for XLA as fast in parts; only then have they a kernel."""

    def sums(x, y):
        return jnp.sum(x[:, None] / y[None], axis=-1)

    clock(0.5)
    whole = Clock(2.0 if faster else 0.5)
    monkeypatch.setattr(loop_check, "compare", whole)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(256, 64)) + 1j * rng.normal(size=(256, 64)) for _ in range(2))
    x, y = x.astype("complex64"), y.astype("complex64")
    seen = kernels_run(monkeypatch)
    fused = pf.fuse(sums, options=pf.FuseOptions(price=True))
    np.testing.assert_allclose(fused(x, y), sums(x, y), rtol=1e-3)
    plan = fused.explain(x, y)
    assert bool(seen) == plan.written_out == bool(plan.kernels) == faster
    assert len(whole.compared) == 1


def test_what_cannot_be_timed_is_not_planned_once_more(clock, monkeypatch):
    def until(x, y):
        return jax.lax.while_loop(lambda s: s[0].real.sum() > 1e9, lambda s: (s[0] / y, s[1] + 1), (x, 0))

    clock(0.5)
    asked = []
    own = primitive.FusedCall._without_clock

    def noted(self):
        asked.append(self)
        return own(self)

    monkeypatch.setattr(primitive.FusedCall, "_without_clock", noted)
    x = (X + 1j).astype("complex64")
    fused = pf.fuse(until)
    fused(x, x)
    assert any(v.subject == WRITTEN_OUT for v in fused.explain(x, x).verdicts)
    assert not asked


def test_kernels_that_fail_later_are_left_out_of_what_is_planned(clock, monkeypatch):
    """What is known to fail stays away, also where the call as it is planned has won before."""
    clock(0.5)
    monkeypatch.setattr(loop_check, "compare", Clock(2.0))
    monkeypatch.setattr(written_out, "compare", Clock(0.5))
    x, weights = np.ones((64, 32), "float32"), np.ones((3, 32, 512), "float32")
    pf.fuse(scanned)(x, weights)

    def fails(*_):
        raise ValueError("no kernel today")

    monkeypatch.setattr(execution, "emit", fails)
    with pytest.warns(UserWarning, match="no kernel today"):
        found = pf.fuse(scanned)(x, weights)
    for have, want in zip(found, scanned(x, weights), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4)
