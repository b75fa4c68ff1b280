"""The rules for jaxpr equations, against JAX itself where numbers are known, and against other forms where not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse.verification.jaxprs import Equations, body_of, near_ends, traced_shape
from tests.verification.values import TRIALS, agree, differ, finite_fields, number

X = np.array([[1.0, -2.0, 3.0, 0.5], [4.0, 5.0, -6.0, 0.25], [-1.0, 2.5, 0.75, 8.0]], np.float32)
Y = np.array([[2.0, 1.0, -1.0, 4.0], [0.5, -3.0, 2.0, 1.0], [1.5, 2.0, 5.0, -0.5]], np.float32)


def run(function, fields, *values):
    """The results of a function without calls; None where an equation has no rule."""
    shapes = [jax.ShapeDtypeStruct(v.shape, jnp.dtype(v.dtype)) for v in values]
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
    known = dict(zip(jaxpr.invars, values, strict=True))
    equations = Equations(fields, traced_shape)
    for eqn in jaxpr.eqns:
        args = [known[a] if not hasattr(a, "val") else equations.literal(a) for a in eqn.invars]
        result = equations.equation(eqn, args)
        if result is None:
            return None
        known[eqn.outvars[0]] = result
    return known[jaxpr.outvars[0]]


def bits_of(x):
    """Numbers that depend on a float, with high bits, too."""
    return (x.astype(jnp.int32).astype(jnp.uint32) + 1) * jnp.uint32(2654435761)


def take(mode, fill=None):
    """One element of every row: indices -1, 2 and 5 of four columns."""

    def function(x, y):
        at = 3 * lax.broadcasted_iota(jnp.int32, (3, 1), 0) - 1
        numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
        return lax.gather(x, at, numbers, (1, 1), mode=mode, fill_value=fill)

    return function


def take_columns(x, y):
    """By two indices that are joined, of which one is the row; the second of them is the row of the result."""
    row, column = lax.broadcasted_iota(jnp.int32, (4, 1), 0) - 1, lax.broadcasted_iota(jnp.int32, (4, 1), 0)
    numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    return lax.gather(x, lax.concatenate([row, column], 1), numbers, (1, 1), mode="clip")


def whole(x, dtype):
    """Numbers as integers, by way of 32 bits: what is below zero wraps."""
    return x.astype(jnp.int32).astype(dtype)


KNOWN = {
    "taken, clip": take("clip"),
    "taken, promise": take("promise_in_bounds"),
    "taken, fill": take("fill", 0.25),
    "taken, fill with NaN": take("fill"),
    "taken by two indices": take_columns,
    "joined": lambda x, y: lax.concatenate([x, y], 1),
    "arithmetic": lambda x, y: x * y - x / y + 2.0,
    "shifts": lambda x, y: ((whole(x, jnp.int32) << 3) + (whole(y, jnp.int32) >> 1)).astype(jnp.float32),
    "shifts by some": lambda x, y: (whole(x, jnp.int8) >> abs(whole(y, jnp.int8))).astype(jnp.float32),
    "shifts by all": lambda x, y: ((whole(x, jnp.int8) >> 9) + (whole(y, jnp.int8) << 8)).astype(jnp.float32),
    "shifts of bits": lambda x, y: (lax.shift_right_logical(whole(x, jnp.int16), jnp.int16(4))).astype(jnp.float32),
    "shifts of signs": lambda x, y: lax.shift_right_arithmetic(whole(x, jnp.uint16), jnp.uint16(4)).astype(jnp.float32),
    "wrapped": lambda x, y: (whole(x, jnp.uint8) * jnp.uint8(77) - whole(y, jnp.uint8)).astype(jnp.float32),
    "bits": lambda x, y: lax.bitcast_convert_type(whole(x, jnp.int16) + jnp.int16(0x3F80), jnp.bfloat16) + y,
    "bits of another sign": lambda x, y: lax.bitcast_convert_type(whole(x, jnp.int16), jnp.uint16).astype(jnp.float32),
    "power": lambda x, y: x**3 + lax.integer_pow(y, -2),
    "sums": lambda x, y: jnp.sum(x, 1) * jnp.sum(y),
    "maxima": lambda x, y: jnp.max(x, 0) - jnp.min(y, 0),
    "products": lambda x, y: lax.reduce_prod(x, (1,)),
    "matrix product": lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))),
    "outer product": lambda x, y: lax.dot_general(x, y, (((), ()), ((), ()))),
    "batched product": lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))),
    "broadcast": lambda x, y: lax.broadcast_in_dim(lax.reduce_sum(x, (0,)), (2, 4, 3), (1,)),
    "transpose and reshape": lambda x, y: lax.reshape(lax.transpose(x, (1, 0)), (2, 6)),
    "squeeze and expand": lambda x, y: lax.squeeze(lax.expand_dims(x, (1,)), (1,)) + y,
    "choice": lambda x, y: lax.select_n(lax.lt(x, y), x, y),
    "clamp": lambda x, y: lax.clamp(-1.0, x, 2.0),
    "position": lambda x, y: x * lax.broadcasted_iota(jnp.float32, (3, 4), 1),
    "rounding": lambda x, y: lax.round(x + 0.5, lax.RoundingMethod.AWAY_FROM_ZERO) + lax.floor(y),
    "casts": lambda x, y: lax.convert_element_type(lax.convert_element_type(x, jnp.int32), jnp.float32),
    "square": lambda x, y: lax.square(x) + lax.abs(y) * lax.sign(x),
    "functions": lambda x, y: lax.tanh(x) + lax.exp(y) - lax.log(lax.abs(x)) + lax.rsqrt(lax.abs(y)),
    "any": lambda x, y: lax.reduce_or(lax.gt(x, y), (1,)),
    "nothing moved": lambda x, y: lax.slice(x, (0, 0), (3, 4)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_numbers_are_what_jax_computes(name):
    fields = finite_fields(2, 2)
    values = [fields.apply("convert", [fields.integers((a * 4).astype(int), "int32")], "float32") for a in (X, Y)]
    quarter = number(fields, 0.25, rank=2)
    values = [fields.apply("mul", [v, quarter], "float32") for v in values]
    result = run(KNOWN[name], fields, *values)
    want = np.asarray(KNOWN[name](jnp.asarray(X), jnp.asarray(Y)))
    assert result.shape == want.shape
    got = np.broadcast_to(result.real, (*want.shape, result.real.shape[-1]))[..., 0]
    np.testing.assert_allclose(got, want, rtol=2e-5)


SAME = {
    "a word turned to the left and to the right": (
        lambda x, y: (bits_of(x) << 5) | (bits_of(x) >> 27),
        lambda x, y: (bits_of(x) >> 27) ^ (bits_of(x) << jnp.uint32(5)),
    ),
    "the float of some bits": (
        lambda x, y: lax.bitcast_convert_type(bits_of(x) ^ bits_of(y), jnp.float32),
        lambda x, y: lax.bitcast_convert_type(bits_of(y) ^ bits_of(x), jnp.float32),
    ),
    "a matrix product is a sum of products": (
        lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))),
        lambda x, y: jnp.sum(x[:, None] * y[None], -1),
    ),
    "a transposed product": (
        lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))),
        lambda x, y: lax.transpose(lax.dot_general(y, x, (((0,), (0,)), ((), ()))), (1, 0)),
    ),
    "a batch": (
        lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))),
        lambda x, y: lax.reduce_sum(x * y, (1,)),
    ),
    "log2": (lambda x, y: jnp.log2(x * x), lambda x, y: jnp.log(x * x) / 0.69314718),
    "reshapes": (lambda x, y: lax.reshape(x, (12,)), lambda x, y: lax.reshape(lax.reshape(x, (2, 6)), (12,))),
    "logsumexp": (
        lambda x, y: jnp.sum(jnp.exp(x - lax.broadcast_in_dim(jnp.max(y, -1), (3, 4), (0,))), -1),
        lambda x, y: jnp.sum(jnp.exp(x), -1) / jnp.exp(jnp.max(y, -1)),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_forms_agree(name):
    fields = finite_fields()
    values = [fields.random((3, 4), "float32") for _ in range(2)]
    a, b = (run(f, fields, *values) for f in SAME[name])
    assert agree(a, b, at_least=5)


DIFFERENT = {
    "the other operand": (lambda x, y: x @ y.T, lambda x, y: y @ x.T),
    "another axis": (lambda x, y: lax.reshape(x, (4, 3)), lambda x, y: lax.transpose(x, (1, 0))),
    "max and min": (lambda x, y: jnp.max(x, 1), lambda x, y: jnp.min(x, 1)),
    "a dropped element": (lambda x, y: jnp.sum(x, 1), lambda x, y: jnp.sum(x, 1) - jnp.min(x, 1)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_equations_are_told_apart(name):
    fields = finite_fields()
    values = [fields.random((3, 4), "float32") for _ in range(2)]
    a, b = (run(f, fields, *values) for f in DIFFERENT[name])
    assert differ(a, b)


@pytest.mark.parametrize(
    "function",
    [lax.sort, lambda x: lax.cumsum(x, 1), lambda x: lax.slice(x, (0, 0), (3, 4), (1, 2)), lambda x: lax.rev(x, (0,)),
     lambda x: lax.pad(x, 0.0, ((0, 0, 1), (0, 0, 0))), lambda x: lax.pad(x, 0.0, ((-1, 0, 0), (0, 0, 0)))],
)  # fmt: skip
def test_what_has_no_rule_is_none(function):
    fields = finite_fields(2)
    assert run(function, fields, fields.random((3, 4), "float32")) is None


def test_shapes_may_be_smaller_than_those_that_were_traced():
    """One equation over 8192 rows is evaluated over three."""
    jaxpr = jax.make_jaxpr(lambda x: lax.reduce_sum(x, (1,)))(jax.ShapeDtypeStruct((8192, 8192), jnp.float32)).jaxpr
    fields = finite_fields(2)
    x = fields.random((3, 2), "float32")
    short = {jaxpr.invars[0]: (3, 2), jaxpr.outvars[0]: (3,)}
    result = Equations(fields, lambda atom: short[atom]).equation(jaxpr.eqns[0], [x])
    halves = fields.apply("add", [x.take((slice(None), 0)), x.take((slice(None), 1))], "float32")
    assert agree(result, halves, at_least=TRIALS)


def test_literals_may_be_replaced():
    jaxpr = jax.make_jaxpr(lambda x: x / 8192.0)(jax.ShapeDtypeStruct((4,), jnp.float32)).jaxpr
    fields = finite_fields(2)
    equations = Equations(fields, traced_shape, lambda value, dtype: 4.0 if value == 8192.0 else value)
    literal = next(a for a in jaxpr.eqns[0].invars if hasattr(a, "val"))
    assert agree(equations.literal(literal), number(fields, 4.0))


def test_calls_have_a_body_and_operations_have_none():
    jaxpr = jax.make_jaxpr(lambda x: jax.nn.relu(jax.jit(jnp.sin)(x)) + 1)(X).jaxpr
    bodies = {e.primitive.name: body_of(e) is not None for e in jaxpr.eqns}
    assert not bodies["add"]
    assert all(found for name, found in bodies.items() if name != "add")


def ends(start, stop, traced, short):
    (eqn,) = jax.make_jaxpr(lambda x: x[start:stop])(jax.ShapeDtypeStruct((traced,), jnp.float32)).jaxpr.eqns
    (found,) = near_ends(eqn, (short,))
    return found


@pytest.mark.parametrize(("traced", "short"), [(24, 12), (8, 4), (4096, 8), (6, 4), (12, 2)])
def test_slices_of_a_short_axis_meet_where_those_of_the_long_one_do(traced, short):
    for cut in {1, 2, traced // 2, traced - 1}:
        if cut < short or cut == traced // 2 or traced - cut < short:
            first, second = ends(0, cut, traced, short), ends(cut, traced, traced, short)
            assert first[0] == 0 and first[1] == second[0] and second[1] == short, (cut, first, second)
    assert ends(0, traced // 2, traced, short) == (0, short // 2)


def test_bits_are_other_floats_in_another_type():
    fields = finite_fields()
    word = fields.random((), "uint16")
    halves = [fields.apply("bitcast", [word], dtype) for dtype in ("float16", "bfloat16")]
    assert differ(*(fields.apply("convert", [x], "float32") for x in halves))
