"""What XLA copies at the boundary of a loop's body, beside its kernels: counted in what it compiles for an H100."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse import device
from pallasfuse.ir.plain_work import Trips
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.jaxpr_frontend.lookups import element_by_number
from pallasfuse.price.xla import XlaPrices, kernels_on
from pallasfuse.price.xla_forms import Opaque
from pallasfuse.price.xla_trips import copied_for_libraries, copied_in_a_trip, filled_before, updated

CPU = device.assumed("cpu")
H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
TRIPS, N = 8, 1024
ONE, EACH = N * N * 2, jax.ShapeDtypeStruct((TRIPS, N, N), jnp.bfloat16)
X = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)


def loop(step):
    """The body of a scan and its boundary."""
    program = convert(jax.make_jaxpr(lambda x, w: lax.scan(step, x, w))(X, EACH)).program
    work, *_ = (n.work for n in program.nests if isinstance(getattr(n, "work", None), Trips))
    return work.body.value, work.boundary.value


def copies(step, on=H100):
    """The number of values that are copied in a trip."""
    body, boundary = loop(step)
    price = copied_in_a_trip(body, kernels_on(on, body, owned=updated(body, boundary, on)), boundary, on)
    moved = sum(t.amount for t in price.terms if t.unit == "B")
    return moved / (2 * ONE)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda c, w: (jnp.tanh(c * w), None), 0),
        (lambda c, w: (jnp.tanh(c @ w), None), 2),
        (lambda c, w: (c, w @ c), 2),
        (lambda c, w: (jnp.tanh(c * w), jnp.sin(c * w)), 1),
        (lambda c, w: ((y := jnp.tanh(c * w)), y), 1),
        (lambda c, w: (jnp.tanh(c * w), c), 1),
        (lambda c, w: (lax.scan(lambda d, _: (jnp.tanh(d), None), c, length=2)[0], None), 0),
    ],
    ids=["maps", "slice of a product", "product stacked", "two maps", "carried and stacked", "old value stacked", "a loop inside"],
)  # fmt: skip
def test_what_is_copied(step, expected):
    assert copies(step) == expected


def test_a_carried_value_that_its_maker_reads_elsewhere_is_copied():
    assert copies(lambda c, w: (c @ c, None)) == 1
    assert copies(lambda c, w: (jnp.tanh(c.T + w), None)) == 1


def written(c, w, at=0):
    return lax.dynamic_update_slice(c, w[:1], (at, 0))


@pytest.mark.parametrize(
    ("step", "in_place"),
    [
        (lambda c, w: (written(c, w), None), True),
        (lambda c, w: (written(c, w), c.sum()), True),
        (lambda c, w: (c.at[w[0, :4].astype(int)].add(w[:4]), None), True),
        (lambda c, w: (written(written(c, w), w + 1, 5), None), True),
        (lambda c, w: (lax.dynamic_update_slice(c[:, None], w[:4, None], (3, 0, 0))[:, 0], None), True),
        (lambda c, w: (written(c, w) + 1, None), False),
        (lambda c, w: (written(c + 1, w), None), False),
        (lambda c, w: (c + 1, written(c, w)), False),
    ],
    ids=["a row", "all is read before", "rows added to", "two rows", "other shapes", "a map of it", "a map before", "not carried"],
)  # fmt: skip
def test_updates_are_written_over_what_a_loop_carries(step, in_place):
    body, boundary = loop(step)
    ((old, _),) = boundary.carried
    assert updated(body, boundary, H100) == ({old} if in_place else set())
    kernels = [k for k in kernels_on(H100, body, owned=updated(body, boundary, H100)) if isinstance(k, Opaque)]
    if in_place:
        assert kernels and all(k.read_bytes + k.written_bytes < ONE for k in kernels)
        assert copies(step) == 0


@pytest.mark.parametrize(
    ("step", "in_place"),
    [
        (lambda c, w: (written(c, w), None), True),
        (lambda c, w: (written(written(c, w), w + 1, 5), None), True),
        (lambda c, w: (written(c, w), c.sum()), False),
        (lambda c, w: ((new := written(c, w)), new.sum()), False),
    ],
    ids=["a row", "two rows", "all is read before", "all is read after"],
)
def test_a_cpu_may_update_inside_of_what_reads(step, in_place):
    body, boundary = loop(step)
    assert bool(updated(body, boundary, CPU)) == in_place


def test_what_is_updated_and_stacked_is_copied():
    assert copies(lambda c, w: ((new := written(c, w)), new)) == 1


def test_a_cpu_copies_for_its_library_as_well():
    assert copies(lambda c, w: (jnp.tanh(c @ w), None), CPU) == 1
    assert copies(lambda c, w: (jnp.tanh(c * w), None), CPU) == 0


@pytest.mark.parametrize("on", [H100, CPU], ids=["gpu", "cpu"])
def test_arrays_of_stacked_results_are_filled_once(on):
    def filled(step):
        body, boundary = loop(step)
        return sum(t.amount for t in filled_before(body, boundary, TRIPS, on).terms if t.unit == "B")

    assert filled(lambda c, w: (c, w + c)) == TRIPS * ONE
    assert not filled(lambda c, w: (c + w, None))


# --- slices that a library reads

WEIGHTS = jax.ShapeDtypeStruct((TRIPS, N, N), jnp.bfloat16)
WIDER = jax.ShapeDtypeStruct((TRIPS, 4096, 4096), jnp.bfloat16)
CACHES = jax.ShapeDtypeStruct((TRIPS, 8, 1024, 128), jnp.bfloat16)


def rows(number, width=N):
    return jax.ShapeDtypeStruct((number, width), jnp.bfloat16)


def copied(function, *arguments, on=H100):
    """The slices by number that are copied for libraries, by their bytes."""
    program = convert(
        flatten(jax.make_jaxpr(lambda i, *a: function(*a[:-1], element_by_number(a[-1], i)))(0, *arguments))
    ).program
    prices = XlaPrices(program, on)
    price = copied_for_libraries(prices.program, kernels_on(on, program), prices.slices, on)
    return [t.amount / 2 for t in price.terms if t.unit == "B"]


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (lambda x, w: x @ w, (rows(8), WEIGHTS), [ONE]),
        (lambda x, w: x + jax.nn.silu(x) @ w, (rows(64), WEIGHTS), [ONE]),
        (lambda x, w: x @ w, (rows(1, 4096), WIDER), [16 * ONE]),
        (lambda x, w: jnp.einsum("hd,htd->ht", x, w), (rows(8, 128), CACHES), []),
        (lambda x, w: jax.nn.softmax(x * w), (rows(N), WEIGHTS), []),
        (lambda x, w: jnp.sort(w), (rows(N), WEIGHTS), [ONE]),
    ],
    ids=["a product", "with maps", "a vector", "a vector for each head", "no product", "sorted"],
)
def test_slices_are_copied_for_products(function, arguments, expected):
    assert copied(function, *arguments) == expected


def test_a_kernel_that_reads_a_slice_where_it_is_saves_the_copy():
    program = convert(flatten(jax.make_jaxpr(lambda i, x, w: x @ element_by_number(w, i))(0, rows(8), WEIGHTS))).program
    (product,) = program.outputs
    prices = XlaPrices(program, H100)
    assert prices.price().us > 2 * prices.price(frozenset({product}), frozenset(t.name for t in program.inputs)).us
    assert prices.price().us == pytest.approx(prices.us())
