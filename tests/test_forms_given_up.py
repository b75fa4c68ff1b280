"""Forms of a program that are given up before their kernels are priced: the plan is the one that all of them priced would give."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse import form_choice, pipeline, repetition
from pallasfuse.at_hand import target_for
from pallasfuse.first_time import Once, known, one_task
from pallasfuse.form_choice import Placements, choose_groups
from pallasfuse.fusion.judging import Judge
from pallasfuse.fusion.segments import segments
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.options import FuseOptions
from pallasfuse.pipeline import make_plan
from pallasfuse.primitive import FusedCall
from pallasfuse.repetition import predicted_us
from pallasfuse.targets import default_for
from tests.spelled_attention import normed, repeated_tables, tiled_tables, updates_in_place, with_rotations

H100 = default_for("cuda", frozenset({"9.0"}))
PRICED = FuseOptions(check=False, price=True)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def with_a_first_token(tokens, token, w, v):
    """The loss of a block of a model whose first token is learned."""
    first = jnp.broadcast_to(token, (tokens.shape[0], 1, tokens.shape[-1]))
    x = jnp.concatenate([first, tokens], 1)
    x = x + jax.nn.softmax(x @ w @ x.swapaxes(-1, -2), -1) @ x
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return -jnp.mean(jax.nn.log_softmax(x @ v, -1)[..., 0])


LOSS = (f32(8, 255, 256), f32(256), f32(256, 256), f32(256, 1024))
QKV = [jax.ShapeDtypeStruct((2, 512, 8, 128), jnp.bfloat16)] * 3
CASES = {
    "a first token": (with_a_first_token, LOSS),
    "its gradient": (jax.grad(with_a_first_token, (1, 2, 3)), LOSS),
    "tiled tables": (with_rotations(tiled_tables, normed), QKV),
    "repeated tables": (with_rotations(repeated_tables), QKV),
}
"""Programs that have another form: in parts of concatenated axes, or with neighbouring axes as one."""


def converted(name):
    return converted_of(*CASES[name])


def converted_of(function, structs):
    return convert(jax.make_jaxpr(function)(*structs))


FEW = [pytest.param(n, marks=[pytest.mark.deep] if n in ("its gradient", "repeated tables") else []) for n in CASES]
"""One program with parts of axes, and one with joined axes; the others are deep."""


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("timed", [False, True], ids=["by price", "by the clock"])
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
@pytest.mark.sampled(16, cover=("platform",))
def test_the_plan_is_that_of_all_forms(name, timed, platform, monkeypatch):
    target = (H100 if platform == "gpu" else target_for("cpu", PRICED)).judged(timed=timed)
    function, structs = CASES[name]
    jaxpr = jax.make_jaxpr(function)(*structs)
    plan = make_plan(jaxpr, target, PRICED)
    monkeypatch.setattr(repetition, "_may_save", lambda parts, wanted_us: True)
    every = make_plan(jaxpr, target, PRICED)
    assert plan.summary == every.summary
    assert [str(p.program) for k in plan.kernels for p in k.phases] == [
        str(p.program) for k in every.kernels for p in k.phases
    ]


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", FEW)
def test_what_kernels_save_is_within_the_bound_in_every_form(name):
    written = Placements(converted(name), H100, PRICED)
    forms = [written, *form_choice._other_forms(written, choose_groups(written))]
    assert len(forms) >= 2
    for places in forms:
        bound_us, saved_us = 0.0, 0.0
        for part in segments(places.converted.program):
            own = repetition._Part(part, Placements(places.converted, H100, PRICED), frozenset())
            assert own.most_saved_us(closely=True) <= own.most_saved_us()
            bound_us, saved_us = bound_us + own.most_saved_us(closely=True), saved_us + own.saved_us()
        together_us = predicted_us(places, ()) - predicted_us(places, choose_groups(places).groups)
        assert max(saved_us, together_us) <= repetition._INTERACTION * bound_us


def test_bounds_are_refined_only_where_they_decide(monkeypatch):
    placements = Placements(converted("its gradient"), H100, PRICED)
    parts = [repetition._Part(p, placements, frozenset()) for p in segments(placements.converted.program)]
    asked, bound = [], Judge.bound
    monkeypatch.setattr(Judge, "bound", lambda judge, one, *others: asked.append(one) or bound(judge, one, *others))
    loose = [part.most_saved_us() for part in parts]
    assert not asked
    close = [part.most_saved_us(closely=True) for part in parts]
    assert sum(close) < sum(loose)
    assert 0 < len(asked) < sum(part.candidates for part in parts)


def test_what_kernels_cannot_save_is_not_priced(monkeypatch):
    placements = Placements(converted("its gradient"), H100, PRICED)
    parts = [repetition._Part(p, placements, frozenset()) for p in segments(placements.converted.program)]
    monkeypatch.setattr(repetition, "_NESTS_OF_A_CANDIDATE", 1 << 30)
    bound_us = repetition._INTERACTION * sum(part.most_saved_us() for part in parts)
    assert 0.0 < bound_us < float("inf")
    monkeypatch.setattr(repetition.Places, "price", lambda *args: pytest.fail("a kernel was priced"))
    assert choose_groups(placements, to_save_us=known(1.01 * bound_us)).groups == ()


def test_all_is_planned_where_nothing_must_be_saved():
    form = converted_of(with_rotations(updates_in_place), QKV)
    groups = choose_groups(Placements(form, H100, PRICED))
    again = choose_groups(Placements(form, H100, PRICED), to_save_us=known(0.0))
    assert groups.groups and again == groups


def test_forms_are_priced_together_where_kernels_share_memory():
    """On a CPU kernels may save more together than each by itself: the memory that XLA needs for any of them."""
    large = (f32(16, 1023, 256), f32(256), f32(256, 256), f32(256, 8192))
    placements = Placements(converted_of(with_a_first_token, large), target_for("cpu", PRICED), PRICED)
    (part, *_) = [repetition._Part(p, placements, frozenset()) for p in segments(placements.converted.program)]
    assert part.most_saved_us() == float("inf")


@pytest.mark.parametrize("name", ["a first token", pytest.param("its gradient", marks=pytest.mark.deep)])
def test_a_program_and_its_form_are_planned_once_each(monkeypatch, name):
    planned = []
    original = pipeline.choose_form

    def counting(converted, *args):
        planned.append(converted.original)
        return original(converted, *args)

    monkeypatch.setattr(pipeline, "choose_form", counting)
    monkeypatch.setenv("PALLASFUSE_KEEP_PLANS", "0")
    function, structs = CASES[name]
    call = FusedCall(jax.make_jaxpr(function)(*structs), PRICED, "loss", Once())
    call.plan(H100.judged(timed=False, one_device=True))
    assert len(planned) == len({id(j) for j in planned}) <= 2


def with_another_loss(tokens, token, w, v):
    return with_a_first_token(tokens, token, w, v) + jnp.mean(jax.nn.logsumexp(tokens @ v, -1))


@pytest.mark.parametrize("name", ["another loss", pytest.param("the gradient", marks=pytest.mark.deep)])
def test_plans_of_one_task_are_those_that_each_would_be(name):
    function, structs = CASES["a first token"]
    changed = with_another_loss if name == "another loss" else jax.grad(function, (1, 2, 3))
    jaxpr, other = (jax.make_jaxpr(f)(*structs) for f in (function, changed))
    alone = make_plan(other, H100, PRICED)
    with one_task():
        make_plan(jaxpr, H100, PRICED)
        again = make_plan(other, H100, PRICED)
    assert again.summary == alone.summary
    assert [(k.price, k.replaced) for k in again.kernels] == [(k.price, k.replaced) for k in alone.kernels]
