"""Values in units of 1 / log2(e)."""

import numpy as np
import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate_tiles import evaluate_tiles
from pallasfuse.ir.expr import add, apply, const, convert, div, mul, read, select, sub
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.ir.tensors import Tensor
from pallasfuse.ir.tile_program import Contract, Let, Load, Reduce, Store, TileProgram, verify
from pallasfuse.resources.exponentials import coarse_values
from pallasfuse.tiling import units

I, J, K = Axis("i", 4), Axis("j", 6), Axis("k", 3)  # noqa: E741
Q, KEYS = Tensor("q", (I, K), "float16"), Tensor("keys", (J, K), "float16")
BIAS, WIDE = Tensor("bias", (I, J), "float16"), Tensor("wide", (I, J), "float32")
OUT = Tensor("out", (I,), "float32")
S = read("s", (I, J), "float32")
M = read("m", (I,), "float32")
FINFO_MIN = float(np.finfo(np.float32).min)


def f32(value):
    return const(value, "float32")


def program(score, result, *, maximum=None, between=()):
    """m = the maximum of score, or of something else; out = result."""
    loads = [Load(t.name, t.name, t.axes, t.dtype) for t in (Q, KEYS, BIAS, WIDE)]
    product = Contract("s", (I, J), read("q", (I, K), "float16"), read("keys", (J, K), "float16"), (K,), "float32")
    body = (
        *loads,
        product,
        Reduce("m", (I,), MAX, score if maximum is None else maximum, (J,)),
        Reduce("l", (I,), SUM, apply("exp", sub(score, M)), (J,)),
        *between,
        Store("out", (I,), result),
    )
    return verify(TileProgram("p", (Q, KEYS, BIAS, WIDE), (OUT,), (), ((I, 4), (J, 6), (K, 3)), body))


def arrays(seed=0):
    draw = np.random.default_rng(seed)
    return {t.name: draw.normal(size=[a.extent for a in t.axes]) for t in (Q, KEYS, BIAS, WIDE)}


def rewritten(before):
    return verify(units.rewrite(before, coarse_values(before)))


L, X = read("l", (I,), "float32"), read("x", (I,), "float32")
SCALED = mul(S, f32(0.125))
BIASED = add(SCALED, convert(read("bias", (I, J), "float16"), "float32"))
LOG_SUM = add(M, apply("log", L))
CAPPED = mul(f32(20.0), apply("tanh", mul(S, f32(0.05))))


@pytest.mark.parametrize(
    "score",
    [SCALED, BIASED, CAPPED, div(S, f32(8.0)), sub(SCALED, CAPPED), mul(SCALED, f32(-0.5)), apply("neg", SCALED)],
    ids=str,
)
@pytest.mark.parametrize("result", [L, LOG_SUM, apply("rsqrt", L)], ids=str)
def test_means_the_same(score, result):
    before = program(score, result)
    after = rewritten(before)
    assert "exp2(" in str(after)
    assert " exp(" not in str(after)
    np.testing.assert_allclose(
        evaluate_tiles(after, arrays())["out"], evaluate_tiles(before, arrays())["out"], rtol=1e-6
    )


def test_text():
    text = str(rewritten(program(SCALED, LOG_SUM)))
    assert text.splitlines()[6:] == [
        "  s.base2[i, j] = s[i, j] * 0.18033688011112042",
        "  m[i] = max(s.base2[i, j]; j)",
        "  l[i] = sum(exp2(s.base2[i, j] - m[i]); j)",
        "  store out[i] = m[i] * 0.6931471805599453 + log(l[i])",
    ]


def test_negated_products_are_products():
    """Else the sign would be contracted into the difference, and the product with it."""
    after = rewritten(program(apply("neg", SCALED), L))
    (pinned,) = (s for s in after.body if isinstance(s, Let))
    assert pinned.pinned
    assert str(pinned.value) == "s[i, j] * -0.18033688011112042"


def test_small_products_may_be_contracted():
    """The maximum is taken of what the factor comes after, and nothing is pinned."""
    after = rewritten(program(CAPPED, L))
    assert [s.name for s in after.body if isinstance(s, Reduce)] == ["m.raw", "l"]
    assert not any(s.pinned for s in after.body if isinstance(s, Let))


@pytest.mark.parametrize("fill", [-1e9, -1e30, FINFO_MIN])
def test_rows_that_a_finite_value_covers(fill):
    """In float32, every term of such a row is 1."""
    score = select(apply("lt", S, f32(1e9)), f32(fill), SCALED)
    after = rewritten(program(score, L))
    narrow = {n: a.astype(np.float32) for n, a in arrays().items()}
    assert ("exp2" in str(after)) == (fill != FINFO_MIN)  # which would be infinite in the new units
    assert np.array_equal(evaluate_tiles(after, narrow)["out"], [6] * 4)


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (program(add(SCALED, read("wide", (I, J), "float32")), L), "a sum with any float32 may overflow"),
        (program(S, L), "so may any product"),
        (program(SCALED, sub(LOG_SUM, read("s", (I, J), "float32"))), "the maximum may cancel with a score"),
        (program(SCALED, select(apply("gt", M, f32(3.0)), L, M)), "a comparison with a number"),
        (program(SCALED, add(L, apply("floor", M))), "a step"),
        (program(SCALED, L, maximum=apply("square", S)), "the maximum of something else"),
        (program(SCALED, M), "the maximum is stored, as one of the scores"),
        (program(SCALED, apply("floor", X), between=[Let("x", (I,), M)]), "a step behind a name"),
        (
            program(SCALED, select(apply("eq", X, f32(0.0)), apply("log", L), L), between=[Let("x", (I,), LOG_SUM)]),
            "a comparison",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_left_alone(before, why):
    del why
    assert rewritten(before) is before


def test_a_maximum_of_something_else_keeps_its_units():
    before = program(SCALED, L, maximum=BIASED)
    after = rewritten(before)
    np.testing.assert_allclose(
        evaluate_tiles(after, arrays())["out"], evaluate_tiles(before, arrays())["out"], rtol=1e-6
    )


def test_comparisons_with_what_has_no_unit():
    before = program(SCALED, select(apply("eq", apply("abs", M), f32(np.inf)), f32(0.0), L))
    after = rewritten(before)
    assert "abs(m[i]) == inf" in str(after)
    np.testing.assert_allclose(
        evaluate_tiles(after, arrays())["out"], evaluate_tiles(before, arrays())["out"], rtol=1e-6
    )
