"""Simplification keeps every value: NaN, infinities and signed zeros included."""

from itertools import product

import numpy as np
import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import add, apply, const, convert, div, index, mul, read, select, sub
from pallasfuse.ir.simplify import simplify

SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.5, -1e300, 5e-324]
N = Axis("n", len(SPECIAL) ** 2)
X, Y = (read(n, (N,), "float64") for n in "xy")
P, Q = (read(n, (N,), "bool") for n in "pq")
K, L = (read(n, (N,), "int64") for n in "kl")


def number(value):
    return const(value, "float64")


def values() -> dict[str, np.ndarray]:
    x, y = (np.array(v) for v in zip(*product(SPECIAL, repeat=2), strict=True))
    random = np.random.default_rng(0)
    ints = {n: random.integers(-4, 5, N.extent) for n in "kl"}
    return {"x": x, "y": y, "p": x > 0, "q": y > 0} | ints


def assert_same(a, b):
    got, want = (evaluate_expr(e, (N,), values()) for e in (a, b))
    np.testing.assert_array_equal(got, want)
    if want.dtype == np.float64:
        np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))


TRUE, FALSE = const(True, "bool"), const(False, "bool")

IDENTITIES = [
    (select(TRUE, X, Y), X),
    (select(FALSE, X, Y), Y),
    (select(P, X, X), X),
    (apply("and", P, TRUE), P),
    (apply("and", TRUE, P), P),
    (apply("and", P, FALSE), FALSE),
    (apply("and", P, P), P),
    (apply("or", P, TRUE), TRUE),
    (apply("or", FALSE, P), P),
    (apply("or", P, P), P),
    (apply("max", X, number(-np.inf)), X),
    (apply("max", number(-np.inf), X), X),
    (apply("min", X, number(np.inf)), X),
    (apply("min", number(np.inf), X), X),
    (add(K, const(0, "int64")), K),
    (add(const(0, "int64"), K), K),
    (sub(K, const(0, "int64")), K),
    (mul(X, number(1.0)), X),
    (mul(number(1.0), X), X),
    (mul(K, const(1, "int64")), K),
    (div(X, number(1.0)), X),
    (apply("integer_pow", X, const(2, "int32"), dtype="float64"), mul(X, X)),
    (convert(convert(read("h", (N,), "float16"), "float32"), "float16"), read("h", (N,), "float16")),
    (
        convert(convert(read("h", (N,), "float16"), "float32"), "float64"),
        convert(read("h", (N,), "float16"), "float64"),
    ),
    (convert(convert(P, "float32"), "bool"), P),
    (add(number(2.0), number(3.0)), number(5.0)),
    (apply("exp", number(0.0)), number(1.0)),
    (apply("lt", const(1, "int32"), const(2, "int32")), TRUE),
    (div(const(-7, "int32"), const(2, "int32")), const(-3, "int32")),
    (apply("rem", const(-7, "int32"), const(2, "int32")), const(-1, "int32")),
    (convert(const(-2.7, "float32"), "int32"), const(-2, "int32")),
    (select(apply("lt", const(3, "int32"), const(2, "int32")), X, add(Y, Y)), add(Y, Y)),
]


@pytest.mark.parametrize(
    ("before", "after"),
    IDENTITIES,
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_identity(before, after):
    assert simplify(before) is after
    if "h" not in before.tensors:
        assert_same(before, after)


@pytest.mark.parametrize(
    "expr",
    [
        add(X, number(0.0)),  # -0 + 0 is 0
        sub(number(0.0), X),
        mul(X, number(0.0)),  # NaN and infinity times 0
        sub(X, X),
        div(X, X),
        mul(X, number(-1.0)),
        apply("max", X, number(np.inf)),  # NaN stays NaN
        apply("min", X, number(-np.inf)),
        apply("eq", X, X),  # NaN
        apply("neg", apply("neg", X)),
        apply("log", apply("exp", X)),
        convert(convert(X, "float32"), "float64"),  # rounds
        convert(convert(read("h", (N,), "float16"), "bfloat16"), "float16"),
        convert(convert(K, "float32"), "int64"),  # 24 bits of mantissa
        convert(convert(X, "int32"), "float64"),
        apply("and", K, const(1, "int64")),  # bits, not truth
        apply("or", K, const(1, "int64")),
        convert(const(np.nan, "float32"), "int32"),
        convert(const(np.inf, "float32"), "int32"),
        apply("add", index(N), const(1, "int32")),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_what_is_not_an_identity_stays(expr):
    assert simplify(expr) is expr


def test_constants_are_folded_in_their_own_type():
    third = div(const(1.0, "float32"), const(3.0, "float32"))
    folded = simplify(third)
    assert folded.value == float(np.float32(1) / np.float32(3))
    big = mul(const(300.0, "float16"), const(300.0, "float16"))
    assert simplify(big).value == np.inf


def test_casts_of_constants_are_folded_where_they_do_not_round():
    assert simplify(convert(const(0.25, "float32"), "float16")) is const(0.25, "float16")
    assert simplify(convert(const(2.75, "float32"), "int32")) is const(2, "int32")
    for rounds in (convert(const(1 / 3, "float32"), "float16"), convert(const(1e30, "float32"), "float16")):
        assert simplify(rounds) is rounds


def test_constants_of_types_that_numpy_lacks_stay():
    expr = mul(const(2.5, "bfloat16"), const(2.5, "bfloat16"))
    assert simplify(expr) is expr


def _random(random: np.random.Generator, kind: str, depth: int):
    if depth == 0 or random.random() < 0.1:
        constant = {"float": number(random.choice([-np.inf, np.inf, 0.0, -0.0, 1.0, 2.0, np.nan])),
                    "bool": [TRUE, FALSE][random.integers(2)],
                    "int": const(int(random.integers(-1, 3)), "int64")}[kind]  # fmt: skip
        leaves = {"float": [X, Y, constant], "bool": [P, Q, constant], "int": [K, L, constant]}[kind]
        return leaves[random.integers(3)]

    def sub_expr(k):
        return _random(random, k, depth - 1)

    match kind, int(random.integers(4)):
        case "bool", 0:
            return apply("not", sub_expr("bool"))
        case "bool", 1:
            return apply(str(random.choice(["lt", "eq", "ge", "ne"])), sub_expr("float"), sub_expr("float"))
        case "bool", _:
            return apply(str(random.choice(["and", "or"])), sub_expr("bool"), sub_expr("bool"))
        case _, 0:
            return select(sub_expr("bool"), sub_expr(kind), sub_expr(kind))
        case "int", _:
            return apply(str(random.choice(["add", "sub", "mul", "max", "min"])), sub_expr("int"), sub_expr("int"))
        case _, 1:
            return convert(sub_expr("bool"), "float64")
        case _:
            return apply(
                str(random.choice(["add", "sub", "mul", "div", "max", "min"])), sub_expr("float"), sub_expr("float")
            )


@pytest.mark.parametrize("seed", range(150))
def test_random_expressions_keep_their_value(seed):
    random = np.random.default_rng(seed)
    expr = _random(random, ["float", "bool", "int"][seed % 3], 5)
    simple = simplify(expr)
    assert_same(simple, expr)
    assert simplify(simple) is simple
