"""A repair that is exact but may overflow, or divide by zero on the way, is refused."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse.errors import Refusal
from pallasfuse.fusion.grouping import group
from pallasfuse.fusion.stability import (
    Bound,
    divides_safely,
    exponent_is_bounded,
    is_centred,
    is_entire,
    is_polynomial,
    power_of,
    range_of,
)
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


def refusal(term, frames=BOUNDED, tame=frozenset()):
    atoms = frozenset(b.body for b in frames.values() if b is not None)
    return exponent_is_bounded(term, J, frames, atoms, tame)


@pytest.mark.parametrize(
    ("term", "frames"),
    [
        (exp(sub(X, F)), BOUNDED),
        (mul(exp(sub(X, F)), W), BOUNDED),
        (exp(mul(number(2.0), sub(X, F))), BOUNDED),
        (exp(div(sub(X, F), number(3.0))), BOUNDED),
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
        (exp(sub(X, F)), {F: None}, "nothing bounds its unfinished values"),
        (exp(sub(sub(X, F), G)), {F: Bound(MAX, X), G: None}, "may overflow before other.* is finished"),
        (exp(add(sub(X, F), mul(number(0.5), G))), {F: Bound(MAX, X), G: None}, "nothing bounds"),
        (exp(G), {F: Bound(MAX, X), G: None}, "nothing bounds"),
        (apply("pow", number(2.0), sub(sub(X, F), G)), {F: Bound(MAX, X), G: None}, "nothing bounds"),
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


def test_a_logarithm_moves_by_little():
    term, frames = exp(sub(sub(X, F), G)), {F: Bound(MAX, X), G: None}
    assert isinstance(refusal(term, frames), Refusal)
    assert refusal(term, frames, frozenset({G})) is None
    # it does not bound what varies along the axis
    assert isinstance(refusal(exp(sub(W, G)), {G: None}, frozenset({G})), Refusal)


# --- a frame that is subtracted is a statistic of what it is subtracted from


@pytest.mark.parametrize(
    "term",
    [
        sub(X, F),
        sub(F, X),
        apply("square", sub(X, F)),
        mul(sub(X, F), sub(W, G)),
        mul(sub(mul(number(2.0), X), mul(number(2.0), F)), W),
        sub(add(X, W), F),  # centred, and moved by something else
        mul(X, F),  # a scale
        div(X, F),
        mul(X, add(W, number(1.0))),  # not read at all
    ],
    ids=str,
)
def test_centred(term):
    assert is_centred(term, F, [X])


@pytest.mark.parametrize(
    "term",
    [
        sub(W, F),
        apply("square", sub(W, F)),
        add(X, F),
        sub(X, mul(number(2.0), F)),
        sub(mul(number(3.0), X), F),
        mul(sub(W, F), X),
        sub(number(1.0), F),
    ],
    ids=str,
)
def test_not_centred(term):
    assert not is_centred(term, F, [X])


def test_one_of_several_bodies_is_enough():
    assert is_centred(sub(W, F), F, [X, W])
    assert not is_centred(sub(W, F), F, [])


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


FRAME = frozenset({"frame"})


@pytest.mark.parametrize(
    "root",
    [
        mul(sub(X, F), sub(W, F)),
        mul(exp(sub(X, F)), sub(X, F)),
        div(sub(X, F), G),
        apply("log", G),
        apply("pow", number(2.0), F),
        apply("integer_pow", F, const(3, "int32")),
        select(apply("lt", X, W), apply("square", F), number(0.0)),
        apply("convert", apply("sin", F), dtype="bfloat16"),
    ],
    ids=str,
)
def test_is_analytic_in_the_frame_everywhere(root):
    assert is_entire(root, FRAME)


@pytest.mark.parametrize(
    "root",
    [
        div(X, F),
        mul(X, add(G, apply("rsqrt", F))),
        apply("log", apply("exp", F)),
        apply("abs", F),
        apply("convert", F, dtype="int32"),
        apply("max", X, F),
        apply("pow", F, number(2.0)),
        apply("pow", X, F),
        apply("pow", number(-2.0), F),
        apply("integer_pow", F, const(-1, "int32")),
        select(apply("lt", F, W), X, number(0.0)),
    ],
    ids=str,
)
def test_is_not_known_to_be_analytic_in_the_frame_everywhere(root):
    assert not is_entire(root, FRAME)


@pytest.mark.parametrize(
    ("root", "power"),
    [
        (X, 0),
        (exp(G), 0),
        (mul(X, F), 1),
        (div(mul(X, F), apply("square", F)), -1),
        (mul(apply("neg", apply("sqrt", F)), apply("rsqrt", F)), 0),
        (apply("integer_pow", mul(X, F), const(3, "int32")), 3),
        (apply("pow", div(X, F), number(0.5)), -0.5),
        (apply("convert", apply("abs", mul(X, F)), dtype="bfloat16"), 1),
        (sub(mul(X, F), mul(F, G)), 1),
        (select(apply("lt", X, G), mul(X, F), number(-math.inf)), 1),
        (apply("max", div(X, F), number(0.0)), -1),
        (add(X, F), None),
        (mul(sub(X, F), F), None),
        (select(apply("lt", F, X), F, number(0.0)), None),
        (apply("max", F, number(1.0)), None),
        (exp(F), None),
        (apply("pow", F, G), None),
        (apply("convert", F, dtype="int32"), None),
    ],
    ids=str,
)
def test_power_of_a_frame(root, power):
    assert power_of(root, "frame") == power


def half(root):
    return apply("convert", root, dtype="float16")


@pytest.mark.parametrize(
    ("terms", "low", "high"),
    [
        ([mul(X, F)], 2.0**-62, math.inf),
        ([div(X, F), G], 0.0, 2.0**62),
        ([mul(X, F), div(X, F)], 2.0**-62, 2.0**62),
        ([apply("square", mul(X, F))], 2.0**-30, math.inf),
        ([mul(mul(X, F), G)], 2.0**-30, math.inf),  # G is another factor
        ([mul(X, apply("sqrt", F))], 2.0**-62, math.inf),
        ([half(mul(X, F))], 2.0**-6, math.inf),
        ([apply("integer_pow", half(mul(X, F)), const(4, "int32"))], 1.0, math.inf),
        ([G], 0.0, math.inf),
        ([div(sub(X, F), F)], 0.0, math.inf),
        ([mul(X, F), sub(X, F)], 0.0, math.inf),
    ],
    ids=lambda v: ", ".join(map(str, v)) if isinstance(v, list) else str(v),
)
def test_range_of_a_factor(terms, low, high):
    assert range_of(terms, "frame", ["frame", "other"]) == (low, high)


# --- the same decisions through whole programs: the reduction runs in a later pass, and says why


def passes(function, *shapes):
    (chosen,) = group(program_of(function, *shapes), FREE).groups
    return chosen.passes, [r for f in chosen.folds for r in f.refusals]


def test_the_maximum_of_something_else_bounds_nothing():
    count, reasons = passes(lambda x, w: jnp.sum(x * jnp.exp(w - jnp.max(x, -1, keepdims=True)), -1), (5, 13), (5, 13))
    assert count == 2
    assert "may overflow" in reasons[0]


def test_an_unfinished_mean_may_be_anywhere_in_an_exponent():
    count, reasons = passes(
        lambda x: jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True) - jnp.mean(x, -1, keepdims=True)), -1), (5, 13)
    )
    assert count == 2
    assert "nothing bounds its unfinished values" in reasons[0]


def test_a_log_sum_exp_is_tame():
    def function(x):
        return jnp.sum(jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True)), -1)

    assert passes(function, (5, 13)) == (1, [])


def late_frames(function, *shapes):
    found = {}
    for chosen in group(program_of(function, *shapes), FREE).groups:
        found |= {str(f.value): f.late for fold in chosen.folds for f in fold.frames}
    return found


def test_a_logarithm_that_is_only_subtracted_may_come_late():
    def function(x):
        return jnp.sum(jax.nn.log_softmax(x, -1), -1)

    assert late_frames(function, (5, 13)) == {"t0[i]": False, "log(t6[i])": True}


def test_a_logarithm_of_values_that_are_not_near_zero_may_not():
    """Large and alike, the values would cancel against it only in the end."""

    def function(x, w):
        return jnp.sum((x - jnp.log(1 + jnp.sum(jnp.exp(x), -1, keepdims=True))) * w, -1)

    def scaled_only(x, w):
        largest = jnp.max(x, -1, keepdims=True)
        return jnp.sum((x - jnp.log(1 + jnp.sum(jnp.exp(x - largest), -1, keepdims=True))) * w, -1)

    assert not any(late_frames(function, (5, 13), (5, 13)).values())
    assert not any(late_frames(scaled_only, (5, 13), (5, 13)).values())


def test_a_logarithm_in_an_exponent_or_a_square_may_not():
    def exponent(x):
        return jnp.sum(jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True)), -1)

    def square(x):
        return jnp.sum(jax.nn.log_softmax(x, -1) ** 2, -1)

    assert not any(late_frames(exponent, (5, 13)).values())
    assert not any(late_frames(square, (5, 13)).values())


def test_the_mean_of_something_else_centres_nothing():
    def function(c, x):  # the sum of products makes both range over one axis
        return jnp.sum((c - jnp.mean(x, -1, keepdims=True)) ** 2, -1), jnp.sum(x * c, -1)

    count, reasons = passes(function, (5, 13), (5, 13))
    assert count == 2
    assert "no statistic of the values" in reasons[0]


def test_a_covariance_is_centred():
    def function(c, x):
        return jnp.sum((c - jnp.mean(c, -1, keepdims=True)) * (x - jnp.mean(x, -1, keepdims=True)), -1)

    assert passes(function, (5, 13), (5, 13)) == (1, [])


def test_a_sum_of_unknown_sign_divides_nothing_on_the_way():
    count, reasons = passes(lambda x: jnp.max(x / jnp.sum(x, -1, keepdims=True), -1), (5, 13))
    assert count == 2
    assert reasons


def test_a_positive_sum_does():
    assert passes(lambda x: jnp.max(x / (1 + jnp.sum(jnp.exp(x), -1, keepdims=True)), -1), (5, 13)) == (1, [])


def positive_frames(function, *shapes):
    (chosen,) = group(program_of(function, *shapes), FREE).groups
    return [f.positive for fold in chosen.folds for f in fold.frames]


def test_a_frame_must_be_positive_where_the_repair_divides_by_it():
    def function(x):
        e = jnp.exp(x)
        return jnp.max(e / (1 + jnp.sum(e, -1, keepdims=True)), -1)

    assert positive_frames(function, (5, 13)) == [True]


def ranges(function, *shapes):
    (chosen,) = group(program_of(function, *shapes), FREE).groups
    return [(f.low, f.high) for fold in chosen.folds for f in fold.frames]


def test_a_factor_has_a_range_and_a_mean_has_none():
    def function(x):
        mean = jnp.mean(x, -1, keepdims=True)
        return jnp.max((x - mean) * jnp.exp(mean), -1)

    assert ranges(function, (5, 13)) == [(2.0**-62, math.inf), (0.0, math.inf)]


def test_what_is_subtracted_too_has_none():
    def function(x):
        total = jnp.sum(jnp.exp(x), -1, keepdims=True)
        return jnp.max((x - total) / total, -1)

    assert ranges(function, (5, 13)) == [(0.0, math.inf)]


@pytest.mark.parametrize(
    "function",
    [
        lambda e: jnp.var(e, -1),
        lambda e: jnp.mean((e - jnp.mean(e, -1, keepdims=True)) ** 3, -1),
        lambda e: jnp.sum(jnp.exp(e - jnp.max(e, -1, keepdims=True)) * (e - jnp.max(e, -1, keepdims=True)), -1),
        lambda e: jnp.sum(jnp.where(e > 2, e - jnp.mean(e, -1, keepdims=True), 0.0), -1),
    ],
    ids=["square", "cube", "weighted-by-an-exponential", "masked"],
)
def test_and_only_there(function):
    """A positive number may underflow to zero."""
    found = positive_frames(lambda x: function(jnp.exp(x)), (5, 13))
    assert found
    assert not any(found)


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
