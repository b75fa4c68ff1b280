"""Forms of a program that XLA runs faster, and kernels that the program as it is has."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse.first_time import Once
from pallasfuse.plan import Plan
from pallasfuse.primitive import FusedCall
from pallasfuse.targets import default_for
from pallasfuse.verdicts import WHOLE_CALL, WRITTEN_OUT, Verdict
from pallasfuse.written_out import is_faster_as_it_is

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


@pytest.mark.parametrize(("own_us", "faster"), [(40.0, True), (90.0, False)])
def test_the_clock_decides_between_kernels_and_a_form(own_us, faster):
    """The form takes 60 microseconds without kernels, and XLA 100 for the program as it is."""
    own = plan(with_sinks, *[half(4, 16, 1024, 64)] * 3, half(16))
    own = replace(own, verdicts=(Verdict(WHOLE_CALL, True, "", own_us, 100.0),))
    form = replace(own, kernels=(), verdicts=())
    assert is_faster_as_it_is(own, form, Verdict(WRITTEN_OUT, True, "", 60.0, 100.0)) == faster
