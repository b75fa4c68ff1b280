"""Loops with trips written out: which, how far, and what they compute."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallasfuse as pf
from pallasfuse import _compat, unrolled_loops
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
    return [eqn.params["unroll"] for eqn in loops(jaxpr) if eqn.primitive.name == "scan"]


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

    jaxpr, (most, less) = unrolled(many, X)
    added = (MOST_TRIPS - 1) * equations(next(loops(jaxpr)).params["jaxpr"])
    assert trips(most) == [MOST_TRIPS] * (4 * MOST_EQUATIONS // added) + [1] * (40 - 4 * MOST_EQUATIONS // added)
    assert trips(less) == [MOST_TRIPS // 4] * 40


def test_loops_that_hardly_matter_are_not_asked_about():
    def large(x):
        for n in range(400):
            x = jnp.sin(x) + n
        return decayed(x, 10)

    assert unrolled(large, X)[1] == []


def test_a_kernel_of_the_users_is_not_entered():
    def kernel(x, o):
        o[...] = jax.lax.fori_loop(0, 8, lambda n, c: 0.5 * c + 1, x[...])

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct(X.shape, X.dtype), interpret=True)
    assert unrolled(call, X)[1] == []
    assert 4 not in surely(call, X)


def test_what_solves_is_not_entered():
    matrix = 3 * np.eye(8, dtype="float32")

    def solved(b):
        def product(v):
            return jax.lax.scan(lambda c, row: (c, row @ v), 0.0, jnp.asarray(matrix))[1]

        return jax.scipy.sparse.linalg.cg(product, b)[0]

    _, ways = unrolled(solved, X[0])
    assert all(set(trips(way)) == {1} for way in ways)


def test_symbolic_shapes_stay_as_they_are():
    (rows, size) = jax.export.symbolic_shape("a,b")

    def function(x):
        return jax.lax.scan(lambda c, row: (0.5 * c + row @ c.T @ c, jnp.tanh(c)), jnp.zeros(x.shape[1:]), x)

    for length in (5, rows):
        jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((length, size, size), jnp.float32))
        assert unrollings(jaxpr, partly=True) == {}
        assert unrolled_surely(jaxpr, assumed("gpu")) is jaxpr


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
        lambda c, row: (c + jnp.sort(row), None),
        lambda c, row: (c + jnp.ones((8, 4096)) @ (row[0] + jnp.ones((4096, 4096))) @ jnp.ones((4096,)), None),
        lambda c, row: (c + decayed(row[:, None])[0][0], None),
    ],
    ids=["sort", "products", "loop"],
)
def test_trips_with_work_of_their_own_need_a_clock(trip):
    assert surely(lambda x: jax.lax.scan(trip, x[0], x), X)[:1] == [1]


def large(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def leapfrog(q, p):
    def trip(state, _):
        q, p = state
        p = p - 0.01 * jnp.sin(q)
        return (q + 0.01 * p, p), jnp.sum(p * p)

    return jax.lax.scan(trip, (q, p), None, length=50)


def powers(v, a):
    def trip(v, _):
        y = a @ v
        return y / jnp.sqrt(jnp.sum(y * y)), None

    return jax.lax.scan(trip, v, None, length=50)[0]


def life(grid):
    def trip(cells, _):
        near = sum(jnp.roll(cells, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
        return ((near == 3) | ((cells == 1) & (near == 2))).astype(cells.dtype), None

    return jax.lax.scan(trip, grid, None, length=50)[0]


def running(reverse, rows=None):
    """Each trip stacks what it makes of a row, in the order of the rows."""

    def function(x, scale):
        def trip(total, row):
            total = 0.5 * total + scale * row
            return total, total - row.mean()

        return jax.lax.scan(trip, x[0], x[:rows], reverse=reverse)

    return function


@pytest.mark.parametrize(
    ("function", "arguments", "found"),
    [
        (leapfrog, [large(4 << 20)] * 2, 4),  # a trip is 17 MB: what one makes the next one reads at once
        (powers, [large(4096), large(4096, 4096)], 1),  # a matrix is read in each trip
        (life, [large(1024, 1024)], 1),  # what is fused is computed again for eight neighbours
    ],
)
def test_trips_are_in_one_body_where_that_is_predicted_to_be_faster(function, arguments, found):
    assert surely(function, *arguments) == [found]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("trips_in_one", "rows"), [(1, 12), (2, 12), (3, 12), (12, 12), (5, 10)])
def test_what_is_priced_computes_what_the_loop_does(reverse, trips_in_one, rows):
    """rows: those of the trips that are in whole bodies. The others are not priced."""
    x = jnp.arange(36.0).reshape(12, 3)
    jaxpr = jax.make_jaxpr(running(reverse))(x, 2.0)
    (loop,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    values = {v: a for v, a in zip(jaxpr.jaxpr.invars, (x, jnp.float32(2.0)), strict=True)}
    operands = [values.get(v, x[0] if v.aval.shape == (3,) else None) for v in loop.invars]
    made = unrolled_loops._in_one_body(loop, trips_in_one, *operands)
    for one, other in zip(made, running(reverse, rows)(x, 2.0), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


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
    assert plan.written_out == (options.price and one_device)
    assert trips(plan.converted.original) == [4 if plan.written_out else 1]


def test_explain_shows_the_unrolled_program():
    priced = FuseOptions(price=True)  # tests fuse whatever they can, otherwise
    plan = pf.fuse(decayed, options=priced).explain(X, target="xla_gpu")
    assert plan.written_out and trips(plan.converted.original) == [4]
    assert not pf.fuse(decayed, options=priced).explain(X, target="xla").written_out
