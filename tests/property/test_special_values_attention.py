"""Special values in masked, biased and capped attention: NaN, infinite or finite exactly where the plain function is.

What a default plan may do otherwise is in `plan.exceptions`; a strict plan has none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from tests.property.programs import AXIS_NAMES

INF, NAN = np.inf, np.nan
# XLA compiles loops over less than 1 KiB in another way, and rounds their products otherwise: two passes over tiles of four keys
# would not have the same scores. No price takes a kernel of that size.
TILES = tuple((name, 8) for name in AXIS_NAMES)
QUERIES, KEYS, DIM, COLUMNS = 35, 37, 4, 3  # matrix products are padded to tiles of 16
QUICKLY = {"xla_backend_optimization_level": 0}


def weigh(scores, v):
    return jax.nn.softmax(scores, axis=-1) @ v


def positions(scores):
    return jnp.arange(scores.shape[0])[:, None] + (scores.shape[1] - scores.shape[0]), jnp.arange(scores.shape[1])


def masked_by(mask, hidden=-INF):
    def attention(q, k, v):
        s = q @ k.T / 2
        i, j = positions(s)
        value = jnp.finfo(s.dtype).min if hidden == "min" else hidden
        return weigh(jnp.where(mask(i, j), s, value), v)

    return attention


def alibi(q, k, v):
    s = q @ k.T / 2
    i, j = positions(s)
    return weigh(jnp.where(j <= i, s + 0.25 * (j - i).astype(s.dtype), -INF), v)


def soft_cap(q, k, v):
    s = q @ k.T / 2
    i, j = positions(s)
    return weigh(jnp.where(j <= i, 5 * jnp.tanh(s / 5), -INF), v)


def added_mask(q, k, v):
    s = q @ k.T / 2
    i, j = positions(s)
    return weigh(s + jnp.where(j <= i, 0, -INF).astype(s.dtype), v)


def without_normalization(q, k, v):
    s = q @ k.T / 2
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return e @ v, jnp.sum(e, -1)


ATTENTIONS = {
    "global": lambda q, k, v: weigh(q @ k.T / 2, v),
    "without_normalization": without_normalization,
    "causal": masked_by(lambda i, j: j <= i),
    "window": masked_by(lambda i, j: (j <= i) & (i - j < 4)),
    "window_on_both_sides": masked_by(lambda i, j: jnp.abs(i - j) < 4),
    "prefix": masked_by(lambda i, j: (j <= i) | (j < 6)),
    "alibi": alibi,
    "soft_cap": soft_cap,
    "added_mask": added_mask,
    "first_rows_masked": masked_by(lambda i, j: j + 20 <= i),
    "middle_rows_masked": masked_by(lambda i, j: (i < 15) | (i > 20)),
    "last_rows_masked": masked_by(lambda i, j: j >= i + 10),
    "every_row_masked": masked_by(lambda i, j: j > 40),
    "hidden_at_minus_1e30": masked_by(lambda i, j: j + 20 <= i, -1e30),
    "hidden_at_the_lowest": masked_by(lambda i, j: j + 20 <= i, "min"),
    "causal_at_the_lowest": masked_by(lambda i, j: j <= i, "min"),
}


def base(dtype=np.float32):
    rng = np.random.default_rng(3)
    return [rng.standard_normal(s).astype(dtype) for s in ((QUERIES, DIM), (KEYS, DIM), (KEYS, COLUMNS))]


def _set(array, where, value):
    changed = array.copy()
    changed[where] = value
    return changed


def _cases(dtype=np.float32):
    """(name, arguments): special values at the first tile, inside, and in the last tile, alone and together."""
    q, k, v = base(dtype)
    big = float(jnp.finfo(dtype).max)
    for name, value in (("inf", INF), ("minus_inf", -INF), ("nan", NAN)):
        for place in (0, 21, KEYS - 1):
            yield f"v_{name}_{place}", [q, k, _set(v, (place, 1), value)]
        yield f"k_{name}", [q, _set(k, (21, 1), value), v]
        yield f"first_key_{name}", [q, _set(k, 0, value), v]
        yield f"last_key_{name}", [q, _set(k, (KEYS - 1, 0), value), v]
        yield f"q_{name}", [_set(q, (20, 2), value), k, v]
    yield "v_both_inf", [q, k, _set(_set(v, (1, 1), INF), (30, 1), -INF)]
    yield "v_inf_and_nan", [q, k, _set(_set(v, (2, 0), INF), (29, 1), NAN)]
    yield "weights_underflow", [q * 40, k * 4, v]
    for place in (0, 21, KEYS - 1):
        yield f"weights_underflow_beside_inf_{place}", [q * 40, k * 4, _set(v, (place, 0), INF)]
    rising = np.linspace(0, 1, KEYS)[:, None].astype(dtype)
    for scale in (160, -160, 240):
        # weights fall from one to zero by steps, each of which exp can express
        yield f"inf_beside_slowly_vanishing_weights_{scale}", [
            np.ones_like(q), np.broadcast_to(rising * scale / 2, k.shape).astype(dtype), _set(v, (slice(None), 2), INF)
        ]  # fmt: skip
    yield "all_equal", [np.ones_like(q), np.ones_like(k), np.ones_like(v)]
    yield "zeros", [q * 0, k * 0, -v * 0]
    yield "very_negative", [np.full_like(q, -100), np.full_like(k, 100), v]
    yield "scores_overflow_to_minus_inf", [np.full_like(q, -(big**0.75)), np.full_like(k, big**0.75), v]
    yield "scores_overflow_to_inf", [np.full_like(q, big**0.75), k, v]
    yield "scores_near_overflow", [np.full_like(q, big**0.49), np.full_like(k, -(big**0.49)), v]
    yield "v_near_overflow", [q, k, np.broadcast_to(np.asarray([0.9, -0.99, 0.7]) * big, v.shape).astype(dtype)]
    yield (
        "sums_of_v_below_overflow",
        [q, k, np.where(np.arange(KEYS)[:, None] < 15, big / 38, -big / 38).astype(dtype) + v],
    )
    yield "subnormal_v", [q, k, (v * float(jnp.finfo(dtype).tiny) / 8).astype(dtype)]
    yield "subnormal_k", [q, (k * float(jnp.finfo(dtype).tiny) / 8).astype(dtype), v]


def kinds(x):
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    x = np.asarray(x, np.float64)
    return np.where(np.isnan(x), 1, np.where(np.isposinf(x), 2, np.where(np.isneginf(x), 3, 0)))


def is_excepted(exceptions, args, name):
    """Do the stated exceptions speak of these arguments? Overflowing sums, infinite weighted values, hidden specials; scores
    that are hidden by adding to them."""
    v = np.asarray(args[2], np.float64)
    text = " ".join(exceptions)
    overflows = np.abs(v[np.isfinite(v)]).max(initial=0) > float(jnp.finfo(args[2].dtype).max) / KEYS
    return (
        (overflows and "overflow" in text)
        or (np.isinf(v).any() and "is infinite" in text)
        or (not np.isfinite(v).all() and "a masked 0 * inf" in text)
        or (name == "added_mask" and not np.isfinite(args[1]).all() and "-inf + inf is skipped" in text)
    )


@functools.cache
def plain_results(name, dtype):
    """For every case: the plain function's results, and those in float64."""
    function = jax.jit(ATTENTIONS[name])
    run = function.lower(*base(dtype)).compile(QUICKLY)
    plain = [[np.asarray(x) for x in jax.tree.leaves(run(*args))] for _, args in _cases(dtype)]
    with jax.enable_x64(True):
        run = function.lower(*base(np.float64)).compile(QUICKLY)
        wide = [[np.asarray(a, np.float64) for a in args] for _, args in _cases(dtype)]
        return plain, [[np.asarray(x) for x in jax.tree.leaves(run(*args))] for args in wide]


def judge(name, dtype, target, strict):
    fused = pf.fuse(ATTENTIONS[name], target=target, strict=strict, options=pf.FuseOptions(tiles=TILES))
    tiled = fused.trace(*base(dtype)).fuse().tile()
    plan, compiled = tiled.plan, tiled.lower().lowered.compile(QUICKLY if target == "interpret" else None)
    assert len(plan.kernels) == 1 and not plan.fallbacks, plan.summary
    assert plan.kernels[0].schedule.trips > 1
    plain, exact = plain_results(name, dtype)
    problems = []
    for (case, args), wanted, truth in zip(_cases(dtype), plain, exact, strict=True):
        with np.errstate(all="ignore"):
            excepted = is_excepted(plan.exceptions, args, name)
        for have, want, real in zip(jax.tree.leaves(compiled(*args)), wanted, truth, strict=True):
            if (kinds(have) != kinds(want)).any() and not excepted:
                problems.append(f"{case}: kinds\n{kinds(have)}\nplain\n{kinds(want)}")
            finite = (kinds(have) == 0) & (kinds(want) == 0) & (kinds(real) == 0)
            x, y, z = (np.where(finite, np.asarray(a, np.float64), 0) for a in (have, want, real))
            allowed = 4 * np.abs(y - z).max() + 32 * float(jnp.finfo(dtype).eps) * np.abs(z).max() + 1e-37
            if not (np.abs(x - z).max() <= allowed or excepted):
                problems.append(f"{case}: error {np.abs(x - z).max():.3g}, allowed {allowed:.3g}")
    return plan, problems


@pytest.mark.sampled(24, cover=("strict",))
@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name, strict):
    plan, problems = judge(name, np.float32, "xla", strict)
    assert not problems, "\n".join(problems)
    assert bool(plan.exceptions) != strict
    assert set(plan.exceptions) <= set(plan.conditions)


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
@pytest.mark.parametrize("name", ["causal", "middle_rows_masked"])
def test_attention_in_interpret_mode(name, strict):
    _, problems = judge(name, np.float32, "interpret", strict)
    assert not problems, "\n".join(problems)


@pytest.mark.sampled(12, cover=("strict",))
@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("causal", np.float16), ("hidden_at_the_lowest", np.float16), ("causal", jnp.bfloat16)],
    ids=["causal-float16", "hidden_at_the_lowest-float16", "causal-bfloat16"],
)
def test_attention_in_half_types(name, dtype, strict):
    _, problems = judge(name, dtype, "xla", strict)
    assert not problems, "\n".join(problems)


def test_exceptions_are_real_and_strict_removes_them():
    """Infinite values that no query sees: NaN (0 * inf) in the plain function and in a strict plan, skipped by default."""
    q, k, v = base()
    v[KEYS - 1] = INF
    plain = jax.jit(ATTENTIONS["causal"])(q, k, v)
    assert np.isnan(plain[: QUERIES - 1]).all()
    for strict in (False, True):
        fused = pf.fuse(ATTENTIONS["causal"], target="xla", strict=strict, options=pf.FuseOptions(tiles=TILES))
        plan, have = fused.explain(q, k, v), fused(q, k, v)
        if strict:
            np.testing.assert_array_equal(np.isnan(have), np.isnan(plain))
            assert plan.exceptions == () and plan.kernels[0].group.passes == 2
        else:
            assert np.isfinite(have[0]).all() and any("a masked 0 * inf" in e for e in plan.exceptions)
