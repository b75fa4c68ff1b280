"""What a clock decides for a call as a whole gets more of it than a kernel does, while something seems to win."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse import forms, loop_check, written_out
from pallasfuse.kept_plans import plan_of
from pallasfuse.measure import BUDGET_S, MORE_FOR_CALLS_S, Measured
from pallasfuse.targets import default_for

CPU = jax.devices("cpu")[0]
ONE, OTHER = (
    jax.make_jaxpr(f)(jax.ShapeDtypeStruct((8, 64), jnp.float32))
    for f in (lambda x: jnp.sin(x) + x, lambda x: x + jnp.sin(x))
)


def bodies():
    plan = plan_of(ONE, default_for("cpu", frozenset()), pf.FuseOptions())
    loop_check._measured(plan, plan, CPU)


def form():
    forms._measured(SimpleNamespace(jaxpr=OTHER, original=ONE), CPU)


def written():
    written_out.fastest(ONE, {"another order": OTHER}, CPU, measure=True)


@pytest.mark.parametrize(("module", "decide"), [(loop_check, bodies), (forms, form), (written_out, written)])
def test_a_call_gets_more_time(module, decide, monkeypatch):
    given = []

    def compare(*_, **options):
        given.append((options["budget_s"], options["more_s"]))
        return Measured(skipped="asked")

    monkeypatch.setattr(module, "compare", compare)
    decide()

    assert given == [(BUDGET_S, MORE_FOR_CALLS_S)] and MORE_FOR_CALLS_S > 0
