"""A function of which nothing is fused is the very program that `jax.jit` compiles; what is fused is shared by its calls."""

import jax
import jax.numpy as jnp
import pytest

import pallasfuse as pf
from pallasfuse.options import FuseOptions

X = jnp.ones((4, 8))


def unused(x):
    kept, _ = jnp.sin(x) * 2, jnp.cos(x).sum()
    return kept


@jax.jit
def nested(x):
    return jnp.tanh(x) + 1


def looped(x):
    return jax.lax.fori_loop(0, 3, lambda i, y: nested(y) * x, x)


def text(function):
    """The lowered program, which has one name whatever is lowered."""

    def program(x):
        return function(x)

    return jax.jit(program).lower(X).as_text()


@pytest.mark.parametrize("function", [unused, lambda x: nested(nested(x)), looped], ids=["unused", "nested", "loop"])
def test_without_a_kernel_the_program_is_the_plain_one(function):
    fused = pf.fuse(function, options=FuseOptions(check=False))
    assert not fused.explain(X).kernels
    assert text(fused) == text(function)


def test_calls_of_one_fused_function_share_its_kernels():
    fused = pf.fuse(lambda x: jax.nn.softmax(x, -1), options=FuseOptions(check=False, price=False))

    def calls(number):
        def function(x):
            for _ in range(number):
                x = fused(x)
            return x

        return function

    assert fused.explain(X).kernels
    assert len(text(calls(9))) < 1.5 * len(text(calls(2)))
    assert jnp.allclose(jax.jit(calls(2))(X), jax.nn.softmax(jax.nn.softmax(X, -1), -1))
