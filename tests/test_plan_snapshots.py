"""The snapshots of the kernels of a plan."""

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from tests.test_repetition import arguments, model


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 8, -1) @ v


@pytest.fixture(scope="module")
def plan():
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    options = pf.FuseOptions(price=False)
    return pf.fuse(attention, options=options).explain(x, x, x)


def test_a_kernel_has_snapshots_from_unfused_to_most_fused(plan):
    (own,) = plan.snapshots
    assert own.kernel is plan.kernels[0]
    assert len(own.found.unfused.kernels) == 4
    first, last = own.found
    assert first.counts == {1: 6, 3: 4, 4: 1} and last.counts == {1: 7, 3: 4, 4: 1, 6: 1}
    assert len(last.kernels) == 1
    assert plan.snapshots is plan.snapshots


def test_they_are_shown(plan):
    text = plan.show("snapshots")
    name = plan.kernels[0].name
    assert text.startswith(f"== {name}, from ") and "snapshot 2: 1 kernel, " in text
    assert plan.show("snapshots", name) == text
    assert "snapshot 2" not in str(plan)
    with pytest.raises(ValueError, match="no kernel 'nothing' in stage 'snapshots': choose one of fused"):
        plan.show("snapshots", "nothing")


def test_equal_kernels_have_those_of_the_first():
    plan = pf.fuse(model).explain(*arguments(12))
    assert 0 < len(plan.snapshots) == len({k.original or k.name for k in plan.kernels}) < len(plan.kernels)
    assert plan.snapshots[0].kernel == plan.kernels[0]


def test_kernels_in_the_body_of_a_loop_have_them_too():
    def function(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: attention(y, x, x), x)

    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    plan = pf.fuse(function, options=pf.FuseOptions(price=False)).explain(x)
    (body,) = plan.bodies
    assert not plan.snapshots and len(body.plan.snapshots) == 1
    assert f"== {body.what}\n  == {body.plan.kernels[0].name}, from " in plan.show("snapshots")


def test_a_plan_without_kernels_has_none():
    plan = pf.fuse(jnp.sort).explain(jax.ShapeDtypeStruct((8,), jnp.float32))
    assert plan.snapshots == () and plan.show("snapshots") == ""
