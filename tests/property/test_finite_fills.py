"""Masks of libraries fill in a finite number: their tiles are skipped as those of -inf are, where each row keeps an element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf

N, HEADS, WIDTH = 24, 2, 8


def values(seed=0, rows=N, columns=N):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, HEADS, WIDTH)).astype("float32") for n in (rows, columns, columns)]


def weigh(scores, v):
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, -1), v)


def scores_of(q, k):
    return jnp.einsum("qhd,khd->hqk", q, k) / np.sqrt(WIDTH)


def positions(q, k):
    return jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None, :]


def with_fill(mask, fill):
    def masked(q, k, v):
        return weigh(jnp.where(mask(*positions(q, k)), scores_of(q, k), fill), v)

    return masked


def hidden_where(mask, fill):
    def masked(q, k, v):
        return weigh(jnp.where(mask(*positions(q, k)), fill, scores_of(q, k)), v)

    return masked


def added(mask, fill):
    def masked(q, k, v):
        return weigh(scores_of(q, k) + jnp.where(mask(*positions(q, k)), 0.0, fill), v)

    return masked


def of_the_library(q, k, v):
    return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def from_floats(q, k, v):
    """A mask of zeros and ones, as Flax's `make_causal_mask` has it."""
    rows, columns = positions(q, k)
    mask = (rows >= columns).astype("float32")
    return weigh(jnp.where(mask > 0, scores_of(q, k), jnp.finfo("float32").min), v)


def twice(q, k, v):
    rows, columns = positions(q, k)
    s = jnp.where(columns <= rows, scores_of(q, k), -1e9)
    return weigh(jnp.where(rows - columns < 5, s, jnp.finfo("float32").min), v)


def smallest(q, k, v):
    """The nearest instead of the largest: far above is hidden."""
    rows, columns = positions(q, k)
    s = jnp.where(columns <= rows, scores_of(q, k), 1e9)
    weights = jnp.exp(s.min(-1, keepdims=True) - s)
    return jnp.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


CAUSAL = {
    "library": of_the_library,
    "select": with_fill(lambda i, j: j <= i, -1e9),
    "lowest": with_fill(lambda i, j: j <= i, np.finfo("float32").min),
    "hidden": hidden_where(lambda i, j: j > i, -1e30),
    "hidden by either": hidden_where(lambda i, j: (j > i) | (i - j >= 5), -1e30),
    "added": added(lambda i, j: j <= i, np.finfo("float32").min),
    "floats": from_floats,
    "twice": twice,
    "window": with_fill(lambda i, j: abs(i - j) <= 3, -1e9),
    "smallest": smallest,
}


def tiled(function, *arrays, target="xla", strict=False):
    """The function with tiles so small that there are several."""
    whole = pf.fuse(function, target=target, strict=strict).explain(*arrays)
    (kernel,) = [k for k in whole.kernels if "max" in str(k.group.folds) or "min" in str(k.group.folds)]
    rolled, rows = kernel.schedule.rolled.name, max(kernel.group.parallel, key=lambda a: a.extent).name
    return pf.fuse(function, target=target, strict=strict, options=pf.FuseOptions(tiles=((rolled, 4), (rows, 4))))


@pytest.mark.sampled(12, cover=("target",))
@pytest.mark.parametrize(("target", "length"), [("xla", N), ("interpret", 40)])
@pytest.mark.parametrize("name", CAUSAL)
def test_tiles_without_a_visible_element_are_skipped(name, target, length):
    arrays = values(rows=length, columns=length)
    fused = tiled(CAUSAL[name], *arrays, target=target)
    plan = fused.explain(*arrays)
    assert plan.kernels[0].visited_share < 1
    assert any("is false stands" in e for e in plan.exceptions)
    np.testing.assert_allclose(fused(*arrays), jax.jit(CAUSAL[name])(*arrays), rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(12, cover=())
@pytest.mark.parametrize("name", CAUSAL)
def test_skipping_is_proved(name):
    report = pf.verify(tiled(CAUSAL[name], *values()), *values(), delta=1e-4)
    assert report.equivalent, str(report)


def test_a_strict_plan_visits_them():
    fused = tiled(CAUSAL["select"], *values(), strict=True)
    assert fused.explain(*values()).kernels[0].visited_share == 1


HIDDEN_ROWS = {
    "first": lambda i, j: j + 9 <= i,
    "last": lambda i, j: j >= i + 3,
    "middle": lambda i, j: ((i < 10) | (i > 12)) & (j <= i),
    "all": lambda i, j: (j > 100) & (i >= 0),
}


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("spelling", [with_fill, added])
@pytest.mark.parametrize("name", HIDDEN_ROWS)
def test_rows_that_are_hidden_as_a_whole_are_means_of_everything(name, spelling):
    """As in the program: the fill is their maximum. No tile may be skipped then."""
    function, arrays = spelling(HIDDEN_ROWS[name], -1e9), values(1)
    fused = tiled(function, *arrays)
    assert fused.explain(*arrays).kernels[0].visited_share == 1
    np.testing.assert_allclose(fused(*arrays), jax.jit(function)(*arrays), rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("fill", [-30.0, -1e4, 0.0])
def test_fills_that_scores_may_reach_are_numbers(fill):
    function, arrays = with_fill(lambda i, j: j <= i, fill), values(2)
    fused = tiled(function, *arrays)
    assert fused.explain(*arrays).kernels[0].visited_share == 1
    np.testing.assert_allclose(fused(*arrays), jax.jit(function)(*arrays), rtol=2e-5, atol=2e-6)


def test_scores_that_are_returned_keep_the_fill():
    def both(q, k, v):
        rows, columns = positions(q, k)
        s = jnp.where(columns <= rows, scores_of(q, k), -1e9)
        return weigh(s, v), s

    arrays = values(3)
    fused = pf.fuse(both, target="xla", options=pf.FuseOptions(price=False))
    for have, want in zip(fused(*arrays), both(*arrays), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)


PADDED = np.arange(N) < 7


def causal(s):
    i = jnp.arange(s.shape[-2])[:, None]
    return jnp.where(jnp.arange(s.shape[-1]) <= i, s, -1e9)


def near(s):
    return jnp.abs(jnp.arange(s.shape[-2])[:, None] - jnp.arange(s.shape[-1])) < 2


SECOND_MASKS = {
    "masked_fill": lambda s: causal(jnp.where(PADDED, -1e9, s)),
    "-inf": lambda s: causal(jnp.where(PADDED, -jnp.inf, s)),
    "added": lambda s: causal(s + jnp.where(near(s), -1e9, 0.0)),
    "subtracted": lambda s: causal(s - 1e9 * near(s)),
    "complement": lambda s: causal(s + (1 - PADDED.astype("float32")) * jnp.finfo("float32").min),
    "floats": lambda s: causal(jnp.where(jnp.arange(s.shape[-2]).astype("float32")[:, None] < 3.0, -1e9, s)),
    "an array": lambda s: causal(s + np.where(PADDED, np.float32(-3e38), 0)),
    "both sides": lambda s: causal(jnp.minimum(s, jnp.where(near(s), -1e9, 1e9))),
}


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("name", SECOND_MASKS)
def test_another_mask_may_hide_whole_rows_in_any_spelling(name):
    """The first rows see nothing: the program makes them the mean of everything, or of nothing."""

    def function(q, k, v):
        return weigh(SECOND_MASKS[name](scores_of(q, k)), v)

    arrays = values(4)
    fused = tiled(function, *arrays)
    assert fused.explain(*arrays).kernels[0].visited_share == 1
    np.testing.assert_allclose(fused(*arrays), jax.jit(function)(*arrays), rtol=2e-5, atol=2e-6)


NUMBERS = {
    "scaled": lambda s, v: weigh(causal(s), v * 1e9),
    "added": lambda s, v: weigh(causal(s), v + 1e9),
    "divided": lambda s, v: weigh(causal(s * v[:, 0, 0] / 1e9), v),
    "moved": lambda s, v: weigh(causal(s - 1e9), v),
}


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("name", NUMBERS)
def test_large_numbers_beside_a_mask_are_numbers(name):
    """Nothing is skipped, and the proof takes them for what they are."""

    def function(q, k, v):
        return NUMBERS[name](scores_of(q, k), v)

    arrays = values(5)
    fused = tiled(function, *arrays)
    assert fused.explain(*arrays).kernels[0].visited_share == 1
    report = pf.verify(fused, *arrays, delta=1e-4)
    assert report.counterexample is None, str(report)
    want = np.asarray(function(*arrays))
    np.testing.assert_allclose(fused(*arrays), want, rtol=2e-5, atol=2e-6 * np.abs(want).max())


def test_a_far_number_elsewhere_in_a_kernel_is_not_covered():
    def function(q, k, v):
        return weigh(causal(scores_of(q, k)), v) / 1e9

    report = pf.verify(tiled(function, *values()), *values(), delta=1e-4)
    assert any("as far as what its masks fill in" in u for u in report.proof.uncovered)


@pytest.mark.parametrize(("fill", "side"), [(-1e9, "above"), (1e9, "below")])
def test_the_exception_says_on_which_side(fill, side):
    function = CAUSAL["select" if fill < 0 else "smallest"]
    (exception,) = [e for e in tiled(function, *values()).explain(*values()).exceptions if "stands" in e]
    assert f"{side} it" in exception and f"stands {fill:g}".replace("e+09", "e+09") in exception
