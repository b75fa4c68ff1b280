"""Products of sums of normalised terms become sums of products: meaning, proof, kernels, and what is left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import form_choice
from pallasfuse.execution import execute
from pallasfuse.form_choice import Placements, choose_groups
from pallasfuse.jaxpr_frontend import convert, convert_terms_apart
from pallasfuse.jaxpr_frontend.term_products import MOST_TERMS, terms_apart
from pallasfuse.pipeline import revised, schedule_grouping
from pallasfuse.proof.proving import disproved_form
from pallasfuse.search.found import CONDITION, EXCEPTION
from pallasfuse.targets import find

H, S, D = 3, 24, 8
RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


Q, K, Q2, K2, V = draw(H, S, D), draw(H, S, D), draw(H, S, D), draw(H, S, D), draw(H, S, 2 * D)
PAIRS, KEYS = draw(2 * H, S, D), draw(2 * H, S, D)
BIAS = draw(H, S, S)


def weights(q, k, seen=None):
    scores = jnp.einsum("hqd,hkd->hqk", q, k)
    return jax.nn.softmax(scores if seen is None else jnp.where(seen, scores, -jnp.inf), -1)


def difference(q, k, q2, k2, v):
    return (weights(q, k) - 0.3 * weights(q2, k2)) @ v


def heads_in_pairs(q, k, v):
    """Neighbouring heads are subtracted."""
    both = weights(q, k, jnp.tril(jnp.ones((S, S), bool))).reshape(H, 2, S, S)
    return jnp.einsum("hqk,hkd->hqd", both[:, 0] - 0.3 * both[:, 1], v)


def halves(q, k, v):
    """The heads of the second half are subtracted."""
    both = weights(q, k)
    return jnp.einsum("hqk,hkd->hqd", both[:H] - 0.3 * both[H:], v)


def near_and_far(q, k, v):
    near = jnp.abs(jnp.arange(S)[:, None] - jnp.arange(S)[None]) < 4
    return -(weights(q, k, near) + weights(q, k)) @ v


def weights_by_position(q, k, v, bias):
    return (weights(q, k) + bias) @ v


def turned(q, k, q2, k2, v):
    """The sum is the right operand."""
    return jnp.einsum("hkd,hqk->hdq", v, weights(q, k) + weights(q2, k2))


def gated_by_position(q, k, v, bias):
    """The softmax of the bias is one for all batches, and a head's share is one for all positions."""
    share = jax.nn.sigmoid(jnp.arange(-1.0, H - 1))[:, None, None]
    content = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k), -1)
    return ((1 - share) * content + share * jax.nn.softmax(bias, -1)) @ v


def less_its_mean(q, k, v):
    return (weights(q, k) - jnp.mean(weights(q, k), -1, keepdims=True)) @ v


def one_query(q, k, q2, k2, v):
    return difference(q[:, :1], k, q2[:, :1], k2, v)


BATCH = [draw(2, *x.shape) for x in (Q, K, V)]
CASES = {
    "difference": (difference, (Q, K, Q2, K2, V)), "heads in pairs": (heads_in_pairs, (PAIRS, KEYS, V)),
    "halves": (halves, (PAIRS, KEYS, V)), "near and far": (near_and_far, (Q, K, V)),
    "weights by position": (weights_by_position, (Q, K, V, BIAS)), "turned": (turned, (Q, K, Q2, K2, V)),
    "one query": (one_query, (Q, K, Q2, K2, V)),
    "gated by position": (gated_by_position, (*BATCH, BIAS)),
}  # fmt: skip


def products(jaxpr):
    return [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", CASES)
def test_the_form_computes_the_same_and_is_proved(name):
    function, arguments = CASES[name]
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in arguments]
        flat = convert(jax.make_jaxpr(function)(*wide)).jaxpr
        made = terms_apart(flat, exact=True, longest=64)
        assert made is not None
        (got,) = jax.core.eval_jaxpr(made.jaxpr, flat.consts, *wide)
        np.testing.assert_allclose(got, function(*wide), rtol=1e-12, atol=1e-13)
    converted = convert(jax.make_jaxpr(function)(*arguments))
    form = convert_terms_apart(converted, exact=True, longest=64)
    assert len(products(form.jaxpr)) > len(products(converted.jaxpr))
    assert disproved_form(form) is None


def test_a_wrong_sign_is_disproved(monkeypatch):
    converted = convert(jax.make_jaxpr(difference)(*CASES["difference"][1]))
    monkeypatch.setattr(lax, "sub", lax.add)
    found = disproved_form(convert_terms_apart(converted, exact=True, longest=64))
    assert found is not None


def test_heads_that_are_parted_are_computed_apart():
    """Nothing of the form has all heads any more but the arguments."""
    for name in ("heads in pairs", "halves"):
        function, arguments = CASES[name]
        form = convert_terms_apart(convert(jax.make_jaxpr(function)(*arguments)), exact=True, longest=64)
        softmaxes = [e for e in form.jaxpr.eqns if e.primitive.name == "exp"]
        assert [e.outvars[0].aval.shape for e in softmaxes] == [(H, S, S)] * 2


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_computes_it(name):
    function, arguments = CASES[name]
    form = convert_terms_apart(convert(jax.make_jaxpr(function)(*arguments)), exact=True, longest=64)
    placements = Placements(form, find("interpret"), pf.FuseOptions(price=False, check=False))
    plan = schedule_grouping(placements, choose_groups(placements))
    (largest,) = (k for k in plan.kernels if len(k.group.folds) > 2)
    (product,) = form.jaxpr.outvars
    assert any(plan.converted.variable[n.name] is product for n in largest.group.outputs)
    (got,) = execute(plan, [*form.jaxpr.consts, *arguments])
    np.testing.assert_allclose(got, function(*arguments), rtol=2e-5, atol=2e-6)


def test_a_plan_has_the_form_that_is_faster():
    """Pairs of heads that are subtracted, as those of a differential transformer (2.6 times as fast so on an H100)."""

    def attend(q, k, v):
        scores = (q @ k.transpose(0, 2, 1)).astype(jnp.float32)
        both = jax.nn.softmax(scores, -1).astype(q.dtype).reshape(24, 2, 1536, 1536)
        return (both[:, 0] - both[:, 1]) @ v

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((48, 1536, 64), (48, 1536, 64), (24, 1536, 128))]
    plan = pf.fuse(attend, options=pf.FuseOptions(check=False, price=True)).explain(*shapes, target="mosaic_gpu")
    (kernel,) = plan.kernels
    assert len(kernel.group.folds) > 2
    assert plan.converted.whole is not None


def test_a_program_whose_kernels_lose_in_the_form_is_planned_as_it_is_written(monkeypatch):
    from pallasfuse import check

    function, arguments = CASES["difference"]
    form = convert_terms_apart(convert(jax.make_jaxpr(function)(*arguments)), exact=True, longest=64)
    options = pf.FuseOptions(price=False, check=True)
    placements = Placements(form, find("interpret"), options)
    plan = schedule_grouping(placements, choose_groups(placements))
    asked = []

    def without_kernels(bench, plan, *rest, **others):
        asked.append(plan.converted.whole is not None)
        return revised(plan, {k.name: "it lost" for k in plan.kernels})

    monkeypatch.setattr(check, "settled_as_a_whole", without_kernels)
    monkeypatch.setattr(check, "_measure_kernels", lambda bench: None)
    found = check.check(plan, jax.devices()[0], measure=False)
    assert asked == [True, False] and found.converted.whole is None and not found.kernels
    np.testing.assert_array_equal(execute(found, [*found.converted.jaxpr.consts, *arguments])[0], function(*arguments))


def narrow(function, *arguments):
    half = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in arguments]
    return convert(jax.make_jaxpr(function)(*half)).jaxpr


def test_terms_that_may_cancel_are_parted_only_where_they_are_rounded_as_much():
    """The difference of two float32 softmaxes is exact where they nearly agree; products that round their operands are not."""
    function, arguments = CASES["difference"]
    flat = convert(jax.make_jaxpr(function)(*arguments)).jaxpr
    assert terms_apart(flat, exact=False, longest=64) is None
    assert terms_apart(flat, exact=True, longest=64) is not None
    with jax.default_matmul_precision("highest"):
        precise = convert(jax.make_jaxpr(function)(*arguments)).jaxpr
    assert terms_apart(precise, exact=False, longest=64) is not None

    def late(q, k, q2, k2, v):
        both = [weights(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in ((q, k), (q2, k2))]
        return (both[0] - both[1]).astype(v.dtype) @ v

    for exact in (False, True):  # their difference is rounded, not they
        assert terms_apart(narrow(late, *arguments), exact=exact, longest=64) is None
    form = terms_apart(narrow(difference, *arguments), exact=False, longest=64)
    # products of terms are subtracted before they are rounded
    assert {e.outvars[0].aval.dtype for e in products(form.jaxpr)[-2:]} == {jnp.dtype("float32")}


def test_other_products_are_left_alone():
    def many(q, k, v):
        return sum(weights(q, k * n) for n in range(MOST_TERMS + 1)) @ v

    def doubled(q, k, v):
        w = weights(q, k)
        for _ in range(100):
            w = w + w  # 2**100 terms
        return w @ v

    def long_way(x, y, w):
        scale = y[:, :1]
        for _ in range(100):
            scale = scale + scale  # 2**100 ways to no statistic
        return (x * scale + y) @ w

    def residual(x, w):
        return (x + jnp.tanh(x)) @ w

    def centred(x, w):
        return (x - jnp.mean(x, 0)) @ w  # its statistic is not along what is summed

    def whole(q, k, v):
        return weights(q, k) @ v

    def layer(x, w, bias):
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True) + bias) @ w  # a bias has no rows

    def wide(q, k, v):
        return (weights(q, k) - weights(k, q)) @ jnp.concatenate([v] * 5, -1)  # no kernel accumulates such rows

    cases = (
        (many, (Q, K, V)), (doubled, (Q, K, V)), (long_way, (Q[0], K[0], V[0][:D])),
        (residual, (Q[0], V[0][:D])), (centred, (Q[0], V[0][:D])), (whole, (Q, K, V)),
        (layer, (Q[0], V[0][:D], V[0][0, :D])), (wide, (Q, K, V)), (less_its_mean, (Q, K, V)),
    )  # fmt: skip
    for function, arguments in cases:
        assert terms_apart(convert(jax.make_jaxpr(function)(*arguments)).jaxpr, exact=True, longest=64) is None


def test_what_a_user_leaves_or_forbids_is_left_alone():
    function, arguments = CASES["difference"]
    converted = convert(jax.make_jaxpr(function)(*arguments))
    assert terms_apart(converted.jaxpr, lambda eqn: True, exact=True, longest=64) is None
    target = find("interpret")
    assert form_choice._with_terms_apart(converted, target, pf.FuseOptions(check=False)) is not None
    for forbids in ({"rewrite": False}, {"strict": True}):
        assert form_choice._with_terms_apart(converted, target, pf.FuseOptions(check=False, **forbids)) is None


def test_a_plan_says_where_it_may_differ():
    function, arguments = CASES["difference"]
    form = convert_terms_apart(convert(jax.make_jaxpr(function)(*arguments)), exact=True, longest=64)
    placements = Placements(form, find("interpret"), pf.FuseOptions(price=False, check=False))
    plan = schedule_grouping(placements, choose_groups(placements))
    assert CONDITION in plan.conditions
    assert EXCEPTION in plan.exceptions


def test_algorithms_of_products_round_as_they_like():
    for algorithm in (lax.DotAlgorithmPreset.TF32_TF32_F32, lax.DotAlgorithmPreset.F32_F32_F32):

        def function(q, k, q2, k2, v, algorithm=algorithm):
            return lax.dot(weights(q, k)[0] - weights(q2, k2)[0], v[0], precision=algorithm)

        flat = convert(jax.make_jaxpr(function)(Q, K, Q2, K2, V)).jaxpr
        assert terms_apart(flat, exact=True, longest=64) is None


def test_empty_arrays_are_left_alone():
    def rows(a, v):
        return (jax.nn.softmax(a)[:0] - 2 * jax.nn.softmax(a)[3:3]) @ v

    def sums(a, v):
        return (jax.nn.softmax(a[:, :0]) - jax.nn.softmax(2 * a[:, :0])) @ v[:0]

    for function in (rows, sums):
        flat = convert(jax.make_jaxpr(function)(Q[0], V[0][:D])).jaxpr
        assert terms_apart(flat, exact=True, longest=64) is None


def test_one_form_that_cannot_be_made_leaves_the_others(monkeypatch):
    function, arguments = CASES["difference"]
    converted = convert(jax.make_jaxpr(function)(*arguments))
    written = Placements(converted, find("interpret"), pf.FuseOptions(check=False))
    monkeypatch.setattr(form_choice, "convert_in_parts", lambda *given, **others: 1 / 0)
    with pytest.warns(UserWarning, match="no other form was found"):
        forms = list(form_choice._other_forms(written, choose_groups(written)))
    assert any(f.converted.terms_apart for f in forms)


def test_slices_that_step_or_end_inside_are_the_same():
    """Slices of reshapes that are no slices of what was reshaped are cut where they are: nothing but a term is sliced."""
    for cut in (lambda w: (w[1:, 0], w[:-1, 2]), lambda w: (w[:2, 1], w[1:, 1]), lambda w: (w[:2, 0], w[::2, 1])):

        def function(q, k, v, cut=cut):
            first, second = cut(weights(q, k).reshape(3, 4, S, S))
            return (first - second) @ v

        q, k, v = draw(12, S, D), draw(12, S, D), draw(2, S, D)
        flat = convert(jax.make_jaxpr(function)(q, k, v)).jaxpr
        made = terms_apart(flat, exact=True, longest=64)
        (got,) = jax.core.eval_jaxpr(made.jaxpr, flat.consts, q, k, v)
        np.testing.assert_allclose(got, function(q, k, v), rtol=1e-5, atol=1e-5)
        assert {e.outvars[0].aval.shape for e in made.jaxpr.eqns if e.primitive.name == "exp"} == {(12, S, S)}


def test_a_later_axis_is_sliced():
    """The statistic is along the first axis, and what is sliced comes behind it."""

    def function(a, v):
        both = jax.nn.softmax(a, 0).reshape(8, 3, 2)
        return jnp.einsum("kq,kd->qd", both[:, :, 0] - 2 * both[:, :, 1], v)

    a, v = draw(8, 6), draw(8, 5)
    flat = convert(jax.make_jaxpr(function)(a, v)).jaxpr
    (got,) = jax.core.eval_jaxpr(terms_apart(flat, exact=True, longest=64).jaxpr, flat.consts, a, v)
    np.testing.assert_allclose(got, function(a, v), rtol=1e-5, atol=1e-6)
