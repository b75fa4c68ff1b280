"""What a term contributes where a predicate is false: proofs, and what must not be proven."""

import itertools

import numpy as np
import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import add, apply, const, convert, div, index, mul, read, select, sub
from pallasfuse.ir.neutrality import Unknown, evaluate_under, is_neutral, values_under
from pallasfuse.ir.reducers import AND, MAX, MIN, OR, PROD, SUM

J = Axis("j", 8)
X, W = read("x", (J,), "float32"), read("w", (J,), "float32")
R, V = read("r", (), "float32"), read("v", (), "float32")
FINITE, DOUBTFUL = frozenset({"r"}), frozenset({"v"})
MASK = apply("ge", index(J), const(3, "int32"))
OFF = {MASK: 0.0}


def number(value, dtype="float32"):
    return const(value, dtype)


def exp(x):
    return apply("exp", x)


def masked(value, other):
    return select(MASK, value, number(other))


@pytest.mark.parametrize(
    ("term", "reducer", "assumes"),
    [
        (masked(X, -np.inf), MAX, False),
        (masked(X, np.inf), MIN, False),
        (masked(X, 0.0), SUM, False),
        (masked(X, 1.0), PROD, False),
        (exp(masked(X, -np.inf)), SUM, False),
        (exp(sub(masked(X, -np.inf), R)), SUM, False),  # -inf minus a finite frame
        (apply("exp2", mul(masked(X, -np.inf), number(1.4427))), SUM, False),
        (mul(exp(sub(masked(X, -np.inf), R)), W), SUM, True),  # 0 * w, for a finite w
        (mul(W, masked(X, 0.0)), SUM, True),
        (div(masked(X, 0.0), R), SUM, True),
        (convert(masked(X, 0.0), "float16"), SUM, False),
        (apply("max", masked(X, -np.inf), number(-np.inf)), MAX, False),
        (exp(sub(masked(X, -np.inf), W)), SUM, True),  # -inf minus an input: only if that is finite
        (add(masked(X, -np.inf), W), MAX, True),
        (add(masked(X, -np.inf), R), MAX, False),
        (apply("min", masked(X, -np.inf), W), MAX, True),  # NaN wins over -inf
        (apply("min", masked(X, -np.inf), R), MAX, False),
        (mul(masked(X, 0.0), R), SUM, False),
        (mul(masked(X, 0.0), apply("tanh", W)), SUM, True),
        (mul(masked(X, 0.0), sub(W, R)), SUM, True),
        (mul(masked(X, 0.0), convert(index(J), "float32")), SUM, False),
        (select(MASK, V, number(0.0)), SUM, False),
        (select(apply("not", MASK), number(0.0), X), SUM, False),
        (select(apply("and", MASK, apply("lt", X, W)), X, number(0.0)), SUM, False),
        (apply("or", MASK, const(False, "bool")), OR, False),
        (apply("or", apply("not", MASK), apply("lt", X, W)), AND, False),
        (masked(masked(X, 7.0), 0.0), SUM, False),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_neutral(term, reducer, assumes):
    proof = is_neutral(term, reducer, OFF, FINITE, DOUBTFUL)
    assert proof is not None
    assert proof.assumes_finite_factor is assumes


FINFO_MIN = float(np.finfo(np.float32).min)


@pytest.mark.parametrize(
    ("term", "reducer"),
    [
        (masked(X, FINFO_MIN), MAX),  # finite: wins over nothing but -inf, yet it is a value
        (masked(X, -1e9), MAX),
        (exp(sub(masked(X, FINFO_MIN), R)), SUM),  # exp(-1e38 - r) is 0 only where r is not as small
        (exp(masked(X, -5.0)), SUM),
        (masked(X, 0.0), MAX),
        (masked(X, 0.0), PROD),
        (masked(X, -np.inf), SUM),
        (masked(X, np.inf), MAX),
        (X, SUM),
        (select(apply("lt", X, W), X, number(0.0)), SUM),  # another predicate
        (exp(sub(masked(X, -np.inf), masked(R, -np.inf))), SUM),  # -inf - -inf
        (mul(masked(X, -np.inf), W), MAX),  # w may be negative
        (mul(masked(X, -np.inf), number(0.0)), SUM),  # -inf * 0
        (mul(masked(X, 0.0), div(number(1.0), R)), SUM),  # 0 * (1 / 0)
        (mul(masked(X, 0.0), apply("log", W)), SUM),
        (add(masked(X, -np.inf), apply("log", W)), MAX),
        (div(masked(X, 0.0), masked(X, 0.0)), SUM),
        (masked(X, float("nan")), SUM),
        (mul(masked(X, 0.0), V), SUM),
        (exp(sub(masked(X, -np.inf), V)), SUM),
        (apply("min", masked(X, -np.inf), V), MAX),
        (mul(masked(X, 0.0), apply("tanh", V)), SUM),
        (div(masked(X, 0.0), V), SUM),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_not_neutral(term, reducer):
    assert is_neutral(term, reducer, OFF, FINITE, DOUBTFUL) is None


def test_the_accumulator_s_identity_is_what_counts():
    term = select(MASK, read("h", (J,), "float16"), number(-np.inf, "float16"))
    assert is_neutral(term, MAX, OFF) is not None
    whole = select(MASK, read("n", (J,), "int32"), const(int(np.iinfo("int32").min), "int32"))
    assert is_neutral(whole, MAX, OFF) is not None
    assert is_neutral(select(MASK, read("n", (J,), "int32"), const(-1, "int32")), MAX, OFF) is None


def test_assumptions_replace_whole_subexpressions():
    body = mul(X, X)
    assert evaluate_under(exp(sub(body, R)), {body: -np.inf}).value == 0.0
    assert evaluate_under(exp(sub(body, R)), {}, {"x", "r"}).value is Unknown.FINITE


def test_one_assumed_part_makes_a_value_assumed():
    assert evaluate_under(X, {}).value is Unknown.ASSUMED
    assert evaluate_under(X, {}, {"x"}).value is Unknown.FINITE
    assert evaluate_under(X, {}, {"x"}, {"x"}).value is Unknown.ANYTHING  # doubt wins
    assert evaluate_under(mul(X, W), {}, {"x"}).value is Unknown.ASSUMED
    assert evaluate_under(apply("tanh", W), {}).value is Unknown.ASSUMED
    assert evaluate_under(select(apply("lt", X, W), X, W), {}, {"x"}).value is Unknown.ASSUMED
    assert evaluate_under(select(apply("lt", X, W), number(2.0), W), {}, {"x"}).value is Unknown.ASSUMED
    assert evaluate_under(mul(X, W), {}, {"x"}, {"w"}).value is Unknown.ANYTHING


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        (X, Unknown.FINITE),
        (index(J), Unknown.FINITE),
        (apply("log", X), Unknown.ANYTHING),
        (div(X, W), Unknown.ANYTHING),
        (apply("tanh", X), Unknown.FINITE),
        (apply("lt", X, W), Unknown.FINITE),
        (select(apply("lt", X, W), X, number(np.inf)), Unknown.ANYTHING),
        (select(apply("lt", X, W), number(2.0), number(2.0)), 2.0),
        (select(apply("lt", X, W), number(2.0), X), Unknown.FINITE),
        (apply("max", X, number(np.inf)), np.inf),
        (apply("max", X, number(-np.inf)), Unknown.FINITE),
        (sub(X, number(-np.inf)), np.inf),
        (sub(number(-np.inf), X), -np.inf),
        (apply("not", const(True, "bool")), 0.0),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_abstract_values(expr, value):
    got = evaluate_under(expr, {}, {"x", "w"})
    assert got.value == value
    assert not got.assumes_finite_factor


@pytest.mark.parametrize("expr", [
    mul(X, number(0.0)), add(X, number(-np.inf)), sub(number(np.inf), X), sub(X, number(np.inf)), apply("max", X, number(np.inf)),
    apply("min", X, number(-np.inf)), mul(exp(X), number(0.0)), div(number(0.0), X),
], ids=str)  # fmt: skip
def test_absorbing_an_assumed_value_is_an_assumption(expr):
    got = evaluate_under(expr, {})
    assert isinstance(got.value, float)
    assert got.assumes_finite_factor
    assert evaluate_under(expr, {}, doubtful={"x"}).value is Unknown.ANYTHING


UNARY = ["neg", "abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sin", "logistic", "sign", "floor", "square"]
BINARY = ["add", "sub", "mul", "div", "max", "min"]
LEAVES = [X, W, number(0.0), number(1.0), number(-np.inf), number(np.inf), masked(X, -np.inf), masked(W, 0.0)]


def _random(random, depth):
    if depth == 0:
        return LEAVES[random.integers(len(LEAVES))]
    match random.integers(4):
        case 0:
            return apply(UNARY[random.integers(len(UNARY))], _random(random, depth - 1))
        case 1:
            return select(apply("lt", X, W), _random(random, depth - 1), _random(random, depth - 1))
        case _:
            return apply(BINARY[random.integers(len(BINARY))], _random(random, depth - 1), _random(random, depth - 1))


MODERATE = [-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]
WILD = [-np.inf, np.inf, np.nan]


def _contradiction(expr, finite):
    """A point where the expression is not what the proof says; None when there is none.

    Reads in `finite` are moderate finite numbers. The others are too where the value is ASSUMED to be finite; a FINITE or
    constant value that states no assumption is one whatever they are: infinite, NaN.
    """
    got = evaluate_under(expr, OFF, finite)
    if got.value is Unknown.ANYTHING or got.assumes_finite_factor:
        return None
    wild = [] if got.value is Unknown.ASSUMED else WILD
    grid = np.array(list(itertools.product(*(MODERATE if name in finite else MODERATE + wild for name in "xw"))))
    point = Axis("point", len(grid))
    # positions 0, 1 and 2 are masked: any of them will do
    from pallasfuse.ir.expr import substitute

    at = substitute(
        expr, {MASK: const(False, "bool"), X: read("x", (point,), "float32"), W: read("w", (point,), "float32")}
    )
    value = evaluate_expr(at, (point,), {"x": grid[:, 0], "w": grid[:, 1]}).astype(float)
    good = (
        np.isfinite(value)
        if isinstance(got.value, Unknown)
        else (value == got.value) | (np.isnan(value) & np.isnan(got.value))
    )
    return None if good.all() else (str(expr), got.value, grid[~good][0], value[~good][0])


@pytest.mark.parametrize("op", ["sin", "tanh", "logistic", "sign"])
def test_a_bounded_function_of_anything_may_be_nan(op):
    assert is_neutral(add(masked(X, -np.inf), apply(op, apply("log", W))), MAX, OFF) is None


def test_a_maximum_with_infinity_may_be_nan():
    assert is_neutral(apply("min", masked(X, -np.inf), apply("log", W)), MAX, OFF) is None


@pytest.mark.parametrize(
    "finite", [frozenset("xw"), frozenset("x"), frozenset()], ids=lambda f: "".join(sorted(f)) or "none"
)
def test_what_is_proven_of_random_expressions_holds(finite):
    for seed in range(300):
        assert _contradiction(_random(np.random.default_rng(seed), 2 + seed % 2), finite) is None


def test_every_way_in_which_choices_turn_out():
    """One condition turns out alike wherever it stands; what is assumed is no choice any more."""

    def values(root, assumptions):
        return [found.value for _, found in values_under(root, assumptions)]

    (nan,) = values(sub(exp(sub(X, R)), W), {X: -np.inf, R: -np.inf})
    assert np.isnan(nan)
    assert [way for way, _ in values_under(select(MASK, number(1.0), number(0.0)), {})] == [{MASK: 0.0}, {MASK: 1.0}]
    assert values(select(apply("and", MASK, apply("not", apply("lt", X, R))), number(1.0), number(0.0)), {}) == [
        0.0,
        0.0,
        1.0,
        0.0,
    ]
    both = mul(select(MASK, number(2.0), number(0.0)), select(MASK, number(3.0), number(1.0)))
    assert values(both, {}) == [0.0, 6.0]
    assert values(select(MASK, number(2.0), number(0.0)), {MASK: 0.0}) == [0.0]
    other = [select(apply("lt", read(f"c{n}", (), "float32"), X), number(n), number(-n)) for n in range(1, 6)]
    assert sorted(values(add(other[0], other[1]), {})) == [-3.0, -1.0, 1.0, 3.0]
    many = other[0]
    for more in other[1:]:
        many = add(many, more)
    assert values_under(many, {}) is None
