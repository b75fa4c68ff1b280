"""Convolutions in bodies of loops and in branches, whose dimensions XLA's CPU backend does not bring into its library's order."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pallasfuse as pf
from pallasfuse import _compat
from pallasfuse.decompositions import Decomposer, windows
from pallasfuse.jaxpr_frontend import convert, flatten
from pallasfuse.price.xla import price_xla
from pallasfuse.targets import XLA_CPU

CPU = XLA_CPU.device


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def convolutions(jaxpr):
    """All convolutions of a program, those of its bodies too, and whether a library has each."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            found.append(windows.in_order(eqn) is None)
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    found += convolutions(inner)
    return found


def second(x, w):
    """Channels are second, as in `lax.conv`."""
    return lax.conv(x, w, (1, 1), "SAME")


def trained(w, batches):
    """Steps down the gradient, one for each of some batches."""

    def loss(w, x):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(jax.nn.relu(y) ** 2)

    return lax.scan(lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), None), w, batches)[0]


@settings(max_examples=40, deadline=None)
@given(
    orders=st.tuples(*[st.permutations(range(4))] * 3), groups=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    strides=st.tuples(*[st.integers(1, 2)] * 2), between=st.tuples(*[st.integers(1, 2)] * 2), holes=st.integers(1, 2),
)  # fmt: skip
def test_any_order_of_dimensions(orders, groups, strides, between, holes):
    features, batches = groups
    numbers = lax.ConvDimensionNumbers(*map(tuple, orders))
    shapes = [[0] * 4, [0] * 4]
    for shape, spec, sizes in zip(
        shapes, numbers[:2], ((2 * batches, 8 * features, 16, 15), (16, 8, 3, 2)), strict=True
    ):
        for at, size in zip(spec, sizes, strict=True):
            shape[at] = size

    def written(x, w):
        return lax.conv_general_dilated(
            x, w, strides, ((1, 0), (0, 2)), between, (holes, 1), numbers, features, batches, lax.Precision.HIGHEST
        )

    x, w = drawn(*shapes[0]), drawn(*shapes[1], seed=1)
    (eqn,) = jax.make_jaxpr(written)(x, w).eqns
    run = windows.in_order(eqn)
    if run is None:
        assert batches > 1 or numbers == lax.conv_dimension_numbers(x.shape, w.shape, ("NHWC", "HWIO", "NHWC"))
        return
    np.testing.assert_allclose(run(x, w)[0], written(x, w), rtol=1e-5, atol=1e-5)
    (inside,) = [e for e in jax.make_jaxpr(run)(x, w).eqns if e.primitive.name == "conv_general_dilated"]
    assert windows.in_order(inside) is None


@pytest.mark.parametrize("dimensions", [1, 3])
def test_windows_along_one_dimension_and_three(dimensions):
    x, w = drawn(8, 16, *[12] * dimensions), drawn(32, 16, *[2] * dimensions, seed=1)
    (eqn,) = jax.make_jaxpr(lambda x, w: lax.conv(x, w, [1] * dimensions, "SAME"))(x, w).eqns
    np.testing.assert_allclose(windows.in_order(eqn)(x, w)[0], _compat.bind(eqn, [x, w])[0], rtol=1e-5, atol=1e-5)


def looped(x, w):
    return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(second(x, w)), x)


def chosen(x, w):
    return lax.cond(x[0, 0, 0, 0] > 0, lambda: second(x, w), lambda: 2 * x)


def until(x, w):
    return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: 0.1 * second(x, w), x)


@pytest.mark.parametrize("function", [looped, chosen, until])
def test_in_bodies_the_library_has_all_of_them(function):
    x, w = drawn(2, 16, 8, 8), 0.08 * drawn(16, 16, 3, 3, seed=1)  # 144 terms: a result is about as large as its terms
    jaxpr = flatten(jax.make_jaxpr(function)(x, w))
    made = Decomposer(CPU, (), 1.2).of(jaxpr)
    assert convolutions(jaxpr) == [False] and convolutions(made) == [True]
    np.testing.assert_allclose(_compat.eval_jaxpr(made, made.consts, x, w)[0], function(x, w), rtol=1e-5, atol=1e-5)
    # elsewhere XLA does that itself, and so do the libraries of GPUs
    outside = flatten(jax.make_jaxpr(second)(x, w))
    assert Decomposer(CPU, (), 1.2).of(outside) is outside
    assert Decomposer(replace(CPU, platform="gpu"), (), 1.2).of(jaxpr) is jaxpr


def test_what_the_user_leaves_to_xla_stays():
    left = pf.leave(second)
    jaxpr = flatten(
        jax.make_jaxpr(lambda x, w: lax.fori_loop(0, 3, lambda _, x: left(x, w), x))(
            drawn(2, 8, 6, 6), drawn(8, 8, 3, 3)
        )
    )
    assert Decomposer(CPU, (), 1.2).of(jaxpr) is jaxpr


def test_gradients_in_steps_are_planned_so_without_a_clock():
    w, batches = drawn(3, 3, 32, 32), drawn(4, 16, 16, 16, 32, seed=1)
    written = flatten(jax.make_jaxpr(trained)(w, batches))
    assert sorted(convolutions(written)) == [False, True]
    plan = pf.fuse(trained, options=pf.FuseOptions(check=False, price=True)).explain(w, batches)
    assert all(convolutions(plan.converted.jaxpr))


def test_the_price_has_what_no_library_computes():
    """Five steps take 869 ms on two cores, and 12 where a library has their convolutions."""
    arguments = (
        jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32),
        jax.ShapeDtypeStruct((5, 32, 16, 16, 32), jnp.float32),
    )
    written = flatten(jax.make_jaxpr(trained)(*arguments))
    made = Decomposer(CPU, (), 1.2).of(written)
    before_us, us = (price_xla(convert(flatten(j)).program, CPU).us for j in (written, made))
    assert 869_000 / 8 < before_us < 1.6 * 869_000
    assert 12_000 / 1.8 < us < 1.8 * 12_000
    # a branch has no library for them either, and the program outside of both has one
    x, w = jax.ShapeDtypeStruct((16, 32, 32, 32), jnp.float32), jax.ShapeDtypeStruct((32, 32, 3, 3), jnp.float32)
    branch, alone = (price_xla(convert(flatten(jax.make_jaxpr(f)(x, w))).program, CPU).us for f in (chosen, second))
    assert 142_000 / 3 < branch < 1.6 * 142_000 and alone < branch / 8


def test_orders_that_are_the_librarys():
    own = lax.conv_dimension_numbers((1, 2, 3, 4), (1, 1, 4, 5), ("NHWC", "HWIO", "NHWC"))

    def lie_otherwise(lhs, rhs):
        numbers = lax.ConvDimensionNumbers(lhs, rhs, lhs)
        x, w = drawn(6, 6, 6, 6), drawn(6, 6, 6, 6)
        (eqn,) = jax.make_jaxpr(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers))(
            x, w
        ).eqns
        return windows.in_order(eqn) is not None

    orders = itertools.product(itertools.permutations(range(4)), [own.rhs_spec, own.lhs_spec])
    assert [o for o in orders if not lie_otherwise(*o)] == [(own.lhs_spec, own.rhs_spec)]


def equation(dtype="float32", size=16, channels=16, batches=1, taps=3):
    x, w = jnp.ones((2, channels, size, size), dtype), jnp.ones((channels, channels, taps, taps), dtype)
    (eqn,) = jax.make_jaxpr(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", batch_group_count=batches))(
        x, w
    ).eqns
    return eqn


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_types_that_a_library_has(dtype):
    eqn = equation(dtype)
    x, w = (drawn(*v.aval.shape, seed=n).astype(dtype) for n, v in enumerate(eqn.invars))
    (found,) = windows.in_order(eqn)(x, w)
    (written,) = _compat.bind(eqn, [x, w])
    assert found.dtype == written.dtype
    scale = float(jnp.max(jnp.abs(written)))
    np.testing.assert_allclose(*(np.asarray(v, np.complex64) for v in (found, written)), rtol=0.02, atol=0.01 * scale)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "int32"}, {"dtype": "int8"}, {"batches": 2}, {"size": 6, "channels": 2}, {"taps": 1, "channels": 4}],
)
def test_what_no_library_has_and_what_is_small_stays(changes):
    """On two cores these take 1.7 to 9 times as long with transpositions around them, or as long as without."""
    assert windows.in_order(equation()) is not None and windows.in_order(equation(**changes)) is None


def test_a_loop_without_anything_else_to_write_in_another_way():
    x, w = drawn(2, 32, 6, 6), drawn(32, 32, 3, 3, seed=1)
    jaxpr = flatten(jax.make_jaxpr(lambda x, w: lax.fori_loop(0, 3, lambda _, x: second(x, w), x))(x, w))
    assert convolutions(Decomposer(CPU, (), 1.2).of(jaxpr)) == [True]
    spared = Decomposer(CPU, (), 1.2, spared=frozenset({"conv_general_dilated"}))
    assert convolutions(spared.of(jaxpr)) == [False]


def test_only_cpus_tell_bodies_apart():
    inside = CPU.inside_loops()
    assert inside.in_body and inside.inside_loops() is inside and CPU.inside_branches().in_body
    other = replace(CPU, platform="gpu", looped_call_us=CPU.call_us)
    assert other.inside_branches() is other and other.inside_loops() is other
