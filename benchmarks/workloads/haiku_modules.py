"""Modules of Haiku with random weights."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import Built, Size, half, like, normal, pick, program


def _transformed(size: Size, function: Any, *inputs: Any) -> Built:
    """A transformed function of its parameters and inputs."""
    import haiku as hk

    pure = hk.without_apply_rng(hk.transform(function))
    structs = jax.eval_shape(lambda *xs: pure.init(jax.random.key(0), *xs), *(r.struct for r in inputs))
    return Built(pure.apply, (like(structs, half(size)), *inputs))


def _sizes(size: Size, tokens: int | None = None) -> tuple[int, int, int, int]:
    """Returns the batch, tokens, features and heads of a module at a size, or for one sequence of so many tokens."""
    batch, most, n, heads = pick(size, (8, 1024, 768, 12), (2, 256, 256, 4), (1, 8, 16, 2))
    return (1, tokens, n, heads) if tokens else (batch, most, n, heads)


@program("haiku-attention", "haiku")
def _attention(size: Size, tokens: int | None = None) -> Built:
    import haiku as hk

    batch, tokens, n, heads = _sizes(size, tokens)

    def attention(x: Any) -> Any:
        module = hk.MultiHeadAttention(heads, n // heads, w_init=hk.initializers.VarianceScaling(1.0))
        mask = jnp.tril(jnp.ones((1, 1, tokens, tokens), bool))
        return module(x, x, x, mask=mask)

    return _transformed(size, attention, normal(batch, tokens, n, dtype=half(size)))


@program("haiku-transformer-block", "haiku")
def _block(size: Size, tokens: int | None = None) -> Built:
    import haiku as hk

    batch, tokens, n, heads = _sizes(size, tokens)

    def norm(x: Any) -> Any:
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    def block(x: Any) -> Any:
        init = hk.initializers.VarianceScaling(0.5)
        h = norm(x)
        x = x + hk.MultiHeadAttention(heads, n // heads, w_init=init)(h, h, h)
        return x + hk.nets.MLP([4 * n, n], activation=jax.nn.gelu, w_init=init)(norm(x))

    return _transformed(size, block, normal(batch, tokens, n, dtype=half(size)))
