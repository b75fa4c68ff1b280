"""Values that are repeated along axes: which of them XLA stores in full for its library on a CPU."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.ir.axes import volume
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.xla import XlaPrices, kernels_on, price_xla
from pallasfuse.price.xla_buffers import temporary_bytes
from pallasfuse.price.xla_forms import LoopFusion
from pallasfuse.targets import XLA_CPU

CPU = XLA_CPU.device
ROWS, MORE, COLUMNS = 64, 128, 256
SHAPES = {
    "x": (ROWS, MORE, COLUMNS), "y": (ROWS, MORE, COLUMNS), "a": (MORE, COLUMNS), "b": (ROWS, MORE), "c": (COLUMNS,), "s": (),
    "few": (8, 16), "narrow": (ROWS, 16),
}  # fmt: skip


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


def two_calls_of_two_arrays(x, y, c):
    return (x * c).sum(-1), (y + c).sum(0)


def twice_in_one_call(x):
    mean = x.mean(-1, keepdims=True)
    return ((x - mean) * jnp.exp(x * mean)).sum(-1)


def over_two_spaces(x):
    top = x.max(-1, keepdims=True)
    return jnp.where(x > top, 1.0, 0.0), jnp.where(x[..., :2] > top, 1.0, 0.0)


def also_read_by_itself(x, b):
    top = x.max(-1)
    return jnp.where(x == top[..., None], 1.0, 0.0), jnp.where(b > top, b, 0.0)


def also_in_another_value(x, b):
    top = x.max(-1)
    return jnp.where(x > top[..., None], (b * top)[..., None], 0.0)


def to_few(x, narrow):
    return jnp.where(narrow > x.sum((1, 2))[:, None], 1.0, 0.0)


def of_two_parts_of_one_call(x, c):
    return jnp.exp(x * c - (x + c).max(-1, keepdims=True)).sum(-1)


def of_positions(x):
    positions = jnp.arange(COLUMNS, dtype=jnp.float32)
    return (x * positions).sum(-1), (x + positions).sum(0)


def of_two_statistics(x):
    return jnp.where(x > (x.max(-1) - x.min(-1))[..., None], 1.0, 0.0)


def of_a_statistic_and_memory(x, b):
    return jnp.where(x > (x.max(-1) - b)[..., None], 1.0, 0.0)


def not_by_the_library(x):
    return jnp.where(x > jnp.floor_divide(x.max(-1), 2.0)[..., None], 1.0, 0.0)


def divided_by_few(a):
    return jnp.where(a > 0, a / a.sum(-1, keepdims=True), 0.0)


def filled_with_a_row(c):
    return jnp.broadcast_to(c, (ROWS, MORE, COLUMNS))


def small(few):
    return jnp.where(few > few.max(-1, keepdims=True), 1.0, 0.0), few.sum(0)


CASES = {
    two_calls: 1, two_calls_of_a_computed_number: 1, call_and_loop: 1, call_alone: 0, loop_alone: 0, largest: 1,
    largest_in_two_loops: 1, largest_returned: 0, above_mean: 1, few_means: 0, normalised: 0, product_with_vectors: 0,
    two_calls_of_two_arrays: 1, twice_in_one_call: 0, over_two_spaces: 0, also_read_by_itself: 0,
    of_two_statistics: 1, of_a_statistic_and_memory: 1, also_in_another_value: 0, to_few: 0, of_two_parts_of_one_call: 0,
    of_positions: 0,
    not_by_the_library: 0, divided_by_few: 0, filled_with_a_row: 0, small: 0,
}  # fmt: skip
"""Functions, and how many values XLA stores in full for them."""


def structs(function, dtype=jnp.float32):
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return [jax.ShapeDtypeStruct(SHAPES[n], dtype) for n in names]


def kernels_of(function, dtype=jnp.float32):
    """Returns the program of a function, XLA's kernels for it, and those among these that store values which are repeated."""
    program = convert(jax.make_jaxpr(function)(*structs(function, dtype))).program
    made = {n.name for n in program.nests}
    kernels = kernels_on(CPU, program)
    return program, kernels, [k for k in kernels if made.isdisjoint(k.makes)]


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_values_are_stored_in_full_for_calls_that_do_not_have_all_their_readers(function):
    program, kernels, repeated = kernels_of(function)
    assert len(repeated) == CASES[function]
    assert all(volume(n.axes) == ROWS * MORE * COLUMNS for k in repeated for n in k.roots)
    theirs = jax.jit(function).lower(*structs(function)).compile().memory_analysis().temp_size_in_bytes
    assert temporary_bytes(kernels, program.outputs) == pytest.approx(theirs, rel=0.1, abs=1 << 18)


def test_what_a_call_ends_with_is_all_that_it_stores():
    _, kernels, (ends,) = kernels_of(largest)
    (begins,) = [k for k in kernels if k.reduced]
    (reader,) = [k for k in kernels if k is not begins and k is not ends]
    assert ends.call == begins.call and ends.read_bytes == begins.written_bytes == 0
    assert ends.written_bytes == 4 * ROWS * MORE * COLUMNS == reader.sources[ends.makes[0]]


def test_prices_do_not_depend_on_what_was_asked_before():
    """The same number is stored in two sizes, under one name where one of them is not stored."""

    def four(x, a, s):
        return (x * s).sum(-1), (x + s).sum(0), (a * s).sum(-1), (a + s).sum(0)

    program = convert(jax.make_jaxpr(four)(*structs(four))).program
    made = [frozenset[str](), frozenset(program.outputs[:2]), frozenset(program.outputs[2:])]
    alone = [price_xla(program, CPU, m).us for m in made]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        prices = XlaPrices(program, CPU)
        assert [prices.us(made[n]) for n in order] == pytest.approx([alone[n] for n in order])


@pytest.mark.parametrize(("function", "element_bytes"), [(two_calls, 4), (largest, 2)])
def test_halves_are_stored_in_single_precision_unless_they_are_what_is_reduced(function, element_bytes):
    _, _, (stored,) = kernels_of(function, jnp.bfloat16)
    assert stored.written_bytes == element_bytes * ROWS * MORE * COLUMNS


def test_a_call_reads_the_repeated_value_alone():
    _, kernels, _ = kernels_of(two_calls)
    assert [len(k.sources) for k in kernels if k.reduced] == [2, 2]


def test_loops_repeat_values_for_themselves():
    _, kernels, (stored,) = kernels_of(call_and_loop)
    readers = [k for k in kernels if stored.makes[0] in k.sources]
    assert [k.by_library for k in readers] == [True] and len(kernels) == 3


@pytest.mark.parametrize(
    ("function", "dtype", "each_ns"),
    [
        (lambda i: i.sum(-1), jnp.int32, 0.4),
        (lambda i: i.max(-1), jnp.int32, 0.7),
        (lambda i: (i > 0).any(-1), jnp.int32, 0.25),
        (lambda i: i.max(0), jnp.int32, 0.0),
        (lambda i: i.sum(0), jnp.int32, 0.0),
        (lambda i: i[:, :8].max(-1), jnp.int32, 0.0),
        (lambda i: i.max(-1), jnp.int8, 0.0),
        (lambda i: i.max(-1), jnp.float32, 0.0),
    ],
)
def test_loops_reduce_neighbouring_integers_one_after_the_other(function, dtype, each_ns):
    """The library reduces floats, and takes the largest of bytes; columns and short rows are reduced side by side."""
    program = convert(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((512, 4096), dtype))).program
    found = sum(t.amount for t in price_xla(program, CPU).terms if t.name == "reduced neighbours")
    assert found == pytest.approx(each_ns * 512 * 4096)


@pytest.mark.parametrize(
    ("function", "shapes", "counted"),
    [
        (lambda v, w: (v * w).sum(-1), ((4096,), (512, 4096)), 512 * 4096),
        (lambda v, w: (jnp.exp(v) * w).sum(-1), ((4, 1, 256), (4, 64, 256)), 4 * 64 * 256),
        (lambda v, w: (w * v).sum(-1), ((4096,), (512, 4096)), 0),
        (lambda v, w: (v * w).sum(-1), ((512, 1), (512, 4096)), 0),
        (lambda v, w: (v * w).sum(0), ((4096,), (512, 4096)), 0),
        (lambda v, w: (v * w).max(-1), ((4096,), (512, 4096)), 0),
        (lambda v, w: (v + w).sum(-1), ((4096,), (512, 4096)), 0),
        (lambda v, w: (v * w).sum(-1), ((8, 1, 1), (8, 64, 4096)), 0),
        (lambda v, w: (v * w).sum((0, 2)), ((64, 1, 256), (1, 8, 256)), 64 * 8 * 256),
        (lambda v, w: jax.lax.reduce_sum(jnp.bfloat16(v) * jnp.bfloat16(w), [1]), ((4096,), (512, 4096)), 0),
        (lambda v, w: (v * jnp.sin(w)).sum(-1), ((4096,), (512, 4096)), 512 * 4096),
        (lambda v, w: jax.lax.dot_general(v, w, (((0,), (1,)), ((), ()))), ((4096,), (512, 4096)), 0),
    ],
)
def test_the_library_is_slow_where_the_first_factor_has_fewer_rows(function, shapes, counted):
    program = convert(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))).program
    terms = {t.name: t for t in price_xla(program, CPU).terms}
    found = terms["products with fewer rows first"]
    assert found.amount == counted and found.us == pytest.approx(0.3e-3 * counted)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.float32])
@pytest.mark.parametrize("reduced", [jnp.sum, jnp.max])
def test_what_sums_integers_is_no_library(reduced, dtype):
    rows = jax.ShapeDtypeStruct((512, 4096), dtype)
    kernels = kernels_on(CPU, convert(jax.make_jaxpr(lambda x: reduced(x, axis=-1))(rows)).program)
    text = jax.jit(lambda x: reduced(x, axis=-1)).lower(rows).compile().as_text()
    assert any(isinstance(k, LoopFusion) and k.by_library for k in kernels) == ("ynn" in text)


def test_the_largest_of_short_rows_is_found_for_many_rows_at_once():
    """Each element of rows of 16 took 0.13 ns on two cores, of rows of 64 2.0 ns."""

    def element_ns(row):
        rows = jax.ShapeDtypeStruct(((1 << 21) // row, row), jnp.float32)
        program = convert(jax.make_jaxpr(lambda x: jnp.argmax(x, -1))(rows)).program
        return 1e3 * sum(t.us for t in price_xla(program, CPU).terms if t.name == "scalar loops") / (1 << 21)

    assert element_ns(8) == element_ns(16) == pytest.approx(0.13, rel=0.1)
    assert element_ns(64) == element_ns(32) == pytest.approx(2.0, rel=0.1)
    assert element_ns(16) < element_ns(20) < element_ns(32)
