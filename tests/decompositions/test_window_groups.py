"""Convolutions of groups, of channels and of images, written as products and with their groups elsewhere, against XLA's own."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallasfuse import _compat
from pallasfuse.decompositions import windows
from pallasfuse.jaxpr_frontend.plain_work import lies_otherwise
from tests.decompositions.test_decomposer import decomposed
from tests.decompositions.test_windows import drawn, same

CONVOLVED = ("window", "strides", "dilated", "padding", "numbers")
OF_EVERY_ORDER = [
    ((3, 2), (1, 1), (1, 1), "VALID", ("NHWC", "HWIO", "NHWC")),
    ((3, 3), (2, 1), (1, 1), "SAME", ("NCHW", "OIHW", "NCHW")),
    ((2, 3), (1, 1), (1, 2), "SAME", ("HWNC", "IHWO", "CNHW")),
    ((4,), (2,), (1,), ((1, 2),), ("NWC", "WIO", "NWC")),
    ((2, 2, 2), (1, 1, 1), (1, 1, 1), "VALID", ("NDHWC", "DHWIO", "NDHWC")),
]


@pytest.mark.sampled(4, cover=())
@pytest.mark.parametrize(CONVOLVED, OF_EVERY_ORDER)
@pytest.mark.parametrize("shared", [True, False], ids=["one kernel", "a kernel each"])
def test_gradients_of_weights_of_each_example_are_products(window, strides, dilated, padding, numbers, shared):
    """Each of the examples is a batch of two images; they share the weights, or have their own."""
    dims = dict(zip([d for d in numbers[1] if d not in "IO"], window, strict=True))
    kernel = drawn([*([] if shared else [4]), *({"I": 3, "O": 5}.get(d) or dims[d] for d in numbers[1])], seed=1)
    examples = drawn([4, *({"N": 2, "C": 3}.get(d) or 9 for d in numbers[0])])

    def summed(w, x):
        found = lax.conv_general_dilated(x, w, strides, padding, rhs_dilation=dilated, dimension_numbers=numbers)
        return jnp.sum(jnp.tanh(found))

    gradient = jax.make_jaxpr(jax.vmap(jax.grad(summed), (None if shared else 0, 0)))(kernel, examples)
    (eqn,) = [e for e in gradient.eqns if e.primitive.name == "conv_general_dilated" and windows.of_examples(e)]
    assert eqn.params["feature_group_count"] == 4
    same(lambda a, b: _compat.bind(eqn, [a, b])[0], *(drawn(v.aval.shape, seed=3) for v in eqn.invars),
         rule=windows.of_examples)  # fmt: skip


@pytest.mark.sampled(3, cover=())
@pytest.mark.parametrize(CONVOLVED, OF_EVERY_ORDER)
def test_gradients_of_grouped_convolutions_have_groups_of_features(window, strides, dilated, padding, numbers):
    """Of the weights of three groups of four channels, each with two results."""
    dims = dict(zip([d for d in numbers[1] if d not in "IO"], window, strict=True))
    kernel = drawn([{"I": 4, "O": 6}.get(d) or dims[d] for d in numbers[1]], seed=1)
    images = drawn([{"N": 5, "C": 12}.get(d) or (17 if len(window) > 1 else 200) for d in numbers[0]])

    def convolved(w):
        return lax.conv_general_dilated(
            images, w, strides, padding, rhs_dilation=dilated, dimension_numbers=numbers, feature_group_count=3
        )

    gradient = jax.make_jaxpr(lambda g: jax.vjp(convolved, kernel)[1](g)[0])(convolved(kernel))
    (eqn,) = [e for e in gradient.eqns if e.primitive.name == "conv_general_dilated" and windows.by_features(e)]
    assert eqn.params["batch_group_count"] == 3
    same(lambda a, b: _compat.bind(eqn, [a, b])[0], *(drawn(v.aval.shape, seed=3) for v in eqn.invars),
         rule=windows.by_features)  # fmt: skip


@pytest.mark.parametrize(
    ("side", "dtype", "groups", "is_written"),
    [
        (32, "float32", 2, True),
        (32, "float32", 1, False),
        (2, "float32", 2, False),  # few products
        (32, "int32", 2, False),  # of no library
    ],
)
def test_images_are_groups_of_features(side, dtype, groups, is_written):
    def run(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, batch_group_count=groups)

    structs = jax.ShapeDtypeStruct((4, side, side, 3), dtype), jax.ShapeDtypeStruct((3, 3, 3, 4), dtype)
    (eqn,) = jax.make_jaxpr(run)(*structs).eqns
    assert (windows.by_features(eqn) is not None) == is_written


@pytest.mark.parametrize(
    ("padding", "is_right"), [(((-1, 1), (0, 0)), False), (((-1, 0), (2, -1)), True), (((1, 2), (0, 0)), True)]
)
def test_what_the_library_misreads_stays(padding, is_right):
    """With such padding XLA's CPU library reads beside the images; what it computes without a library is right."""

    def run(x, w, numbers=("NHWC", "HWIO", "NHWC"), groups=2):
        return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=numbers, batch_group_count=groups)

    x, w = drawn((4, 30, 40, 8)), drawn((3, 3, 8, 4), seed=1)
    (eqn,) = jax.make_jaxpr(run)(x, w).eqns
    assert (windows.by_features(eqn) is not None) == is_right
    if is_right:
        same(run, x, w, rule=windows.by_features)
    turned = jax.make_jaxpr(lambda x, w: run(x, w, ("NCHW", "HWIO", "NHWC"), 1))(jnp.moveaxis(x, -1, 1), w).eqns[0]
    assert (windows.in_order(turned) is not None) == is_right


@pytest.mark.parametrize(
    ("images", "kernel", "is_written"),
    [
        ((2, 8, 8, 6), (7, 7, 3, 8), True),
        ((2, 14, 14, 6), (7, 7, 3, 8), False),  # more results than a window has elements
        ((2, 15, 15, 6), (8, 8, 3, 8), False),  # as many
        ((2, 16, 16, 6), (9, 9, 3, 8), True),  # 64 windows
        ((2, 17, 17, 6), (9, 9, 3, 8), False),  # too many
        ((2, 8, 8, 6), (7, 7, 6, 8), False),  # one group
        ((64, 128, 128, 64), (127, 127, 32, 8), False),  # windows of four gigabytes
    ],
)
def test_few_long_windows_of_groups_are_one_product(images, kernel, is_written):
    def run(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=images[-1] // kernel[-2],
        )

    (eqn,) = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(s, "float32") for s in (images, kernel))).eqns
    assert (windows.of_examples(eqn) is not None) == is_written


@pytest.mark.sampled(5, cover=("dtype",))
@pytest.mark.parametrize(CONVOLVED, OF_EVERY_ORDER)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_group_of_channels_by_itself(window, strides, dilated, padding, numbers, dtype):
    """They are in the order of the library, which has no others in bodies of loops."""
    dims = dict(zip([d for d in numbers[1] if d not in "IO"], window, strict=True))
    kernel = drawn([{"I": 8, "O": 30}.get(d) or dims[d] for d in numbers[1]], dtype, seed=1)
    images = drawn([{"N": 2, "C": 24}.get(d) or 7 for d in numbers[0]], dtype)

    def run(x, w):
        return lax.conv_general_dilated(
            x, w, strides, padding, rhs_dilation=dilated, dimension_numbers=numbers, feature_group_count=3
        )

    written = windows.each_group(jax.make_jaxpr(run)(images, kernel).eqns[0])
    made = [e for e in jax.make_jaxpr(written)(images, kernel).eqns if e.primitive.name == "conv_general_dilated"]
    assert len(made) == 3
    assert not any(lies_otherwise(e) for e in made)
    (found,) = written(images, kernel)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    scale = float(jnp.max(jnp.abs(found)))
    assert jnp.allclose(found, run(images, kernel), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("channels", "results", "groups", "padding", "is_written"),
    [
        (8, 8, 2, 1, True),
        (8, 8, 32, 1, True),
        (8, 8, 33, 1, False),  # many
        (7, 8, 2, 1, False),  # of few channels
        (8, 7, 2, 1, False),
        (8, 8, 1, 1, False),
        (8, 8, 2, -1, False),  # of which the library would read beside the images
    ],
)
def test_few_groups_of_many_channels_are_apart(channels, results, groups, padding, is_written):
    def run(x, w):
        return lax.conv_general_dilated(
            x, w, (1,), [(padding, 1)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
        )

    structs = [((2, 9, groups * channels), "float32"), ((3, channels, groups * results), "float32")]
    (eqn,) = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*s) for s in structs)).eqns
    assert (windows.each_group(eqn) is not None) == is_written


def groups_left(made):
    """The numbers of groups, of channels and of images, of the convolutions that are left."""
    found = [e.params for e in made.jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    return {(p["feature_group_count"], p["batch_group_count"]) for p in found}


def test_a_step_of_a_grouped_net_has_no_groups_of_images_left_on_a_cpu():
    """The gradient of the weights has groups of channels in their place, the other convolutions none."""

    def loss(w, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        found = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4)
        return jnp.sum(jnp.tanh(found / 20))

    w, x = drawn((3, 3, 16, 64)), drawn((8, 28, 28, 64), seed=1)
    plain = jax.make_jaxpr(jax.grad(loss, (0, 1)))(w, x)
    assert groups_left(plain) == {(4, 1), (1, 4)}
    made, changed = decomposed(jax.grad(loss, (0, 1)), w, x)
    assert changed
    assert groups_left(made) == {(4, 1), (1, 1)}


def test_gradients_of_each_example_are_no_convolutions_on_a_gpu():
    def loss(w, x):
        found = lax.conv_general_dilated(x[None], w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(jnp.tanh(found / 20))

    w, x = drawn((3, 3, 16, 32)), drawn((32, 16, 16, 16), seed=1)
    gradients = jax.vmap(jax.grad(loss), (None, 0))
    assert (32, 1) in groups_left(jax.make_jaxpr(gradients)(w, x))
    made, changed = decomposed(gradients, w, x, device="gpu")
    assert changed
    assert groups_left(made) == {(1, 1)}
