"""Losses of language models, as users write them who knew nothing of the package."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.foreign_attention import _rms
from benchmarks.workloads.registry import Built, Size, booleans, gain, half, integers, normal, pick, program, weight


@jax.custom_vjp
def _cross_entropy_with_logits(logits: Any, targets: Any, z_loss: float) -> Any:
    sum_exp = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    log_softmax = logits - sum_exp
    loss = -jnp.sum(targets * log_softmax, axis=-1)
    log_z = jnp.squeeze(sum_exp, axis=-1)
    total_z_loss = z_loss * lax.square(log_z)
    return loss + total_z_loss, total_z_loss


def _cross_entropy_forward(logits: Any, targets: Any, z_loss: float) -> Any:
    max_logit = logits.max(axis=-1, keepdims=True)
    shifted = logits - max_logit
    exp_shifted = jnp.exp(shifted)
    sum_exp = jnp.sum(exp_shifted, axis=-1, keepdims=True)
    log_softmax = shifted - jnp.log(sum_exp)
    loss = -jnp.sum(targets * log_softmax, axis=-1)
    log_z = jnp.squeeze(jnp.log(sum_exp) + max_logit, axis=-1)
    total_z_loss = z_loss * lax.square(log_z)
    return (loss + total_z_loss, total_z_loss), (targets, z_loss, exp_shifted, sum_exp, log_softmax, log_z)


def _cross_entropy_backward(saved: Any, cotangents: Any) -> Any:
    g = cotangents[0]
    targets, z_loss, exp_shifted, sum_exp, log_softmax, log_z = saved
    derivative = (1 + 2 * z_loss * log_z)[..., None] * exp_shifted / sum_exp - targets
    g_logits = g[..., None] * derivative
    g_targets = -g[..., None] * log_softmax
    return g_logits.astype(exp_shifted.dtype), g_targets.astype(targets.dtype), jnp.array(0.0)


_cross_entropy_with_logits.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@program("dpo-loss-grad", "foreign-language")
def _dpo(size: Size) -> Built:
    """Direct preference: chosen rows before rejected ones, log probabilities of two models, the policy's gradient."""
    pairs, seq, vocab = pick(size, (2, 512, 32000), (1, 192, 16000), (2, 6, 16))
    dtype = half(size)
    beta, smoothing = 0.1, 0.05

    def sequence_log_probs(logits: Any, labels: Any) -> Any:
        labels, logits = labels[:, 1:], logits[:, :-1]
        loss_mask = labels != -100
        labels = jnp.where(labels == -100, 0, labels)
        per_token = jnp.take_along_axis(
            jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), labels[..., None], axis=2
        ).squeeze(2)
        return (per_token * loss_mask).sum(-1)

    def loss(policy: Any, reference: Any, tokens: Any, completion: Any) -> Any:
        labels = jnp.where(completion, tokens, -100)
        policy_logps = sequence_log_probs(policy, labels)
        reference_logps = lax.stop_gradient(sequence_log_probs(reference, labels))
        ratios = (policy_logps[:pairs] - policy_logps[pairs:]) - (reference_logps[:pairs] - reference_logps[pairs:])
        losses = -jax.nn.log_sigmoid(beta * ratios) * (1 - smoothing) - jax.nn.log_sigmoid(-beta * ratios) * smoothing
        rewards = beta * lax.stop_gradient(policy_logps - reference_logps)
        accuracy = (rewards[:pairs] > rewards[pairs:]).astype(jnp.float32)
        return losses.mean(), {"margin": (rewards[:pairs] - rewards[pairs:]).mean(), "accuracy": accuracy.mean()}

    logits = normal(2 * pairs, seq, vocab, dtype=dtype)
    tokens = integers(2 * pairs, seq, below=vocab)
    return Built(jax.value_and_grad(loss, has_aux=True), (logits, logits, tokens, booleans(2 * pairs, seq)))


@program("grpo-token-loss-grad", "foreign-language")
def _grpo(size: Size) -> Built:
    """Group-relative policy loss from hidden states: clipped ratios, a divergence to the reference, an entropy."""
    groups, samples, seq, n, vocab = pick(size, (2, 4, 256, 1024, 50257), (1, 2, 64, 128, 3001), (2, 2, 4, 8, 13))
    dtype = half(size)
    batch = groups * samples

    def loss(params: Any, hidden: Any, tokens: Any, mask: Any, old: Any, reference: Any, rewards: Any) -> Any:
        grouped = rewards.reshape(groups, samples)
        advantage = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + 1e-4)
        advantage = advantage.reshape(batch, 1)
        logits = (_rms(hidden, params["norm"]) @ params["head"]).astype(jnp.float32) / 0.9
        log_z = jax.scipy.special.logsumexp(logits, axis=-1)
        chosen = jnp.sum(jax.nn.one_hot(tokens, vocab) * logits, axis=-1)
        log_prob = chosen - log_z
        probs = jax.nn.softmax(logits)
        entropy = log_z - jnp.sum(probs * logits, axis=-1)
        old = lax.stop_gradient(log_prob) + 0.1 * old
        reference = lax.stop_gradient(log_prob) + 0.1 * reference
        ratio = jnp.exp(log_prob - old)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)
        kl = jnp.exp(reference - log_prob) - (reference - log_prob) - 1
        per_token = -(surrogate - 0.04 * kl) - 0.001 * entropy
        mask = mask.astype(jnp.float32)
        return ((per_token * mask).sum(-1) / jnp.clip(mask.sum(-1), 1.0)).mean()

    params = {"norm": gain(n, dtype), "head": weight(n, vocab, dtype=dtype)}
    rows = (normal(batch, seq, n, dtype=dtype), integers(batch, seq, below=vocab), booleans(batch, seq))
    per_token = normal(batch, seq)
    return Built(jax.grad(loss, argnums=(0, 1)), (params, *rows, per_token, per_token, normal(batch)))


@program("t5x-smoothed-loss-z-grad", "foreign-language")
def _smoothed(size: Size) -> Built:
    """The gradient of a label-smoothed loss with a term of the normaliser, under a rule of its own; some labels ignored."""
    batch, seq, vocab = pick(size, (4, 512, 32128), (2, 128, 16064), (2, 4, 12))
    smoothing = 0.1

    def loss(logits: Any, labels: Any, keep: Any) -> Any:
        labels = jnp.where(keep, labels, -1)
        weights = (labels >= 0).astype(jnp.float32)
        confidence = 1.0 - smoothing
        low = (1.0 - confidence) / (vocab - 1)
        constant = -(confidence * math.log(confidence) + (vocab - 1) * low * math.log(low + 1e-20))
        one_hot = (labels[..., None] == jnp.arange(vocab).reshape((1,) * labels.ndim + (-1,))).astype(jnp.float32)
        soft = lax.select(one_hot > 0, jnp.full(one_hot.shape, confidence), jnp.full(one_hot.shape, low))
        total, z = _cross_entropy_with_logits(logits, soft, 1e-4)
        total = (total - constant) * weights
        factor = 1.0 / jnp.maximum(weights.sum(), 1.0)
        return total.sum() * factor, (z * weights).sum() * factor

    arguments = normal(batch, seq, vocab, scale=2.0), integers(batch, seq, below=vocab), booleans(batch, seq)
    return Built(jax.value_and_grad(loss, has_aux=True), arguments)


@program("perplexity-vocabulary-chunks", "foreign-language")
def _perplexity(size: Size) -> Built:
    """The perplexity of tokens with logits made a slice of the vocabulary at a time."""
    batch, seq, n, vocab, chunks = pick(size, (1, 1000, 2048, 128256, 8), (1, 100, 256, 8016, 4), (2, 5, 8, 24, 3))
    dtype = half(size)
    width = vocab // chunks

    def perplexity(hidden: Any, head: Any, tokens: Any, mask: Any) -> Any:
        h = hidden[:, :-1].reshape(-1, n)
        targets, keep = tokens[:, 1:].reshape(-1), mask[:, 1:].reshape(-1)

        def body(i: Any, carry: Any) -> Any:
            top, total, picked = carry
            part = lax.dynamic_slice_in_dim(head, i * width, width, axis=0)
            logits = jnp.einsum("td,vd->tv", h, part, preferred_element_type=jnp.float32)
            new_top = jnp.maximum(top, logits.max(-1))
            total = total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[:, None]).sum(-1)
            local = targets - i * width
            here = (local >= 0) & (local < width)
            value = jnp.take_along_axis(logits, jnp.clip(local, 0, width - 1)[:, None], axis=-1)[:, 0]
            return new_top, total, jnp.where(here, value, picked)

        rows = h.shape[0]
        start = jnp.full((rows,), -jnp.inf), jnp.zeros((rows,)), jnp.zeros((rows,))
        top, total, picked = lax.fori_loop(0, chunks, body, start)
        nll = jnp.where(keep, top + jnp.log(total) - picked, 0.0)
        return jnp.exp(nll.sum() / jnp.maximum(keep.sum(), 1)), nll.reshape(batch, seq - 1)

    head = normal(vocab, n, dtype=dtype, scale=n**-0.5)
    rows = integers(batch, seq, below=vocab), booleans(batch, seq)
    return Built(perplexity, (normal(batch, seq, n, dtype=dtype), head, *rows))
