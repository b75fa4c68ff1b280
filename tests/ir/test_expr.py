"""Scalar expressions: interning, text, substitution, renaming."""

import copy
import gc
import pickle
import random

import numpy as np
import pytest

from pallasfuse.errors import InvalidProgramError
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.evaluate import evaluate_expr
from pallasfuse.ir.expr import (
    Index,
    Read,
    add,
    apply,
    const,
    convert,
    div,
    index,
    mul,
    postorder,
    read,
    rebuild,
    rename_axes,
    select,
    show,
    sub,
    substitute,
    with_args,
)

I, J = Axis("i", 5), Axis("j", 7)  # noqa: E741
A, B, C = (read(n, (), "float32") for n in "abc")
P = read("p", (), "bool")
X = read("x", (I, J), "float32")


def power(a, b):
    return apply("pow", a, b)


def negate(a):
    return apply("neg", a)


# --- interning


def test_equal_structure_is_one_object():
    assert add(A, mul(B, const(2.0, "float32"))) is add(A, mul(B, const(2.0, "float32")))
    assert read("x", [I, J], "float32") is X
    assert index(I) is index(Axis("i", 5))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (const(0.0, "float32"), const(-0.0, "float32")),
        (const(1.0, "float32"), const(1.0, "float16")),
        (const(1, "int32"), const(True, "bool")),
        (X, read("x", (J, I), "float32")),
        (X, read("x", (I, J), "float16")),
        (index(I), index(Axis("i", 6))),
        (index(I), index(I, "int64")),
        (sub(A, B), sub(B, A)),
        (convert(A, "float16"), convert(A, "bfloat16")),
    ],
)
def test_different_structure_is_not(a, b):
    assert a is not b


def test_nan_is_interned_and_constants_take_the_type_of_their_dtype():
    assert const(float("nan"), "float32") is const(float("nan"), "float32")
    assert const(2.7, "int32").value == 2
    assert type(const(1, "float32").value) is float
    assert const(3, "bool").value is True


def test_unused_expressions_are_forgotten():
    from pallasfuse.ir.expr import _interned

    gc.freeze()  # what other tests have left is not looked through
    before = len(_interned)
    kept = [read(f"temporary{n}", (), "float32") for n in range(50)]
    assert len(_interned) >= before + 50
    del kept
    gc.collect()
    assert len(_interned) < before + 50


# --- types and axes


def test_apply_gives_types_axes_and_tensors():
    e = select(apply("lt", X, A), X, B)
    assert (e.dtype, e.axes, e.tensors) == ("float32", {I, J}, {"x", "a", "b"})
    assert apply("lt", X, A).dtype == "bool"
    assert apply("is_finite", X).dtype == "bool"
    assert convert(X, "float32") is X


@pytest.mark.parametrize("bad", [("add", (A,)), ("neg", (A, B)), ("frobnicate", (A,)), ("select", (P, A))])
def test_unknown_operation_or_wrong_arity_is_refused(bad):
    op, args = bad
    with pytest.raises(InvalidProgramError, match=op):
        apply(op, *args)


# --- text


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (X, "x[i, j]"),
        (A, "a"),
        (index(J), "j"),
        (const(0.5, "float32"), "0.5"),
        (const(1.0, "float32"), "1"),
        (const(0.1 + 0.2, "float64"), "0.30000000000000004"),
        (const(-np.inf, "float32"), "-inf"),
        (const(True, "bool"), "True"),
        (sub(A, sub(B, C)), "a - (b - c)"),
        (sub(sub(A, B), C), "a - b - c"),
        (add(A, mul(B, C)), "a + b * c"),
        (mul(add(A, B), C), "(a + b) * c"),
        (div(A, mul(B, C)), "a / (b * c)"),
        (div(div(A, B), C), "a / b / c"),
        (negate(add(A, B)), "-(a + b)"),
        (negate(mul(A, B)), "-(a * b)"),
        (mul(negate(A), B), "-a * b"),
        (sub(A, const(-1.0, "float32")), "a - -1"),
        (power(negate(A), B), "(-a) ** b"),
        (negate(power(A, B)), "-a ** b"),
        (power(A, power(B, C)), "a ** (b ** c)"),
        (power(const(-2.0, "float32"), A), "(-2) ** a"),
        (apply("exp", sub(A, B)), "exp(a - b)"),
        (apply("max", A, add(B, C)), "max(a, b + c)"),
        (convert(add(A, B), "float16"), "float16(a + b)"),
        (select(apply("le", index(J), index(I)), A, B), "select(j <= i, a, b)"),
        (apply("and", apply("lt", A, B), apply("or", P, P)), "a < b & (p | p)"),
        (apply("or", apply("and", P, P), P), "p & p | p"),
        (apply("not", apply("and", P, P)), "!(p & p)"),
        (apply("not", P), "!p"),
        (apply("eq", apply("lt", A, B), P), "a < b == p"),
        (apply("eq", P, apply("lt", A, B)), "p == (a < b)"),
    ],
    ids=lambda p: str(p) if hasattr(p, "dtype") or isinstance(p, (str, int, tuple)) else "",
)
def test_text(expr, text):
    assert show(expr) == str(expr) == text


def _random_arithmetic(random: np.random.Generator, depth: int):
    if depth == 0 or random.random() < 0.15:
        return [A, B, C, const(-1.5, "float64"), const(2.0, "float64")][random.integers(5)]
    if random.random() < 0.2:
        return negate(_random_arithmetic(random, depth - 1))
    op = ["add", "sub", "mul", "div"][random.integers(4)]
    return apply(op, _random_arithmetic(random, depth - 1), _random_arithmetic(random, depth - 1), dtype="float64")


@pytest.mark.parametrize("seed", range(60))
def test_text_of_arithmetic_means_in_python_what_the_expression_means(seed):
    random = np.random.default_rng(seed)
    expr = _random_arithmetic(random, 5)
    at = {n: np.float64(random.normal()) for n in "abc"}
    with np.errstate(all="ignore"):
        # the same operations in the same order: equal to the last bit
        got = eval(show(expr), {"nan": np.nan, "inf": np.inf}, at)
        np.testing.assert_array_equal(got, evaluate_expr(expr, (), at))


# --- traversal and rewriting


def test_postorder_visits_shared_parts_once_and_arguments_first():
    shared = add(A, B)
    root = mul(shared, apply("exp", shared))
    order = list(postorder(root, shared))
    assert len(order) == len(set(order)) == 5
    for node in order:
        assert all(order.index(arg) < order.index(node) for arg in node.args)


def test_copies_and_pickles_are_the_expression_itself():
    body = apply(
        "select", apply("lt", index(I), const(3, "int32")), read("x", (I,), "float32"), const(float("nan"), "float32")
    )
    for made in (copy.copy(body), copy.deepcopy(body), pickle.loads(pickle.dumps(body))):
        assert made is body


def test_long_chains_need_no_recursion():
    e = A
    for _ in range(5_000):
        e = add(e, B)
    assert substitute(e, {B: C}).tensors == {"a", "c"}
    assert show(e).count("+") == 5_000


def test_substitute_is_simultaneous_and_replaces_the_outermost():
    inner, outer = add(A, B), mul(add(A, B), C)
    assert substitute(outer, {A: B, B: A}) is mul(add(B, A), C)
    assert substitute(outer, {inner: C, A: B}) is mul(C, C)
    assert substitute(outer, {outer: A, inner: B}) is A
    assert substitute(outer, {X: A}) is outer


def test_rename_axes_renames_reads_and_positions():
    k = Axis("k", 5)
    e = mul(X, convert(add(index(I), index(J)), "float32"))
    assert str(rename_axes(e, {I: k})) == "x[k, j] * float32(k + j)"
    assert rename_axes(e, {k: I}) is e
    swapped = rename_axes(read("y", (I, k), "float32"), {I: k, k: I})
    assert isinstance(swapped, Read)
    assert swapped.indices == (k, I)


def test_rename_axes_is_a_rewriting_from_the_bottom():
    """It walks less than that, and remembers what it has renamed."""
    rng = random.Random(0)
    axes = [Axis(name, 4 + n) for n, name in enumerate("abcd")]
    for _ in range(50):
        terms = [
            read("x", rng.sample(axes, 2), "float32"),
            convert(index(rng.choice(axes)), "float32"),
            const(1.5, "float32"),
        ]
        for _ in range(12):
            terms.append(rng.choice([add, mul])(*rng.choices(terms, k=2)))
        olds = rng.sample(axes, rng.randint(1, 3))
        renaming = dict(zip(olds, rng.sample([*axes, Axis("e", 4), Axis("f", 5)], len(olds)), strict=True))

        def renamed(node, args, renaming=renaming):
            if isinstance(node, Read):
                return read(node.tensor, [renaming.get(a, a) for a in node.indices], node.dtype)
            return (
                index(renaming.get(node.axis, node.axis), node.dtype)
                if isinstance(node, Index)
                else with_args(node, args)
            )

        done = {}
        for term in terms:
            found = rename_axes(term, renaming, done)
            assert found is rebuild(term, renamed)
            assert found.axes == frozenset(renaming.get(a, a) for a in term.axes) and found.tensors == term.tensors


def test_bits_are_a_float_of_as_many():
    word = read("x", (), "uint16")
    assert apply("bitcast", word, dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(InvalidProgramError, match="the bits of uint16 are no float32: it has another size"):
        apply("bitcast", word, dtype="float32")
