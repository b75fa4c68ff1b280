"""Kernels of loops that do not compile: their loops are XLA's then, with one warning, with a clock or without.

No GPU is here: programs are planned for one, and what stands for a loop runs its kernel in the interpreter, or fails.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import _compat, loop_failures, primitive, stages, store, written_out
from pallasfuse.emission import pallas_kernel
from pallasfuse.loop_calls import KernelOfLoop
from pallasfuse.loop_failures import fails, find_failing, note_failure
from pallasfuse.measure import Measured, compare
from pallasfuse.options import FuseOptions
from pallasfuse.verdicts import WRITTEN_OUT
from tests.check.test_failures import unknown_call
from tests.running_loops import DEVICE
from tests.test_recurrences import H100

UNCHECKED = FuseOptions(check=False, price=True)
X = np.random.default_rng(0).normal(size=(40, 8, 16)).astype("float32")


def averages(x):
    return jax.lax.scan(lambda mean, row: ((new := 0.9 * mean + 0.1 * row), new), jnp.zeros(x.shape[1:]), x)[1]


def largest(x):
    return jax.lax.scan(lambda most, row: ((new := jnp.maximum(most, row)), new), x[0], x)[1]


def both(x):
    return averages(x), largest(x)


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Programs are planned for an H100; kernels of loops run in the interpreter, or fail. Yields what to call to choose that."""
    seen: list[str] = []

    def install(breaks=lambda kernel: False, *, lowers=True):
        def by_kernel(loop, *args):
            seen.append(str(loop.kernel))
            if breaks(loop.kernel) and not lowers:
                raise ZeroDivisionError("no such tile")
            found = loop.by_kernel(*args, run=partial(pallas_kernel.call, interpret=True))
            return list(map(unknown_call, found)) if breaks(loop.kernel) else found

        monkeypatch.setattr(KernelOfLoop, "by_xla", by_kernel)
        for module in (primitive, stages):
            monkeypatch.setattr(module, "target_for", lambda platform, options: H100)
        monkeypatch.setattr(_compat, "names_gpu", lambda: True)
        return seen

    assert H100.device == DEVICE
    return install


def of_averages(kernel):
    return "max(" not in str(kernel)


@pytest.mark.deep  # `test_without_a_clock_the_other_loops_are_kept` runs one of them
def test_kernels_of_loops_run_here(as_on_a_gpu):
    seen = as_on_a_gpu()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(pf.fuse(both, options=UNCHECKED)(X), both(X))
    assert len(set(seen)) == 2


@pytest.mark.parametrize("lowers", [True, False], ids=["does not compile", "is not lowered"])
def test_without_a_clock_a_loop_that_fails_is_xlas(as_on_a_gpu, lowers):
    seen = as_on_a_gpu(lambda kernel: True, lowers=lowers)
    fused = pf.fuse(averages, options=UNCHECKED)
    reason = "pallasfuse_no_such_function" if lowers else "ZeroDivisionError: no such tile"
    line = averages.__code__.co_firstlineno + 1
    text = rf"averages: loop_\w+ \(the loop at .*test_loops_that_fail.py:{line}.*does not run on .*{reason}.*XLA's own is used"
    with pytest.warns(UserWarning, match=text) as caught:
        same(fused(X), averages(X))
    assert len(caught) == 1 and seen
    seen.clear()
    with warnings.catch_warnings():  # it is known by now
        warnings.simplefilter("error")
        same(fused(X + 1), averages(X + 1))
        same(pf.fuse(averages, options=UNCHECKED)(X), averages(X))
        same(jax.jit(pf.fuse(averages, options=UNCHECKED))(X), averages(X))
    assert not seen and not fused.explain(X).loops


def test_without_a_clock_the_other_loops_are_kept(as_on_a_gpu):
    seen = as_on_a_gpu(of_averages)
    fused = pf.fuse(both, options=UNCHECKED)
    with pytest.warns(UserWarning, match="loop_.* does not run on") as caught:
        same(fused(X), both(X))
    assert len(caught) == 1
    (loop,) = fused.explain(X).loops
    assert "max(" in str(loop.kernel) and any("max(" in text for text in seen)


def test_a_failure_that_others_noted_after_the_plan_was_made_is_one(as_on_a_gpu, monkeypatch):
    as_on_a_gpu()
    first, second = pf.fuse(both, options=UNCHECKED).explain(X).loops
    note_failure(first, H100.device, "XlaError: too many registers")
    compiled_here = []
    monkeypatch.setattr(loop_failures, "compiled", lambda *given: compiled_here.append(given))
    (line,) = find_failing([first, second, second], H100.device, jax.devices()[0])
    assert first.kernel.name in line and "too many registers; XLA's own is used" in line
    assert compiled_here and fails(first, H100.device) and not fails(second, H100.device)


@pytest.mark.parametrize("error", ["RESOURCE_EXHAUSTED: Out of memory", "XlaError: too many registers"])
def test_a_shortage_is_forgotten_with_the_process(as_on_a_gpu, monkeypatch, error):
    as_on_a_gpu()
    loops = pf.fuse(both, options=UNCHECKED).explain(X).loops
    monkeypatch.setattr(loop_failures, "compiled", lambda *_: error)
    assert len(find_failing(loops, H100.device, jax.devices()[0])) == 2
    names = [identity["of"] for identity, _ in store.current().entries()]
    assert names.count("the kernel of a loop") == (0 if "memory" in error else 2)


def test_in_another_jit_it_is_left_out_when_it_is_not_lowered(as_on_a_gpu):
    as_on_a_gpu(of_averages, lowers=False)
    fused = pf.fuse(both, options=UNCHECKED)
    with pytest.warns(UserWarning, match="no such tile; XLA's own is used") as caught:
        same(jax.jit(fused)(X), both(X))
    assert len(caught) == 1


def test_the_environment_switches_the_clock_off_and_not_the_net(as_on_a_gpu, monkeypatch):
    monkeypatch.setenv("PALLASFUSE_CHECK", "0")
    as_on_a_gpu(of_averages)
    with pytest.warns(UserWarning, match="loop_.* does not run on") as caught:
        same(pf.fuse(averages, options=FuseOptions(price=True))(X), averages(X))
    assert len(caught) == 1


class ClockOfKernels:
    """Compiles what is compared as the clock does; whatever runs is twice as fast as the first."""

    def __call__(self, functions, avals, device, **more):
        first, *others = functions
        found = compare(functions, avals, device, budget_s=0.01)
        uncompiled = {**found.uncompiled}
        runs = [n for n in others if n not in uncompiled]
        if not runs:
            return Measured(uncompiled=uncompiled, skipped="nothing else compiles", seconds=0.1)
        times = {first: 100.0} | dict.fromkeys(runs, 50.0)
        return Measured(times, runs[0], frozenset(runs), uncompiled, seconds=0.1)


@pytest.mark.parametrize("fails", [pytest.param("one", marks=pytest.mark.deep), "all"])
def test_with_a_clock_a_loop_that_fails_is_xlas_and_others_are_kept(as_on_a_gpu, monkeypatch, fails):
    as_on_a_gpu(of_averages if fails == "one" else lambda kernel: True)
    monkeypatch.setattr(written_out, "compare", ClockOfKernels())
    fused = pf.fuse(both if fails == "one" else averages, options=FuseOptions(price=True))
    with pytest.warns(UserWarning, match=r"loop_\w+ \(the loop at .* does not run on .*; XLA's own is used") as caught:
        same(fused(X), both(X) if fails == "one" else averages(X))
    assert len(caught) == 1
    loops = fused.explain(X).loops
    assert ["max(" in str(loop.kernel) for loop in loops] == ([True] if fails == "one" else [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(pf.fuse(averages, options=UNCHECKED)(X), averages(X))


def test_with_a_clock_a_form_that_fails_as_a_whole_is_none(as_on_a_gpu, monkeypatch):
    """Each loop compiles alone, and the program with both does not."""
    as_on_a_gpu()
    alone = ClockOfKernels()

    def clock(functions, avals, device, **more):
        if len(avals) == 1 and avals[0].shape == X.shape:  # the whole program
            others = dict.fromkeys(list(functions)[1:], "XlaError: shared memory")
            return Measured(uncompiled=others, skipped="nothing else compiles", seconds=0.1)
        return alone(functions, avals, device)

    monkeypatch.setattr(written_out, "compare", clock)
    fused = pf.fuse(both, options=FuseOptions(price=True))
    with pytest.warns(UserWarning, match="what is written out does not run on .*: XlaError: shared memory") as caught:
        same(fused(X), both(X))
    assert len(caught) == 1
    plan = fused.explain(X)
    assert not plan.loops
    (verdict,) = (v for v in plan.verdicts if v.subject == WRITTEN_OUT)
    assert not verdict.kept and "it does not run: XlaError: shared memory" in verdict.reason
