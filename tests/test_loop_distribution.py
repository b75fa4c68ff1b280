"""What need not be in a loop: parts of slices, what constants alone give, parts of products, and sums over the trips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasfuse import _compat
from pallasfuse.decompositions.accumulators import accumulators_apart
from pallasfuse.decompositions.writing import traced_as
from pallasfuse.jaxpr_frontend import flatten
from pallasfuse.loop_calls import loops_as_kernels
from pallasfuse.loop_distribution import distributed
from pallasfuse.recurrences import AsKernel, with_loops
from tests.loops_of_programs import LOOPS, gated_unit, normal, recurrent_network
from tests.running_loops import DEVICE, run, scans_of, with_kernels


def loss_of(function):
    return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(*args)) if x.dtype == jnp.float32)


def gradients(name):
    function, args = LOOPS[name]
    floats = tuple(n for n, a in enumerate(args) if a.dtype == jnp.float32)
    return jax.grad(loss_of(function), argnums=floats), args


WITH_SUMS = (
    pytest.param("forward_algorithm", marks=pytest.mark.deep),
    "recurrent_network",
    pytest.param("gated_unit", marks=pytest.mark.deep),
    "best_paths",
)


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


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("name", LOOPS)
def test_distributed_loops_compute_the_same(name):
    function, args = LOOPS[name]
    jaxpr, (loop,) = scans_of(function, *args)
    for got, want in zip(
        run(jaxpr, *args, ways={id(loop): distributed(loop)}), jax.tree.leaves(function(*args)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_gates_of_one_product_are_products_of_parts_and_parts_of_rows_are_made_before():
    _, (loop,) = scans_of(gated_unit, *LOOPS["gated_unit"][1])
    written = flatten(traced_as(loop, distributed(loop), loop.invars))
    (shorter,) = (e for e in written.eqns if e.primitive.name == "scan")
    inside = [e.primitive.name for e in flatten(shorter.params["jaxpr"]).eqns]
    assert inside.count("dot_general") == 3 and not {"split", "slice"} & {*inside}
    assert {"split", "slice"} & {e.primitive.name for e in written.eqns}


FEW = [pytest.param(name, marks=[pytest.mark.deep] if n % 3 != 1 else []) for n, name in enumerate(LOOPS)]
GRADIENTS = [
    pytest.param(f"gradient of {name}", marks=[pytest.mark.deep] if n % 12 else [])
    for n, (name, (_, args)) in enumerate(LOOPS.items())
    if jnp.issubdtype(args[0].dtype, jnp.floating)
]
"""Most of them are deep; `test_recurrences` has other loops."""


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


def test_a_row_by_the_number_of_a_trip_is_taken_before_all_trips():
    """It is no element at a place that a trip computes, which is looked for among all."""

    def function(table, first, numbers):
        return jax.lax.scan(lambda state, n: (jnp.tanh(state + table[n]), state.sum()), first, numbers)

    args = normal(0, 9, 5), normal(1, 5), jnp.asarray([3, 0, 8, 8, 1, 2])
    jaxpr, (loop,) = scans_of(function, *args)
    written = flatten(traced_as(loop, AsKernel(DEVICE)(loop), loop.invars))
    (kernel,) = loops_as_kernels(written)
    assert "gather" in {e.primitive.name for e in written.eqns}
    assert "dynamic_slice" in {e.primitive.name for e in flatten(loop.params["jaxpr"]).eqns}
    assert [t.name for t in kernel.kernel.inputs if t.axes and t.axes[0].extent == 9] == []
    got = run(jaxpr, *args, ways={id(loop): lambda *values: run(written, *values)})
    for x, y in zip(got, function(*args), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def floored(place):
    low = jnp.floor(place).astype(jnp.int32)
    return low, place - low


def floored_twice(place):
    return jnp.floor(place).astype(jnp.int32), place - jnp.floor(place)


def parted(place):
    return place.astype(jnp.int32), place % 1.0


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("apart", [floored, floored_twice, parted])
@pytest.mark.parametrize("differs", [True, False])
def test_trips_decide_as_what_is_computed_before_them_all(apart, differs):
    """What lies between two bins of each row, by the distance from them. The first place is 1.0 by two roundings, and less by one,
    as compilers have it that multiply and add at once."""

    def between(rows, zooms, zoom):
        def trip(total, inputs):
            row, own = inputs
            low, share = apart(jnp.arange(10.0, 30.0) * (own if differs else zoom) - 6.0)
            return total * 0.9 + row[low] * (1 - share) + row[low + 1] * share, None

        return jax.lax.scan(trip, jnp.zeros(20), (rows, zooms))[0]

    args = normal(0, 6, 41), jnp.full(6, 0.7), jnp.float32(0.7)
    jaxpr, (loop,) = scans_of(between, *args)
    written = flatten(traced_as(loop, AsKernel(DEVICE)(loop), loop.invars))
    assert len(loops_as_kernels(written)) == 1
    got = run(jaxpr, *args, ways={id(loop): lambda *values: run(written, *values)})
    wanted = np.zeros(20)  # by XLA's own loop, places and distances need not belong together either
    for row in np.asarray(args[0]):
        wanted = wanted * 0.9 + np.interp(np.arange(10.0, 30.0) * 0.7 - 6.0, np.arange(41), row)
    np.testing.assert_allclose(got[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "fits"), [(4, True), (300, False)])
def test_what_is_decided_on_must_fit(size, fits):
    """Few positions are looked up of many, on all of which trips decide."""

    def function(first, rows):
        def trip(state, row):
            place = jnp.exp(row[:, None] * row[None, :])
            found = row[jnp.floor(place).astype(jnp.int32)[0, :2] % 3]
            return state + jnp.sum(place - jnp.floor(place)) + found.sum(), state

        return jax.lax.scan(trip, first, rows)

    _, (loop,) = scans_of(function, jnp.float32(0.0), normal(1, 6, size))
    assert (distributed(loop) is not None) == fits


def solved(w, h, x):
    """A few steps of a solver in each trip, and a short sum of what they were."""

    def trip(h, row):
        h, steps = jax.lax.scan(
            lambda h, k: (h + k * (jnp.tanh(h @ w + row) - h), h), h, jnp.asarray([0.3, 0.2, 0.1]), reverse=True
        )
        return jax.lax.fori_loop(0, 2, lambda _, h: 0.5 * h + row, h), steps.sum(0)

    return jax.lax.scan(trip, h, x)


def test_loops_of_a_few_steps_inside_of_a_trip_are_written_out():
    args = normal(0, 5, 5, scale=0.3), normal(1, 3, 5), normal(2, 6, 3, 5)
    jaxpr, (loop,) = scans_of(solved, *args)
    written = flatten(traced_as(loop, AsKernel(DEVICE)(loop), loop.invars))
    assert len(loops_as_kernels(written)) == 1
    got = run(jaxpr, *args, ways={id(loop): lambda *values: run(written, *values)})
    for x, y in zip(got, solved(*args), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_what_would_take_much_memory_stays_in_the_loop():
    def function(table, first, rows):
        def trip(state, row):
            return state + jnp.sort(row[:, None] * table, 1).max(), state

        return jax.lax.scan(trip, first, rows)

    _, (loop,) = scans_of(function, normal(0, 300, 300), jnp.float32(0.0), normal(1, 6, 300))
    assert AsKernel(DEVICE)(loop) is None


@pytest.mark.parametrize(("rows", "apart"), [(512, False), (8, True)])
def test_rows_of_a_table_are_not_taken_for_all_trips_where_these_are_much_memory(rows, apart):
    """What a trip adds to is in memory once, however many trips there are: the rows of all would be there at the same time."""

    def function(table, total, places):
        return jax.lax.scan(lambda total, at: (total + table[at], None), total, places)

    places = jnp.zeros((256, rows), jnp.int32)
    _, (loop,) = scans_of(function, jnp.zeros((4096, 256)), jnp.zeros((rows, 256)), places)
    assert (AsKernel(DEVICE)(loop) is not None) == apart


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_as_much_memory_as_a_loop_has_may_be_taken_before_it():
    """Its rows are 512 MiB, and so is what they name in a table."""

    def function(table, total, rows):
        def trip(total, row):
            places, values = row
            return total + (table[places] * values).sum(0), None

        return jax.lax.scan(trip, total, rows)

    rows = struct(256, 2048, dtype=jnp.int32), struct(256, 2048, 256)
    _, (loop,) = scans_of(function, struct(4096, 256), struct(256), rows)
    assert "f32[256,2048,256] = gather" in str(jax.make_jaxpr(distributed(loop))(*(v.aval for v in loop.invars)))


def test_what_needs_much_memory_is_not_taken_before_by_way_of_another():
    def function(table, total, rows):
        def trip(total, row):
            places, few = row
            return total + table[places][few], None

        return jax.lax.scan(trip, total, rows)

    rows = struct(256, 2048, dtype=jnp.int32), struct(256, 4, dtype=jnp.int32)
    _, (loop,) = scans_of(function, struct(4096, 256), struct(4, 256), rows)
    assert "f32[256,4,256] = gather" not in str(jax.make_jaxpr(distributed(loop))(*(v.aval for v in loop.invars)))


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("name", [*FEW, *GRADIENTS])
def test_a_rule_gives_programs_that_compute_the_same(name):
    function, args = gradients(name.rpartition(" ")[2]) if name.startswith("gradient") else LOOPS[name]
    jaxpr, loops = scans_of(function, *args)
    results, count = with_kernels(jaxpr, loops, *args)
    assert count == len(loops)
    for got, want in zip(results, jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_one_loop_without_a_rule_keeps_the_program():
    jaxpr, _ = scans_of(recurrent_network, *LOOPS["recurrent_network"][1])
    assert with_loops(jaxpr, lambda eqn: None) is None


def test_branches_and_loops_that_may_not_end_stay_in_their_trips():
    def halve(n):
        return jax.lax.while_loop(lambda t: t[0] != 1, lambda t: (t[0] // 2, t[1] + 1), (n, 0))[1]

    def function(x, numbers):
        def trip(state, n):
            return state * 0.5 + jax.lax.cond(n > 0, halve, lambda n: 0, n).astype(jnp.float32), state

        return jax.lax.scan(trip, x, numbers)

    _, (loop,) = scans_of(function, jnp.ones(5), jnp.asarray([8, 3, 0, 5, 1, 2]))
    assert AsKernel(DEVICE)(loop) is None
    names = {e.primitive.name for e in flatten(traced_as(loop, distributed(loop), loop.invars)).eqns}
    assert not {"while", "cond", "select_n"} & names


@pytest.mark.sampled(2, cover=("name",))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["sum", "product"])
def test_sums_over_trips_are_added_up_in_a_wide_type(name, dtype):
    def function(state, total, rows):
        def trip(carry, row):
            state, total = carry
            added = (row + state * 0).sum(0) if name == "sum" else (row.T @ row)[0]
            return (state * 0.5, total + added.astype(dtype)), None

        return jax.lax.scan(trip, (state, total), rows)[0]

    args = (
        jnp.ones((3, 5), dtype),
        jnp.full(5, -60000, dtype),
        jnp.full((6, 3, 5), 5000 if name == "sum" else 70, dtype),
    )
    jaxpr, loops = scans_of(function, *args)
    (_, total), count = with_kernels(jaxpr, loops, *args)
    assert count == 1 and total.dtype == dtype
    wide = -60000.0 + 6 * (15000.0 if name == "sum" else 3 * 4900.0)
    np.testing.assert_allclose(np.asarray(total, np.float64), wide, atol=60000 * float(jnp.finfo(dtype).eps))
