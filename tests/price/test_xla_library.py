"""What a CPU's library computes as a whole, what XLA stores on the way, and how much of it lives at once."""

import jax
import jax.numpy as jnp
import pytest

from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.terms import Price
from pallasfuse.price.xla import kernels_on, price_xla
from pallasfuse.price.xla_buffers import in_order, result_bytes, temporary_bytes
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, Opaque
from pallasfuse.price.xla_programs import without_repetitions
from pallasfuse.targets import XLA_CPU

CPU = XLA_CPU.device
MB = 1 << 20


def program(function, *shapes, dtype=jnp.float32):
    return convert(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))).program


def kernels(function, *shapes):
    return kernels_on(CPU, program(function, *shapes))


def temporary(function, *shapes):
    of = program(function, *shapes)
    return temporary_bytes(kernels_on(CPU, of), of.outputs)


def amount(price: Price, name: str) -> float:
    return sum(t.amount for t in price.terms if t.name == name)


def softmax(x):
    return jax.nn.softmax(x, -1)


def attend(q, k, v):
    return jnp.einsum("hij,hjd->hid", softmax(jnp.einsum("hid,hjd->hij", q, k)), v)


def attend_masked(q, k, v):
    scores = jnp.einsum("hid,hjd->hij", q, k)
    n = scores.shape[-1]
    scores = jnp.where(jnp.arange(n)[:, None] >= jnp.arange(n), scores, -1e9)
    return jnp.einsum("hij,hjd->hid", softmax(scores), v)


def attend_batched(q, k, v):
    """As `attend`, on tokens before heads, with a batch."""
    return jnp.einsum("bhij,bjhd->bihd", softmax(jnp.einsum("bihd,bjhd->bhij", q, k)), v)


# --- calls of the library


def test_a_library_s_call_passes_on_nothing_through_memory():
    moved = [
        sum(k.read_bytes + k.written_bytes for k in kernels(softmax, shape)) for shape in ((8192, 256), (256, 8192))
    ]
    assert moved[0] == 3 * 8 * MB  # read for the maximum and for the exponentials, written once
    assert moved[1] > 5 * 8 * MB  # the inverse of a sum has few elements: a loop, before and after which all is stored


@pytest.mark.parametrize(("function", "stored"), [(attend, 0), (attend_masked, 16)])
def test_a_choice_is_a_loop_between_calls(function, stored):
    """Scores of 16 MB: inside one call from product to product, or stored before and after the choice, one over the other."""
    assert temporary(function, *[(16, 512, 64)] * 3) == stored * MB


def test_a_product_alone_takes_no_neighbours():
    def widened(x, w, b):
        return jnp.tanh(x @ w + b)

    found = kernels(widened, (512, 256), (256, 1024), (1024,))
    (product,) = [k for k in found if isinstance(k, LibraryProduct)]
    assert product.written_bytes == 512 * 1024 * 4


def test_what_the_library_lacks_is_stored_before_a_reduction():
    def supported(x):
        return jnp.sum(jnp.exp(x), -1)

    def chosen(x):
        return jnp.sum(jnp.where(x > 0, x, 1.0), -1)

    assert temporary(supported, (1024, 4096)) == 0
    assert temporary(chosen, (1024, 4096)) == 16 * MB


def test_reductions_of_few_elements_are_loops():
    """No call of the library: the choice is computed where it is summed."""
    assert temporary(lambda x: jnp.sum(jnp.where(x > 0, x, 1.0), -1), (16, 128)) == 0


def test_a_left_operand_in_columns_is_read_in_strides_and_taken_by_no_reduction():
    def product(x, w):
        return jnp.einsum("km,kn->mn", x, w)

    price = price_xla(program(product, (512, 1024), (512, 64)), CPU)
    assert amount(price, "strided reads") == 512 * 1024
    long = price_xla(program(product, (16384, 64), (16384, 64)), CPU)
    assert amount(long, "strided reads") == 0  # each core sums up a part
    assert temporary(lambda x, w: jnp.max(product(x, w), -1), (512, 1024), (512, 1024)) == 4 * MB
    assert temporary(lambda x, w: jnp.max(x @ w, -1), (1024, 512), (512, 1024)) == 0


def test_loops_round_half_types_after_every_operation_and_the_library_does_not():
    def special(function, dtype):
        return amount(price_xla(program(function, (4096, 1024), dtype=dtype), CPU), "special functions")

    def mapped(x):
        return (x + 1) * x - 2

    assert special(mapped, jnp.bfloat16) == 3 * 4096 * 1024 and special(mapped, jnp.float32) == 0
    assert special(lambda x: jnp.max(mapped(x), -1), jnp.bfloat16) == 0


def test_a_call_of_the_library_takes_a_while_however_small():
    price = price_xla(program(lambda x: jnp.sum(x, -1), (8, 512)), CPU)
    assert amount(price, "library calls") == 1 and price.limit == "library calls"
    assert amount(price_xla(program(softmax, (4096, 64)), CPU), "library calls") == 1


# --- memory


def test_a_loop_writes_over_what_it_reads_last_but_not_over_a_product_of_other_dimensions():
    def masked(q, k, v):
        scores = jnp.einsum("bhid,bhjd->bhij", q, k)
        scores = jnp.where(scores > 0, scores, -1e9)
        return jnp.einsum("bhij,bhjd->bhid", softmax(scores), v)

    several, one = (temporary(masked, *[(b, 16 // b, 512, 64)] * 3) for b in (2, 1))
    assert several == 16 * MB
    assert one == 32 * MB  # XLA drops the dimension of the batch from products


def test_of_a_batch_of_one_what_is_summed_last_is_copied():
    def copied(batch):
        found = kernels(attend_batched, *[(batch, 512, 16 // batch, 64)] * 3)
        last = next(k for k in found if isinstance(k, LibraryProduct) and k.columns == 512 and k.summed == 512)
        return [c.moved_bytes for c in last.copies if c.moved_bytes > 8 * MB]

    assert copied(1) == [32 * MB] and copied(2) == []


def test_what_the_library_has_made_is_copied_where_a_product_wants_another_order():
    def scores(normed):
        def function(q, k):
            inverse = jax.lax.rsqrt(jnp.mean(k * k, -1, keepdims=True))
            k = k * inverse if normed else jnp.where(k > 0, k, 0.0)
            return jnp.einsum("bhid,bjhd->bhij", q, k)

        found = kernels(function, (2, 4, 64, 64), (2, 1024, 4, 64))
        (product,) = [k for k in found if isinstance(k, LibraryProduct)]
        return [c.moved_bytes for c in product.copies]

    assert scores(normed=True) == [2 * 2 * MB]
    assert scores(normed=False) == []  # a loop makes it in the order that is wanted


def test_results_have_memory_of_their_own():
    of = program(lambda x: (x + 1, jnp.exp(x) * 2), (1024, 1024))
    found = kernels_on(CPU, of)
    assert sorted(result_bytes(found, of.outputs)) == [4 * MB, 4 * MB]
    assert temporary_bytes(found, of.outputs) == 0


def test_memory_that_is_made_anew_is_priced():
    """32 MB of scores and as many after the mask, of which nothing is kept between calls."""
    price = price_xla(program(attend_batched, *[(1, 1024, 12, 64)] * 3), CPU)
    assert amount(price, "new pages") >= 96 * MB


def test_kernels_come_after_what_they_read():
    known: set[str] = set()
    found = in_order(kernels(attend_masked, *[(16, 512, 64)] * 3))
    made = {name for k in found for name in k.makes}
    for kernel in found:
        assert kernel.sources.keys() & made <= known
        known |= set(kernel.makes)


# --- operations


def test_a_division_by_a_value_of_the_row_is_a_product_with_its_inverse():
    by_row, by_element = (
        amount(price_xla(program(lambda x, y: x / y, (1024, 1024), shape), CPU), "special functions")
        for shape in ((1024, 1), (1024, 1024))
    )
    assert by_row == 1024 and by_element == 1024 * 1024


def test_nothing_is_computed_twice():
    def standardised(x):
        centred = (x - x.mean(-1, keepdims=True)) ** 2
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(centred.mean(-1, keepdims=True))

    whole = program(standardised, (64, 4096))
    once = without_repetitions(whole)
    assert sum(bool(getattr(n, "reduced", ())) for n in whole.nests) == 3
    assert sum(bool(getattr(n, "reduced", ())) for n in once.nests) == 2
    again = next(n.name for n in whole.nests if n.name not in {m.name for m in once.nests})
    assert again in {n.name for n in without_repetitions(whole, {again}).nests}
    sums = [k for k in kernels(standardised, (64, 4096)) if isinstance(k, LoopFusion) and k.reduced]
    assert len(sums) == 2


def test_elements_that_are_taken_by_an_index_are_all_that_is_read():
    def diagonal(x):
        return jnp.diagonal(x) * 2

    found = kernels(diagonal, (2048, 2048))
    assert all(isinstance(k, LoopFusion) for k in found)
    assert sum(k.read_bytes for k in found) < 64 * 1024


def test_the_position_of_a_maximum_is_found_element_by_element():
    (found,) = [k for k in kernels(lambda x: jnp.argmax(x, -1), (64, 4096)) if isinstance(k, Opaque)]
    assert found.looked_at == 64 * 4096 and found.read_bytes == MB


def test_of_a_part_of_a_tensor_only_the_part_is_read():
    (taken,) = [k for k in kernels(lambda x: jnp.sin(x[:, 7] * 2), (4096, 32, 64)) if isinstance(k, Opaque)]
    assert taken.read_bytes == taken.written_bytes == MB and not taken.looked_at


def test_a_part_of_a_tensor_is_no_reduction():
    found = kernels(lambda x: [jnp.sin(p) for p in jnp.split(x, 3, axis=-1)], (256, 768))
    assert not any(k.looked_at for k in found if isinstance(k, Opaque))


# --- copies of operands, and the order of what is ready


@pytest.mark.parametrize(
    ("equation", "strided"),
    [
        ("bihd,bjhd->bhij", [False, True]),
        ("bhij,bjhd->bhid", [False]),
        ("bhij,bdhj->bhid", [True]),
        ("bihd,bdjh->bhij", [False, True]),
    ],
)
def test_copies_end_with_the_contracted_axes_on_the_left_and_with_its_own_on_the_right(equation, strided):
    """As XLA's rewriter of products has them: read off the programs that it makes on a CPU."""
    sizes = {"b": 2, "h": 4, "i": 128, "j": 96, "d": 64}
    shapes = [tuple(sizes[a] for a in side) for side in equation.split("->")[0].split(",")]
    (product,) = [k for k in kernels(lambda x, y: jnp.einsum(equation, x, y), *shapes) if isinstance(k, LibraryProduct)]
    assert [not c.in_rows for c in product.copies] == strided


def test_what_is_ready_is_made_first():
    """Both copies are in memory while the first product runs, as in XLA's program for a CPU."""

    def two(q, k, v):
        scores = jnp.einsum("bihd,bjhd->bhij", q, k)
        return jnp.einsum("bhij,bjhd->bhid", scores.max(-1, keepdims=True) - scores, v)

    shapes = [(2, 8, 4, 64), (2, 4096, 4, 64), (2, 4096, 4, 64)]
    compiled = jax.jit(two).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()
    theirs = compiled.memory_analysis().temp_size_in_bytes
    assert 16 * MB < theirs < 20 * MB
    assert temporary(two, *shapes) == pytest.approx(theirs, rel=0.1)


def test_the_memory_of_a_result_is_used_before():
    """A numerator that is divided in place needs no memory of its own."""
    assert temporary(softmax, (64, 65536)) < MB
    assert temporary(lambda x: (softmax(x), x.sum()), (64, 65536)) < MB


@pytest.mark.parametrize("dtype", ["int8", "int32", "bfloat16", "float32"])
def test_positions_are_found_element_by_element_whatever_these_are(dtype):
    of = program(lambda x: jnp.argmax(x, -1), (64, 4096), dtype=jnp.dtype(dtype))
    assert amount(price_xla(of, CPU), "scalar loops") == 64 * 4096


def test_a_part_of_integers_is_all_that_is_read():
    of = program(lambda x: jnp.sin(x[:, 7].astype(jnp.float32)), (4096, 32, 64), dtype=jnp.int32)
    assert amount(price_xla(of, CPU), "scalar loops") == 0


def test_what_is_computed_for_two_calls_in_another_shape_is_stored():
    """The shape that both read computes nothing itself."""

    def two(x, by, a, b):
        scaled = (x.reshape(512, 16, 64) * by[..., None] - 1).reshape(512, 1024)
        return (scaled * a).sum(-1), (scaled * b).sum(-1)

    found = kernels(two, (512, 1024), (512, 16), (1024,), (1024,))
    (stored,) = [k for k in found if isinstance(k, LoopFusion) and not k.reduced]
    assert stored.written_bytes == 2 * MB
    for call in (k for k in found if k is not stored):
        assert call.sources[stored.makes[0]] == 2 * MB and len(call.sources) == 2
