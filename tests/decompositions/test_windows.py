"""Pools and convolutions as shifted arrays, against XLA's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallasfuse import _compat
from pallasfuse.decompositions import windows


def same(function, *arrays, exact=False, rule=None):
    """Assert that the only operation of a function gives the same decomposed."""
    (eqn,) = jax.make_jaxpr(function)(*arrays).eqns
    rule = rule or (windows.convolution if eqn.primitive.name == "conv_general_dilated" else windows.pool)
    (found,) = jax.jit(rule(eqn))(*arrays)
    wanted = function(*arrays)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    tolerance = 0 if exact else 2e-2 if found.dtype == jnp.bfloat16 else 2e-5
    scale = float(jnp.max(jnp.abs(wanted.astype("float32")), initial=1.0, where=jnp.isfinite(wanted)))
    np.testing.assert_allclose(
        found.astype("float32"), wanted.astype("float32"), rtol=tolerance, atol=tolerance * scale
    )


def drawn(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


_LAYOUTS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "OIHW", "NCHW"), ("HWNC", "IHWO", "CNHW")]


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("part", range(2))
@settings(max_examples=4, deadline=None)
@given(
    groups=st.integers(1, 3),
    channels=st.integers(1, 2),
    results=st.integers(1, 2),
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    dilated=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.sampled_from(["SAME", "VALID", ((1, 0), (2, 1)), ((-1, 0), (0, -1))]),
    layout=st.sampled_from(_LAYOUTS),
)
def test_any_convolution_of_few_channels(part, groups, channels, results, window, strides, dilated, padding, layout):
    if window == (1, 1) and channels == 1:
        return
    sizes = {"N": 2, "C": groups * channels, "H": 9, "W": 8, "O": groups * results, "I": channels}
    images = drawn([sizes[d] for d in layout[0]])
    weights = drawn([{**sizes, "H": window[0], "W": window[1]}[d] for d in layout[1]], seed=1)
    same(
        functools.partial(
            lax.conv_general_dilated, window_strides=strides, padding=padding, rhs_dilation=dilated,
            dimension_numbers=layout, feature_group_count=groups,
        ), images, weights,
    )  # fmt: skip


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("part", range(2))
@settings(max_examples=4, deadline=None)
@given(
    channels=st.integers(1, 3),
    results=st.integers(1, 3),
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    between=st.tuples(st.integers(0, 1), st.integers(0, 2)),
    padding=st.sampled_from(["SAME", "VALID", ((1, 0), (2, 1)), ((-1, 0), (0, -1))]),
    layout=st.sampled_from(_LAYOUTS),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_windows_that_do_not_overlap_are_rows(part, channels, results, window, between, padding, layout, dtype):
    sizes = {"N": 2, "C": channels, "H": 9, "W": 8, "O": results, "I": channels}
    images = drawn([sizes[d] for d in layout[0]], dtype)
    weights = drawn([{**sizes, "H": window[0], "W": window[1]}[d] for d in layout[1]], dtype, seed=1)
    strides = tuple(n + apart for n, apart in zip(window, between, strict=True))
    same(
        functools.partial(lax.conv_general_dilated, window_strides=strides, padding=padding, dimension_numbers=layout),
        images, weights, rule=windows.patches,
    )  # fmt: skip


_SOLID = [("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW"), ("CDHWN", "IDHWO", "NHDWC")]


@pytest.mark.sampled(2, cover=())
@pytest.mark.parametrize("part", range(2))
@settings(max_examples=4, deadline=None)
@given(
    groups=st.integers(1, 2),
    window=st.tuples(*[st.integers(1, 3)] * 3),
    strides=st.tuples(*[st.integers(1, 2)] * 3),
    dilated=st.tuples(*[st.integers(1, 2)] * 3),
    padding=st.sampled_from(["SAME", "VALID", ((1, 0), (2, 1), (0, 0)), ((-1, 0), (0, -1), (1, 1))]),
    layout=st.sampled_from(_SOLID),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_any_convolution_along_three_dimensions(part, groups, window, strides, dilated, padding, layout, dtype):
    sizes = {"N": 2, "C": 3 * groups, "D": 7, "H": 6, "W": 5, "O": 4 * groups, "I": 3}
    images = drawn([sizes[d] for d in layout[0]], dtype)
    weights = drawn([{**sizes, **dict(zip("DHW", window, strict=True))}[d] for d in layout[1]], dtype, seed=1)
    same(
        functools.partial(
            lax.conv_general_dilated, window_strides=strides, padding=padding, rhs_dilation=dilated,
            dimension_numbers=layout, feature_group_count=groups,
        ), images, weights, rule=windows.of_slices,
    )  # fmt: skip


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(
    ("stride", "dilation", "of_weights"), [(1, 1, True), (2, 1, True), (1, 2, True), (1, 1, False), (1, 2, False)]
)
def test_gradients_of_convolutions_along_three_dimensions(stride, dilation, of_weights):
    """Those of the weights have windows as long as the results, at a few positions."""

    def convolved(x, w):
        return lax.conv_general_dilated(
            x, w, (stride, 1, 1), [(dilation, dilation), (1, 1), (0, 1)], rhs_dilation=(dilation, 1, 1),
            dimension_numbers=_SOLID[0],
        )  # fmt: skip

    x, w = drawn((2, 8, 6, 5, 3)), drawn((3, 3, 2, 3, 4), seed=1)
    of_results = drawn(convolved(x, w).shape, seed=2)
    of_one = (lambda w: convolved(x, w)) if of_weights else (lambda x: convolved(x, w))
    gradient = jax.make_jaxpr(jax.linear_transpose(of_one, w if of_weights else x))(of_results)
    (eqn,) = (e for e in gradient.eqns if e.primitive.name == "conv_general_dilated")
    assert windows.of_slices(eqn) is not None
    shapes = [v.aval.shape for v in eqn.invars]
    params = {k: v for k, v in eqn.params.items() if k != "out_sharding"}
    same(
        lambda a, b: lax.conv_general_dilated_p.bind(a, b, out_sharding=None, **params),
        drawn(shapes[0]), drawn(shapes[1], seed=3), rule=windows.of_slices,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "window", "reason"),
    [((1, 40, 40, 40, 2), (20, 20, 20), "many slices"), ((2, 9, 8, 2), (3, 3), "two dimensions")],
)
def test_other_convolutions_are_left_alone(shape, window, reason):
    numbers = ("NDHWC", "DHWIO", "NDHWC") if len(window) == 3 else ("NHWC", "HWIO", "NHWC")
    eqn = jax.make_jaxpr(
        lambda x, w: lax.conv_general_dilated(x, w, (1,) * len(window), "SAME", dimension_numbers=numbers)
    )(drawn(shape), drawn((*window, 2, 2))).eqns[0]
    assert windows.of_slices(eqn) is None, reason


@pytest.mark.parametrize(
    ("taps", "dilation", "stride", "padding"), [(2, 4, 1, (4, 0)), (3, 2, 2, (2, 2)), (3, 7, 1, (3, 4))]
)
def test_windows_with_holes_are_rows(taps, dilation, stride, padding):
    same(
        lambda x, w: lax.conv_general_dilated(
            x, w, (stride,), [padding], rhs_dilation=(dilation,), dimension_numbers=("NWC", "WIO", "NWC")
        ),
        drawn((2, 32, 5)), drawn((taps, 5, 6), seed=1), rule=windows.patches,
    )  # fmt: skip


@pytest.mark.parametrize(("taps", "dilation", "stride"), [(2, 4, 1), (3, 2, 2), (3, 7, 1)])
def test_gradients_of_windows_with_holes_are_products(taps, dilation, stride):
    """One for each position in the window, of all images: and one over the rows for the images where these are not strided."""

    def convolved(x, w):
        return lax.conv_general_dilated(
            x, w, (stride,), [(dilation, dilation)], rhs_dilation=(dilation,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    x, w = drawn((2, 48, 5)), drawn((taps, 5, 6), seed=1)
    of_results = drawn(convolved(x, w).shape, seed=2)
    for n, rule in enumerate([windows.patches, windows.few_positions]):
        if n == 0 and stride > 1:
            continue
        *_, eqn = [
            e for e in jax.make_jaxpr(lambda g, n=n: jax.vjp(convolved, x, w)[1](g)[n])(of_results).eqns
            if e.primitive.name == "conv_general_dilated" and rule(e) is not None
        ]  # fmt: skip
        shapes = [v.aval.shape for v in eqn.invars]
        params = {k: v for k, v in eqn.params.items() if k != "out_sharding"}
        same(
            lambda a, b, params=params: lax.conv_general_dilated_p.bind(a, b, out_sharding=None, **params),
            drawn(shapes[0]), drawn(shapes[1], seed=3), rule=rule,
        )  # fmt: skip


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(
    ("window", "strides", "padding", "numbers"),
    [
        ((2, 2), (2, 2), "SAME", ("NHWC", "HWIO", "NHWC")),
        ((4, 4), (2, 2), "SAME", ("NCHW", "OIHW", "NCHW")),
        ((3, 2), (2, 3), "VALID", ("NHWC", "OIHW", "NCHW")),
        ((2, 2), (2, 2), ((0, 2), (1, 0)), ("HWNC", "IHWO", "CNHW")),
        ((5,), (4,), "SAME", ("NWC", "WIO", "NWC")),
        ((2, 2, 2), (2, 2, 2), "SAME", ("NDHWC", "DHWIO", "NDHWC")),
    ],
)
def test_gradients_of_weights_of_transposed_convolutions_are_products(window, strides, padding, numbers):
    dims = dict(zip([d for d in numbers[1] if d not in "IO"], window, strict=True))
    kernel = drawn([{"I": 5, "O": 4}.get(d) or dims[d] for d in numbers[1]], seed=1)
    images = drawn([{"N": 3, "C": 5}.get(d) or 6 for d in numbers[0]])

    def convolved(w):
        return lax.conv_transpose(images, w, strides, padding, dimension_numbers=numbers)

    gradient = jax.make_jaxpr(lambda g: jax.vjp(convolved, kernel)[1](g)[0])(convolved(kernel))
    (eqn,) = [e for e in gradient.eqns if e.primitive.name == "conv_general_dilated" and windows.few_positions(e)]
    same(lambda a, b: _compat.bind(eqn, [a, b])[0], *(drawn(v.aval.shape, seed=3) for v in eqn.invars),
         rule=windows.few_positions)  # fmt: skip


@pytest.mark.parametrize(
    ("taps", "length", "is_known"),
    [(17, 9, True), (16, 9, False), (17, 16, True), (17, 17, False), (80, 72, True), (80, 73, False)],
)
def test_windows_are_long_and_positions_few(taps, length, is_known):
    """1, 2, 15, 17, 64 and 66 positions: fewer than elements of a window, of which there are more than 16, and no more than 64."""

    def run(x, w):
        return lax.conv_general_dilated(
            x, w, (1,), [(0, 0)], lhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    arrays = drawn((2, length, 3)), drawn((taps, 3, 4), seed=1)
    (eqn,) = jax.make_jaxpr(run)(*arrays).eqns
    assert (windows.few_positions(eqn) is not None) == is_known
    if is_known:
        same(run, *arrays, rule=windows.few_positions)


def test_few_positions_where_windows_lie_beside_the_image():
    """A window that looks only at zeros between and beside the elements gives zeros."""

    def run(x, w):
        return lax.conv_general_dilated(x, w, (1,), [(5, 0)], lhs_dilation=(3,), rhs_dilation=(3,),
                                        dimension_numbers=("NWC", "WIO", "NWC"))  # fmt: skip

    (eqn,) = jax.make_jaxpr(run)(drawn((2, 18, 3)), drawn((17, 3, 4))).eqns
    assert windows.few_positions(eqn) is not None
    same(run, drawn((2, 18, 3)), drawn((17, 3, 4), seed=1), rule=windows.few_positions)


def of_channels(window, times, numbers):
    """Returns how many channels there are, images of them, and so many windows for each."""
    channels = 6
    dims = dict(zip([d for d in numbers[1] if d not in "IO"], window, strict=True))
    kernel = drawn([{"I": 1, "O": channels * times}.get(d) or dims[d] for d in numbers[1]], seed=1)
    return channels, drawn([{"N": 3, "C": channels}.get(d) or 17 for d in numbers[0]]), kernel


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(
    ("window", "strides", "dilated", "padding", "times", "numbers"),
    [
        ((3,), (1,), (4,), "SAME", 1, ("NWC", "WIO", "NWC")),
        ((4,), (1,), (1,), ((3, 0),), 2, ("NCW", "OIW", "NWC")),
        ((5,), (2,), (1,), "VALID", 1, ("NWC", "WIO", "NCW")),
        ((3, 2), (2, 1), (1, 3), "SAME", 3, ("NHWC", "HWIO", "NHWC")),
        ((2,), (1,), (1,), ((30, 0),), 1, ("NWC", "WIO", "NWC")),  # a window that meets only zeros
    ],
)
def test_gradients_of_the_weights_of_channels_are_sums(window, strides, dilated, padding, times, numbers):
    channels, images, kernel = of_channels(window, times, numbers)

    def convolved(w):
        return lax.conv_general_dilated(
            images, w, strides, padding, rhs_dilation=dilated, dimension_numbers=numbers, feature_group_count=channels
        )

    gradient = jax.make_jaxpr(lambda g: jax.vjp(convolved, kernel)[1](g)[0])(convolved(kernel))
    (eqn,) = [e for e in gradient.eqns if e.primitive.name == "conv_general_dilated" and windows.by_channel(e)]
    assert windows.convolution(eqn) is None and windows.few_positions(eqn) is None
    same(lambda a, b: _compat.bind(eqn, [a, b])[0], *(drawn(v.aval.shape, seed=3) for v in eqn.invars),
         rule=windows.by_channel)  # fmt: skip


@pytest.mark.parametrize(
    ("window", "strides", "padding", "times", "numbers"),
    [
        ((3,), (2,), "SAME", 1, ("NWC", "WIO", "NWC")),
        ((4,), (3,), ((2, -1),), 2, ("NCW", "OIW", "NWC")),
        ((3, 2), (2, 3), "VALID", 1, ("NHWC", "HWIO", "NHWC")),
    ],
)
def test_gradients_of_the_images_of_channels_have_zeros_between_them(window, strides, padding, times, numbers):
    """Windows with a step: XLA's CPU backend took 50 to 100 times as long for two of them."""
    channels, images, kernel = of_channels(window, times, numbers)

    def convolved(x):
        return lax.conv_general_dilated(
            x, kernel, strides, padding, dimension_numbers=numbers, feature_group_count=channels
        )

    gradient = jax.make_jaxpr(lambda g: jax.vjp(convolved, images)[1](g)[0])(convolved(images))
    (eqn,) = [e for e in gradient.eqns if max(e.params.get("lhs_dilation", [1])) > 1]
    assert windows.convolution(eqn) is not None
    same(lambda a, b: _compat.bind(eqn, [a, b])[0], *(drawn(v.aval.shape, seed=3) for v in eqn.invars))


def test_sums_by_channel_are_for_images_that_are_groups_of_their_own():
    def run(x, w, **groups):
        return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), **groups)

    x, w = drawn((4, 16, 3)), drawn((15, 3, 8))
    for groups, expected in (({}, False), ({"batch_group_count": 2}, False), ({"batch_group_count": 4}, True)):
        (eqn,) = jax.make_jaxpr(functools.partial(run, **groups))(x, w).eqns
        assert (windows.by_channel(eqn) is not None) == expected


@pytest.mark.parametrize(
    ("shape", "weights", "strides", "changed"),
    [
        ((2, 16, 16, 8), (3, 3, 8, 8), (1, 1), {}),  # windows overlap
        ((2, 16, 16, 8), (3, 3, 8, 8), (2, 2), {}),
        ((2, 16, 16, 8), (1, 1, 4, 8), (1, 1), {"feature_group_count": 2}),
        ((2, 16, 16, 8), (1, 1, 8, 8), (1, 1), {"lhs_dilation": (2, 2)}),
    ],
)
def test_other_convolutions_are_no_product_of_rows(shape, weights, strides, changed):
    def run(x, w):
        return lax.conv_general_dilated(
            x, w, strides, ((0, 0), (0, 0)), dimension_numbers=("NHWC", "HWIO", "NHWC"), **changed
        )

    (eqn,) = jax.make_jaxpr(run)(drawn(shape), drawn(weights)).eqns
    assert windows.patches(eqn) is None


@pytest.mark.parametrize("preferred", [None, "float32"])
def test_half_precision_is_summed_in_float32(preferred):
    images, weights = drawn((2, 16, 8), "bfloat16"), drawn((5, 1, 8), "bfloat16", 1)
    numbers = ("NWC", "WIO", "NWC")
    same(
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=8, preferred_element_type=preferred
        ),
        images, weights,
    )  # fmt: skip


@pytest.mark.parametrize(
    "weights, changed",
    [
        ((5, 8, 8), {"batch_group_count": 2}),
        ((5, 64, 8), {}),
    ],
    ids=["groups of images", "many channels"],
)
def test_what_is_left_to_the_library(weights, changed):
    def convolution(x, w):
        numbers = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, w, (1,), [(2, 2)], dimension_numbers=numbers, **changed)

    channels = weights[1] * changed.get("feature_group_count", 1)
    (eqn,) = jax.make_jaxpr(convolution)(drawn((2, 16, channels)), drawn(weights)).eqns
    assert windows.convolution(eqn) is None


@pytest.mark.sampled(6, cover=())
@pytest.mark.parametrize("part", range(6))
@settings(max_examples=5, deadline=None)
@given(
    window=st.tuples(*3 * [st.integers(1, 3)]),
    strides=st.tuples(*3 * [st.integers(1, 2)]),
    dilated=st.tuples(*3 * [st.integers(1, 2)]),
    padding=st.sampled_from(["SAME", "VALID", ((0, 1), (2, 0), (0, 0)), ((0, 0), (-1, 0), (1, 1))]),
    how=st.sampled_from([("max", "float32"), ("min", "float32"), ("add", "float32"), ("max", "int32"), ("min", "uint8"),
                         ("add", "int32")]),
)  # fmt: skip
def test_any_pool(part, window, strides, dilated, padding, how):
    if max(window) == 1:
        return
    combine, dtype = {"max": lax.max, "min": lax.min, "add": lax.add}[how[0]], jnp.dtype(how[1])
    x = (20 * drawn((5, 7, 6))).astype("int32").astype(dtype)
    limits = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else None
    least, most = (-np.inf, np.inf) if limits is None else (limits.min, limits.max)
    init = np.asarray({"max": least, "min": most, "add": 0}[how[0]], dtype)
    same(
        lambda x: lax.reduce_window(x, init, combine, window, strides, padding, window_dilation=dilated), x, exact=True
    )


def test_values_that_are_not_numbers_go_where_they_went():
    x = drawn((4, 12)).at[1, 3].set(jnp.nan).at[2, 5].set(-jnp.inf).at[0, 0].set(jnp.inf)
    for combine, init in ((lax.max, -jnp.inf), (lax.min, jnp.inf), (lax.add, 0.0)):
        same(lambda x, c=combine, i=init: lax.reduce_window(x, i, c, (2, 3), (1, 1), "SAME"), x)


@pytest.mark.parametrize("padding", [((6, 0),), ((0, 3),), ((2, 5),), ((4, 1),)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_windows_with_holes_and_as_many_zeros_at_both_ends(padding, stride, groups):
    x, w = drawn((2, 19, 4)), drawn((3, 4 // groups, 6))

    def run(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (stride,),
            padding,
            rhs_dilation=(3,),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )

    (eqn,) = jax.make_jaxpr(run)(x, w).eqns
    found = windows.evened(eqn)
    ((low, high),) = padding
    if high > low and (high - low) % stride:
        assert found is None  # its results would be at other positions
    else:
        np.testing.assert_allclose(found(x, w)[0], run(x, w), rtol=1e-5, atol=1e-5)


def test_windows_without_holes_or_with_even_padding_stay():
    x, w = drawn((2, 19, 4)), drawn((3, 4, 6))
    for padding, holes in (((2, 0), 1), ((3, 3), 3), ((-1, 2), 3)):
        run = lambda x, w, p=padding, d=holes: lax.conv_general_dilated(  # noqa: E731
            x, w, (1,), (p,), rhs_dilation=(d,), dimension_numbers=("NWC", "WIO", "NWC")
        )
        (eqn,) = jax.make_jaxpr(run)(x, w).eqns
        assert windows.evened(eqn) is None
