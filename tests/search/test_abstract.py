"""Abstract expressions: equal ones have one normal form, every law is needed for that, and parts are found wherever they are."""

import pytest

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import add, apply, const, div, mul, read
from pallasfuse.ir.reducers import MAX, SUM
from pallasfuse.search.abstract import (
    LAWS,
    ONE,
    Abstraction,
    Goal,
    Law,
    Tensor,
    TooLongError,
    atom,
)

K, J = Axis("i", 3), Axis("j", 4)
A, B, C, D = (atom(Tensor(name)) for name in "abcd")


def sides(law, on):
    """Both sides of a law's equation."""
    match law:
        case _ if law is Law.DISTRIBUTE:
            return on.times(on.plus((A, B)), C), on.plus((on.times(A, C), on.times(B, C)))
        case _ if law is Law.SUMS:
            return on.times(on.reduced(SUM, [K], A), B), on.reduced(SUM, [K], on.times(A, B))
        case _ if law is Law.INVERSES:
            return on.inverse(on.times(A, B)), on.times(on.inverse(A), on.inverse(B))
        case _ if law is Law.ROOTS:
            return on.root(on.times(A, B)), on.times(on.root(A), on.root(B))
        case _ if law is Law.EXPONENTIALS:
            return on.exponential(on.plus((A, B))), on.times(on.exponential(A), on.exponential(B))
    raise AssertionError(law)


@pytest.mark.parametrize("law", sorted(LAWS, key=lambda law: law.name), ids=lambda law: law.name)
def test_a_law_holds_and_without_it_nothing_else_says_so(law):
    left, right = sides(law, Abstraction())
    assert left == right
    left, right = sides(law, Abstraction(LAWS - {law}))
    assert left != right


def test_the_equivalences_of_mirage():
    on = Abstraction()
    plus, times, inverse = on.plus, on.times, on.inverse
    assert plus((A, plus((B, C)))) == plus((plus((C, B)), A))
    assert times(A, times(B, C)) == times(times(C, B), A)
    assert plus((times(A, inverse(C)), times(B, inverse(C)))) == times(plus((A, B)), inverse(C))
    assert times(times(A, inverse(B)), inverse(C)) == times(A, inverse(times(B, C)))
    assert on.reduced(SUM, [K, J], A) == on.reduced(SUM, [K], on.reduced(SUM, [J], A))
    assert on.reduced(SUM, [K], plus((A, B))) == plus((on.reduced(SUM, [K], A), on.reduced(SUM, [K], B)))
    assert on.reduced(SUM, [K], times(A, inverse(B))) == times(on.reduced(SUM, [K], A), inverse(B))


def test_nothing_cancels_and_what_differs_stays_apart():
    on = Abstraction()
    assert on.times(A, on.inverse(A)) != ONE
    assert on.plus((A, A)) != A
    assert on.reduced(SUM, [K], A) != on.reduced(SUM, [J], A)
    assert on.reduced(MAX, [K], on.times(A, B)) != on.times(on.reduced(MAX, [K], A), B)
    assert on.exponential(on.times(A, B)) != on.times(on.exponential(A), on.exponential(B))


def test_parts_are_subexpressions_of_any_equal_expression():
    on = Abstraction()
    product = on.plus((on.times(A, C), on.times(B, C)))
    goal = Goal(on, product)
    assert goal.has_part(on.plus((A, B)))  # of (a + b) * c
    assert goal.has_part(on.times(A, C)) and goal.has_part(product)
    assert not goal.has_part(on.times(A, B))
    assert not goal.has_part(on.plus((A, C)))
    assert not goal.has_part(on.times(product, A))
    assert not goal.has_part(on.plus((A, A)))


def test_parts_are_found_in_divisors_roots_and_exponents():
    on = Abstraction()
    divisor = Goal(on, on.times(A, on.times(on.inverse(B), on.inverse(on.plus((C, D))))))
    assert divisor.has_part(on.times(B, on.plus((C, D))))  # a / (b * (c + d))
    assert divisor.has_part(on.plus((C, D))) and divisor.has_part(on.times(A, on.inverse(B)))
    assert not divisor.has_part(on.times(A, C))
    exponent = Goal(on, on.times(on.exponential(A), on.exponential(B)))
    assert exponent.has_part(on.plus((A, B))) and not exponent.has_part(on.times(A, B))
    root = Goal(on, on.times(C, on.inverse(on.root(on.times(A, B)))))
    assert root.has_part(on.times(A, B)) and root.has_part(on.root(A)) and not root.has_part(on.plus((A, B)))


def test_scalar_expressions_are_interpreted():
    on, i = Abstraction(), (K,)
    a, b = read("a", i, "float32"), read("b", (K, J), "float32")
    one, two = const(1.0, "float32"), const(2.0, "float32")
    assert on.expression(mul(div(a, b), two), {}) == on.times(A, on.inverse(B))
    assert on.expression(apply("rsqrt", add(a, one)), {}) == on.inverse(on.root(on.plus((A, ONE))))
    assert on.expression(apply("tanh", a), {}) != on.expression(apply("tanh", b), {})
    assert on.expression(a, {"a": B}) == B


def test_a_long_expression_says_nothing():
    on = Abstraction()
    sums = on.plus(atom(Tensor(f"t{n}")) for n in range(9))
    with pytest.raises(TooLongError):
        on.times(on.times(sums, sums), sums)
