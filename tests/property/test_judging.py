"""The judge itself: its bounds hold for programs as XLA runs them, and catch what a broken kernel would give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.property.judging import OPERATIONS, Case, Findings, _aligned

pytestmark = pytest.mark.optimized

N = 13


def normal(*shape, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return np.asarray(jnp.asarray(values, dtype))


def softmax_sum(x, w):
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return jnp.sum(e * w, -1) / jnp.sum(e, -1)


def variance(x, w):
    return jnp.mean((x - jnp.mean(x, -1, keepdims=True)) ** 2, -1)


def weighted_sum(x, w):
    return jnp.sum(x * w, -1)


def log_sum(x, w):
    return jax.nn.logsumexp(x, -1)


def root_mean_square(x, w):
    return jnp.sum(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * w, -1)


def product(x, w):
    return (x[:, None, :] * jnp.ones((1, 3, 1))) @ w.T


CHAINS = [softmax_sum, variance, weighted_sum, log_sum, root_mean_square, product]


def problems(fn, args, got, plain=None):
    findings = Findings()
    findings.compare("output", got, Case(fn, args).truth[0], plain)
    return findings.problems


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("fn", CHAINS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dropped", [0, 5, 12])
def test_a_dropped_element_is_caught(fn, dropped):
    """One of 13 elements that a kernel never adds, in float32."""
    args = [normal(5, N), normal(5, N, seed=1)]
    assert not problems(fn, args, jax.jit(fn)(*args))
    short = [np.delete(a, dropped, axis=-1) for a in args]
    found = problems(fn, args, jax.jit(fn)(*short))
    assert found, f"{fn.__name__} without element {dropped} passes"


def online(x, w, *, tile=4, repair=True):
    """Softmax's weighted sum tile by tile, as a kernel has it."""
    m, total, acc = np.full(len(x), -np.inf, np.float32), np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    for start in range(0, x.shape[1], tile):
        part, weights = x[:, start : start + tile], w[:, start : start + tile]
        new = np.maximum(m, part.max(-1))
        scale = np.exp(m - new) if repair else np.float32(1.0)
        e = np.exp(part - new[:, None])
        total, acc, m = total * scale + e.sum(-1), acc * scale + (e * weights).sum(-1), new
    return acc / total


@pytest.mark.parametrize("tile", [1, 2, 4, 8])
def test_a_missing_repair_is_caught(tile):
    args = [normal(5, N), normal(5, N, seed=1)]
    args[0] = np.sort(args[0], axis=-1)  # a new maximum in every tile
    assert not problems(softmax_sum, args, online(*args, tile=tile))
    assert problems(softmax_sum, args, online(*args, tile=tile, repair=False))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", CHAINS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bound_holds_for_the_plain_program_and_is_not_loose(fn, dtype):
    args = [normal(5, N, dtype=dtype), normal(5, N, seed=1, dtype=dtype)]
    case = Case(fn, args)
    assert not case.plain_verdict.problems
    (ball,) = case.truth
    eps = float(jnp.finfo(dtype).eps)
    assert (ball.radius <= 32 * OPERATIONS * eps * np.abs(ball.value).max()).all(), ball.radius / eps


def test_what_cannot_be_bounded_is_not_judged_and_counted():
    def fn(x):
        centred = x - jnp.mean(x, -1, keepdims=True)
        return 1.0 / jnp.sum(centred, -1)  # rounding errors only

    verdict = Case(fn, [normal(3, N)]).plain_verdict
    assert verdict.unjudged == 1.0
    assert not verdict.problems


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_for_sure_is_judged(value):
    x = normal(3, N)
    x = np.where(np.arange(3 * N).reshape(3, N) == N + 4, np.float32(value), x)
    args, want = [x], jax.jit(lambda x: jnp.sum(x, -1))(x)
    assert not problems(lambda x: jnp.sum(x, -1), args, want)
    assert problems(lambda x: jnp.sum(x, -1), args, np.nan_to_num(want, nan=0.0, posinf=0.0, neginf=0.0))


def test_a_rounding_that_may_go_either_way_is_allowed_both():
    def fn(x):
        return jnp.round(jnp.sum(x, -1) * 0.1 * 5)

    args = [np.asarray([[1.0]], np.float32)]  # 0.5, up to the error of 0.1
    for answer in (0.0, 1.0):
        assert not problems(fn, args, np.asarray([answer], np.float32))
    assert problems(fn, args, np.asarray([3.0], np.float32))


def test_the_plain_program_is_replayed_elsewhere_in_memory():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for offset in (0, 16, 32, 48):
        copy = _aligned(x, offset)
        assert copy.ctypes.data % 64 == offset
        np.testing.assert_array_equal(copy, x)
    case = Case(lambda x: jnp.sum(x, axis=1), [x])
    assert [r[0].tolist() for r in case.replays()] == [case.plain[0].tolist()] * 4


def test_a_replay_excuses_what_the_plain_program_says_and_no_more():
    """A finite number where the truth is NaN: wrong, unless the plain program is as undecided."""
    x = np.asarray([[np.nan, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]], np.float32)
    case = Case(lambda x: jnp.sum(x, axis=1), [x])
    number, wrong = np.asarray([0.0, 6.0], np.float32), np.asarray([0.0, 7.0], np.float32)
    plan = case.plan("xla").plan
    assert case._against([number], case.plain, plan).problems
    assert not case._against([number], [number], plan).problems
    assert case._against([wrong], [wrong], plan).problems
