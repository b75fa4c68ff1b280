"""Cross-entropy of a language model's last layer: the logits are a matrix product that is never in memory as a whole."""

import jax
import jax.numpy as jnp

import pallasfuse as pf


@pf.fuse
def linear_cross_entropy(hidden, weights, labels):
    """Loss [rows] in nats of hidden [rows, features], weights [features, vocabulary] and integer labels [rows]."""
    logits = hidden @ weights
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) - label_logits.astype(jnp.float32)


@pf.fuse
def smoothed_linear_cross_entropy(hidden, weights, labels, smoothing=0.1, cap=30.0, penalty=1e-4):
    """As above, with a soft cap of the logits, smoothed labels, and a penalty for large normalisers (z-loss)."""
    logits = (hidden @ weights).astype(jnp.float32)
    logits = cap * jnp.tanh(logits / cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    label_logits = logits[jnp.arange(labels.shape[0]), labels]
    loss = (1.0 - smoothing) * (lse - label_logits) + smoothing * (lse - logits.mean(-1))
    return loss + penalty * lse**2


def main():
    rows, features, vocabulary = 256, 512, 32_000
    hidden = jax.random.normal(jax.random.key(0), (rows, features))
    weights = 3.0 * jax.random.normal(jax.random.key(1), (features, vocabulary)) / features**0.5
    labels = jax.random.randint(jax.random.key(2), (rows,), 0, vocabulary)
    for function in (linear_cross_entropy, smoothed_linear_cross_entropy):
        plan = function.explain(hidden, weights, labels)
        fused, plain = function(hidden, weights, labels), function.__wrapped__(hidden, weights, labels)
        compiled = [jax.jit(f).lower(hidden, weights, labels).compile() for f in (function, function.__wrapped__)]
        ours, theirs = (c.memory_analysis().temp_size_in_bytes / 1e6 for c in compiled)
        error = jnp.abs(fused - plain).max()
        print(f"{plan.kernels[0].name}: kernels: {len(plan.kernels)}, mean loss: {fused.mean():.4f} nats, "
              f"largest difference from plain JAX: {error:.1e}, temporary: {ours:.1f} MB, plain {theirs:.1f} MB")  # fmt: skip
        assert error < 1e-4


if __name__ == "__main__":
    main()
