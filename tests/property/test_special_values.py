"""Infinities, NaN, constant and fully masked rows: a fused program is NaN, infinite or finite where the plain one is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.property.judging import compare, exact, fuse_for, judge_function
from tests.property.programs import AXIS_NAMES

INF, NAN = np.inf, np.nan
TILES = tuple((name, 4) for name in AXIS_NAMES)
LENGTH = 13


def _row(**changes):
    """A row of ordinary values with some replaced: `at3=inf` sets element 3."""
    row = np.linspace(-1.5, 2.0, LENGTH, dtype=np.float32)
    for where, value in changes.items():
        row[int(where.removeprefix("at"))] = value
    return row


ROWS = {
    "ordinary": _row(),
    "first_is_inf": _row(at0=INF),
    "last_is_inf": _row(at12=INF),
    "middle_is_inf": _row(at6=INF),
    "two_inf": _row(at2=INF, at9=INF),
    "first_is_minus_inf": _row(at0=-INF),
    "first_tile_is_minus_inf": _row(at0=-INF, at1=-INF, at2=-INF, at3=-INF),
    "last_tiles_are_minus_inf": _row(at8=-INF, at9=-INF, at10=-INF, at11=-INF, at12=-INF),
    "all_but_last_minus_inf": np.where(np.arange(LENGTH) == 12, np.float32(0.5), -np.float32(INF)),
    "all_but_first_minus_inf": np.where(np.arange(LENGTH) == 0, np.float32(0.5), -np.float32(INF)),
    "all_minus_inf": np.full(LENGTH, -INF, np.float32),
    "all_inf": np.full(LENGTH, INF, np.float32),
    "both_inf": _row(at1=-INF, at11=INF),
    "both_inf_reversed": _row(at1=INF, at11=-INF),
    "first_is_nan": _row(at0=NAN),
    "last_is_nan": _row(at12=NAN),
    "nan_and_inf": _row(at3=NAN, at7=INF),
    "nan_then_minus_inf_tile": _row(at0=NAN, at4=-INF, at5=-INF, at6=-INF, at7=-INF),
    "all_nan": np.full(LENGTH, NAN, np.float32),
    "all_equal": np.full(LENGTH, 3.25, np.float32),
    "all_zero": np.zeros(LENGTH, np.float32),
    "negative_zeros": np.full(LENGTH, -0.0, np.float32),
    "very_negative": np.full(LENGTH, -1e30, np.float32),
    "very_negative_then_zero": np.where(np.arange(LENGTH) < 9, np.float32(-1e30), np.float32(0.0)),
    "zero_then_very_negative": np.where(np.arange(LENGTH) >= 4, np.float32(-1e30), np.float32(0.0)),
    "falling_steeply": np.linspace(3000, -3000, LENGTH, dtype=np.float32),
    "rising_steeply": np.linspace(-3000, 3000, LENGTH, dtype=np.float32),
    "large": np.linspace(1e18, 3e18, LENGTH, dtype=np.float32),
    "near_overflow": np.linspace(1e38, 3e38, LENGTH, dtype=np.float32),
    "lowest": np.full(LENGTH, np.finfo(np.float32).min, np.float32),
    "lowest_then_one": np.where(np.arange(LENGTH) < 9, np.finfo(np.float32).min, np.float32(1.0)),
    "tiny": np.linspace(1e-40, 1e-38, LENGTH, dtype=np.float32),
}


def softmax_by_hand(x):
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


def total_of_exponentials(x):
    m = jnp.max(x, -1, keepdims=True)
    return m, jnp.sum(jnp.exp(x - m), -1)


def exponentials_of_base_two(x):
    m = jnp.max(x, -1, keepdims=True)
    return jnp.sum(jnp.exp2(x - m), -1)


def logsumexp_by_hand(x):
    m = jnp.max(x, -1)
    return m + jnp.log(jnp.sum(jnp.exp(x - m[..., None]), -1))


def logsumexp(x):
    return jax.nn.logsumexp(x, axis=-1)


def soft_minimum(x):
    m = jnp.min(x, -1, keepdims=True)
    return m[..., 0] - jnp.log(jnp.sum(jnp.exp(m - x), -1))


def weighted_sum(x):
    p = jax.nn.softmax(x, axis=-1)
    return p @ jnp.cos(jnp.arange(x.shape[-1] * 3.0)).reshape(-1, 3)


def weighted_by_itself(x):
    return jnp.sum(jax.nn.softmax(x, axis=-1) * x, -1)


def unnormalised(x):
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return jnp.sum(e * e, -1) / jnp.sum(e, -1)


def guarded(x):
    m = jnp.max(x, -1, keepdims=True)
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    e = jnp.exp(x - m)
    total = jnp.sum(e, -1)
    return jnp.sum(e * jnp.arange(x.shape[-1], dtype=x.dtype), -1) / jnp.where(total == 0, 1.0, total)


def entropy(x):
    m = jnp.max(x, -1, keepdims=True)
    e = jnp.exp(x - m)
    total = jnp.sum(e, -1, keepdims=True)
    return jnp.log(total[..., 0]) - jnp.sum(e * (x - m), -1) / total[..., 0]


def variance(x):
    return jnp.var(x, -1)


def third_moment(x):
    d = x - jnp.mean(x, -1, keepdims=True)
    return jnp.mean(d**3, -1)


def standardized_sum(x):
    y = jax.nn.standardize(x, axis=-1, epsilon=1e-3)
    return jnp.sum(y * jnp.sin(jnp.arange(x.shape[-1], dtype=x.dtype)), -1)


def root_mean_square(x):
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return jnp.sum(y * jnp.sin(jnp.arange(x.shape[-1], dtype=x.dtype)), -1)


def divided_by_sum(x):
    return jnp.sum(x / jnp.sum(x, -1, keepdims=True), -1)


def divided_by_largest(x):
    return jnp.sum(x / jnp.max(jnp.abs(x), -1, keepdims=True), -1)


def range_normalised(x):
    low, high = jnp.min(x, -1, keepdims=True), jnp.max(x, -1, keepdims=True)
    return jnp.sum((x - low) / (high - low), -1)


def causal(x):
    n = x.shape[-1]
    s = jnp.broadcast_to(x[:, None, :], (x.shape[0], n, n)) * 0.5
    s = jnp.where(jnp.arange(n)[:, None] >= jnp.arange(n), s, -jnp.inf)
    return jax.nn.softmax(s, axis=-1) @ jnp.sin(jnp.arange(n * 2.0)).reshape(-1, 2)


def starts_late(x):
    """Rows 0..4 see nothing."""
    n = x.shape[-1]
    s = jnp.where(jnp.arange(n)[:, None] - 5 >= jnp.arange(n), x[:, None, :], -jnp.inf)
    m = jnp.max(s, -1, keepdims=True)
    e = jnp.exp(s - m)
    return jnp.sum(e, -1), jnp.max(s, -1), jnp.sum(e / jnp.sum(e, -1, keepdims=True) * x[:, None, :], -1)


CHAINS = [
    softmax_by_hand, total_of_exponentials, exponentials_of_base_two, logsumexp_by_hand, logsumexp, soft_minimum, weighted_sum,
    weighted_by_itself, unnormalised, guarded, entropy, variance, third_moment, standardized_sum, root_mean_square,
    divided_by_sum, divided_by_largest, range_normalised, causal, starts_late,
]  # fmt: skip


@pytest.mark.sampled(16, cover=("target",))
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("chain", CHAINS, ids=lambda f: f.__name__)
def test_special_rows(chain, target):
    """All rows at once, so that a row cannot disturb its neighbours either."""
    x = np.stack(list(ROWS.values()))
    problems = judge_rows(chain, x, list(ROWS), target)
    assert not problems, "\n".join(problems)


def is_excepted(row, conditions):
    """Does a stated condition of the plan exclude this row? Only rows whose sums overflow, and masked infinities."""
    finite = row[np.isfinite(row)].astype(np.float64)
    limit = 1e17 if row.dtype != jnp.float16 else np.inf
    overflows = finite.size > 0 and np.abs(finite).max() >= limit
    return (overflows and "overflow" in conditions) or (finite.size < row.size and "a masked 0 * inf" in conditions)


def judge_rows(chain, x, names, target, tiles=TILES):
    """Every row on its own: the pattern of NaN and infinities, and the error relative to the row."""
    fused, plain = fuse_for(chain, target, tiles), jax.jit(chain)
    have, own = jax.tree.leaves(fused(x)), jax.tree.leaves(plain(x))
    references = exact(lambda a: jax.tree.leaves(chain(a)), x, perturbed=True)
    conditions = " ".join(fused.explain(x).conditions)
    found = []
    for n, name in enumerate(names):
        if is_excepted(x[n], conditions):
            continue
        rows = [[r[n] for r in leaves] for leaves in (have, own)]
        problems, _ = compare(*rows, [[r[n] for r in leaves] for leaves in references])
        found += [f"{name}: {p}" for p in problems]
    return found


@pytest.mark.sampled(16, cover=("dtype",))
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "chain", [softmax_by_hand, logsumexp, variance, root_mean_square, divided_by_sum], ids=lambda f: f.__name__
)
def test_half_types_near_overflow(chain, dtype, target):
    big = float(jnp.finfo(dtype).max)
    rows = {
        "near_overflow": np.linspace(0.2 * big, 0.99 * big, LENGTH),
        "at_overflow": np.full(LENGTH, big),
        "signs": np.where(np.arange(LENGTH) % 2, big, -big) * 0.7,
        "lowest_but_one": np.where(np.arange(LENGTH) == 9, 1.0, -big),
        "ordinary": np.linspace(-2, 2, LENGTH),
    }
    x = np.asarray(jnp.asarray(np.stack(list(rows.values())), dtype))
    problems = judge_rows(chain, x, list(rows), target)
    assert not problems, "\n".join(problems)


@pytest.mark.sampled(32, cover=("target", "shape"))
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("shape", [(3, 1), (1, 1), (1, 5), (5,), (1,), (1, 1, 7)], ids=str)
@pytest.mark.parametrize(
    "chain",
    [total_of_exponentials, logsumexp, variance, weighted_sum, range_normalised, entropy],
    ids=lambda f: f.__name__,
)
def test_axes_of_one_element(chain, shape, target):
    x = np.linspace(-1, 2, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    verdict = judge_function(chain, [x], target, TILES)
    assert not verdict.problems, verdict
