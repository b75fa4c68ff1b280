"""Ways to write fusible programs that pattern matchers stumble over: each is right, and is fused or says why not."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from tests.property.programs import AXIS_NAMES

pytestmark = pytest.mark.optimized

FOURS = tuple((name, 4) for name in AXIS_NAMES)
TARGETS = ("xla", "interpret")
MAY_RUN_ON = ("xla",) if "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ else TARGETS
"""Where a trap runs that asks for no targets: with `--quick`, on one. It is planned for both."""
QUICKLY = {"xla_backend_optimization_level": 0}


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# extents that no tile divides; matrix products are padded to tiles of 16, of which each axis has several
Q, K, V = normal(35, 4), normal(37, 4, seed=1), normal(37, 3, seed=2)


def weigh(scores, v):
    return jax.nn.softmax(scores, axis=-1) @ v


def wide(x):
    """The same array in float64; integers and booleans as they are."""
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def check(fn, *args, passes=1, fallback=None, ulps=16.0, run_on=MAY_RUN_ON):
    """Every target plans one kernel of so many passes, with this fallback or none; those in `run_on` compute the right values.

    The error against float64 is at most `ulps` of the largest result. Returns the plans.
    """
    shapes = jax.tree.leaves(jax.eval_shape(fn, *args))
    if run_on:
        with jax.enable_x64(True):
            run = jax.jit(fn).lower(*map(wide, args)).compile(QUICKLY)
            exact = [np.asarray(x) for x in jax.tree.leaves(run(*map(wide, args)))]
    plans = []
    for target in TARGETS:
        tiled = pf.fuse(fn, target=target, options=pf.FuseOptions(tiles=FOURS)).trace(*args).fuse().tile()
        (kernel,) = tiled.plan.kernels
        assert (kernel.group.passes, kernel.schedule.trips > 1) == (passes, True), tiled.plan.summary
        assert kernel.strategy == "rolling_update" or passes > 1, tiled.plan.summary
        stated = [str(f) for f in tiled.plan.fallbacks]
        assert any(fallback in f for f in stated) if fallback else not stated, tiled.plan.summary
        plans.append(tiled.plan)
        if target in run_on:
            lowered = tiled.lower().lowered
            compiled = lowered.compile(QUICKLY)
            for got, shape, truth in zip(jax.tree.leaves(compiled(*args)), shapes, exact, strict=True):
                compare(got, shape, truth, ulps)
    return plans


def compare(got, shape, truth, ulps):
    assert (got.dtype, got.shape) == (shape.dtype, shape.shape)
    if jnp.issubdtype(got.dtype, jnp.floating):
        allowed = ulps * float(jnp.finfo(got.dtype).eps)
        largest = np.abs(truth[np.isfinite(truth)]).max(initial=1e-30)
        np.testing.assert_allclose(np.asarray(got, np.float64), truth, rtol=allowed, atol=allowed * largest)
    else:
        np.testing.assert_array_equal(got, truth)


# --- layout


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_over_another_axis(axis):
    x = normal(9, 13, 7)
    check(lambda x: jax.nn.softmax(x, axis=axis), x, run_on=TARGETS if axis == 0 else ("xla",))
    check(lambda x: jax.nn.logsumexp(x, axis=axis), x, run_on=("interpret",) if axis == 1 else ())


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (0, 2)], ids=str)
def test_softmax_over_two_axes(axes):
    check(lambda x: jax.nn.softmax(x, axis=axes), normal(5, 13, 7), run_on=("xla",))


def test_softmax_of_the_transposed_scores():
    """Keys are the rows, and the softmax runs down the columns."""
    check(lambda q, k, v: jax.nn.softmax(k @ q.T, axis=0).T @ v, Q, K, V)
    check(lambda q, k, v: v.T @ jax.nn.softmax(k @ q.T, axis=0), Q, K, V, run_on=())


@pytest.mark.deep  # `test_masks_from_data` reads data, too
def test_permuted_keys():
    """Keys come as [dim, key], as after a transposition elsewhere; heads and batch in any order."""
    check(lambda q, k, v: weigh(q @ k, v), Q, np.ascontiguousarray(K.T), V, run_on=("xla",))
    q, k, v = normal(2, 19, 3, 4), normal(3, 4, 2, 37, seed=1), normal(37, 2, 3, 5, seed=2)

    def heads(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bihd,hdbj->bhij", q, k), axis=-1)
        return jnp.einsum("bhij,jbhe->bieh", p, v)

    check(heads, q, k, v)


# --- masks and scales


def causal(q, k):
    return jnp.arange(k.shape[0]) <= jnp.arange(q.shape[0])[:, None] + (k.shape[0] - q.shape[0])


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("hidden", [-np.inf, -1e30, "min", -1e3])
def test_mask_plus_scores(hidden):
    """An additive mask skips tiles, also when it is finite but far from every score."""
    value = np.finfo(np.float32).min if hidden == "min" else hidden

    def fn(q, k, v):
        return weigh(jnp.where(causal(q, k), 0.0, value) + q @ k.T, v)

    on_xla, _ = check(fn, Q, K, V, run_on={-np.inf: TARGETS, "min": ("xla",)}.get(hidden, ()))
    assert (on_xla.kernels[0].visited_share < 1) == (hidden != -1e3)


def test_masks_from_data():
    visible = np.random.default_rng(5).random((35, 37)) < 0.5
    visible[:, 3] = True
    added = np.where(visible, 0, -np.inf).astype(np.float32)
    check(lambda q, k, v, m: weigh(q @ k.T + m, v), Q, K, V, added, run_on=("xla",))
    check(lambda q, k, v, m: weigh(jnp.where(m, q @ k.T, -jnp.inf), v), Q, K, V, visible)
    # softmax(where=) divides under a mask, by a sum that may be empty: the division waits until the sum is finished
    check(lambda q, k, v, m: jax.nn.softmax(q @ k.T, axis=-1, where=m) @ v, Q, K, V, visible, passes=2, run_on=("xla",))


SCALES = {
    "mul": lambda s: s * np.float32(2 / 3),
    "div": lambda s: s / np.float32(2 / 3),
    "mul_from_the_left": lambda s: 0.6 * s,
    "div_by_a_root": lambda s: s / np.sqrt(5),
    "mul_by_a_power_of_two": lambda s: s * 0.25,
    "negated": lambda s: -s / 3,
    "mul_by_a_negative": lambda s: s * -1.5,
    "twice": lambda s: s * 0.3 / 0.7,
}


@pytest.mark.sampled(9, cover=())
@pytest.mark.parametrize("name", SCALES)
def test_scale(name):
    run_on = {"mul": TARGETS, "div": TARGETS, "negated": ("xla",), "twice": ("xla",)}.get(name, ())
    check(lambda q, k, v: weigh(SCALES[name](q @ k.T), v), Q, K, V, run_on=run_on)


@pytest.mark.deep  # `test_scale` has the others
def test_scale_from_an_argument():
    check(lambda q, k, v, s: weigh(q @ k.T * s, v), Q, K, V, np.float32(0.3), run_on=())
    check(lambda q, k, v, s: weigh(q @ k.T / s, v), Q, K, V, np.float32(-3.0), run_on=())
    check(lambda q, k, v, s: weigh(q @ k.T * s[:, None], v), Q, K, V, normal(35), run_on=("xla",))
    check(lambda q, k, v, s: weigh((q * s) @ k.T, v), Q, K, V, np.float32(0.3), run_on=())


WINDOWS = {
    "behind_and_ahead": lambda i, j: (i - j < 3) & (j - i < 4),
    "ahead_only": lambda i, j: (j >= i) & (j < i + 4),
    "distance": lambda i, j: jnp.abs(i - j) <= 3,
    "blocks": lambda i, j: i // 4 == j // 4,
    "dilated": lambda i, j: (jnp.abs(i - j) < 7) & ((i - j) % 2 == 0),
    "band_and_sinks": lambda i, j: (jnp.abs(i - j) < 2) | (j < 2),
}


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_that_are_not_causal(name):
    def fn(q, k, v):
        i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])
        return weigh(jnp.where(WINDOWS[name](i, j), q @ k.T, -jnp.inf), v)

    run_on = {"ahead_only": TARGETS, "band_and_sinks": ("xla",), "dilated": ("xla",)}.get(name, ())
    for plan in check(fn, normal(53, 4), normal(53, 4, seed=1), normal(53, 3, seed=2), run_on=run_on):
        assert (plan.kernels[0].visited_share < 1) == (name != "blocks")


def test_mask_with_one_query_row():
    """A mask of shape [key] or [1, key] hides keys from every query; one query decodes against all keys."""
    padding = np.arange(37) < 30

    def hide(q, k, v, mask):
        return weigh(jnp.where(mask, q @ k.T, -jnp.inf), v)

    check(hide, Q, K, V, padding, run_on=())
    check(hide, Q, K, V, padding[None])
    for plan in check(lambda q, k, v: hide(q, k, v, jnp.arange(37)[None] < 15), Q, K, V, run_on=("xla",)):
        assert plan.kernels[0].visited_share < 0.6
    check(lambda q, k, v, n: hide(q, k, v, jnp.arange(37) < n), Q[:1], K, V, np.int32(7), run_on=("xla",))
    check(lambda q, k, v, m: weigh(jnp.where(m, k @ q, -jnp.inf), v), Q[0], K, V, padding, run_on=("interpret",))


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("shape", [(19, 37), (1, 3, 19, 37), (2, 1, 19, 37), (2, 1, 1, 37)], ids=str)
def test_bias_shared_over_batch(shape):
    q, k, v = normal(2, 3, 19, 4), normal(2, 3, 37, 4, seed=1), normal(2, 3, 37, 5, seed=2)

    def fn(q, k, v, bias):
        p = jax.nn.softmax(jnp.einsum("bhid,bhjd->bhij", q, k) + bias, axis=-1)
        return jnp.einsum("bhij,bhje->bhie", p, v)

    run_on = {(2, 1, 19, 37): TARGETS, (2, 1, 1, 37): ("xla",)}.get(shape, ())
    check(fn, q, k, v, normal(*shape, seed=3), run_on=run_on)


# --- values that are also used elsewhere


def test_row_reductions_that_are_also_returned():
    def fn(q, k, v):
        s = q @ k.T
        m = jnp.max(s, -1, keepdims=True)
        e = jnp.exp(s - m)
        total = jnp.sum(e, -1, keepdims=True)
        return (e / total) @ v, m, total[:, 0], m[:, 0] + jnp.log(total[:, 0])

    check(fn, Q, K, V)


def test_moments_that_are_also_returned():
    def fn(x):
        mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5), mean, variance, jnp.max(x, -1)

    check(fn, normal(35, 37) + 3, run_on=("interpret",))


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("returned", ["scores", "weights", "probabilities"])
def test_an_intermediate_is_returned(returned):
    def fn(q, k, v):
        s = q @ k.T
        e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
        p = e / jnp.sum(e, -1, keepdims=True)
        return p @ v, {"scores": s, "weights": e, "probabilities": p}[returned]

    check(fn, Q, K, V, run_on={"probabilities": TARGETS, "scores": ("xla",)}.get(returned, ()))


def test_an_intermediate_is_used_outside_the_chain():
    def fn(q, k, v):
        s = q @ k.T
        return weigh(s, v), jnp.sin(s), jnp.cumsum(s, axis=0)

    check(fn, Q, K, V, fallback="cumsum")


@pytest.mark.deep  # `test_row_reductions_that_are_also_returned` has several, too
def test_probabilities_feed_several_reductions():
    def fn(q, k, v):
        p = jax.nn.softmax(q @ k.T, axis=-1)
        return p @ v, p @ (v * v), -jnp.sum(p * jnp.log(p), -1)

    check(fn, Q, K, V, run_on=("xla",))


@pytest.mark.deep  # tests/property/test_transforms.py has closures, too
def test_score_function_with_captured_arrays():
    slopes, table, order = (
        jnp.asarray([0.5, 0.25]),
        jnp.asarray(normal(55, seed=8)),
        jnp.asarray(normal(19, 37, seed=9)),
    )

    def fn(q, k, v):
        bias = slopes[:, None, None] * (jnp.arange(37) - jnp.arange(19)[:, None])
        return weigh(jnp.tanh(jnp.einsum("hid,hjd->hij", q, k) + bias + order * np.float32(0.1)), v)

    q, k, v = normal(2, 19, 4), normal(2, 37, 4, seed=1), normal(2, 37, 3, seed=2)
    check(fn, q, k, v)
    # a bias by distance is looked up in the kernel; XLA computes the distances
    distance = np.arange(19)[:, None] - np.arange(37) + 36

    def biased(q, k, v):
        return weigh(q @ k.T + table[jnp.asarray(distance)], v)

    for plan in check(biased, Q[:19], K, V, fallback="outside every kernel"):
        (kernel,) = plan.kernels
        assert len(kernel.lookups) == kernel.target.looks_up
        assert any("gather" in str(f) for f in plan.fallbacks) != kernel.target.looks_up


# --- types


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8, np.bool_])
def test_integer_and_boolean_inputs(dtype):
    x = np.random.default_rng(0).integers(0, 2 if dtype == np.bool_ else 50, (35, 37)).astype(dtype)
    signed = dtype == np.int8

    def fn(w, x):
        return jnp.sum(jax.nn.softmax(w + x.astype(jnp.float32) / 7, axis=-1) * x, -1)

    check(fn, normal(35, 37), x, run_on=TARGETS if signed else ("xla",))
    check(lambda q, k, v, m: weigh(jnp.where(m > 0, q @ k.T, -1e9), v), Q, K, V, x, run_on=("xla",) if signed else ())
    check(lambda x: jnp.var(x.astype(jnp.float32), -1), x, run_on=())


@pytest.mark.deep  # `test_integer_and_boolean_inputs` reads integers, too
def test_reductions_of_integers():
    """Integers wrap and divide: no repair is derived, and they take another pass."""
    x = np.random.default_rng(0).integers(-50, 50, (35, 37)).astype(np.int32)
    check(lambda x: jnp.sum(jnp.abs(x - jnp.max(x, -1, keepdims=True)), -1), x, passes=2)

    def comparisons(x):
        top = jnp.max(x, -1, keepdims=True)
        return jnp.sum(x == top, -1), jnp.all(x < top + 1, -1)

    check(comparisons, x, passes=2, run_on=())


def test_weak_types():
    """Python scalars adapt to the arrays that they meet, and results are as weak as the plain function's."""

    def fn(x, scale, shift):
        y = x * scale + shift
        return jax.nn.logsumexp(y, axis=-1) * scale, scale

    def of_positions(scale):
        return jax.nn.softmax(jnp.arange(37) * scale + jnp.zeros((35, 1)), axis=-1)

    half = normal(35, 37, dtype=jnp.bfloat16)
    check(fn, half, 2.0, 1, ulps=4)
    check(of_positions, 0.25, run_on=("xla",))
    for function, args in ((fn, (half, 2.0, 1)), (of_positions, (0.25,))):
        for target in TARGETS:
            have = jax.tree.leaves(jax.eval_shape(pf.fuse(function, target=target), *args))
            plain = jax.tree.leaves(jax.eval_shape(function, *args))
            assert [(y.dtype, y.weak_type) for y in have] == [(y.dtype, y.weak_type) for y in plain]


# --- x64


def rms_norm(x, w):
    return (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-12)) @ w


def masked(q, k, v):
    return weigh(jnp.where(causal(q, k), q @ k.T / jnp.sqrt(2.0).astype(q.dtype), -jnp.inf), v)


def cross_entropy(x, w, y):
    logits = x @ w
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * y, axis=-1)


IN_FLOAT64 = {
    "causal": (masked, [(35, 4), (37, 4), (37, 3)], 0),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=-1), [(35, 37)], 0),
    "variance": (lambda x: jnp.var(x, -1), [(35, 37)], 1e3),
    "variance_with_python_scalars": (lambda x: 2 * jnp.var(x / 3, -1) + 1, [(35, 37)], 10),
    "rms_norm": (rms_norm, [(35, 37), (37, 3)], 1),
    "cross_entropy": (cross_entropy, [(35, 4), (4, 37), (35, 37)], 0),
}


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("name", IN_FLOAT64)
def test_float64(name):
    """Under x64, float64 inputs are computed in float64 throughout: errors are of its size (1e-16), not float32's (1e-7)."""
    fn, shapes, offset = IN_FLOAT64[name]
    args = [normal(*s, seed=n, dtype=np.float64) + offset for n, s in enumerate(shapes)]
    run_on = {"causal": TARGETS, "variance": TARGETS, "rms_norm": ("xla",), "cross_entropy": ("xla",)}.get(name, ())
    with jax.enable_x64(True):
        for plan in check(fn, *args, ulps=16 * max(1, offset), run_on=run_on):
            assert {t.dtype for k in plan.kernels for t in (*k.program.inputs, *k.program.outputs)} == {"float64"}


@pytest.mark.deep  # `test_float64` has float64 alone
def test_float64_beside_float32():
    """Each chain keeps its own precision, beside one of another."""

    def fn(x, bias, y):
        return jax.nn.logsumexp(x.astype(jnp.float64) + bias, axis=-1), jax.nn.logsumexp(y, axis=-1)

    with jax.enable_x64(True):
        args = normal(35, 37), normal(35, 37, seed=4, dtype=np.float64), normal(35, 37, seed=1)
        plain = jax.jit(fn).lower(*args).compile(QUICKLY)(*args)
        for target in TARGETS:
            tiled = pf.fuse(fn, target=target, options=pf.FuseOptions(tiles=FOURS)).trace(*args).fuse().tile()
            assert len(tiled.plan.kernels) == 2 and not tiled.plan.fallbacks, tiled.plan.summary
            results = tiled.lower().lowered.compile(QUICKLY)(*args)
            for have, want, rtol in zip(jax.tree.leaves(results), plain, (4e-15, 2e-6), strict=True):
                assert have.dtype == want.dtype
                np.testing.assert_allclose(have, want, rtol=rtol)


def test_int64_positions():
    with jax.enable_x64(True):
        on_xla, _ = check(masked, Q, K, V)
    assert on_xla.kernels[0].visited_share < 1
