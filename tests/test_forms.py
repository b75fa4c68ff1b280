"""Programs in another form: planned, proved, run, checked against the form that they are written in."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import forms
from pallasfuse.ir.expr import add, apply
from pallasfuse.measure import Measured
from pallasfuse.search import rewriting
from pallasfuse.search.found import CONDITION, EXCEPTION
from pallasfuse.subjects import XLA
from pallasfuse.verdicts import FORM
from tests.search.test_rewriting import LARGE as N
from tests.search.test_rewriting import PROGRAMS, M, f32

PRICED = pf.FuseOptions(price=True, check=False)


def drawn(avals, dtype=None, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(avals))
    return [jax.random.normal(k, a.shape, dtype or a.dtype) for k, a in zip(keys, avals, strict=True)]


def gram(a, x):
    return a.T @ a @ x


GRAM = (f32(N, N), f32(N))


@pytest.mark.sampled(14, cover=())
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rewritten_program_is_right_and_proved(name, dtype):
    function, avals, _ = PROGRAMS[name]
    args = drawn(avals, dtype)
    fused = pf.fuse(function, options=PRICED)
    plan = fused.explain(*args)
    if dtype == "float32":
        assert plan.rewritings, plan.summary
        assert plan.fuses and CONDITION in plan.conditions and EXCEPTION in plan.exceptions
    report = pf.verify(fused, *args, delta=1e-4)
    assert report.proof.counterexample is None and not report.proof.uncovered, str(report)
    with jax.enable_x64(True):
        exact = np.asarray(function(*[jnp.asarray(np.asarray(a, np.float64)) for a in args]))
    ours, plain = (np.abs(np.asarray(f(*args), np.float64) - exact).max() for f in (fused, jax.jit(function)))
    rounding = float(jnp.finfo(dtype).eps) * np.abs(exact).max()
    assert ours <= max(4 * plain, 4 * rounding)


def test_the_type_and_shape_are_those_of_the_program():
    for dtype in (jnp.float32, jnp.bfloat16):
        a, x = drawn(GRAM, dtype)
        found = pf.fuse(gram, options=PRICED)(a, x)
        assert found.dtype == dtype and found.shape == (N,)


@pytest.mark.parametrize("changed", [{"rewrite": False}, {"strict": True}, {"price": False}])
def test_who_does_not_want_another_form_gets_none(changed):
    options = pf.FuseOptions(**{"price": True, "check": False, **changed})
    try:
        plan = pf.fuse(gram, options=options).explain(*GRAM)
    except pf.FusionError:  # strict: products are left to XLA
        return
    assert not plan.rewritings


def test_what_the_user_leaves_is_not_rewritten():
    def part(a, x):
        return gram(a, x)

    plan = pf.fuse(pf.leave(part), options=PRICED).explain(*GRAM)
    assert not plan.rewritings


@pytest.mark.parametrize("most", [0, 100])
def test_very_large_programs_are_planned_as_they_are_written(monkeypatch, most):
    monkeypatch.setattr("pallasfuse.form_choice._MOST_NESTS", most)

    def planned(a, x):
        return gram(a, x)

    plan = pf.fuse(planned, options=PRICED).explain(*GRAM)
    assert bool(plan.rewritings) == (most > 0)


def test_a_form_works_under_transformations():
    a, x = drawn(GRAM)
    fused, xs = pf.fuse(gram, options=PRICED), jnp.stack([x, 2 * x])
    expected = gram(a, x)
    close = dict(rtol=1e-4, atol=1e-3 * float(jnp.abs(expected).max()))
    np.testing.assert_allclose(jax.jit(fused)(a, x), expected, **close)
    np.testing.assert_allclose(jax.vmap(fused, (None, 0))(a, xs)[1], 2 * expected, **close)
    _, ys = jax.lax.scan(lambda c, v: (c, fused(a, v)), 0, xs)
    np.testing.assert_allclose(ys[0], expected, **close)
    with pytest.warns(UserWarning, match="gradient"):
        found = jax.grad(lambda x: fused(a, x).sum())(x)
    np.testing.assert_allclose(found, jax.grad(lambda x: gram(a, x).sum())(x), **close)


def test_the_body_of_a_loop_has_a_form_of_its_own():
    def iterate(a, x):
        return jax.lax.fori_loop(0, 3, lambda _, v: jnp.tanh(a @ (a.T @ a @ v)), x)

    args = drawn(GRAM)
    plan = pf.fuse(iterate, options=PRICED).explain(*args)
    # what does not change in the loop, the Gram matrix, is computed before it; what is left has a better form where there is one
    assert all(not body.plan.rewritings or body.plan.fuses for body in plan.bodies)
    np.testing.assert_allclose(pf.fuse(iterate, options=PRICED)(*args), iterate(*args), rtol=1e-3, atol=1e-3)


def test_explain_says_what_was_rewritten():
    plan = pf.fuse(gram, options=PRICED).explain(*GRAM)
    assert plan.summary.startswith("rewritten: ")
    assert "computed as" in plan.show("rewritten") and "== sums and products in another order" in str(plan)
    assert pf.fuse(lambda x: x + 1, options=PRICED).explain(f32(4)).show("rewritten") == ""


def measured(ours: float, written: float, faster: bool) -> Measured:
    times = {XLA: written, forms._REWRITTEN: ours}
    return Measured(times, forms._REWRITTEN if faster else XLA, frozenset({forms._REWRITTEN} if faster else ()))


@pytest.fixture
def checked(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLASFUSE_CHECK", "1")
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    return pf.FuseOptions(price=True)


@pytest.mark.parametrize("faster", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_a_clock_decides_between_the_forms(monkeypatch, checked, faster):
    calls = []
    answer = measured(10.0, 20.0 if faster else 10.0, faster)
    monkeypatch.setattr(forms, "_measured", lambda plan, device: calls.append(1) or answer)
    args = drawn(GRAM)
    fused = pf.fuse(gram, options=checked)
    np.testing.assert_allclose(fused(*args), gram(*args), rtol=1e-3, atol=1e-2 * N)
    plan = fused.explain(*args)
    (verdict,) = [v for v in plan.verdicts if v.subject == FORM]
    assert verdict.kept is faster and bool(plan.rewritings) is faster
    again = pf.fuse(gram, options=checked)
    again(*args)
    assert len(calls) == 1, "what is known is not measured again"


def test_a_form_that_does_not_run_is_not_used(monkeypatch, checked):
    monkeypatch.setattr(
        forms, "_measured", lambda plan, device: Measured({XLA: 1.0}, XLA, failed={forms._REWRITTEN: "no"})
    )
    fused = pf.fuse(gram, options=checked)
    args = drawn(GRAM)
    fused(*args)
    assert not fused.explain(*args).rewritings


def test_a_failure_of_the_search_leaves_the_program(monkeypatch):
    monkeypatch.setattr(rewriting, "rewritings", lambda *args: 1 / 0)
    with pytest.warns(UserWarning, match="no other form was found"):
        plan = pf.fuse(gram, options=PRICED).explain(*GRAM)
    assert not plan.rewritings


def test_where_kernels_lose_another_form_that_they_seemed_to_outdo_is_tried(monkeypatch, checked):
    """Kernels of the written form are predicted to be faster; the clock says no; then the other form is timed."""
    from pallasfuse import check, form_choice

    monkeypatch.setattr(form_choice, "_is_covered", lambda *args: True)
    monkeypatch.setattr(forms, "_measured", lambda plan, device: measured(10.0, 20.0, True))
    monkeypatch.setattr(check, "_measure_kernels", lambda bench: None)
    args = drawn(GRAM)
    fused = pf.fuse(gram, options=checked)
    plan = fused.explain(*args)
    assert plan.outdoes and not plan.rewritings
    lost = check._in_another_form(plan, jax.devices()[0], measure=True)
    assert lost.rewritings and any(v.subject == FORM and v.kept for v in lost.verdicts)


def test_a_form_that_loses_is_not_planned(monkeypatch, checked):
    """To plan a form of a long program takes seconds: the clock is asked first."""
    from pallasfuse import check, form_choice

    monkeypatch.setattr(form_choice, "_is_covered", lambda *args: True)
    plan = pf.fuse(gram, options=PRICED).explain(*GRAM)
    assert plan.outdoes
    monkeypatch.setattr(forms, "_measured", lambda form, device: measured(10.0, 10.0, False))
    for room in ("pipeline", "form_choice"):
        monkeypatch.setattr(f"pallasfuse.{room}.choose_groups", lambda *args: pytest.fail("planned"))
    lost = check._in_another_form(plan, jax.devices()[0], measure=True)
    assert lost.kernels == plan.kernels and [v.kept for v in lost.verdicts if v.subject == FORM] == [False]


def graph_layer(adjacency, x, w):
    connected = jnp.abs(adjacency) + jnp.eye(len(adjacency))
    scale = jnp.diag(connected.sum(1) ** -0.5)
    return scale @ connected @ scale @ x @ w


def joseph(gain, h, covariance, noise):
    rest = jnp.eye(len(covariance)) - gain @ h
    return rest @ covariance @ rest.T + gain @ noise @ gain.T


def discrepancy(x, y):
    def features(z):
        return jnp.concatenate([jnp.sin(z), jnp.cos(z)], axis=-1)

    return (features(x) @ features(x).T).mean() - (features(x) @ features(y).T).mean()


PROVED = {
    "an identity that the new form has, too": (joseph, ((N, M), (M, N), (N, N), (M, M))),
    "a sum with an identity that others read": (graph_layer, ((N, N), (N, 64), (64, M))),
    "concatenated operands": (discrepancy, ((N, 32), (N, 32))),
}


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", PROVED)
def test_the_proof_knows_what_is_fixed_and_where_forms_begin(name):
    """Positions are no random numbers, and what both forms have is one only where a form begins."""
    function, shapes = PROVED[name]
    fused = pf.fuse(function, options=PRICED)
    avals = [f32(*s) for s in shapes]
    assert fused.explain(*avals).rewritings
    proof = pf.verify(fused, *drawn(avals), delta=1e-4).proof
    assert proof.counterexample is None and not proof.uncovered
    assert "another form" in proof.stages


def squares(a):
    g = a.T @ a
    e = g.sum(0)
    s = e @ e
    return s * s


def narrow_positions(u, v, x):
    """Positions in a type that does not hold them: 0 and 256 are equal, so that this is no identity."""
    p = jnp.arange(N).astype(jnp.int8)
    return ((p[:, None] == p[None]).astype(jnp.float32) + u @ v) @ x


def distances(a, p):
    """Of the rows of an array to itself: the differences of which squares are summed are zero on the diagonal."""
    d = (a @ p)[:, None] - (a @ p)[None]
    return jnp.sqrt((d * d).sum(-1))


def masked_diagonal(s, u, v, x):
    return (jnp.where(jnp.eye(N, dtype=bool), s[:, None], 0.0) + u @ v) @ x


def summed_product(a, b):
    return jnp.dot(jnp.abs(a), jnp.abs(b), preferred_element_type=jnp.float32).sum(0)


HARD = {
    "a sum that occurs twice": (squares, [f32(M, N)]),
    "positions in a narrow type": (narrow_positions, [f32(N, 4), f32(4, N), f32(N, N)]),
    "differences that cancel": (distances, [f32(N, 64), f32(64, 64)]),
    "a diagonal by a mask": (masked_diagonal, [f32(N), f32(N, 4), f32(4, N), f32(N, N)]),
    "narrow operands of a wide sum": (summed_product, [jax.ShapeDtypeStruct((N, N), jnp.bfloat16)] * 2),
}


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("name", HARD)
def test_programs_that_tempt_to_be_rewritten_wrongly(name):
    function, avals = HARD[name]
    args = [3 + x for x in drawn(avals)]
    with jax.enable_x64(True):
        exact = np.asarray(function(*[jnp.asarray(np.asarray(a, np.float64)) for a in args]), np.float64)
    ours, plain = (
        np.abs(np.asarray(f(*args), np.float64) - exact) for f in (pf.fuse(function, options=PRICED), jax.jit(function))
    )
    assert np.isfinite(ours).all()
    assert ours.max() <= 4 * plain.max() + 1e-6 * np.abs(exact).max()


def test_a_form_that_is_not_proved_is_not_used(monkeypatch):
    monkeypatch.setattr("pallasfuse.form_choice.disproved_form", lambda converted: "another form: it differs")
    assert not pf.fuse(gram, options=PRICED).explain(*GRAM).rewritings


WRONG = {
    "twice as much": lambda nests: [*nests[:-1], replace(nests[-1], body=add(nests[-1].body, nests[-1].body))],
    "the wrong sign": lambda nests: [*nests[:-1], replace(nests[-1], body=apply("neg", nests[-1].body))],
    "the first sum is a product less": lambda nests: [replace(nests[0], body=nests[0].body.args[0]), *nests[1:]],
}


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize("name", WRONG)
def test_the_proof_notices_a_wrong_form(monkeypatch, name):
    right = rewriting.rewritings

    def wrong(*args):
        return [replace(found, nests=tuple(WRONG[name](found.nests))) for found in right(*args)]

    monkeypatch.setattr(rewriting, "rewritings", wrong)
    assert not pf.fuse(gram, options=PRICED).explain(*GRAM).rewritings, "it is proved before it is used"
    monkeypatch.setattr("pallasfuse.form_choice.disproved_form", lambda converted: None)
    proof = pf.verify(pf.fuse(gram, options=PRICED), *drawn(GRAM), delta=1e-4).proof
    assert "another form" in str(proof.counterexample)


def test_a_plan_of_another_form_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PALLASFUSE_KEEP_PLANS", "1")
    args = drawn(GRAM)
    first = pf.fuse(gram, options=PRICED)
    expected, plan = first(*args), first.explain(*args)
    monkeypatch.setattr("pallasfuse.pipeline.make_plan", lambda *args: pytest.fail("it is planned again"))
    again = pf.fuse(gram, options=PRICED)
    kept = again.explain(*args)
    np.testing.assert_array_equal(again(*args), expected)
    assert [str(r).partition(": ")[2] for r in kept.rewritings] == [str(r).partition(": ")[2] for r in plan.rewritings]
    assert str(kept.program) == str(plan.program) and kept.conditions == plan.conditions
    assert pf.verify(again, *args, delta=1e-4).proof.counterexample is None
