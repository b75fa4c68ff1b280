"""What no rule may touch, and what must not depend on how the caller has configured JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasfuse as pf
from pallasfuse import _compat, decompositions
from pallasfuse.decompositions import Decomposer
from pallasfuse.device import assumed
from pallasfuse.options import FuseOptions
from tests.decompositions.test_decomposer import IMAGES, WEIGHTS, operations, smoothed
from tests.decompositions.test_windows import drawn

UNCHECKED = FuseOptions(check=False, price=True)


@pytest.fixture(autouse=True)
def every_rule(monkeypatch):
    """Every operation is large enough, and every rule applied."""
    monkeypatch.setattr(decompositions, "_LEAST_US", -1.0)


def forced(function, *args):
    return Decomposer(assumed("cpu"), (), 0.0, lambda written, other: True).of(jax.make_jaxpr(function)(*args))


def product(x, y):
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())))


@pytest.mark.parametrize(
    "function, args",
    [
        (product, (jnp.ones((2, 16), "float8_e4m3fn"), jnp.ones((16, 16), "float8_e4m3fn"))),
        (product, (jnp.ones((2, 16), "complex64"), jnp.ones((16, 16), "complex64"))),
        (
            lambda x: lax.reduce_window(x, jnp.asarray(-448, x.dtype), lax.max, (3, 3), (1, 1), "SAME"),
            (jnp.ones((8, 8), "float8_e4m3fn"),),
        ),
        (lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 4), (1, 1), "VALID"), (jnp.ones((9, 2)),)),
        (lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 2), (1, 1), "SAME"), (jnp.ones((3, 0)),)),
        (lax.cumprod, (jnp.ones((90, 2), "complex64"),)),
        (smoothed, (jnp.ones((4, 16, 8), "bool"), jnp.ones((3, 1, 8), "bool"))),
        (lambda x: smoothed(x, jnp.ones((5, 1, 2))), (jnp.ones((2, 0, 2)),)),
    ],
    ids=[
        "float8",
        "complex",
        "float8 pool",
        "window too long",
        "empty",
        "complex cumprod",
        "bool",
        "empty convolution",
    ],
)
def test_what_is_in_doubt_stays(function, args):
    names = set(operations(jax.make_jaxpr(function)(*args)))
    assert set(operations(forced(function, *args))) == names
    jax.block_until_ready(pf.fuse(function, options=UNCHECKED)(*args))


@pytest.mark.parametrize("configured", [jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")])
def test_how_jax_is_configured_does_not_matter(configured):
    halves = IMAGES.astype("bfloat16"), WEIGHTS.astype("bfloat16")
    wanted = [smoothed(IMAGES), smoothed(*halves)]
    with configured:
        for args, want in zip(((IMAGES, WEIGHTS), halves), wanted, strict=True):
            fused = pf.fuse(smoothed, options=UNCHECKED)
            assert fused.explain(*args).written_out
            np.testing.assert_allclose(fused(*args).astype("float32"), want.astype("float32"), rtol=2e-2, atol=2e-2)


def test_a_rule_that_fails_leaves_its_operation(monkeypatch):
    def broken(eqn):
        raise ValueError("a bug")

    monkeypatch.setitem(decompositions._RULES["cpu"], "conv_general_dilated", (broken,))
    assert "conv_general_dilated" in operations(forced(smoothed, IMAGES))

    monkeypatch.setitem(decompositions._RULES["cpu"], "conv_general_dilated", (lambda eqn: broken,))
    assert "conv_general_dilated" in operations(forced(smoothed, IMAGES))


@pytest.mark.sampled(3, cover=("dtype",))
@pytest.mark.parametrize("exponent", [-1.5, -2.5, -4.5, 1.5, 2.5, 4.5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_power_overflows_on_its_way(exponent, dtype):
    """Results between the smallest and the largest normal number, computed without anything smaller or larger."""
    limits = jnp.finfo(dtype)
    ends = sorted(float(v) ** (1 / exponent) for v in (limits.tiny * 4, limits.max / 4))
    low, high = max(ends[0], float(limits.tiny) * 4), min(ends[1], float(limits.max) / 4)
    x = jnp.asarray(np.geomspace(low, high, 500), dtype)
    made = forced(lambda a: a**exponent, x)
    assert "pow" not in operations(made)
    found, wanted = (
        jax.jit(lambda a: _compat.eval_jaxpr(made, made.consts, a))(x)[0],
        np.asarray(x, "float64") ** exponent,
    )
    np.testing.assert_allclose(found.astype("float32"), wanted, rtol=4 * float(limits.eps))


def test_a_scope_may_lead_into_a_loop():
    def function(x):
        def trip(c, _):
            with jax.named_scope("kept"):
                return smoothed(c), None

        with jax.named_scope("outer"):
            return lax.scan(trip, x, length=3)[0]

    for exclude, stays in (("outer/kept", True), ("outer", True), ("kept", True), ("other", False)):
        made = Decomposer(assumed("cpu"), (exclude,), 1.25).of(jax.make_jaxpr(function)(IMAGES))
        assert ("conv_general_dilated" in operations(made)) == stays


def test_half_precision_is_added_up_in_float32():
    x = jnp.abs(drawn((2000, 3), "bfloat16"))
    exact = np.cumsum(np.asarray(x, "float64"), 0)
    made = forced(lax.cumsum, x)
    assert "cumsum" not in operations(made)
    (found,) = _compat.eval_jaxpr(made, made.consts, x)
    np.testing.assert_allclose(np.asarray(found, "float64"), exact, rtol=2**-8)
