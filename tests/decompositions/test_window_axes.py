"""Convolutions along three dimensions as those along fewer, against XLA's own, and against float64 where sums differ."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse import FuseOptions, _compat, fuse
from pallasfuse.decompositions import window_axes
from pallasfuse.jaxpr_frontend import flatten

LAYOUTS = [("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW"), ("NHDWC", "DHWIO", "NDHWC")]
SIZES = {"N": 2, "C": 4, "D": 5, "H": 6, "W": 7}


def drawn(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def convolution(window, strides, padding="SAME", layout=LAYOUTS[0], groups=1, **more):
    """Returns a convolution, its images and its weights."""
    images = drawn([SIZES[d] for d in layout[0]], 0)
    sizes = {"O": 6, "I": SIZES["C"] // groups, **dict(zip("DHW", window, strict=True))}
    kernel = drawn([sizes[d] for d in layout[1]], 1)
    convolved = functools.partial(
        lax.conv_general_dilated, window_strides=strides, padding=padding, dimension_numbers=layout,
        feature_group_count=groups, **more,
    )  # fmt: skip
    return convolved, images, kernel


def assert_same(rule, function, *arrays):
    """Assert that the one convolution of a function gives the same as the rule writes it. Returns how many dimensions it has then,
    or None where the rule knows nothing."""
    (eqn,) = (e for e in flatten(jax.make_jaxpr(function)(*arrays)).eqns if e.primitive.name == "conv_general_dilated")
    operands = [drawn(a.aval.shape, 2 + n) for n, a in enumerate(eqn.invars)]
    run = rule(eqn)
    if run is None:
        return None
    (found,), (wanted,) = run(*operands), _compat.bind(eqn, operands)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5 * float(jnp.max(jnp.abs(wanted))))
    made = (e for e in jax.make_jaxpr(run)(*operands).eqns if e.primitive.name == "conv_general_dilated")
    return max(len(e.params["window_strides"]) for e in made)


def with_gradients(function, images, kernel):
    """Yields a convolution and its gradients, as functions of one convolution each, with their arguments."""
    made = jax.eval_shape(function, images, kernel)
    yield function, (images, kernel)
    yield (lambda x, w, g: jax.vjp(lambda w: function(x, w), w)[1](g)), (images, kernel, drawn(made.shape, 5))
    yield (lambda x, w, g: jax.vjp(lambda x: function(x, w), x)[1](g)), (images, kernel, drawn(made.shape, 5))


@pytest.mark.sampled(5, cover=())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [(1, 3, 3), (3, 1, 1), (1, 1, 3), (3, 1, 3), (2, 2, 1)])
def test_dimensions_along_which_windows_do_not_move_are_left_out(layout, window):
    for strides, padding, groups in (((1, 1, 1), "SAME", 1), ((1, 2, 2), "VALID", 2)):
        for function, arrays in with_gradients(*convolution(window, strides, padding, layout, groups)):
            found = assert_same(window_axes.along_fewer, function, *arrays)
            assert found is not None and found < 3


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(
    "more", [{"lhs_dilation": (2, 1, 1)}, {"rhs_dilation": (3, 2, 1)}, {"lhs_dilation": (3, 2, 2)}]
)
@pytest.mark.parametrize("padding", [((1, 0), (2, 1), (0, 1)), ((-1, 0), (0, -1), (1, 1))])
def test_padding_of_any_kind_and_holes(padding, more):
    for window, strides in (((1, 2, 2), (1, 1, 1)), ((1, 2, 1), (1, 2, 1)), ((2, 1, 1), (1, 1, 1))):
        convolved, images, kernel = convolution(window, strides, padding, **more)
        assert assert_same(window_axes.along_fewer, convolved, images, kernel) in (1, 2)


def test_zeros_between_images_along_a_step_of_windows_stay_as_they_are():
    """Along a dimension with both, only some of the zeros would be left out."""
    convolved, images, kernel = convolution((1, 1, 3), (2, 1, 1), [(0, 0)] * 3, lhs_dilation=(2, 1, 1))
    assert assert_same(window_axes.along_fewer, convolved, images, kernel) == 2  # the second dimension only


@pytest.mark.parametrize("window", [(3, 3, 3), (1, 1, 1)])
def test_windows_that_move_along_all_dimensions_or_none_stay(window):
    convolved, images, kernel = convolution(window, (1, 1, 1))
    assert assert_same(window_axes.along_fewer, convolved, images, kernel) is None


@pytest.mark.parametrize("rule", [window_axes.along_fewer, window_axes.beside_each_other])
def test_padding_that_a_library_misreads_stays_as_it_is(rule):
    """XLA's CPU library reads beside images along fewer dimensions where padding takes away at one end and adds at the other."""
    images, kernel = drawn((2, 6, 30, 40, 16), 0), drawn((1, 3, 3, 16, 16), 1)
    convolved = functools.partial(lax.conv_general_dilated, window_strides=(1, 1, 1), dimension_numbers=LAYOUTS[0])
    padded = functools.partial(convolved, padding=[(0, 0), (-1, 1), (-1, 1)])
    assert assert_same(rule, padded, images, kernel) is None
    beside = functools.partial(convolved, padding=[(1, 1), (-1, 1), (0, 0)])
    assert assert_same(window_axes.beside_each_other, beside, images, drawn((3, 1, 1, 16, 16), 1)) is None
    one_end = functools.partial(convolved, padding=[(-1, 2), (-1, 0), (-1, 0)])
    assert assert_same(window_axes.along_fewer, one_end, images, kernel) == 2  # what does not move is padded before


def test_one_result_among_zeros_moves():
    """What a window covers there has zeros in between."""
    images, kernel = drawn((2, 2, 6, 7, 4), 0), drawn((3, 3, 1, 4, 6), 1)
    convolved = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1, 1), padding=[(0, 0)] * 3, lhs_dilation=(2, 1, 1),
        dimension_numbers=LAYOUTS[0],
    )  # fmt: skip
    assert assert_same(window_axes.along_fewer, convolved, images, kernel) == 2


def test_windows_longer_than_their_results_have_no_channels_for_their_elements():
    images, kernel = drawn((2, 4, 6, 7, 4), 0), drawn((3, 3, 3, 4, 6), 1)
    convolved = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1, 1), padding="VALID", dimension_numbers=LAYOUTS[0]
    )
    assert assert_same(window_axes.beside_each_other, convolved, images, kernel) is None
    assert assert_same(window_axes.beside_each_other, convolved, drawn((2, 5, 6, 7, 4), 0), kernel) == 2


def test_no_elements_stay():
    images, kernel = jnp.zeros((2, 0, 6, 7, 4)), drawn((1, 3, 3, 4, 6), 1)
    convolved = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1, 1), padding="SAME", dimension_numbers=LAYOUTS[0]
    )
    for rule in (window_axes.along_fewer, window_axes.beside_each_other):
        assert assert_same(rule, convolved, images, kernel) is None


def test_two_dimensions_stay():
    images, kernel = drawn((2, 6, 7, 4), 0), drawn((1, 3, 4, 6), 1)
    convolved = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    for rule in (window_axes.along_fewer, window_axes.beside_each_other):
        assert assert_same(rule, convolved, images, kernel) is None


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [(3, 3, 3), (2, 1, 3), (3, 2, 1)])
def test_elements_of_windows_as_channels(layout, window):
    for strides, padding in (((1, 1, 1), "SAME"), ((2, 1, 2), ((1, 2), (0, 1), (-1, 0)))):
        convolved, images, kernel = convolution(window, strides, padding, layout)
        assert assert_same(window_axes.beside_each_other, convolved, images, kernel) in (1, 2)


def test_gradients_of_images_with_a_step_have_zeros_among_their_channels():
    for strides, padding in (((2, 2, 2), "VALID"), ((3, 1, 2), ((1, 2), (0, 1), (-1, 0)))):
        *_, (gradient, arrays) = with_gradients(*convolution((3, 3, 3), strides, padding))
        assert assert_same(window_axes.beside_each_other, gradient, *arrays) == 2


def test_long_windows_and_groups_have_no_channels_for_their_elements():
    convolved, *_ = convolution((3, 3, 3), (1, 1, 1))
    images, kernel = drawn((1, 10, 4, 4, 2), 0), drawn((9, 3, 3, 2, 3), 1)
    assert assert_same(window_axes.beside_each_other, convolved, images, kernel) is None
    convolved, images, kernel = convolution((3, 3, 3), (1, 1, 1), groups=2)
    assert assert_same(window_axes.beside_each_other, convolved, images, kernel) is None


def test_a_fused_network_of_films_has_no_convolution_along_three_dimensions():
    """Where the price decides (no check), and a library would copy the images of each to another order."""
    images, frames, pictures = drawn((2, 8, 32, 32, 16), 0), drawn((3, 1, 1, 16, 16), 1), drawn((1, 3, 3, 16, 16), 2)

    def network(x, frames, pictures):
        def convolved(x, w):
            return lax.conv_general_dilated(x, w, (1, 1, 1), "SAME", dimension_numbers=LAYOUTS[0])

        return jnp.sum(jax.nn.relu(convolved(jax.nn.relu(convolved(x, frames)), pictures)), axis=(1, 2, 3))

    fused = fuse(options=FuseOptions(price=True, check=False))(network)
    text = str(jax.jit(fused).lower(images, frames, pictures).as_text())
    assert text.count("stablehlo.convolution") >= 2
    assert "[b, 0, 1, f]" in text and "[b, 0, 1, 2, f]" not in text
    np.testing.assert_allclose(fused(images, frames, pictures), network(images, frames, pictures), rtol=1e-4, atol=1e-2)
