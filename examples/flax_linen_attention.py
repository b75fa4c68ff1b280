"""Flax linen: `nn.MultiHeadDotProductAttention` with `attention_fn` replaced by a fused plain function."""

import jax
import jax.numpy as jnp
from flax import linen as nn

import pallasfuse as pf


@pf.fuse
def masked_attention(q, k, v, mask):
    """q, k, v [batch, length, heads, dim]; mask [batch, 1, query, key], true where visible; result as q."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q / q.shape[-1] ** 0.5, k)
    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def attention_fn(query, key, value, bias=None, mask=None, **options):
    """The signature linen calls. This example needs neither bias nor dropout."""
    assert bias is None and options.get("deterministic", True)
    return masked_attention(query, key, value, mask)


def main():
    x = jax.random.normal(jax.random.key(0), (2, 300, 128))
    lengths = jnp.array([300, 211])  # the second sequence is padded
    tokens = jnp.arange(300) < lengths[:, None]
    mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(tokens | True, tokens))
    stock = nn.MultiHeadDotProductAttention(num_heads=4)
    fused = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn)
    parameters = stock.init(jax.random.key(1), x, mask=mask)
    difference = jnp.abs(jax.jit(fused.apply)(parameters, x, mask=mask) - stock.apply(parameters, x, mask=mask)).max()
    print(f"largest difference from the stock module: {difference:.1e}")
    assert difference < 1e-5


if __name__ == "__main__":
    main()
