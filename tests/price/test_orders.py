"""The price of another order of dimensions, which a kernel asks of what XLA makes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse import device
from pallasfuse.ir.loop_program import External, Nest
from pallasfuse.ir.plain_work import Convolution
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import kernels_on, price_xla
from pallasfuse.price.xla_forms import LibraryProduct
from pallasfuse.price.xla_orders import turned_bytes, turned_for_convolutions, written_as_wanted

H200 = device.find("NVIDIA H200", "gpu")


def best(q, d, order):
    """The largest similarity of every word of a query [queries, words] in a document, by a product in another order."""
    s = jnp.transpose(jnp.einsum("mnj,klj->mnkl", d, q), order)
    return jnp.where(s > 0, s, -9.0).max(order.index(1))


def program(order):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32, 128), (128, 220, 128))]
    found = convert(jax.make_jaxpr(lambda q, d: best(q, d, order))(*shapes)).program
    (result,) = found.outputs
    (largest,) = [n.name for n in found.nests if isinstance(n, Nest) and n.is_reduction and len(n.axes) == 3]
    return found, largest, result


@pytest.mark.parametrize("order", [(2, 0, 3, 1), (0, 1, 2, 3), (0, 2, 3, 1)])
def test_a_reduced_product_is_turned_for_the_order_of_a_kernel(order):
    """Compiled for an H100, all three are: XLA reduces the last axis, which is not the last one of what the library makes."""
    turned, largest, _ = program(order)
    assert list(turned_bytes(turned, {largest})) == [2.0 * 128 * 220 * 64 * 32 * 4]
    without = price_xla(turned, H200).us
    assert price_xla(turned, H200, read=frozenset({largest})).us > without + 50


def test_columns_then_rows_are_as_a_library_makes_them():
    kept, largest, _ = program((2, 3, 0, 1))
    assert list(turned_bytes(kept, {largest})) == []


def test_the_axes_of_several_reductions_come_last_one_after_the_other():
    """The score of each query and document: the best places of all words, summed."""

    def score(q, d):
        return jnp.transpose(jnp.einsum("mnj,klj->mnkl", d, q), (2, 0, 3, 1)).max(3).sum(2)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32, 128), (128, 220, 128))]
    found = convert(jax.make_jaxpr(score)(*shapes)).program
    assert list(turned_bytes(found, set(found.outputs))) == [2.0 * 128 * 220 * 64 * 32 * 4]


def test_what_no_reduction_stands_between_is_turned_as_it_is_stored():
    def heads(x, w):
        return jnp.transpose(jnp.einsum("bld,dhk->blhk", x, w), (0, 2, 1, 3)) * 2

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 512, 256), (256, 8, 64))]
    found = convert(jax.make_jaxpr(heads)(*shapes)).program
    assert list(turned_bytes(found, set(found.outputs))) == []


def test_diamonds_are_walked_once():
    def residual(q, d):
        s = jnp.transpose(jnp.einsum("mnj,klj->mnkl", d, q), (2, 0, 3, 1))
        for _ in range(60):
            s = s + 0.1 * jnp.sin(s)
        return s.max(3)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 8, 16), (6, 10, 16))]
    found = convert(jax.make_jaxpr(residual)(*shapes)).program
    assert list(turned_bytes(found, set(found.outputs))) == [2.0 * 4 * 8 * 6 * 10 * 4]


ORDERS = {"NCHW": (8, 16, 12, 12), "NHWC": (8, 12, 12, 16), "NCDHW": (8, 16, 6, 6, 6), "NDHWC": (8, 6, 6, 6, 16)}


def convolved(order, *, between=lambda y: y, gradient=False):
    """Two convolutions, something between them, and the names of what is made of the first and what the second reads."""
    space = order[2:] if order[1] == "C" else order[1:-1]
    weights = jax.ShapeDtypeStruct((3,) * len(space) + (16, 16), jnp.bfloat16)

    def convolve(x, w):
        numbers = (order, f"{space}IO", order)
        return lax.conv_general_dilated(x, w, (1,) * len(space), "SAME", dimension_numbers=numbers)

    def both(x, w, v):
        return convolve(jnp.tanh(between(jnp.exp(convolve(x, w)))), v)

    def run(x, w, v):
        return jax.grad(lambda *a: both(*a).astype(jnp.float32).sum(), 2)(x, w, v) if gradient else both(x, w, v)

    arguments = jax.ShapeDtypeStruct(ORDERS[order], jnp.bfloat16), weights, weights
    found = convert(jax.make_jaxpr(run)(*arguments)).program
    made = [next(n.name for n in found.nests if op in str(getattr(n, "body", ""))) for op in ("exp", "tanh")]
    return found, *made


@pytest.mark.parametrize(("order", "turned"), [("NCHW", True), ("NHWC", False), ("NCDHW", False), ("NDHWC", True)])
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "weights' gradient"])
def test_what_a_kernel_has_between_convolutions_is_turned(order, turned, gradient):
    """Compiled for an H100, convolutions have channels last, or first where windows have three dimensions."""
    found, first, second = convolved(order, gradient=gradient)
    kept = turned_for_convolutions(found, {second}, {first})
    assert (kept.read, kept.made) == ((frozenset({first}), frozenset({second})) if turned else (frozenset(),) * 2)


def joined(y):
    return jnp.concatenate([jnp.sin(y[:, :8]), y[:, 8:]], 1)


def picked(y):
    """Has every second picture, whose numbers nobody knows before."""
    return jnp.concatenate([y, y], 0)[jnp.arange(8) * 2]


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("between", [joined, picked])
def test_results_of_convolutions_as_one_array_and_parts_of_them_are_turned(order, between):
    found, first, second = convolved(order, between=between)
    moved = [n.name for n in found.nests if isinstance(n, External) and n.form in ("join", "selection")]
    assert moved
    kept = turned_for_convolutions(found, {first}, moved)
    assert kept.made == ({first} if order == "NCHW" else set())
    kept = turned_for_convolutions(found, {second}, moved)
    assert kept.read == (set(moved) if order == "NCHW" else set())


def test_positions_have_no_order_of_convolutions():
    """An array that chooses is no part of what is chosen from."""

    def function(x, w, table):
        at = jnp.argmax(convolve(x, w), 1)[:, 0, 0]
        return table[at]

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW"))

    shapes = [((8, 16, 12, 12), jnp.bfloat16), ((3, 3, 16, 16), jnp.bfloat16), ((64, 256), jnp.float32)]
    found = convert(jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(*s) for s in shapes])).program
    chosen = [n.name for n in found.nests if isinstance(n, External) and n.form == "selection"]
    assert chosen and turned_for_convolutions(found, (), chosen).read == frozenset()


def test_what_is_made_of_sums_is_in_any_order():
    found, first, _ = convolved("NCHW", between=lambda y: y * y.mean((2, 3), keepdims=True))
    means = {n.name for n in found.nests if isinstance(n, Nest) and n.is_reduction}
    assert turned_for_convolutions(found, (), means).read == frozenset()
    assert turned_for_convolutions(found, (), {first}).read == {first}


@pytest.mark.parametrize(
    "between",
    [lambda y: jnp.einsum("nchw,wv->nchv", y, jnp.ones((12, 12), y.dtype)), lambda y: jnp.sort(y, -1)],
    ids=["product", "sort"],
)
def test_what_a_library_makes_in_between_is_in_an_order_of_its_own(between):
    found, first, second = convolved("NCHW", between=between)
    assert turned_for_convolutions(found, (), {second}).read == frozenset()
    assert turned_for_convolutions(found, {first}, ()).made == frozenset()


def test_one_channel_is_first_and_last():
    def run(x, w):
        numbers = ("NCHW", "HWIO", "NCHW")
        return jnp.exp(lax.conv_general_dilated(jnp.exp(x), w, (1, 1), "SAME", dimension_numbers=numbers))

    shapes = (32, 1, 64, 64), (3, 3, 1, 16)
    found = convert(jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes])).program
    (convolution,) = (n for n in found.nests if isinstance(n, External) and isinstance(n.work, Convolution))
    assert convolution.work.turned == (False, False, True)


def test_what_a_kernel_reads_of_another_kernel_is_as_it_was_written():
    found, first, second = convolved("NCHW")
    assert turned_for_convolutions(found, {first}, {first, second}).read == frozenset()


def gathered(*, twice=False):
    """Scores of queries with keys in pages that a table finds. twice: something else is made of the keys, too."""

    def function(q, pages, table):
        keys = pages[table].reshape(4, 512, 8, 64)
        scores = jnp.einsum("bhgd,bkhd->bhgk", q, keys)
        return (scores, jnp.sum(keys, 1)) if twice else scores

    shapes = (4, 8, 4, 64), (256, 64, 8, 64)
    arguments = *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes), jax.ShapeDtypeStruct((4, 8), jnp.int32)
    return convert(jax.make_jaxpr(function)(*arguments)).program


def products(own):
    return [k for k in kernels_on(H200, own) if isinstance(k, LibraryProduct)]


def test_what_is_looked_up_is_written_in_the_order_that_its_product_reads():
    """The heads of keys lie between their positions and features; XLA writes what it gathers the other way round."""
    (product,) = products(gathered())
    assert product.copies == ()

    def given(q, keys):
        return jnp.einsum("bhgd,bkhd->bhgk", q, keys)

    arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4, 8, 4, 64), (4, 512, 8, 64))]
    (product,) = products(convert(jax.make_jaxpr(given)(*arguments)).program)
    assert [c.tensor for c in product.copies] == ["keys"]


def test_what_is_looked_up_for_two_has_one_order():
    own = gathered(twice=True)
    assert written_as_wanted(own)
    assert [len(p.copies) for p in products(own)] == [1]
