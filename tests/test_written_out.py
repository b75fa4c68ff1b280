"""Forms of a program that XLA runs faster, and kernels that the program as it is has."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse import written_out
from pallasfuse.device import assumed
from pallasfuse.first_time import Once
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.kept_plans import plan_of
from pallasfuse.plan import Body, Plan
from pallasfuse.primitive import FusedCall
from pallasfuse.targets import default_for, find
from pallasfuse.verdicts import BODIES, WHOLE_CALL, WRITTEN_OUT, Verdict
from pallasfuse.written_out import (
    cannot_win_as_it_is,
    is_faster_as_it_is,
    may_lose_kernels,
    predicted_us,
    sure_forms,
    surely_faster,
)

H100 = default_for("cuda", frozenset({"9.0"})).judged(timed=False, one_device=True)
PRICED = pf.FuseOptions(check=False, price=True)


def plan(function, *structs) -> Plan:
    return FusedCall(jax.make_jaxpr(function)(*structs), PRICED, "function", Once()).plan(H100)


def with_sinks(q, k, v, sinks):
    """A column beside the scores, which is gone after the softmax."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))], -1)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1)[..., :-1], v)


def with_a_first_token(tokens, token):
    token = jnp.broadcast_to(token, (tokens.shape[0], 1, tokens.shape[-1]))
    return jnp.concatenate([token, tokens], 1) * 2


def half(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def test_kernels_that_take_part_in_a_concatenation_are_kept():
    found = plan(with_sinks, *[half(4, 16, 1024, 64)] * 3, half(16))
    assert not found.written_out
    assert [len(k.group.folds) for k in found.kernels] == [3]


def test_uneven_concatenations_are_choices():
    found = plan(with_a_first_token, half(128, 576, 768), half(768))
    assert found.written_out
    assert not any(e.primitive.name == "concatenate" for e in found.converted.jaxpr.eqns)


def test_even_concatenations_stay():
    found = plan(lambda x, y: jnp.concatenate([x, y], 1) * 2, *[half(128, 288, 768)] * 2)
    assert not found.written_out


@pytest.mark.parametrize("subject", [WHOLE_CALL, BODIES])
@pytest.mark.parametrize(("own_us", "faster"), [(40.0, True), (90.0, False)])
def test_the_clock_decides_between_kernels_and_a_form(subject, own_us, faster):
    """The form takes 60 microseconds without kernels, and XLA 100 for the program as it is."""
    own = plan(with_sinks, *[half(4, 16, 1024, 64)] * 3, half(16))
    own = replace(own, verdicts=(Verdict(subject, True, "", own_us, 100.0),))
    form = replace(own, kernels=(), verdicts=(), written_out=True)
    assert is_faster_as_it_is(own, form, Verdict(WRITTEN_OUT, True, "", 60.0, 100.0)) == faster


def test_without_a_clock_a_form_loses_to_kernels_only_while_there_are_some(monkeypatch):
    """A check may have left none of those that were predicted to gain more."""
    own = plan(with_sinks, *[half(4, 16, 1024, 64)] * 3, half(16))
    form = replace(own, kernels=(), written_out=True)
    unclocked = Verdict(WRITTEN_OUT, True, "not measured: it has cond")
    monkeypatch.setattr(written_out, "predicted_us", lambda plan: 50.0 if plan is form else 100.0)
    assert is_faster_as_it_is(own, form, unclocked, loses=True)
    assert is_faster_as_it_is(replace(own, kernels=(), bodies=(Body(0, "scan", own),)), form, unclocked, loses=True)
    assert not is_faster_as_it_is(replace(own, kernels=()), form, unclocked, loses=True)
    assert not is_faster_as_it_is(own, form, unclocked)


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(
    ("form_us", "replaced_us", "changes", "certain"),
    [
        (60.0, 10.0, {}, True),
        (60.0, 15.0, {}, False),
        (90.0, 10.0, {}, False),
        (None, 1.0, {}, False),
        (60.0, 10.0, {"outdoes": True}, False),
        (60.0, 10.0, {"rewritings": ("one",)}, False),
    ],
    ids=["too little", "three times that", "the form saves little", "no clock", "another order wins", "another order"],
)
def test_kernels_are_not_timed_that_would_have_to_save_more_than_they_can(form_us, replaced_us, changes, certain):
    """XLA takes 100 microseconds for the program as it is: 42 of them would have to be saved for a form that takes 60."""
    own = plan(with_sinks, *[half(4, 16, 1024, 64)] * 3, half(16))
    (kernel,) = own.kernels
    kernel = replace(kernel, replaced=replace(kernel.replaced, us=replaced_us))
    form = replace(own, kernels=(), verdicts=(), written_out=True)
    own = replace(own, kernels=(kernel,), **changes)
    assert cannot_win_as_it_is(own, form, Verdict(WRITTEN_OUT, True, "", form_us, 100.0)) == certain
    in_a_loop = replace(own, kernels=(), bodies=(Body(0, "scan", own),))
    assert not cannot_win_as_it_is(in_a_loop, form, Verdict(WRITTEN_OUT, True, "", form_us, 100.0))


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize(
    ("trips", "certain"), [((4,), True), ((5,), False), ((2, 2), True), ((3, 2), False), ((2, None), False)]
)
def test_kernels_in_bodies_of_loops_save_in_all_trips(trips, certain):
    """As above: three times what they replace must make up for 38.8 microseconds."""
    own = plan(with_sinks, *[half(4, 16, 1024, 64)] * 3, half(16))
    (kernel,) = own.kernels
    body = replace(own, kernels=(replace(kernel, replaced=replace(kernel.replaced, us=3.0)),))
    form = replace(own, kernels=(), verdicts=())
    for n in reversed(trips):
        body = replace(own, kernels=(), bodies=(Body(0, "scan", body, n),))
    assert cannot_win_as_it_is(body, form, Verdict(WRITTEN_OUT, True, "", 60.0, 100.0)) == certain


def test_kernels_in_bodies_of_loops_are_kept():
    """What kernels of a body gain is not predicted: a form in which they lose a concatenation is not used without a clock."""

    def layers(q, k, v, sinks):
        return jax.lax.scan(lambda c, _: (with_sinks(c, k, v, sinks), None), q, length=4)[0]

    assert not plan(layers, *[half(4, 16, 1024, 64)] * 3, half(16)).written_out


def turned(batch, length=9):
    """Products of tiny matrices in a loop, beside sines: both have a faster way on a CPU."""

    def function(a, b, x):
        return jax.lax.scan(lambda c, _: (jnp.einsum("nij,njk->nik", c, b), None), a, length=length)[0], jnp.sin(x)

    tiny = jax.ShapeDtypeStruct((batch, 4, 4), jnp.float32)
    return jax.make_jaxpr(function)(tiny, tiny, jax.ShapeDtypeStruct((1 << 20,), jnp.float32))


def products_and_sines(jaxpr):
    text = str(jaxpr)  # sines of large numbers are left to XLA by a choice
    return "dot_general" in text, "cond[" not in text


@pytest.mark.parametrize(("batch", "found"), [(8192, [(False, False), (True, False)]), (16, [(True, False)])])
def test_what_kernels_may_need_in_a_body_goes_only_for_a_gain(batch, found):
    forms = list(sure_forms(turned(batch), find("xla").on(assumed("cpu"))))
    assert [products_and_sines(form) for form in forms] == found


@pytest.mark.parametrize("kernels", [(), ("one",)])
def test_a_body_without_kernels_loses_none(kernels):
    jaxpr = turned(8192)
    form, _ = sure_forms(jaxpr, find("xla").on(assumed("cpu")))
    assert may_lose_kernels(jaxpr, form, lambda _: SimpleNamespace(kernels=kernels)) == bool(kernels)


def test_kernels_are_compared_where_products_have_even_rows_in_a_form():
    def loss(x, w, label):
        logits = (x @ w).astype(jnp.float32)
        return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, label[:, None], 1)[:, 0]

    structs = half(4096, 1024), half(1024, 50257), jax.ShapeDtypeStruct((4096,), jnp.int32)
    jaxpr = jax.make_jaxpr(loss)(*structs)
    form = surely_faster(jaxpr, H100)
    asked = []
    may_lose_kernels(jaxpr, form, lambda one: asked.append(one) or plan_of(one, H100, PRICED))
    assert form is not jaxpr
    assert asked == [jaxpr, form]


def test_a_plan_takes_no_less_than_its_kernels():
    """What two kernels replace may be the same work of XLA's, which is saved once."""

    def balanced(a, b):
        near = jnp.einsum("ija,ila->ijl", a, b, precision="highest")
        return jax.nn.logsumexp(near - jax.nn.logsumexp(near, 1, keepdims=True), 2)

    jaxpr = jax.make_jaxpr(balanced)(*[jax.ShapeDtypeStruct((12, n, 3), jnp.float32) for n in (1500, 2000)])
    as_it_is = plan_of(flatten(jaxpr), H100, PRICED)
    assert len(as_it_is.kernels) == 2
    assert predicted_us(as_it_is) >= sum(k.price.us for k in as_it_is.kernels)
