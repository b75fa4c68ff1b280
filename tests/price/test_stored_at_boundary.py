"""What a kernel in the body of a loop makes XLA store where the body begins and ends."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse import device
from pallasfuse.ir.boundary import NO_LOOP, Boundary
from pallasfuse.kept_plans import plan_of
from pallasfuse.options import FuseOptions
from pallasfuse.primitive import FusedCall, Once
from pallasfuse.targets import TRITON

TARGET = TRITON.on(device.find("NVIDIA H200", "gpu"))
SLICES, CARRIED, STACKED = "slices stored for it", "copies of carried results", "copies of stacked results"


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def norm(x):
    return jax.nn.softmax(x, -1)


def planned(function, *arguments, target=TARGET, price=False):
    call = FusedCall(jax.make_jaxpr(function)(*arguments), FuseOptions(check=False, price=price), "loop", Once())
    return call.plan(target)


def counted(function, *arguments, target=TARGET):
    """The copies for the only kernel of a loop's body, by the names of their terms."""
    (body,) = planned(function, *arguments, target=target).bodies
    assert len(body.plan.kernels) == 1
    return {t.name: t.amount for stored in body.plan.at_boundary.values() for t in stored.terms}


ROWS = array(8192, 4096)
MANY = array(5, 8192, 4096)


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (lambda xs: lax.map(norm, xs), [MANY], {SLICES: 1, STACKED: 1}),
        (lambda c, xs: lax.scan(lambda c, x: (norm(c + x), None), c, xs), [ROWS, MANY], {SLICES: 1, CARRIED: 1}),
        (lambda c: lax.fori_loop(0, 9, lambda i, c: norm(c), c), [ROWS], {CARRIED: 1}),
        (lambda c: lax.while_loop(lambda c: c[0, 0] < 1, norm, c), [ROWS], {CARRIED: 1}),
    ],
    ids=["map", "scan", "fori", "while"],
)
def test_what_is_sliced_carried_and_stacked_is_paid_once_a_trip(function, arguments, expected):
    """A kernel that takes its slice by itself does not have it stored."""
    assert counted(function, *arguments, target=replace(TARGET, looks_up=False)) == expected
    assert counted(function, *arguments) == {name: amount for name, amount in expected.items() if name != SLICES}


def test_a_result_that_is_carried_as_well_is_stacked_by_xla_too():
    def both(c, xs):
        return lax.scan(lambda c, x: ((n := norm(c + x)), n), c, xs)

    assert counted(both, ROWS, MANY) == {CARRIED: 1}


def test_operands_of_products_are_stored_by_xla_too():
    def attended(q, k, v):
        return lax.scan(lambda c, x: (c, jax.nn.softmax(q @ x[0].mT, -1) @ x[1]), 0.0, (k, v))

    found = counted(attended, array(16, 1024, 64), array(8, 16, 1024, 64), array(8, 16, 1024, 64))
    assert SLICES not in found


def test_a_choice_has_no_boundary():
    (body,) = planned(
        lambda i, x: lax.cond(i > 0, norm, jnp.negative, x), jax.ShapeDtypeStruct((), "int32"), ROWS
    ).bodies
    assert body.plan.boundary == NO_LOOP
    assert not body.plan.at_boundary


def viterbi(moves, emissions):
    def step(best, x):
        scores = best[:, :, None] + moves
        return jnp.max(scores, 1) + x, jnp.argmax(scores, 1)

    return lax.scan(step, emissions[0], emissions[1:])


VITERBI = array(128, 128), array(100, 64, 128)


def test_a_kernel_that_does_not_pay_for_its_copies_is_left_to_xla():
    assert not planned(viterbi, *VITERBI, price=True).bodies


def test_where_a_clock_decides_it_is_tried():
    assert planned(viterbi, *VITERBI, target=TARGET.judged(timed=True), price=True).bodies


def test_the_term_is_printed():
    text = str(planned(lambda xs: lax.map(norm, xs), MANY, target=replace(TARGET, looks_up=False)))
    (line,) = (line for line in text.splitlines() if "at its boundary" in line)
    assert f"{SLICES} 1 kernel" in line and f"{STACKED} 1 kernel" in line


def test_plans_of_a_body_and_of_the_same_program_alone_are_kept_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLASFUSE_CACHE_DIR", str(tmp_path))
    jaxpr = jax.make_jaxpr(norm)(ROWS)
    body = Boundary(carried=((0, 0),))
    for _ in range(2):  # the second time they are read
        alone, inside = (plan_of(jaxpr, TARGET, FuseOptions(check=False, price=False), b) for b in (NO_LOOP, body))
        assert not alone.at_boundary
        assert [t.name for p in inside.at_boundary.values() for t in p.terms] == [CARRIED]


def test_a_kernel_that_pays_for_its_copies_is_kept():
    def attended(q, k, v):
        def step(state, x):
            most, total, out = state
            scores = q @ x[0].mT
            new = jnp.maximum(most, scores.max(-1))
            weights, scale = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
            return (new, total * scale + weights.sum(-1), out * scale[..., None] + weights @ x[1]), None

        first = jnp.full(q.shape[:2], -jnp.inf), jnp.zeros(q.shape[:2]), jnp.zeros_like(q)
        return lax.scan(step, first, (k, v))[0]

    chunks = array(16, 32, 128, 64)
    assert planned(attended, array(32, 1024, 64), chunks, chunks, price=True).bodies


@pytest.mark.parametrize(("order", "turned"), [("NCHW", 2), ("NHWC", 0)])
def test_a_kernel_between_convolutions_pays_for_another_order(order, turned):
    """For what it reads, and what it makes: convolutions have channels last."""

    def convolved(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=(order, "HWIO", order))

    plan = planned(lambda x, w: convolved(norm(convolved(x, w)), w), array(32, 64, 64, 64), array(3, 3, 64, 64))
    (kernel,) = plan.kernels
    stored = plan.at_boundary.get(kernel.name)
    assert stored.us > 10 if turned else stored is None
    assert sum(t.amount for t in (stored.terms if stored else ()) if t.name == "turned for convolutions") == turned
