"""The check of kernels before they are used, with times that are made up, and a few with the clock."""

import json
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import check, execution, isolation, primitive, store, subjects
from pallasfuse.measure import Measured
from pallasfuse.options import FuseOptions
from tests.programs_by_name import attention, softmax, variance

X = np.random.default_rng(0).normal(size=(64, 256)).astype("float32")


def same(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PALLASFUSE_CHECK", "1")


class Clock:
    """Stands in for what measures: kernels are faster or slower, as told; what was compared is kept."""

    def __init__(self, *speedups, uncompiled=(), failed=()):
        self.speedups, self.uncompiled, self.failed = list(speedups), list(uncompiled), list(failed)
        self.compared = []

    def __call__(self, functions, avals, device, *, budget_s, expected_us=None, made=None):
        number = len(self.compared)
        self.compared.append([a.shape for a in avals])
        first, *others = functions
        if number in self.uncompiled:
            return Measured(
                uncompiled=dict.fromkeys(others, "XlaError: shared memory"),
                skipped="nothing else compiles",
                seconds=0.1,
            )
        if number in self.failed:
            return Measured(failed=dict.fromkeys(others, "XlaError: illegal address"), skipped="it fails", seconds=0.1)
        speedup = self.speedups[min(number, len(self.speedups) - 1)]
        times = {first: 100.0} | dict.fromkeys(others, 100.0 / speedup)
        return Measured(
            times, others[0] if speedup > 1 else first, frozenset(others if speedup > 1 else ()), seconds=0.1
        )


@pytest.fixture
def clock(monkeypatch):
    def install(*speedups, **more):
        made = Clock(*speedups, **more)
        monkeypatch.setattr(check, "compare", made)
        return made

    return install


def layers(x):
    """Two equal parts, and what XLA keeps before them."""
    return softmax(jnp.sort(x, axis=-1)), softmax(jnp.sort(-x, axis=-1))


def kernels_run(monkeypatch):
    """The names of the kernels that are lowered from now on."""
    seen = []
    original = execution.run_kernel
    monkeypatch.setattr(
        execution, "run_kernel", lambda plan, kernel, arrays: seen.append(kernel.name) or original(plan, kernel, arrays)
    )
    return seen


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
    return softmax(jnp.sort(x, axis=-1)), variance(jnp.sort(-x, axis=-1)), softmax(jnp.sort(y, axis=-1) * 2)


Y = np.ascontiguousarray(X[:, :128])


def test_of_a_call_that_gains_nothing_the_kernel_that_saves_least_is_given_up_first(clock, monkeypatch):
    compared = clock(4.0, 1.5, 2.0, 0.9, 1.2)
    seen = kernels_run(monkeypatch)
    fused = pf.fuse(three)
    for got, want in zip(fused(X, Y), three(X, Y), strict=True):
        same(got, want)
    assert len(compared.compared) == 5
    planned = pf.fuse(three).trace(X, Y).fuse().tile().plan.kernels
    plan = fused.explain(X, Y)
    assert [k.name for k in plan.kernels] == [planned[0].name, planned[2].name] == seen
    assert [v.kept for v in plan.verdicts] == [True, True, True, False, True]
    assert plan.verdicts[3].reason == f"without {planned[1].name}, then"
    assert any("the whole call is not faster" in f.reason for f in plan.fallbacks)
    assert "saves 16.67 us a call" in str(plan)
    assert len(compared.compared) == 5


def test_kernels_are_given_up_until_none_is_left(clock, monkeypatch):
    compared = clock(4.0, 1.5, 2.0, 0.9)
    seen = kernels_run(monkeypatch)
    fused = pf.fuse(three)
    fused(X, Y)
    assert len(compared.compared) == 3 + 3
    assert seen == []
    assert [v.kept for v in fused.explain(X, Y).verdicts] == [True, True, True, False, False, False]
    assert len({str(f) for f in fused.explain(X, Y).fallbacks}) >= 3


def test_after_three_tries_all_are_given_up(clock, monkeypatch):
    monkeypatch.setattr(check, "_FEWER_KERNELS", 1)
    compared = clock(4.0, 1.5, 2.0, 0.9)
    assert pf.fuse(three)(X, Y)
    assert len(compared.compared) == 3 + 2
    assert pf.fuse(three).explain(X, Y).kernels == ()


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

    monkeypatch.setattr(check, "compare", compare)
    fused = pf.fuse(softmax)
    fused(X)
    plan = fused.explain(X)
    (verdict,) = plan.verdicts
    assert not verdict.kept
    told = "kernels alone, without the gaps between them: 8.45 us against 6.5 us"
    assert told in verdict.reason
    assert any(told in f.reason for f in plan.fallbacks)


def test_what_a_call_saves_is_told(clock):
    clock(2.0, 4.0)
    fused = pf.fuse(layers)
    assert fused.explain(X).verdicts == ()
    assert "checked" not in str(fused.explain(X))
    fused(X)
    assert "saves 75 us a call" in str(fused.explain(X))
    assert "checked: saves 75 us a call" in fused.explain(X).summary


# --- when nothing is checked


@pytest.mark.parametrize(
    "options",
    [
        FuseOptions(check=False),
        FuseOptions(target="xla"),
        FuseOptions(tiles=(("i", 8),)),
        FuseOptions(parts=1),
        FuseOptions(strict=True),
    ],
)
def test_who_asks_for_something_gets_it(clock, options):
    compared = clock(0.5)
    same(pf.fuse(softmax, options=options)(X), softmax(X))
    assert compared.compared == []


def test_check_is_true_for_a_named_target(clock):
    compared = clock(0.5)
    pf.fuse(softmax, options=FuseOptions(target="xla", check=True))(X)
    assert len(compared.compared) == 1


def test_strict_and_checked_says_what_was_lost(clock):
    clock(0.5)
    with pytest.raises(pf.FusionError, match="not faster than XLA's on this device"):
        pf.fuse(softmax, options=FuseOptions(strict=True, check=True))(X)


def test_the_environment_switches_it_off(clock, monkeypatch):
    compared = clock(0.5)
    monkeypatch.setenv("PALLASFUSE_CHECK", "0")
    pf.fuse(softmax)(X)
    pf.fuse(softmax, options=FuseOptions(check=True))(X)
    assert compared.compared == []


def test_export_is_not_checked(clock):
    compared = clock(0.5)
    exported = jax.export.export(jax.jit(pf.fuse(softmax)))(jax.ShapeDtypeStruct(X.shape, X.dtype))
    same(exported.call(X), softmax(X))
    assert compared.compared == []


def test_another_platform_is_not_checked(clock):
    compared = clock(0.5)
    jax.jit(pf.fuse(softmax)).trace(X).lower(lowering_platforms=("tpu",))
    assert compared.compared == []


def test_stages_lower_what_they_show(clock):
    compared = clock(0.5)
    tiled = pf.fuse(softmax).trace(X).fuse().tile()
    assert tiled.plan.kernels
    same(tiled.lower().compile()(X), softmax(X))
    assert compared.compared == []


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match=r"FuseOptions\.check"):
        FuseOptions(check="yes")


# --- what does not run


def test_a_kernel_that_does_not_compile_is_run_in_another_way(clock, monkeypatch):
    compared = clock(2.0, uncompiled=[0])
    fused = pf.fuse(attention)
    q = np.random.default_rng(1).normal(size=(512, 32)).astype("float32")
    planned = fused.trace(q, q, q).fuse().tile().plan.kernels[0]
    with pytest.warns(UserWarning, match=r"does not run on cpu: XlaError: shared memory; instead: .*") as caught:
        same(fused(q, q, q), attention(q, q, q))
    assert len(caught) == 1
    assert len(compared.compared) == 2
    (kernel,) = fused.explain(q, q, q).kernels
    assert kernel.schedule != planned.schedule
    with warnings.catch_warnings():  # it is known by now
        warnings.simplefilter("error")
        pf.fuse(attention)(q, q, q)
    assert len(compared.compared) == 2


def test_without_another_way_it_is_xlas(clock, monkeypatch):
    clock(2.0, uncompiled=range(9))
    seen = kernels_run(monkeypatch)
    with pytest.warns(
        UserWarning, match=r"fused_t0_t\d+ .*does not run on cpu: .*shared memory; XLA's own is used"
    ) as caught:
        same(pf.fuse(softmax)(X), softmax(X))
    assert len(caught) == 1
    assert seen == []
    assert any(
        "does not run on this device (XlaError: shared memory)" in f.reason
        for f in pf.fuse(softmax).explain(X).fallbacks
    )


def test_what_fails_when_it_runs_is_forgotten_with_the_process(clock, tmp_path):
    clock(2.0, failed=range(9))
    with pytest.warns(UserWarning, match="illegal address"):
        same(pf.fuse(softmax)(X), softmax(X))
    assert not list(tmp_path.rglob("*.json"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.fuse(softmax)(X)


def test_known_failures_count_where_nothing_is_checked(clock, monkeypatch):
    clock(2.0, uncompiled=range(9))
    with pytest.warns(UserWarning, match="shared memory"):
        pf.fuse(softmax)(X)
    seen = kernels_run(monkeypatch)
    same(pf.fuse(softmax, options=FuseOptions(check=False))(X), softmax(X))
    assert seen == []


def test_slow_kernels_are_used_where_nothing_is_checked(clock, monkeypatch):
    clock(0.5)
    pf.fuse(softmax)(X)
    seen = kernels_run(monkeypatch)
    pf.fuse(softmax, options=FuseOptions(check=False))(X)
    assert len(seen) == 1


def test_an_error_of_the_check_is_not_the_users(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(check, "compare", broken)
    with pytest.warns(UserWarning, match=r"could not be checked \(ZeroDivisionError: mine\)"):
        same(pf.fuse(softmax)(X), softmax(X))


def unknown_call(x):
    """Lowers, and does not compile."""
    return jax.ffi.ffi_call("pallasfuse_no_such_function", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def break_kernels(monkeypatch, which=lambda program: True):
    original = execution.emit

    def emit(target, program, inputs):
        found = original(target, program, inputs)
        return {n: unknown_call(x) for n, x in found.items()} if which(program) else found

    monkeypatch.setattr(execution, "emit", emit)


@pytest.mark.parametrize("checked", [True, False])
def test_a_kernel_that_really_does_not_compile(monkeypatch, checked):
    break_kernels(monkeypatch)
    fused = pf.fuse(softmax, options=FuseOptions(check=None if checked else False))
    with pytest.warns(UserWarning, match="pallasfuse_no_such_function") as caught:
        same(fused(X), softmax(X))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(fused(X + 1), softmax(X + 1))
        same(pf.fuse(softmax)(X), softmax(X))


def test_only_the_kernel_that_is_to_blame_is_dropped(monkeypatch):
    def function(x, y):
        return softmax(x), variance(y)

    def of_softmax(program):
        return "exp" in str(program)

    y = np.random.default_rng(1).normal(size=(9, 31)).astype("float32")
    break_kernels(monkeypatch, of_softmax)
    fused = pf.fuse(function, options=FuseOptions(check=False))
    with pytest.warns(UserWarning, match="no_such_function"):
        got = fused(X, y)
    same(got[0], softmax(X))
    same(got[1], variance(y))
    seen = kernels_run(monkeypatch)
    jax.jit(fused).lower(X, y)
    assert len(seen) == 1


def test_a_kernel_that_cannot_be_lowered(monkeypatch):
    """Without a check, too, and inside another jit."""

    def emit(*_):
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(execution, "emit", emit)
    fused = pf.fuse(softmax, options=FuseOptions(check=False))
    with pytest.warns(UserWarning, match="ZeroDivisionError: mine; XLA's own is used") as caught:
        same(jax.jit(lambda x: fused(x) + 1)(X), softmax(X) + 1)
    assert len(caught) == 1


def test_a_target_that_was_asked_for_fails_as_it_does(monkeypatch):
    break_kernels(monkeypatch)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_function"):
        pf.fuse(softmax, target="xla")(X)


def test_errors_of_the_users_own_function_stay_as_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_function"), warnings.catch_warnings():
        warnings.simplefilter("error")
        pf.fuse(lambda x: unknown_call(softmax(x)), options=FuseOptions(check=False))(X)


# --- programs that are not run on drawn arguments


def test_a_loop_that_may_not_end_is_not_run(clock):
    compared = clock(2.0)

    def function(x):
        x = softmax(x)
        return jax.lax.while_loop(lambda c: jnp.any(c > 1e-9), lambda c: c / 2, x)

    fused = pf.fuse(function)
    same(fused(X), function(X))
    assert len(compared.compared) == 1  # the kernel, not the call


# --- transformations and configurations, by the clock


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
    monkeypatch.setattr(check, "compare", lambda *a, **k: compared.append(1) or Measured(skipped="a test"))
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


def test_the_check_tells_the_truth_about_a_slow_kernel(monkeypatch):
    """By the clock: a kernel that computes everything many times over loses."""
    original = execution.emit

    def slow(target, program, inputs):
        def again(_, found):
            given, _ = jax.lax.optimization_barrier((inputs, found))
            return original(target, program, given)

        return jax.lax.fori_loop(0, 20, again, original(target, program, inputs))

    monkeypatch.setattr(execution, "emit", slow)
    fused = pf.fuse(softmax)
    x = np.random.default_rng(0).normal(size=(512, 2048)).astype("float32")
    same(fused(x), softmax(x))
    (verdict,) = fused.explain(x).verdicts
    assert not verdict.kept
    assert verdict.ours_us > 3 * verdict.xla_us
