"""Kernels that do not compile or do not run: another way to run them is found, or XLA's own."""

import warnings

import jax
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import check, execution, primitive, store
from pallasfuse.measure import Measured
from pallasfuse.options import FuseOptions
from tests.check.clock import X, kernels_run, same, timed_by
from tests.programs_by_name import attention, softmax, variance


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
    monkeypatch.setattr(
        primitive, "as_function", lambda plan, exported: lambda *args: execution.execute(plan, args)
    )  # not traced before
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


def test_a_shortage_while_compiling_is_not_kept_on_disk(monkeypatch):
    """Another process may have the memory."""
    shortage = "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate"

    def short(functions, *_, **__):
        return Measured(uncompiled=dict.fromkeys(list(functions)[1:], shortage), skipped="nothing else compiles")

    timed_by(monkeypatch, short)
    with pytest.warns(UserWarning, match="does not run"):
        pf.fuse(softmax)(X)
    assert not any("error" in str(record) for _, record in store.current().entries())
