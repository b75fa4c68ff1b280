"""Kernels whose threads spill registers get smaller tiles, where these are predicted to be faster."""

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse import placement
from pallasfuse.phases import us_of
from pallasfuse.searched import Patience
from pallasfuse.spilling import with_fewer_spilled
from pallasfuse.warps import spilled_bytes

half = jnp.bfloat16
Q = jax.ShapeDtypeStruct((64, 100, 48), half)
APART = jax.ShapeDtypeStruct((64, 100, 100, 48), half)


def attention(q, k, v, keys_apart, values_apart):
    """Keys and values differ from query to query: a tile has them along three axes."""
    scores = jnp.einsum("bid,bjd->bij", q, k) + jnp.einsum("bid,bijd->bij", q, keys_apart)
    weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(half)
    return jnp.einsum("bij,bjd->bid", weights, v) + jnp.einsum("bij,bijd->bid", weights, values_apart)


@pytest.fixture(scope="module")
def planned():
    """The kernel with the largest tiles that fit in shared memory, and the tensors of its program."""
    options = pf.FuseOptions(target="triton", check=False, price=False)
    plan = pf.fuse(attention, options=options).explain(Q, Q, Q, APART, APART)
    (kernel,) = plan.kernels
    return kernel, {t.name: t for t in plan.converted.program.definitions()}


def test_smaller_tiles_are_taken_where_threads_spill(planned):
    kernel, tensors = planned
    assert any(map(spilled_bytes, kernel.phases))
    schedule, phases = with_fewer_spilled(
        kernel.group, kernel.schedule, kernel.phases, tensors, pf.FuseOptions(price=True)
    )
    assert schedule != kernel.schedule
    assert us_of(phases) < us_of(kernel.phases)
    assert sum(map(spilled_bytes, phases)) < sum(map(spilled_bytes, kernel.phases))


@pytest.mark.parametrize(("share", "looks"), [(0.9, True), (0.3, True), (0.2, False)])
def test_smaller_tiles_are_looked_for_only_within_four_times_the_patience(planned, share, looks):
    """share: of what the kernel takes whose threads spill, the time within which one has to be found."""
    kernel, tensors = planned
    patience = Patience(share * us_of(kernel.phases))
    options = pf.FuseOptions(price=True)
    schedule, _ = placement._with_smaller_tiles_if_near(
        kernel.group, kernel.schedule, kernel.phases, tensors, options, patience
    )
    assert (schedule != kernel.schedule) == looks
    assert patience.gave_up != looks


@pytest.mark.parametrize("asked", [{"price": False}, {"tiles": (("i", 32),)}, {"warps": 4}, {"stages": 2}])
def test_what_is_asked_for_stays(planned, asked):
    kernel, tensors = planned
    options = pf.FuseOptions(**{"price": True} | asked)
    found = with_fewer_spilled(kernel.group, kernel.schedule, kernel.phases, tensors, options)
    assert found == (kernel.schedule, kernel.phases)
