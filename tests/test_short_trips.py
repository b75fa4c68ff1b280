"""What need not be in a loop: parts of slices, what constants alone give, parts of products, and sums over the trips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse import _compat
from pallasfuse.decompositions.accumulators import accumulators_apart
from pallasfuse.decompositions.writing import traced_as
from pallasfuse.emission import pallas_kernel
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.loop_calls import loops_as_kernels, recurrence_p
from pallasfuse.recurrences import AsKernel, with_loops
from pallasfuse.short_trips import with_short_trips
from pallasfuse.targets import default_for
from tests.loops_of_programs import LOOPS, gated_unit, normal, recurrent_network

DEVICE = default_for("cuda", frozenset({"9.0"})).device


def scans_of(function, *args):
    jaxpr = flatten(jax.make_jaxpr(function)(*args))
    return jaxpr, [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


def run(jaxpr, *args, ways=None):
    """The results of a jaxpr: scans by what `ways` gives for them, kernels of loops in the interpreter."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*jaxpr.consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values = [a.val if isinstance(a, _compat.Literal) else known[a] for a in eqn.invars]
        if eqn.primitive is recurrence_p:
            results = eqn.params["of"].by_kernel(
                *values, run=lambda p, given: pallas_kernel.call(p, given, interpret=True)
            )
        else:
            other = (ways or {}).get(id(eqn))
            results = _compat.bind(eqn, values) if other is None else other(*values)
        known.update(zip(eqn.outvars, results, strict=True))
    return [a.val if isinstance(a, _compat.Literal) else known[a] for a in jaxpr.outvars]


def loss_of(function):
    return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(*args)) if x.dtype == jnp.float32)


def gradients(name):
    function, args = LOOPS[name]
    floats = tuple(n for n, a in enumerate(args) if a.dtype == jnp.float32)
    return jax.grad(loss_of(function), argnums=floats), args


WITH_SUMS = ("forward_algorithm", "recurrent_network", "gated_unit", "best_paths")


@pytest.mark.parametrize("name", WITH_SUMS)
def test_gradients_of_constants_leave_the_loop(name):
    function, args = gradients(name)
    jaxpr, loops = scans_of(function, *args)
    ways = {id(eqn): accumulators_apart(eqn) for eqn in loops}
    assert sum(way is not None for way in ways.values()) == 1
    for got, want in zip(run(jaxpr, *args, ways=ways), jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_a_product_over_trips_is_one_product():
    function, args = gradients("recurrent_network")
    _, (_, backward) = scans_of(function, *args)
    apart = flatten(traced_as(backward, accumulators_apart(backward), backward.invars))
    (loop,) = (e for e in apart.eqns if e.primitive.name == "scan")
    shapes = [_compat.shape_of(v) for v in loop.outvars]
    assert args[0].shape not in shapes
    (product,) = (e for e in apart.eqns if e.primitive.name == "dot_general")
    assert [len(d) for d in product.params["dimension_numbers"][0]] == [2, 2]


def test_what_a_trip_reads_of_its_sum_stays():
    def function(x):
        def trip(total, row):
            return total + jnp.sum(row, 0), total

        return jax.lax.scan(trip, jnp.zeros(5), x)

    _, (loop,) = scans_of(function, normal(0, 6, 3, 5))
    assert accumulators_apart(loop) is None


def test_large_factors_of_products_are_not_kept():
    def function(x, y):
        def trip(total, row):
            big = jnp.tile(row, (4000, 1)) * y
            return total + big.T @ big, None

        return jax.lax.scan(trip, jnp.zeros((5, 5)), x)[0]

    _, (loop,) = scans_of(function, normal(0, 60, 5), normal(1, 4000, 5))
    assert accumulators_apart(loop) is None


@pytest.mark.parametrize("name", LOOPS)
def test_short_trips_compute_the_same(name):
    function, args = LOOPS[name]
    jaxpr, (loop,) = scans_of(function, *args)
    for got, want in zip(
        run(jaxpr, *args, ways={id(loop): with_short_trips(loop)}), jax.tree.leaves(function(*args)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_gates_of_one_product_are_products_of_parts_and_parts_of_rows_are_made_before():
    _, (loop,) = scans_of(gated_unit, *LOOPS["gated_unit"][1])
    written = flatten(traced_as(loop, with_short_trips(loop), loop.invars))
    (shorter,) = (e for e in written.eqns if e.primitive.name == "scan")
    inside = [e.primitive.name for e in flatten(shorter.params["jaxpr"]).eqns]
    assert inside.count("dot_general") == 3 and not {"split", "slice"} & {*inside}
    assert {"split", "slice"} & {e.primitive.name for e in written.eqns}


GRADIENTS = [
    pytest.param(f"gradient of {name}", marks=[pytest.mark.deep] if n % 3 else []) for n, name in enumerate(LOOPS)
]
"""Most of them are deep."""


def observed(emissions, first, observations, rows):
    """What a trip looks up and sorts is of its own slices only."""

    def trip(alpha, row):
        seen, other = row
        alpha = jnp.tanh(alpha[:, ::-1] + emissions[seen]) + jnp.sort(other, -1)
        return alpha, alpha.sum(-1)

    return jax.lax.scan(trip, first, (observations, rows), reverse=True)


def test_what_no_kernel_computes_is_computed_for_all_trips_before():
    observations = jnp.asarray(np.random.default_rng(0).integers(0, 9, size=(7, 3)))
    args = normal(0, 9, 5), normal(1, 3, 5), observations, normal(2, 7, 3, 5)
    jaxpr, (loop,) = scans_of(observed, *args)
    found = AsKernel(DEVICE)(loop)
    assert found is not None
    written = flatten(traced_as(loop, found, loop.invars))
    assert {"gather", "sort"} <= {e.primitive.name for e in written.eqns} and len(loops_as_kernels(written)) == 1
    got = run(jaxpr, *args, ways={id(loop): lambda *values: run(written, *values)})
    for x, y in zip(got, observed(*args), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_what_would_take_much_memory_stays_in_the_loop():
    def function(table, first, rows):
        def trip(state, row):
            return state + jnp.sort(row[:, None] * table, 1).max(), state

        return jax.lax.scan(trip, first, rows)

    _, (loop,) = scans_of(function, normal(0, 300, 300), jnp.float32(0.0), normal(1, 6, 300))
    assert AsKernel(DEVICE)(loop) is None


@pytest.mark.parametrize("name", [*LOOPS, *GRADIENTS])
def test_a_rule_gives_programs_that_compute_the_same(name):
    function, args = gradients(name.rpartition(" ")[2]) if name.startswith("gradient") else LOOPS[name]
    jaxpr, loops = scans_of(function, *args)
    rule, count = AsKernel(DEVICE), 0
    ways = {}
    for eqn in loops:
        found = rule(eqn)
        if found is not None:
            written = flatten(traced_as(eqn, found, eqn.invars))
            count += len(loops_as_kernels(written))
            ways[id(eqn)] = lambda *values, w=written: run(w, *values)
    assert count == len(loops)
    for got, want in zip(run(jaxpr, *args, ways=ways), jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_one_loop_without_a_rule_keeps_the_program():
    jaxpr, _ = scans_of(recurrent_network, *LOOPS["recurrent_network"][1])
    assert with_loops(jaxpr, lambda eqn: None) is None
