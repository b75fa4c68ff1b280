"""A repair that is exact but may overflow, or divide by zero on the way, is refused."""

import re

import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse.errors import Refusal
from pallasfuse.fusion.grouping import group
from pallasfuse.fusion.stability import Bound, divides_safely, exponent_is_bounded, is_polynomial
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import add, apply, const, div, mul, read, select, sub
from pallasfuse.ir.reducers import MAX, MIN
from tests.programs_by_name import FREE, program_of

J = Axis("j", 8)
X, W = read("x", (J,), "float32"), read("w", (J,), "float32")
F, G = read("frame", (), "float32"), read("other", (), "float32")
BOUNDED = {F: Bound(MAX, X)}


def number(value):
    return const(value, "float32")


def exp(x):
    return apply("exp", x)


def refusal(term, frames=BOUNDED):
    atoms = frozenset(b.body for b in frames.values() if b is not None)
    return exponent_is_bounded(term, J, frames, atoms)


@pytest.mark.parametrize(
    ("term", "frames"),
    [
        (exp(sub(X, F)), BOUNDED),
        (mul(exp(sub(X, F)), W), BOUNDED),
        (exp(mul(number(2.0), sub(X, F))), BOUNDED),
        (exp(div(sub(X, F), number(3.0))), BOUNDED),
        (exp(sub(sub(X, F), G)), {F: Bound(MAX, X), G: None}),  # g does not vary along j
        (exp(sub(F, X)), {F: Bound(MIN, X)}),
        (apply("exp2", sub(X, F)), BOUNDED),
        (apply("pow", number(2.0), sub(X, F)), BOUNDED),
        (mul(exp(W), F), BOUNDED),  # an exponential that reads no frame is the program's own
        (exp(sub(mul(X, W), F)), {F: Bound(MAX, mul(X, W))}),
        (exp(add(sub(X, F), sub(W, G))), {F: Bound(MAX, X), G: Bound(MAX, W)}),
        (apply("tanh", sub(W, F)), BOUNDED),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") else "",
)
def test_bounded(term, frames):
    assert refusal(term, frames) is None


@pytest.mark.parametrize(
    ("term", "frames", "reason"),
    [
        (exp(sub(W, F)), BOUNDED, "w.j. is not bounded by a running max"),
        (exp(sub(X, F)), {F: None}, "is not bounded by a running max"),
        (exp(sub(F, X)), BOUNDED, "is not bounded by a running min"),
        (exp(sub(X, F)), {F: Bound(MIN, X)}, "is not bounded by a running max"),
        (exp(sub(mul(X, number(2.0)), F)), BOUNDED, "do not cancel"),
        (exp(add(X, F)), BOUNDED, "do not cancel"),
        (exp(add(sub(X, F), W)), BOUNDED, "w.j. is not bounded"),
        (exp(mul(sub(X, F), W)), BOUNDED, "is not bounded"),
        (apply("expm1", sub(W, F)), BOUNDED, "may overflow"),
        (apply("cosh", sub(X, F)), BOUNDED, "may overflow"),
        (apply("sinh", sub(X, F)), BOUNDED, "may overflow"),
        (apply("pow", number(2.0), sub(W, F)), BOUNDED, "may overflow"),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") else "",
)
def test_unbounded(term, frames, reason):
    got = refusal(term, frames)
    assert isinstance(got, Refusal)
    assert re.search(reason, got.reason), got.reason


ACC = read("acc.0", (), "float32")


@pytest.mark.parametrize(
    "update",
    [
        mul(ACC, exp(sub(G, F))),
        div(ACC, read("positive", (), "float32")),
        div(ACC, number(3.0)),
        apply("log", read("positive", (), "float32")),
        apply("integer_pow", F, const(3, "int32"), dtype="float32"),
        div(F, ACC),  # an accumulator that divides is the repair's own claim
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") else "",
)
def test_safe_updates(update):
    assert divides_safely(update, frozenset({"positive"})) is None


@pytest.mark.parametrize(
    "update",
    [
        div(ACC, F),
        mul(ACC, apply("rsqrt", F)),
        mul(ACC, apply("sqrt", F)),
        mul(ACC, apply("log", F)),
        div(ACC, add(read("positive", (), "float32"), F)),
        apply("pow", F, number(0.5)),
        apply("pow", F, G),
        apply("integer_pow", F, const(-1, "int32"), dtype="float32"),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") else "",
)
def test_updates_that_divide_by_a_frame_of_unknown_sign(update):
    got = divides_safely(update, frozenset({"positive"}))
    assert isinstance(got, Refusal)
    assert "may be zero before it is finished" in got.reason


def test_polynomials_are_finite_everywhere():
    assert is_polynomial(add(mul(ACC, apply("square", sub(F, G))), div(ACC, number(2.0))))
    for update in (div(ACC, F), exp(F), apply("sqrt", F), select(apply("lt", F, G), F, G)):
        assert not is_polynomial(update)


# --- the same decisions through whole programs: the reduction runs in a later pass, and says why


def passes(function, *shapes):
    (chosen,) = group(program_of(function, *shapes), FREE).groups
    return chosen.passes, [r for f in chosen.folds for r in f.refusals]


def test_the_maximum_of_something_else_bounds_nothing():
    count, reasons = passes(lambda x, w: jnp.sum(x * jnp.exp(w - jnp.max(x, -1, keepdims=True)), -1), (5, 13), (5, 13))
    assert count == 2
    assert "may overflow" in reasons[0]


def test_a_sum_of_unknown_sign_divides_nothing_on_the_way():
    count, reasons = passes(lambda x: jnp.max(x / jnp.sum(x, -1, keepdims=True), -1), (5, 13))
    assert count == 2
    assert reasons


def test_a_positive_sum_does():
    assert passes(lambda x: jnp.max(x / (1 + jnp.sum(jnp.exp(x), -1, keepdims=True)), -1), (5, 13)) == (1, [])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sum(jnp.round(x / jnp.max(x, -1, keepdims=True)), -1),
        lambda x: jnp.sum(1 / (x + jnp.max(x, -1, keepdims=True)), -1),
        lambda x: jnp.sum(jnp.exp(x / jnp.max(x, -1, keepdims=True)), -1),
        lambda x: jnp.max(lax.rsqrt(x * x + jnp.sum(x * x, -1, keepdims=True)), -1),
    ],
    ids=["round", "pole", "exponential-of-quotient", "no-algebra-of-maxima"],
)
def test_no_finite_algebra_is_a_second_pass(function):
    count, reasons = passes(function, (5, 13))
    assert count == 2
    assert len(reasons) == 1
