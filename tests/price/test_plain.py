"""Prices of what has no nest: calls of a library, and loops."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import device
from pallasfuse.ir.loop_program import unknown_in
from pallasfuse.ir.plain_work import Running, Trips
from pallasfuse.jaxpr_frontend import convert
from pallasfuse.options import FuseOptions
from pallasfuse.overview import overview
from pallasfuse.price.xla import kernels_on, of_kernel, price_xla, unchanging
from pallasfuse.price.xla_forms import Opaque
from pallasfuse.targets import XLA_CPU

CPU = XLA_CPU.device
H200 = device.find("NVIDIA H200", "gpu")
H100 = device.find("NVIDIA H100 80GB HBM3", "gpu")
BOTH = pytest.mark.parametrize("on", [CPU, H200], ids=["cpu", "gpu"])
f32 = jnp.float32


def struct(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def program(function, *arguments):
    return convert(jax.make_jaxpr(function)(*arguments)).program


def us(on, function, *arguments):
    return price_xla(program(function, *arguments), on).us


def amount(on, name, function, *arguments):
    return sum(t.amount for t in price_xla(program(function, *arguments), on).terms if t.name == name)


def convolve(x, w, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


@BOTH
def test_a_convolution_is_the_product_that_it_is(on):
    x, w = struct(4, 32, 32, 256), struct(3, 3, 256, 128)
    assert amount(on, "products" if on is CPU else "matrix units", convolve, x, w) == 2 * 4 * 32 * 32 * 9 * 256 * 128
    as_product = us(on, jnp.matmul, struct(4 * 32 * 32, 9 * 256), struct(9 * 256, 128))
    assert (
        as_product < us(on, convolve, x, w) < 2.5 * as_product
    )  # 2.2 on a GPU: tiles are not shared, weights are turned


def term_us(name, function, *arguments):
    return sum(t.us for t in price_xla(program(function, *arguments), CPU).terms if t.name == name)


def test_a_cpu_copies_rows_of_windows():
    """Positions along the last dimension lie side by side. Measured on two cores: 15.4 and 7.2 ns a row."""
    long, high = (
        term_us("rows of windows", convolve, struct(4, 64, 64, 4), struct(*w, 4, 16)) for w in ((1, 8), (8, 1))
    )
    assert 8 * long == pytest.approx(high)
    assert 4e-3 * 4 * 64 * 64 < long < 16e-3 * 4 * 64 * 64


@pytest.mark.parametrize(("channels", "measured_us"), [(4, 14522), (16, 20485), (32, 40480)])
def test_windows_of_three_dimensions_are_copied_number_by_number(channels, measured_us):
    def along_three(x, w):
        return lax.conv_general_dilated(x, w, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))

    x, w = struct(2, 24, 24, 24, channels), struct(3, 3, 3, channels, max(8, min(32, 2 * channels)))
    assert 0.6 < us(CPU, along_three, x, w) / measured_us < 1.6


def test_tiny_matrices_of_a_batch_are_dear_unless_they_are_loops():
    """Measured on two cores: 480 ns for 4 x 4 (and 5 x 5 to 7 x 7), 8 for 3 x 3, 43 for 8 x 8."""
    each_ns = {n: 1e3 * us(CPU, jnp.matmul, struct(8192, n, n), struct(8192, n, n)) / 8192 for n in (3, 4, 7, 8)}
    assert each_ns[3] < 20
    assert 300 < each_ns[4] < 770
    assert 300 < each_ns[7] < 770
    assert 27 < each_ns[8] < 80
    assert amount(CPU, "matrices of a batch", jnp.matmul, struct(4, 4), struct(4, 4)) == 0
    assert us(CPU, jnp.matmul, struct(1, 4, 4), struct(1, 4, 4)) < 0.3


def test_channels_that_are_groups_take_longer_than_their_flops():
    def along(x, w, groups=512):
        return lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
        )

    half = jnp.bfloat16
    found = us(H200, along, struct(16, 1500, 512, dtype=half), struct(31, 1, 512, dtype=half))
    assert 600 < found < 1300  # 930 us were measured on an H200
    square = us(
        H200, lambda x, w: convolve(x, w, 512), struct(16, 30, 50, 512, dtype=half), struct(5, 5, 1, 512, dtype=half)
    )
    assert square < found / 5  # there a library has a kernel for them


@pytest.mark.parametrize(
    ("images", "groups", "channels", "results", "measured_us"),
    [
        ((8, 72, 72), 16, 1, 3, (92.1, 60.0)), ((8, 72, 72), 16, 3, 1, (54.8, 35.9)), ((32, 56, 56), 32, 1, 2, (236.0, 206.5)),
        ((32, 56, 56), 32, 2, 1, (248.7, 224.7)), ((32, 56, 56), 16, 2, 2, (151.5, 128.6)),
    ],
)  # fmt: skip
def test_groups_of_few_channels_are_not_as_fast_as_groups_of_one(images, groups, channels, results, measured_us):
    """Microseconds on an H200 in float32 and in bfloat16. By additions of slices they take 10 to 65."""
    for dtype, measured in zip(("float32", "bfloat16"), measured_us, strict=True):
        x, w = struct(*images, groups * channels, dtype=dtype), struct(3, 3, channels, groups * results, dtype=dtype)
        assert 0.5 < us(H200, lambda x, w: convolve(x, w, groups), x, w) / measured < 1.6
    alone = struct(*images, groups), struct(3, 3, 1, groups)
    assert us(H200, lambda x, w: convolve(x, w, groups), *alone) < 0.25 * measured_us[0]


@pytest.mark.parametrize(("dtype", "measured_us"), [("float32", 84.1), ("bfloat16", 60.0)])
def test_the_price_of_channels_that_are_groups_has_the_padding_at_one_end(dtype, measured_us):
    def halved(x, w):
        return lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=64
        )

    assert (
        0.7
        < us(H200, halved, struct(32, 112, 112, 64, dtype=dtype), struct(3, 3, 1, 64, dtype=dtype)) / measured_us
        < 1.4
    )


@pytest.mark.parametrize(
    ("dtype", "images", "channels", "taps", "holes", "measured"),
    [
        ("bfloat16", (3, 1599), 256, 3, 32, (44, 44, 396)),
        ("float32", (3, 1599), 256, 3, 32, (42, 42, 1294)),
        ("float32", (8, 1024), 512, 4, 1, (159, 159, 111)),
        ("bfloat16", (4, 4096), 1536, 4, 1, (970, 970, 645)),
        ("bfloat16", (16, 500), 256, 31, 1, (202, 204, 167)),
        ("bfloat16", (32, 56, 56), 96, 7, 1, (74, 74, 76)),
        ("float32", (64, 28, 28), 192, 3, 1, (33, 33, 35)),
    ],
)
def test_channels_that_are_groups_and_gradients_of_both_operands(dtype, images, channels, taps, holes, measured):
    """Microseconds measured on an H100, of the convolution, of the gradient of the images, and of that of the weights."""
    window = len(images) - 1
    letters = "HW"[-window:]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

    def run(x, w):
        return lax.conv_general_dilated(
            x, w, (1,) * window, "SAME", rhs_dilation=(holes,) * window, dimension_numbers=numbers,
            feature_group_count=channels,
        )  # fmt: skip

    x, w = struct(*images, channels, dtype=dtype), struct(*[taps] * window, 1, channels, dtype=dtype)

    def gradient(n):
        return lambda g, x, w: jax.vjp(run, x, w)[1](g)[n]

    found = us(H100, run, x, w), us(H100, gradient(0), x, x, w), us(H100, gradient(1), x, x, w)
    for one, other in zip(found, measured, strict=True):
        assert 0.75 * other < one < 1.25 * other


@pytest.mark.parametrize(
    ("dtype", "images", "channels", "taps", "holes", "at_one_end", "measured"),
    [
        ("bfloat16", (4, 5568), 64, 7, 5, False, 10.9),  # 10.3 without holes
        ("bfloat16", (8, 2048), 256, 7, 3, False, 26.1),
        ("bfloat16", (16, 1000), 512, 3, 3, False, 41.0),
        ("float32", (8, 4096), 64, 3, 1, True, 16.0),
        ("float32", (8, 4096), 64, 3, 128, True, 603),
        ("float32", (2, 8000), 256, 7, 8, True, 493),
        ("bfloat16", (2, 8000), 256, 3, 128, True, 1348),
        ("bfloat16", (8, 4096), 64, 2, 256, True, 200),
    ],
)
def test_holes_of_windows_are_elements_where_padding_differs_at_both_ends(
    dtype, images, channels, taps, holes, at_one_end, measured
):
    """Microseconds measured on an H100."""
    zeros = (taps - 1) * holes
    padding = [(zeros, 0) if at_one_end else (zeros // 2, zeros // 2)]

    def run(x, w):
        return lax.conv_general_dilated(
            x, w, (1,), padding, rhs_dilation=(holes,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    x, w = struct(*images, channels, dtype=dtype), struct(taps, channels, channels, dtype=dtype)
    assert 0.6 * measured < us(H100, run, x, w) < 1.6 * measured


def test_a_long_row_is_sorted_by_many_kernels():
    # 4 rows of 50257: the tiles, then 10 wider steps and 4 rounds inside of tiles
    assert amount(H200, "launch", jnp.sort, struct(4, 50257)) == 15
    assert amount(H200, "launch", jnp.sort, struct(64, 2048)) == 1
    assert us(H200, jnp.sort, struct(64, 50257)) > 5 * us(H200, lambda x: x + 1, struct(64, 50257))


@pytest.mark.parametrize(
    ("dtype", "rows", "length", "count", "measured"),
    [
        ("float32", 4, 250000, 8, 210),  # kept, by few multiprocessors
        ("float32", 2048, 4096, 8, 258),  # kept, by all of them
        ("float32", 4, 50257, 50, 113),  # a network of several kernels
        ("float32", 64, 32000, 50, 241),  # by digits
        ("bfloat16", 4, 250000, 8, 624),
        ("bfloat16", 4, 50257, 50, 72),  # each with its position in one word
    ],
)
def test_the_largest_of_rows_are_found_in_four_ways(dtype, rows, length, count, measured):
    """Microseconds measured on an H100."""
    assert 0.7 * measured < us(H100, lambda x: lax.top_k(x, count), struct(rows, length, dtype=dtype)) < 1.3 * measured


@BOTH
def test_sorts_of_longer_rows_take_longer_for_each_element(on):
    short, long = us(on, jnp.sort, struct(4096, 256)), us(on, jnp.sort, struct(64, 16384))
    assert short < long
    assert us(on, lambda x: jnp.sort(x, 0), struct(256, 4096)) > short  # neighbours lie apart


@BOTH
def test_several_results_of_one_operation_are_computed_once(on):
    both = us(on, lambda x: lax.top_k(x, 8), struct(256, 65536))
    assert both == pytest.approx(us(on, lambda x: lax.top_k(x, 8)[0], struct(256, 65536)), rel=0.01)
    assert amount(H200, "positions kept or not", lambda x: lax.top_k(x, 8), struct(256, 65536)) == 256 * 65536 * 8
    made = [k for k in kernels_on(on, program(lambda x: lax.top_k(x, 8), struct(256, 65536))) if isinstance(k, Opaque)]
    assert [of_kernel(k, on).us > 0 for k in made] == [True, False]


@pytest.mark.parametrize(
    ("shape", "kept", "measured_us"),
    [
        ((64, 60000), 8, 74.4),
        ((512, 60000), 8, 314),
        ((2048, 8192), 16, 1260),
        ((2048, 2048), 8, 135),
        ((16, 2048), 8, 14.1),
    ],
)
def test_the_few_largest_of_rows_as_they_were_measured_on_an_h100(shape, kept, measured_us):
    """Few long rows, many of them, settled ones, and short ones of which a multiprocessor has several at a time."""
    assert us(H200, lambda x: lax.top_k(x, kept), struct(*shape)) == pytest.approx(measured_us, rel=0.4)


@BOTH
def test_all_results_of_one_operation_live_from_the_same_step(on):
    first, second = (
        k
        for k in kernels_on(on, program(lambda x: lax.top_k(jnp.sin(x), 8), struct(256, 65536)))
        if isinstance(k, Opaque)
    )
    assert first.sources == second.sources and second.computed_with == first.name


@BOTH
def test_running_sums_are_found_in_blocks_of_blocks(on):
    def products(x):
        return lax.cumprod(x, 1)

    short, long = us(on, products, struct(65536, 16)), us(on, products, struct(256, 4096))
    assert short < long < 4 * short


@pytest.mark.parametrize(
    ("axis", "shape", "measured"),
    [
        (1, (64, 1000), 3.9), (1, (1, 1 << 20), 14.2), (1, (16, 65536), 11.7), (1, (4096, 128), 5.4),
        (0, (64, 1000), 3.2), (0, (16, 65536), 6.5), (0, (4096, 128), 7.1),
    ],
)  # fmt: skip
def test_running_sums_take_what_they_took_on_an_h100(axis, shape, measured):
    """Where another loop reads them, the last kernel is a part of that one."""
    assert us(H100, lambda x: jnp.cumsum(x, axis), struct(*shape)) == pytest.approx(measured, rel=0.35)
    stored, read = (
        sum(
            of_kernel(k, H100).us
            for k in kernels_on(H100, program(f, struct(*shape)))
            if isinstance(k, Opaque) and isinstance(k.work, Running)
        )
        for f in (lambda x: jnp.cumsum(x, axis), lambda x: jnp.exp(jnp.cumsum(x, axis)))
    )
    assert read < stored if shape[axis] > 16 else read == stored


def test_a_row_shorter_than_a_block_is_not_padded():
    def products(x):
        return lax.cumprod(x, 1)

    assert amount(CPU, "elements of windows", products, struct(1024, 4)) == 1024 * 4 * 4
    assert amount(CPU, "elements of windows", products, struct(1024, 65)) == 1024 * (5 * 16 * 16 + 5 * 5)


@BOTH
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (jnp.fft.rfft, (struct(4096, 512),)),
        (jnp.linalg.cholesky, (struct(64, 256, 256),)),
        (jax.scipy.linalg.solve_triangular, (struct(256, 256), struct(256, 4096))),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 5, 5), (1, 1, 1), "SAME"), (struct(64, 256, 256),)),
        (lambda s: jax.random.bits(jax.random.key(s), (4096, 4096)), (struct(dtype=jnp.int32),)),
    ],
    ids=["transform", "factorisation", "triangular", "windows", "random"],
)
def test_a_library_takes_longer_than_a_copy(on, function, arguments):
    results = jax.eval_shape(function, *arguments)
    copied = us(on, lambda x: x + 1, struct(*results.shape))
    assert copied < us(on, function, *arguments) < 1000 * copied


@BOTH
def test_a_loop_is_its_body_as_often_as_it_runs(on):
    def looped(x, w, trips):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=trips)[0]

    arguments = struct(1024, 1024), struct(1024, 1024)
    one = us(on, lambda x, w: jnp.tanh(x @ w), *arguments)
    four, eight = (us(on, lambda x, w, n=n: looped(x, w, n), *arguments) for n in (4, 8))
    assert eight == pytest.approx(2 * four, rel=0.01)
    assert 6 * one < eight < 12 * one


@BOTH
def test_loops_in_loops_are_multiplied(on):
    def looped(x, inner):
        def trip(h, _):
            return lax.scan(lambda c, _: (jnp.tanh(c), None), h, length=inner)[0], None

        return lax.scan(trip, x, length=3)[0]

    two, eight = (us(on, lambda x, n=n: looped(x, n), struct(1024, 1024)) for n in (2, 8))
    assert 3.5 * two < eight < 4.5 * two


def test_what_does_not_change_is_computed_before_the_loop():
    def looped(x, w, scale):
        def trip(h, _):
            return jnp.tanh(h @ jnp.exp(w)) + jnp.broadcast_to(jnp.exp(scale), h.shape), None

        return lax.scan(trip, x, length=100)[0]

    whole = program(looped, struct(512, 1024), struct(1024, 1024), struct(1024))
    (loop,) = (n.work for n in whole.nests if isinstance(getattr(n, "work", None), Trips))
    outside = unchanging(loop.body.value, loop.constants)
    definitions = {d.name: d for d in loop.body.value.nests}
    shapes = [tuple(a.extent for a in definitions[name].axes) for name in outside]
    assert (1024, 1024) in shapes and (512, 1024) not in shapes
    exponentials = sum(t.amount for t in price_xla(whole, H200).terms if t.name == "special functions")
    assert exponentials < 150 * 1024 * 1024  # those of the hyperbolic tangent, and of the matrix once


@BOTH
def test_a_choice_takes_as_long_as_its_longest_branch(on):
    def chosen(x, which, long):
        cheap = jnp.tanh
        return lax.cond(which, cheap, (lambda x: jnp.sort(x, -1)) if long else cheap, x)

    arguments = struct(512, 4096), struct(dtype=jnp.bool_)
    short, long = (us(on, lambda x, w, n=n: chosen(x, w, n), *arguments) for n in (False, True))
    assert long > 2 * short
    assert us(on, lambda x: jnp.sort(x, -1), arguments[0]) == pytest.approx(long, rel=0.1)


def test_what_nobody_knows_has_no_price_and_is_named():
    def until(x):
        def step(h, _):
            return lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, h), None

        return lax.scan(step, x, length=2)[0]

    assert unknown_in(program(until, struct(64))) == ["while"]
    assert unknown_in(program(lambda x: jnp.linalg.eigh(x)[0], struct(8, 8))) == ["eigh"]
    assert unknown_in(program(jnp.sort, struct(64))) == []
    text = overview(pf.fuse(until, options=FuseOptions(target="xla")).explain(struct(64)))
    assert "not counted, as nobody knows beforehand how long it takes: while" in text


def test_the_branch_of_a_platform_is_no_choice():
    def summed(x):
        return lax.platform_dependent(x, cpu=jnp.tanh, default=lambda x: jnp.sort(x, -1))

    nests = program(summed, struct(64, 4096)).nests
    assert not any(getattr(n, "work", None) for n in nests if n.axes)


@BOTH
@pytest.mark.parametrize(
    "function", [jnp.sort, lambda x: lax.cumprod(x, 1), lambda x: jnp.fft.rfft(x, axis=0), lambda x: jnp.cumsum(x, 1)]
)
def test_arrays_without_elements_have_a_price(on, function):
    assert us(on, function, struct(4, 0)) >= 0


@pytest.mark.parametrize("function", [lax.lgamma, lax.digamma, lambda x: lax.igamma(x, x)])
@BOTH
def test_special_functions_take_far_longer_than_moving_their_elements(on, function):
    x = struct(1 << 22)
    assert us(on, function, x) > 4 * us(on, jnp.sign, x)


@BOTH
def test_functions_that_a_cpu_calls_are_dearer_there(on):
    x = struct(1 << 22)
    ratio = us(on, jnp.arctan, x) / us(on, jnp.exp, x)
    assert ratio > 5 if on is CPU else ratio < 1.5


def test_remainders_of_integers_call_no_library():
    def rest(x):
        return lax.rem(x, jnp.full_like(x, 7))

    ints, floats = (us(CPU, rest, struct(1 << 22, dtype=t)) for t in (jnp.int32, f32))
    assert ints < floats / 2


def test_complex_numbers_are_computed_where_they_are_read_on_a_gpu():
    """As real ones are: eight operations are one pass over the memory, not eight."""

    def many(x):
        for n in range(8):
            x = x * x + jnp.conj(x) * (0.1 * n)
        return x

    x = struct(1 << 22, dtype=jnp.complex64)
    assert us(H200, many, x) < 3 * us(H200, lambda x: x * x, x)


def test_a_reshape_of_what_is_gathered_moves_nothing():
    """Blocks of keys that positions choose for each head, side by side: XLA stores them once, whatever their shape."""

    def apart(q, blocks, which):
        keys = jax.vmap(lambda b, i: b[:, i], in_axes=(1, 0), out_axes=1)(blocks, which)
        return jnp.einsum("bhnqd,bhnakd->bhnqak", q, keys)

    def merged(q, blocks, which):
        keys = jax.vmap(lambda b, i: b[:, i].reshape(2, 44, 640, 64), in_axes=(1, 0), out_axes=1)(blocks, which)
        return jnp.einsum("bhnqd,bhnkd->bhnqk", q, keys)

    blocks = struct(2, 12, 44, 80, 64, dtype=jnp.bfloat16)
    arguments = blocks, blocks, struct(12, 44, 8, dtype=jnp.int32)
    assert us(H100, merged, *arguments) == pytest.approx(us(H100, apart, *arguments), rel=0.2)


def test_no_window_meets_more_of_an_image_than_there_is():
    """Gradients of gradients have windows of 16 x 16 over images of 3 x 3 and their padding: 648 us were predicted, while no kernel
    of a program with ten of these takes more than 60 on an H200."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def padded(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), [(14, 14)] * 2, dimension_numbers=numbers)

    wide = us(H200, padded, struct(10, 3, 3, 128), struct(16, 16, 128, 128))
    same = us(H200, convolve, struct(10, 16, 16, 128), struct(3, 3, 128, 128))
    assert 0.5 < wide / same < 3
    assert us(H200, padded, struct(10, 32, 32, 128), struct(16, 16, 128, 128)) > 10 * wide


@pytest.mark.parametrize(
    ("image", "window", "strides", "positions"),
    [
        ((2, 2), (4, 4), (2, 2), 4),
        ((3, 3), (16, 16), (4, 4), 9),
        ((1, 1), (4, 4), (4, 4), 1),
        ((8, 8), (4, 4), (2, 2), 4),
    ],
)
def test_what_a_window_of_a_transposed_convolution_meets(image, window, strides, positions):
    """An image's elements are apart, and the window meets one of the first number of places at most, or as many as there are."""

    def spread(x, w):
        return lax.conv_transpose(x, w, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    (node,) = program(spread, struct(4, *image, 128), struct(*window, 128, 64)).nests
    assert node.work.met == positions * 128


def test_a_convolution_without_channels_has_a_price():
    assert us(H200, convolve, struct(4, 5, 5, 0), struct(3, 3, 0, 8)) < 10
