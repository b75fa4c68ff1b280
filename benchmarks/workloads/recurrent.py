"""Models and algorithms that go through a sequence step by step, as they are written with `lax.scan`."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workloads.registry import (
    Built,
    Size,
    add,
    booleans,
    gain,
    half,
    integers,
    normal,
    pick,
    program,
    weight,
)

GROUP = "recurrent"


@program("mamba-block-selective-scan", GROUP)
def _mamba(size: Size) -> Built:
    """A Mamba block: projections, a short convolution, and the selective state space, with 16 numbers of state a channel."""
    batch, length, model, inner, states, rank = pick(
        size, (4, 1024, 768, 1536, 16, 48), (2, 128, 96, 192, 16, 8), (1, 6, 8, 16, 4, 2)
    )
    dtype = half(size)

    def block(w_in, kernel, w_x, w_dt, dt_bias, log_a, d, w_out, norm, u):
        x = u * lax.rsqrt(jnp.mean(jnp.square(u.astype(jnp.float32)), -1, keepdims=True) + 1e-6).astype(u.dtype) * norm
        x, z = jnp.split(x @ w_in, 2, -1)
        padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        x = jax.nn.silu(sum(padded[:, k : k + length] * kernel[k] for k in range(4)))
        dt, b, c = jnp.split((x @ w_x).astype(jnp.float32), (rank, rank + states), -1)
        dt = jax.nn.softplus(dt @ w_dt + dt_bias)
        a = -jnp.exp(log_a)

        def step(h, row):
            x, dt, b, c = row
            h = jnp.exp(dt[..., None] * a) * h + (dt * x)[..., None] * b[:, None, :]
            return h, jnp.einsum("bdn,bn->bd", h, c)

        wide = x.astype(jnp.float32)
        rows = tuple(jnp.swapaxes(t, 0, 1) for t in (wide, dt, b, c))
        _, y = lax.scan(step, jnp.zeros((batch, inner, states)), rows)
        y = (jnp.swapaxes(y, 0, 1) + d * wide).astype(u.dtype)
        return u + (y * jax.nn.silu(z)) @ w_out

    return Built(block, (
        weight(model, 2 * inner, dtype=dtype), normal(4, inner, dtype=dtype, scale=0.5),
        weight(inner, rank + 2 * states, dtype=dtype), weight(rank, inner), normal(inner, offset=-4.0, scale=0.5),
        normal(inner, states, scale=0.3), gain(inner), weight(inner, model, dtype=dtype), gain(model, dtype=dtype),
        normal(batch, length, model, dtype=dtype),
    ))  # fmt: skip


@program("griffin-gated-linear-recurrence", GROUP)
def _griffin(size: Size) -> Built:
    """The recurrent block of Griffin: a gated branch, a convolution, and the real-gated linear recurrent unit."""
    batch, length, model, width = pick(size, (4, 1024, 1024, 1280), (2, 128, 96, 128), (1, 6, 8, 8))
    dtype = half(size)

    def block(w_gate, w_x, kernel, w_r, w_i, decay, w_out, u):
        gate = jax.nn.gelu(u @ w_gate)
        x = jnp.pad(u @ w_x, ((0, 0), (3, 0), (0, 0)))
        x = sum(x[:, k : k + length] * kernel[k] for k in range(4))
        r, i = jax.nn.sigmoid(x @ w_r).astype(jnp.float32), jax.nn.sigmoid(x @ w_i).astype(jnp.float32)
        log_a = -8.0 * r * jax.nn.softplus(decay)
        gated = jnp.sqrt(-jnp.expm1(2 * log_a)) * (i * x.astype(jnp.float32))

        def step(h, row):
            log_a, gated = row
            h = jnp.exp(log_a) * h + gated
            return h, h

        _, h = lax.scan(step, jnp.zeros((batch, width)), (jnp.swapaxes(log_a, 0, 1), jnp.swapaxes(gated, 0, 1)))
        return (gate * jnp.swapaxes(h, 0, 1).astype(u.dtype)) @ w_out

    return Built(block, (
        weight(model, width, dtype=dtype), weight(model, width, dtype=dtype), normal(4, width, dtype=dtype, scale=0.5),
        weight(width, width, dtype=dtype), weight(width, width, dtype=dtype), normal(width), weight(width, model, dtype=dtype),
        normal(batch, length, model, dtype=dtype),
    ))  # fmt: skip


@program("xlstm-matrix-memory", GROUP)
def _xlstm(size: Size) -> Built:
    """The matrix memory of xLSTM, with exponential gates that a running maximum keeps finite."""
    batch, length, model, heads, width = pick(size, (4, 512, 768, 12, 64), (2, 64, 64, 2, 32), (1, 6, 8, 2, 4))
    dtype = half(size)

    def block(w_q, w_k, w_v, w_gates, w_out, u):
        q, k, v = ((u @ w).reshape(batch, length, heads, width).astype(jnp.float32) for w in (w_q, w_k, w_v))
        enter, forget = jnp.split((u @ w_gates).astype(jnp.float32), 2, -1)

        def step(state, row):
            memory, norm, most = state
            q, k, v, enter, forget = row
            kept = jax.nn.log_sigmoid(forget) + most
            new = jnp.maximum(kept, enter)
            old, own = jnp.exp(kept - new)[..., None], jnp.exp(enter - new)[..., None]
            k = k * width**-0.5
            memory = old[..., None] * memory + own[..., None] * k[..., :, None] * v[..., None, :]
            norm = old * norm + own * k
            above = jnp.einsum("bhi,bhij->bhj", q, memory)
            below = jnp.maximum(jnp.abs(jnp.sum(norm * q, -1)), jnp.exp(-new))
            return (memory, norm, new), above / below[..., None]

        state = (jnp.zeros((batch, heads, width, width)), jnp.zeros((batch, heads, width)), jnp.zeros((batch, heads)))
        _, h = lax.scan(step, state, tuple(jnp.swapaxes(t, 0, 1) for t in (q, k, v, enter, forget)))
        return u + jnp.swapaxes(h, 0, 1).reshape(batch, length, heads * width).astype(u.dtype) @ w_out

    return Built(block, (
        *(weight(model, heads * width, dtype=dtype) for _ in range(3)), weight(model, 2 * heads, dtype=dtype),
        weight(heads * width, model, dtype=dtype), normal(batch, length, model, dtype=dtype),
    ))  # fmt: skip


@program("gated-delta-net-layer", GROUP)
def _gated_delta_net(size: Size) -> Built:
    """The gated delta rule, token by token, with normalised keys and queries."""
    batch, length, model, heads, width = pick(size, (2, 1024, 1024, 8, 64), (1, 96, 64, 2, 32), (1, 6, 8, 2, 4))
    dtype = half(size)

    def layer(w_q, w_k, w_v, w_b, w_out, u):
        q, k, v = (jax.nn.silu(u @ w).reshape(batch, length, heads, width).astype(jnp.float32) for w in (w_q, w_k, w_v))
        q, k = (t / (jnp.linalg.norm(t, axis=-1, keepdims=True) + 1e-6) for t in (q, k))
        beta, decay = jnp.split(jax.nn.sigmoid((u @ w_b).astype(jnp.float32)), 2, -1)

        def step(s, row):
            q, k, v, beta, decay = row
            s = decay[..., None, None] * s
            v = beta[..., None] * (v - jnp.einsum("bhij,bhi->bhj", s, k))
            s = s + k[..., :, None] * v[..., None, :]
            return s, jnp.einsum("bhij,bhi->bhj", s, q)

        rows = tuple(jnp.swapaxes(t, 0, 1) for t in (q, k, v, beta, decay))
        _, out = lax.scan(step, jnp.zeros((batch, heads, width, width)), rows)
        return u + jnp.swapaxes(out, 0, 1).reshape(batch, length, heads * width).astype(u.dtype) @ w_out

    return Built(layer, (
        *(weight(model, heads * width, dtype=dtype) for _ in range(3)), weight(model, 2 * heads, dtype=dtype),
        weight(heads * width, model, dtype=dtype), normal(batch, length, model, dtype=dtype),
    ))  # fmt: skip


@program("ppo-advantages-and-loss-grad", GROUP)
def _ppo(size: Size) -> Built:
    """Generalised advantages backwards in time, and the gradient of the clipped loss of a small policy."""
    steps, actors, seen, hidden, actions = pick(size, (256, 2048, 32, 128, 8), (64, 128, 16, 32, 4), (6, 4, 3, 8, 2))

    def loss(params, observed, taken, old, rewards, values, done):
        w1, w2, w_pi, w_v = params

        def backwards(carry, row):
            advantage, following = carry
            reward, value, done = row
            alive = 1.0 - done
            delta = reward + 0.99 * following * alive - value
            advantage = delta + 0.99 * 0.95 * alive * advantage
            return (advantage, value), advantage

        over = done.astype(jnp.float32)
        _, advantages = lax.scan(backwards, (jnp.zeros(actors), values[-1]), (rewards, values[:-1], over), reverse=True)
        returns = lax.stop_gradient(advantages + values[:-1])
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        h = jnp.tanh(jnp.tanh(observed @ w1) @ w2)
        log_pi = jax.nn.log_softmax(h @ w_pi)
        chosen = jnp.sum(jnp.where(taken[..., None] == jnp.arange(actions), log_pi, 0.0), -1)
        ratio = jnp.exp(chosen - old)
        gained = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        entropy = -jnp.sum(jnp.exp(log_pi) * log_pi, -1)
        return jnp.mean(-gained + 0.5 * jnp.square((h @ w_v)[..., 0] - returns) - 0.01 * entropy)

    params = (weight(seen, hidden), weight(hidden, hidden), weight(hidden, actions), weight(hidden, 1))
    return Built(jax.value_and_grad(loss), (
        params, normal(steps, actors, seen), integers(steps, actors, below=actions), normal(steps, actors, scale=0.3, offset=-1.5),
        normal(steps, actors), normal(steps + 1, actors), booleans(steps, actors),
    ))  # fmt: skip


@program("bank-of-kalman-trackers", GROUP)
def _kalman(size: Size) -> Built:
    """Position and velocity of many targets from noisy positions: the two-by-two covariances written out."""
    steps, targets = pick(size, (400, 20000), (100, 500), (6, 5))

    def track(measured, noise, first):
        def step(state, row):
            x, v, pxx, pxv, pvv, fit = state
            z, r = row
            x = x + 0.1 * v
            pxx = pxx + 0.2 * pxv + 0.01 * pvv + 1e-4
            pxv = pxv + 0.1 * pvv + 1e-3
            pvv = pvv + 1e-2
            s = pxx + r
            error = z - x
            kx, kv = pxx / s, pxv / s
            fit = fit - 0.5 * (jnp.log(s) + error * error / s)
            state = x + kx * error, v + kv * error, (1 - kx) * pxx, (1 - kx) * pxv, pvv - kv * pxv, fit
            return state, (state[0], state[2])

        zero = jnp.zeros(targets)
        state, path = lax.scan(
            step, (first, zero, zero + 1.0, zero, zero + 1.0, zero), (measured, jax.nn.softplus(noise))
        )
        return path, state[5]

    return Built(track, (normal(steps, targets), normal(steps, targets), normal(targets)))


@program("viterbi-and-posteriors", GROUP)
def _viterbi(size: Size) -> Built:
    """The best path through a lattice of 48 labels, and the posterior of every label."""
    steps, batch, labels = pick(size, (128, 64, 48), (32, 8, 16), (5, 2, 3))

    def decode(transitions, emissions):
        def forward(alpha, e):
            alpha = jax.nn.logsumexp(alpha[:, :, None] + transitions, axis=1) + e
            return alpha, alpha

        def backward(beta, e):
            return jax.nn.logsumexp(transitions + (beta + e)[:, None, :], axis=2), beta

        def best(score, e):
            both = score[:, :, None] + transitions
            return both.max(1) + e, jnp.argmax(both, 1)

        first = emissions[0]
        _, alphas = lax.scan(forward, first, emissions[1:])
        _, betas = lax.scan(backward, jnp.zeros_like(first), emissions[1:], reverse=True)
        score, came_from = lax.scan(best, first, emissions[1:])
        posteriors = jax.nn.softmax(alphas[:-1] + betas[1:], -1)
        return score.max(-1), came_from, posteriors

    return Built(decode, (normal(labels, labels), normal(steps, batch, labels)))


@program("gru-of-many-short-series", GROUP)
def _gru(size: Size) -> Built:
    """A gated recurrent unit of 64 numbers over many series, as forecasters have it."""
    steps, batch, seen, hidden = pick(size, (168, 1024, 16, 64), (48, 64, 8, 32), (5, 3, 2, 4))

    def forecast(w_x, w_h, bias, w_out, x):
        def step(h, row):
            zx, rx, nx = jnp.split(row, 3, -1)
            zh, rh, nh = jnp.split(h @ w_h, 3, -1)
            z, r = jax.nn.sigmoid(zx + zh), jax.nn.sigmoid(rx + rh)
            h = (1 - z) * jnp.tanh(nx + r * nh) + z * h
            return h, None

        h, _ = lax.scan(step, jnp.zeros((batch, hidden)), x @ w_x + bias)
        return h @ w_out

    return Built(forecast, (
        weight(seen, 3 * hidden), weight(hidden, 3 * hidden), normal(3 * hidden), weight(hidden, 24), normal(steps, batch, seen)
    ))  # fmt: skip


def _gradient(build):
    """A program that is the gradient of the mean square of another one's result, in all its arguments."""

    def of_size(size: Size) -> Built:
        built = build(size)

        def loss(*args):
            return jnp.mean(jnp.square(built.function(*args).astype(jnp.float32)))

        return Built(jax.grad(loss, argnums=tuple(range(len(built.arguments)))), built.arguments)

    return of_size


for _name, _build in (
    ("xlstm-matrix-memory-grad", _xlstm),
    ("gated-delta-net-layer-grad", _gated_delta_net),
    ("griffin-gated-linear-recurrence-grad", _griffin),
    ("gru-of-many-short-series-grad", _gru),
):
    add(_name, GROUP, _gradient(_build))
