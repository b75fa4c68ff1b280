"""Values that are repeated along axes: which of them XLA stores in full for its library on a CPU."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.ir.axes import volume
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import kernels_on, price_xla
from pallasfuse.price.xla_buffers import temporary_bytes
from pallasfuse.price.xla_forms import LoopFusion
from pallasfuse.targets import XLA_CPU

CPU = XLA_CPU.device
ROWS, MORE, COLUMNS = 64, 128, 256
SHAPES = {"x": (ROWS, MORE, COLUMNS), "a": (MORE, COLUMNS), "b": (ROWS, MORE), "c": (COLUMNS,), "s": ()}


def two_calls(x, c):
    return (x * c).sum(-1), (x + c).sum(0)


def two_calls_of_a_computed_number(x, s):
    number = jnp.where(s > 0, s, 1)
    return (x * number).sum(-1), (x + number).sum(0)


def call_and_loop(x, b):
    return jnp.where(x > b[..., None], 1.0, 0.0), (x * b[..., None]).sum(-1)


def call_alone(x, b):
    return (x * b[..., None]).sum(-1)


def loop_alone(x, b):
    return jnp.where(x > b[..., None], x, 0.0)


def largest(x):
    return jnp.where(x == x.max(-1, keepdims=True), 1.0, 0.0)


def largest_in_two_loops(x):
    top = x.max(-1, keepdims=True)
    return jnp.where(x == top, 1.0, 0.0), jnp.where(x < top, x, 0.0)


def largest_returned(x):
    top = x.max(-1, keepdims=True)
    return jnp.where(x == top, 1.0, 0.0), top


def above_mean(x):
    return jnp.where(x > x.mean(-1, keepdims=True), 1.0, 0.0)


def few_means(a):
    return jnp.where(a > a.mean(-1, keepdims=True), 1.0, 0.0)


def normalised(x, c):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1) * c


def product_with_vectors(a, c):
    return a @ c, (2 * a) @ c


CASES = {
    two_calls: 1, two_calls_of_a_computed_number: 1, call_and_loop: 1, call_alone: 0, loop_alone: 0, largest: 1,
    largest_in_two_loops: 1, largest_returned: 0, above_mean: 1, few_means: 0, normalised: 0, product_with_vectors: 0,
}  # fmt: skip
"""Functions, and how many values XLA stores in full for them."""


def structs(function):
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return [jax.ShapeDtypeStruct(SHAPES[n], jnp.float32) for n in names]


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_values_are_stored_in_full_for_calls_that_do_not_have_all_their_readers(function):
    program = convert(jax.make_jaxpr(function)(*structs(function))).program
    kernels = kernels_on(CPU, program)
    repeated = [n for k in kernels if isinstance(k, LoopFusion) for n in k.roots if n.body.axes < frozenset(n.axes)]
    assert len(repeated) == CASES[function]
    assert all(volume(n.axes) == ROWS * MORE * COLUMNS for n in repeated)
    theirs = jax.jit(function).lower(*structs(function)).compile().memory_analysis().temp_size_in_bytes
    assert temporary_bytes(kernels, program.outputs) == pytest.approx(theirs, rel=0.1, abs=1 << 18)


def test_what_a_call_ends_with_is_all_that_it_stores():
    kernels = kernels_on(CPU, convert(jax.make_jaxpr(largest)(*structs(largest))).program)
    (begins,) = [k for k in kernels if isinstance(k, LoopFusion) and k.reduced]
    (ends,) = [k for k in kernels if isinstance(k, LoopFusion) and k.bodies[0].axes < frozenset(k.roots[0].axes)]
    (reader,) = [k for k in kernels if k is not begins and k is not ends]
    assert ends.by_library and ends.read_bytes == begins.written_bytes == 0
    assert ends.written_bytes == 4 * ROWS * MORE * COLUMNS == reader.sources[ends.makes[0]]


@pytest.mark.parametrize(
    ("function", "terms"),
    [
        (lambda i: i.sum(-1), {"elements of windows": 1, "chains of comparisons": 0}),
        (lambda i: i[..., :32].sum(-1), {"elements of windows": 0, "chains of comparisons": 0}),
        (lambda i: i.max(-1), {"elements of windows": 0, "chains of comparisons": 1}),
        (lambda i: i.max(0), {"elements of windows": 0, "chains of comparisons": 0}),
        (lambda i: i.astype(jnp.float32).max(-1), {"elements of windows": 0, "chains of comparisons": 0}),
    ],
)
def test_loops_reduce_integers(function, terms):
    """The sums of long rows in windows; the largest of neighbours one after the other."""
    program = convert(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((512, 4096), jnp.int32))).program
    found = price_xla(program, CPU).terms
    assert {n: sum(t.amount for t in found if t.name == n) / (512 * 4096) for n in terms} == terms


def test_the_largest_of_short_rows_is_found_for_many_rows_at_once():
    """Each element of rows of 16 took 0.13 ns on two cores, of rows of 64 2.0 ns."""

    def element_ns(row):
        rows = jax.ShapeDtypeStruct(((1 << 21) // row, row), jnp.float32)
        program = convert(jax.make_jaxpr(lambda x: jnp.argmax(x, -1))(rows)).program
        return 1e3 * sum(t.us for t in price_xla(program, CPU).terms if t.name == "scalar loops") / (1 << 21)

    assert element_ns(8) == element_ns(16) == pytest.approx(0.13, rel=0.1)
    assert element_ns(64) == element_ns(32) == pytest.approx(2.0, rel=0.1)
    assert element_ns(16) < element_ns(20) < element_ns(32)
