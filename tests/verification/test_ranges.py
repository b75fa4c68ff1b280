"""Ranges of integers: a predicate that they decide has one outcome, whatever the inputs are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.domain import FLOAT64
from pallasfuse.ir.evaluate import evaluate_over
from pallasfuse.ir.expr import apply, const, convert, index, read
from pallasfuse.ir.loop_program import LoopProgram, Nest
from pallasfuse.ir.tensors import Tensor
from pallasfuse.jaxpr_frontend import convert as convert_jaxpr
from pallasfuse.verification.ranges import decided

ROW = Axis("i", 12)
X = read("x", (ROW,), "int32")
U = read("u", (ROW,), "uint8")
AT = index(ROW)


def n(value, dtype="int32"):
    return const(value, dtype)


def decides(body):
    inputs = (Tensor("x", (ROW,), "int32"), Tensor("u", (ROW,), "uint8"))
    return "y" in decided(LoopProgram(inputs, (Nest("y", (ROW,), body, body.dtype),), ("y",)))


def test_what_one_value_decides():
    assert decides(apply("lt", AT, n(12)))
    assert decides(apply("ge", AT, n(0)))
    assert decides(apply("lt", apply("rem", AT, X), n(0)))
    assert decides(apply("le", apply("rem", X, n(8)), n(7)))
    assert decides(apply("lt", U, n(0, "uint8")))
    assert decides(apply("ge", apply("abs", apply("sign", AT)), n(0)))
    assert decides(apply("not", apply("eq", AT, n(-1))))


@pytest.mark.parametrize("body", [
    apply("lt", AT, n(11)), apply("lt", apply("rem", X, n(8)), n(7)), apply("lt", apply("add", X, n(1)), X),
    apply("lt", X, n(0)), apply("ge", apply("mul", X, X), n(0)), apply("eq", apply("rem", AT, n(5)), n(4)),
    apply("eq", apply("not", apply("rem", AT, n(2))), n(-2)),
    apply("lt", convert(U, "int8"), n(0, "int8")), apply("ge", apply("neg", X), apply("abs", X)),
], ids=str)  # fmt: skip
def test_what_has_two_outcomes_is_not_decided(body):
    assert not decides(body)


def test_of_floats_nothing_is_known():
    assert not decides(apply("lt", convert(AT, "float32"), const(100.0, "float32")))


def test_decided_expressions_have_one_value_on_random_inputs():
    generator = np.random.default_rng(0)
    leaves = [X, AT, n(3), n(-5), n(1)]
    found = 0
    for _ in range(400):
        some = list(leaves)
        for _ in range(4):
            op = str(generator.choice(["add", "sub", "mul", "max", "min", "rem", "neg", "abs", "sign", "select"]))
            args = [some[k] for k in generator.integers(0, len(some), 2)]
            if op == "select":
                args = [apply("lt", *args), *args]
            if op == "rem":
                args = [args[0], n(int(generator.integers(2, 6)))]
            some.append(apply(op, *(args[:1] if op in ("neg", "abs", "sign") else args), dtype="int32"))
        body = apply(str(generator.choice(["lt", "le", "eq", "ne", "gt", "ge"])), some[-1], some[-2])
        if decides(body):
            found += 1
            from_inputs = {"x": generator.integers(-50, 50, ROW.extent)}
            values = evaluate_over(body, (ROW,), from_inputs, FLOAT64)
            assert len(np.unique(values)) == 1, str(body)
    assert found > 20


def test_names_of_other_maps_are_followed():
    converted = convert_jaxpr(jax.make_jaxpr(lambda p: jnp.mod(jnp.arange(8), p))(jnp.int32(3)))
    maps = {nest.name: str(nest.body) for nest in converted.program.nests}
    assert any("< 0" in maps[name] for name in decided(converted.program))
