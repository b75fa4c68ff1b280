"""Maps that XLA stores, as several kernels would compute them again, and maps that are stored beside what they are reduced to."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse import device
from pallasfuse.ir.axes import volume
from pallasfuse.ir.expr import Apply, postorder
from pallasfuse.ir.plain_work import Ordering
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import kernels_on, price_xla
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, Opaque
from pallasfuse.price.xla_habits import windows_operations

H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
X = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
BYTES = X.size * 4


def kernels(function, *arguments):
    return kernels_on(H100, convert(jax.make_jaxpr(function)(*arguments)).program)


def stored(function, *arguments):
    """The bytes of maps in memory."""
    maps = (
        n for k in kernels(function, *arguments) if isinstance(k, LoopFusion) for n in k.roots if not n.is_reduction
    )
    return sum(LoopFusion.bytes_of(n) for n in maps)


def both_ways(function):
    def sums(*x):
        y = function(*x)
        return y.sum(0), y.sum(1)

    return sums


@pytest.mark.parametrize(
    ("function", "dear"),
    [
        (jnp.exp, False),
        (lambda x: jnp.exp(jnp.exp(x)), True),
        (lambda x: jnp.sqrt(jnp.sqrt(x)), False),
        (lambda x: jnp.sqrt(jnp.sqrt(jnp.sqrt(x))), True),
        (jnp.log, True),
        (jnp.sin, True),
        (lambda x: 1 / (x + 2), False),
    ],
    ids=["exp", "exp of exp", "fourth root", "eighth root", "log", "sin", "division"],
)
def test_dear_maps_of_two_readers_are_stored(function, dear):
    """As XLA does that compiles them for an H100."""
    assert (stored(both_ways(function), X) > 0) == dear
    assert stored(lambda x: function(x).sum(0), X) == 0  # of one reader, none is


@pytest.mark.parametrize(("function", "dear"), [(jnp.exp, False), (jnp.log, False), (jnp.tanh, True)])
def test_operations_that_a_device_has_for_bfloat16_are_cheap(function, dear):
    half = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    assert (stored(both_ways(lambda x: function(function(x))), half) > BYTES / 4) == dear


def test_sums_of_many_tensors_are_stored_rather_than_read_twice():
    assert stored(both_ways(lambda a, b, c: a + b + c), X, X, X) == 0
    assert stored(both_ways(lambda a, b, c, d: a + b + c + d), X, X, X, X) == BYTES


def test_readers_that_move_much_hide_what_they_compute():
    def little(x):
        e = jnp.log(x)
        return e.sum(0), e.sum(1)

    def much(x, y):
        e = jnp.log(x)
        return e * y, (e + y)[None]

    assert stored(little, X) == BYTES and stored(much, X, X) == 2 * BYTES


def test_a_stencil_of_something_dear_is_computed_once():
    def blurred(function):
        def stencil(x):
            y = function(x)
            return y[2:] + y[1:-1] + y[:-2]

        return stencil

    assert len(kernels(blurred(lambda x: x * 2), X)) == 1
    assert len(kernels(blurred(lambda x: jnp.sin(jnp.log(x))), X)) == 2


def test_slices_that_differ_are_not_the_same():
    """Each of them is read by itself, though all are as large and of one tensor."""
    (one,) = kernels(lambda x: x[1:] + x[:-1], X)
    assert isinstance(one, LoopFusion)
    (total,) = (n for n in postorder(one.bodies[0]) if isinstance(n, Apply) and n.op == "add")
    assert total.args[0] != total.args[1]


@pytest.mark.parametrize("axis", [0, 1, None])
def test_a_map_is_stored_by_the_kernel_that_reduces_it(axis):
    def function(x):
        y = x + 1
        return y, (y * y).sum(axis)

    (one,) = kernels(function, X)[:1]
    assert one.read_bytes == BYTES and one.written_bytes >= BYTES and len(one.roots) == 2


def test_but_not_where_another_kernel_is_between():
    def function(x):
        y = x + 1
        return y, (y - (y.sum(0) ** 2)[None]).max(0)

    assert sum(k.read_bytes >= BYTES for k in kernels(function, X)) == 2


def test_the_terms_of_a_product_share_a_kernel_with_nothing():
    found = kernels(lambda h, w: h @ w, *[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 4096), (4096, 1024))])
    assert len(found) == 2


def test_a_sum_of_products_of_maps_is_no_library_s():
    """XLA calls a library for what is written as a product, and only for that."""

    def distances(x, y):
        return jnp.sum((x[:, None, :] - y[None]) * (x[:, None, :] + y[None]), -1)

    points = jax.ShapeDtypeStruct((2048, 8), jnp.float32)
    assert not any(isinstance(k, LibraryProduct) for k in kernels(distances, points, points))


@pytest.mark.parametrize(
    ("operand", "inside"),
    [
        (lambda x, y, v: jnp.exp(x), True),
        (lambda x, y, v: x * v[:, None], True),
        (lambda x, y, v: x * jnp.exp(v)[:, None], False),
        (lambda x, y, v: x * y, False),
    ],
    ids=["one tensor", "and a vector", "that is computed", "two tensors"],
)
def test_what_is_computed_inside_of_a_product(operand, inside):
    x, w, v = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 4096), (4096, 64), (4096,)))
    found = kernels(lambda x, y, v, w: operand(x, y, v) @ w, x, x, v, w)
    assert (len(found) == 1) == inside


def test_gathers_are_computed_where_they_are_read_and_read_no_more_than_there_is():
    rows, places = jax.ShapeDtypeStruct((1024, 256), jnp.float32), jax.ShapeDtypeStruct((100_000,), jnp.int32)
    (one,) = kernels(lambda x, i: (x[i] ** 2).sum(-1), rows, places)
    assert one.read_bytes < 1024 * 256 * 4 + 2 * 100_000 * 4
    (pieces,) = one.pieces
    assert (pieces.number, pieces.bytes, pieces.source_bytes) == (100_000, 1024.0, 1024 * 1024.0)


def test_updates_compute_what_they_store():
    table, places = jax.ShapeDtypeStruct((1024, 64), jnp.float32), jax.ShapeDtypeStruct((100_000,), jnp.int32)
    zeros, update = kernels(lambda x, i, j: jax.ops.segment_sum(x[i] * 2, j, 1024), table, places, places)[::-1]
    assert zeros.written_bytes == update.written_bytes == 1024 * 64 * 4
    assert update.read_bytes < 1024 * 64 * 4 + 4 * 100_000 * 4
    assert update.pieces.number == 100_000 and update.computes


def test_positions_that_follow_each_other_are_no_pieces():
    rows = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    (one,) = kernels(lambda x: x[jnp.arange(4096) % 1024] * 2, rows)
    assert not one.pieces


def test_what_a_gather_s_positions_are_computed_from_is_paid_for():
    keys = jax.ShapeDtypeStruct((4096,), jnp.float32)
    found = kernels(lambda x, k: x[jnp.argsort(k)], jax.ShapeDtypeStruct((4096, 8), jnp.float32), keys)
    assert any(isinstance(k, Opaque) and isinstance(k.work, Ordering) for k in found)


@pytest.mark.parametrize(("window", "stride", "number"), [((3, 3), (1, 1), 2), ((2, 2), (2, 2), 1)])
def test_windows_are_reduced_where_they_are_read(window, stride, number):
    """What overlapping ones are taken from is stored before."""

    def pooled(x):
        return lax.reduce_window(jnp.exp(x), 0.0, lax.add, window, stride, "VALID") * 2

    found = kernels(pooled, X)
    assert len(found) == number and all(k.read_bytes == BYTES for k in found)
    assert found[-1].window_operations == windows_operations(volume(found[-1].roots[0].axes), window[0] * window[1])


def test_only_what_windows_are_taken_from_is_read_in_windows():
    def pooled(x, y):
        return lax.reduce_window(x, 0.0, lax.add, (3, 3), (1, 1), "SAME") * y

    (one,) = kernels(pooled, X, X)
    assert one.read_bytes == 2 * BYTES and one.window_operations == windows_operations(X.size, 9)


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda x: (jnp.exp(x) + 1) * (jnp.exp(x) - 1), 1),
        (lambda a, b: jnp.where(jnp.sqrt(a - b) > a, -a - jnp.sqrt(a - b), -a + jnp.sqrt(a - b)), 2),
    ],
    ids=["exp", "the nearer place"],
)
def test_what_a_map_reads_in_two_ways_is_counted_once(function, number):
    """XLA stores none of these, compiled for an H100."""
    assert stored(both_ways(function), *[X] * number) == 0


@pytest.mark.parametrize(("terms", "inside"), [(3, True), (64, False)])
def test_a_product_of_few_terms_is_computed_where_it_is_read(terms, inside):
    """In batches of vectors, as XLA does that compiles it for an H100; nothing else but the last minima is stored."""
    matrices, vectors = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((20000, 30, terms), (20000, terms)))
    found = kernels(lambda a, v: jnp.exp(jnp.einsum("psc,pc->ps", a, v)).min(-1), matrices, vectors)
    assert (len(found) == 1) == inside


def of_all_but_the_last(x):
    return jax.nn.logsumexp(x[:, :-1], axis=-1)


def test_what_is_written_twice_is_computed_once():
    """Also what is made of an operation without a nest, whose axes are its own each time."""

    def twice(x, y):
        return of_all_but_the_last(x) - of_all_but_the_last(y), of_all_but_the_last(x) + of_all_but_the_last(y)

    assert len(kernels(twice, X, X)) == 1 + len(kernels(lambda x, y: twice(x, y)[0], X, X))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: of_all_but_the_last(x[1:]),
        lambda x: jax.nn.logsumexp(x[:, 1:], axis=-1),
    ],
    ids=["fewer rows", "other columns"],
)
def test_but_not_what_differs(other):
    def passes(function):
        return sum(isinstance(k, LoopFusion) and k.read_bytes >= BYTES / 2 for k in kernels(function, X))

    assert passes(lambda x: (of_all_but_the_last(x), other(x))) == 2 * passes(of_all_but_the_last) > 0


def test_nor_what_stands_behind_barriers():
    def twice(apart):
        return lambda x: jnp.tanh(apart(x)).sum(0) * (1 + jnp.tanh(apart(x)).sum(0))

    def sums(apart):
        return sum(isinstance(k, LoopFusion) for k in kernels(twice(apart), X))

    assert sums(lax.optimization_barrier) == sums(lambda x: x) + 1


@pytest.mark.parametrize("target", [H100, device.assumed("cpu")], ids=["gpu", "cpu"])
def test_elements_of_what_is_written_twice_are_taken_from_one(target):
    """What is looked up in the second is looked up in the first."""

    def taken(sums, i):
        return sums.at[i].get(mode="promise_in_bounds")

    def once(x, i, j):
        sums = jnp.cumsum(x, 0)
        return taken(sums, i) * 2 + taken(sums, j) * 3

    def twice(x, i, j):
        return taken(jnp.cumsum(x, 0), i) * 2 + taken(jnp.cumsum(x, 0), j) * 3

    places = jax.ShapeDtypeStruct((8192,), jnp.int32)
    arguments = jax.ShapeDtypeStruct((4096, 512), jnp.float32), places, places
    one, other = (price_xla(convert(jax.make_jaxpr(f)(*arguments)).program, target).us for f in (once, twice))
    assert one == other


def test_what_is_made_of_a_stored_map_reads_it():
    """The logarithm is stored, as two read it; a cheap map of it, which two read as well, is not."""

    def function(x):
        y = jnp.log(x)
        z = y + 1
        return y.sum(0), y.sum(1), z.max(0), z.max(1)

    assert stored(function, X) == BYTES


def test_a_large_product_of_few_terms_is_a_library_s():
    matrix, vector = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((600000, 24), (24,)))
    found = kernels(lambda a, v: jnp.exp(a @ v).sum(), matrix, vector)
    assert max(k.written_bytes for k in found) == 600000 * 4


def test_a_sum_of_products_is_no_library_s_however_large():
    """A large product of a matrix and a vector is, and reads a matrix that is stored; terms of a sum are computed inside of it."""

    def potentials(multiplied):
        return lambda x, v: multiplied(1 / (1 + x * x), v)

    vector = jax.ShapeDtypeStruct((8192,), jnp.float32)
    assert stored(potentials(lambda x, v: x @ v), X, vector) == BYTES
    assert stored(potentials(lambda x, v: (x * v).sum(-1)), X, vector) == 0
