"""Special rows through strict plans, which have no exceptions; and axes without elements, or with one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from tests.property.test_special_values import CHAINS, INF, LENGTH, NAN, ROWS, TILES

X = np.stack(list(ROWS.values()))
QUICKLY = {"xla_backend_optimization_level": 0}


def cross_entropy(x):
    labels = jnp.arange(x.shape[0]) % x.shape[1]
    return jax.nn.logsumexp(x, axis=-1) - jnp.sum(jnp.where(labels[:, None] == jnp.arange(x.shape[1]), x, 0), -1)


def label_smoothing(x):
    return -jnp.mean(jax.nn.log_softmax(x, axis=-1), -1)


def layer_norm(x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5)


def distance_to_largest(x):
    """Maximum, minimum and sum of differences with a maximum."""
    d = x - jnp.max(x, -1, keepdims=True)
    return jnp.min(d, -1), jnp.max(d, -1), jnp.sum(d, -1)


def largest_of_scaled(x):
    return jnp.max(x * jnp.max(jnp.exp(jnp.minimum(x, 0)), -1, keepdims=True), -1)


def product_of_ratios(x):
    return jnp.prod(x / jnp.max(jnp.abs(x), -1, keepdims=True), -1)


def largest_exponential(x):
    m = jnp.max(x, -1, keepdims=True)
    return jnp.max(jnp.exp(x - m), -1), jnp.min(jnp.exp(x - m), -1)


MORE = [cross_entropy, label_smoothing, layer_norm, distance_to_largest, largest_of_scaled, product_of_ratios,
        largest_exponential]  # fmt: skip


def kinds(x):
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    x = np.asarray(x, np.float64)
    return np.where(np.isnan(x), 1, np.where(np.isposinf(x), 2, np.where(np.isneginf(x), 3, 0)))


def compile_fused(chain, x, target, strict):
    tiled = pf.fuse(chain, target=target, strict=strict, options=pf.FuseOptions(tiles=TILES)).trace(x).fuse().tile()
    lowered = tiled.lower().lowered
    return tiled.plan, lowered.compile(QUICKLY if target == "interpret" else None)


def differing_rows(chain, x, names, compiled):
    """Names of the rows where the compiled function is not of the plain function's kind, or not near its value.

    NaN is right wherever the row has one: XLA's own maximum may drop it.
    """
    found = set()
    plain_function = jax.jit(chain).lower(x).compile(QUICKLY)
    for have, plain in zip(jax.tree.leaves(compiled(x)), jax.tree.leaves(plain_function(x)), strict=True):
        for row, name, a, b in zip(x, names, have, plain, strict=True):
            wrong_kind = (kinds(a) != kinds(b)) & ~(np.isnan(a) & np.isnan(row).any())
            if wrong_kind.any() or (
                np.abs(row).max() < 4 and not np.allclose(a, b, rtol=1e-5, atol=1e-4, equal_nan=True)
            ):
                found.add(name)
    return found


ROUNDING_DECIDES = {
    "variance": {"very_negative"},  # squares of the last bit of 1e30
    "third_moment": {"very_negative", "large"},  # the plain function's result depends on how XLA compiles it
}


ON_BOTH_TARGETS = [
    c for c in (*CHAINS, *MORE) if c.__name__ in ("weighted_sum", "variance", "entropy", "starts_late", "layer_norm")
]


@pytest.mark.sampled(16, cover=("target",))
@pytest.mark.parametrize(
    ("chain", "target"),
    [*((c, "xla") for c in (*CHAINS, *MORE)), *((c, "interpret") for c in ON_BOTH_TARGETS)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_rows(chain, target):
    """Overflow, infinities and NaN included: every row is of the plain function's kind."""
    plan, compiled = compile_fused(chain, X, target, strict=True)
    assert not plan.exceptions and not plan.fallbacks, plan.summary
    assert differing_rows(chain, X, list(ROWS), compiled) <= ROUNDING_DECIDES.get(chain.__name__, set())


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("chain", MORE, ids=lambda f: f.__name__)
def test_rows_by_default(chain):
    """As above, but for rows that an exception names."""
    plan, compiled = compile_fused(chain, X, "xla", strict=False)
    assert len(plan.kernels) == 1 and not plan.fallbacks
    allowed = set()
    if "no reduction of a part of the axis" in " ".join(plan.exceptions):
        with np.errstate(all="ignore"):
            allowed = {name for name, row in ROWS.items() if np.isinf(row).any() or np.abs(row).max() > 1e17}
    assert differing_rows(chain, X, list(ROWS), compiled) <= allowed


HALF = {
    "near_overflow": lambda big, tiny: np.linspace(0.2 * big, 0.99 * big, LENGTH),
    "lowest": lambda big, tiny: np.full(LENGTH, -big),
    "lowest_but_one": lambda big, tiny: np.where(np.arange(LENGTH) == 9, 1.0, -big),
    "both_signs": lambda big, tiny: np.where(np.arange(LENGTH) % 2, big, -big) * 0.7,
    "subnormal": lambda big, tiny: np.linspace(tiny / 64, tiny, LENGTH),
    "subnormal_beside_one": lambda big, tiny: np.where(np.arange(LENGTH) == 2, 1.0, tiny / 4),
    "first_tile_inf": lambda big, tiny: np.where(np.arange(LENGTH) == 1, INF, 0.5),
    "last_tile_nan": lambda big, tiny: np.where(np.arange(LENGTH) == 12, NAN, 0.5),
    "all_but_last_minus_inf": lambda big, tiny: np.where(np.arange(LENGTH) == 12, 0.5, -INF),
    "all_equal": lambda big, tiny: np.full(LENGTH, 0.3),
}


@pytest.mark.sampled(8, cover=("dtype",))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["softmax_by_hand", "logsumexp", "weighted_sum", "cross_entropy", "largest_exponential"]
)
def test_half_types(name, dtype):
    (chain,) = (c for c in (*CHAINS, *MORE) if c.__name__ == name)
    info = jnp.finfo(dtype)
    rows = np.stack([make(float(info.max), float(info.tiny)) for make in HALF.values()])
    x = np.asarray(jnp.asarray(rows, dtype))
    plan, compiled = compile_fused(chain, x, "xla", strict=True)
    assert plan.kernels and not plan.exceptions and not plan.fallbacks
    for have, plain in zip(jax.tree.leaves(compiled(x)), jax.tree.leaves(jax.jit(chain)(x)), strict=True):
        np.testing.assert_array_equal(kinds(have), kinds(plain))
        np.testing.assert_allclose(
            np.asarray(have, float), np.asarray(plain, float), rtol=4 * float(info.eps), atol=1e-30
        )


# --- axes without elements


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


def unguarded(x):
    return jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1)


EMPTY = {
    "softmax": (lambda x: jax.nn.softmax(x, axis=-1), [[(0, 5)], [(5, 0)], [(2, 0, 5)], [(0,)]]),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=-1), [[(0, 5)], [(5, 0)], [(0, 0)]]),
    "variance": (lambda x: jnp.var(x, -1), [[(0, 5)], [(5, 0)]]),
    "layer_norm": (layer_norm, [[(0, 5)], [(5, 0)]]),
    "product": (lambda x: jnp.prod(x / jnp.sum(x, -1, keepdims=True), -1), [[(0, 5)], [(5, 0)]]),
    "unguarded": (unguarded, [[(0, 5)], [(5, 0)], [(2, 5, 0)]]),
    "attention": (attention, [[(0, 4), (5, 4), (5, 3)], [(3, 4), (0, 4), (0, 3)], [(3, 0), (5, 0), (5, 3)],
                              [(3, 4), (5, 4), (5, 0)]]),
}  # fmt: skip


@pytest.mark.sampled(8, cover=("target",))
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("name", EMPTY)
def test_axes_without_elements(name, target):
    """The results of the plain function, or its error. What has elements is planned: sums may be in another order."""
    function, cases = EMPTY[name]
    for shapes in cases:
        args = [jnp.linspace(-1, 1, int(np.prod(s))).reshape(s) for s in shapes]
        try:
            want = jax.tree.leaves(jax.jit(function)(*args))
        except ValueError as error:
            with pytest.raises(type(error), match="zero-size array to reduction operation max"):
                pf.fuse(function, target=target)(*args)
            continue
        have = jax.tree.leaves(pf.fuse(function, target=target)(*args))
        for a, b in zip(have, want, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


ONE = [[(1, 4), (1, 4), (1, 3)], [(5, 1), (7, 1), (7, 1)], [(1, 4), (7, 4), (7, 1)], [(5, 4), (1, 4), (1, 3)]]


@pytest.mark.sampled(4, cover=("target",))
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("shapes", ONE, ids=str)
def test_axes_with_one_element(shapes, target):
    args = [np.cos(np.arange(np.prod(s), dtype=np.float32)).reshape(s) for s in shapes]
    have = pf.fuse(attention, target=target, options=pf.FuseOptions(tiles=TILES))(*args)
    np.testing.assert_allclose(have, jax.jit(attention)(*args), rtol=1e-5, atol=1e-6)
