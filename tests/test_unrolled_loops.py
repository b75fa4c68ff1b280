"""Loops with trips written out: which, how far, and what they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasfuse as pf
from pallasfuse import _compat, measure
from pallasfuse.device import assumed
from pallasfuse.first_time import Once
from pallasfuse.options import FuseOptions
from pallasfuse.primitive import FusedCall
from pallasfuse.targets import find
from pallasfuse.unrolled_loops import MOST_EQUATIONS, MOST_TRIPS, equations, loops, unrolled_surely, unrollings

X = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")


def decayed(x, length=None, **how):
    """A scan of four operations a trip."""

    def trip(carry, row):
        carry = 0.5 * carry + row
        return carry, jnp.tanh(carry)

    return jax.lax.scan(trip, jnp.zeros(x.shape[1:]), x[:length], **how)


def trips(jaxpr):
    return [eqn.params["unroll"] for eqn in loops(jaxpr)]


def unrolled(function, *args, partly=True, exclude=()):
    jaxpr = jax.make_jaxpr(function)(*args)
    return jaxpr, list(unrollings(jaxpr, exclude, partly=partly).values())


def test_a_long_loop_has_a_few_trips_in_one_where_starts_cost():
    jaxpr, ways = unrolled(decayed, X)
    assert [trips(way) for way in ways] == [[MOST_TRIPS], [MOST_TRIPS // 4]]
    for way in ways:
        for got, want in zip(_compat.eval_jaxpr(way, way.consts, X), decayed(X), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
    assert trips(jaxpr) == [1]
    assert unrolled(decayed, X, partly=False)[1] == []


def test_a_short_loop_is_written_out_whole():
    _, ways = unrolled(lambda x: decayed(x, 5), X, partly=False)
    assert [trips(way) for way in ways] == [[5]]


def test_long_bodies_have_fewer_trips_in_one():
    def long(x):
        def trip(carry, row):
            for _ in range(MOST_EQUATIONS // 12):
                carry = jnp.sin(carry) + row
            return carry, None

        return jax.lax.scan(trip, x[0], x)

    _, ways = unrolled(long, X)
    assert [trips(way) for way in ways] == [[4]]


def test_only_innermost_loops_are_unrolled():
    def nested(x):
        return jax.lax.scan(lambda c, row: (decayed(x + c, 4)[0] + row, None), x[0], x)[0]

    _, (most, *_) = unrolled(nested, X)
    assert trips(most) == [1, 4]


def test_a_function_that_is_called_twice_stays_one():
    call = jax.jit(decayed)
    _, (way, _) = unrolled(lambda x: call(call(x)[1]), X)
    first, second = (eqn.params["jaxpr"] for eqn in way.eqns if eqn.primitive.name in ("jit", "pjit"))
    assert first is second and trips(way) == [MOST_TRIPS] * 2


@pytest.mark.parametrize(
    ("function", "exclude"),
    [
        (lambda x: decayed(x, unroll=2), ()),
        (pf.leave(decayed), ()),
        (jax.named_scope("mine")(decayed), ("mine",)),
        (lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x), ()),
        (lambda x: jax.lax.scan(lambda c, row: (jax.debug.print("{}", c[0]) or c + row, None), x[0], x), ()),
    ],
    ids=["unrolled", "left", "excluded", "while", "effects"],
)
def test_what_stays_as_it_is(function, exclude):
    assert unrolled(function, X, exclude=exclude)[1] == []


def test_a_program_of_many_loops_does_not_become_too_long():
    def many(x):
        for n in range(40):
            x = decayed(x + n)[1]
        return x

    _, ways = unrolled(many, X)
    assert ways and all(equations(way) <= 4 * MOST_EQUATIONS for way in ways)
    assert {n for way in ways for n in trips(way)} == {MOST_TRIPS // 4}


def surely(function, *args, device="gpu", exclude=()):
    jaxpr = jax.make_jaxpr(function)(*args)
    return trips(unrolled_surely(jaxpr, assumed(device), exclude))


def test_without_a_clock_trips_that_are_nothing_but_starts_are_unrolled():
    assert surely(decayed, X) == [4]
    assert surely(lambda x: decayed(x, 3), X) == [3]
    assert surely(decayed, X, device="cpu") == [1]
    assert surely(jax.named_scope("mine")(decayed), X, exclude=("mine",)) == [1]


@pytest.mark.parametrize(
    "trip",
    [
        lambda c, row: (c + row * jnp.ones((1 << 22, 1)).sum(0), None),
        lambda c, row: (c + (row[:1] + jnp.ones((1 << 22, 1))).sum(0), None),
        lambda c, row: (c + jnp.sort(row), None),
        lambda c, row: (c + jnp.ones((8, 4096)) @ (row[0] + jnp.ones((4096, 4096))) @ jnp.ones((4096,)), None),
        lambda c, row: (c + decayed(row[:, None])[0][0], None),
    ],
    ids=["constants", "between", "sort", "products", "loop"],
)
def test_trips_with_work_of_their_own_need_a_clock(trip):
    assert 4 not in surely(lambda x: jax.lax.scan(trip, x[0], x), X)[:1]


@pytest.mark.parametrize(
    "options", [FuseOptions(check=False), FuseOptions(check=False, price=False), FuseOptions(strict=True)]
)
@pytest.mark.parametrize("one_device", [True, False])
def test_a_plan_without_a_clock_is_of_the_unrolled_program(options, one_device):
    call = FusedCall(jax.make_jaxpr(decayed)(X), options, "decayed", Once())
    try:
        plan = call.plan(find("triton").judged(timed=False, one_device=one_device))
    except pf.FusionError:
        assert options.strict
        return
    assert plan.unrolled == (options.price and one_device)
    assert trips(plan.converted.original) == [4 if plan.unrolled else 1]


def test_explain_shows_the_unrolled_program():
    priced = FuseOptions(price=True)  # tests fuse whatever they can, otherwise
    plan = pf.fuse(decayed, options=priced).explain(X, target="triton")
    assert plan.unrolled and trips(plan.converted.original) == [4]
    assert not pf.fuse(decayed, options=priced).explain(X, target="xla").unrolled


def test_what_takes_much_more_memory_is_not_run(monkeypatch):
    class Program:
        def __init__(self, megabytes):
            self.bytes = megabytes << 20

        def memory_analysis(self):
            class Sizes:
                argument_size_in_bytes = 0
                output_size_in_bytes = 0
                temp_size_in_bytes = self.bytes

            return Sizes

    programs = {"first": Program(1000), "second": Program(1090), "third": Program(1101), "fourth": "XlaError"}
    found = measure._that_fit(programs, 1.1)
    assert found["second"] is programs["second"] and found["fourth"] == "XlaError"
    assert found["third"] == "it takes 1101 MiB of memory, more than 1100"
    little = {"first": Program(1), "second": Program(64), "third": Program(66)}
    assert measure._that_fit(little, 1.1) == {**little, "third": "it takes 66 MiB of memory, more than 65"}
