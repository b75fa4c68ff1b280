"""Bodies of loops with kernels are compared with XLA's own by the clock of the whole call."""

import jax
import jax.numpy as jnp

import pallasfuse as pf
from pallasfuse import loop_check
from pallasfuse.kept_plans import plan_of
from pallasfuse.measure import Measured
from pallasfuse.targets import default_for


def test_a_call_gets_more_time_while_its_bodies_seem_to_win(monkeypatch):
    jaxpr = jax.make_jaxpr(lambda x: jax.nn.softmax(x) * x)(jax.ShapeDtypeStruct((8, 64), jnp.float32))
    plan = plan_of(jaxpr, default_for("cpu", frozenset()), pf.FuseOptions())
    given = []

    def compare(*_, **options):
        given.append((options["budget_s"], options["more_s"]))
        return Measured(skipped="asked")

    monkeypatch.setattr(loop_check, "compare", compare)
    loop_check._measured(plan, plan, jax.devices("cpu")[0])

    assert given == [(0.25, 1.0)]
