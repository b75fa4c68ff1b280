"""A Flax NNX decoder over bytes whose attention is a fused plain function, on real text: this repository's README.

The model is randomly initialised, so its predictions mean nothing; what is compared is the same model with the same
parameters, once with the attention under `pallasfuse.fuse` and once with the plain function.
"""

import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallasfuse as pf

TEXT = Path(__file__).resolve().parent.parent / "README.md"


def attention(q, k, v):
    """Causal attention with a distance slope per head (ALiBi). q, k, v and the result [batch, length, heads, dim]."""
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    slopes = 2.0 ** (-8.0 * jnp.arange(1, q.shape[2] + 1) / q.shape[2])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5 + slopes[:, None, None] * (j - i)
    p = jax.nn.softmax(jnp.where(j <= i, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


fused_attention = pf.fuse(attention)


class Block(nnx.Module):
    """RMSNorm and attention, RMSNorm and a gated MLP, each added to the stream."""

    def __init__(self, width, heads, attend, rngs):
        self.heads = heads
        self.attend = attend
        self.norm_in = nnx.RMSNorm(width, rngs=rngs)
        self.to_qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.to_out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm_mlp = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 8 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        q, k, v = (
            part.reshape(*part.shape[:2], self.heads, -1)
            for part in jnp.split(self.to_qkv(self.norm_in(x)), 3, axis=-1)
        )
        x = x + self.to_out(self.attend(q, k, v).reshape(x.shape))
        gate, value = jnp.split(self.up(self.norm_mlp(x)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * value)


class Decoder(nnx.Module):
    """Bytes [batch, length] -> logits [batch, length, 256]."""

    def __init__(self, attend, *, width=256, heads=8, blocks=2, seed=0):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, attend, rngs) for _ in range(blocks)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.to_logits = nnx.Linear(width, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.to_logits(self.norm(x))


@nnx.jit
def forward(model, tokens):
    return model(tokens)


def loss_nats(logits, tokens):
    """Mean cross-entropy in nats of predicting each next byte."""
    log_p = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()


def continue_greedily(model, prompt, count):
    """The `count` most likely bytes after `prompt`. One compilation: the buffer has its final length from the start."""
    tokens = jnp.zeros((1, len(prompt) + count), jnp.uint8).at[0, : len(prompt)].set(prompt)
    for position in range(len(prompt), len(prompt) + count):
        tokens = tokens.at[0, position].set(forward(model, tokens)[0, position - 1].argmax().astype(jnp.uint8))
    return bytes(np.asarray(tokens[0, len(prompt) :]))


def median_call_ms(model, tokens, repeats=5):
    """Median time of a compiled forward pass."""
    times_ms = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        forward(model, tokens).block_until_ready()
        times_ms.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times_ms[1:])


def main(length=2048):
    text = TEXT.read_bytes()
    text = (text * (length // len(text) + 1))[:length]
    tokens = jnp.asarray(np.frombuffer(text, np.uint8))[None]
    plain, fused = Decoder(attention), Decoder(fused_attention)
    logits, fused_logits = forward(plain, tokens), forward(fused, tokens)
    difference = jnp.abs(logits - fused_logits).max()
    print(f"{length} bytes of {TEXT.name}, 2 blocks, 8 heads of dimension 32")
    losses = [loss_nats(each, tokens) for each in (logits, fused_logits)]
    print(f"loss          plain {losses[0]:.6f}  fused {losses[1]:.6f} nats per byte")
    print(f"logits        largest value {jnp.abs(logits).max():.2f}, largest difference {difference:.1e}")
    print(f"forward pass  plain {median_call_ms(plain, tokens):.1f}  fused {median_call_ms(fused, tokens):.1f} ms")
    prompt = jnp.asarray(np.frombuffer(text[:256], np.uint8))
    continuations = [continue_greedily(model, prompt, 16) for model in (plain, fused)]
    print(
        f"16 greedy bytes after the first 256: {'the same' if continuations[0] == continuations[1] else continuations}"
    )
    assert difference < 1e-4 * jnp.abs(logits).max()


if __name__ == "__main__":
    main()
