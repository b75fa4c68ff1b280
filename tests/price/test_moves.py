"""Slices, concatenations and updates as XLA computes them on a GPU; rows whose values no tensor holds."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse import device
from pallasfuse.ir.axes import volume
from pallasfuse.ir.loop_program import External
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.price.moves import moves_as_maps, threads_of_joins
from pallasfuse.price.xla import price_xla
from pallasfuse.price.xla_forms import LibraryProduct, LoopFusion, Opaque
from pallasfuse.price.xla_habits import habits_on
from pallasfuse.price.xla_kernels import xla_kernels
from pallasfuse.targets import XLA_CPU
from tests.price.test_price import term

H200 = device.find("NVIDIA H200", "gpu")
f32 = jnp.float32


def struct(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def program(function, *arguments):
    return convert(jax.make_jaxpr(function)(*arguments)).program


def kernels(function, *arguments, on=H200):
    return xla_kernels(program(function, *arguments), habits_on(on))


def halves(x):
    return jnp.concatenate([-x[:, 512:], x[:, :512]], 1) * 2 + x


def test_what_joins_halves_is_computed_where_it_is_read():
    (one,) = kernels(halves, struct(4096, 1024))
    assert isinstance(one, LoopFusion) and one.written_bytes == 4096 * 1024 * 4
    assert one.read_bytes < 1.1 * 4096 * 1024 * 4  # of x once, and not once for each half
    assert len(kernels(halves, struct(4096, 1024), on=XLA_CPU.device)) > 1


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (lambda x, y: jnp.concatenate([x * 2, y + 1], 1) + jnp.concatenate([y * 3, x - 1], 1), 4096 * 4096),
        (lambda x, y: 1 / jnp.sqrt((jnp.stack([x * 2, y + 1]) ** 2).sum(0)), 4096 * 2048),
        (lambda x, y: jnp.sqrt((jnp.stack([x * 2, y + 1]) ** 2).sum(0)).sum(1), 4096),
        (lambda x, y: jnp.tanh(jnp.concatenate([x * 2, y + 1], 1)).max(1), 4096 * 4096 + 4096),
    ],
    ids=["two joins", "a sum of two", "a sum of sums of two", "a maximum of all"],
)
def test_joins_are_stored_for_long_reductions_only(function, written):
    """As XLA compiles the first three for an H100, and a normalisation of joined rows; some others it reduces as it joins them."""
    assert sum(k.written_bytes for k in kernels(function, struct(4096, 2048), struct(4096, 2048))) == 4 * written


def test_joins_that_end_in_updates_are_stored_only_if_something_else_reduces_them():
    def added(x, y, table, at, *, also):
        joined = jnp.concatenate([x * 2, y + 1]) ** 2
        sums = joined.mean(1)
        return table.at[at].add(sums / 3), (sums.max() if also else 0.0)

    structs = (struct(2048, 2048), struct(2048, 2048), struct(999), struct(4096, dtype=jnp.int32))
    alone, beside = (
        {
            n
            for k in kernels(lambda *a, also=also: added(*a, also=also), *structs)
            if isinstance(k, LoopFusion)
            for n in k.makes
        }
        for also in (False, True)
    )
    sizes = {d.name: volume(d.axes) for d in program(lambda *a: added(*a, also=True), *structs).definitions()}
    assert not any(sizes.get(n, 0) == 4096 * 2048 for n in alone)
    assert any(sizes.get(n, 0) == 4096 * 2048 for n in beside)


def outer(x, y):
    return (x[:, :, None] * y[:, None, :]).reshape(-1, y.shape[-1])


@pytest.mark.parametrize(
    ("function", "structs", "moved"),
    [
        (
            lambda x, y, z, w: jnp.concatenate([outer(x, z), outer(y, z)]) * w[:, None],
            (struct(2048, 10), struct(2048, 15), struct(2048, 256), struct(51200)),
            2048 * 10 + 2048 * 15 + 2048 * 256 + 51200 + 51200 * 256,
        ),
        (
            lambda x, y: jnp.concatenate([(x * 2).reshape(-1), (y + 1).reshape(-1)]) * 3,
            (struct(999, 512), struct(999, 1024)),
            2 * 999 * 1536,
        ),
        (
            lambda x, y: jnp.pad((x * y).reshape(4, 999, -1), ((0, 0), (0, 5), (0, 0))) * 2,
            (struct(4, 999, 8, 64), struct(4, 999, 8, 64)),
            2 * 4 * 999 * 512 + 4 * 1004 * 512,
        ),
    ],
    ids=["outer products", "all in one dimension", "padded"],
)
def test_what_moves_an_array_of_merged_dimensions_computes_it(function, structs, moved):
    """As XLA compiles each of them for an H100: one kernel, and no memory for what is merged."""
    (one,) = kernels(function, *structs)
    assert one.read_bytes + one.written_bytes <= 1.05 * 4 * moved
    assert one.read_bytes + one.written_bytes >= 0.8 * 4 * moved  # of a shorter operand as little as of any other


@pytest.mark.parametrize(
    ("batch", "rows", "several"), [(4, 999, 2), (4, 999, 3), (4, 999, 4), (4, 999, 8), (2, 512, 2)]
)
def test_arrays_of_merged_dimensions_are_joined_as_others_are(batch, rows, several):
    """Where a joined dimension is as long as neighbouring ones of an operand are together, too."""

    def joined(*arrays):
        return jnp.concatenate([jnp.tanh(x * 2 + 1).reshape(batch, rows, -1) for x in arrays], 1)

    (merged,) = kernels(joined, *(struct(batch, rows, 8, 64) for _ in range(several)))
    (plain,) = kernels(joined, *(struct(batch, rows, 512) for _ in range(several)))
    assert (merged.read_bytes, merged.written_bytes) == (plain.read_bytes, plain.written_bytes)
    found, wanted = (
        term(price_xla(program(joined, *(struct(batch, rows, *s) for _ in range(several))), H200), "vector units")
        for s in ((8, 64), (512,))
    )
    assert found.amount == wanted.amount > 0


def test_an_array_and_one_value_are_padded_rather_than_joined():
    def joined(value):
        return program(lambda x: jnp.concatenate([x[1:] - x[:-1], value(x)], 0), struct(4096, 1024))

    assert not threads_of_joins(joined(lambda x: jnp.zeros((1, 1024))))
    assert not threads_of_joins(joined(lambda x: jnp.zeros((1, 1024), jnp.int32).astype(jnp.float32)))
    assert threads_of_joins(joined(lambda x: x[:1] * 2))
    assert threads_of_joins(joined(lambda x: jnp.full((1, 1024), x[0, 0]) * x[:1]))
    assert threads_of_joins(program(lambda x, s: jnp.concatenate([x * 2, s * 2]), struct(4096), struct(1)))


def test_but_not_at_both_ends():
    def between(x):
        ends = jnp.zeros((1, 1024))
        return jnp.concatenate([ends, x * 2, ends])

    assert threads_of_joins(program(between, struct(4096, 1024)))


def test_a_program_of_moves_has_maps_instead():
    whole = program(halves, struct(4096, 1024))
    assert any(isinstance(n, External) for n in whole.nests)
    assert not any(isinstance(n, External) for n in moves_as_maps(whole).nests)


def test_a_taken_part_of_a_softmax_is_all_of_it_that_is_computed():
    def drawn(x, which):
        p = jax.nn.softmax(x, -1)
        return jax.vmap(lambda rows, i: lax.dynamic_index_in_dim(rows, i, 0, keepdims=False))(p, which)

    found = kernels(drawn, struct(16, 6, 128256), struct(16, dtype=jnp.int32))
    assert max(k.written_bytes for k in found) == 16 * 128256 * 4


def test_a_reshaped_part_keeps_all_axes_and_its_source_in_memory():
    def attend(x, w):
        q, k = jnp.split(jax.nn.silu(x @ w), 2, 1)
        q, k = (t.reshape(512, 8, 64) for t in (q, k))
        return jnp.einsum("qhd,khd->hqk", q, k)

    found = kernels(attend, struct(512, 256), struct(256, 1024))
    products = [k for k in found if isinstance(k, LibraryProduct)]
    assert sorted((p.batch, p.rows, p.columns, p.summed) for p in products) == [(1, 512, 1024, 256), (8, 512, 512, 64)]
    written = sum(k.written_bytes for k in found if isinstance(k, LoopFusion))
    assert written == 2 * 512 * 1024 * 4  # what is split, and its halves as a library reads them


def test_an_update_is_in_its_place_unless_the_old_values_are_needed():
    def append(cache, new, at):
        return lax.dynamic_update_slice(cache * 2, new, (at, 0))

    def keep(cache, new, at):
        return lax.dynamic_update_slice(cache, new, (at, 0)), cache

    shapes = struct(8192, 1024), struct(1, 1024), struct(dtype=jnp.int32)
    (update,) = (k for k in kernels(append, *shapes) if isinstance(k, Opaque))
    assert update.written_bytes == 1024 * 4 and update.read_bytes < 2 * 1024 * 4
    for program_ in (keep, lambda c, n, i: lax.dynamic_update_slice(c.reshape(8192, 1024), n, (i, 0))):
        (copy,) = (k for k in kernels(program_, *shapes) if isinstance(k, Opaque))
        assert copy.written_bytes == 8192 * 1024 * 4


def test_an_update_of_literals_or_of_itself_is_a_whole_operation():
    def literals(x):
        z = lax.dynamic_update_slice(jnp.float32(0.0), jnp.float32(1.0), ())
        return jax.nn.softmax(x, -1) * z

    def itself(x, i):
        return lax.dynamic_update_slice(x * 2, x * 2, (i, 0))

    assert kernels(literals, struct(64, 4096))
    y = program(itself, struct(1024, 1024), struct(dtype=jnp.int32))
    assert max(k.written_bytes for k in xla_kernels(y, habits_on(H200))) == 1024 * 1024 * 4


def test_rows_of_values_that_are_computed_stay_in_one_kernel():
    def edges(a, b, adjacent):  # no tensor has all three axes
        s = jnp.where(adjacent, jax.nn.leaky_relu(a[:, :, None] + b[:, None, :]), -jnp.inf)
        return jax.nn.softmax(s, -1)

    found = kernels(edges, struct(4, 4096), struct(4, 4096), struct(4096, 4096, dtype=jnp.bool_))
    (row,) = (k for k in found if isinstance(k, LoopFusion) and k.is_row)
    assert len(row.roots) == 3 and row.written_bytes == 4 * 4096 * 4096 * 4


def test_narrow_weights_are_converted_inside_a_product_of_few_rows():
    def scaled(x, w, scale):
        return x @ (w.astype(jnp.bfloat16) * scale)

    weights = struct(4096, 8192, dtype=jnp.int8), struct(8192, dtype=jnp.bfloat16)
    (few,) = kernels(scaled, struct(16, 4096, dtype=jnp.bfloat16), *weights)
    assert isinstance(few, LibraryProduct) and few.read_bytes < 1.1 * 4096 * 8192
    many = kernels(
        scaled, struct(2048, 4096, dtype=jnp.bfloat16), *weights
    )  # there it would be computed again for each tile
    assert sorted(type(k).__name__ for k in many) == ["LibraryProduct", "LoopFusion"]


def test_a_scale_for_blocks_of_rows_is_applied_before_a_product():
    def blocks(x, w, scale):
        wide = w.reshape(32, 128, 8192).astype(jnp.bfloat16) * scale[:, None]
        return jnp.einsum("nij,ijk->nk", x.reshape(16, 32, 128), wide)

    shapes = (
        struct(16, 4096, dtype=jnp.bfloat16),
        struct(4096, 8192, dtype=jnp.int8),
        struct(32, 8192, dtype=jnp.bfloat16),
    )
    found = kernels(blocks, *shapes)
    assert sorted(type(k).__name__ for k in found) == ["LibraryProduct", "LoopFusion"]


def softmin(a, b, c):
    """The soft minimum of three values, as a step of dynamic time warping has it."""
    s = jnp.stack([a, b, c], -1)
    least = s.min(-1)
    return least - jnp.log(jnp.exp(least[..., None] - s).sum(-1))


def test_reductions_of_a_few_elements_are_no_kernels_of_their_own():
    (one,) = kernels(softmin, *[struct(40, 66)] * 3)
    assert one.written_bytes == 40 * 66 * 4 and one.read_bytes < 5 * 40 * 66 * 4
    lanes = kernels(lambda x: (x - x.max(-1, keepdims=True)) * 2, struct(4096, 256))  # a warp reduces these
    assert len(lanes) == 1 and lanes[0].is_row


def test_what_several_kernels_would_reduce_again_is_stored_where_it_is_small():
    """As XLA compiles it for an H100; between, one of the kernels stores it for the other."""

    def distances(x, y):
        d = ((x[:, None] - y[None]) ** 2).sum(-1)
        return d.max(0), jnp.tanh(d).sum(1)

    large, small = (kernels(distances, struct(n, 3), struct(n, 3)) for n in (8192, 64))
    assert max(k.written_bytes for k in large) == 8192 * 4
    assert max(k.written_bytes for k in small) == 64 * 64 * 4


def test_an_operand_that_takes_more_to_read_than_it_has_is_stored_before_a_product():
    def gated(x, p, q, a):
        return x @ (a(p @ q) if q is p else a(p @ q, q @ p))

    square = struct(512, 512, dtype=jnp.bfloat16)

    def operands(function):
        found = kernels(function, struct(16, 512, dtype=jnp.bfloat16), square, square)
        return sum(isinstance(k, LoopFusion) for k in found)

    assert operands(lambda x, p, q: gated(x, p, q, lambda h, g: h * g * (h + g))) == 1
    assert operands(lambda x, p, q: gated(x, p, p, lambda h: h * 2)) == 0


def test_few_elements_of_what_is_computed_need_not_be_stored():
    def stored(function):
        picked = kernels(
            lambda x, rows, places: function(x)[rows, places, places], struct(64, 32, 4096),
            *[struct(60, 5, dtype=jnp.int32)] * 2,
        )  # fmt: skip
        return max(k.written_bytes for k in picked)

    assert stored(jax.nn.sigmoid) < 64 * 32 * 64
    assert stored(lambda x: jax.nn.softmax(x, -1)) == 64 * 32 * 4096 * 4  # a normalisation is a kernel of its own


def test_what_is_stacked_is_read_once_also_where_a_dimension_becomes_two():
    """The windows around each pixel, stacked, in groups of channels: each is one part, and not as large as all of them."""

    def windows(x, w):
        near = jnp.stack([x[:, i : i + 90, j : j + 122] for i in range(3) for j in range(3)], 3)
        return (w[..., None] * near.reshape(4, 90, 122, 9, 8, 16)).sum(3)

    found = [
        k for k in kernels(windows, struct(4, 92, 124, 128), struct(4, 90, 122, 9, 8)) if isinstance(k, LoopFusion)
    ]
    (last,) = [k for k in found if any(n.is_reduction for n in k.roots)]
    part = 4.0 * 4 * 90 * 122 * 128
    assert max(last.reads.values()) == part and 9 * part <= sum(last.reads.values()) < 10 * part


@pytest.mark.parametrize(("images", "measured_us"), [(1024, 379)])
def test_elements_of_shifted_rows_are_loaded_one_by_one(images, measured_us):
    """A sum of 25 shifted images for each of 32 results, on an H200."""

    def added(x, w):
        parts = [w[:, i, j, None, None] * x[:, None, i : i + 24, j : j + 108] for i in range(5) for j in range(5)]
        return sum(parts[1:], parts[0])

    assert 0.7 < price_xla(program(added, struct(images, 28, 112), struct(32, 5, 5)), H200).us / measured_us < 1.3
