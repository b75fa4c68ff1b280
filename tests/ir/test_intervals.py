"""Intervals of integers hold every value, and an expression within them is equal wherever its scalars are in theirs."""

import numpy as np

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Expr, apply, const, index, postorder, read
from pallasfuse.ir.intervals import interval, within

I32 = "int32"
START = read("start", (), I32)
KNOWN = {"start": (0, 96)}


def number(value):
    return const(value, I32)


def of(op: str, *args: Expr) -> Expr:
    return apply(op, *args, dtype=I32)


def random_expression(generator, depth=5):
    if depth == 0 or generator.random() < 0.15:
        return START if generator.random() < 0.5 else number(int(generator.integers(-70, 140)))
    op = str(generator.choice(["add", "sub", "mul", "min", "max", "div", "rem"]))
    left = random_expression(generator, depth - 1)
    if op in ("div", "rem"):
        return of(op, left, number(int(generator.integers(1, 40))))
    return of(op, left, random_expression(generator, depth - 1))


def value_at(expression, start):
    """The value by hand: integers of any size, quotients towards zero."""
    known = {}
    for node in postorder(expression):
        args = [known[a] for a in node.args]
        match getattr(node, "op", None):
            case None:
                known[node] = start if node is START else node.value
            case "add":
                known[node] = args[0] + args[1]
            case "sub":
                known[node] = args[0] - args[1]
            case "mul":
                known[node] = args[0] * args[1]
            case "min":
                known[node] = min(args)
            case "max":
                known[node] = max(args)
            case "div":
                known[node] = int(args[0] / args[1])
            case "rem":
                known[node] = args[0] - args[1] * int(args[0] / args[1])
    return known[expression]


def test_random_expressions():
    generator = np.random.default_rng(0)
    bounded = shorter = 0
    for _ in range(300):
        expression = random_expression(generator)
        found, short = interval(expression, KNOWN), within(expression, KNOWN)
        values = [value_at(expression, s) for s in range(97)]
        if max(map(abs, values)) >= 2**31:
            continue
        assert [value_at(short, s) for s in range(97)] == values
        before, after = (len(list(postorder(e))) for e in (expression, short))
        assert after <= before + 1  # a sum of two numbers may be a new one
        shorter += after < before
        if found is not None:
            bounded += 1
            assert found[0] <= min(values) and max(values) <= found[1]
    assert bounded > 100 and shorter > 100


def test_ends_of_axes_decide_nothing_inside():
    stop = of("min", of("max", of("min", of("add", START, number(1)), number(128)), number(0)), number(128))
    assert within(stop, KNOWN) == of("add", START, number(1))
    assert within(stop, {"start": (0, 128)}) == of("min", of("add", START, number(1)), number(128))
    assert within(stop, {}) == stop


def test_what_is_not_known_has_no_interval():
    assert interval(START, {}) is None
    assert interval(of("div", START, of("sub", START, number(3))), KNOWN) is None  # it may be by zero
    assert interval(of("mul", number(2**20), of("mul", START, number(2**20))), KNOWN) is None  # int32 does not hold it
    assert interval(index(Axis("i", 8)), {}) == (0, 7)
    assert interval(const(1.0, "float32"), {}) is None


def test_values_that_wrap_have_no_interval():
    """Of the numbers that a narrow or unsigned type can hold all are possible."""
    axis = Axis("i", 300)
    assert interval(apply("convert", index(axis, "int32"), dtype="int8"), {}) is None
    assert interval(index(axis, "int8"), {}) is None
    assert interval(index(axis, "int16"), {}) == (0, 299)
    number16 = const(200, "int16")
    assert interval(apply("mul", index(axis, "int16"), number16, dtype="int16"), {}) is None
    below_zero = apply("sub", index(axis, "uint32"), const(100, "uint32"), dtype="uint32")
    assert interval(below_zero, {}) is None
    assert interval(apply("max", below_zero, const(0, "uint32"), dtype="uint32"), {}) is None
