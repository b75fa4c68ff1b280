"""Masks that are arrays, and predicates of other data: the kernels that they bound compute what the program says."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse.pipeline import prove_plan
from pallasfuse.proof import groups

B, N, HEADS, WIDTH = 2, 24, 2, 8


def values(seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(size=(B, N, HEADS, WIDTH)).astype("float32") for _ in range(3)]


def by_array(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


def infinite(q, k, v, mask):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1), v)


def with_bias(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, bias=jnp.where(mask, 0.0, -1e10))


def causal_too(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)


def of_linen(q, k, v, mask):
    return nn.dot_product_attention(q, k, v, mask=mask)


def documents(q, k, v, segments):
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=same)


def lengths(q, k, v, of_rows, of_columns):
    return jax.nn.dot_product_attention(q, k, v, query_seq_lengths=of_rows, key_value_seq_lengths=of_columns)


def row_lengths(q, k, v, seen):
    return by_array(q, k, v, (jnp.arange(N) < seen[..., None])[:, None])


TRIANGLE = np.tril(np.ones((N, N), bool))
BAND = TRIANGLE & ~np.tril(np.ones((N, N), bool), -6)
GAP = TRIANGLE & (np.abs(np.arange(N) - 9) > 3)
HIDDEN_ROWS = TRIANGLE & (np.arange(N) % 7 != 3)[:, None]
MASKS = {
    "causal": TRIANGLE[None, None], "band": BAND[None, None], "gap": GAP[None, None], "hidden rows": HIDDEN_ROWS[None, None],
    "nothing": np.zeros((1, 1, N, N), bool), "everything": np.ones((1, 1, N, N), bool),
    "of a batch": np.stack([BAND, HIDDEN_ROWS])[:, None], "of heads": np.stack([TRIANGLE, BAND])[None],
    "padding": (np.arange(N) < np.array([5, 0])[:, None])[:, None, None, :],
    "two dimensions": BAND,
}  # fmt: skip
SEGMENTS = np.stack([np.arange(N) // 7, np.arange(N) // 5]).astype(np.int32)
SHORT, NONE = np.array([5, 17], np.int32), np.array([0, 24], np.int32)
OF_ARRAYS = (by_array, infinite, with_bias, causal_too)
PROGRAMS = {
    **{f"{f.__name__}, {n}": (f, [m]) for f in OF_ARRAYS for n, m in MASKS.items() if m.ndim == 4},
    "infinite, two dimensions": (infinite, [MASKS["two dimensions"]]),
    "linen, causal": (of_linen, [np.asarray(nn.make_causal_mask(np.ones((B, N))))]),
    "linen, padding": (of_linen, [np.asarray(nn.make_attention_mask(np.ones((B, N)), np.arange(N) < SHORT[:, None]))]),
    "documents": (documents, [SEGMENTS]), "documents, mixed": (documents, [SEGMENTS[:, ::-1] * np.array([[1], [-1]], np.int32)]),
    "lengths": (lengths, [SHORT, NONE]), "other lengths": (lengths, [NONE, SHORT]),
    "row lengths": (row_lengths, [np.random.default_rng(3).integers(0, N, (B, N)).astype(np.int32)]),
}  # fmt: skip


def tiled(function, *arrays, target="xla", **options):
    """The function with tiles so small that there are several."""
    (kernel,) = pf.fuse(function, target=target).explain(*arrays).kernels
    rolled, rows = kernel.schedule.rolled.name, max(kernel.group.parallel, key=lambda a: a.extent).name
    return pf.fuse(function, target=target, options=pf.FuseOptions(tiles=((rolled, 4), (rows, 4)), **options))


def bounded(plan):
    return any(p.program.ranges for kernel in plan.kernels for p in kernel.phases)


def in_float64(function, *arrays):
    with jax.enable_x64(True):
        wide = [
            a.astype("float64") if a.dtype == np.float32 and a.ndim == 4 and a.shape[-1] == WIDTH else a for a in arrays
        ]
        return np.asarray(jax.jit(function)(*wide))


@pytest.mark.sampled(80, cover=("target",))
@pytest.mark.parametrize("target", ["xla", "interpret"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_the_program(name, target):
    function, data = PROGRAMS[name]
    arrays = [*values(), *data]
    fused = tiled(function, *arrays, target=target)
    assert bounded(fused.explain(*arrays))
    np.testing.assert_allclose(fused(*arrays), in_float64(function, *arrays), rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(60, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
def test_bounds_by_data_are_proved(name):
    function, data = PROGRAMS[name]
    arrays = [*values(), *data]
    plan = tiled(function, *arrays).explain(*arrays)
    proof = prove_plan(plan, delta=1e-3)
    assert proof.holds, str(proof)


@pytest.mark.deep  # tests/test_proof.py counts trials
def test_the_trials_of_all_rounds_count(monkeypatch):
    """A proof makes batches with other bounds of loops each, and all of them together are the trials that it needs."""
    function, data = PROGRAMS["by_array, causal"]
    arrays = [*values(), *data]
    plan = tiled(function, *arrays).explain(*arrays)
    trials = {}
    for rounds in (1, 6):
        monkeypatch.setattr(groups, "_ROUNDS", rounds)
        trials[rounds] = prove_plan(plan, delta=1e-3).trials
    assert trials[1] <= trials[6] < trials[1] + 6 * 6


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("name", ["by_array, hidden rows", "infinite, of a batch"])
def test_parts_of_a_split_axis_share_what_is_visible(name):
    function, data = PROGRAMS[name]
    arrays = [*values(), *data]
    fused = pf.fuse(
        function, target="xla", options=pf.FuseOptions(tiles=tiled(function, *arrays)._options.tiles, parts=2)
    )
    np.testing.assert_allclose(fused(*arrays), in_float64(function, *arrays), rtol=2e-5, atol=2e-6)


def test_batches_of_masks():
    def one(q, k, v, mask):
        return by_array(q, k, v, mask)

    arrays = [np.stack([a, a[::-1]]) for a in values()]
    masks = np.stack([MASKS["of a batch"], MASKS["of a batch"][::-1]])
    fused = pf.fuse(one, target="xla")
    want = np.stack([in_float64(one, *(a[n] for a in arrays), masks[n]) for n in range(2)])
    np.testing.assert_allclose(jax.vmap(fused)(*arrays, masks), want, rtol=2e-5, atol=2e-6)
    shared = jax.vmap(fused, in_axes=(0, 0, 0, None))(*arrays, masks[0])
    np.testing.assert_allclose(shared[0], want[0], rtol=2e-5, atol=2e-6)


def test_a_module_with_a_mask_of_its_library():
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    x = np.random.default_rng(1).normal(size=(B, N, 16)).astype("float32")
    mask = nn.combine_masks(
        nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(np.ones((B, N)), np.arange(N) < SHORT[:, None])
    )
    variables = jax.jit(module.init)(jax.random.key(0), x)

    def apply(variables, x, mask):
        return module.apply(variables, x, mask=mask)

    fused = pf.fuse(apply, target="xla")
    np.testing.assert_allclose(fused(variables, x, mask), jax.jit(apply)(variables, x, mask), rtol=2e-5, atol=2e-6)


def test_what_is_skipped_is_said():
    arrays = [*values(), MASKS["causal"]]
    plan = tiled(by_array, *arrays).explain(*arrays)
    assert any("is false stands" in e and "m" in e for e in plan.exceptions), plan.exceptions
    assert "bounded by masks over data" in plan.text
