"""Sign inference: golden signs, and that no inferred sign is contradicted by a value."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import apply, convert, index, read
from pallasfuse.ir.reducers import AND, MAX, MIN, PROD, SUM
from pallasfuse.repair import Sign, infer_sign, parse_expr, reduction_sign

KNOWN: dict[str, Sign] = {"u": "positive", "z": "nonnegative", "n": "negative", "k": "nonpositive"}


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("c", "any"), ("2", "positive"), ("-2", "negative"), ("0", "nonnegative"), ("nan", "any"), ("-inf", "negative"),
        ("exp(c)", "positive"), ("exp2(c)", "positive"), ("cosh(c)", "positive"), ("logistic(c)", "positive"),
        ("rsqrt(c)", "positive"), ("sqrt(c)", "nonnegative"), ("sqrt(u)", "positive"), ("square(c)", "nonnegative"),
        ("square(n)", "positive"), ("abs(c)", "nonnegative"), ("abs(n)", "positive"), ("c*c", "nonnegative"),
        ("c**2", "nonnegative"), ("c**3", "any"), ("n**3", "negative"), ("n**2", "positive"), ("u**3", "positive"),
        ("u**0.5", "positive"), ("pow(u, c)", "positive"), ("pow(z, c)", "nonnegative"), ("pow(c, u)", "any"),
        ("u+z", "positive"), ("u-n", "positive"), ("z+z", "nonnegative"), ("u-z", "any"), ("n-u", "negative"),
        ("k-z", "nonpositive"), ("z-k", "nonnegative"), ("-u", "negative"), ("u*n", "negative"), ("u*k", "nonpositive"),
        ("n*k", "nonnegative"), ("u/n", "negative"), ("z/u", "nonnegative"), ("c/u", "any"), ("max(c, u)", "positive"),
        ("max(c, 0)", "nonnegative"), ("min(c, n)", "negative"), ("min(u, z)", "nonnegative"),
        ("select(p, u, 2)", "positive"), ("select(p, u, 0)", "nonnegative"), ("select(p, u, n)", "any"),
        ("float16(u)", "positive"), ("int32(u)", "nonnegative"), ("floor(u)", "nonnegative"), ("ceil(u)", "positive"),
        ("floor(n)", "negative"), ("ceil(n)", "nonpositive"), ("round_even(u)", "nonnegative"), ("tanh(u)", "positive"),
        ("log(u)", "any"), ("sin(u)", "any"), ("expm1(u)", "positive"), ("log1p(z)", "nonnegative"),
        ("float32(c > 0)", "nonnegative"), ("u + 1e-6*z", "positive"), ("z + 1e-6", "positive"), ("erf(n)", "negative"),
    ],
)  # fmt: skip
def test_inferred_sign(text: str, sign: Sign) -> None:
    assert infer_sign(parse_expr(text), KNOWN) == sign


def test_signs_of_nodes_and_of_types() -> None:
    c = read("c", (), "float32")
    assert infer_sign(apply("add", c, c), {c: "positive"}) == "positive"
    assert infer_sign(apply("add", apply("sin", c), c), {apply("sin", c): "negative", c: "nonpositive"}) == "negative"
    assert infer_sign(convert(index(Axis("i", 4)), "float32"), {}) == "nonnegative"
    assert infer_sign(read("b", (), "uint8"), {}) == "nonnegative"
    assert infer_sign(
        apply("div", read("b", (), "int32"), read("d", (), "int32")), {"b": "positive", "d": "positive"}
    ) == ("nonnegative")


@pytest.mark.parametrize(
    ("reducer", "body", "sign"),
    [
        (SUM, "positive", "positive"), (SUM, "nonnegative", "nonnegative"), (SUM, "negative", "negative"),
        (MAX, "positive", "positive"), (MIN, "nonpositive", "nonpositive"), (PROD, "positive", "positive"),
        (PROD, "nonnegative", "nonnegative"), (PROD, "negative", "any"), (SUM, "any", "any"),
        (AND, "any", "nonnegative"),
    ],
)  # fmt: skip
def test_reduction_sign(reducer: object, body: Sign, sign: Sign) -> None:
    assert reduction_sign(reducer, body) == sign  # type: ignore[arg-type]


_LEAVES = st.sampled_from(["c", "u", "z", "n", "k", "2", "-1", "0"])
_TEXTS = st.recursive(
    _LEAVES,
    lambda x: st.one_of(
        st.tuples(x, st.sampled_from("+-*/"), x).map(lambda t: f"({t[0]}){t[1]}({t[2]})"),
        st.tuples(
            st.sampled_from(["exp", "square", "abs", "tanh", "floor", "ceil", "sqrt", "round_even", "expm1"]), x
        ).map(lambda t: f"{t[0]}({t[1]})"),
        st.tuples(st.sampled_from(["max", "min"]), x, x).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
    ),
    max_leaves=6,
)
_HOLDS = {
    "positive": lambda v: v > 0, "nonnegative": lambda v: v >= 0, "negative": lambda v: v < 0,
    "nonpositive": lambda v: v <= 0, "any": lambda v: True,
}  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=_TEXTS, seed=st.integers(0, 1000))
def test_no_value_contradicts_the_sign(text: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    positive = random.uniform(0.1, 2, 4)
    values = {
        "c": random.normal(), "u": positive[0], "n": -positive[1],
        "z": random.choice([0, positive[2]]), "k": -random.choice([0, positive[3]]),
    }  # fmt: skip
    value = evaluate_expr(parse_expr(text), (), {n: np.asarray(x) for n, x in values.items()})
    if np.isfinite(value) and abs(value) > 1e-12:
        assert _HOLDS[infer_sign(parse_expr(text), KNOWN)](value)
