"""The table of JAX functions agrees with the NumPy meaning of every scalar operation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse.emission.elementwise import REDUCTIONS, TABLE, select
from pallasfuse.ir.ops import OPS, SHIFTS, evaluated
from pallasfuse.ir.reducers import REDUCERS

ELSEWHERE = {"convert", "bitcast", "select", "integer_pow"}
"""Emitted by the interpreter itself: they need more than values."""

RANDOM = np.random.default_rng(0)
HALVES = [0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5]
REAL = np.concatenate([RANDOM.normal(size=40), RANDOM.normal(size=20) * 8, HALVES]).astype("float32")
POSITIVE = np.abs(REAL) + np.float32(0.01)
UNIT = np.clip(REAL / 9, -0.99, 0.99).astype("float32")
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], "float32")

DOMAIN = {
    "sqrt": POSITIVE, "rsqrt": POSITIVE, "log": POSITIVE, "log1p": POSITIVE, "asin": UNIT, "acos": UNIT, "atanh": UNIT,
    "erf_inv": UNIT, "acosh": POSITIVE + 1, "tan": UNIT,
}  # fmt: skip

FLOAT_OPS = sorted(n for n in OPS if n not in ELSEWHERE and OPS[n].kind != "logical")
LOGICAL = sorted(n for n in OPS if OPS[n].kind == "logical")


def test_every_operation_has_an_entry():
    assert set(TABLE) == set(OPS) - ELSEWHERE


def run(op, *args):
    """(what is emitted, what the operation means in float64)"""
    with np.errstate(all="ignore"):
        wide = [a.astype("float64") if a.dtype == np.float32 and op != "nextafter" else a for a in args]
        want = np.asarray(OPS[op].evaluate(*wide))
    return np.asarray(TABLE[op](*map(jnp.asarray, args))), want


def pairs(a):
    return pairs_of(a, a)


def pairs_of(a, b):
    return [x.ravel() for x in np.meshgrid(a, b)]


@pytest.mark.parametrize("op", FLOAT_OPS)
def test_float32(op):
    values = DOMAIN.get(op, REAL)
    if op == "pow":
        args = [np.repeat(POSITIVE, len(REAL)), np.clip(np.tile(REAL, len(POSITIVE)), -5, 5)]
    elif op == "div":
        args = [np.repeat(REAL, len(POSITIVE)), np.tile(POSITIVE, len(REAL))]
    elif op == "rem":
        args = [x.astype("float32") for x in pairs(np.array([-7.0, -2.5, 3.0, 5.5, 2.0]))]
    else:
        args = [values] if OPS[op].arity == 1 else pairs(values)
    got, want = run(op, *args)
    assert got.dtype == (np.bool_ if OPS[op].kind == "comparison" else np.float32)
    if got.dtype == np.bool_:
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


AT_EDGES = ["add", "sub", "mul", "div", "max", "min", "neg", "abs", "sign", "floor", "ceil", "round_even", "round_away",
            "square", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "atan",
            "is_finite", "eq", "ne", "lt", "le", "gt", "ge", "atan2"]  # fmt: skip


SIGN = "sign"


@pytest.mark.parametrize("op", [SIGN if op == "sign" else op for op in AT_EDGES])
def test_nan_infinities_and_zeros(op):
    args = [SPECIAL] if OPS[op].arity == 1 else pairs(SPECIAL)
    got, want = run(op, *args)
    np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=2e-6)
    if op in ("max", "min", "atan2", "neg", "abs"):
        return
    if got.dtype == np.float32:
        zeros = (got == 0) & (want == 0)
        np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]))


@pytest.mark.parametrize(
    "kind,op", [(k, op) for k in ("bool", "int32") for op in LOGICAL if k != "bool" or op not in SHIFTS]
)
def test_logic_on_truth_values_and_bits(kind, op):
    values = np.array([False, True]) if kind == "bool" else np.array([-3, 0, 1, 6], "int32")
    got, want = run(op, *([values] if OPS[op].arity == 1 else pairs(values)))
    np.testing.assert_array_equal(got, want)
    assert got.dtype == values.dtype


AMOUNTS = [0, 1, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100]


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("op", sorted(SHIFTS))
def test_shifts_by_any_amount_are_those_of_xla(op, dtype):
    limits, signed = np.iinfo(dtype), not dtype.startswith("u")
    values = np.array([limits.min, limits.max, 0, 1, 5, 77], dtype)
    amounts = np.array(AMOUNTS + ([-1, -5, -100] if signed else []), dtype)
    x, amount = pairs_of(values, amounts)
    of_xla = lax.shift_left if op == "shift_left" else lax.shift_right_arithmetic if signed else lax.shift_right_logical
    want = np.asarray(of_xla(x, amount))
    np.testing.assert_array_equal(TABLE[op](jnp.asarray(x), jnp.asarray(amount)), want)
    np.testing.assert_array_equal(OPS[op].evaluate(x, amount), want)
    np.testing.assert_array_equal(evaluated(op, [x.astype(np.int64), amount.astype(np.int64)], dtype), want)
    for n in amounts:
        np.testing.assert_array_equal(TABLE[op](jnp.asarray(values), n), of_xla(values, np.full_like(values, n)))


@pytest.mark.parametrize("op", sorted(SHIFTS))
def test_a_shift_by_a_known_amount_is_one_operation(op):
    jaxpr = jax.make_jaxpr(lambda x: TABLE[op](x, np.uint32(5)))(jnp.zeros(8, jnp.uint32))
    assert sum(e.primitive.name.startswith("shift") for e in jaxpr.eqns) == 1
    assert not {"select_n", "lt"} & {e.primitive.name for e in jaxpr.eqns}


@pytest.mark.parametrize(
    "op", ["add", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "sign", "eq", "lt", "ge", "square"]
)
def test_integers(op):
    values = np.array([-7, -2, -1, 1, 3, 8], "int32")
    got, want = run(op, *([values] if OPS[op].arity == 1 else pairs(values)))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("op", ["div", "pow", "rem", "atan2", "add", "lt", "max"])
def test_operands_of_different_shapes_are_broadcast(op):
    column, row = np.array([[1.0], [2.0]], "float32"), np.array([[3.0, 4.0, 5.0]], "float32")
    got, want = run(op, column, row)
    assert got.shape == (2, 3)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(REDUCERS))
def test_reductions(name):
    data = RANDOM.random((3, 4, 5)).astype("float32")
    data = data > 0.3 if name in ("and", "or") else data
    got = np.asarray(REDUCTIONS[name](jnp.asarray(data), (0, 2)))
    np.testing.assert_allclose(got, REDUCERS[name].reduce(data, axis=(0, 2)), rtol=1e-5)
    assert got.dtype == data.dtype


@pytest.mark.parametrize("name", ["sum", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "int32", "float32"])
def test_sums_keep_their_type(name, dtype):
    assert REDUCTIONS[name](jnp.ones((2, 3), dtype), (1,)).dtype == dtype


def test_select_broadcasts_its_parts():
    got = select(jnp.array([[True], [False]]), jnp.float32(1.0), jnp.array([2.0, 3.0], "float32"))
    np.testing.assert_array_equal(got, [[1, 1], [2, 3]])
