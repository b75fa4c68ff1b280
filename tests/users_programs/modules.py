"""Modules of Flax, and a whole layer of a decoder."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax

from tests.users_programs.attention import rotate
from tests.users_programs.registry import BF16, F32, Program, Programs

PROGRAMS = Programs()
program = PROGRAMS.register


def _of_linen(module, *arguments):
    variables = jax.eval_shape(lambda: module.init(jax.random.key(0), *(jnp.zeros(s, d) for s, d in arguments)))
    drawn = jax.tree.map(lambda v: np.random.default_rng(3).normal(0.1, 0.3, v.shape).astype(v.dtype), variables)
    return lambda *x: module.apply(drawn, *x)


def _register_linen(name, module, *arguments):
    PROGRAMS[name] = Program(_of_linen(module, *arguments), arguments)


class _EncoderBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)(y)
        y = linen.Dense(16)(linen.LayerNorm()(x))
        return x + linen.Dense(8)(linen.gelu(y))


_register_linen("linen_encoder_block", _EncoderBlock(), ((2, 10, 8), F32))
_register_linen("linen_layer_norm", linen.LayerNorm(), ((10, 24), F32))
_register_linen("linen_group_norm", linen.GroupNorm(num_groups=4), ((2, 5, 5, 8), F32))
_register_linen("linen_rms_norm_in_bfloat16", linen.RMSNorm(dtype=jnp.bfloat16), ((10, 24), BF16))
_register_linen("linen_weight_norm", linen.WeightNorm(linen.Dense(6)), ((10, 24), F32))


class _NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
        self.out = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.out(self.attention(self.norm(x)))


PROGRAMS["nnx_block"] = Program(_NnxBlock(nnx.Rngs(0)), (((2, 10, 8), F32),))


@program((10, 16), (16,), (16, 48), (16, 16), (16,), (16, 32), (16, 32), (32, 16))
def decoder_layer(x, g, qkv, o, h, gate, up, down):
    def norm(x, g):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * g

    q, k, v = (y.reshape(10, 2, 8).transpose(1, 0, 2) for y in jnp.split(norm(x, g) @ qkv, 3, -1))
    q, k = rotate(q), rotate(k)
    scores = jnp.where(jnp.tril(jnp.ones((10, 10), bool)), q @ k.transpose(0, 2, 1) / jnp.sqrt(8.0), -1e30)
    x = x + (jax.nn.softmax(scores, -1) @ v).transpose(1, 0, 2).reshape(10, 16) @ o
    y = norm(x, h)
    return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
