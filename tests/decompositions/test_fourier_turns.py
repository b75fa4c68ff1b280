"""Fourier transforms on a CPU, each after the one before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallasfuse import FuseOptions, _compat, fuse
from pallasfuse.decompositions.fourier_turns import after, in_turn, transforms
from pallasfuse.execution import as_function
from pallasfuse.jaxpr_frontend import flatten


def drawn(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def spectra(x, y):
    return jnp.fft.rfft(x), jnp.fft.fft(y), jnp.fft.rfft(y)


def looping(x, y):
    def trip(carry, each):
        return carry + jnp.fft.irfft(jnp.fft.rfft(carry) * jnp.fft.rfft(each)), jnp.abs(jnp.fft.rfft(each * 2))

    return lax.scan(trip, x, y)


def reached(jaxpr):
    """For each transform of a program, and each loop of some, returns the numbers of those before it that it depends on."""
    behind, found, eqns = {}, [], flatten(jaxpr).eqns
    for eqn in eqns:
        from_ = set().union(*(behind.get(a, set()) for a in eqn.invars if not isinstance(a, _compat.Literal)))
        if transforms(eqn):
            found.append(from_)
            from_ = from_ | {len(found) - 1}
        behind |= dict.fromkeys(eqn.outvars, from_)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "complex64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 0.0, 3e38])
def test_an_operand_is_what_it_was(dtype, value):
    earlier = jnp.full((2, 3), value).astype(dtype)
    operand = jnp.asarray([np.nan, 1, -np.inf, 0])
    np.testing.assert_array_equal(jax.jit(after)(earlier, operand), operand)


def test_each_transform_depends_on_all_before_it():
    x = drawn(4, 16)
    jaxpr = jax.make_jaxpr(spectra)(x, x + 1)
    assert reached(jaxpr) == [set(), set(), set()]
    found = in_turn(jaxpr)
    assert reached(found) == [set(), {0}, {0, 1}]
    for one, own in zip(_compat.eval_jaxpr(found, found.consts, x, x + 1), spectra(x, x + 1), strict=True):
        np.testing.assert_array_equal(one, own)


def test_transforms_in_loops_wait_too():
    x, y = drawn(16), drawn(3, 16, seed=1)
    jaxpr = jax.make_jaxpr(lambda x, y: (looping(x, y), jnp.fft.rfft(x)))(x, y)
    found = in_turn(jaxpr)
    assert reached(found) == [set(), {0}]
    (loop,) = (e for e in flatten(found).eqns if e.primitive.name == "scan")
    body = reached(loop.params["jaxpr"])
    assert [len(one) for one in body] == [0, 1, 2, 3]
    own = jax.tree.leaves((looping(x, y), jnp.fft.rfft(x)))
    for one, wanted in zip(_compat.eval_jaxpr(found, found.consts, x, y), own, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)


def test_a_program_with_one_transform_stays():
    for function in (jnp.fft.rfft, lambda x: x * 2):
        jaxpr = jax.make_jaxpr(function)(drawn(8))
        assert in_turn(jaxpr) is jaxpr


def test_a_program_with_kernels_has_its_transforms_in_turn():
    def attended(q, k, v, x, y):
        probs = jax.nn.softmax(q @ k.T, axis=-1)
        return probs @ v, *spectra(x, y)

    arrays = (drawn(512, 32), drawn(512, 32, seed=1), drawn(512, 32, seed=2), drawn(4, 64), drawn(4, 64, seed=3))
    fused = fuse(attended, options=FuseOptions(check=False))
    plan = fused.explain(*arrays)
    assert plan.kernels
    assert reached(jax.make_jaxpr(as_function(plan))(*arrays)) == [set(), {0}, {0, 1}]
    for one, own in zip(fused(*arrays), attended(*arrays), strict=True):
        np.testing.assert_allclose(one, own, rtol=1e-4, atol=1e-4)
