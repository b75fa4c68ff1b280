"""Modules of Equinox with random weights, batched by `jax.vmap` as its users do."""

from typing import Any

import jax

from benchmarks.workloads.registry import Built, Size, half, like, normal, pick, program


def _module(size: Size, make: Any, *inputs: Any) -> Built:
    """A module as a function of its arrays and inputs."""
    import equinox as eqx

    module = eqx.filter_eval_shape(make, jax.random.key(0))
    structs, rest = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return Built(lambda arrays, *xs: eqx.combine(arrays, rest)(*xs), (like(structs, half(size)), *inputs))


@program("equinox-attention", "equinox")
def _attention(size: Size, tokens: int | None = None) -> Built:
    import equinox as eqx

    batch, most, n, heads = pick(size, (8, 1024, 1024, 16), (2, 256, 256, 4), (1, 8, 16, 2))
    batch, tokens = (1, tokens) if tokens else (batch, most)

    class Batched(eqx.Module):
        attention: eqx.nn.MultiheadAttention

        def __call__(self, x):
            return jax.vmap(lambda row: self.attention(row, row, row))(x)

    def make(key: Any) -> Any:
        return Batched(eqx.nn.MultiheadAttention(heads, n, key=key))

    return _module(size, make, normal(batch, tokens, n, dtype=half(size)))


@program("equinox-encoder-block", "equinox")
def _encoder(size: Size, tokens: int | None = None) -> Built:
    import equinox as eqx

    batch, most, n, heads = pick(size, (8, 512, 768, 12), (2, 256, 256, 4), (1, 8, 16, 2))
    batch, tokens = (1, tokens) if tokens else (batch, most)

    class Block(eqx.Module):
        norms: list
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.norms = [eqx.nn.LayerNorm(n), eqx.nn.LayerNorm(n)]
            self.attention = eqx.nn.MultiheadAttention(heads, n, key=first)
            self.mlp = eqx.nn.MLP(n, n, 4 * n, 1, activation=jax.nn.gelu, key=second)

        def one(self, x):
            h = jax.vmap(self.norms[0])(x)
            x = x + self.attention(h, h, h)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

        def __call__(self, x):
            return jax.vmap(self.one)(x)

    return _module(size, Block, normal(batch, tokens, n, dtype=half(size)))


@program("equinox-mlp", "equinox")
def _mlp(size: Size) -> Built:
    import equinox as eqx

    batch, n, depth = pick(size, (8192, 512, 4), (1024, 256, 3), (4, 16, 2))

    class Batched(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, x):
            return jax.vmap(self.mlp)(x)

    return _module(
        size, lambda key: Batched(eqx.nn.MLP(n, n, 4 * n, depth, key=key)), normal(batch, n, dtype=half(size))
    )


@program("equinox-layer-norm-linear", "equinox")
def _layer_norm(size: Size) -> Built:
    import equinox as eqx

    rows, n = pick(size, (8192, 1024), (1024, 512), (4, 16))

    class Head(eqx.Module):
        norm: eqx.nn.LayerNorm
        linear: eqx.nn.Linear

        def __call__(self, x):
            return jax.vmap(lambda row: jax.nn.softmax(self.linear(self.norm(row))))(x)

    def make(key: Any) -> Any:
        return Head(eqx.nn.LayerNorm(n), eqx.nn.Linear(n, n, key=key))

    return _module(size, make, normal(rows, n, dtype=half(size)))
