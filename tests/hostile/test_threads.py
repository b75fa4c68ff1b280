"""Many threads, re-entrancy and interruption: every call returns its own result, and nothing is left locked."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.options import FuseOptions
from tests.programs_by_name import attention, softmax, variance

THREADS = 8


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def at_once(*calls):
    """The results of calls that start together, each in a thread of its own; the first exception is raised."""
    gate = threading.Barrier(len(calls))

    def run(call):
        gate.wait(timeout=60)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result(timeout=120) for f in [pool.submit(run, c) for c in calls]]


def same(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_one_function_on_different_values():
    fused = pf.fuse(softmax)
    inputs = [values(6, 41, seed=n) for n in range(THREADS)]
    for got, x in zip(at_once(*(lambda x=x: fused(x) for x in inputs)), inputs, strict=True):
        same(got, softmax(x))


@pytest.mark.deep  # `test_different_functions_planned_at_once` plans at once, too
def test_one_function_at_different_shapes():
    fused = pf.fuse(variance)
    inputs = [values(3 + n % 4, 20 + n) for n in range(THREADS)]
    for got, x in zip(at_once(*(lambda x=x: fused(x) for x in inputs)), inputs, strict=True):
        same(got, variance(x))


def test_different_functions_planned_at_once():
    functions = [softmax, variance, attention, lambda x: softmax(x * 2), lambda x: softmax(-x)] * 2
    inputs = [tuple(values(9, 9, seed=k) for k in range(3)) if f is attention else (values(9, 33),) for f in functions]
    calls = [lambda f=f, a=a: pf.fuse(f)(*a) for f, a in zip(functions, inputs, strict=True)]
    for got, f, a in zip(at_once(*calls), functions, inputs, strict=True):
        same(got, f(*a))


def test_plans_made_at_once_are_those_made_alone():
    shapes = [jax.ShapeDtypeStruct((64, 100 + n), jnp.float32) for n in range(THREADS)]
    fused = pf.fuse(softmax)
    alone = [str(pf.fuse(softmax).explain(s)) for s in shapes]
    assert at_once(*(lambda s=s: str(fused.explain(s)) for s in shapes)) == alone


def test_one_lowered_call_planned_from_many_threads():
    """The plan of one equation is made once, whoever asks first."""
    jitted = jax.jit(pf.fuse(softmax))
    traced = jitted.trace(values(6, 41))
    texts = at_once(*(lambda: traced.lower().as_text() for _ in range(THREADS)))
    assert len(set(texts)) == 1


def test_a_thread_that_raises_does_not_disturb_the_others():
    def raises(x):
        softmax(x)
        raise KeyError("mine")

    x = values(6, 41)
    failing, working = pf.fuse(raises), pf.fuse(softmax)

    def fail():
        with pytest.raises(KeyError, match="mine"):
            failing(x)

    for got in at_once(*[fail, lambda: working(x)] * (THREADS // 2))[1::2]:
        same(got, softmax(x))
    same(working(x + 1), softmax(x))


def test_a_fused_function_inside_the_tracing_of_another():
    inner = pf.fuse(softmax)
    seen = []

    @pf.fuse
    def outer(x):
        concrete = inner(np.ones((3, 5), np.float32))  # evaluated while outer is traced
        seen.append(concrete)
        return inner(x) @ inner(x).T

    x = values(6, 41)
    same(outer(x), softmax(x) @ softmax(x).T)
    plan = pf.fuse(lambda y: outer(y) + 1).explain(x)
    assert plan.kernels


def test_explaining_while_tracing():
    inner = pf.fuse(softmax)

    @pf.fuse
    def outer(x):
        assert inner.explain(jax.ShapeDtypeStruct(x.shape, x.dtype)).kernels
        return inner(x)

    same(outer(values(6, 41)), softmax(values(6, 41)))


def test_recursion_of_a_fused_function():
    @pf.fuse(static_argnums=1)
    def function(x, depth):
        return softmax(x) if depth == 0 else softmax(function(x, depth - 1))

    x = values(6, 41)
    same(function(x, 2), softmax(softmax(softmax(x))))


# --- interruption


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, RecursionError])
def test_an_exception_while_tracing_passes_and_leaves_nothing(error):
    armed = [True]

    def function(x):
        y = softmax(x)
        if armed[0]:
            raise error("stop")
        return y

    fused, x = pf.fuse(function), values(6, 41)
    for call in (fused, fused.trace, fused.explain, jax.jit(fused), jax.vmap(fused)):
        with pytest.raises(error, match="stop"):
            call(x)
    armed[0] = False
    same(fused(x), softmax(x))


@pytest.mark.sampled(2, cover=())
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")
@pytest.mark.parametrize("after_s", [0.002, 0.01, 0.03, 0.06, 0.12])
def test_an_interrupt_while_planning_leaves_the_next_call_working(after_s):
    """A signal at any moment of tracing, planning or compiling: no lock is kept, no half plan is found later."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    def function(x):
        # a body of its own, so that the derivation is not remembered
        p = softmax(x * (1 + after_s)) ** 2
        return p / p.sum(-1, keepdims=True)

    fused, x = pf.fuse(function, options=FuseOptions(tiles=(("j", 16),))), values(8, 64)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        fused(x)
        while signal.getitimer(signal.ITIMER_REAL)[0]:  # the call was faster
            time.sleep(0.001)
    except BaseException as error:
        # JAX may wrap what is raised inside its own callbacks
        assert isinstance(error, KeyboardInterrupt) or "KeyboardInterrupt" in repr(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    (got,) = at_once(lambda: fused(x))  # another thread: a lock that was kept would block it
    same(got, function(x))
