"""`pf.fold`: chunks in any order and of any size give what the plain function gives, within its own error bound."""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax

import pallasfuse as pf
from tests.property.judging import compare, exact


def normal(*shape, seed=0, dtype=jnp.float32, scale=1.0, offset=0.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape) + offset, dtype)


def weighted(mask=None, finite=False):
    def function(q, k, v):
        s = jnp.einsum("id,jd->ij", q, k)
        if mask is not None:
            i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None, :]
            s = jnp.where(mask(i, j), s, -1e30 if finite else -jnp.inf)
        return jax.nn.softmax(s, axis=-1) @ v

    return function


def grouped_queries(q, k, v):
    q = q.reshape(k.shape[0], -1, *q.shape[1:])
    s = jnp.einsum("gaid,gjd->gaij", q, k)
    return jnp.einsum("gaij,gje->gaie", jax.nn.softmax(s, axis=-1), v).reshape(-1, q.shape[2], v.shape[-1])


def up_to_length(q, k, v, lengths):
    s = jnp.einsum("id,jd->ij", q, k) + 0.25 * jnp.arange(k.shape[0])
    s = jnp.where(jnp.arange(k.shape[0])[None, :] < lengths[:, None], s, -jnp.inf)
    return jax.nn.softmax(s, axis=-1) @ v


def standardized_sum(x, w):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return ((x - mean) * lax.rsqrt(variance + 1e-5)) @ w, variance[:, 0]


def entropy(x):
    p = jax.nn.log_softmax(x, axis=-1)
    return -jnp.sum(jnp.exp(p) * p, axis=-1)


def picked(x, labels):
    logits = jax.nn.log_softmax(x, axis=-1)
    return -jnp.mean(jnp.sum(jnp.where(jnp.arange(x.shape[-1]) == labels[:, None], logits, 0.0), axis=-1))


def several(x, y):
    top = jnp.max(x, axis=0)
    return {
        "top": top,
        "sum": jnp.sum(jnp.exp(x - top), axis=0),
        "low": jnp.min(x * y, axis=0),
        "all": jnp.all(y > x, axis=0),
    }


def damped(x, t):
    total = jnp.sum(jnp.exp(x - jnp.max(x, axis=-1, keepdims=True)), axis=-1, keepdims=True)
    return jnp.sum(x / (total + jnp.exp(t)), axis=-1)


def with_table(q, k, v, bias):
    """A bias by position, whole in every chunk, and projections before and after."""
    s = jnp.einsum("id,jd->ij", jnp.tanh(q) @ jnp.sin(q).T @ q, k) + bias[None, :]
    out = jax.nn.softmax(s, axis=-1) @ v
    return out + q[:, : v.shape[-1]]


@dataclass(frozen=True)
class Case:
    function: object
    args: tuple
    axis: tuple


CASES = {
    "plain": Case(weighted(), (normal(5, 6), normal(13, 6, seed=1), normal(13, 3, seed=2)), (None, 0, 0)),
    "causal": Case(weighted(lambda i, j: j <= i + 3), (normal(5, 6), normal(13, 6, seed=1), normal(13, 3, seed=2)), (None, 0, 0)),
    "finite mask": Case(
        weighted(lambda i, j: (j >= 2 * i) & (j < 11), finite=True),
        (normal(5, 6), normal(13, 6, seed=1), normal(13, 3, seed=2)), (None, 0, 0),
    ),
    "empty rows": Case(weighted(lambda i, j: j < 3 * i), (normal(5, 6), normal(13, 6, seed=1), normal(13, 3)), (None, 0, 0)),
    "lengths": Case(
        up_to_length, (normal(4, 6), normal(13, 6, seed=1), normal(13, 3, seed=2), jnp.array([1, 5, 13, 0])), (None, 0, 0, None)
    ),
    "grouped": Case(grouped_queries, (normal(4, 5, 6), normal(2, 13, 6, seed=1), normal(2, 13, 3, seed=2)), (None, 1, 1)),
    "bfloat16": Case(
        weighted(), tuple(normal(*s, seed=n, dtype=jnp.bfloat16) for n, s in enumerate([(5, 6), (13, 6), (13, 3)])), (None, 0, 0)
    ),
    "logsumexp": Case(lambda x: jax.nn.logsumexp(x, axis=0), (normal(13, 4, scale=30.0),), (0,)),
    "sum": Case(lambda x: jnp.sum(x, axis=-1), (normal(3, 13),), (1,)),
    "mean": Case(lambda x: jnp.mean(x * x, axis=-1), (normal(3, 13),), (-1,)),
    "variance": Case(lambda x: jnp.var(x, axis=-1), (normal(3, 13, offset=100.0),), (1,)),
    "standardized": Case(standardized_sum, (normal(3, 13, offset=10.0), normal(13, 4)), (1, 0)),
    "skew": Case(lambda x: jnp.mean((x - jnp.mean(x)) ** 3), (normal(13, offset=3.0),), (0,)),
    "entropy": Case(entropy, (normal(3, 13, scale=4.0),), (1,)),
    "picked": Case(picked, (normal(3, 13, scale=4.0), jnp.array([0, 7, 12])), (1, None)),
    "several": Case(several, (normal(13, 4), normal(13, 4, seed=1)), (0, 0)),
    "damped": Case(damped, (normal(3, 13), normal(3, 1)), (1, None)),
    "table": Case(
        with_table, (normal(5, 6), normal(13, 6, seed=1), normal(13, 3, seed=2), normal(13, seed=3)), (None, 0, 0, None)
    ),
}  # fmt: skip


@functools.cache
def folded(name):
    case = CASES[name]
    return pf.fold(case.function, axis=case.axis)


@functools.cache
def reference(name):
    case = CASES[name]
    leaves = lambda *a: jax.tree.leaves(case.function(*a))  # noqa: E731
    return jax.tree.leaves(jax.jit(case.function)(*case.args)), exact(leaves, *case.args, perturbed=True)


def chunk(args, axis, start, stop):
    return [x if d is None else lax.slice_in_dim(x, start, stop, axis=d) for x, d in zip(args, axis, strict=True)]


def stream(name, cuts):
    case, f = CASES[name], folded(name)
    state = f.init(*case.args)
    for start, stop in cuts:
        state = f.update(state, *chunk(case.args, case.axis, start, stop), start=start)
    return state


def check(name, state):
    case = CASES[name]
    rest = [None if d is not None else x for x, d in zip(case.args, case.axis, strict=True)]
    have = jax.tree.leaves(folded(name).finish(state, *rest))
    plain, bounds = reference(name)
    assert not compare(have, plain, bounds)[0]


CUTS = {
    "whole": [(0, 13)],
    "uneven": [(0, 5), (5, 6), (6, 13)],
    "backwards": [(7, 13), (3, 7), (0, 3)],
    "one by one": [(n, n + 1) for n in range(13)],
    "an empty one": [(0, 0), (0, 8), (8, 8), (8, 13)],
}


@pytest.mark.sampled(60, cover=())
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_chunks(name, cuts):
    check(name, stream(name, CUTS[cuts]))


@pytest.mark.sampled(24, cover=())
@pytest.mark.parametrize("name", CASES)
def test_states_combine_in_any_order(name):
    f = folded(name)
    case = CASES[name]
    given_args = tuple(x if d is None else None for x, d in zip(case.args, case.axis, strict=True))
    combine = functools.partial(f.combine, args=given_args)
    a, b, c = (stream(name, [cut]) for cut in [(0, 5), (5, 6), (6, 13)])
    check(name, combine(combine(a, b), c))
    check(name, combine(c, combine(b, a)))
    check(name, combine(b, c, a))
    nothing = f.init(*case.args)
    check(name, combine(nothing, combine(nothing, a), combine(b, c, nothing), nothing))


@pytest.mark.sampled(8, cover=())
@pytest.mark.parametrize("part", range(8))
def test_random_chunkings(part):
    @settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(data=st.data())
    def run(data):
        name = data.draw(st.sampled_from(sorted(CASES)))
        inner = sorted(data.draw(st.sets(st.integers(1, 12), max_size=5)))
        cuts = data.draw(st.permutations(list(itertools.pairwise([0, *inner, 13]))))
        check(name, stream(name, cuts))

    run()


def test_an_unseen_position_contributes_nothing():
    f = pf.fold(lambda x: (jnp.sum(x, axis=0), jnp.var(x, axis=0)), axis=0)
    x = normal(13, 3)
    state = f.update(f.init(x), x[:4], start=0)
    total, variance = f.finish(state)
    np.testing.assert_allclose(total, x[:4].sum(0), rtol=1e-6)
    mean = x[:4].sum(0) / 13
    np.testing.assert_allclose(variance, ((x[:4] - mean) ** 2).sum(0) / 13, rtol=1e-5)


def test_positions_outside_of_the_axis_contribute_nothing():
    case = CASES["causal"]
    f, (q, k, v) = folded("causal"), case.args
    pad = [(2, 2), (0, 0)]
    k, v = (jnp.pad(x, pad, constant_values=jnp.nan) for x in (k, v))
    state = f.init(*case.args)
    state = f.update(state, q, k[:9], v[:9], start=-2)
    state = jax.jit(lambda s, n: f.update(s, q, k[9:], v[9:], start=n))(state, 7)
    check("causal", state)


def test_rows_that_are_not_numbers():
    q, k, v = CASES["plain"].args
    k = k.at[4].set(jnp.array([jnp.inf, *[0.0] * 5]))
    q = q.at[2].set(jnp.nan)
    f, plain = folded("plain"), weighted()(q, k, v)
    for cuts in CUTS.values():
        state = f.init(q, k, v)
        for a, b in cuts:
            state = f.update(state, q, k[a:b], v[a:b], start=a)
        np.testing.assert_array_equal(np.isnan(f.finish(state, q)), np.isnan(plain))


def test_no_position_at_all():
    f = folded("plain")
    q, k, v = CASES["plain"].args
    assert np.isnan(f.finish(f.init(q, k, v), q)).all()  # as a softmax without keys
    total = folded("sum")
    np.testing.assert_array_equal(total.finish(total.init(*CASES["sum"].args)), np.zeros(3))


def test_init_needs_only_shapes():
    f = pf.fold(weighted(), axis=(None, 0, 0), length=13)
    q, k, v = CASES["plain"].args
    state = f.init(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k[:4], v[:4])))
    for a in (0, 4, 8, 12):
        state = f.update(state, q, k[a : a + 4], v[a : a + 4], start=a)
    check_against = weighted()(q, k, v)
    np.testing.assert_allclose(f.finish(state, q), check_against, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("name", ["causal", "standardized", "grouped", "picked"])
def test_scan_jit_and_donation(name):
    case, f = CASES[name], folded(name)
    padded = [x if d is None else jnp.pad(x, [(0, 3 * (k == d % x.ndim)) for k in range(x.ndim)])
              for x, d in zip(case.args, case.axis, strict=True)]  # fmt: skip

    @jax.jit
    def all_chunks(*args):
        def step(state, start):
            part = [x if d is None else lax.dynamic_slice_in_dim(x, start, 4, axis=d)
                    for x, d in zip(args, case.axis, strict=True)]  # fmt: skip
            return f.update(state, *part, start=start), None

        return lax.scan(step, f.init(*case.args), jnp.arange(0, 16, 4))[0]

    check(name, all_chunks(*padded))
    donated = jax.jit(lambda s, start, *a: f.update(s, *a, start=start), donate_argnums=0)
    state = f.init(*case.args)
    for start in (0, 4, 8, 12):
        state = donated(state, start, *chunk(padded, case.axis, start, start + 4))
    check(name, state)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", ["variance", "causal", "lengths"])
def test_vmap(name):
    case, f = CASES[name], folded(name)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in case.args]
    pairs = [jnp.stack([x, x * 2]) if ok else jnp.stack([x, x]) for x, ok in zip(case.args, floats, strict=True)]

    def run(*args):
        state = f.init(*args)
        for a, b in CUTS["uneven"]:
            state = f.update(state, *chunk(args, case.axis, a, b), start=a)
        return f.finish(state, *(None if d is not None else x for x, d in zip(args, case.axis, strict=True)))

    np.testing.assert_allclose(jax.vmap(run)(*pairs), jax.vmap(case.function)(*pairs), rtol=1e-4, atol=1e-5)


def test_merge_over_a_batched_axis():
    case, f = CASES["lengths"], pf.fold(up_to_length, axis=(None, 0, 0, None), length=12)
    q, k, v, lengths = case.args
    k, v = k[:12], v[:12]

    def part(n, k, v):
        state = f.update(f.init(q, k, v, lengths), q, k, v, lengths, start=4 * n)
        return f.finish(f.merge(state, "parts"), q, None, None, lengths)

    have = jax.vmap(part, axis_name="parts")(jnp.arange(3), k.reshape(3, 4, -1), v.reshape(3, 4, -1))
    for row in have:
        np.testing.assert_allclose(row, up_to_length(q, k, v, lengths), rtol=1e-5, atol=1e-6)


def test_moments_far_from_zero_stay_accurate():
    """Frames are extrapolated to the whole axis: sums of a part would cancel."""
    x = normal(2, 4096, offset=1e4)
    f = pf.fold(lambda x: jnp.var(x, axis=-1), axis=1)
    truth = np.var(np.asarray(x, np.float64), axis=-1)
    state = f.init(x)
    for a in range(0, 4096, 256):
        state = f.update(state, x[:, a : a + 256], start=a)
    assert np.abs(f.finish(state) / truth - 1).max() < 1e-5


def test_repairs_that_read_an_argument():
    def function(x, t):
        return jnp.mean(jnp.square(x - jnp.mean(x, axis=-1, keepdims=True) * t), axis=-1)

    x, t = normal(3, 13), jnp.array([[0.1], [0.2], [0.0]])
    f = pf.fold(function, axis=(1, None))
    a, b = f.update(f.init(x, t), x[:, :5], t, start=0), f.update(f.init(x, t), x[:, 5:], t, start=5)
    np.testing.assert_allclose(f.finish(f.combine(a, b, args=(None, t)), None, t), function(x, t), rtol=1e-5)
    with pytest.raises(TypeError, match=r"combine needs the value of t.*args=\("):
        f.combine(a, b)


# --- refusals

Q, K, V = CASES["plain"].args


def refused(function, args, axis, match, error=pf.FusionError, **kwargs):
    with pytest.raises(error, match=match):
        pf.fold(function, axis=axis, **kwargs).init(*args)


def test_a_second_pass_is_refused():
    def function(x):
        return jnp.sum(jnp.round(x / jnp.max(x, axis=-1, keepdims=True)), axis=-1)

    refused(
        function, (normal(3, 13),), 1, r"needs 2 passes over the streamed axis, because .* Make a fold of each pass"
    )


def test_a_result_along_the_axis_is_refused():
    refused(
        lambda x: jax.nn.softmax(x, axis=-1),
        (normal(3, 13),),
        1,
        "varies along the streamed axis|reads all of the streamed",
    )
    refused(lambda x: (x, x.sum(-1)), (normal(3, 13),), 1, "it returns the streamed argument x itself")


def test_what_xla_must_see_whole_is_refused():
    refused(lambda x: jnp.sum(jnp.sort(x, axis=-1) ** 2, axis=-1), (normal(3, 13),), 1,
            r"sort at .*test_fold.py.* reads all of the streamed x .*stream its result")  # fmt: skip


def test_a_dimension_that_is_not_reduced_is_refused():
    refused(weighted(), (Q, K, V), (0, None, None), "reads dimension 0 of q along|varies along the streamed axis")
    refused(lambda x: jnp.sum(x.reshape(4, 3), axis=1), (normal(12),), 0, "is reshaped into 4 x 3|along")
    refused(lambda x, y: jnp.sum(y), (normal(13), normal(4)), (0, None), "does not read what is streamed")


def test_clear_errors():
    refused(weighted(), (Q, K), (None, 0, 0), "names 3 arguments, but 2 were given", TypeError)
    refused(weighted(), (Q, K, V[:5]), (None, 0, 0), "streamed dimensions have one length", ValueError)
    refused(weighted(), (Q, K, V), (None, 0, 2), "no dimension 2", ValueError)
    refused(weighted(), (Q, K, V), None, "gives no dimension", ValueError)
    refused(lambda q, k: q @ k, (Q, K), (None, 0), "could not be traced", pf.TraceError)
    with pytest.raises(ValueError, match="2 or more"):
        pf.fold(weighted(), axis=0, length=1)
    f = folded("plain")
    state = f.init(Q, K, V)
    with pytest.raises(ValueError, match=r"k is float32\[4, 5\], but the state was made for float32\[4, 6\]"):
        f.update(state, Q, K[:4, :5], V[:4], start=0)
    with pytest.raises(ValueError, match="one size, got"):
        f.update(state, Q, K[:4], V[:5], start=0)
    with pytest.raises(TypeError, match="an integer scalar"):
        f.update(state, Q, K[:4], V[:4], start=0.0)
    with pytest.raises(ValueError, match="made by another fold"):
        folded("causal").finish(state)
    with pytest.raises(ValueError, match="different shapes or lengths"):
        f.combine(state, f.init(Q[:2], K, V))
    with pytest.raises(TypeError, match="finish needs the value of"):
        folded("table").finish(stream("table", [(0, 13)]))


def test_traced_closures_are_refused():
    @jax.jit
    def outer(q, k, v):
        return pf.fold(lambda k, v: weighted()(q, k, v), axis=0).init(k, v).values

    with pytest.raises(pf.FusionError, match="closes over values that are being traced"):
        outer(Q, K, V)


def test_starts_of_any_integer_type():
    x = normal(4, 96)
    with jax.enable_x64(True):
        f = pf.fold(lambda x: x.sum(-1), axis=-1)
        for start in (jnp.int64(2**32), jnp.uint32(2**31 + 5), jnp.int64(-(2**40))):  # nowhere on the axis
            np.testing.assert_array_equal(f.finish(f.update(f.init(x), x[:, :5], start=start)), np.zeros(4))
        for start in (np.int64(7), jnp.int8(7), jnp.uint64(7)):
            got = f.finish(f.update(f.init(x), x[:, 7:12], start=start))
            np.testing.assert_allclose(got, x[:, 7:12].sum(-1), rtol=1e-6)


def test_nothing_to_reduce():
    with pytest.raises(ValueError, match="the streamed axis has 1 elements, and there is nothing to reduce"):
        pf.fold(lambda x: jax.nn.logsumexp(x, -1), axis=-1).init(normal(4, 1))
