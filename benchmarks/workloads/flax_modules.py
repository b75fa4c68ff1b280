"""Modules of Flax, linen and nnx, with random weights: attention, encoder blocks, a vision layer."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import Built, Size, booleans, half, like, normal, pick, program


def _sizes(size: Size, tokens: int | None = None) -> tuple[int, int, int, int]:
    """Returns the batch, tokens, features and heads of a module at a size, or for one sequence of so many tokens."""
    batch, most, n, heads = pick(size, (8, 1024, 1024, 16), (2, 256, 256, 4), (1, 8, 16, 2))
    return (1, tokens, n, heads) if tokens else (batch, most, n, heads)


def _linen(size: Size, module: Any, *inputs: Any) -> Built:
    """A linen module as a function of its parameters and inputs."""
    structs = [r.struct for r in inputs]
    shapes = jax.eval_shape(lambda *xs: module.init(jax.random.key(0), *xs), *structs)
    return Built(module.apply, (like(shapes, half(size)), *inputs))


@program("linen-self-attention", "flax")
def _linen_attention(size: Size, tokens: int | None = None) -> Built:
    from flax import linen as nn

    batch, tokens, n, heads = _sizes(size, tokens)
    return _linen(
        size, nn.MultiHeadDotProductAttention(heads, dtype=half(size)), normal(batch, tokens, n, dtype=half(size))
    )


@program("linen-masked-attention", "flax")
def _linen_masked(size: Size, tokens: int | None = None) -> Built:
    from flax import linen as nn

    batch, tokens, n, heads = _sizes(size, tokens)

    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x, there):
            mask = nn.combine_masks(nn.make_causal_mask(there), nn.make_attention_mask(there, there))
            return nn.MultiHeadDotProductAttention(heads, dtype=half(size))(x, x, mask=mask)

    return _linen(size, Masked(), normal(batch, tokens, n, dtype=half(size)), booleans(batch, tokens))


@program("linen-encoder-block", "flax")
def _linen_encoder(size: Size, tokens: int | None = None) -> Built:
    from flax import linen as nn

    batch, tokens, n, heads = _sizes(size, tokens)
    dtype = half(size)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(heads, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
            h = nn.Dense(4 * n, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
            return x + nn.Dense(n, dtype=dtype)(nn.gelu(h))

    return _linen(size, Block(), normal(batch, tokens, n, dtype=dtype))


@program("linen-mixer-block", "flax")
def _linen_mixer(size: Size) -> Built:
    """A block of MLP-Mixer: products over tokens, then over channels."""
    from flax import linen as nn

    batch, tokens, n = pick(size, (32, 196, 768), (4, 196, 256), (1, 8, 16))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            y = nn.Dense(tokens)(nn.gelu(nn.Dense(2 * tokens)(y)))
            x = x + jnp.swapaxes(y, 1, 2)
            y = nn.LayerNorm()(x)
            return x + nn.Dense(n)(nn.gelu(nn.Dense(4 * n)(y)))

    return _linen(size, Block(), normal(batch, tokens, n, dtype=half(size)))


@program("linen-group-norm-resnet-block", "flax")
def _linen_resnet(size: Size) -> Built:
    from flax import linen as nn

    batch, height, channels = pick(size, (16, 32, 256), (2, 32, 64), (1, 4, 8))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = x
            for _ in range(2):
                y = nn.Conv(channels, (3, 3))(nn.swish(nn.GroupNorm(min(32, channels // 2))(y)))
            return x + y

    return _linen(size, Block(), normal(batch, height, height, channels, dtype=half(size)))


def _nnx(size: Size, make: Any, *inputs: Any) -> Built:
    """An nnx module as a function of its state and inputs."""
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    others = {k: v for k, v in nnx.to_flat_state(state) if not isinstance(v, nnx.Param)}
    assert not others, f"parameters only: {list(others)}"
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return Built(lambda state, *xs: nnx.merge(graph, state)(*xs), (like(structs, half(size)), *inputs))


@program("nnx-self-attention", "flax")
def _nnx_attention(size: Size, tokens: int | None = None) -> Built:
    from flax import nnx

    batch, tokens, n, heads = _sizes(size, tokens)

    def make(rngs: Any) -> Any:
        return nnx.MultiHeadAttention(heads, n, dtype=half(size), decode=False, rngs=rngs)

    return _nnx(size, make, normal(batch, tokens, n, dtype=half(size)))


@program("nnx-encoder-block", "flax")
def _nnx_encoder(size: Size, tokens: int | None = None) -> Built:
    from flax import nnx

    batch, tokens, n, heads = _sizes(size, tokens)
    dtype = half(size)

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = (nnx.LayerNorm(n, dtype=dtype, rngs=rngs) for _ in range(2))
            self.attention = nnx.MultiHeadAttention(heads, n, dtype=dtype, decode=False, rngs=rngs)
            self.up, self.down = (
                nnx.Linear(n, 4 * n, dtype=dtype, rngs=rngs),
                nnx.Linear(4 * n, n, dtype=dtype, rngs=rngs),
            )

        def __call__(self, x):
            x = x + self.attention(self.first(x))
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    return _nnx(size, Block, normal(batch, tokens, n, dtype=dtype))


@program("nnx-rms-norm-gated-mlp", "flax")
def _nnx_gated(size: Size) -> Built:
    from flax import nnx

    batch, tokens, n, _ = _sizes(size)
    dtype = half(size)

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(n, dtype=dtype, rngs=rngs)
            self.gate, self.up = (nnx.Linear(n, 3 * n, use_bias=False, dtype=dtype, rngs=rngs) for _ in range(2))
            self.down = nnx.Linear(3 * n, n, use_bias=False, dtype=dtype, rngs=rngs)

        def __call__(self, x):
            h = self.norm(x)
            return x + self.down(nnx.silu(self.gate(h)) * self.up(h))

    return _nnx(size, Block, normal(batch, tokens, n, dtype=dtype))
